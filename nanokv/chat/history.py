"""What a new prompt shares with the ids that a cache already holds, and who said which token.

A chat template may rewrite earlier turns (Qwen3's drops `<think>` from history), and an answer that was sampled token
by token may encode differently when it is read back as text. So a new prompt is not always an extension of the cached
ids: only the longest common prefix may be kept. This file finds it, says where and why it broke, labels every token
with the role that it belongs to, and splits thinking from the answer. Lists of ints and text; no torch.
"""

import codecs


def common_prefix(cached, new):
    """Number of leading ids that both lists share. O(n) integer compares, no model work."""
    for n, (a, b) in enumerate(zip(cached, new, strict=False)):
        if a != b:
            return n
    return min(len(cached), len(new))


def token_roles(tokenizer, ids, messages):
    """One (letter, turn) per id: s(ystem), u(ser), a(ssistant); a turn begins with its user message, the first is 1.

    Message texts are found in the rendered prompt from left to right; what lies between two of them (the template's
    markers) goes to the earlier one up to the first newline and to the later one after it.
    """
    owners = _character_owners("".join(pieces := _pieces(tokenizer, ids)), messages)
    roles, position = [], 0
    for piece in pieces:
        roles.append(owners[min(position, len(owners) - 1)] if owners else ("a", 1))
        position += len(piece)
    return roles


def _pieces(tokenizer, ids):
    """Text that each id completes; an id in the middle of a character completes nothing."""
    from nanokv.text.tokenizer import StreamDecoder

    decoder = StreamDecoder(tokenizer)
    return [decoder.put(token) for token in ids]


def _character_owners(text, messages):
    owners, position, turn, before = [], 0, 0, ("s", 0)
    for message in messages:
        turn += message["role"] == "user"
        content = message["content"].split("</think>")[-1].strip()
        start = text.find(content, position)
        if start < 0:                                    # the template left it out or changed it: no span of its own
            continue
        gap = text[position:start]
        split = gap.find("\n") + 1 if owners else 0
        owner = (message["role"][0], turn)
        owners += [before] * split + [owner] * (len(gap) - split + len(content))
        position, before = start + len(content), owner
    split = text[position:].find("\n") + 1
    return owners + [before] * split + [("a", turn)] * (len(text) - position - split)


def why_broken(tokenizer, cached, new, roles, n):
    """One sentence on why only n of the cached ids could be kept; "" when nothing was lost."""
    if n >= len(cached):
        return ""
    turn = roles[n][1] if n < len(roles) else 1
    where = f"common prefix {n:,} of {len(cached):,}"
    old, fresh = tokenizer.decode(cached[n:n + 64]), tokenizer.decode(new[n:n + 64])
    if old.lstrip().startswith("<think>") != fresh.lstrip().startswith("<think>"):
        change = "dropped" if old.lstrip().startswith("<think>") else "added"
        return f"template rewrote turn {turn} (think {change}): {where}"
    span = min(len(old), len(fresh), 24)
    if span and old[:span] == fresh[:span]:
        return f"turn {turn} reads the same but encodes to other tokens: {where}"
    return f"template rewrote turn {turn}: {where}"


def incomplete_bytes(data: bytes) -> int:
    """Bytes at the end that begin a UTF-8 character and do not finish it: 0 to 3."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def inside_thinking(prompt_end, half_answer) -> bool:
    """Whether the next token stands inside <think>: the prompt ended in it, or the half answer did not close it."""
    if not half_answer:
        return prompt_end.rstrip().endswith("<think>")
    return half_answer.lstrip().startswith("<think>") and "</think>" not in half_answer


class ThinkSplitter:
    """Splits a streamed reply into (kind, text) pieces, kind "think" or "answer"; the two tags are dropped.

    `<think>` counts only before any other text, and the first `</think>` closes it: a later one is ordinary text, as
    in Qwen3's template. A tag may be cut over pieces, so what could still become one is held back (≤ 8 characters).
    `opened` says that the prompt itself ended in `<think>`.
    """

    def __init__(self, opened=False):
        self.state, self.held = ("think" if opened else "start"), ""

    def put(self, text):
        self.held += text
        out = []
        if self.state == "start":
            blank = self.held.lstrip()
            if blank.startswith("<think>"):
                self.state, self.held = "think", blank[len("<think>"):]
            elif not "<think>".startswith(blank):
                self.state = "answer"
        if self.state == "think":
            thought, closed, rest = self.held.partition("</think>")
            keep = 0 if closed else _tail_that_may_become("</think>", thought)
            self._emit(out, thought[:len(thought) - keep])
            self.held = rest if closed else thought[len(thought) - keep:]
            self.state = "gap" if closed else "think"
        if self.state == "gap" and self.held.lstrip("\n"):     # newlines between tag and answer are layout
            self.state, self.held = "answer", self.held.lstrip("\n")
        if self.state == "answer":
            self._emit(out, self.held)
            self.held = ""
        return out

    def flush(self):
        """What was held back at the end: it did not become a tag."""
        out = []
        if self.state != "gap":
            self._emit(out, self.held)
        self.held = ""
        return out

    def _emit(self, out, text):
        if text:
            out.append(("think" if self.state == "think" else "answer", text))


def _tail_that_may_become(tag, text):
    return next((k for k in range(len(tag) - 1, 0, -1) if text.endswith(tag[:k])), 0)


def split_thinking(text, opened=False):
    """(thinking, answer) of one whole reply."""
    splitter = ThinkSplitter(opened)
    pieces = splitter.put(text) + splitter.flush()
    return tuple("".join(t for k, t in pieces if k == kind) for kind in ("think", "answer"))
