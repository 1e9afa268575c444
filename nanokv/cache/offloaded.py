"""Layers are stored outside the memory of the compute device: in host memory or in a file.

Only two layers are near (in the device's memory) at a time. While layer i computes, layer i + 1 is
fetched by a thread or by the GPU's copy engine (ferry.py). The transfer hides behind the arithmetic
if it is fast enough: every step moves the whole cache once. Bit-equal to the dict cache.
Reference: transformers' offloaded DynamicCache (CUDA only), FlexGen (arXiv 2303.06865).
"""

import weakref
from dataclasses import replace

import torch

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Sizes
from nanokv.cache.checks import check_append, check_index
from nanokv.cache.ferry import Arriving, ferry_for


class OffloadedLayer(LayerCache):
    """One layer's store; its rows are near only while they are needed."""

    def __init__(self, parent, number: int, store):
        self.parent, self.number, self.store = weakref.proxy(parent), number, store
        # One row, for its shape and device.
        self.length, self.like, self.coming = 0, None, None  # like (1,2,B,Hk,D)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.like.shape[2] if self.length else None, self.length, self.nbytes)

    def append(self, k, v):
        held = (
            self.like[:, 0].permute(1, 2, 0, 3).expand(-1, -1, self.length, -1)
            if self.length
            else None
        )
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

    def fetch(self):
        """Begin to bring this layer's rows near."""
        if self.length and self.coming is None:
            self.coming = self.length, self.begin()

    def begin(self):
        return self.store.begin(self.length, self.like, self.parent.ferry(self.like.device))

    def near(self):
        """The rows so far, waiting for the fetch that has begun; it is of use if it is of the right length."""
        (tokens, coming), self.coming = self.coming or (None, None), None
        if not self.length:
            return None
        return (coming if tokens == self.length else self.begin()).result()

    def truncate(self, n: int):
        self._check_truncate(n)
        self.length = min(n, self.length)

    def state(self) -> dict:
        past = self.near()
        if past is None:
            return {}
        rows = joined(past)  # (S,2,B,Hk,D)
        return dict(zip(("key", "value"), rows.permute(1, 2, 3, 0, 4), strict=True))

    def restore(self, state: dict):
        self.length, self.coming = 0, None
        if state:
            rows = torch.stack((state["key"], state["value"])).permute(3, 0, 1, 2, 4)
            self.store.write(0, rows, self.parent.ferry(rows.device))
            self.length, self.like = len(rows), rows[:1].clone()

    @property
    def nbytes(self) -> int:
        return self.length * self.like.nbytes if self.length else 0


def joined(past, *new):
    """(S,2,B,Hk,D): what was fetched, and the new rows. Of a buffer a copy, because it is written again."""
    if not isinstance(past, Arriving):
        return torch.cat((past, *new)) if new else past
    try:
        return torch.cat((past.use(), *new)) if new else past.use().clone()
    finally:
        past.done()


class OffloadedCache(KVCache):
    """A cache whose layers live in stores; `make_store()` makes the store of one layer."""

    def __init__(self, config, make_store):
        super().__init__((), config)
        self.make_store, self.ferries = make_store, {}
        self.extend(OffloadedLayer(self, i, make_store()) for i in range(config.num_hidden_layers))

    def ferry(self, device):
        """What carries rows to this device and back; None for a CPU."""
        if device not in self.ferries:
            self.ferries[device] = ferry_for(device)
        return self.ferries[device]

    def fork(self) -> "OffloadedCache":
        copy = OffloadedCache(self.config, self.make_store)
        copy[:] = self.copies(copy, slice(None))
        return copy._made_like(self)

    def reorder(self, index):
        index = check_index(index, self.sizes.batch_size)
        made = replace(self.made, batch_size=len(index))
        # One statement, so an interrupt never leaves new layers beside the old batch size.
        self[:], self.made = self.copies(self, index), made

    def copies(self, parent, index) -> list[OffloadedLayer]:
        """These rows of every layer, in stores of their own."""
        layers = []
        for i, layer in enumerate(self):
            layers.append(OffloadedLayer(parent, i, self.make_store()))
            layers[i]._expected = layer._expected
            layers[i].restore({name: rows[index] for name, rows in layer.state().items()})
        return layers
