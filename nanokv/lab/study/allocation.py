"""Check the formulas of nanokv.costs against caches that are really allocated: `nanokv memory
--check`."""

from typing import Any

import torch

from nanokv import costs
from nanokv.cache import make_cache
from nanokv.cache.checks import refuse_states
from nanokv.cache.options import KINDS
from nanokv.costs.free_memory import available_memory
from nanokv.costs.memory import Estimate
from nanokv.loading import skeleton

CHECK_BYTES = 256 << 20  # about the most that is allocated at a time


def check(estimate: Estimate) -> dict[str, Any]:
    """Fill every kind of cache with as many tokens as fit in CHECK_BYTES, and count the model's
    parameters.

    Raises RuntimeError on any difference: a bug in nanokv and not a mistake of the user (exit
    code 1).
    """
    counted = sum(p.numel() * estimate.itemsize for p in skeleton(estimate.config).parameters())
    expect("weights", counted, estimate.weights)
    budget = CHECK_BYTES
    free = available_memory("cpu")
    if free is not None:
        budget = min(CHECK_BYTES, free // 8)
    each = max(1, estimate.per_token)  # 0 if every layer has a window
    batch = min(estimate.batch, max(1, budget // (each * 64)))
    tokens = max(1, min(estimate.context, budget // (each * batch)))
    refuse_states(estimate.config, "filled")
    kept = list(KINDS)
    if any(estimate.config.windows):
        kept = [name for name in KINDS if name not in ("sliding", "evicting")]
    plain: dict[str, dict[str, Any]] = {name: {} for name in kept}
    kinds = plain | {estimate.cache: estimate.options}
    for name, options in kinds.items():
        expect(f"{name} cache", *compare(estimate, name, options, tokens, batch))
    return {"tokens": tokens, "batch": batch, "caches": list(kinds), "weights_bytes": counted}


def compare(
    estimate: Estimate, name: str, options: dict[str, Any], tokens: int, batch: int
) -> tuple[int, int]:
    """(nbytes of a filled cache, bytes by the formula)."""
    c = estimate.config
    dtype = getattr(torch, estimate.dtype)
    cache = make_cache(name, c, batch_size=batch, capacity=tokens, **options)
    rows = torch.zeros(batch, c.num_key_value_heads, tokens, c.head_dim, dtype=dtype)  # (B,Hk,T,D)
    for layer in cache:
        layer.append(rows, rows.clone())
    formula = costs.cache_bytes(
        name, c, tokens, batch, estimate.itemsize, capacity=tokens, last=tokens, **options
    )
    return cache.nbytes, formula


def expect(what: str, measured: int, formula: int) -> None:
    """RuntimeError unless the two are equal to the byte."""
    if measured != formula:
        raise RuntimeError(f"{what}: {measured:,} bytes allocated, the formula says {formula:,}")
