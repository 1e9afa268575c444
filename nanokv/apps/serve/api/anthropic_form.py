"""Answers in the form of Anthropic's Messages API: blocks of text, thoughts and calls, or events.

In a stream a block begins, grows and ends before the next one begins. `input_tokens` counts the
tokens of the prompt that were computed; those found in the cache are `cache_read_input_tokens`.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.calls import Call
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.forms import joined, written
from nanokv.apps.serve.api.prompts import Prepared, Served
from nanokv.text.tokenizer import Tokenizer
from weights_loader.strict import loads

Event = dict[str, Any]
GROWS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesForm:
    """Writes the one answer to a request to /v1/messages."""

    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str):
        self.content: list[dict] = []  # the blocks so far; the last one grows while `open`
        self.open = False
        self.begun = False  # message_start has been written
        self.end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self.top: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    # --- a stream ---------------------------------------------------------------------------------

    def opening(self, index: int) -> bytes:
        """Nothing yet: message_start has the counts of the prompt, which the first token brings."""
        return b""

    def chunk(self, index: int, pieces: Sequence[Piece], usage: dict) -> bytes:
        """Blocks begin, grow and end."""
        return self._start(usage) + written(self._put(pieces))

    def closing(self, index: int, ended: dict, **facts: Any) -> bytes:
        """The last block is complete. What is not begun yet is written by `ending`."""
        events = list(self._end(ended))
        return written(events) if self.begun else b""

    def ending(self, usage: dict) -> bytes:
        """Why the answer ended, and the token counts."""
        delta = {"type": "message_delta", "delta": self.end, "usage": counted(usage)}
        return self._start(usage) + written([delta, {"type": "message_stop"}])

    def failed(self, error: ApiError) -> bytes:
        """The error as the last event."""
        return written([anthropic_error(error)])

    def whole(self, answers: Iterable[tuple[list[Piece], dict]], usage: dict, **facts: Any) -> dict:
        """The message as one object."""
        for pieces, ended in answers:
            list(self._put(pieces))
            list(self._end(ended))
        return self.top | {"content": self.content} | self.end | {"usage": counted(usage)}

    def _start(self, usage: dict) -> bytes:
        if self.begun:
            return b""
        self.begun = True
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self.top | empty | {"usage": counted(usage) | {"output_tokens": 0}}
        return written([{"type": "message_start", "message": message}])

    # --- blocks -----------------------------------------------------------------------------------

    def _put(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in joined(pieces):
            if piece.call:
                yield from self._call(piece.call)
            elif piece.text and piece.kind == "think":
                yield from self._grow("thinking", piece.text)
            elif piece.text:
                yield from self._grow("text", piece.text)

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        delta, name = GROWS[kind]
        if not self.open or self.content[-1]["type"] != kind:
            yield from self._close()
            block = {"type": kind, name: ""}
            if kind == "thinking":
                block["signature"] = ""
            yield from self._begin(block)
        self.content[-1][name] += text
        yield self._event("content_block_delta", delta={"type": delta, name: text})

    def _call(self, call: Call) -> Iterator[Event]:
        yield from self._close()
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield from self._begin(block)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield self._event("content_block_delta", delta=delta)
        self.content[-1]["input"] = loads(call.arguments.encode())
        yield from self._close()

    def _begin(self, block: dict) -> Iterator[Event]:
        self.content.append(block)
        self.open = True
        yield self._event("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        if self.open:
            self.open = False
            yield self._event("content_block_stop")

    def _end(self, ended: dict) -> Iterator[Event]:
        self.end = stopped(ended)
        yield from self._close()

    def _event(self, kind: str, **more: Any) -> Event:
        """An event about the newest block."""
        return {"type": kind, "index": len(self.content) - 1} | more


def stopped(ended: dict) -> dict:
    """The stop_reason and the stop_sequence of an answer."""
    cause = ended["stop_reason"]
    reason = REASONS[ended["finish_reason"]]
    if reason == "max_tokens" and cause == "context":
        reason = "model_context_window_exceeded"
    if reason == "end_turn" and isinstance(cause, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": cause}
    return {"stop_reason": reason, "stop_sequence": None}


def counted(usage: dict) -> dict:
    """Token counts under Anthropic's names."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thought},
    }


KINDS = {  # status → Anthropic's type of an error
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: ApiError) -> dict:
    """The error as Anthropic's object."""
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = str(error)
    if error.hint:
        message = f"{message} (hint: {error.hint})"
    return {"type": "error", "error": {"type": KINDS.get(error.status, kind), "message": message}}


def anthropic_model(served: Served, name: str) -> dict:
    """The model under one of its names, as Anthropic lists models."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": served.context,
        "max_tokens": served.context,
    }


def messages_form(prepared: Prepared, tokenizer: Tokenizer) -> MessagesForm:
    """The form of /v1/messages."""
    return MessagesForm(prepared.model)
