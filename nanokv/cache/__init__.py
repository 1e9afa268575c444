"""The caches, by name. A new kind of cache joins everything (model, chat, contract tests) by an entry in CACHES.

`make_cache(name, config, batch_size, capacity)` is valid for every name: a cache that grows by itself takes the
capacity as a limit that it does not need. Options that a cache does not know raise with the list of the known ones.
"""

import difflib
import inspect
from functools import partial

from nanokv.cache.base import KVCache, LayerCache, NoCache
from nanokv.cache.batch import BatchCache
from nanokv.cache.dict_cache import DictCache
from nanokv.cache.offloaded import DiskStore, HostStore, OffloadedCache
from nanokv.cache.paged import ElasticPool, PagedCache, PagePool
from nanokv.cache.prefix import ElasticPrefixPool, PrefixCache, PrefixPool
from nanokv.cache.quantized import QuantizedCache
from nanokv.cache.sliding import SlidingCache
from nanokv.cache.static import GrowingCache, StaticCache
from nanokv.errors import CacheError

__all__ = [
    "CACHES", "BatchCache", "DictCache", "KVCache", "LayerCache", "NoCache", "PagePool", "PrefixPool", "make_cache",
]  # fmt: skip


def make_dict(config, batch_size, capacity) -> KVCache:
    """torch.cat a step: the reference."""
    return KVCache((DictCache() for _ in range(config.num_hidden_layers)), config)


def make_static(config, batch_size, capacity) -> KVCache:
    """One slab a layer of `capacity` slots (default: the model's whole context)."""
    slots = capacity or config.max_position_embeddings
    return KVCache((StaticCache(slots) for _ in range(config.num_hidden_layers)), config)


def make_growing(config, batch_size, capacity) -> KVCache:
    """A slab that doubles."""
    return KVCache((GrowingCache() for _ in range(config.num_hidden_layers)), config)


def make_paged(config, batch_size, capacity, *, page: int = 16, pages: int = 0, pool=None) -> KVCache:
    """Pages from a pool: `pool` is one to share, `pages` makes one of that size; without both it grows as needed."""
    check("page", page, 1)
    check("pages", pages, 0)
    slots = capacity or config.max_position_embeddings
    needed = batch_size * -(-slots // page)
    pool = pool or (PagePool(config, pages, page) if pages else ElasticPool(config, needed, page))
    return PagedCache(pool, batch_size)


def make_prefix(config, batch_size, capacity, *, page: int = 16, pages: int = 0, pool=None, salt: str = "") -> KVCache:
    """Pages that later requests with the same beginning find again; pool and pages as for the paged cache."""
    check("page", page, 1)
    check("pages", pages, 0)
    if not isinstance(salt, str):
        raise CacheError(f"salt is {salt!r}: a string was expected")
    slots = capacity or config.max_position_embeddings
    needed = batch_size * -(-slots // page)
    pool = pool or (PrefixPool(config, pages, page) if pages else ElasticPrefixPool(config, needed, page))
    cache = PrefixCache(pool, batch_size)
    cache.salt = salt
    return cache


def make_sliding(config, batch_size, capacity, *, window: int = 0, sinks: int = 0) -> KVCache:
    """The last `window` positions (default: capacity, then the model's context) and the first `sinks`."""
    window = window or capacity or config.max_position_embeddings
    check("window", window, 1)
    check("sinks", sinks, 0)
    return KVCache((SlidingCache(config, window, sinks) for _ in range(config.num_hidden_layers)), config)


def make_quantized(config, batch_size, capacity, *, bits: int = 8, k_bits: int = 0, v_bits: int = 0, group: int = 32,
                   residual: int = 32, rotate: str = "none") -> KVCache:  # fmt: skip
    """`bits` for both, or k_bits and v_bits apart (K8V4: k_bits=8, v_bits=4); rotate=hadamard turns the keys first."""
    k_bits, v_bits = k_bits or bits, v_bits or bits
    for name, value in (("k_bits", k_bits), ("v_bits", v_bits)):
        if value not in (2, 4, 8):
            raise CacheError(f"{name} is {value!r}: 2, 4 and 8 are implemented")
        if config.head_dim % (8 // value):
            raise CacheError(f"head_dim {config.head_dim} cannot be packed in {value} bits")
    check("group", group, 1)
    check("residual", residual, 0)
    if rotate not in ("none", "hadamard"):
        raise CacheError(f"rotate is {rotate!r}: none and hadamard are implemented")
    layers = (QuantizedCache(k_bits, v_bits, group, residual, rotate) for _ in range(config.num_hidden_layers))
    return KVCache(layers, config)


def make_offloaded(config, batch_size, capacity, *, to: str = "disk", folder=None) -> KVCache:
    """Layers in a file each (to=disk, in `folder` or the system's temporary folder) or in host memory (to=host)."""
    if to not in ("disk", "host"):
        raise CacheError(f"to is {to!r}: disk and host are implemented")
    return OffloadedCache(config, partial(DiskStore, folder) if to == "disk" else HostStore)


def make_batch(config, batch_size, capacity, *, of: str = "dict", **options) -> KVCache:
    """Rows that may differ in length, each a cache of its own kind (`of`), with that kind's options."""
    return BatchCache([make_cache(of, config, 1, capacity, **options) for _ in range(batch_size)], config)


CACHES = {
    "dict": make_dict, "static": make_static, "growing": make_growing, "paged": make_paged, "prefix": make_prefix,
    "sliding": make_sliding, "quantized": make_quantized, "offloaded": make_offloaded, "batch": make_batch,
}  # fmt: skip


def make_cache(name, config, batch_size: int = 1, capacity=None, dtype=None, device=None, **options) -> KVCache:
    """An empty cache of the named kind for a model of this config; capacity in tokens a row.

    Memory is taken by the first append, in the dtype and on the device of what the model writes; dtype and device are
    accepted for every kind so that callers need not care.
    """
    if name not in CACHES:
        near = difflib.get_close_matches(str(name), CACHES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise CacheError(f"no cache is called {name!r}: there are {', '.join(CACHES)}", hint=hint)
    check("batch_size", batch_size, 1)
    if capacity is not None:
        check("capacity", capacity, 1)
    known = options_of(name)
    if name == "batch":  # hands the rest on to its rows
        of = options.get("of", "dict")
        if of not in CACHES or of == "batch":
            raise CacheError(f"of is {of!r}: there are {', '.join(kind for kind in CACHES if kind != 'batch')}")
        known += options_of(of)
    if unknown := sorted(set(options) - set(known)):
        listed = ", ".join(known) or "no options"
        raise CacheError(f"cache {name!r} has no option {', '.join(unknown)}: it knows {listed}")
    cache = CACHES[name](config, batch_size, capacity, **options)
    cache.name, cache.options, cache.asked = name, options, capacity
    return cache


def options_of(name: str) -> list[str]:
    """What may follow the sizes in make_cache(name, …)."""
    parameters = inspect.signature(CACHES[name]).parameters.values()
    return [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]


def check(name: str, value, low: int):
    """A whole number of at least `low`."""
    if type(value) is not int or value < low:
        raise CacheError(f"{name} is {value!r}: a whole number ≥ {low} was expected")
