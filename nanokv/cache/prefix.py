"""A paged cache whose full pages outlive their request, for later prompts that begin the same way.

An index finds the pages by their tokens: by hashes (prefix_index.py) or in a radix tree (radix.py).
A salt separates tenants, who share no pages, so a tenant cannot learn from response times what
another one has sent. When the pool is full, pages that only the index holds are evicted, least
recently used first; pages of running requests are never evicted.

A model with recurrent layers continues only after a page with a snapshot of their states
(snapshots.py).
"""

from collections import Counter
from collections.abc import Sequence
from typing import Self

from torch import Tensor

from nanokv.cache.paged import PagedCache
from nanokv.cache.pool import ElasticPool, PagePool, Table
from nanokv.cache.prefix_index import HashIndex, PrefixIndex
from nanokv.cache.radix import RadixIndex
from nanokv.cache.snapshots import EVERY, MOST, NoSnapshots, Snapshots, Stops
from nanokv.config import Config
from nanokv.errors import CacheError

INDEXES: dict[str, type[PrefixIndex]] = {"hash": HashIndex, "radix": RadixIndex}


class PrefixPool(PagePool):
    """A page pool with an index of reusable pages. The index counts as one owner of each page."""

    def __init__(self, config: Config, pages: int, page_size: int, index: str = "hash"):
        super().__init__(config, pages, page_size)
        self.index = INDEXES[index](page_size)
        self.snapshots = NoSnapshots()
        self.keep_snapshots(EVERY, MOST)

    def keep_snapshots(self, every: int, most: int) -> None:
        """Begin with no snapshots, at most `most`, if the model has recurrent layers."""
        if self.config.states:
            self.snapshots = Snapshots(self.page_size, every, most)

    def count(self) -> None:
        super().count()
        self.snapshots.retain(self.index.pages())

    def owned(self) -> Counter[int]:
        return super().owned() + Counter(self.index.pages())

    def make_room(self, count: int) -> None:
        """Evict pages that only the index holds, if that frees enough; a failure evicts nothing."""
        short = count - len(self.free)
        if 0 < short <= self.idle():
            dropped = self.index.evict(short, self.is_idle)
            self.snapshots.drop(dropped)
            self._release(dropped)
        super().make_room(count)

    def is_idle(self, page: int) -> bool:
        """Whether only the index holds an indexed page."""
        return self.references[page] == 1

    def idle(self) -> int:
        """The number of pages that only the index holds."""
        return sum(map(self.is_idle, self.index.pages()))

    def available(self) -> int:
        """The number of pages that are free or that only the index holds."""
        self.settle()
        return len(self.free) + self.idle()

    def find(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Pages of the longest stored prefix of `tokens`."""
        return self.index.match(tokens, salt)

    def remember(self, tokens: Sequence[int], table: Table, salt: str) -> None:
        """Index the full pages of a sequence; pages already indexed are kept."""
        with self.change():
            added, dropped = self.index.insert(tokens, table, salt)
            self.snapshots.drop(dropped)
            self._share(added)
            self._release(dropped)


class ElasticPrefixPool(PrefixPool, ElasticPool):
    """Grows to `keep` pages; beyond that, it grows only if the idle pages are not enough."""

    def __init__(self, config: Config, pages: int, page_size: int, keep: int, index: str = "hash"):
        super().__init__(config, pages, page_size, index)
        self.keep = keep

    def make_room(self, count: int) -> None:
        if count > len(self.free) and len(self.references) < self.keep:
            self.exhausted(count)
        super().make_room(count)


class PrefixCache(PagedCache):
    """One sequence: call `reuse(prompt)` before the prefill and `remember(tokens)` after it."""

    pool: PrefixPool
    salt = ""
    hits = 0  # tokens that `reuse` found
    stops = Stops()

    def reuse(self, tokens: Sequence[int] | Tensor) -> int:
        """Take over the stored pages of the longest known prefix; returns its tokens.

        At least one token of the prompt is left to compute, because its logits are needed.
        """
        tokens = [int(token) for token in tokens]
        if self.length or len(self.tables) != 1:
            return 0
        self.truncate(0)
        size = self.pool.page_size
        known = self.pool.find(tokens[: len(tokens) - 1], self.salt)
        pages = self.pool.snapshots.usable(known)
        # A later prompt that parts from the known one at the same page can continue there.
        branch = 0 if len(known) == len(pages) else len(known) * size
        self.stops = Stops(branch, (len(tokens) - 1) // size * size)
        self.hits = len(pages) * size
        self.adopt([pages], self.hits)
        self.pool.snapshots.resume(self.states, pages)
        return self.hits

    def remember(self, tokens: Sequence[int] | Tensor) -> None:
        """Offer the full pages of this cache, which holds `tokens`, to later requests.

        The ids cannot be checked against the keys: ids that were never fed give wrong answers to
        the requests that reuse them. Ids beyond the cache's length are ignored. Fewer ids raise
        CacheError, because then the caller has lost count.
        """
        tokens = [int(token) for token in tokens]
        if len(tokens) < self.length:
            raise CacheError(f"remember: {len(tokens)} tokens for a cache that holds {self.length}")
        if len(self.tables) != 1:
            return
        size = self.pool.page_size
        self.pool.remember(tokens[: self.length], self.tables[0], self.salt)
        self.snap(tokens, [self.length // size * size])

    def remember_chunk(self, tokens: Sequence[int]) -> None:
        """`remember` in the middle of a prompt: snapshots only where they are due."""
        self.pool.remember(tokens[: self.length], self.tables[0], self.salt)
        self.snap(tokens, self.pool.snapshots.due(self.length, self.stops))

    def snap(self, tokens: Sequence[int], ends: list[int]) -> None:
        """Keep the states after the first n tokens for each n in `ends`, ends of indexed pages."""
        if not self.states or not ends:
            return
        size = self.pool.page_size
        # The index may hold equal pages of another sequence instead of this one's.
        pages = self.pool.index.match(tokens[: ends[-1]], self.salt)
        for end in ends:
            if 0 < end <= len(pages) * size:
                self.pool.snapshots.put(pages[end // size - 1], end, self.states)

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.hits = min(self.hits, n)

    def fork(self) -> Self:
        copy = super().fork()
        copy.salt = self.salt
        copy.stops = self.stops
        copy.hits = self.hits
        return copy
