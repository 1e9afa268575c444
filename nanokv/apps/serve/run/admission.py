"""Who gets a place, and who is told to come again (429) or that nothing is answered any more (503).

A request that runs or waits has a place for each of its answers. Requests that need no engine, and
bodies that arrive, have limits of their own.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import Enum
from itertools import count

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.run.messages import Ended
from nanokv.apps.serve.run.ticket import Ticket

LONGEST_RETRY = 60  # seconds


class Closed(Enum):
    """Why nothing more is answered; the name is the error's code."""

    SHUTTING_DOWN = "the server is shutting down"
    ENGINE_FAILED = "the engine has failed, and the server must be started again"


class Admission:
    """Belongs to the event loop, as do the tickets."""

    def __init__(self, places: int):
        self.places = places
        self.tickets: dict[int, Ticket] = {}
        self.beside = 0  # requests that need no place, and wait for a thread
        self.reading = 0  # bytes of bodies that arrive, or wait for a thread
        self.closed: Closed | None = None
        self.at_end: list[Callable[[], None]] = []  # called when nothing more is taken
        self._numbers = count()
        self._waits: set[asyncio.Timeout] = set()
        self._mean = 1.0  # seconds of an answer

    def open(self, tab: str = "", number: int = 1, held: Sequence[Ticket] = ()) -> list[Ticket]:
        """Places for all answers of a request, or for none. `held`: those that it has already."""
        self.check()
        if number > self.places:
            words = f"{number:,} answers in one request, this server has {self.places:,} places"
            raise ApiError(400, words, "n", hint="nanokv serve --queue N makes more")
        if len(self.tickets) - len(held) + number > self.places:
            seconds = min(LONGEST_RETRY, max(1, math.ceil(self._mean)))
            words = f"{self.places:,} requests run or wait, which is the limit"
            words += f"; try again in {seconds} s"
            raise ApiError(429, words, code="queue_full", headers={"retry-after": str(seconds)})
        events = held[0].events if held else asyncio.Queue()
        more = [Ticket(next(self._numbers), i, tab, events) for i in range(len(held), number)]
        self.tickets |= {ticket.number: ticket for ticket in more}
        return [*held, *more]

    def leave(self, ticket: Ticket) -> None:
        """The place is free."""
        del self.tickets[ticket.number]
        seconds = ticket.end.metrics["total_s"] if isinstance(ticket.end, Ended) else None
        self._mean += 0.1 * (seconds - self._mean) if seconds is not None else 0.0

    @contextlib.contextmanager
    def thread(self, most: int) -> Iterator[None]:
        """For one of at most so many requests that need no place."""
        if self.beside >= most:
            words = f"{self.beside:,} requests are being tokenized, which is the limit"
            raise ApiError(429, words, code="queue_full", headers={"retry-after": "1"})
        self.beside += 1
        try:
            yield
        finally:
            self.beside -= 1

    def arrive(self, size: int, most: int) -> None:
        """So many bytes more of a body; all of them together may have `most`."""
        self.reading += size
        if self.reading > most:
            raise ApiError(503, "too many requests are arriving at once", code="overloaded")

    def read(self, size: int) -> None:
        """So many of them have been used."""
        self.reading -= size

    def check(self) -> None:
        """ApiError where nothing is answered any more."""
        if self.closed is not None:
            raise ApiError(503, self.closed.value, code=self.closed.name.lower())

    def close(self, reason: Closed) -> None:
        """Take nothing more; who waits for a client is told at once."""
        self.closed = reason
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)
        for tell in self.at_end:
            tell()

    @contextlib.asynccontextmanager
    async def wait(self, seconds: float) -> AsyncIterator[None]:
        """Around a wait for a client: TimeoutError after so many seconds, ApiError as soon as the
        server ends."""
        self.check()
        try:
            async with asyncio.timeout(seconds) as wait:
                self._waits.add(wait)
                yield
        except TimeoutError:
            self.check()
            raise
        finally:
            self._waits.discard(wait)
