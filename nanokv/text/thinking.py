"""Separate thoughts, between `<think>` and `</think>`, from the answer in a stream of text."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer


def incomplete_bytes(data: bytes) -> int:
    """Number of bytes at the end that begin a UTF-8 character without completing it: 0 to 3."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def inside_thinking(prompt_end: str, half_answer: str) -> bool:
    """Whether the next token is inside <think>.

    True if the prompt ends with <think>, or if the half-finished answer has left it open.
    """
    if not half_answer:
        return prompt_end.rstrip().endswith("<think>")
    return half_answer.lstrip().startswith("<think>") and "</think>" not in half_answer


def opens_thinking(tokenizer: "Tokenizer", ids: list[int]) -> bool:
    """Whether this prompt ends with <think>."""
    return inside_thinking(tokenizer.decode(ids[-8:]), "")


class ThinkSplitter:
    """Split a streamed reply into (kind, text) pieces, kind "think" or "answer", without the tags.

    `<think>` only counts before any other text. The first `</think>` closes it; a later one is
    ordinary text, as in Qwen3's template. A tag may be split across pieces, so text that could
    become a tag is held back (at most 8 characters). `opened`: the prompt ended with `<think>`.
    """

    def __init__(self, opened: bool = False):
        self.state = "think" if opened else "start"
        self.held = ""

    def put(self, text: str) -> list[tuple[str, str]]:
        self.held += text
        out: list[tuple[str, str]] = []
        if self.state == "start":
            blank = self.held.lstrip()
            if blank.startswith("<think>"):
                self.state = "think"
                self.held = blank[len("<think>") :]
            elif not "<think>".startswith(blank):
                self.state = "answer"
        if self.state == "think":
            thought, closed, rest = self.held.partition("</think>")
            if closed:
                self._emit(out, thought)
                self.held = rest
                self.state = "gap"
            else:
                end = len(thought) - overlap(thought, "</think>")
                self._emit(out, thought[:end])
                self.held = thought[end:]
        # Newlines between the tag and the answer are dropped.
        if self.state == "gap" and self.held.lstrip("\n"):
            self.held = self.held.lstrip("\n")
            self.state = "answer"
        if self.state == "answer":
            self._emit(out, self.held)
            self.held = ""
        return out

    @property
    def thinking(self) -> bool:
        """Whether the next text is part of a thought."""
        return self.state == "think"

    def flush(self) -> list[tuple[str, str]]:
        """The held-back text, which did not become a tag.

        To call at the end and before a control token.
        """
        out: list[tuple[str, str]] = []
        if self.state != "gap":
            self._emit(out, self.held)
        if self.held and self.state == "start":
            self.state = "answer"
        self.held = ""
        return out

    def _emit(self, out: list[tuple[str, str]], text: str) -> None:
        kind = "think" if self.state == "think" else "answer"
        if text:
            out.append((kind, text))


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    longest = min(len(tag) - 1, len(text))
    for n in range(longest, 0, -1):
        if text.endswith(tag[:n]):
            return n
    return 0


def split_thinking(text: str, opened: bool = False) -> tuple[str, str]:
    """(thinking, answer) of a complete reply."""
    splitter = ThinkSplitter(opened)
    pieces = splitter.put(text) + splitter.flush()
    thinking = "".join(piece for kind, piece in pieces if kind == "think")
    answer = "".join(piece for kind, piece in pieces if kind == "answer")
    return thinking, answer
