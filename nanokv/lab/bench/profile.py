"""Where the time of a prefill and of a decode step goes, part by part, each beside its floor.

The floor of a decode part is its bytes divided by the bandwidth of a buffer as large as all that a
step reads. The floor of a prefill part is its FLOPs divided by the speed of a large matrix product
in the same dtype. Both speeds are measured between the runs, and the best readings count. The first
new token belongs to the prefill, so the two phases are timed separately.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanokv import costs
from nanokv.cache import KVCache, LayerCache, make_cache
from nanokv.cache.capabilities import in_place
from nanokv.cache.state import StateLayer
from nanokv.checkpoint import Model
from nanokv.config import Config
from nanokv.fast import native
from nanokv.inference import decode, prefill
from nanokv.lab.bench.machine import Bandwidth, gemm_peak, timed

PRODUCTS = {
    "linear",
    "mm",
    "addmm",
    "_weight_int8pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_linear_pointwise",
}
REPEAT = 5
Floors = dict[str, tuple[float, str]]  # part → (seconds at least, the work in words)


@dataclass(frozen=True)
class Part:
    """A part of a phase: seconds measured, seconds at least (`floor`), and the work in words."""

    name: str
    seconds: float
    floor: float
    work: str


@dataclass(frozen=True)
class Phase:
    """`seconds` is the median wall time; the parts add up to it."""

    name: str
    seconds: float
    parts: list[Part]

    @property
    def floor(self) -> float:
        return sum(part.floor for part in self.parts)


def phases(
    model: Model,
    cache_name: str,
    options: dict,
    context: int,
    weight_bytes: int,
    dtype: torch.dtype,
) -> list[Phase]:
    """The prefill of `context` tokens, and one decode step after them."""
    config = model.config
    device = model.embed_tokens.weight.device
    kv = costs.kv_bytes_per_token(config, dtype.itemsize)
    limits = Limits(dtype, device, weight_bytes + context * kv)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, context), generator=generator).to(device)
    cache = make_cache(cache_name, config, capacity=context + 3 * REPEAT, **options)

    def fill():
        cache.truncate(0)
        prefill(model, ids, cache)

    def step():
        decode(model, ids[:, :1], cache, start_pos=cache.length)

    filled = measure(fill, cache, limits)
    stepped = measure(step, cache, limits)
    prefill_floor = prefill_floors(config, context, kv, limits)
    decode_floor = decode_floors(weight_bytes, context, kv, limits)
    return [
        phase(f"prefill of {context:,} tokens", filled, prefill_floor),
        phase(f"decode step at {context:,} tokens", stepped, decode_floor),
    ]


def prefill_floors(config: Config, context: int, kv: int, limits: "Limits") -> Floors:
    """The products at the machine's peak, the writes of the cache at its bandwidth."""
    pairs = sum(costs.keys_seen(context, 0, window) for window in config.windows)
    scores = 4 * config.num_attention_heads * config.head_dim * pairs  # FLOPs of attention, causal
    products = costs.prefill_flops(config, context) - scores
    written = context * kv
    return {
        "weights": (products / limits.peak, f"{products / 1e9:,.1f} GFLOP"),
        "attention": (scores / limits.peak, f"{scores / 1e9:,.1f} GFLOP"),
        "cache update": (written / limits.rate, f"{written / 1e6:,.2f} MB written"),
    }


def decode_floors(weight_bytes: int, context: int, kv: int, limits: "Limits") -> Floors:
    """Every byte that a step reads or writes, at the machine's bandwidth."""
    held = context * kv
    return {
        "weights": (weight_bytes / limits.rate, f"{weight_bytes / 1e6:,.1f} MB read"),
        "attention": (held / limits.rate, f"{held / 1e6:,.1f} MB read"),
        "cache update": (kv / limits.rate, f"{kv:,} B written"),
    }


class Limits:
    """The machine's bandwidth and FLOPs per second, read before, between and after the
    measurements. The best readings count."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size: int) -> None:
        self.dtype = dtype
        self.device = device
        self.size = size
        self.peak = 0.0  # FLOPs per second
        self.bandwidth = Bandwidth(device)

    @property
    def rate(self) -> float:
        """Bytes per second, of a buffer of `size`."""
        return self.bandwidth.best(self.size)

    def read(self) -> None:
        self.bandwidth.probe(self.size)
        self.peak = max(self.peak, gemm_peak(self.dtype, self.device, repeat=1))


def measure(
    run: Callable[[], object], cache: KVCache, limits: Limits
) -> tuple[float, dict[str, float]]:
    """(median wall time without instrumentation, seconds per part of the fastest instrumented
    run)."""
    times = []
    spent = []
    for _ in range(REPEAT):
        limits.read()
        times += timed(run, 1)
        spent.append(parts_of(run, cache))
    limits.read()
    return statistics.median(times), min(spent, key=lambda parts: sum(parts.values()))


def phase(name: str, found: tuple[float, dict[str, float]], floors: Floors) -> Phase:
    """The parts beside their floors. Time that belongs to no part becomes `the rest`."""
    total, spent = found
    parts = [
        Part(part, spent[part], *floors.get(part, (0.0, "")))
        for part in spent
        if part in floors or spent[part]
    ]
    rest = max(0.0, total - sum(spent.values()))
    return Phase(
        name, total, [*parts, Part("the rest", rest, 0.0, "Python, dispatch, unattributed")]
    )


def parts_of(run: Callable[[], object], cache: KVCache) -> dict[str, float]:
    """Seconds of one run by part; our own kernels report theirs through `times`."""
    kernels, _ = native.library()
    # seconds of: qkv products, attention, o product, MLP, head, norms and rotation
    clock = [0.0] * 6
    if kernels:
        clock = kernels.times().contents
    clock[:] = [0.0] * 6
    with watched(cache) as update, Clock() as torch_clock:
        run()
    ours = list(clock)
    return {
        "weights": torch_clock.products + ours[0] + ours[2] + ours[3] + ours[4],
        "attention": torch_clock.attention + ours[1],
        "cache update": update[0],
        "norms, rotation, gates": ours[5],
    }


class Clock(TorchDispatchMode):
    """Seconds in torch's matrix products and in torch's attention. torch.profiler is not used
    because it writes to stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attention = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        name = function.name()
        if name.split("::")[1].split(".")[0] in PRODUCTS:
            self.products += seconds
        elif "attention" in name:
            self.attention += seconds
        return result


@contextmanager
def watched(cache: KVCache) -> Iterator[list[float]]:
    """Yields a list of one number: seconds spent in the cache's `append` and `pages` so far."""
    spent = [0.0]
    layers = list(cache)

    def timed(method):
        def call(*args):
            began = time.perf_counter()
            try:
                return method(*args)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    cache[:] = [Watched(layer, timed) for layer in layers]
    try:
        yield spent
    finally:
        cache[:] = layers


class Watched(LayerCache):
    """A cache layer whose `append` and `pages` are timed, or `read` and `keep` of a state. It may
    offer the layer's pages, because its `append` does the same as the layer's."""

    def __init__(self, layer: LayerCache, timed: Callable[[Callable], Callable]) -> None:
        self.layer = layer
        self.capacity = layer.capacity
        self.timed_append = timed(layer.append)
        self.timed_pages = timed(layer.pages)
        self.mask = layer.mask  # type: ignore[method-assign]  # the layer's own, untimed
        self.truncate = layer.truncate  # type: ignore[method-assign]  # the layer's own, untimed
        self.fetch = getattr(layer, "fetch", None)
        self._windowed = layer._windowed
        if isinstance(layer, StateLayer):
            self.read = timed(layer.read)
            self.keep = timed(layer.keep)

    @in_place(lambda self, like: self.timed_pages(like))
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.timed_append(k, v)

    length = property(
        lambda self: self.layer.length, lambda self, n: setattr(self.layer, "length", n)
    )
