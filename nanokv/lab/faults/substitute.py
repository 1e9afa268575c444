"""The places where a fault can stand in for right code, so that the model itself needs no switch for being wrong.

A swap is (owner, name, stand-in): `setattr(owner, name, stand-in)` while the fault is injected, undone afterwards. Most
faults sit `between` the model and its cache: there they see what the model hands to every layer's cache, decide what
attention gets back, and never touch a forward pass that has no cache (score), which stays the truth to compare with.
"""

import weakref
from functools import partial

import nanokv.model
from nanokv.attention import Causal
from nanokv.cache import KVCache, LayerCache
from nanokv.model import Transformer


class PerObject(dict):
    """A value per layer, by identity, forgotten with it (a dict cache cannot be hashed, so no WeakKeyDictionary)."""

    def keep(self, layer, value):
        layer = real(layer)
        if id(layer) not in self:
            weakref.finalize(layer, self.pop, id(layer), None).atexit = False
        self[id(layer)] = value
        return value

    def of(self, layer):
        """What was kept for this layer, or None."""
        return self.get(id(real(layer)))


def real(layer):
    """The cache's own layer, however many faults stand in front of it."""
    return getattr(layer, "real", layer)


class Between(KVCache):
    """A cache as the model sees it through a fault: `append(cache, i, k, v)` stands in for cache[i].append(k, v).

    Length and capacity are those of the real cache: the model's check of start_pos stays content.
    """

    def __init__(self, cache, append):
        layers = (BetweenLayer(layer, partial(append, cache, i)) for i, layer in enumerate(cache))
        super().__init__(layers, cache.config)
        self.cache = cache

    length = property(lambda self: self.cache.length)
    capacity = property(lambda self: self.cache.capacity)


class BetweenLayer(LayerCache):
    """One layer of it."""

    def __init__(self, layer, append):
        self.real = real(layer)
        self.append = append

    length = property(lambda self: self.real.length)


class StandIn:
    """`attend(right)` in place of attention; `mask` is the right one's, for a fault in front of this one."""

    def __init__(self, right, attend):
        if type(right) is Causal:
            right = Causal()  # a fault may show it more keys than the cache announced
        self.mask = getattr(right, "mask", None)
        self.attend = attend(right)

    def __call__(self, q, k, v):
        return self.attend(q, k, v)


def right_append(cache, i, k, v):
    """What the model's layer i does without a fault."""
    return cache[i].append(k, v)


def has_cache(cache) -> bool:
    """False for the null object, which keeps nothing: without a cache there is no cache fault."""
    return cache.capacity != 0


def between(append=right_append, attend=None) -> list:
    """Swap for the model's forward: other keys and values for attention, or `attend(right)` instead of attention."""
    right = Transformer.forward

    def forward(self, tokens, cache, start_pos, attention):
        if has_cache(cache):
            cache = Between(cache, append)
            if attend is not None:
                attention = StandIn(attention, attend)
        return right(self, tokens, cache, start_pos, attention)

    return [(Transformer, "forward", forward)]


def positions(wrong) -> list:
    """Swap for rope_angles: `wrong(positions, start)` are the positions (…,T) that keys and queries are turned by.

    `start` (…,1) is the first of them. The model is told the right start_pos and checks it; a rotation that is made
    from another number passes every check, as it does in code that keeps positions and cache apart.
    """
    right = nanokv.model.rope_angles

    def rope_angles(config, positions, dtype):
        return right(config, wrong(positions, positions[..., :1]), dtype)

    return [(nanokv.model, "rope_angles", rope_angles)]


def in_all(base, name: str, make) -> list:
    """Swaps for a method or property of `base`, and in every subclass that has its own; make(right) → stand-in."""
    family = [next(cls for cls in base.__mro__ if name in vars(cls))]
    swaps = []
    for cls in family:  # grows while it is walked
        family += cls.__subclasses__()
        if name in vars(cls):
            swaps.append((cls, name, make(vars(cls)[name])))
    return swaps
