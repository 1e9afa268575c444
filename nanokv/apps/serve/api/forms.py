"""Chat and text completions as OpenAI's objects, in one response or in chunks.

    form = ChatForm(prepared.model)
    form.opening(i), form.chunk(i, pieces), …, form.closing(i, ended), form.usage(…)   a stream
    form.whole([(pieces, ended), …], …)                                            one response

`i` is the choice's index: chunks of several answers to one request are interleaved.
"""

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from nanokv.apps.serve.api import logprobs
from nanokv.apps.serve.api.answer import Piece
from nanokv.decoding import completion


def data(value: dict) -> bytes:
    """One event of a stream. ASCII only: JSON may hold U+2028, where some clients split lines."""
    return b"data: " + json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class ChatForm:
    """chat.completion and chat.completion.chunk, with reasoning_content and tool_calls."""

    kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, model: str, include_usage: bool = False, shown: logprobs.Shown = logprobs.none
    ):
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
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

    def chunk(self, index: int, pieces: Sequence[Piece]) -> bytes:
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

    def usage(self, usage: dict) -> bytes:
        """The usage chunk, which is sent only on request."""
        return self._event([], usage=usage)

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

    def chunk(self, index: int, pieces: Sequence[Piece]) -> bytes:
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


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Merge neighbouring pieces of one kind; calls stay separate."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].kind == piece.kind != "call":
            last = found.pop()
            piece = Piece(piece.kind, last.text + piece.text, last.tokens + piece.tokens)
        found.append(piece)
    return found
