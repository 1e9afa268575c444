"""Several prompts in one forward over one page pool: a kernel reads and writes the pages in place.

`pages` gives each of the N rows its sequence, so an attention that reads pages takes all prompts at
once. `append` is that of the packed cache, for the plain model.
"""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from nanokv.cache.base import KVCache
from nanokv.cache.capabilities import Pages
from nanokv.cache.checks import check_append
from nanokv.cache.packed import PackedCache
from nanokv.cache.paged import all_as_made
from nanokv.cache.pool import PagePool
from nanokv.cache.view import View
from nanokv.config import Config
from nanokv.errors import CacheError


class PagedPack(PackedCache):
    """`caches` are paged caches over one pool. Pages are taken for all sequences or for none."""

    def __init__(self, caches: Sequence[KVCache], counts: Sequence[int], config: Config | None):
        super().__init__(caches, counts, config)
        self.page_size = caches[0].page_size

    def pages(self, like: Tensor) -> list[Pages] | None:
        """(N,Hk,1,D): the shape and dtype of the keys → the pages of every layer, for N rows."""
        caches: list[Any] = self.caches  # PagedCaches
        if not all_as_made(caches):
            return super().pages(like)
        if like.shape[0] != sum(self.counts):
            raise CacheError(
                f"cannot append keys {tuple(like.shape)} to sequences of {self.counts} tokens"
            )
        pool = caches[0].pool
        pool.storage(like)
        check_append(like, like, expected=self[0]._expected)
        lengths = self.length.int() + 1  # (N,)
        of_rows = numpy.arange(len(caches), dtype=numpy.int32).repeat(self.counts)  # (N,)
        sequence = torch.from_numpy(of_rows)
        tables = [cache.tables[0] for cache in caches]
        pool.reserve(tables, [cache.length for cache in caches], self.counts)
        view = View(pool, tables)
        found = [
            Pages(k, v, lengths, view.table, sequence)
            for k, v in zip(pool.keys, pool.values, strict=True)
        ]
        for cache, count in zip(caches, self.counts, strict=True):
            cache.advance(count)
        return found


def pack(caches: Sequence[KVCache], counts: Sequence[int], config: Config | None) -> PackedCache:
    """The next counts[b] tokens of caches[b] as one cache: a PagedPack if one pool holds them."""
    pools = [getattr(cache, "pool", None) for cache in caches]
    if pools and isinstance(pools[0], PagePool) and all(pool is pools[0] for pool in pools):
        return PagedPack(caches, counts, config)
    return PackedCache(caches, counts, config)
