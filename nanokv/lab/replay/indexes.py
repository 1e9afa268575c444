"""What holds the pages of past requests, and which of them can be evicted.

Memory consists of pages of equal size. Pages that a request reuses are not evicted while it is
computed. A request that is larger than the memory leaves its first pages.

    flat    a table of pages, as for the figures of Mooncake's traces: any page can go, and of one
            request the first page is the least recently used. A page that is held is never held
            twice, also if it could not be found because one before it is gone
    hash    the prefix pool of nanokv and vLLM: any page can go, and of one request the last page is
            the least recently used. What could not be found is computed into further pages
    radix   a radix tree as in SGLang: as hash, but only a page that no other page follows can go
"""

from heapq import heappop, heappush

from nanokv.lab.replay.policies import Page, Policy
from nanokv.lab.replay.traces import Request


class Flat:
    """Pages by key, and a heap of (rank, order in the request, key) with stale entries."""

    towards_end = 1  # of pages with equal rank the first of a request goes first

    def __init__(self, policy: Policy, capacity: int | None):
        self.policy = policy
        self.capacity = capacity  # pages; None = unlimited
        self.held: dict[int, Page] = {}
        self.heap: list[tuple] = []

    def match(self, keys: list[int]) -> int:
        """How many pages are held from the beginning on."""
        held = self.held
        for place, key in enumerate(keys):
            if key not in held:
                return place
        return len(keys)

    def store(self, request: Request, found: int, now: int) -> None:
        """Request number `now` has been computed after a match of `found` pages: hold its pages."""
        keys = request.keys[: self.capacity]
        known = [self.held[key] for key in self.reused(keys, found) if key in self.held]
        for page in known:
            page.used = now
            page.entry = None  # not to be evicted for this request
        if self.capacity is not None:
            wanted = len(self.held) - len(known) + min(request.taken, self.capacity)
            for _ in range(wanted - self.capacity):
                self.evict(now)
        self.forget(keys)
        parent = None
        for place, key in enumerate(keys):
            page = self.held.get(key) or self.add(key, parent, place, now)
            page.used = now
            page.uses += 1
            page.span = len(keys)
            parent = page
        if self.capacity is not None:
            for key in keys:
                page = self.held[key]
                page.rank = self.policy.rank(page)
                self.offer(page)

    def reused(self, keys: list[int], found: int) -> list[int]:
        """Those of a request's pages that it does not compute into further pages, if held."""
        return keys

    def forget(self, keys: list[int]) -> None:
        """Drop pages of a request that its own pages replace."""

    def add(self, key: int, parent: Page | None, place: int, now: int) -> Page:
        page = self.held[key] = Page(key, parent, place, now)
        if parent is not None:
            parent.children += 1
        return page

    def offer(self, page: Page) -> None:
        """Put a page into the order of eviction."""
        order = self.towards_end * page.place
        page.entry = (page.rank, order, page.key)
        heappush(self.heap, page.entry)

    def evict(self, now: int) -> None:
        """Evict the page with the lowest rank that request `now` does not have."""
        while True:
            entry = heappop(self.heap)
            page = self.held.get(entry[2])
            if page is not None and page.entry is entry:
                self.remove(page, now)
                self.policy.evicted(entry[0])
                return

    def remove(self, page: Page, now: int) -> None:
        del self.held[page.key]
        if page.parent is not None:
            page.parent.children -= 1


class Hash(Flat):
    """The order of nanokv's PrefixPool."""

    towards_end = -1

    def reused(self, keys: list[int], found: int) -> list[int]:
        return keys[:found]

    def forget(self, keys: list[int]) -> None:
        """The pages behind the first missing one: their parent is another page now."""
        for key in keys[self.match(keys) :]:
            if page := self.held.get(key):
                self.remove(page, page.used)


class Radix(Hash):
    """Only leaves are in the order of eviction, so that every held page can be found."""

    def offer(self, page: Page) -> None:
        page.entry = None  # its place from the time when it was a leaf
        if not page.children:
            super().offer(page)

    def remove(self, page: Page, now: int) -> None:
        super().remove(page, now)
        parent = page.parent
        if parent is not None and parent.used != now:
            self.offer(parent)


INDEXES: dict[str, type[Flat]] = {"flat": Flat, "hash": Hash, "radix": Radix}
