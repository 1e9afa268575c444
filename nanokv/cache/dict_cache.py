"""The cache to read first: literally a dict per layer, `{"key": (B,Hk,S,D), "value": (B,Hk,S,D)}`, grown by torch.cat.

Correct and plain, and the reference that every other cache is compared with. Its price: `cat` copies all S old rows
to append one, so N steps copy O(N²) bytes (Qwen3-0.6B at 4,096 tokens: 470 MB per step).
"""

import torch

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Sizes
from nanokv.cache.checks import check_append


class DictCache(LayerCache, dict):
    """Empty before the first append; afterwards holds exactly the tokens seen."""

    @property
    def length(self) -> int:
        return self["key"].shape[2] if self else 0

    @property
    def sizes(self) -> Sizes:
        return Sizes(self["key"].shape[0] if self else None, self.length, self.nbytes)

    def append(self, k, v):
        check_append(k, v, self.get("key"), self._expected)
        if self:
            k = torch.cat((self["key"], k), dim=2)  # (B,Hk,S,D): copies the whole past
            v = torch.cat((self["value"], v), dim=2)  # (B,Hk,S,D)
        self["key"], self["value"] = k, v
        return k, v

    def truncate(self, n: int):
        self._check_truncate(n)
        if n == 0:
            self.clear()
        elif n < self.length:
            # Views keep all rows.
            key, value = (self[name][:, :, :n].clone() for name in ("key", "value"))  # (B,Hk,n,D)
            self["key"], self["value"] = key, value  # in one line: never one without the other

    def fork(self):
        copy = type(self)()
        # Tensors may be shared: append makes new ones, nothing is ever written in place.
        copy.update(self)
        return copy

    def reorder(self, index):
        self.update({name: self[name][index] for name in self})  # (B',Hk,S,D)

    def state(self) -> dict:
        return dict(self)

    def restore(self, state: dict):
        self.clear()
        self.update(state)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.values())
