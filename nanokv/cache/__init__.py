"""The caches, by name. A new kind of cache joins everything (model, chat, contract tests) by an entry in CACHES.

`make_cache(name, config, batch_size, capacity)` is valid for every name: a cache that grows by itself takes the
capacity as a limit that it does not need. Options that no cache knows raise with the list of the known ones.
"""

import difflib

from nanokv.cache.base import KVCache, LayerCache, NoCache
from nanokv.cache.dict_cache import DictCache
from nanokv.errors import CacheError

__all__ = ["CACHES", "DictCache", "KVCache", "LayerCache", "NoCache", "make_cache"]


def make_dict(config, batch_size, capacity, dtype, device) -> KVCache:
    """Grows with torch.cat; takes batch size, dtype and device from the first append."""
    return KVCache((DictCache() for _ in range(config.num_hidden_layers)), config)


CACHES = {"dict": make_dict}


def make_cache(name, config, batch_size: int = 1, capacity=None, dtype=None, device=None, **options) -> KVCache:
    """An empty cache of the named kind for a model of this config; capacity in tokens (a row)."""
    if name not in CACHES:
        near = difflib.get_close_matches(str(name), CACHES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise CacheError(f"no cache is called {name!r}: there are {', '.join(CACHES)}", hint=hint)
    make = CACHES[name]
    known = make.__code__.co_varnames[5 : make.__code__.co_argcount + make.__code__.co_kwonlyargcount]
    if unknown := sorted(set(options) - set(known)):
        raise CacheError(
            f"cache {name!r} has no option {', '.join(unknown)}: it knows {', '.join(known) or 'no options'}"
        )
    cache = make(config, batch_size, capacity, dtype, device, **options)
    cache.name = name
    return cache
