"""The state that the layers of a paged cache share in one step: page tables as tensors.

The first layer of a step makes the view, and the other layers find it: one table per step, not one
per layer.
"""

from itertools import chain
from typing import NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Pages
from nanokv.cache.checks import check_append
from nanokv.cache.pool import PagePool
from nanokv.errors import CacheError

SPARE = 16  # the width of a table is a multiple of this, so that most new pages fit


class Slots(NamedTuple):
    """Where the new tokens of a step go."""

    page: Tensor  # (B,T) int64
    slot: Tensor  # (B,T) within the page


class View:
    """Tables and lengths as tensors, made by the first layer of a step and used by all.

    `pages[i]`, the location of layer i, stays the same object until the number of rows, the memory
    of the pool or the width of the table changes. A new page is one more number in the table.
    """

    def __init__(self, pool: PagePool, tables: list[list[int]]):
        self.pool = pool
        self.keys = pool.keys
        self.tables = [list(table) for table in tables]
        sizes = numpy.fromiter(map(len, tables), numpy.int64, len(tables))  # (B,)
        width = (int(sizes.max()) // SPARE + 1) * SPARE
        # The numbers after a row's last page are never read.
        self.host = numpy.zeros((len(tables), width), numpy.int32)  # (B,n)
        every = chain.from_iterable(tables)
        self.host[numpy.arange(width) < sizes[:, None]] = numpy.fromiter(every, numpy.int32)
        with torch.inference_mode(False):  # steps outside inference mode write to both
            # `host` is not pinned, so it has been read when the copy returns.
            self.table = torch.from_numpy(self.host).to(pool.keys.device, non_blocking=True)
            self.lengths = torch.zeros(len(tables), dtype=torch.int32)  # (B,)
        self.pages = [
            Pages(k, v, self.lengths, self.table)
            for k, v in zip(pool.keys, pool.values, strict=True)
        ]
        self.next: tuple[list[int], int] = [], 0  # (starts, T) of the step
        self.index: Slots | None = None  # made by the first `write` of the step

    def follows(self, pool: PagePool, tables: list[list[int]]) -> bool:
        """Update the rows whose pages changed; False if the change needs a new view."""
        if self.keys is not pool.keys or len(tables) != len(self.tables):
            return False
        changed = [b for b, table in enumerate(tables) if table != self.tables[b]]
        if any(len(tables[b]) > self.host.shape[1] for b in changed):
            return False
        for b in changed:
            self.host[b, : len(tables[b])] = tables[b]
        if changed and self.table.device.type != "cpu":  # on a CPU, table and host share memory
            self.table.copy_(torch.from_numpy(self.host), non_blocking=True)
        for b in changed:  # last, so that an interrupted update is repeated
            self.tables[b] = list(tables[b])
        return True

    def begin(self, starts: list[int], T: int) -> None:
        """Begin a step of T new tokens at starts[b] of every row."""
        self.index = None
        self.next = starts, T
        self.lengths.numpy()[:] = starts
        self.lengths += T

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write (B,Hk,T,D) ×2 of the new tokens to the pool; the past is not touched."""
        if self.index is None:
            self.index = self.slots()
        page, slot = self.index
        self.pool.keys[layer][page, :, slot] = k.transpose(1, 2)  # (B,T,Hk,D)
        self.pool.values[layer][page, :, slot] = v.transpose(1, 2)

    def slots(self) -> Slots:
        """Page and slot of each new token."""
        starts, T = self.next
        position = torch.tensor(starts)[:, None] + torch.arange(T)  # (B,T)
        position = position.to(self.table.device)
        page = self.table.gather(1, position // self.pool.page_size)  # (B,T)
        return Slots(page.long(), position % self.pool.page_size)


class Owner(Protocol):
    """A paged cache, or a batch of paged caches: a list of layers over one pool."""

    pool: PagePool
    view: View | None

    @property
    def tables(self) -> list[list[int]]: ...

    def __getitem__(self, layer: int, /) -> LayerCache: ...


def next_view(owner: Owner, layer: int, starts: list[int], T: int, like: Tensor) -> View:
    """The view in which T tokens follow starts[b] in every row; takes pages for all rows or none.

    Every layer calls this. The first layer of a step takes the pages, the others find its view.
    """
    if like.shape[0] != len(starts):
        raise CacheError(f"cannot append keys {tuple(like.shape)} to {len(starts)} rows")
    pool = owner.pool
    view = owner.view
    pool.storage(like)
    if layer and view is not None and view.next == (starts, T) and view.keys is pool.keys:
        return view
    check_append(like, like, expected=owner[layer]._expected)
    pool.reserve(owner.tables, starts, [T] * len(starts))
    tables = owner.tables
    if view is None or not view.follows(pool, tables):
        view = owner.view = View(pool, tables)
    view.begin(starts, T)
    return view
