"""The event loop's side of the engine: it sends messages to the thread and passes on the replies.

tickets = client.admission.open(tab, n)     one per answer; ApiError if there are too few places
client.submit(ticket, job, param)           returns at once; results arrive in ticket.events
client.embed(ticket, embedding)             the same for embeddings
client.close(tickets)                       always: frees the places and the engine's pages
await client.ask(Snapshot)                  requests and pages, between two steps
"""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count
from time import perf_counter

from nanokv.apps.serve.api.embeddings import Embedding
from nanokv.apps.serve.api.errors import ApiError, internal
from nanokv.apps.serve.api.prompts import Job
from nanokv.apps.serve.run.admission import Admission, Closed
from nanokv.apps.serve.run.engine_thread import EngineThread
from nanokv.apps.serve.run.messages import (
    Cancel,
    Count,
    Embed,
    End,
    Ended,
    Failed,
    FromEngine,
    Pieces,
    Snapshot,
    Stopped,
    Submit,
    Taken,
)
from nanokv.apps.serve.run.metrics import Metrics
from nanokv.apps.serve.run.prefill import Here
from nanokv.apps.serve.run.ticket import Ticket
from nanokv.engine import Engine
from nanokv.errors import ParallelError


class EngineClient:
    """`queue_size` answers may wait besides the running ones; `prefills`: see prefill.py."""

    def __init__(self, engine: Engine, queue_size: int, prefills: Here):
        self.metrics = Metrics()
        self.admission = Admission(engine.scheduler.max_running + queue_size)
        self.thread = EngineThread(engine, prefills, self.metrics)
        self.lost: ParallelError | None = None  # why the ranks of a parallel engine were lost
        self._questions = count()
        self._asked: dict[int, asyncio.Future[dict]] = {}

    def start(self) -> None:
        """Start the thread, once, from a running event loop."""
        self.thread.start(asyncio.get_running_loop(), self._receive)

    # --- answers ----------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, job: Job, param: str) -> None:
        """Send a job to the engine, which may be in the middle of a step."""
        ticket.submitted = True
        self.thread.put(Submit(ticket.number, job, param, ticket.tab, ticket.opened))

    def embed(self, ticket: Ticket, embedding: Embedding) -> None:
        """Send a request for embeddings to the engine's thread."""
        ticket.submitted = True
        self.thread.put(Embed(ticket.number, embedding, ticket.key, ticket.opened))

    def fail(self, tickets: Iterable[Ticket], error: Exception) -> None:
        """End these answers, unless they have ended, with an error from outside the engine."""
        for ticket in tickets:
            if ticket.end is None:
                self._cancel(ticket)
                self._note(ticket, Failed(ticket.number, error))

    def close(self, tickets: Iterable[Ticket]) -> None:
        """Free the places; cancel answers that are still prefilled or running."""
        for ticket in tickets:
            if ticket.number in self.admission.tickets:
                self._cancel(ticket)
                self.metrics.count(outcome(ticket))
                self.admission.leave(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.submitted and ticket.end is None:
            self.thread.put(Cancel(ticket.number))

    # --- questions --------------------------------------------------------------------------------

    async def ask(self, kind: type[Snapshot | Count]) -> dict:
        """Ask the engine's thread, which replies between two steps."""
        self.admission.check()
        number = next(self._questions)
        self._asked[number] = future = asyncio.get_running_loop().create_future()
        try:
            self.thread.put(kind(number))
            return await future
        finally:
            del self._asked[number]

    # --- messages from the engine's thread --------------------------------------------------------

    def _receive(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            match message:
                case Taken(question, found):
                    self._answer(question, found)
                case Stopped(lost):
                    self._stopped(lost)
                case _ if message.ticket in self.admission.tickets:
                    self._note(self.admission.tickets[message.ticket], message)

    def _note(self, ticket: Ticket, message: Pieces | Ended | Failed) -> None:
        if isinstance(message, Pieces):
            ticket.usage = message.usage
            if not message.pieces:  # no text can be shown yet
                return
        else:
            ticket.end = message
        ticket.events.put_nowait(message)

    def _answer(self, question: int, found: dict | Exception) -> None:
        future = self._asked.get(question)
        if future is None or future.done():  # the asker has left
            return
        if isinstance(found, Exception):
            future.set_exception(found)
        else:
            future.set_result(found)

    def _stopped(self, lost: ParallelError | None) -> None:
        """The engine's thread has ended: fail everything that waits for it."""
        self.lost = lost
        if self.admission.closed is None:
            self.admission.close(Closed.ENGINE_FAILED)
        self.fail(self.admission.tickets.values(), internal())
        for question in self._asked:
            self._answer(question, internal())

    # --- the end ----------------------------------------------------------------------------------

    async def end(self, grace: float) -> None:
        """Stop accepting requests, wait up to `grace` seconds for running ones, then fail the rest.

        Ends the engine's thread.
        """
        self.admission.close(Closed.SHUTTING_DOWN)
        until = perf_counter() + grace
        while self.admission.tickets and perf_counter() < until:
            await asyncio.sleep(0.02)
        late = "the server was shut down before the answer was complete"
        self.fail(self.admission.tickets.values(), ApiError(503, late, code="shutting_down"))
        self.thread.put(End())


def outcome(ticket: Ticket) -> str:
    """How an answer ended, for /metrics."""
    if not ticket.submitted:
        return "refused"
    if ticket.end is None:
        return "cancelled"
    return ticket.end.reason
