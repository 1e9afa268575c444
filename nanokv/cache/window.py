"""The keys and values of a layer that sees only the newest positions: its window and some more.

The attention of the layer hides what is older than the window, so the cache may drop it: its bytes
stop growing. It keeps `SPARE` positions more than the window needs, so that as many tokens can be
taken back exactly (a rejected draft). Reference: DynamicSlidingWindowLayer of transformers, which
keeps window − 1 and cannot go back.
"""

from typing import Self

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.checks import check_append
from nanokv.cache.options import SPARE
from nanokv.errors import CacheError, UnsupportedError


class WindowLayer(LayerCache):
    """`keys`, `values` (B,Hk,n,D): the newest n of `length` positions, n ≤ window − 1 + SPARE.

    `append` returns the n old positions and the T new ones. The mask counts all positions; the
    layer's attention takes the last of its columns (windows.py).
    """

    _windowed = True
    keys: Tensor  # None until the first append
    values: Tensor

    def __init__(self, window: int):
        self.window = window
        self._rollback((0, None, None))

    @property
    def held(self) -> int:
        """Positions held."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, self.keys, self._expected)
        length = self.length + k.shape[2]
        if self.keys is not None:
            k = torch.cat((self.keys, k), 2)  # (B,Hk,n+T,D)
            v = torch.cat((self.values, v), 2)  # (B,Hk,n+T,D)
        n = min(length, self.window - 1 + SPARE)
        keys, values = k, v
        if n < k.shape[2]:
            # Clones, because a view would keep the memory of all n+T positions.
            keys = k[:, :, -n:].clone()  # (B,Hk,n,D)
            values = v[:, :, -n:].clone()  # (B,Hk,n,D)
        self._rollback((length, keys, values))
        return k, v

    @property
    def sizes(self) -> Sizes:
        rows = None if self.keys is None else self.keys.shape[0]
        return Sizes(rows, self.held, self.nbytes, self.spare)

    @property
    def spare(self) -> int | None:
        """Tokens that truncate can take back; None: all."""
        if self.held == self.length:
            return None
        return self.held - (self.window - 1)

    def _check_truncate(self, n: int):
        super()._check_truncate(n)
        if self.spare is not None and 0 < n < self.length - self.spare:
            raise UnsupportedError(
                f"a layer with a window of {self.window} cannot go back from {self.length} tokens "
                f"to {n}: it can take back {self.spare}, older positions are gone",
                hint="truncate(0) and prefill again, or a cache that keeps all positions: paged",
            )

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        if n == 0:
            self._rollback((0, None, None))
        elif n < self.length:
            left = self.held - (self.length - n)
            keys = self.keys[:, :, :left].clone()  # (B,Hk,left,D)
            values = self.values[:, :, :left].clone()  # (B,Hk,left,D)
            self._rollback((n, keys, values))

    def _snapshot(self):
        # Keys are never written in place, so the snapshot still has the positions that are dropped.
        return self.length, self.keys, self.values

    def _rollback(self, snapshot):
        # One statement, so an interrupt never leaves keys and length of different steps.
        self.length, self.keys, self.values = snapshot

    def fork(self) -> Self:
        copy = type(self)(self.window)
        copy._rollback(self._snapshot())
        return copy

    def reorder(self, index: Index) -> None:
        if self.keys is not None:
            self._rollback((self.length, self.keys[index], self.values[index]))

    def state(self) -> dict[str, Tensor]:
        if self.keys is None:
            return {}
        return {"key": self.keys, "value": self.values, "length": torch.tensor(self.length)}

    def restore(self, state: dict[str, Tensor]) -> None:
        length = int(state.get("length", 0))
        self._rollback((length, state.get("key"), state.get("value")))
        least = min(length, self.window - 1)
        if self.held < least or self.held > length:
            raise CacheError(
                f"a layer with a window of {self.window} needs {least} of {length} positions, "
                f"and {self.held} came"
            )

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        if self.keys is None:
            return 0
        return self.keys.nbytes + self.values.nbytes
