"""The two kinds of answer in OpenAI's objects: a message or a text, as a whole or in chunks.

    form = ChatForm(prepared.model)
    form.opening(), form.chunk(pieces), …, form.closing(reason), form.usage(…)       of a stream
    form.whole(pieces, …)                                                            of one response
"""

import json
import time
import uuid

from nanokv.decoding import completion
from nanokv.serve.answer import Piece


def data(value: dict) -> bytes:
    """One event of a stream. ASCII only: some clients split lines at U+2028, which JSON lets stand."""
    return b"data: " + json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class ChatForm:
    """chat.completion and chat.completion.chunk: thoughts stand in reasoning_content."""

    kind, prefix = "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: str, include_usage: bool = False):
        self.id, self.created, self.model = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time()), model
        self.nothing = {"usage": None} if include_usage else {}  # OpenAI: null in each chunk but the last

    def _event(self, choices: list[dict], **more) -> bytes:
        top = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices}
        return data(top | self.nothing | more)

    def _choice(self, said: dict, ended: dict | None = None) -> dict:
        return {"index": 0} | said | {"logprobs": None, "finish_reason": None} | (ended or {})

    def opening(self) -> bytes:
        """Before the first token."""
        return self._event([self._choice({"delta": {"role": "assistant", "content": ""}})])

    def chunk(self, pieces: list[Piece]) -> bytes:
        """What came together; thoughts and answer in one delta each."""
        names = {"think": "reasoning_content", "answer": "content"}
        return b"".join(self._event([self._choice({"delta": {names[kind]: text}})]) for kind, text in joined(pieces))

    def closing(self, ended: dict, **facts) -> bytes:
        """After the last token."""
        return self._event([self._choice({"delta": {}}, ended)], **facts)

    def usage(self, usage: dict) -> bytes:
        """Where it was asked for, and only there."""
        return self._event([], usage=usage)

    def whole(self, pieces: list[Piece], ended: dict, usage: dict, **facts) -> dict:
        """Not streamed."""
        texts = {kind: "".join(text for name, text in pieces if name == kind) for kind in ("think", "answer")}
        choice = self._choice(completion.assistant(texts["answer"], texts["think"]), ended)
        return completion.completion(self.model, [choice], usage, self.id, **facts)


class TextForm(ChatForm):
    """text_completion: the continuation of a prompt."""

    kind, prefix = "text_completion", "cmpl"

    def opening(self) -> bytes:
        return b""

    def chunk(self, pieces: list[Piece]) -> bytes:
        return b"".join(self._event([self._choice({"text": text})]) for _, text in joined(pieces))

    def closing(self, ended: dict, **facts) -> bytes:
        return self._event([self._choice({"text": ""}, ended)], **facts)

    def whole(self, pieces: list[Piece], ended: dict, usage: dict, **facts) -> dict:
        choice = self._choice({"text": "".join(text for _, text in pieces)}, ended)
        return completion.completion(self.model, [choice], usage, self.id, **facts)


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    found: list[Piece] = []
    for kind, text in pieces:
        if found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
    return found
