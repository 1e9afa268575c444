"""Drawing tokens, and the reason why an answer ends: for the loop, the engine and batches.

    draw         one row, with a generator, as transformers draws; used on a CPU
    next_steps   all rows of a step. A GPU draws them together with counter-based random numbers and
                 one synchronisation; a generator would need a launch and a synchronisation per row.
                 From equal logits a row draws the same token alone and in any batch; but on a GPU
                 logits differ by rounding between batch sizes.

`draw` changes only its generator, and a counter has no state. Callers commit the token afterwards
in one statement: Ctrl-C can come between any two lines, and an interrupted draw can be repeated.
"""

import functools
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy
import torch

from nanokv.config import GenerationConfig
from nanokv.decoding.counter import draw_rows
from nanokv.decoding.ranges import check_sampling, chosen_seed
from nanokv.decoding.sample import (
    choose,
    kept,
    likeliest,
    likeliest_rows,
    logprob,
    penalized,
    unusable,
)
from nanokv.errors import GenerationError
from nanokv.fast import gpu


@dataclass(frozen=True)
class SamplingParams:
    """How to draw a token; checked by the constructor. The defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None or -1: random for each generation and reported as its .seed

    def __post_init__(self):
        check_sampling(**self.values())
        if self.seed is not None:
            check_sampling(seed=self.seed)

    def values(self) -> dict[str, Any]:
        """The keyword arguments of `sample`: all but the seed, which is for `generator`."""
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    def filters(self) -> tuple[Any, ...]:
        """(top_k, top_p, min_p) if one of them may remove a token, else ()."""
        off = self.top_k <= 0 and self.top_p == 1 and self.min_p == 0
        if off or not self.temperature:
            return ()
        return self.top_k, self.top_p, self.min_p

    def generator(self, device: torch.device | str) -> torch.Generator:
        """The random numbers of one answer; `initial_seed()` repeats them, even without a seed."""
        seed = chosen_seed(self.seed)
        if seed is None:
            seed = secrets.randbits(32)
        return torch.Generator(device).manual_seed(seed)

    @classmethod
    def from_checkpoint(
        cls, generation_config: GenerationConfig, **overrides: Any
    ) -> "SamplingParams":
        """The sampling values of the checkpoint, replaced by the overrides that are not None."""
        own = {
            f.name: getattr(generation_config, f.name)
            for f in fields(cls)
            if hasattr(generation_config, f.name)
        }
        given = {name: value for name, value in overrides.items() if value is not None}
        return cls(**own | given)


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token, its log-probability under the raw logits, and the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability), likeliest first


def draw(
    logits: torch.Tensor, values: dict[str, Any], generator: torch.Generator, *texts: list[int]
) -> torch.Tensor:
    """One token from logits (1,V) → (1,).

    `values`: SamplingParams.values(). `texts`: lists of the ids before the token, for the
    repetition penalty only.
    """
    previous = None
    if values["repetition_penalty"] != 1:
        previous = torch.tensor([[*chain(*texts)]], device=logits.device)  # (1,N)
    return choose(logits, **values, previous=previous, generator=generator)


class Sampler:
    """How to draw one row: parameters, random numbers, and the text so far for the penalty.

    `tokens`, the answer so far, is the caller's list, which grows. `constrain(logits (1,V),
    tokens)` returns the logits to draw from; it is called before each draw.
    """

    def __init__(
        self,
        params: SamplingParams,
        generator: torch.Generator,
        prompt: list[int],
        tokens: list[int],
        constrain: Callable[[torch.Tensor, list[int]], torch.Tensor] | None = None,
        top: int = 0,
    ):
        self.top = top  # how many of the likeliest tokens each Step lists
        self.seed = signed(generator.initial_seed())
        self.values = params.values()
        self.filters = params.filters()
        self.temperature = params.temperature
        self.constrain = constrain
        self.generator = generator
        self.prompt = prompt
        self.tokens = tokens
        # True if the row is drawn from other logits than the model's.
        self.changes = bool(self.filters or constrain or params.repetition_penalty != 1)

    def constrained(self, logits: torch.Tensor) -> torch.Tensor:
        """(1,V) → (1,V)."""
        if self.constrain is None:
            return logits
        return self.constrain(logits, self.tokens)


def sent(
    values: list[Any], device: torch.device, dtype: type[numpy.generic] = numpy.int64
) -> torch.Tensor:
    """A tensor of `values` on a device, without a synchronisation.

    torch.tensor(values, device=device) would wait for all queued work of a GPU. The memory here is
    not pinned, so it has been read when the copy returns. NumPy also reads a list five times as
    fast as torch.
    """
    return torch.from_numpy(numpy.array(values, dtype)).to(device, non_blocking=True)


def together(device: torch.device) -> bool:
    """True if all rows of a step are drawn at once, by counter. (mps: no fp64 for the results.)"""
    return device.type == "cuda"


def next_steps(
    logits: torch.Tensor, samplers: Sequence[Sampler]
) -> list[Step] | list[Step | GenerationError]:
    """logits (B,V) → a Step per row, or the error for NaN, infinity, or no token left to draw."""
    if together(logits.device):
        return by_counter(logits, samplers)
    return [by_generator(logits[b : b + 1], sampler) for b, sampler in enumerate(samplers)]


def by_generator(logits: torch.Tensor, sampler: Sampler) -> Step | GenerationError:
    """logits (1,V) → a Step drawn with the row's generator."""
    left = sampler.constrained(logits)
    texts = sampler.prompt, sampler.tokens
    try:
        token = draw(left, sampler.values, sampler.generator, *texts)  # (1,)
    except GenerationError as error:
        return error
    (top,) = likeliest(logits, sampler.top) if sampler.top else [()]
    return Step(int(token), float(logprob(logits, token)), top)


def by_counter(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Step | GenerationError]:
    """logits (B,V) → a Step per row, drawn by its seed and the place of its token.

    One synchronisation for all rows.
    """
    device = logits.device
    left, temperatures = allowed(logits, samplers)
    seeds = [sampler.seed for sampler in samplers]  # B
    places = [len(sampler.tokens) for sampler in samplers]  # B
    numbers = sent([seeds, places], device).unbind()  # (B,) ×2
    temperature = sent(temperatures, device, numpy.float32)  # (B,)
    with gpu.on(device):
        drawn = drawing(device)(logits, temperature, *numbers, left)
    asking = [b for b, sampler in enumerate(samplers) if sampler.top]
    tops = top_of(logits, asking, samplers) if asking else ()
    tokens, logprobs, highest, *likely = brought(*drawn, *tops)
    steps: list[Step | GenerationError] = [
        Step(token, logprob) if math.isfinite(high) else unusable(high)
        for token, logprob, high in zip(tokens, logprobs, highest, strict=True)
    ]
    for b, *pairs in zip(asking, *likely, strict=True):
        step = steps[b]
        if isinstance(step, Step):
            top = tuple(zip(*pairs, strict=True))[: samplers[b].top]
            steps[b] = replace(step, top=top)
    return steps


def top_of(
    logits: torch.Tensor, asking: list[int], samplers: Sequence[Sampler]
) -> Sequence[torch.Tensor]:
    """likeliest_rows of the n rows `asking`: ids and log-probabilities (n,k), for the largest k."""
    rows = logits
    if len(asking) < len(logits):
        rows = logits[sent(asking, logits.device)]
    return likeliest_rows(rows, max(samplers[b].top for b in asking))


def brought(*tensors: torch.Tensor) -> list[list[Any]]:
    """Device tensors of 4 or 8 bytes per number, as lists; one copy synchronises for all."""
    whole = torch.cat([tensor.flatten().view(torch.int32) for tensor in tensors]).cpu().numpy()
    lists = []
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes // 4
        numbers = whole[start:end].view(NUMPY[tensor.dtype])
        lists.append(numbers.reshape(tensor.shape).tolist())
        start = end
    return lists


NUMPY = {torch.int64: numpy.int64, torch.float32: numpy.float32}


def allowed(
    logits: torch.Tensor, samplers: Sequence[Sampler]
) -> tuple[torch.Tensor | None, list[float]]:
    """(logits to draw from, (B,V) fp32, or None for the raw ones; the temperature of each row).

    Rows with equal filters are filtered together.
    """
    temperatures = [sampler.temperature for sampler in samplers]
    if not any(sampler.changes for sampler in samplers):
        return None, temperatures
    left = logits.to(torch.float32, copy=True)  # (B,V)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for b, sampler in enumerate(samplers):
        before = left[b : b + 1]  # (1,V)
        row = sampler.constrained(before)  # (1,V)
        if (penalty := sampler.values["repetition_penalty"]) != 1:
            seen = sent([sampler.prompt + sampler.tokens], row.device)  # (1,N)
            row = penalized(row, seen, penalty)
        if row is not before:  # unchanged rows need no kernel launch
            left[b : b + 1] = row
        if sampler.filters:
            groups.setdefault((sampler.temperature, *sampler.filters), []).append(b)
    for filters, members in groups.items():
        rows = sent(members, left.device)  # (n,): indexing by a list would synchronise
        left[rows] = kept(left[rows], *filters)
        for b in members:
            temperatures[b] = 1.0  # `kept` has divided by the temperature
    return left, temperatures


@functools.cache
def drawing(device: torch.device) -> Callable[..., Any]:
    """The kernel that draws, or the same draw in torch operators if Triton is missing."""
    if gpu.missing(device, torch.float32):
        return draw_rows
    from nanokv.fast.gpu.draw import draw as kernel

    return kernel


def signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63


def reason_to_end(
    tokens: list[int], eos_token_ids: tuple[int, ...], max_new_tokens: int, room: int
) -> str | None:
    """Why the newest token is the last one, or None. `room`: the answer tokens that fit."""
    if tokens[-1] in eos_token_ids:
        return "stop"
    if len(tokens) == max_new_tokens:
        return "length"
    if len(tokens) == room:
        return "context"
    return None
