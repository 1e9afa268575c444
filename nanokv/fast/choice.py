"""Which of two ways that compute the same is faster on this machine: measured once per process, where nobody knows.

That is causal attention on a processor with matrix tiles: the kernel and torch's attention both use them.
"""

import functools
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from nanokv.attention import Attend

LONG = 256  # tokens of a prefill from which on it is measured; a shorter one takes the first way
MOST = 1024  # tokens of it that are measured: tens of milliseconds


class Choice:
    """The fastest of three runs counts. The first way stays unless another is 10 % faster: they round differently, and
    noise must not decide what a seed draws."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.chosen: int | None = None

    def pick(self, ways: Sequence[Attend], q: Tensor, k: Tensor, v: Tensor) -> int:
        """Position of the way to take for q (B,H,T,D), k and v (B,Hk,S,D); measured at the first call."""
        if self.chosen is None:
            most = min(q.shape[2], MOST)
            first = [tensor[:, :, :most] for tensor in (q, k, v)]
            # The first warms up.
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
    """The one of this process: the kernel (0) or torch's attention (1)."""
    return Choice()
