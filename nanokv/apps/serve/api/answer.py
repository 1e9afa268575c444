"""One answer as text, token by token: whole characters, with thoughts and tool calls set apart.

    answer = AnswerText(tokenizer, ["\\n\\n"], ThinkSplitter(opened), ToolCalls(["weather"]))
    answer.put(step, last) → [Piece("think", "Hm."), Piece("answer", "Yes", tokens)]

This code runs in the engine's thread, so a stop string ends the request before another token is
computed. Text is held back for as long as it may become a tag or a stop string. A token is
released together with its first visible character.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from nanokv.apps.serve.api.calls import Call, NoCalls, Part, ToolCalls
from nanokv.decoding.draw import Step
from nanokv.decoding.generation import StopStrings
from nanokv.text.tokenizer import StreamDecoder, Tokenizer

# A token, and where its text begins: characters from the start of the generated text.
Placed = tuple[Step, int]


class Piece(NamedTuple):
    """Text that can be shown now, and its tokens. Thoughts and calls carry no tokens."""

    # "think", "answer", "call", "prompt" (the echoed prompt), or "end" (tokens without text)
    kind: str
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
    """A text completion has no thoughts: all of it is answer."""

    thinking = False

    def put(self, text: str) -> list[tuple[str, str]]:
        if not text:
            return []
        return [("answer", text)]

    def flush(self) -> list[tuple[str, str]]:
        return []


class AnswerText:
    """Splits the text of an answer and cuts it at stop strings.

    Stop strings apply to the answer only: a model may write "\\n\\n" in its thoughts or in a
    tool call without ending there. A stop string that is a control token ends the answer anywhere.

    eos, stop_ids: tokens that end the answer and have no text; the request names `stop_ids`.
    include: the stop string, or the stop id unless it is a control token, is part of the answer.
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
        self.stops = StopStrings(stop, include)
        self.splitter = splitter
        self.calls = calls
        hidden = set(eos)
        if not include:
            hidden.update(stop_ids)
        self.decoder = StreamDecoder(tokenizer, skip=tokenizer.control_ids | hidden)
        self.stop_ids = stop_ids
        self._stop_id: int | None = None
        self.thought = 0  # tokens of thoughts, with the tags around them
        self._length = 0  # characters generated so far, tags included
        self._begin: int | None = None  # where the answer begins in the generated text
        # Tokens not yet released, each with the start and the end of its text.
        self._unshown: deque[tuple[Step, int, int]] = deque()
        self._next = 0  # position of the next character of the answer to be shown

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer, or ""."""
        return self.stops.found

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the id from `stop_ids` that ended the answer; None for other ends."""
        return self.stop_string or self._stop_id

    @property
    def complete(self) -> bool:
        """Whether nothing more of the answer will be shown."""
        return bool(self.stop_string) or self.calls.full

    def put(self, step: Step, last: bool) -> list[Piece]:
        """The pieces that can be shown now; with the last token, everything that was held back."""
        begin = self._length
        thinking = self.splitter.thinking
        text = self.decoder.put(step.token) + (self.decoder.flush() if last else "")
        self._length += len(text)
        self._unshown.append((step, begin, self._length))
        if step.token in self.stop_ids:
            self._stop_id = step.token
        pieces = self._split(self.splitter.put(text)) + self._control(step.token)
        self.thought += thinking or self.splitter.thinking
        if last:
            pieces += self._settle()
        if last and not self.stop_string:
            pieces += [self._shown(self.stops.flush()), self._end()]
        return [piece for piece in pieces if piece.text or piece.tokens or piece.call]

    def _control(self, id: int) -> list[Piece]:
        """Handle a token that is not shown.

        A stop string matches across the token only if it contains the token's text. Then tags and
        calls that were held back are released as text first.
        """
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
        """Release what was held back as the possible start of a tag or a call."""
        pieces = self._split(self.splitter.flush())
        return pieces + [piece for part in self.calls.flush() for piece in self._part(part)]

    def _split(self, parts: list[tuple[str, str]]) -> list[Piece]:
        pieces: list[Piece] = []
        for kind, part in parts:
            if kind == "think":
                pieces.append(Piece(kind, part))
            else:
                pieces += self._answer(part)
        return pieces

    def _answer(self, text: str) -> list[Piece]:
        """`text` is the newest part of the answer, at the end of the generated text."""
        if self._begin is None:
            self._begin = self._length - len(text)
        return [piece for part in self.calls.put(text) for piece in self._part(part)]

    def _part(self, part: Part) -> list[Piece]:
        """A call, or text up to the possible start of a stop string, which never spans a call."""
        if self.stop_string:
            return []
        if part.call:
            return [self._shown(self.stops.flush()), Piece("call", "", call=part.call)]
        if not self.stops.held:
            self._next = (self._begin or 0) + part.at
        return [self._shown(self.stops.put(part.text))]

    def _shown(self, text: str) -> Piece:
        begin = self._next
        self._next += len(text)
        if not text:
            return Piece("answer", text)
        tokens = self._tokens(self._next)
        visible = tuple((step, at) for step, at, end in tokens if at >= begin or end > begin)
        return Piece("answer", text, visible)

    def _end(self) -> Piece:
        """The tokens without text, such as the one that ended the answer."""
        tokens = self._tokens(self._length + 1)
        return Piece("end", "", tuple((step, at) for step, at, _ in tokens if at >= self._next))

    def _tokens(self, end: int) -> tuple[tuple[Step, int, int], ...]:
        """Take the unreleased tokens whose text begins before `end`."""
        found = []
        while self._unshown and self._unshown[0][1] < end:
            found.append(self._unshown.popleft())
        return tuple(found)
