"""Pages of a few tokens from one pool, as PagedAttention does (Kwon et al. 2023, arXiv 2309.06180).

A sequence owns a table of page numbers, shared by all layers; page p of layer i is
`pool.keys[i][p]`. Nothing is reserved ahead: a page is taken for its first token and returns to the
pool when its last owner releases it. Forked sequences share pages, and a shared page is copied
before it is written. `append` returns dense keys gathered from the pages, so that any attention
function can read them; this copies S rows per layer and step. `pages` copies nothing: it returns
the location of the pages.

Recurrent layers have no pages: each row's state is in a StateLayer of the cache, and forked caches
share its tensors, which are never changed.
"""

import weakref
from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Any, Self

import torch
from torch import Tensor

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import RESERVES, Index, Pages, Sizes, in_place, reserve_of
from nanokv.cache.checks import check_append, check_index
from nanokv.cache.pool import PagePool
from nanokv.cache.state import StateLayer
from nanokv.cache.view import View, next_view


class PagedCache(KVCache):
    """B sequences of equal length; `tables[b]` lists the pages of row b, oldest first."""

    def __init__(self, pool: PagePool, batch_size: int = 1):
        self.counts = [0] * pool.layers  # tokens of each layer with keys
        self.states: list[StateLayer] = []  # of the recurrent layers
        self.own: list[LayerCache] = self.make_layers(pool)
        # True once the caller replaces `append` or the class of a layer; a recurrent layer is found
        # in the same way.
        self.patched = bool(self.states)
        super().__init__(self.own, pool.config)
        self.pool = pool
        self.page_size = pool.page_size
        self.tables: list[list[int]] = [[] for _ in range(batch_size)]
        self.view: View | None = None
        pool.join(self)

    def make_layers(self, pool: PagePool) -> list[LayerCache]:
        """A PagedLayer or a StateLayer for each layer of the model."""
        layers: list[LayerCache] = []
        for number in range(0, pool.config.num_hidden_layers, pool.config.kv_sharing_factor):
            if pool.config.has_state(number):
                self.states.append(StateLayer(keeps=pool.config.state_name))
                layers.append(self.states[-1])
            else:
                layers.append(PagedLayer(self, len(layers) - len(self.states)))
        return layers

    @property
    def capacity(self) -> int | None:
        """Tokens per row, if no other cache takes pages; None = as memory allows."""
        pool = self.pool
        if pool.limit is None:
            return None
        return len(pool.references) // len(self.tables) * pool.page_size

    def reserve(self, start: int, end: int) -> None:
        """Pages for positions start … end−1 of every row, none of them shared."""
        rows = len(self.tables)
        self.pool.reserve(self.tables, [start] * rows, [end - start] * rows)

    @property
    def length(self) -> int:
        even = self.even()
        if even is None:
            return super().length
        return even

    def even(self) -> int | None:
        """Tokens per layer, if all layers are the original ones, with keys, and equally long.

        Else None. Compares two lists at once, which is faster than asking 28 layers.
        """
        counts = self.counts
        if counts.count(counts[0]) == len(counts) and self.own == self and not self.states:
            return counts[0]
        return None

    def advance(self, tokens: int = 1) -> None:
        """Count more tokens in each layer."""
        counts = self.counts
        if counts.count(counts[0]) == len(counts):
            counts[:] = [counts[0] + tokens] * len(counts)
        else:
            counts[:] = [count + tokens for count in counts]

    def pages(self, like: Tensor) -> list[Pages] | None:
        if not all_as_made([self]):  # ask each layer, so that a caller's append is respected
            return super().pages(like)
        layer: Any = self[0]  # a PagedLayer
        view = layer.step(1, like)
        self.advance()
        return view.pages

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.trim()

    def trim(self) -> None:
        """Release the pages that hold no token, for example after a failed append."""
        self.view = None
        keep = self.pages_of(max(layer.length for layer in self))
        if any(len(table) > keep for table in self.tables):
            self.pool.hold(self, [table[:keep] for table in self.tables])

    def pages_of(self, tokens: int) -> int:
        """Pages that `tokens` tokens of a row take."""
        return -(-tokens // self.pool.page_size)

    def resize(self, rows: int) -> None:
        """Change the number of rows, if nothing is stored yet."""
        if rows != len(self.tables) and not any(self.tables):
            self.tables = [[] for _ in range(rows)]

    def free(self) -> None:
        """Release every page; the cache is empty afterwards."""
        self.truncate(0)

    def fork(self) -> Self:
        copy = type(self)(self.pool, len(self.tables))
        copy.adopt(self.tables, self.length)
        for mine, theirs in zip(copy.states, self.states, strict=True):
            mine.history, mine.pads = theirs.history, theirs.pads
        return copy._made_like(self)

    def reorder(self, index: Index) -> None:
        index = check_index(index, rows=len(self.tables))
        states = [state._reordered(index) for state in self.states]
        self.adopt([self.tables[i] for i in index.tolist()], self.length)
        for mine, new in zip(self.states, states, strict=True):
            mine.history, mine.pads = new.history, new.pads

    def adopt(self, tables: Sequence[list[int]], length: int) -> None:
        """Become another owner of the pages that hold the first `length` tokens of each row.

        Recurrent layers stay as they are: the caller gives them their states.
        """
        self.view = None
        self.pool.hold(self, [table[: self.pages_of(length)] for table in tables])
        for layer in self:
            if not isinstance(layer, StateLayer):
                layer.length = length

    def __del__(self):
        if hasattr(self, "tables"):
            self.pool.leave(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that this cache uses, and of states; a page counts once."""
        return self.page_nbytes + sum(state.nbytes for state in self.states)

    @property
    def page_nbytes(self) -> int:
        """Bytes of the pages that this cache uses; a page shared by rows counts once."""
        return len({page for table in self.tables for page in table}) * self.pool.bytes_per_page

    @property
    def sizes(self) -> Sizes:
        """Rows, keys and bytes held; only the slots of a page that hold a token count as used."""
        states = [state.sizes for state in self.states]
        limits = [each.max_rollback for each in states if each.max_rollback is not None]
        used = self.page_used + sum(each.used_nbytes for each in states)
        kept = states[0].snapshots if states else ()
        return Sizes(len(self.tables), max(self.counts), used, min(limits, default=None), kept)

    @property
    def page_used(self) -> int:
        """Bytes of the slots that hold a token."""
        size = self.pool.page_size
        length = max(self.counts)
        filled = {}  # page → slots in use; rows that share a page fill the same slots
        for table in self.tables:
            for i, page in enumerate(table):
                filled[page] = min(size, length - i * size)
        return sum(filled.values()) * self.pool.bytes_per_page // size


class PagedLayer(LayerCache):
    """One layer's view of the pages."""

    def __init__(self, parent: PagedCache, layer: int):
        # A proxy avoids a reference cycle, so pages are released as soon as the cache is deleted.
        self.parent = weakref.proxy(parent)
        self.layer = layer
        self.counts = parent.counts

    def __setattr__(self, name, value):
        if name in ("append", "__class__"):
            self.parent.patched = True
        super().__setattr__(name, value)

    @property
    def length(self) -> int:  # type: ignore[override]  # a property for the base's attribute
        return self.counts[self.layer]

    @length.setter
    def length(self, n: int) -> None:
        self.counts[self.layer] = n

    def _reserve(self, like) -> Pages | None:
        if not as_made(self):  # a caller's append may write and gather differently
            return None
        view = self.step(1, like)
        self.length += 1
        return view.pages[self.layer]

    @in_place(_reserve)
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        table = self.write(k, v).table
        pool = self.parent.pool
        return self.gather(pool.keys, table), self.gather(pool.values, table)  # (B,Hk,S,D) ×2

    def write(self, k: Tensor, v: Tensor) -> View:
        """Write (B,Hk,T,D) ×2 behind the tokens so far; returns the view of this step."""
        check_append(k, v)
        view = self.step(k.shape[2], k)
        view.write(self.layer, k, v)
        self.length += k.shape[2]
        return view

    def step(self, T: int, like: Tensor) -> View:
        """Reserve pages for T more tokens per row."""
        return next_view(self.parent, self.layer, [self.length] * len(self.parent.tables), T, like)

    def gather(self, pages: Tensor, table: Tensor) -> Tensor:
        """Dense (B,Hk,S,D): every page of every row, copied once."""
        used = table[:, : self.parent.pages_of(self.length)]  # (B,n)
        # Indexing by a tensor copies.
        dense = pages[self.layer].transpose(0, 1)[:, used]  # (P,Hk,page,D) → (Hk,B,n,page,D)
        # This is a view, because the pages of a row are now consecutive.
        return dense.transpose(0, 1).flatten(2, 3)[:, :, : self.length]  # (B,Hk,S,D)

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        self.length = min(n, self.length)

    def _rollback(self, snapshot):
        self.truncate(snapshot)
        self.parent.trim()

    def state(self) -> dict[str, Tensor]:
        pool = self.parent.pool
        if not self.length:
            return {}
        table = torch.tensor(self.parent.tables, device=pool.keys.device)  # (B,n)
        return {"key": self.gather(pool.keys, table), "value": self.gather(pool.values, table)}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.length = 0
        if state:
            self.parent.resize(state["key"].shape[0])
            self.write(state["key"], state["value"])

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        return self.parent.page_nbytes // self.parent.pool.layers

    @property
    def sizes(self) -> Sizes:
        parent = self.parent
        return Sizes(len(parent.tables), self.length, parent.page_used // parent.pool.layers)


OWN = attrgetter("own")


def all_as_made(caches: Sequence[PagedCache]) -> bool:
    """`as_made` of every layer of every cache.

    A step of a large batch has 7,000 layers, so only the layers of patched caches are inspected.
    """
    if PagedLayer.append not in RESERVES:
        return False
    if not all(map(eq, map(OWN, caches), caches)):  # list equality, which starts with identity
        return False
    return all(all(map(as_made, cache)) for cache in caches if cache.patched)


def as_made(layer: LayerCache) -> bool:
    """True for a PagedLayer with its original append: not a subclass, wrapper or patched layer."""
    return type(layer) is PagedLayer and reserve_of(layer) is not None
