"""One answer on its way to the client: one response, or a stream of server-sent events.

The client is watched meanwhile. A client that leaves frees its place, and server.py drops clients
that stop reading. An error after status 200 is sent as the last event of the stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.errors import ApiError, ClientGone, internal, where
from nanokv.apps.serve.api.forms import Form, ending
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
    """Limits in bytes and seconds."""

    body: int = 4_000_000
    bodies: int = 256_000_000  # of all bodies that are arriving or wait for a thread
    beside: int = 16  # concurrent requests to /tokenize and /detokenize
    body_s: float = 30.0  # for a whole body to arrive
    answer_s: float = 600.0
    keepalive_s: float = 5.0  # of silence before a comment is sent in the stream


class Watch:
    """Fails the tickets of an answer when its client leaves or its time is up."""

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

    def __exit__(self, *exception: object) -> None:
        self.timer.cancel()
        self.task.cancel()


class Answer(Response):
    """The answers of a request: `whole` makes one response; called as a response, it streams."""

    def __init__(
        self,
        client: EngineClient,
        tickets: Sequence[Ticket],
        prepared: Prepared,
        form: Form,
        limits: Limits,
    ):
        self.client = client
        self.tickets = tickets
        self.prepared = prepared
        self.form = form
        self.limits = limits
        self.index = {ticket.number: ticket.index for ticket in tickets}
        self.failure = ""  # for the log: the error that ended the stream

    def watched(self, receive: Receive) -> Watch:
        """The watch over the client during the wait for the answer."""
        return Watch(self.client, self.tickets, receive, self.limits.answer_s)

    async def whole(self, note: list[str]) -> Response:
        """The response, once all answers are complete."""
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
        facts: dict = {"seed": self.prepared.seed}
        if len(ends) == 1:
            facts = self.facts(ends[0])
        return JSONResponse(self.form.whole(answers, self.usage(), **facts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the answer; the places are freed in every case."""
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
        """The parts of the stream; an error at this stage is the last part."""
        try:
            for ticket in self.tickets:
                if opening := self.form.opening(ticket.index):
                    yield opening
            async for message in news(self.tickets, self.limits.keepalive_s):
                yield self.part(message)
            yield self.form.ending(self.usage())
        except ApiError as error:
            self.failure = f" · failed: {error.code}"
            yield self.form.failed(error)
        except ClientGone:
            raise
        except Exception as error:
            logger.error("a stream failed: %s", where(error))
            self.failure = " · failed"
            yield self.form.failed(internal())

    def part(self, message: Pieces | Ended | None) -> bytes:
        """The next part of the stream: text, the end of an answer, or a keepalive for None."""
        match message:
            case Pieces(ticket, pieces):
                return self.form.chunk(self.index[ticket], pieces, self.usage())
            case Ended(ticket):
                return self.form.closing(
                    self.index[ticket], self.closing(message), **self.facts(message)
                )
        return self.form.keepalive

    # --- when it is complete ----------------------------------------------------------------------

    def usage(self) -> dict:
        """Token counts. A prompt counts once, however many answers it has.

        In a stream that failed, answers that have not begun count 0.
        """
        jobs = zip(self.tickets, self.prepared.jobs, strict=True)
        firsts = [ticket.usage for ticket, job in jobs if job.first]
        prompt = sum(one.prompt for one in firsts)
        reused = sum(one.reused for one in firsts)
        new = sum(ticket.usage.new for ticket in self.tickets)
        thought = sum(ticket.usage.thought for ticket in self.tickets)
        return completion.usage(prompt, new, reused, thought)

    def closing(self, ended: Ended) -> dict:
        """The finish_reason, and the stop string or token that ended the answer."""
        wanted = self.prepared.jobs[self.index[ended.ticket]].wanted
        new = ended.metrics["new_tokens"]
        return ending(wanted, ended.reason, new, ended.stop, ended.calls)

    def facts(self, ended: Ended) -> dict:
        """Fields beyond OpenAI's: timings of one answer, and the seed that repeats all answers."""
        return {"timings": completion.engine_timings(ended.metrics), "seed": self.prepared.seed}

    def note(self) -> str:
        """The summary for the log."""
        usage = self.usage()
        reused = usage["prompt_tokens_details"]["cached_tokens"]
        new = usage["prompt_tokens"] - reused
        return f"{new:,} new + {reused:,} reused → {usage['completion_tokens']:,} out{self.failure}"


class Large(Response):
    """A large body. Its places are freed when the client has read it, or has gone.

    The server drops a client that does not read for READER_S (server.py), so that the places bound
    the memory of all such bodies.
    """

    media_type = "application/json"

    def __init__(self, client: EngineClient, tickets: Sequence[Ticket], body: bytes):
        super().__init__(body)
        self.client = client
        self.tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await send({"type": "http.response.body"})  # waits until the body is written
        finally:
            self.client.close(self.tickets)


async def news(
    tickets: Sequence[Ticket], patience: float | None = None
) -> AsyncIterator[Pieces | Ended | None]:
    """The engine's messages about these answers, until all have ended.

    Yields None after `patience` seconds of silence. Raises the error of a failed answer.
    """
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
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
