"""Places for requests: a full queue is answered with 429, a server that is ending with 503.

A request that runs or waits has a place for each of its answers. Requests that need no engine, and
bodies that are arriving, have separate limits.

The P places are shared between the API keys. A key gets a place if fewer than P are taken, or if it
has fewer than its share: P / k while k keys have places. So one key alone may take all P, and the
next one still gets its half: no answer that has a place loses it, and more than P are taken for a
while. At most P · (1 + 1/2 + … + 1/k) are: the j-th key to come took at most P/j beyond P. For two
keys these are 1.5 · P. The engine computes no more at a time: the further answers wait.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import Enum
from itertools import count
from typing import NamedTuple

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.run.messages import Ended
from nanokv.apps.serve.run.ticket import Ticket

LONGEST_RETRY = 60  # seconds


class Closed(Enum):
    """Why the server accepts nothing more; the name is the error's code."""

    SHUTTING_DOWN = "the server is shutting down"
    ENGINE_FAILED = "the engine has failed, and the server must be started again"


class Share(NamedTuple):
    """Places of one key."""

    taken: int
    places: int  # that it can take, whatever the other keys do


class Admission:
    """Used in the event loop only, as are the tickets. `key`: the salt of an API key."""

    def __init__(self, places: int):
        self.places = places
        self.tickets: dict[int, Ticket] = {}
        self.beside = 0  # requests that need no place and wait for a thread
        self.reading = 0  # bytes of bodies that are arriving or wait for a thread
        self.closed: Closed | None = None
        self.at_end: list[Callable[[], None]] = []  # called when the server stops accepting
        self._numbers = count()
        self._waits: set[asyncio.Timeout] = set()
        self._mean = 1.0  # moving average of an answer's seconds

    def open(
        self, tab: str = "", number: int = 1, held: Sequence[Ticket] = (), key: str = ""
    ) -> list[Ticket]:
        """Places for all answers of a request, or none at all. `held`: places it already has."""
        self.check()
        if number > self.places:
            words = f"{number:,} answers in one request, this server has {self.places:,} places"
            raise ApiError(400, words, "n", hint="nanokv serve --queue N makes more")
        wanted = number - len(held)
        share = self.share(key)
        full = len(self.tickets) + wanted > self.places
        # A request that has all its places keeps them, also if its key's share has shrunk.
        if wanted and full and share.taken + wanted > share.places:
            raise self._full(share, wanted)
        events: asyncio.Queue = held[0].events if held else asyncio.Queue()
        more = [Ticket(next(self._numbers), i, tab, key, events) for i in range(len(held), number)]
        self.tickets |= {ticket.number: ticket for ticket in more}
        return [*held, *more]

    def share(self, key: str) -> Share:
        """The places of a key, and how many it could take now."""
        taken = Counter(ticket.key for ticket in self.tickets.values())
        keys = len(taken.keys() | {key})
        return Share(taken[key], max(1, self.places // keys))

    def _full(self, share: Share, wanted: int) -> ApiError:
        seconds = min(LONGEST_RETRY, max(1, math.ceil(self._mean)))
        words = f"{self.places:,} requests run or wait, which is the limit"
        if share.places < self.places:
            words = (
                f"this key has {share.taken:,} places and asks for {wanted:,} more, its share is "
                f"{share.places:,} of {self.places:,} while other keys have requests"
            )
        headers = {"retry-after": str(seconds)}
        return ApiError(
            429, f"{words}; try again in {seconds} s", code="queue_full", headers=headers
        )

    def leave(self, ticket: Ticket) -> None:
        """Free the place of an answer."""
        del self.tickets[ticket.number]
        if isinstance(ticket.end, Ended) and ticket.end.metrics["total_s"] is not None:
            self._mean += 0.1 * (ticket.end.metrics["total_s"] - self._mean)

    @contextlib.contextmanager
    def thread(self, most: int) -> Iterator[None]:
        """Around the work of a request without a place; ApiError (429) if `most` are running."""
        if self.beside >= most:
            words = f"{self.beside:,} requests are being tokenized, which is the limit"
            raise ApiError(429, words, code="queue_full", headers={"retry-after": "1"})
        self.beside += 1
        try:
            yield
        finally:
            self.beside -= 1

    def arrive(self, size: int, most: int) -> None:
        """Count `size` more bytes of a body; ApiError (503) above `most` bytes of all bodies."""
        self.reading += size
        if self.reading > most:
            raise ApiError(503, "too many requests are arriving at once", code="overloaded")

    def read(self, size: int) -> None:
        """Release `size` bytes that are no longer needed."""
        self.reading -= size

    def check(self) -> None:
        """Raise ApiError (503) if the server no longer answers."""
        if self.closed is not None:
            raise ApiError(503, self.closed.value, code=self.closed.name.lower())

    def close(self, reason: Closed) -> None:
        """Accept nothing more, and interrupt the waits for clients."""
        self.closed = reason
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)
        for call in self.at_end:
            call()

    @contextlib.asynccontextmanager
    async def wait(self, seconds: float) -> AsyncIterator[None]:
        """Around a wait for a client: TimeoutError after `seconds`, ApiError at shutdown."""
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
