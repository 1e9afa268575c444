"""Ways to replace correct code by a fault, so that the model itself needs no switches for faults.

A swap is (owner, name, substitute): `setattr(owner, name, substitute)` while the fault is injected,
undone afterwards. Most faults are placed `between` the model and its cache. There they receive the
keys and values of every layer and choose the keys and values that attention gets. They leave a
forward pass without a cache (score) unchanged, so that it can serve as the reference.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

import nanokv.model
from nanokv.attention import Attend, Causal
from nanokv.cache import KVCache, LayerCache
from nanokv.model import Transformer

KeysValues = tuple[Tensor, Tensor]  # keys and values, (B,Hk,S,D) ×2
Append = Callable[[KVCache, int, Tensor, Tensor], KeysValues]  # (cache, layer, k, v)
Swaps = list[tuple[Any, str, Any]]  # (owner, name, substitute)


class PerObject(dict[int, Any]):
    """A value per cache layer, keyed by id(layer) and removed with the layer. WeakKeyDictionary
    does not work here, because a layer of the dict cache cannot be hashed."""

    def keep(self, layer: Any, value: Any) -> Any:
        layer = real(layer)
        if id(layer) not in self:
            weakref.finalize(layer, self.pop, id(layer), None).atexit = False
        self[id(layer)] = value
        return value

    def of(self, layer: Any) -> Any:
        """The value kept for this layer, or None."""
        return self.get(id(real(layer)))


def real(layer: Any) -> Any:
    """The cache's layer itself, without the faults wrapped around it."""
    return getattr(layer, "real", layer)


class Between(KVCache):
    """A cache wrapped by a fault: `append(cache, i, k, v)` replaces cache[i].append(k, v).

    Length and capacity are the real cache's, so the model's check of start_pos passes.
    """

    def __init__(self, cache: KVCache, append: Append) -> None:
        layers = (BetweenLayer(layer, partial(append, cache, i)) for i, layer in enumerate(cache))
        super().__init__(layers, cache.config)
        self.cache = cache

    length = property(lambda self: self.cache.length)
    capacity = property(lambda self: self.cache.capacity)


class BetweenLayer(LayerCache):
    """One layer of a Between cache."""

    def __init__(self, layer: Any, append: Callable[[Tensor, Tensor], KeysValues]) -> None:
        self.real = real(layer)
        self.append = append  # type: ignore[method-assign, assignment]  # the fault's

    length = property(lambda self: self.real.length)
    # of a layer with a state, which appends no keys
    read = property(lambda self: self.real.read)
    keep = property(lambda self: self.real.keep)


class StandIn:
    """`attend(right)` instead of the attention `right`. `mask` is right's mask, for a fault wrapped
    around this one."""

    def __init__(self, right: Attend, attend: Callable[[Attend], Attend]) -> None:
        if type(right) is Causal:
            right = Causal()  # a fault may pass more keys than the cache's length
        self.mask = getattr(right, "mask", None)
        self.attend = attend(right)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


def right_append(cache: KVCache, i: int, k: Tensor, v: Tensor) -> KeysValues:
    """The append of layer i without a fault."""
    return cache[i].append(k, v)


def has_cache(cache: KVCache) -> bool:
    """False for NoCache, which keeps nothing: a pass without a cache has no cache fault."""
    return cache.capacity != 0


def between(
    append: Append = right_append, attend: Callable[[Attend], Attend] | None = None
) -> Swaps:
    """Swaps for the model's forward: `append` replaces the append of every layer's cache, and
    `attend(right)` replaces the attention `right`."""
    right = Transformer.forward

    def forward(self, tokens, cache, start_pos, attention):
        if has_cache(cache):
            cache = Between(cache, append)
            if attend is not None:
                attention = StandIn(attention, attend)
        return right(self, tokens, cache, start_pos, attention)

    return [(Transformer, "forward", forward)]


def positions(wrong: Callable[[Tensor, Tensor], Tensor]) -> Swaps:
    """Swaps for rope_angles: keys and queries are rotated by wrong(positions, start) (…,T).

    `start` (…,1) is the first position. The model gets the right start_pos and checks it. A
    rotation by another number passes every check, as it does in code that counts positions apart
    from the cache.
    """
    right = nanokv.model.rope_angles

    def rope_angles(config, positions, dtype):
        return right(config, wrong(positions, positions[..., :1]), dtype)

    return [(nanokv.model, "rope_angles", rope_angles)]


def in_all(base: type, name: str, make: Callable) -> Swaps:
    """Swaps for a method or property of `base` and of every subclass that overrides it.
    make(right) → its substitute."""
    family = [next(cls for cls in base.__mro__ if name in vars(cls))]
    swaps = []
    for cls in family:  # grows while it is walked
        family += cls.__subclasses__()
        if name in vars(cls):
            swaps.append((cls, name, make(vars(cls)[name])))
    return swaps
