"""The cache to read first: one dict per layer, `{"key": (B,Hk,S,D), "value": (B,Hk,S,D)}`.

It grows with torch.cat. It is the reference for all other caches. Its cost: `cat` copies all S old
rows to append one, so N steps copy O(N²) bytes (Qwen3-0.6B at 4,096 tokens: 470 MB per step).
"""

from typing import Self

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.checks import check_append


class DictCache(LayerCache, dict[str, Tensor]):
    """An empty dict before the first append; afterwards it holds exactly the appended tokens."""

    @property
    def length(self) -> int:  # type: ignore[override]  # read-only
        return self["key"].shape[2] if self else 0

    @property
    def sizes(self) -> Sizes:
        rows = self["key"].shape[0] if self else None
        return Sizes(rows, self.length, self.nbytes)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, self.get("key"), self._expected)
        if self:
            k = torch.cat((self["key"], k), dim=2)  # (B,Hk,S,D): copies the whole past
            v = torch.cat((self["value"], v), dim=2)  # (B,Hk,S,D)
        self["key"], self["value"] = k, v  # one statement: Ctrl-C must not separate the two
        return k, v

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        if n == 0:
            self.clear()
        elif n < self.length:
            # Clones, because a view would keep the memory of all S rows.
            key = self["key"][:, :, :n].clone()  # (B,Hk,n,D)
            value = self["value"][:, :, :n].clone()  # (B,Hk,n,D)
            self["key"], self["value"] = key, value

    def fork(self) -> Self:
        copy = type(self)()
        copy.update(self)  # shares the tensors: append replaces them and never writes into them
        return copy

    def reorder(self, index: Index) -> None:
        self.update({name: self[name][index] for name in self})  # (B',Hk,S,D)

    def state(self) -> dict[str, Tensor]:
        return dict(self)

    def restore(self, state: dict[str, Tensor]) -> None:
        self.clear()
        self.update(state)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        return sum(tensor.nbytes for tensor in self.values())
