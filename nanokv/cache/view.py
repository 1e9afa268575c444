"""What the layers of a paged cache share in one step: page tables as tensors, and where the new tokens go.

Made by the first layer and found by the others: a table per step and not a table per layer.
"""

import torch

from nanokv.cache.capabilities import Pages
from nanokv.cache.checks import check_append
from nanokv.cache.pool import PagePool
from nanokv.errors import CacheError


class View:
    """Tables and lengths as tensors, made by the first layer of a step and used by all.

    `pages[i]`, where layer i lies, stays the same object for as long as no page comes or goes.
    """

    def __init__(self, pool: PagePool, tables):
        self.pool, self.keys, self.tables = pool, pool.keys, [list(table) for table in tables]
        widest = max(map(len, tables))
        # The padding is never read.
        padded = [table + [0] * (widest - len(table)) for table in tables]
        table = torch.tensor(padded, dtype=torch.int32)  # (B,n)
        self.table = table.to(pool.keys.device, non_blocking=True)  # not pinned: read by now
        with torch.inference_mode(False):
            # Written by every step.
            self.lengths = torch.zeros(len(tables), dtype=torch.int32)  # (B,)
        self.pages = [
            Pages(k, v, self.lengths, self.table)
            for k, v in zip(pool.keys, pool.values, strict=True)
        ]
        self.next = self.index = None

    def begin(self, starts: list[int], T: int):
        """T new tokens at starts[b] of every row."""
        self.next, self.index = (starts, T), None
        self.lengths.copy_(torch.tensor([start + T for start in starts]))

    def write(self, layer: int, k, v):
        """The new tokens' keys and values, to their places in the pool: T rows written, whatever S is."""
        if self.index is None:
            starts, T = self.next
            position = torch.tensor(starts)[:, None] + torch.arange(T)  # (B,T)
            position = position.to(self.table.device)
            page = self.table.gather(1, position // self.pool.page_size)  # (B,T)
            self.index = page.long(), position % self.pool.page_size
        page, slot = self.index
        self.pool.keys[layer][page, :, slot] = k.transpose(1, 2)  # (B,T,Hk,D)
        self.pool.values[layer][page, :, slot] = v.transpose(1, 2)


def next_view(owner, layer: int, starts: list[int], T: int, like) -> View:
    """The view of an owner of `pool`, `tables` and `view` in which T tokens follow starts[b]; pages for all or none.

    Every layer asks; the first one takes the pages, and the others find the view of their step.
    """
    if like.shape[0] != len(starts):
        raise CacheError(f"cannot append keys {tuple(like.shape)} to {len(starts)} rows")
    pool, view = owner.pool, owner.view
    pool.storage(like)
    if layer and view is not None and view.next == (starts, T) and view.keys is pool.keys:
        return view
    check_append(like, like, expected=owner[layer]._expected)
    pool.reserve(owner.tables, starts, T)
    if view is None or view.keys is not pool.keys or view.tables != owner.tables:
        view = owner.view = View(pool, owner.tables)
    view.begin(starts, T)
    return view
