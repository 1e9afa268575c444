"""A paged cache whose full pages outlive their request, for later prompts that begin the same way.

A page is found by a chain of sha256 hashes: each hash covers the hash of the page before and the
tokens of this page, so equal tokens after different beginnings get different hashes. The index
also stores and compares the tokens and the parent: a hash collision costs a recomputation, never a
wrong answer. A salt starts the chain; tenants with different salts share no pages, so a tenant
cannot learn from response times what another one has sent. When the pool is full, pages that only
the index holds are evicted, least recently used first; pages of running requests are never evicted.
Reference: vLLM's prefix caching (which compares no tokens), nano-vllm's block manager (which does).
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from nanokv.cache.paged import PagedCache
from nanokv.cache.pool import ElasticPool, PagePool, Table
from nanokv.config import Config
from nanokv.errors import CacheError


@dataclass(frozen=True, eq=False)
class Entry:
    """A stored page, its tokens, and the entry before it (for the first page: the salt)."""

    page: int
    parent: "Entry | str"  # an entry is compared by identity, so an equal hash is not enough
    tokens: tuple[int, ...]


class PrefixPool(PagePool):
    """A page pool with an index of reusable pages. The index counts as one owner of each page."""

    def __init__(self, config: Config, pages: int, page_size: int):
        super().__init__(config, pages, page_size)
        self.index: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first

    def owned(self) -> Counter[int]:
        return super().owned() + Counter(entry.page for entry in self.index.values())

    def make_room(self, count: int) -> None:
        """Evict pages that only the index holds, if that frees enough; a failure evicts nothing."""
        short = count - len(self.free)
        if short > 0:
            idle = [key for key, entry in self.index.items() if self.references[entry.page] == 1]
            if short <= len(idle):
                for key in idle[:short]:
                    self._release([self.index.pop(key).page])
        super().make_room(count)

    def available(self) -> int:
        """The number of pages that are free or that only the index holds."""
        self.settle()
        idle = sum(self.references[entry.page] == 1 for entry in self.index.values())
        return len(self.free) + idle

    def chain(self, tokens: Sequence[int], salt: str) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """(hash, tokens) of every full page of a sequence."""
        key = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            part = tuple(tokens[start : start + self.page_size])
            key = self.hash(key, part)
            yield key, part

    @staticmethod
    def hash(parent: bytes, tokens: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + b",".join(b"%d" % token for token in tokens)).digest()

    def find(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Pages of the longest stored prefix of `tokens`."""
        found: dict[bytes, Entry] = {}
        parent: Entry | str = salt
        for key, part in self.chain(tokens, salt):
            entry = self.index.get(key)
            if entry is None or entry.tokens != part or entry.parent != parent:
                break
            found[key] = parent = entry
        self.touch(found)
        return [entry.page for entry in found.values()]

    def remember(self, tokens: Sequence[int], table: Table, salt: str) -> None:
        """Index the full pages of a sequence.

        Pages already indexed are kept; on a hash collision the new page replaces the old one.
        """
        found: dict[bytes, Entry] = {}
        parent: Entry | str = salt
        with self.change():
            for (key, part), page in zip(self.chain(tokens, salt), table, strict=False):
                entry = self.index.get(key)
                if entry is None or entry.tokens != part or entry.parent != parent:
                    self._share([page])
                    if entry is not None:
                        self._release([entry.page])
                    entry = self.index[key] = Entry(page, parent, part)
                found[key] = parent = entry
        self.touch(found)

    def touch(self, keys: dict[bytes, Entry]) -> None:
        """Mark `keys` (root first) as most recently used; a leaf is evicted before its root."""
        for key in reversed(keys):
            self.index.move_to_end(key)


class ElasticPrefixPool(PrefixPool, ElasticPool):
    """Grows to `keep` pages; beyond that, it grows only if the idle pages are not enough."""

    def __init__(self, config: Config, pages: int, page_size: int, keep: int):
        super().__init__(config, pages, page_size)
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

    def reuse(self, tokens: Sequence[int] | Tensor) -> int:
        """Take over the stored pages of the longest known prefix; returns its tokens.

        At least one token of the prompt is left to compute, because its logits are needed.
        """
        tokens = [int(token) for token in tokens]
        if self.length or len(self.tables) != 1:
            return 0
        self.truncate(0)
        pages = self.pool.find(tokens[: len(tokens) - 1], self.salt)
        self.hits = len(pages) * self.pool.page_size
        self.adopt([pages], self.hits)
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
        if len(self.tables) == 1:
            self.pool.remember(tokens[: self.length], self.tables[0], self.salt)

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.hits = min(self.hits, n)

    def fork(self) -> Self:
        copy = super().fork()
        copy.salt = self.salt
        copy.hits = self.hits
        return copy
