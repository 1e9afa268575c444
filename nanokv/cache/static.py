"""One slab per layer, allocated once and written in place: no copy of the past, fixed addresses.

The capacity must be known in advance, and all of it is allocated however few tokens come.
Reference: transformers' StaticCache, which cannot roll back; here truncate only changes a length.
"""

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Pages, Sizes, in_place
from nanokv.cache.checks import check_append
from nanokv.cache.options import growing_slots
from nanokv.errors import CapacityError

KEYS = attrgetter("keys")
VALUES = attrgetter("values")


class Slabs:
    """Pages of all layers with one shared tensor of lengths, so a step updates it once."""

    def __init__(self, layers: Sequence["StaticCache"], like: Tensor):
        self.like = like.shape, like.dtype, like.device
        with torch.inference_mode(False):  # steps outside of that mode write to it too
            self.lengths = torch.zeros(like.shape[0], dtype=torch.int32)  # (B,)
        self.pages = [Pages(layer.keys, layer.values, self.lengths) for layer in layers]
        self.slots = min(layer.slots for layer in layers)

    def hold(self, layers: Sequence["StaticCache"], like: Tensor) -> bool:
        """True while the layers have these slabs and `like` is as it was when they were made."""
        if self.like != (like.shape, like.dtype, like.device) or len(layers) != len(self.pages):
            return False
        same_keys = all(map(is_, map(KEYS, layers), map(KEYS, self.pages)))
        return same_keys and all(map(is_, map(VALUES, layers), map(VALUES, self.pages)))


def reserve_all(cache: Any, like: Tensor) -> list[Pages] | None:
    """`_reserve` of every layer at once; None, changing nothing, if the step before differed."""
    lengths = [layer.length for layer in cache]
    start = lengths[0]
    slabs = vars(cache).get("slabs")
    if slabs is None or not slabs.hold(cache, like):
        if not all(layer.as_before(like) for layer in cache):
            return None
        slabs = cache.slabs = Slabs(cache, like)
    if start >= slabs.slots or lengths.count(start) < len(lengths):
        return None
    slabs.lengths.fill_(start + 1)
    for layer in cache:
        layer.length = start + 1
    return slabs.pages


class StaticCache(LayerCache):
    """`keys` and `values` (B,Hk,N,D), the first `length` of N slots in use.

    The first append allocates them.
    """

    capacity: int  # None in a subclass that grows
    keys: Tensor  # None until the first append
    values: Tensor

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._allocate_later()
        self.given: Pages | None = None  # the pages that `_reserve` last returned
        self.made_for: tuple[int, torch.dtype] | None = None  # batch size and dtype of their caller
        self.slots = 0  # how many tokens they hold

    def _allocate_later(self) -> None:
        self.length = 0
        self.keys = self.values = None  # type: ignore[assignment]  # every use is after an append

    def _reserve(self, like: Tensor) -> Pages | None:
        pages = self.given
        if pages is None or not self.as_before(like) or self.length == self.slots:
            check_append(like, like, self.keys, self._expected)
            self.make_room(self.length + 1, like)
            if not (self.keys.is_contiguous() and self.values.is_contiguous()):
                return None  # the caller has replaced a slab by a view
            with torch.inference_mode(False):  # steps outside of that mode write to it too
                lengths = torch.zeros(like.shape[0], dtype=torch.int32)  # (B,)
            self.given = pages = Pages(self.keys, self.values, lengths)
            self.made_for, self.slots = (like.shape[0], like.dtype), self.keys.shape[2]
        pages.lengths.fill_(self.length + 1)
        self.length += 1
        return pages

    def as_before(self, like: Tensor) -> bool:
        """True if the slabs, and the shape and dtype of new keys, are those of the step before."""
        pages = self.given
        if pages is None or pages.keys is not self.keys or pages.values is not self.values:
            return False
        return self.made_for == (like.shape[0], like.dtype)

    @in_place(_reserve, at_once=reserve_all)
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, self.keys, self._expected)
        start = self.length
        end = start + k.shape[2]
        self.make_room(end, like=k)
        # Writes T slots, whatever S is.
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        self.length = end
        # Views: nothing is copied.
        return self.keys[:, :, :end], self.values[:, :, :end]  # (B,Hk,S,D) ×2

    def make_room(self, slots: int, like: Tensor) -> None:
        """Allocate at first; raise CapacityError before anything is written, so layer 0 refuses."""
        if slots > self.capacity:
            raise CapacityError(
                f"the cache holds {self.length} of {self.capacity} tokens: "
                f"{slots - self.length} more do not fit",
                hint=f"make it with capacity={slots} or more, or use the growing cache",
            )
        if self.keys is None:
            keys = empty_slab(like, self.capacity)
            values = empty_slab(like, self.capacity)
            self.keys, self.values = keys, values

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        # The slots after n are written again before they are read again.
        self.length = min(n, self.length)

    def empty(self) -> "StaticCache":
        """A cache like this one, without tokens."""
        return type(self)(self.capacity)

    def fork(self) -> "StaticCache":
        copy = self.empty()
        copy.restore(self.state())
        return copy

    def _reordered(self, index):
        copy = self.empty()
        copy.restore({name: used[index] for name, used in self.state().items()})  # (B',Hk,S,D)
        return copy

    def state(self) -> dict[str, Tensor]:
        if not self.length:
            return {}
        return {"key": self.keys[:, :, : self.length], "value": self.values[:, :, : self.length]}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Copy `state` into a new slab; unused slots are neither copied nor read."""
        self._allocate_later()
        if state:
            self.append(state["key"], state["value"])

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        if self.keys is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    @property
    def sizes(self) -> Sizes:
        if self.keys is None:
            return Sizes(None, 0, 0)
        used = self.nbytes // self.keys.shape[2] * self.length
        return Sizes(self.keys.shape[0], self.length, used)


class GrowingCache(StaticCache):
    """A slab that doubles when full: N appends copy fewer than 2N tokens, where `cat` copies N²/2.

    `expected_tokens` is not a limit: the slab has that size until more tokens come.
    """

    def __init__(self, expected_tokens: int | None = None):
        super().__init__(None)  # type: ignore[arg-type]  # no limit; make_room below reads none
        self.expected_tokens = expected_tokens

    def empty(self) -> "GrowingCache":
        return type(self)(self.expected_tokens)

    def make_room(self, slots: int, like: Tensor) -> None:
        if self.keys is not None and slots <= self.keys.shape[2]:
            return
        size = growing_slots(slots, self.expected_tokens)
        keys = empty_slab(like, size)  # (B,Hk,2N,D)
        values = empty_slab(like, size)  # (B,Hk,2N,D)
        if self.length:
            keys[:, :, : self.length] = self.keys[:, :, : self.length]
            values[:, :, : self.length] = self.values[:, :, : self.length]
        # One statement, so an interrupt never leaves slabs of different sizes.
        self.keys, self.values = keys, values


def empty_slab(like: Tensor, slots: int) -> Tensor:
    """(B,Hk,slots,D), uninitialised. Usable outside inference mode too."""
    B, Hk, _, D = like.shape
    with torch.inference_mode(False):
        return torch.empty(B, Hk, slots, D, dtype=like.dtype, device=like.device)
