"""One answer on its way out: as one response, or as a stream of server-sent events.

While it comes, the client is watched: one that leaves frees its place, and server.py sends away who does not read. An
error that comes after the status 200 is the last event of the stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.errors import ApiError, ClientGone, internal, where
from nanokv.apps.serve.api.forms import ChatForm, data
from nanokv.apps.serve.api.prompts import Prepared
from nanokv.apps.serve.run.engine_client import EngineClient
from nanokv.apps.serve.run.messages import Ended, Failed, Pieces
from nanokv.apps.serve.run.ticket import Ticket
from nanokv.decoding import completion

logger = logging.getLogger(__name__)
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


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

    def __init__(
        self, client: EngineClient, tickets: Sequence[Ticket], receive: Receive, seconds: float
    ):
        late = ApiError(504, f"the answer took more than {seconds:g} seconds", code="timeout")
        self.timer = asyncio.get_running_loop().call_later(seconds, client.fail, tickets, late)
        self.task = asyncio.create_task(self._gone(client, tickets, receive))

    @staticmethod
    async def _gone(client: EngineClient, tickets: Sequence[Ticket], receive: Receive) -> None:
        await gone(receive)
        client.fail(tickets, ClientGone())

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *exception) -> None:
        self.timer.cancel()
        self.task.cancel()


class Answer(Response):
    """The answers of a request: `whole` gives them as a response; as a response itself it is a stream."""

    def __init__(
        self,
        client: EngineClient,
        tickets: Sequence[Ticket],
        prepared: Prepared,
        form: ChatForm,
        limits: Limits,
    ):
        self.client, self.tickets = client, tickets
        self.prepared, self.form, self.limits = prepared, form, limits
        self.index = {ticket.number: ticket.index for ticket in tickets}
        self.failure = ""  # what the stream ended with, for the log

    def watched(self, receive: Receive) -> Watch:
        """Around the wait for it."""
        return Watch(self.client, self.tickets, receive, self.limits.answer_s)

    async def whole(self, note: list[str]) -> Response:
        """When all of it is there."""
        pieces: list[list[Piece]] = [[] for _ in self.tickets]
        ends: list[Ended] = []
        async for message in news(self.tickets):
            if isinstance(message, Pieces):
                pieces[self.index[message.ticket]] += message.pieces
            elif message is not None:
                ends.append(message)
        note.append(self.note())
        ends.sort(key=lambda ended: self.index[ended.ticket])
        answers = zip(pieces, map(self.closing, ends), strict=True)
        facts = self.facts(ends[0]) if len(ends) == 1 else {"seed": self.prepared.seed}
        return JSONResponse(self.form.whole(answers, self.usage(), **facts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As it comes. Whatever happens, the places are free afterwards."""
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
            self.client.close(self.tickets)

    async def events(self) -> AsyncIterator[bytes]:
        """The parts of the stream; an error that comes now is the last of them."""
        try:
            for ticket in self.tickets:
                if opening := self.form.opening(ticket.index):
                    yield opening
            async for message in news(self.tickets, self.limits.keepalive_s):
                yield self.part(message)
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

    def part(self, message: Pieces | Ended | None) -> bytes:
        """News of one answer: text, or its end; or there is none of any."""
        match message:
            case Pieces(ticket, pieces):
                return self.form.chunk(self.index[ticket], pieces)
            case Ended(ticket):
                closing, facts = self.closing(message), self.facts(message)
                return self.form.closing(self.index[ticket], closing, **facts)
        return b": keepalive\n\n"

    # --- when it is complete ----------------------------------------------------------------------

    def usage(self) -> dict:
        """Tokens; a prompt with several answers counts once. Of a stream that failed some may not have begun."""
        jobs = zip(self.tickets, self.prepared.jobs, strict=True)
        firsts = [ticket.usage for ticket, job in jobs if job.first]
        prompt, reused = sum(one.prompt for one in firsts), sum(one.reused for one in firsts)
        return completion.usage(prompt, sum(ticket.usage.new for ticket in self.tickets), reused)

    def closing(self, ended: Ended) -> dict:
        """finish_reason, and what ended it."""
        wanted, new = (
            self.prepared.jobs[self.index[ended.ticket]].wanted,
            ended.metrics["new_tokens"],
        )
        cut = ended.reason == "length" and (wanted is None or new < wanted)
        found = completion.end("context" if cut else ended.reason, ended.stop)
        called = ended.calls and found["finish_reason"] == "stop"
        return found | ({"finish_reason": "tool_calls"} if called else {})

    def facts(self, ended: Ended) -> dict:
        """What OpenAI has no name for: timings of an answer, and the seed that repeats all of them."""
        return {"timings": completion.engine_timings(ended.metrics), "seed": self.prepared.seed}

    def note(self) -> str:
        """For the log."""
        usage = self.usage()
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        new = usage["prompt_tokens"] - reused
        return f"{new:,} new + {reused:,} reused → {usage['completion_tokens']:,} out{self.failure}"


async def news(
    tickets: Sequence[Ticket], patience: float | None = None
) -> AsyncIterator[Pieces | Ended | None]:
    """What the engine says of these answers until all have ended; None after `patience` seconds of
    silence. Raises what one of them has failed with."""
    running = len(tickets)
    while running:
        try:
            message = await asyncio.wait_for(tickets[0].events.get(), patience)
        except TimeoutError:
            yield None
            continue
        if isinstance(message, Failed):
            raise message.error
        running -= isinstance(message, Ended)
        yield message


async def gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
