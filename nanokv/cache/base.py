"""The contract between the model and a cache. Read it after model.py.

The model passes new keys and values to `append` and gives the result to the attention function.
`mask` defines which of them each new query sees. Your own cache overrides `append`, and `truncate`
and `fork` if it supports them. capabilities.py has defaults for all other operations.
"""

from collections.abc import Iterable

from torch import Tensor

from nanokv.attention import causal_mask
from nanokv.cache.capabilities import CacheCapabilities, Index, LayerCapabilities, NoState, causal
from nanokv.cache.checks import check_index
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError


class LayerCache(LayerCapabilities):
    """Keys and values of one layer."""

    length: int = 0  # tokens appended so far; the next call must pass it as start_pos
    nbytes: int = 0  # memory of keys and values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys (already rotated) and values (B,Hk,T,D) ×2 → all (B,Hk,S,D) ×2, oldest first."""
        raise NotImplementedError

    @causal(lambda layer, T: layer.length + T)
    def mask(self, T: int) -> Tensor | None:
        """bool (T,S): the keys that the next T queries see; None: all. Changes nothing."""
        return causal_mask(T, self.length + T)

    def truncate(self, n: int) -> None:
        """Remove positions ≥ n (a rejected draft, an edited turn). Calling it again is harmless."""
        raise UnsupportedError(f"{type(self).__name__} cannot truncate")

    def fork(self) -> "LayerCache":
        """An independent copy: appending to the copy does not change the original."""
        raise UnsupportedError(f"{type(self).__name__} cannot fork")


class KVCache(CacheCapabilities[LayerCache]):
    """A list with one LayerCache per layer. `nanokv.make_cache(name, config)` builds it."""

    def __init__(self, layers: Iterable[LayerCache] = (), config: Config | None = None):
        super().__init__(layers)
        self.config = config

    def __repr__(self):
        n = self[0].length if self else 0
        tokens = n if isinstance(n, int) else f"{min(n)} to {max(n)}"  # rows may differ in length
        kind = f"{type(self).__name__} {self.made.name!r}"
        return f"<{kind}: {len(self)} layers × {tokens} tokens, {self.nbytes:,} B>"

    @property
    def length(self) -> int:
        """Tokens held; CacheError if layers differ. After a failed forward, truncate to the length
        before the call even if they agree: a kernel advances `length` before it writes."""
        lengths = {layer.length for layer in self}
        if len(lengths) > 1:
            raise CacheError(
                f"layers hold between {min(lengths)} and {max(lengths)} tokens: "
                "a forward pass failed half-way",
                hint="truncate(n) with n at most the smaller number repairs the cache",
            )
        return lengths.pop() if lengths else 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in all layers."""
        return sum(layer.nbytes for layer in self)

    @causal(CacheCapabilities._causal_keys)
    def mask(self, T: int) -> Tensor | None:
        """The mask for all layers. Called once per forward, before any layer appends."""
        if not self:
            raise CacheError(
                "this cache has no layers: make_cache(name, config) builds one per model layer"
            )
        return self._widest.mask(T)

    def truncate(self, n: int) -> None:
        """Remove positions ≥ n from every layer. Repairs layers of unequal length too."""
        for layer in self:  # raise before any layer changes
            layer._check_truncate(n)
        for layer in self:
            layer.truncate(n)

    def fork(self) -> "KVCache":
        """An independent copy of the whole cache."""
        return type(self)((layer.fork() for layer in self), self.config)._made_like(self)


class NoCache(KVCache):
    """Stores nothing: `append` returns its input. So the model needs no `if cache is None`."""

    def __init__(self, num_layers: int):
        super().__init__(_KeepNothing() for _ in range(num_layers))

    def fork(self) -> "NoCache":
        return self

    def reorder(self, index: Index) -> None:
        check_index(index)


class _KeepNothing(NoState, LayerCache):
    capacity = 0  # refuses generation: a decode step would see only its own token

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def truncate(self, n: int) -> None:
        pass
