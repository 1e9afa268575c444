"""Prompts of different lengths in one rectangle: padding on the left, hidden by the mask.

The wrapper goes around any cache of B rows and stores only how many columns of padding each row
begins with. `length` gives every row its position (negative within the padding), so rotary
positions are right without further work. Padding costs as many bytes and FLOPs as real tokens. The
ragged BatchCache has no padding in its stores, but prefills rows one by one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanokv.cache.base import KVCache
from nanokv.cache.batch import width
from nanokv.cache.capabilities import Index, Sizes, causal, causal_keys
from nanokv.cache.checks import check_index
from nanokv.errors import CacheError, UnsupportedError


class PaddedCache(KVCache):
    """`inner`, an empty cache of B rows, for rows that begin with pads[b] padding tokens."""

    def __init__(self, inner: KVCache, pads: Sequence[int] | Tensor):
        super().__init__(inner, inner.config)
        self.inner = inner
        self.pads = torch.as_tensor(pads)  # (B,) int64
        if (
            self.pads.dim() != 1
            or self.pads.numel() == 0
            or self.pads.is_floating_point()
            or self.pads.min() < 0
        ):
            raise CacheError(
                f"pads is {self.pads.tolist()!r}: a number of columns ≥ 0 for each row was expected"
            )
        inner._check_padding()
        for layer in inner:
            layer._pad(self.pads)
        if inner.made.options.get("sinks") and self.pads.any():
            raise UnsupportedError(
                "the attention sinks of a padded row would be its padding",
                hint="use generate_ragged, or a sliding cache with sinks=0",
            )

    @property
    def length(self) -> Any:
        """(B,) int64: tokens of each row without its padding; −pads before the first append."""
        return self.inner.length - self.pads

    @property
    def capacity(self) -> int | None:
        """The tokens that fit in the row with the most padding."""
        if self.inner.capacity is None:
            return None
        return self.inner.capacity - int(self.pads.max())

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, padding included."""
        return self.inner.nbytes

    @property
    def sizes(self) -> Sizes:
        """Rows, keys and bytes held, padding included."""
        return replace(self.inner.sizes, batch_size=len(self.pads))

    @causal(lambda cache, T: None if cache.pads.any() else causal_keys(cache.inner, T))
    def mask(self, T: int) -> Tensor | None:
        """(B,1,T,S) bool: the inner mask without the padding.

        A query in the padding sees only itself. Its output is never read, but a softmax over no
        keys is NaN, and NaN × 0 is NaN in every later sum.
        """
        mask = self.inner.mask(T)
        length = self.inner.length
        if not self.pads.any():
            return mask
        S = width(self.inner._widest, T, mask)
        if mask is None:
            mask = torch.ones(T, S, dtype=torch.bool)
        # The column of each key, padding included.
        column = torch.arange(length + T - S, length + T)  # (S,)
        query = torch.arange(length, length + T)[:, None]  # (T,1)
        real = column >= self.pads[:, None, None, None]  # (B,1,1,S)
        return (mask.cpu() & real) | (column == query)  # (B,1,T,S)

    def truncate(self, n: int) -> None:
        """Back to an earlier `length` (B,), or to 0: empty, so the padding must be fed again."""
        self.inner.truncate(self._column(n))

    def nearest(self, n: Any) -> Any:
        """The nearest `length` (B,) to an earlier one, or 0: empty."""
        column = self.inner.nearest(self._column(n))
        return column - self.pads if column else 0

    def _column(self, n: Any) -> int:
        """The column in which all rows of `length` n end."""
        if type(n) is int and n == 0:
            columns = torch.zeros_like(self.pads)  # (B,)
        else:
            columns = torch.as_tensor(n) + self.pads  # (B,)
        if columns.numel() != len(self.pads) or columns.unique().numel() > 1 or columns[0] < 0:
            raise UnsupportedError(
                "the rows of a padded cache all end in the same column", hint="use the batch cache"
            )
        return int(columns[0])

    def fork(self) -> "PaddedCache":
        return PaddedCache(self.inner.fork(), self.pads)

    def reorder(self, index: Index) -> None:
        index = check_index(index, len(self.pads))
        self.inner.reorder(index)
        self.pads = self.pads[index]
        self[:] = self.inner

    def _check_save(self) -> None:
        raise UnsupportedError(
            "a padded cache cannot be saved", hint="save the rows of a batch cache"
        )
