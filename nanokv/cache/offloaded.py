"""Layers are stored outside the memory of the compute device: in host memory or in a file.

Only two layers are near (in the device's memory) at a time. While layer i computes, layer i + 1 is
fetched by a thread or by the GPU's copy engine (ferry.py). The transfer hides behind the arithmetic
if it is fast enough: every step moves the whole cache once. Bit-equal to the dict cache.
Reference: transformers' offloaded DynamicCache (CUDA only), FlexGen (arXiv 2303.06865).
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.checks import check_append, check_index
from nanokv.cache.ferry import Arriving, Ferry, ferry_for
from nanokv.cache.stores import DiskStore, HostStore
from nanokv.config import Config


class Fetch(NamedTuple):
    """A transfer that has begun; its `result()` are the first `tokens` rows."""

    tokens: int
    rows: Future | Arriving


class OffloadedLayer(LayerCache):
    """One layer's store; its rows are near only while they are needed."""

    like: Tensor  # (1,2,B,Hk,D): one stored row, for its shape and device; set by the first append

    def __init__(self, parent: "OffloadedCache", number: int, store: DiskStore | HostStore):
        self.parent = weakref.proxy(parent)
        self.number = number
        self.store = store
        self.length = 0
        self.coming: Fetch | None = None

    @property
    def sizes(self) -> Sizes:
        if not self.length:
            return Sizes(None, 0, 0)
        return Sizes(self.like.shape[2], self.length, self.nbytes)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held = None
        if self.length:
            held = self.like[:, 0].permute(1, 2, 0, 3).expand(-1, -1, self.length, -1)
        check_append(k, v, held, self._expected)
        new = torch.stack((k, v)).permute(3, 0, 1, 2, 4)  # (T,2,B,Hk,D)
        past = self.near()
        self.like = new[:1].clone()  # a view would keep the whole chunk near
        self.store.write(self.length, new, self.parent.ferry(k.device))
        self.length += k.shape[2]
        # Fetch the next layer while this one computes. With one layer, the next is this one.
        self.parent[(self.number + 1) % len(self.parent)].fetch()
        rows = new if past is None else joined(past, new)  # (S,2,B,Hk,D)
        k, v = rows.permute(1, 2, 3, 0, 4)  # (B,Hk,S,D) ×2
        return k, v

    def fetch(self) -> None:
        """Begin to bring this layer's rows near."""
        if self.length and self.coming is None:
            self.coming = self.begin()

    def begin(self) -> Fetch:
        ferry = self.parent.ferry(self.like.device)
        return Fetch(self.length, self.store.begin(self.length, self.like, ferry))

    def near(self) -> Tensor | Arriving | None:
        """All rows so far, or None if there are none; waits for the fetch that has begun.

        A fetch of another length (truncate or restore came after it) is dropped and done again.
        """
        fetch = self.coming
        self.coming = None
        if not self.length:
            return None
        if fetch is None or fetch.tokens != self.length:
            fetch = self.begin()
        return fetch.rows.result()

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        self.length = min(n, self.length)

    def state(self) -> dict[str, Tensor]:
        past = self.near()
        if past is None:
            return {}
        rows = joined(past)  # (S,2,B,Hk,D)
        return dict(zip(("key", "value"), rows.permute(1, 2, 3, 0, 4), strict=True))

    def restore(self, state: dict[str, Tensor]) -> None:
        self.coming = None
        self.length = 0
        if state:
            rows = torch.stack((state["key"], state["value"])).permute(3, 0, 1, 2, 4)
            self.store.write(0, rows, self.parent.ferry(rows.device))
            self.like = rows[:1].clone()
            self.length = len(rows)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        if not self.length:
            return 0
        return self.length * self.like.nbytes


def joined(past: Tensor | Arriving, *new: Tensor) -> Tensor:
    """(S,2,B,Hk,D): the fetched rows and the new ones. Rows in a ferry's buffer are copied."""
    if not isinstance(past, Arriving):
        return torch.cat((past, *new)) if new else past
    try:
        return torch.cat((past.use(), *new))
    finally:
        past.done()


class OffloadedCache(KVCache):
    """A cache whose layers live in stores; `make_store()` makes the store of one layer."""

    config: Config

    def __init__(self, config: Config, make_store: Callable[[], DiskStore | HostStore]):
        super().__init__((), config)
        self.make_store = make_store
        self.ferries: dict[torch.device, Ferry | None] = {}
        self.extend(OffloadedLayer(self, i, make_store()) for i in range(config.num_kv_layers))

    def ferry(self, device: torch.device) -> Ferry | None:
        """The Ferry between the host and this device; None for a CPU."""
        if device not in self.ferries:
            self.ferries[device] = ferry_for(device)
        return self.ferries[device]

    def fork(self) -> "OffloadedCache":
        copy = OffloadedCache(self.config, self.make_store)
        copy[:] = self.copies(copy, slice(None))
        return copy._made_like(self)

    def reorder(self, index: Index) -> None:
        index = check_index(index, self.sizes.batch_size)
        made = replace(self.made, batch_size=len(index))
        # One statement, so an interrupt never leaves new layers beside the old batch size.
        self[:], self.made = self.copies(self, index), made

    def copies(self, parent: "OffloadedCache", index: Tensor | slice) -> list[OffloadedLayer]:
        """New layers with new stores that hold the rows `index` of every layer."""
        layers = []
        for i, layer in enumerate(self):
            copy = OffloadedLayer(parent, i, self.make_store())
            copy._expected = layer._expected
            copy.restore({name: rows[index] for name, rows in layer.state().items()})
            layers.append(copy)
        return layers
