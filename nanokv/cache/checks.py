"""What every cache checks before anything is written: rows that exist, and keys and values of the right kind."""

import torch

from nanokv.errors import CacheError


def check_index(index, rows=None):
    """Row numbers as an int64 tensor; `rows` = how many there are."""
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


def check_append(k, v, held=None, expected=(None, None, None, None)):
    """Keys (B,Hk,T,D) must match what is held, (B,Hk,S,D), and what is expected; values must match the keys.

    Without this check, `cat` would promote another dtype and a slab would broadcast another batch
    size, both silently.
    """
    new = (*k.shape[:2], k.shape[-1], k.dtype, k.device)
    if (
        k.dim() != 4
        or not k.shape[2]
        or k.shape != v.shape
        or k.dtype != v.dtype
        or k.device != v.device
    ):
        pair = " and values ".join(f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (k, v))
        raise CacheError(f"cannot append keys {pair}: both must be alike (B,Hk,T,D), T ≥ 1")
    if held is not None and new != (*held.shape[:2], held.shape[-1], held.dtype, held.device):
        have, came = (f"{tuple(x.shape)} {x.dtype}" for x in (held, k))
        devices = (
            ""
            if held.device == k.device
            else f": the keys are on {k.device}, the cache on {held.device}"
        )
        hint = "KVCache.load(path, config, device=…) loads it there" if devices else ""
        raise CacheError(
            f"cannot append keys {came} to a cache of {have} (B,Hk,S,D){devices}", hint
        )
    for name, want, got in zip(
        ("KV heads", "head_dim", "dtype", "device"), expected, new[1:], strict=True
    ):
        if (
            want is not None
            and want != got
            and not (name == "device" and want == torch.device(got.type))
        ):
            raise CacheError(
                f"cannot append keys of {name} {got} to a cache that was made for {name} {want}"
            )
