"""Picks the faster of two implementations by measuring both, once per process.

Used for causal attention on a processor with matrix tiles (AMX). The kernel and torch's attention
both use the tiles, and which of them is faster depends on the machine.
"""

import functools
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from nanokv.attention import Attend

LONG = 256  # tokens: shorter prefills take the first way without a measurement
MOST = 1024  # tokens of the prefill that are measured: tens of milliseconds


class Choice:
    """Compares implementations by the fastest of three runs each.

    The first way is kept unless another one is at least 10 % faster. The ways round differently, so
    noise in the measurement must not decide which tokens a seed draws.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.chosen: int | None = None

    def pick(self, ways: Sequence[Attend], q: Tensor, k: Tensor, v: Tensor) -> int:
        """Index of the way to take for q (B,H,T,D), k and v (B,Hk,S,D). The first call measures."""
        if self.chosen is None:
            most = min(q.shape[2], MOST)
            first = [tensor[:, :, :most] for tensor in (q, k, v)]
            # The first of the three runs warms up.
            seconds = [min(self.run(way, first) for _ in range(3)) for way in ways]
            best = min(range(len(ways)), key=seconds.__getitem__)
            self.chosen = 0
            if seconds[best] < 0.9 * seconds[0]:
                self.chosen = best
        return self.chosen

    def run(self, way: Attend, tensors: Sequence[Tensor]) -> float:
        began = self.clock()
        way(*tensors)
        return self.clock() - began


@functools.cache
def attention() -> Choice:
    """The choice of this process between the kernel (0) and torch's attention (1)."""
    return Choice()
