"""The caches. Read base.py, then dict_cache.py; registry.py lists the caches by name, options.py
their options.

Names are imported on first use, so the command line can check options without importing torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers
    from nanokv.cache.base import KVCache, LayerCache, NoCache
    from nanokv.cache.batch import BatchCache
    from nanokv.cache.dict_cache import DictCache
    from nanokv.cache.pool import PagePool
    from nanokv.cache.prefix import PrefixPool
    from nanokv.cache.registry import CACHES, make_cache

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

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts mistyped names

    def __getattr__(name: str):
        if name not in __all__:
            raise AttributeError(f"module 'nanokv.cache' has no attribute {name!r}")
        value = getattr(importlib.import_module("nanokv.cache.registry"), name)
        globals()[name] = value
        return value
