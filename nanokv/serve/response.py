"""One answer on its way out: as one response, or as a stream of server-sent events.

While it comes, the client is watched: one that leaves frees its place, and server.py sends away who does not read. An
error that comes after the status 200 is the last event of the stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanokv.decoding import completion
from nanokv.serve.answer import Piece
from nanokv.serve.errors import ApiError, ClientGone, internal
from nanokv.serve.forms import ChatForm, data
from nanokv.serve.prompts import Prepared
from nanokv.serve.worker import Ticket, where

logger = logging.getLogger(__name__)
EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no")]  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Bytes and seconds."""

    body: int = 4_000_000
    bodies: int = 256_000_000  # all that arrive, or wait for a thread
    beside: int = 16  # requests to /tokenize and /detokenize at a time
    body_s: float = 30.0  # for all of a body to arrive
    answer_s: float = 600.0
    keepalive_s: float = 5.0  # a comment in the stream after so long without text


class Watch:
    """While an answer comes: has the client gone, is the time over?"""

    def __init__(self, ticket: Ticket, receive: Receive, seconds: float):
        late = ApiError(504, f"the answer took more than {seconds:g} seconds", code="timeout")
        self.timer = asyncio.get_running_loop().call_later(seconds, ticket.fail, late)
        self.task = asyncio.create_task(self._gone(ticket, receive))

    @staticmethod
    async def _gone(ticket: Ticket, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.leave()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception) -> None:
        self.timer.cancel()
        self.task.cancel()


class Answer(Response):
    """One answer: `whole` gives it as a response; as a response itself it is a stream."""

    def __init__(self, ticket: Ticket, prepared: Prepared, form: ChatForm, limits: Limits):
        self.ticket, self.prepared, self.form, self.limits = ticket, prepared, form, limits
        self.failure = ""  # what the stream ended with, for the log

    def watched(self, receive: Receive) -> Watch:
        """Around the wait for it."""
        return Watch(self.ticket, receive, self.limits.answer_s)

    async def whole(self, note: list[str]) -> Response:
        """When all of it is there."""
        pieces: list[Piece] = []
        async for more in self.ticket.pieces():
            pieces += more
        note.append(self.note())
        return JSONResponse(self.form.whole(pieces, self.ended(), self.usage(), **self.facts()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As it comes. Whatever happens, the place is free afterwards."""
        try:
            with self.watched(receive):
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
                async for part in self.events():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            scope["note"].append(self.note())
        except ClientGone:
            scope["note"].append("client gone")
        finally:
            self.ticket.close()

    async def events(self) -> AsyncIterator[bytes]:
        """The parts of the stream; an error that comes now is the last of them."""
        try:
            if opening := self.form.opening():
                yield opening
            async for pieces in self.ticket.pieces(self.limits.keepalive_s):
                yield self.form.chunk(pieces) if pieces else b": keepalive\n\n"
            yield self.form.closing(self.ended(), **self.facts())
            if self.prepared.asked.include_usage:
                yield self.form.usage(self.usage())
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            self.failure = f" · failed: {error.body['error']['code']}"
            yield data(error.body)
        except ClientGone:
            raise
        except Exception as error:
            logger.error("a stream failed: %s", where(error))
            self.failure = " · failed"
            yield data(internal().body)

    # --- when it is complete ----------------------------------------------------------------------------------------

    def ended(self) -> dict:
        """finish_reason, and what ended it."""
        request, wanted = self.ticket.request, self.prepared.wanted
        cut = request.finish_reason == "length" and (wanted is None or len(request.tokens) < wanted)
        return completion.end("context" if cut else request.finish_reason, self.prepared.text.stop_string)

    def usage(self) -> dict:
        """Tokens."""
        request = self.ticket.request
        return completion.usage(len(request.prompt), len(request.tokens), request.reused_tokens)

    def facts(self) -> dict:
        """What OpenAI has no name for: timings, and the seed that repeats the answer."""
        request, own = self.ticket.request, self.prepared.asked.sampling.get("seed")
        drawn = completion.seed(request)
        seed = drawn if drawn is None or own is None else own  # as it was sent: negative, perhaps
        return {"timings": completion.engine_timings(request.metrics()), "seed": seed}

    def note(self) -> str:
        """For the log."""
        request = self.ticket.request
        reused = request.reused_tokens
        return f"{len(request.prompt) - reused:,} new + {reused:,} reused → {len(request.tokens):,} out{self.failure}"
