"""The text of one answer, token by token: whole characters, thoughts and tool calls set apart, stop strings cut off.

    answer = AnswerText(tokenizer, ["\\n\\n"], ThinkSplitter(opened), ToolCalls(["weather"]))
    answer.put(step, last) → [Piece("think", "Hm."), Piece("answer", "Yes", tokens)]

It runs in the engine's thread, so that a stop string ends the request before another token is computed. Text is held
back as long as it may become a tag or a stop string; a token comes out with the first character of it that is shown.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from nanokv.apps.serve.api.calls import Call, NoCalls, Part, ToolCalls
from nanokv.decoding.draw import Step
from nanokv.decoding.generation import StopStrings
from nanokv.text.tokenizer import StreamDecoder, Tokenizer

# A token, and where its text begins: characters from the beginning of what was generated.
Placed = tuple[Step, int]


class Piece(NamedTuple):
    """Text that can be shown by now, and the tokens that it came from; thoughts and calls come without theirs."""

    kind: str  # "think", "answer", "call"; "prompt", which is repeated; "end": tokens without text
    text: str
    tokens: tuple[Placed, ...] = ()
    call: Call | None = None


class Splitter(Protocol):
    """A ThinkSplitter, or NoThoughts."""

    @property
    def thinking(self) -> bool: ...
    def put(self, text: str) -> list[tuple[str, str]]: ...
    def flush(self) -> list[tuple[str, str]]: ...


class NoThoughts:
    """The continuation of a text is all answer."""

    thinking = False

    def put(self, text: str) -> list[tuple[str, str]]:
        return [("answer", text)] if text else []

    def flush(self) -> list[tuple[str, str]]:
        return []


class AnswerText:
    """Stop strings are looked for in the answer only: a model may think about "\\n\\n", or call a function with it,
    without being stopped by it. One that is a control token ends an answer wherever the model writes it.

    eos, stop_ids: the tokens that end it, without text; the latter are named by the request. `include`: what the
    request names, a stop string or one of stop_ids that is no control token, is part of the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        splitter: Splitter,
        calls: NoCalls | ToolCalls,
        eos: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        include: bool = False,
    ):
        self.stops, self.splitter, self.calls = StopStrings(stop, include), splitter, calls
        hidden = {*eos, *(() if include else stop_ids)}
        self.decoder = StreamDecoder(tokenizer, skip=tokenizer.control_ids | hidden)
        self.stop_ids = stop_ids
        self._stop_id: int | None = None
        self._length = 0  # characters generated, tags and all
        self._begin: int | None = None  # where the answer begins among them
        # Tokens with the first and the last place of their text.
        self._unshown: deque[tuple[Step, int, int]] = deque()
        self._next = 0  # place of the next character of the answer that is shown

    @property
    def stop_string(self) -> str:
        """The one that ended it, or ""."""
        return self.stops.found

    @property
    def stop_reason(self) -> str | int | None:
        """What ended it of that which the request names: a stop string, or one of stop_ids."""
        return self.stop_string or self._stop_id

    @property
    def complete(self) -> bool:
        """Whether nothing that followed would be shown."""
        return bool(self.stop_string) or self.calls.full

    def put(self, step: Step, last: bool) -> list[Piece]:
        """What can be shown by now; with the last token, all that was held back."""
        begin = self._length
        text = self.decoder.put(step.token) + (self.decoder.flush() if last else "")
        self._length += len(text)
        self._unshown.append((step, begin, self._length))
        if step.token in self.stop_ids:
            self._stop_id = step.token
        pieces = self._split(self.splitter.put(text)) + self._control(step.token)
        if last:
            pieces += self._settle()
        if last and not self.stop_string:
            pieces += [self._shown(self.stops.flush()), self._end()]
        return [piece for piece in pieces if piece.text or piece.tokens or piece.call]

    def _control(self, id: int) -> list[Piece]:
        """A token that is not shown. No stop string reaches across it unless it contains its text; then no tag and no
        call does either."""
        text = self.decoder.hidden(id)
        elsewhere = self.splitter.thinking or self.calls.open
        if not text or (elsewhere and not self.stops.inside(text)):
            return []
        if not self.stops.meets(text):
            return [self._shown(self.stops.flush())]
        pieces = self._settle()
        if not self.stops.held:
            self._next = self._length
        return [*pieces, self._shown(self.stops.put(text, shown=False))]

    def _settle(self) -> list[Piece]:
        """All that was held back as the possible beginning of a tag or a call."""
        pieces = self._split(self.splitter.flush())
        return pieces + [piece for part in self.calls.flush() for piece in self._part(part)]

    def _split(self, parts: list[tuple[str, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for kind, part in parts:
            pieces += [Piece(kind, part)] if kind == "think" else self._answer(part)
        return pieces

    def _answer(self, text: str) -> list[Piece]:
        """The newest characters of the answer, which once begun is the end of all that was generated."""
        if self._begin is None:
            self._begin = self._length - len(text)
        return [piece for part in self.calls.put(text) for piece in self._part(part)]

    def _part(self, part: Part) -> list[Piece]:
        """Text, as far as no stop string can begin with it; or a call, which no stop string reaches across."""
        if self.stop_string:
            return []
        if part.call:
            return [self._shown(self.stops.flush()), Piece("call", "", call=part.call)]
        if not self.stops.held:
            self._next = (self._begin or 0) + part.at
        return [self._shown(self.stops.put(part.text))]

    def _shown(self, text: str) -> Piece:
        begin, self._next = self._next, self._next + len(text)
        tokens = self._tokens(self._next) if text else ()
        return Piece(
            "answer",
            text,
            tuple((step, at) for step, at, end in tokens if at >= begin or end > begin),
        )

    def _end(self) -> Piece:
        """Tokens without text: the one that ended the answer."""
        return Piece(
            "end",
            "",
            tuple((step, at) for step, at, _ in self._tokens(self._length + 1) if at >= self._next),
        )

    def _tokens(self, end: int) -> tuple:
        """Those whose text begins before `end`; each once."""
        found = []
        while self._unshown and self._unshown[0][1] < end:
            found.append(self._unshown.popleft())
        return tuple(found)
