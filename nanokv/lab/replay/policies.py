"""Which page is evicted first. A policy ranks the pages; the lowest rank goes.

A rank is a number, or a tuple of numbers, of one page. It is asked for after each use of the page,
and holds until the next use.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from nanokv.lab.replay.traces import Request


class Page:
    """A held page: where it lies in its request, and how it has been used."""

    __slots__ = (
        "added",
        "children",
        "entry",
        "key",
        "parent",
        "place",
        "rank",
        "span",
        "used",
        "uses",
    )

    def __init__(self, key: int, parent: "Page | None", place: int, now: int):
        self.key = key
        self.parent = parent  # the page before it; None: the first one
        self.place = place  # pages before it
        self.added = now  # number of the request that computed it
        self.used = now  # number of the last request that had it
        self.uses = 0  # requests that had it since it was added
        self.span = 0  # pages of the last request that had it
        self.children = 0  # held pages that follow it directly
        self.rank: Any = None  # that of its last use
        self.entry: tuple | None = None  # its place in the order of eviction


class Policy:
    """The contract: `rank` after each use, `evicted` after each eviction."""

    def start(self, requests: Sequence[Request]) -> None:
        """Called once, before the first request. Only Belady's bound looks at the trace."""

    def rank(self, page: Page) -> Any:
        """The page with the lowest rank is evicted first."""
        raise NotImplementedError

    def evicted(self, rank: Any) -> None:
        """A page with this rank was evicted."""


class LRU(Policy):
    """Least recently used."""

    def rank(self, page: Page) -> int:
        return page.used


class FIFO(Policy):
    """First in, first out: uses do not count."""

    def rank(self, page: Page) -> int:
        return page.added


class LFU(Policy):
    """Least frequently used; of equal ones the least recently used."""

    def rank(self, page: Page) -> tuple[int, int]:
        return page.uses, page.used


class Size(Policy):
    """GreedyDual-Size with frequency (Cherkasova 1998, after Cao and Irani 1997): uses per page of
    the request, so that a long prompt goes before a short one. The rank of the last evicted page is
    added to all later ones, so that a page which is no longer used becomes the lowest in the end.
    """

    age = 0.0

    def rank(self, page: Page) -> float:
        return self.age + page.uses / page.span

    def evicted(self, rank: float) -> None:
        self.age = max(self.age, rank)


class Belady(Policy):
    """The page whose next use is farthest away (Belady 1966). It knows the future, so it is the
    bound and no policy: no other order of eviction finds more, in any index. Of pages with
    the same next use the last one of the request goes, because it is of no use without the others.
    """

    def start(self, requests: Sequence[Request]) -> None:
        later: dict[int, float] = {}
        self.next: list[list[float]] = [[] for _ in requests]
        for number in range(len(requests) - 1, -1, -1):
            keys = requests[number].keys
            self.next[number] = [later.get(key, inf) for key in keys]
            later.update(dict.fromkeys(keys, inf))  # computed anyway, unless it may be reused
            later.update(dict.fromkeys(keys[: requests[number].sought], number))

    def rank(self, page: Page) -> tuple[float, int]:
        return -self.next[page.used][page.place], -page.place


POLICIES: dict[str, type[Policy]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "size": Size,
    "belady": Belady,
}
