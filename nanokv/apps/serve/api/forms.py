"""Chat and text completions as OpenAI's objects, in one response or in chunks.

    form = ChatForm(prepared.model)
    form.opening(i), form.chunk(i, pieces, usage), …, form.closing(i, ended), form.ending(usage)
    form.whole([(pieces, ended), …], usage)

The first line is a stream, the second one response. `i` is the choice's index: chunks of several
answers to one request are interleaved. `Form` is what every address of the server writes with.
"""

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from nanokv.apps.serve.api import logprobs
from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.prompts import Prepared
from nanokv.decoding import completion
from nanokv.text.tokenizer import Tokenizer


def data(value: dict) -> bytes:
    """One event of a stream. ASCII only: JSON may hold U+2028, where some clients split lines."""
    return b"data: " + json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


def written(events: Iterable[dict[str, Any]]) -> bytes:
    """Events with names, as bytes of a stream. The type of each is its name."""
    found = b""
    for event in events:
        found += f"event: {event['type']}\n".encode() + data(event)
    return found


class Form(Protocol):
    """Writes the answers to one request, as a stream or as one object.

    usage: the token counts so far, as completion.usage() gives them. ended: the finish_reason and
    the stop_reason of an answer, as completion.end() gives them.
    """

    keepalive: bytes  # sent when the engine has been silent for a while

    def opening(self, index: int) -> bytes:
        """The bytes before the first token of an answer."""
        ...

    def chunk(self, index: int, pieces: Sequence[Piece], usage: dict) -> bytes:
        """The bytes of pieces that arrived together."""
        ...

    def closing(self, index: int, ended: dict, **facts: Any) -> bytes:
        """The bytes after the last token of an answer."""
        ...

    def ending(self, usage: dict) -> bytes:
        """The bytes after the last answer."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last bytes of a stream that an error ends."""
        ...

    def whole(self, answers: Iterable[tuple[list[Piece], dict]], usage: dict, **facts: Any) -> dict:
        """All answers in one object."""
        ...


class ChatForm:
    """chat.completion and chat.completion.chunk, with reasoning_content and tool_calls."""

    kind = "chat.completion.chunk"
    prefix = "chatcmpl"
    keepalive = b": keepalive\n\n"

    def __init__(
        self, model: str, include_usage: bool = False, shown: logprobs.Shown = logprobs.none
    ):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.include_usage = include_usage
        # OpenAI sends null in each chunk but the last.
        self.nothing = {"usage": None} if include_usage else {}
        self.shown = shown  # tokens → `logprobs`

    def _event(self, choices: list[dict], **more: Any) -> bytes:
        top = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return data(top | self.nothing | more)

    def _choice(self, index: int, said: dict, ended: dict | None = None) -> dict:
        return (
            {"index": index} | {"logprobs": None} | said | {"finish_reason": None} | (ended or {})
        )

    def opening(self, index: int) -> bytes:
        """The chunk before the first token."""
        return self._event([self._choice(index, {"delta": {"role": "assistant", "content": ""}})])

    def chunk(self, index: int, pieces: Sequence[Piece], usage: dict) -> bytes:
        """Pieces that arrived together; thoughts and answer get one delta each."""
        said = [one for piece in joined(pieces) for one in self._deltas(piece)]
        return b"".join(self._event([self._choice(index, one)]) for one in said)

    def _deltas(self, piece: Piece) -> list[dict]:
        if piece.call:
            return [{"delta": {"tool_calls": [part]}} for part in piece.call.deltas]
        if piece.kind == "think":
            return [{"delta": {"reasoning_content": piece.text}}]
        if not piece.text:
            return []
        return [{"delta": {"content": piece.text}, "logprobs": self.shown(piece.tokens, 0)}]

    def closing(self, index: int, ended: dict, **facts: Any) -> bytes:
        """The chunk after the last token."""
        return self._event([self._choice(index, {"delta": {}}, ended)], **facts)

    def ending(self, usage: dict) -> bytes:
        """The usage chunk, which is sent only on request, and the mark of the end."""
        done = b"data: [DONE]\n\n"
        if not self.include_usage:
            return done
        return self._event([], usage=usage) + done

    def failed(self, error: ApiError) -> bytes:
        """OpenAI's error object as an event."""
        return data(error.body)

    def whole(self, answers: Iterable[tuple[list[Piece], dict]], usage: dict, **facts: Any) -> dict:
        """All answers in one object."""
        choices = [
            self._choice(i, self._said(pieces), ended) for i, (pieces, ended) in enumerate(answers)
        ]
        return completion.completion(self.model, choices, usage, self.id, **facts)

    def _said(self, pieces: list[Piece]) -> dict:
        texts = {
            kind: "".join(piece.text for piece in pieces if piece.kind == kind)
            for kind in ("think", "answer")
        }
        tokens = [token for piece in pieces if piece.kind == "answer" for token in piece.tokens]
        calls = [piece.call.message for piece in pieces if piece.call]
        said = completion.assistant(texts["answer"], texts["think"]) | {
            "logprobs": self.shown(tokens, 0)
        }
        if calls:
            said["message"] |= {"content": texts["answer"] or None, "tool_calls": calls}
        return said


class TextForm(ChatForm):
    """text_completion: the continuation of a prompt, with the prompt before it under `echo`."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.before: dict[int, int] = {}  # index → characters of the echoed prompt

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, pieces: Sequence[Piece], usage: dict) -> bytes:
        said = [self._text(index, [piece]) for piece in joined(pieces)]
        return b"".join(
            self._event([self._choice(index, one)])
            for one in said
            if one["text"] or one["logprobs"]
        )

    def closing(self, index: int, ended: dict, **facts: Any) -> bytes:
        return self._event([self._choice(index, {"text": ""}, ended)], **facts)

    def whole(self, answers: Iterable[tuple[list[Piece], dict]], usage: dict, **facts: Any) -> dict:
        said = [(self._text(i, pieces), ended) for i, (pieces, ended) in enumerate(answers)]
        choices = [self._choice(i, text, ended) for i, (text, ended) in enumerate(said)]
        return completion.completion(self.model, choices, usage, self.id, **facts)

    def _text(self, index: int, pieces: list[Piece]) -> dict:
        lists: list[dict] = []
        for piece in pieces:
            before = 0
            if piece.kind != "prompt":
                before = self.before.get(index, 0)
            lists.append(self.shown(piece.tokens, before) or {})
            if piece.kind == "prompt":
                self.before[index] = len(piece.text)
        merged = {}
        if lists:
            merged = {name: [one for part in lists for one in part[name]] for name in lists[0]}
        return {"text": "".join(piece.text for piece in pieces), "logprobs": merged or None}


def chat_form(prepared: Prepared, tokenizer: Tokenizer) -> ChatForm:
    """The form of /v1/chat/completions."""
    shown = shown_by(logprobs.Content, prepared, tokenizer)
    return ChatForm(prepared.model, prepared.asked.include_usage, shown)


def text_form(prepared: Prepared, tokenizer: Tokenizer) -> TextForm:
    """The form of /v1/completions."""
    shown = shown_by(logprobs.Legacy, prepared, tokenizer)
    return TextForm(prepared.model, prepared.asked.include_usage, shown)


def shown_by(
    kind: type[logprobs.Content] | type[logprobs.Legacy], prepared: Prepared, tokenizer: Tokenizer
) -> logprobs.Shown:
    """Tokens → the `logprobs` of this kind of answer, if the request asks for them."""
    likely = prepared.asked.logprobs
    if likely is None:
        return logprobs.none
    return kind(tokenizer, likely)


def ending(
    wanted: int | None, reason: str, new: int, stop: str | int | None, calls: int
) -> dict[str, Any]:
    """The finish_reason, and the stop string or token that ended the answer.

    wanted: tokens that the request asks for; new: tokens of the answer; calls: of tools.
    """
    if reason == "length" and (wanted is None or new < wanted):
        reason = "context"  # the context ended before the tokens that were asked for
    found = completion.end(reason, stop)
    if calls and found["finish_reason"] == "stop":
        return found | {"finish_reason": "tool_calls"}
    return found


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge neighbouring pieces of one kind; calls stay separate."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].kind == piece.kind != "call":
            last = found.pop()
            piece = Piece(piece.kind, last.text + piece.text, last.tokens + piece.tokens)
        found.append(piece)
    return found
