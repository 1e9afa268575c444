"""How fast is it here, and how far from the limit: prefill and decode beside the memory bandwidth of this machine.

A decode step must read every weight and the whole cache once, so bytes / bandwidth is the least time it can take.
Figures of one run on one machine compare; absolute ones age. Rounds over the contexts are interleaved, so a slow
minute of the machine hits all rows alike; what is reported is the median.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanokv import costs
from nanokv.cache import make_cache
from nanokv.inference import decode, prefill

STEPS = 16  # decode steps a measurement
BUFFER = 1 << 28  # bytes read by the bandwidth probe: far more than a cache of the processor holds, except on servers


@dataclass(frozen=True)
class Row:
    """Medians of one context; seconds for one prefill and one decode step."""

    cache: str
    context: int
    prefill_s: float
    decode_s: float
    spread: float  # (slowest − fastest) / median of the decode steps' medians
    decode_bytes: int
    bandwidth: float  # bytes a second, measured in the same run

    @property
    def gigabytes_per_second(self) -> float:
        """What a decode step really moves."""
        return self.decode_bytes / self.decode_s / 1e9

    @property
    def share(self) -> float:
        """Of the bandwidth limit: 1 would be a step that only waits for memory."""
        return self.decode_bytes / self.bandwidth / self.decode_s


def read_bandwidth(rounds: int = 5) -> float:
    """Bytes a second that a sum over a large buffer streams from memory, best of `rounds`."""
    buffer = torch.ones(BUFFER // 4)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - began)
    return BUFFER / min(times)


def measure(model, cache_name: str, contexts, repeat: int = 5) -> Iterator[tuple[int, float, float]]:
    """(context, prefill seconds, seconds a decode step), one round over all contexts after the other, warm-up first."""
    for turn in range(repeat + 1):
        for context in contexts:
            ids = torch.randint(model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(turn))
            cache = make_cache(cache_name, model.config, capacity=context + STEPS)
            began = time.perf_counter()
            logits = prefill(model, ids, cache)
            prefilled = time.perf_counter()
            for _ in range(STEPS):
                logits = decode(model, logits.argmax(-1, keepdim=True), cache, start_pos=cache.length)
            done = time.perf_counter()
            if turn:  # the first round warms up
                yield context, prefilled - began, (done - prefilled) / STEPS


def summarize(model, cache_name: str, samples, bandwidth: float) -> list[Row]:
    """Medians by context."""
    itemsize = model.embed_tokens.weight.itemsize
    rows = []
    for context in dict.fromkeys(context for context, _, _ in samples):
        prefills = [p for c, p, _ in samples if c == context]
        decodes = [d for c, _, d in samples if c == context]
        median = statistics.median(decodes)
        moved = costs.decode_bytes(model.config, context + STEPS // 2, itemsize)
        spread = (max(decodes) - min(decodes)) / median
        rows.append(Row(cache_name, context, statistics.median(prefills), median, spread, moved, bandwidth))
    return rows
