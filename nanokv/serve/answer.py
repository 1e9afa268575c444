"""The text of one answer, token by token: whole characters, thoughts set apart, stop strings cut off.

    answer = AnswerText(tokenizer, ["\\n\\n"], ThinkSplitter(opened))
    answer.put(token, last) → [("think", "Hm."), ("answer", "Yes")]

It runs in the engine's thread, so that a stop string ends the request before another token is computed.
"""

from collections.abc import Sequence
from typing import Protocol

from nanokv.decoding.generation import StopStrings
from nanokv.text.tokenizer import StreamDecoder, Tokenizer

Piece = tuple[str, str]  # "think" or "answer", text


class Splitter(Protocol):
    """A ThinkSplitter, or NoThoughts."""

    def put(self, text: str) -> list[Piece]: ...
    def flush(self) -> list[Piece]: ...


class NoThoughts:
    """The continuation of a text is all answer."""

    def put(self, text: str) -> list[Piece]:
        return [("answer", text)] if text else []

    def flush(self) -> list[Piece]:
        return []


class AnswerText:
    """Stop strings are looked for in the answer only: a model may think about "\\n\\n" without being stopped by it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], splitter: Splitter, eos: Sequence[int] = ()):
        self.stops, self.splitter = StopStrings(stop), splitter
        self.decoder = StreamDecoder(tokenizer, skip=tokenizer.control_ids | set(eos))

    @property
    def stop_string(self) -> str:
        """The one that ended it, or ""."""
        return self.stops.found

    def put(self, token: int, last: bool) -> list[Piece]:
        """What can be shown by now; with the last token, all that was held back."""
        text = self.decoder.put(token) + (self.decoder.flush() if last else "")
        split = self.splitter.put(text) + (self.splitter.flush() if last else [])
        shown = [(kind, text if kind == "think" else self._until_stop(text)) for kind, text in split]
        if last and not self.stop_string:
            shown.append(("answer", self.stops.flush()))
        return [(kind, text) for kind, text in shown if text]

    def _until_stop(self, text: str) -> str:
        return "" if self.stop_string else self.stops.put(text)
