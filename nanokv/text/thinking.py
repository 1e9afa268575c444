"""Splits what a model thinks, between `<think>` and `</think>`, from its answer, as the text comes in pieces."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer


def incomplete_bytes(data: bytes) -> int:
    """Bytes at the end that begin a UTF-8 character and do not finish it: 0 to 3."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def inside_thinking(prompt_end: str, half_answer: str) -> bool:
    """Whether the next token stands inside <think>: the prompt ended in it, or the half answer did not close it."""
    if not half_answer:
        return prompt_end.rstrip().endswith("<think>")
    return half_answer.lstrip().startswith("<think>") and "</think>" not in half_answer


def opens_thinking(tokenizer: "Tokenizer", ids: list[int]) -> bool:
    """Whether this prompt ends in <think>."""
    return inside_thinking(tokenizer.decode(ids[-8:]), "")


class ThinkSplitter:
    """Splits a streamed reply into (kind, text) pieces, kind "think" or "answer"; the two tags are dropped.

    `<think>` counts only before any other text, and the first `</think>` closes it: a later one is ordinary text, as
    in Qwen3's template. A tag may be cut over pieces, so what could still become one is held back (≤ 8 characters).
    `opened` says that the prompt itself ended in `<think>`.
    """

    def __init__(self, opened: bool = False):
        self.state, self.held = ("think" if opened else "start"), ""

    def put(self, text: str) -> list[tuple[str, str]]:
        self.held += text
        out: list[tuple[str, str]] = []
        if self.state == "start":
            blank = self.held.lstrip()
            if blank.startswith("<think>"):
                self.state, self.held = "think", blank[len("<think>") :]
            elif not "<think>".startswith(blank):
                self.state = "answer"
        if self.state == "think":
            thought, closed, rest = self.held.partition("</think>")
            keep = 0 if closed else overlap(thought, "</think>")
            self._emit(out, thought[: len(thought) - keep])
            self.held = rest if closed else thought[len(thought) - keep :]
            self.state = "gap" if closed else "think"
        # Newlines between tag and answer are layout.
        if self.state == "gap" and self.held.lstrip("\n"):
            self.state, self.held = "answer", self.held.lstrip("\n")
        if self.state == "answer":
            self._emit(out, self.held)
            self.held = ""
        return out

    @property
    def thinking(self) -> bool:
        """Whether what comes now is a thought."""
        return self.state == "think"

    def flush(self) -> list[tuple[str, str]]:
        """What was held back, at the end or where a control token stands: it did not become a tag."""
        out: list[tuple[str, str]] = []
        if self.state != "gap":
            self._emit(out, self.held)
        if self.held and self.state == "start":
            self.state = "answer"
        self.held = ""
        return out

    def _emit(self, out, text):
        if text:
            out.append(("think" if self.state == "think" else "answer", text))


def overlap(text: str, tag: str) -> int:
    """Characters at the end of the text that are the beginning of the tag, and not all of it."""
    return next(
        (n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0
    )


def split_thinking(text: str, opened: bool = False) -> tuple[str, str]:
    """(thinking, answer) of one whole reply."""
    splitter = ThinkSplitter(opened)
    pieces = splitter.put(text) + splitter.flush()
    thinking, answer = ("".join(t for k, t in pieces if k == kind) for kind in ("think", "answer"))
    return thinking, answer
