"""What a new prompt shares with the ids that a cache already holds, and the role of each token.

A chat template may rewrite earlier turns (Qwen3's drops `<think>` from history), and the text of a
sampled answer may encode to other tokens than the sampled ones. So a new prompt does not always
extend the cached ids, and only the longest common prefix can be kept. This file explains where and
why the prefix broke, and labels every token with the role that it belongs to. No torch.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from nanokv.text.ids import common_prefix

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer

__all__ = ["common_prefix", "token_roles", "why_broken"]


class Role(NamedTuple):
    """Whose token it is: s(ystem), u(ser) or a(ssistant), and in which turn."""

    letter: str
    turn: int  # begins with a user message; the first is 1, the system prompt is 0


def token_roles(
    tokenizer: "Tokenizer", ids: list[int], messages: list[dict[str, Any]]
) -> list[Role]:
    """The role of each id.

    Message texts are searched in the rendered prompt from left to right. The template's markers
    between two messages belong to the earlier message up to the first newline, and to the later one
    after it. Text before the first message is the system's, except for its last line, which is the
    marker of that message.
    """
    pieces = _pieces(tokenizer, ids)
    owners = _character_owners("".join(pieces), messages)
    if not owners:
        return [Role("a", 1)] * len(pieces)
    roles = []
    position = 0
    for piece in pieces:
        roles.append(owners[min(position, len(owners) - 1)])
        position += len(piece)
    return roles


def _pieces(tokenizer: "Tokenizer", ids: list[int]) -> list[str]:
    """The text that each id completes; an id in the middle of a character completes none."""
    from nanokv.text.tokenizer import StreamDecoder

    decoder = StreamDecoder(tokenizer)
    return [decoder.put(token) for token in ids]


def _character_owners(text: str, messages: list[dict[str, Any]]) -> list[Role]:
    """The role of each character of a rendered prompt."""
    owners: list[Role] = []
    position = 0
    before = Role("s", 0)
    turn = 0
    for message in messages:
        turn += message["role"] == "user"
        content = message["content"].split("</think>")[-1].strip()
        start = text.find(content, position)
        if start < 0:  # the template has omitted or changed the message
            continue
        gap = text[position:start]
        if owners:
            split = gap.find("\n") + 1
        else:
            split = gap.rstrip().rfind("\n") + 1
        owner = Role(message["role"][0], turn)
        owners += [before] * split + [owner] * (len(gap) - split + len(content))
        position = start + len(content)
        before = owner
    split = text[position:].find("\n") + 1
    return owners + [before] * split + [Role("a", turn)] * (len(text) - position - split)


def why_broken(
    tokenizer: "Tokenizer", cached: list[int], new: list[int], roles: list[Role], n: int
) -> str:
    """One sentence on why only n of the cached ids could be kept; "" if all were kept."""
    if n >= len(cached):
        return ""
    turn = 1
    if n < len(roles):
        _, turn = roles[n]
    where = f"common prefix {n:,} of {len(cached):,}"
    old = tokenizer.decode(cached[n : n + 64])
    fresh = tokenizer.decode(new[n : n + 64])
    if old.lstrip().startswith("<think>") != fresh.lstrip().startswith("<think>"):
        change = "dropped" if old.lstrip().startswith("<think>") else "added"
        return f"template rewrote turn {turn} (think {change}): {where}"
    span = min(len(old), len(fresh), 24)
    if span and old[:span] == fresh[:span]:
        return f"turn {turn} reads the same but encodes to other tokens: {where}"
    return f"template rewrote turn {turn}: {where}"
