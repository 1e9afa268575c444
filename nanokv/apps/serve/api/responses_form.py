"""Answers in the form of OpenAI's Responses API: a list of items, as one object or as events.

An item is a message, a call of a function, or the model's thoughts. In a stream each item is
announced, grows, and is repeated as a whole when it is complete. The events have numbers.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nanokv.apps.serve.api import logprobs
from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.calls import Call
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.forms import joined, shown_by, written
from nanokv.apps.serve.api.prompts import Prepared
from nanokv.text.tokenizer import Tokenizer

Event = dict[str, Any]
CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # status → OpenAI's code of a failure


class ResponsesForm:
    """Writes the one answer to a request to /v1/responses."""

    keepalive = b": keepalive\n\n"

    def __init__(self, model: str, repeated: dict, shown: logprobs.Shown = logprobs.none):
        self.shown = shown
        self.output: list[dict] = []  # the items so far; the last one grows while `open`
        self.open = False
        self.number = 0  # of the next event
        self.cut = False  # the answer ended before the model ended it
        self.keep: Callable[[list[dict]], None] | None = None  # gets the items at the end
        self.top: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "previous_response_id": None,
            "usage": None,
        } | repeated

    # --- a stream ---------------------------------------------------------------------------------

    def opening(self, index: int) -> bytes:
        """The response exists, and nothing has been said."""
        events = [
            {"type": f"response.{name}", "response": self.top}
            for name in ("created", "in_progress")
        ]
        return self._written(events)

    def chunk(self, index: int, pieces: Sequence[Piece], usage: dict) -> bytes:
        """Items begin, grow and end."""
        return self._written(self._put(pieces))

    def closing(self, index: int, ended: dict, **facts: Any) -> bytes:
        """The last item is complete, or cut."""
        return self._written(self._end(ended))

    def ending(self, usage: dict) -> bytes:
        """The whole response, with the token counts."""
        response = self._response(usage)
        return self._written([{"type": f"response.{response['status']}", "response": response}])

    def failed(self, error: ApiError) -> bytes:
        """The response as far as it came, and the error."""
        code = CODES.get(error.status, "server_error")
        told = {"code": code, "message": str(error)}
        response = self.top | {"status": "failed", "error": told, "output": self.output}
        return self._written([{"type": "response.failed", "response": response}])

    def whole(self, answers: Iterable[tuple[list[Piece], dict]], usage: dict, **facts: Any) -> dict:
        """The response as one object."""
        for pieces, ended in answers:
            list(self._put(pieces))
            list(self._end(ended))
        return self._response(usage)

    def _written(self, events: Iterable[Event]) -> bytes:
        numbered = []
        for event in events:
            numbered.append({"type": event["type"], "sequence_number": self.number} | event)
            self.number += 1
        return written(numbered)

    # --- the response -----------------------------------------------------------------------------

    def _response(self, usage: dict) -> dict:
        if self.keep is not None and self.top["store"]:
            self.keep(self.output)
        status = "incomplete" if self.cut else "completed"
        response = self.top | {"status": status, "output": self.output, "usage": counted(usage)}
        if self.cut:
            return response | {"incomplete_details": {"reason": "max_output_tokens"}}
        return response | {"completed_at": int(time.time())}

    # --- items ------------------------------------------------------------------------------------

    def _put(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in joined(pieces):
            if piece.call:
                yield from self._call(piece.call)
            elif piece.text and piece.kind == "think":
                yield from self._grow("reasoning", piece.text)
            elif piece.text:
                shown = self.shown(piece.tokens, 0) or {"content": []}
                yield from self._grow("message", piece.text, shown["content"])

    def _grow(self, kind: str, text: str, likely: Sequence[dict] = ()) -> Iterator[Event]:
        if not self.open or self.output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind)
        part = self.output[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            yield self._event("reasoning_text.delta", content_index=0, delta=text)
            return
        part["logprobs"] += likely
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=list(likely))

    def _begin(self, kind: str) -> Iterator[Event]:
        """Add an item without text, and its part."""
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        part: dict[str, Any]
        if kind == "reasoning":
            item |= {"id": f"rs_{uuid.uuid4().hex}", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item |= {"id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output.append(item)
        self.open = True
        yield self._event("output_item.added", item=dict(item, content=[]))
        item["content"] = [part]
        yield self._event("content_part.added", content_index=0, part=dict(part))

    def _call(self, call: Call) -> Iterator[Event]:
        """Add a call, which is complete at once."""
        yield from self._close("completed")
        item = {
            "type": "function_call",
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.output.append(item)
        yield self._event("output_item.added", item=dict(item))
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._event("function_call_arguments.delta", delta=call.arguments)
        done = {"name": call.name, "arguments": call.arguments}
        yield self._event("function_call_arguments.done", **done)
        yield self._event("output_item.done", item=item)

    def _close(self, status: str) -> Iterator[Event]:
        """End the item that grows, if there is one."""
        if not self.open:
            return
        self.open = False
        item = self.output[-1]
        item["status"] = status
        part = item["content"][0]
        if item["type"] == "reasoning":
            yield self._event("reasoning_text.done", content_index=0, text=part["text"])
        else:
            said = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("output_text.done", content_index=0, **said)
        yield self._event("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", item=item)

    def _end(self, ended: dict) -> Iterator[Event]:
        self.cut = ended["finish_reason"] == "length"
        if not self.output:  # the model said nothing: an empty message
            yield from self._begin("message")
        yield from self._close("incomplete" if self.cut else "completed")

    def _event(self, kind: str, **more: Any) -> Event:
        """An event about the newest item."""
        event: Event = {"type": f"response.{kind}", "output_index": len(self.output) - 1}
        if "item" not in more:
            event["item_id"] = self.output[-1]["id"]
        return event | more


def counted(usage: dict) -> dict:
    """Token counts under the names of the Responses API."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }


def responses_form(prepared: Prepared, tokenizer: Tokenizer) -> ResponsesForm:
    """The form of /v1/responses."""
    shown = shown_by(logprobs.Content, prepared, tokenizer)
    return ResponsesForm(prepared.model, prepared.asked.repeated, shown)
