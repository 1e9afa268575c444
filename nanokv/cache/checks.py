"""Checks before anything is written: row numbers in range, and keys and values that match the
cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanokv.config import Config
from nanokv.errors import CacheError, UnsupportedError


class Expected(NamedTuple):
    """The keys that make_cache was asked for; the first append decides a field that is None."""

    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None  # "cuda" without a number: any CUDA device


NAMES = ("KV heads", "head_dim", "dtype", "device")  # of Expected's fields, in errors
ANYTHING = Expected()


def check_index(index: Sequence[int] | Tensor, rows: int | None = None) -> Tensor:
    """Row numbers as an int64 tensor on the CPU; CacheError if one is not below `rows`."""
    index = torch.as_tensor(index)
    if (
        index.dim() != 1
        or index.numel() == 0
        or index.dtype not in (torch.int64, torch.int32)
        or index.min() < 0
    ):
        raise CacheError(f"reorder({index.tolist()!r}): a list of row numbers ≥ 0 was expected")
    if rows is not None and index.max() >= rows:
        raise CacheError(f"reorder: row {int(index.max())} of a cache with {rows} rows")
    return index.long().cpu()  # a CPU index selects rows on any device


def refuse_states(config: Config, name: str) -> None:
    """UnsupportedError if layers of the model have no keys and values, but this cache has."""
    if config.states:
        raise UnsupportedError(
            f"{name!r} caches have keys and values only, and {config.states} of "
            f"{config.num_hidden_layers} layers of {config.family.title} have {config.state_name}",
            hint="growing, paged, prefix or quantized",
        )


def check_append(
    k: Tensor, v: Tensor, held: Tensor | None = None, expected: Expected = ANYTHING
) -> None:
    """CacheError unless keys (B,Hk,T,D) match `held` (B,Hk,S,D) and `expected`, and values the
    keys.

    Without this check, `cat` would promote another dtype and a slab would broadcast another batch
    size, both silently.
    """
    if (
        k.dim() != 4
        or not k.shape[2]
        or k.shape != v.shape
        or k.dtype != v.dtype
        or k.device != v.device
    ):
        pair = " and values ".join(f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (k, v))
        raise CacheError(f"cannot append keys {pair}: both must be alike (B,Hk,T,D), T ≥ 1")
    new = (*k.shape[:2], k.shape[-1], k.dtype, k.device)
    if held is not None and new != (*held.shape[:2], held.shape[-1], held.dtype, held.device):
        raise _mismatch(k, held)
    for name, want, got in zip(NAMES, expected, new[1:], strict=True):
        if want is None or want == got:
            continue
        if name == "device" and want == torch.device(got.type):
            continue
        raise CacheError(
            f"cannot append keys of {name} {got} to a cache that was made for {name} {want}"
        )


def _mismatch(k: Tensor, held: Tensor) -> CacheError:
    """The error for keys of another shape, dtype or device than the cache holds."""
    have, came = (f"{tuple(x.shape)} {x.dtype}" for x in (held, k))
    message = f"cannot append keys {came} to a cache of {have} (B,Hk,S,D)"
    if held.device == k.device:
        return CacheError(message)
    return CacheError(
        f"{message}: the keys are on {k.device}, the cache on {held.device}",
        hint="KVCache.load(path, config, device=…) loads it there",
    )
