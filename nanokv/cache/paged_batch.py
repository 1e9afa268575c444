"""Rows of different lengths over one page pool: a decode step of many requests copies no old keys.

`pages` returns one page table for all rows, so an attention that reads pages takes the whole batch
at once. `append` is that of the batch cache: dense, padded on the left, for the plain model.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.batch import BatchCache, BatchLayer
from nanokv.cache.capabilities import Pages, causal, in_place, reserve_of_all
from nanokv.cache.checks import check_append
from nanokv.cache.paged import all_as_made, as_made
from nanokv.cache.pool import PagePool
from nanokv.cache.state import StateLayer
from nanokv.cache.view import View, next_view
from nanokv.config import Config
from nanokv.errors import CacheError


class PagedBatchLayer(BatchLayer):
    """Layer i of every row."""

    def __init__(self, parent: "PagedBatch", layer: int, parts: list[Any]):
        super().__init__(parts)
        self.parent = weakref.proxy(parent)
        self.layer = layer

    def _reserve(self, like) -> Pages | None:
        if not all(map(as_made, self.parts)):
            return None
        view = next_view(self.parent, self.layer, [row.length for row in self.parts], 1, like)
        for row in self.parts:
            row.length += 1
        return view.pages[self.layer]

    @in_place(_reserve)
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, expected=self._expected)
        # Pages for all rows or for none.
        next_view(self.parent, self.layer, [row.length for row in self.parts], k.shape[2], k)
        return super().append(k, v)


class PagedBatch(BatchCache):
    """`rows[b]` is a paged cache of one sequence; all rows share one pool.

    A step takes pages for all rows or for none. An append here writes into the rows, which stay
    usable as caches. To undo a failed step, truncate every row (or this cache) to its length
    before.
    """

    def __init__(self, rows: Iterable[KVCache], config: Config | None):
        super().__init__(rows, config)
        self.view: View | None = None
        # A row without a pool is refused below.
        self.pool: PagePool = getattr(self.rows[0], "pool", None)  # type: ignore[assignment]
        alike = all(
            getattr(row, "pool", None) is self.pool and len(row.tables) == 1 for row in self.rows
        )
        if self.pool is None or not alike:
            raise CacheError(
                "the rows of a paged batch must be paged caches of one sequence over one pool"
            )
        self.page_size = self.pool.page_size

    def layers(self, rows: Sequence[KVCache]) -> list[LayerCache]:
        layers: list[LayerCache] = []
        keyed = 0  # layers with pages so far: the number of the next one in the pool
        for parts in zip(*rows, strict=True):
            if isinstance(parts[0], StateLayer):
                layers.append(BatchLayer(list(parts)))
            else:
                layers.append(PagedBatchLayer(self, keyed, list(parts)))
                keyed += 1
        return layers

    def pages(self, like: Tensor) -> list[Pages] | None:
        if type(self[0]) is not PagedBatchLayer or reserve_of_all(self) is None:
            return super().pages(like)
        if not all_as_made(self.rows):
            return None
        view = next_view(self, 0, [row.counts[0] for row in self.rows], 1, like)
        for row in self.rows:
            row.advance()
        return view.pages

    @property
    def tables(self) -> list[list[int]]:
        """The page table of each row, oldest page first."""
        return [row.tables[0] for row in self.rows]

    def next_lengths(self) -> torch.Tensor | None:
        """(B,) int64: keys that the next token of each row sees; None for rows of equal length."""
        lengths = [row[0].length for row in self.rows]
        if len(set(lengths)) == 1:
            return None
        return torch.from_numpy(numpy.array(lengths) + 1)

    @causal(BatchCache.alike, rows=next_lengths)
    def mask(self, T: int) -> Tensor | None:
        """(B,1,T,S) bool: causal behind each row's padding.

        None or (T,S) if all rows are equally long.
        """
        lengths = [row[0].length for row in self.rows]
        if len(set(lengths)) == 1:
            return self.rows[0].mask(T)
        column = torch.arange(max(lengths) + T)  # (S,)
        pads = max(lengths) - torch.tensor(lengths)  # (B,)
        real = column >= pads[:, None, None, None]  # (B,1,1,S)
        return real & (column <= column[-T:, None])  # (B,1,T,S)
