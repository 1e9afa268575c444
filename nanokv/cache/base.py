"""The cache contract, to be read right after model.py: a cache is plugged into the model from outside.

What `append` returns goes straight to the attention function; what `mask` returns says which of those keys each new
query may see. A cache of your own overrides `append`, and `truncate` and `fork` if it can. What kernels, batches, beams
and files ask for besides has defaults in capabilities.py; what a cache cannot do raises UnsupportedError.
"""

from collections.abc import Iterable

from torch import Tensor

from nanokv.attention import causal_mask
from nanokv.cache.capabilities import CacheCapabilities, Index, LayerCapabilities, causal
from nanokv.cache.checks import check_index
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError


class LayerCache(LayerCapabilities):
    """Keys and values of one layer. `length`, the number of tokens seen, is the next call's only legal start_pos."""

    length: int = 0
    nbytes: int = 0  # held for keys and values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(B,Hk,T,D) ×2, keys already rotated → (B,Hk,S,D) ×2, oldest first; the last T rows are the new ones."""
        raise NotImplementedError

    @causal(lambda layer, T: layer.length + T)
    def mask(self, T: int) -> Tensor | None:
        """Which keys the next T queries see: None = all, else bool (T,S), bottom-right causal. Changes nothing."""
        return causal_mask(T, self.length + T)

    def truncate(self, n: int) -> None:
        """Forget positions ≥ n (a rejected draft, an edited turn). Absolute, and harmless when repeated."""
        raise UnsupportedError(f"{type(self).__name__} cannot truncate")

    def fork(self) -> "LayerCache":
        """An independent copy: appending to it leaves this one as it is."""
        raise UnsupportedError(f"{type(self).__name__} cannot fork")


class KVCache(CacheCapabilities):
    """One LayerCache per layer, and what concerns them all. Made by `nanokv.make_cache(name, config)`."""

    def __init__(self, layers: Iterable[LayerCache] = (), config: Config | None = None):
        super().__init__(layers)
        self.config = config

    def __repr__(self):
        n = self[0].length if self else 0
        tokens = n if isinstance(n, int) else f"{min(n)} to {max(n)}"  # rows of their own lengths
        kind = f"{type(self).__name__} {self.made.name!r}"
        return f"<{kind}: {len(self)} layers × {tokens} tokens, {self.nbytes:,} B>"

    @property
    def length(self) -> int:
        """Tokens held. After a failed forward call truncate(length before it): layers may be of
        unequal length, which raises here, and a kernel counts a token before it computes it."""
        lengths = {layer.length for layer in self}
        if len(lengths) > 1:
            raise CacheError(
                f"layers hold between {min(lengths)} and {max(lengths)} tokens: a forward pass failed half-way",
                hint="truncate(n) with n at most the smaller number mends it",
            )
        return lengths.pop() if lengths else 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in all layers."""
        return sum(layer.nbytes for layer in self)

    @causal(CacheCapabilities._causal_keys)
    def mask(self, T: int) -> Tensor | None:
        """The mask that all layers share, asked once per forward, before any layer appends."""
        if not self:
            raise CacheError(
                "this cache has no layers: make_cache(name, config) gives it one for each of the model's"
            )
        return self[0].mask(T)

    def truncate(self, n: int) -> None:
        """Forget positions ≥ n in every layer; also mends layers of unequal length after a failed forward."""
        for layer in self:  # all or none
            layer._check_truncate(n)
        for layer in self:
            layer.truncate(n)

    def fork(self) -> "KVCache":
        """An independent copy of the whole cache."""
        return type(self)((layer.fork() for layer in self), self.config)._made_like(self)


class NoCache(KVCache):
    """The null object: keeps nothing, `append` returns its input. So there is no `if cache is None` anywhere."""

    def __init__(self, num_layers: int):
        super().__init__(_KeepNothing() for _ in range(num_layers))

    def fork(self) -> "NoCache":
        return self

    def reorder(self, index: Index) -> None:
        check_index(index)


class _KeepNothing(LayerCache):
    # So that generating with it is refused: every decode would see one token and no past.
    capacity = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def truncate(self, n: int) -> None:
        pass
