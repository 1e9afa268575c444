"""The caches, by name.

An entry in CACHES makes a new kind of cache available everywhere: model, chat, contract tests.
`make_cache(name, config, batch_size, capacity)` works for every name; a cache that grows needs no
capacity and does not treat it as a limit. An unknown option raises CacheError with the known ones.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import weights_loader
from nanokv.cache.base import KVCache, LayerCache, NoCache
from nanokv.cache.batch import BatchCache
from nanokv.cache.capabilities import Made
from nanokv.cache.checks import Expected, refuse_states
from nanokv.cache.dict_cache import DictCache
from nanokv.cache.evicting import EvictingCache, EvictingLayer
from nanokv.cache.offloaded import OffloadedCache
from nanokv.cache.options import (
    POLICIES,
    QUEST_PAGE,
    SNAPSHOTS,
    STATES,
    check_options,
    check_policy,
    read_kind,
)
from nanokv.cache.paged import PagedCache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.cache.policies import make_policy
from nanokv.cache.pool import ElasticPool, PagePool
from nanokv.cache.prefix import INDEXES, ElasticPrefixPool, PrefixCache, PrefixPool
from nanokv.cache.quantized import QuantizedCache
from nanokv.cache.schemes import make_scheme
from nanokv.cache.sliding import SlidingCache
from nanokv.cache.state import PLAN, Plan, StateLayer
from nanokv.cache.static import GrowingCache, StaticCache
from nanokv.cache.stores import DiskStore, HostStore
from nanokv.cache.window import WindowLayer
from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError
from weights_loader import Device, Dtype

__all__ = [
    "CACHES",
    "BatchCache",
    "DictCache",
    "KVCache",
    "LayerCache",
    "NoCache",
    "PagePool",
    "PrefixPool",
    "make_cache",
]

Capacity = int | None  # tokens per row
FIRST_PAGES = 4  # the first size of a pool that grows; it doubles from there


def by_kind(
    config: Config, make_layer: Callable[[], LayerCache], plan: Plan = PLAN
) -> Iterator[LayerCache]:
    """What each layer of the model keeps: `make_layer()`, a window if it sees no more, a state."""
    for number in range(0, config.num_hidden_layers, config.kv_sharing_factor):
        window = config.window_of(number)
        if config.has_state(number):
            yield StateLayer(plan, config.state_name)
        elif window is None:
            yield make_layer()
        else:
            yield WindowLayer(window)


def make_dict(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    snapshots: int = SNAPSHOTS,
    every: int = 0,
) -> KVCache:
    """One torch.cat per step: the reference."""
    return KVCache(by_kind(config, DictCache, Plan(snapshots, every)), config)


def make_static(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    snapshots: int = SNAPSHOTS,
    every: int = 0,
) -> KVCache:
    """One slab per layer of `capacity` slots (default: the model's whole context)."""
    slots = capacity or config.max_position_embeddings
    return KVCache(by_kind(config, partial(StaticCache, slots), Plan(snapshots, every)), config)


def make_growing(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    snapshots: int = SNAPSHOTS,
    every: int = 0,
) -> KVCache:
    """A slab that doubles when full; it stops at `capacity` slots until more tokens come."""
    return KVCache(by_kind(config, partial(GrowingCache, capacity), Plan(snapshots, every)), config)


def make_paged(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    page: int = 0,
    pages: int = 0,
    pool: PagePool | None = None,
) -> KVCache:
    """Pages of `page` tokens (default: 16) from a pool.

    `pool` is a pool to share, `pages` makes one of that size. Without either, the pool grows.
    """
    if pool is None:
        page = page or 16
        if pages:
            pool = PagePool(config, pages, page)
        else:
            pool = ElasticPool(config, FIRST_PAGES, page)
    check_pool(pool, PagePool, config, page, pages)
    return PagedCache(pool, batch_size)


def make_prefix(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    page: int = 0,
    pages: int = 0,
    pool: PagePool | None = None,
    salt: str = "",
    index: str = "",
) -> KVCache:
    """Pages that later requests with the same beginning reuse; sizes as for the paged cache.

    `index`: how they are found, "hash" (default) or "radix"; a pool that is passed has its own.
    """
    if pool is None:
        page = page or 16
        if pages:
            pool = PrefixPool(config, pages, page, index or "hash")
        else:
            slots = capacity or config.max_position_embeddings
            keep = batch_size * -(-slots // page)  # the pages of full rows
            pool = ElasticPrefixPool(config, FIRST_PAGES, page, keep, index or "hash")
    check_pool(pool, PrefixPool, config, page, pages)
    check_prefix_index(pool, index)
    cache = PrefixCache(pool, batch_size)
    cache.salt = salt
    return cache


def make_sliding(
    config: Config, batch_size: int, capacity: Capacity, *, window: int = 0, sinks: int = 0
) -> KVCache:
    """The last `window` positions (default: capacity, else the context) and the first `sinks`."""
    refuse_windows(config, "sliding")
    window = window or capacity or config.max_position_embeddings
    cache = KVCache(
        (SlidingCache(config, window, sinks) for _ in range(config.num_kv_layers)), config
    )
    # Recorded, so that a saved file does not depend on the default.
    cache.made = Made(options={"window": window})
    return cache


def make_quantized(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    bits: int = 8,
    k_bits: int = 0,
    v_bits: int = 0,
    group: int = 32,
    residual: int = 32,
    rotate: str = "none",
    keys: str = "channel",
    values: str = "token",
    v_rotate: str = "none",
    outliers: int = 0,
    first: int = 0,
    seed: int = 0,
    snapshots: int = SNAPSHOTS,
    every: int = 0,
) -> KVCache:
    """Keys and values in `bits` bits, or in k_bits and v_bits (K8V4: k_bits=8, v_bits=4).

    keys, values: a scheme of nanokv/cache/schemes.py; by default "channel" and "token".
    rotate, v_rotate: "hadamard" rotates keys, or values, before they are quantized.
    outliers: channels of the keys, per block, that stay in 8 bits.
    first, residual: how many tokens stay exact, the first ones and the newest.
    seed: of the random rotation of "lloyd" and "qjl".
    """
    k_bits = k_bits or bits
    v_bits = v_bits or bits
    schemes = (
        make_scheme(keys, k_bits, seed, rotate, outliers),
        make_scheme(values, v_bits, seed, v_rotate),
    )
    for scheme, value in zip(schemes, (k_bits, v_bits), strict=True):
        if config.head_dim % scheme.multiple:
            raise CacheError(f"head_dim {config.head_dim} cannot be packed in {value} bits")
    if outliers >= config.head_dim:
        raise CacheError(
            f"outliers is {outliers}: fewer than head_dim {config.head_dim} were expected"
        )
    make_layer = partial(QuantizedCache, *schemes, group, residual, first)
    return KVCache(by_kind(config, make_layer, Plan(snapshots, every)), config)


def make_evicting(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    policy: str = "window",
    budget: int = 0,
    sinks: int = 0,
    recent: int | None = None,
    page: int = QUEST_PAGE,
) -> KVCache:
    """At most `budget` entries per KV head (default: capacity, else the context).

    policy: of nanokv/cache/policies.py, which entries stay.
    sinks, recent: how many of the first and of the newest tokens always stay. recent is 32 by
        default, at most half of the budget; the window keeps nothing but sinks and newest tokens.
    page: tokens per page of Quest.
    """
    refuse_windows(config, "evicting")
    if config.family.sinks:
        raise UnsupportedError(
            f"the attention of an evicting cache has no place for the sinks of "
            f"{config.family.title}",
            hint="a cache that keeps all positions: growing, paged, quantized",
        )
    budget = budget or capacity or config.max_position_embeddings
    given = {"sinks": sinks, "recent": recent, "page": page}
    known = {key: given[key] for key in POLICIES[policy] if given[key] is not None}
    check_policy({"policy": policy, "budget": budget} | known)
    chooses = make_policy(policy, budget, sinks, recent, page)
    if config.kv_sharing_factor > 1 and (chooses.watches or chooses.attends):
        raise UnsupportedError(
            f"policy={policy} chooses entries by the queries of one layer, and "
            f"{config.kv_sharing_factor} layers of {config.family.title} share them",
            hint="policy=window or policy=norms",
        )
    cache = EvictingCache((EvictingLayer(chooses) for _ in range(config.num_kv_layers)), config)
    # Recorded, so that a saved file does not depend on the default.
    cache.made = Made(options={"budget": budget})
    return cache


def make_offloaded(
    config: Config,
    batch_size: int,
    capacity: Capacity,
    *,
    to: str = "disk",
    folder: str | os.PathLike[str] | None = None,
) -> KVCache:
    """Each layer in a file in `folder` (to="disk") or in host memory (to="host").

    The default folder is the system's temporary one.
    """
    refuse_states(config, "offloaded")
    if to == "disk":
        return OffloadedCache(config, partial(DiskStore, folder))
    return OffloadedCache(config, HostStore)


def make_batch(
    config: Config, batch_size: int, capacity: Capacity, *, of: str = "dict", **options: Any
) -> KVCache:
    """Rows that may differ in length, each a cache of the kind `of` with these options."""
    if of in ("paged", "prefix") and not options.get("pages"):
        return make_paged_batch(config, batch_size, capacity, of, options)
    rows = [make_cache(of, config, 1, capacity, **options) for _ in range(batch_size)]
    return BatchCache(rows, config)


def make_paged_batch(
    config: Config, batch_size: int, capacity: Capacity, of: str, options: dict[str, Any]
) -> PagedBatch:
    """All rows over one pool that grows, so that one table holds the pages of all rows."""
    first: Any = make_cache(of, config, 1, capacity, **options)
    shared = {name: value for name, value in options.items() if name != "page"}
    shared["pool"] = first.pool
    others = [make_cache(of, config, 1, capacity, **shared) for _ in range(1, batch_size)]
    for row in others:
        row.made = first.made
    return PagedBatch([first, *others], config)


CACHES: dict[str, Callable[..., KVCache]] = {
    "dict": make_dict,
    "static": make_static,
    "growing": make_growing,
    "paged": make_paged,
    "prefix": make_prefix,
    "sliding": make_sliding,
    "quantized": make_quantized,
    "evicting": make_evicting,
    "offloaded": make_offloaded,
    "batch": make_batch,
}


def make_cache(
    name: str,
    config: Config,
    batch_size: int = 1,
    capacity: Capacity = None,
    dtype: Dtype = None,
    device: Device = None,
    **options: Any,
) -> KVCache:
    """An empty cache of the named kind for a model of this config; capacity in tokens per row.

    The name may include options, as on the command line: "quantized:bits=4". The first append
    allocates memory, with the dtype and device of its keys. If `dtype` or `device` is given, an
    append of another one raises CacheError, and so does every argument that is out of range, that
    the cache does not have, or that contradicts the name.
    """
    if isinstance(name, str):
        name, named = read_kind(name)
        options = _merged(named, options)
    check_options(name, options, objects=True)
    if not hasattr(config, "num_hidden_layers"):
        raise CacheError(
            f"config is a {type(config).__name__}, not a Config", hint="pass model.config"
        )
    check("batch_size", batch_size, 1)
    if capacity is not None:
        check("capacity", capacity, 1)
    refuse_snapshots(config, name, options)
    dtype, target = check_target(dtype, device)
    cache = CACHES[name](config, batch_size, capacity, **options)
    cache.made = Made(name, options | cache.made.options, capacity, batch_size)
    expected = Expected(config.num_key_value_heads, config.head_dim, dtype, target)
    for part in (*getattr(cache, "rows", ()), cache):
        for layer in part:
            layer._expected = expected
    return cache


def _merged(named: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options in a cache's name and those given as arguments; CacheError if they differ."""
    for key in named.keys() & options.keys():
        if named[key] != options[key]:
            raise CacheError(
                f"{key} is {named[key]!r} in the cache's name and {options[key]!r} as an argument",
                f"leave one of them out: {key}={options[key]!r}",
            )
    return named | options


def check_target(dtype: Dtype, device: Device) -> tuple[torch.dtype | None, torch.device | None]:
    """torch's dtype and device for these names; CacheError if a cache cannot use them."""
    if dtype is None and device is None:
        return None, None
    try:
        found, place = weights_loader.check_target(dtype, device or "cpu")
    except weights_loader.CheckpointError as error:
        fewer_bits = 'make_cache("quantized:bits=8", config)' if "int" in error.hint else error.hint
        raise CacheError(str(error), fewer_bits) from error
    return found, place if device else None


def refuse_windows(config: Config, name: str) -> None:
    """UnsupportedError if layers of the model have windows: they count positions from the end."""
    refuse_states(config, name)
    windowed = sum(window is not None for window in config.windows)
    if windowed:
        raise UnsupportedError(
            f"a {name} cache drops positions itself, and {windowed} of "
            f"{config.num_hidden_layers} layers of {config.family.title} have a window of "
            f"{config.sliding_window}",
            hint="a cache that keeps all positions: growing, paged, quantized",
        )


def refuse_snapshots(config: Config, name: str, options: dict[str, Any]) -> None:
    """CacheError for options of recurrent layers if the model has none."""
    given = ", ".join(key for key in STATES if key in options)
    if given and name != "batch" and not config.states:
        raise CacheError(
            f"{given} means nothing to {config.family.title}: no layer has a recurrent state",
            hint="leave it out: truncate goes back to any token",
        )


def check_pool(pool: PagePool, kind: type, config: Config, page: int, pages: int) -> None:
    """CacheError unless the pool has this kind, config and sizes; a size of 0 is not checked."""
    if not isinstance(pool, kind):
        raise CacheError(f"pool is {pool!r}: a {kind.__name__} was expected")
    if pool.config != config:
        raise CacheError(
            "the pool was made for a model of another config: its keys would fit and be wrong"
        )
    sizes = ("page", page, pool.page_size), ("pages", pages, len(pool.references))
    for name, asked, has in sizes:
        if asked not in (0, has):
            raise CacheError(
                f"{name}={asked} contradicts the pool, which has {name}={has}",
                hint=f"leave {name}= out",
            )


def check_prefix_index(pool: Any, index: str) -> None:
    """CacheError if `index` names another index than that of the pool."""
    kind = type(pool.index)
    if index and kind is not INDEXES[index]:
        raise CacheError(
            f"index={index} contradicts the pool, which has a {kind.__name__}",
            hint="leave index= out",
        )


def check(name: str, value: object, low: int) -> None:
    """CacheError unless `value` is a whole number of at least `low`."""
    if type(value) is not int or value < low:
        raise CacheError(f"{name} is {value!r}: a whole number ≥ {low} was expected")
