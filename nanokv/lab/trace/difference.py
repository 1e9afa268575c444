"""Compare a right and a wrong run of the same prompt: keys, values, attention weights, logits,
words and bytes.

Rows of the cache are compared by token, counted from the end. Extra rows before token 0, left by
a fault, belong to no token and are ignored. Differences are exact: they are computed before the
page rounds its numbers.
"""

import torch
import torch.nn.functional as F

from nanokv.lab.trace.recorder import Run

# Differences by rounding, relative to the largest value.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-8}
TOP = 5  # highest logits of each run that are compared


def limits(right: Run, layer: int, dtype: torch.dtype) -> list[float]:
    """Largest change by rounding of a key, a value and an attention weight: TOLERANCE times the
    layer's largest key and value, and 1 for weights."""
    rows = torch.cat(right.caches[layer].rows).abs()  # (n,2,Hk,D)
    return [TOLERANCE[dtype] * x for x in (*rows.amax((0, 2, 3)).tolist(), 1.0)]


def places(right: Run, wrong: Run, dtype: torch.dtype) -> list[tuple]:
    """[(step, index of the layer, position, Δ key, Δ value, Δ attention), …], sorted.

    Δ is the largest |right − wrong| of the numbers at the position; for attention, of the weights
    of its query. A Δ within `limits` is 0. A position is listed at every step at which one of its
    Δ changed.
    """
    found = []
    for i, layer in enumerate(right.layers):
        before = torch.zeros(0, 3)
        limit = torch.tensor(limits(right, layer, dtype))
        logs = zip(right.caches[layer].history(), wrong.caches[layer].history(), strict=False)
        for n, (x, y, (a, b)) in enumerate(zip(right.steps, wrong.steps, logs, strict=False)):
            now = F.pad(before, (0, 0, 0, len(a) - len(before)))  # (S,3)
            before = now.clone()
            now[:, :2] = largest(a - last_rows(b, len(a)), dims=(2, 3))
            if layer in x.attention and layer in y.attention:
                gap = weight_gap(x.attention[layer], y.attention[layer])
                now[-len(x.fed) :, 2] = largest(gap, dims=(0, 2))
            now[now <= limit] = 0
            moved = (now != before).any(1).nonzero().flatten().tolist()
            found += [(n, i, position, *now[position].tolist()) for position in moved]
            before = now
    return sorted(found)


def last_rows(rows: torch.Tensor, n: int) -> torch.Tensor:
    """The last n rows. Missing rows are nan, at the front."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (max(0, n - len(rows)), 0), value=torch.nan)[-n:]


def weight_gap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a − b of weights (H,T,S) with different S, aligned at the newest key."""
    wide = max(a.shape[-1], b.shape[-1])
    return F.pad(a, (wide - a.shape[-1], 0)) - F.pad(b, (wide - b.shape[-1], 0))


def largest(gap: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """max |gap| over some dimensions; nan counts as infinite."""
    return gap.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dims)


def top_logits(right: Run, wrong: Run) -> list[list[tuple]]:
    """For each step that both runs have: (id, logit right, logit wrong) of the TOP highest logits
    of either run."""
    steps = []
    for a, b in zip(right.steps, wrong.steps, strict=False):
        ids = list(dict.fromkeys(highest(a.logits, TOP) + highest(b.logits, TOP)))
        steps.append(list(zip(ids, a.logits[ids].tolist(), b.logits[ids].tolist(), strict=True)))
    return steps


def highest(logits: torch.Tensor, n: int) -> list[int]:
    """The ids of the n highest logits (V,), the highest first; nan counts as lowest."""
    return logits.nan_to_num(nan=-torch.inf).topk(min(n, len(logits))).indices.tolist()


def divergence(right: Run, wrong: Run, tolerance: float) -> dict:
    """Where two runs diverge: max |Δ logits| of each step, and the first step with different
    logits, chosen token and bytes of the cache."""
    deltas = [
        (a.logits - b.logits).abs().nan_to_num(nan=torch.inf).max().item()
        for a, b in zip(right.steps, wrong.steps, strict=False)
    ]
    bounds = [tolerance * step.logits.abs().max().item() for step in right.steps]
    both = list(zip(right.steps, wrong.steps, strict=False))
    beyond = [n for n in range(len(both)) if not deltas[n] <= bounds[n]]
    words = [n for n, (a, b) in enumerate(both) if a.chosen != b.chosen]
    if len(right.steps) != len(wrong.steps):
        words.append(len(both))
    sizes = [n for n, (a, b) in enumerate(both) if a.nbytes != b.nbytes]
    return {
        "deltas": deltas,
        "logitsStep": min(beyond, default=None),
        "wordsStep": min(words, default=None),
        "bytesStep": min(sizes, default=None),
        "tolerance": max(bounds, default=0.0),
    }
