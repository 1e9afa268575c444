"""The text of one answer, token by token: whole characters, thoughts set apart, stop strings cut off.

    answer = AnswerText(tokenizer, ["\\n\\n"], ThinkSplitter(opened))
    answer.put(step, last) → [Piece("think", "Hm."), Piece("answer", "Yes", tokens)]

It runs in the engine's thread, so that a stop string ends the request before another token is computed. Text is held
back as long as it may become a tag or a stop string; a token comes out with the first character of it that is shown.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from nanokv.decoding.draw import Step
from nanokv.decoding.generation import StopStrings
from nanokv.text.tokenizer import StreamDecoder, Tokenizer

Placed = tuple[Step, int]  # a token, and where its text begins: characters from the beginning of what was generated


class Piece(NamedTuple):
    """Text that can be shown by now, and the tokens that it came from; thoughts come without theirs."""

    kind: str  # "think", "answer"; "prompt", which is repeated; "end": tokens without text
    text: str
    tokens: tuple[Placed, ...] = ()


class Splitter(Protocol):
    """A ThinkSplitter, or NoThoughts."""

    def put(self, text: str) -> list[tuple[str, str]]: ...
    def flush(self) -> list[tuple[str, str]]: ...


class NoThoughts:
    """The continuation of a text is all answer."""

    def put(self, text: str) -> list[tuple[str, str]]:
        return [("answer", text)] if text else []

    def flush(self) -> list[tuple[str, str]]:
        return []


class AnswerText:
    """Stop strings are looked for in the answer only: a model may think about "\\n\\n" without being stopped by it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], splitter: Splitter, eos: Sequence[int] = ()):
        self.stops, self.splitter = StopStrings(stop), splitter
        self.decoder = StreamDecoder(tokenizer, skip=tokenizer.control_ids | set(eos))
        self._length = 0  # characters generated, tags and all
        self._unshown: deque[tuple[Step, int, int]] = deque()  # tokens with the first and the last place of their text
        self._next = 0  # place of the next character of the answer that is shown

    @property
    def stop_string(self) -> str:
        """The one that ended it, or ""."""
        return self.stops.found

    def put(self, step: Step, last: bool) -> list[Piece]:
        """What can be shown by now; with the last token, all that was held back."""
        begin = self._length
        text = self.decoder.put(step.token) + (self.decoder.flush() if last else "")
        self._length += len(text)
        self._unshown.append((step, begin, self._length))
        split = self.splitter.put(text) + (self.splitter.flush() if last else [])
        pieces = [Piece(kind, text) if kind == "think" else self._answer(text) for kind, text in split]
        if last and not self.stop_string:
            pieces += [self._shown(self.stops.flush()), self._end()]
        return [piece for piece in pieces if piece.text or piece.tokens]

    def _answer(self, text: str) -> Piece:
        """The newest characters of the answer, which once begun is the end of all that was generated."""
        if not self.stops.held:
            self._next = self._length - len(text)
        return self._shown("" if self.stop_string else self.stops.put(text))

    def _shown(self, text: str) -> Piece:
        begin, self._next = self._next, self._next + len(text)
        tokens = self._tokens(self._next) if text else ()
        return Piece("answer", text, tuple((step, at) for step, at, end in tokens if at >= begin or end > begin))

    def _end(self) -> Piece:
        """Tokens without text: the one that ended the answer."""
        return Piece("end", "", tuple((step, at) for step, at, _ in self._tokens(self._length + 1) if at >= self._next))

    def _tokens(self, end: int) -> tuple:
        """Those whose text begins before `end`; each once."""
        found = []
        while self._unshown and self._unshown[0][1] < end:
            found.append(self._unshown.popleft())
        return tuple(found)
