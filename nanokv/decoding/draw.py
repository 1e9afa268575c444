"""Tokens drawn, and the decision whether one was the last: for the loop, for the engine and for batches alike.

    draw         one row, with a generator, as transformers draws: the way of a CPU
    next_steps   all rows of a step. On a GPU they are drawn together, by numbers that a counter gives, and waited for
                 once: a generator is a launch and a wait for each row. From equal logits a row draws the same
                 alone and in any batch; on a GPU those of another batch size differ by rounding.

`draw` changes nothing but its generator, a counter nothing at all. Their callers commit the token afterwards, in one
line: Ctrl-C may come between any two lines, and a draw that was cut short can be repeated.
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
    """How a token is drawn. Checked when it is made; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None and -1: drawn for each generation and reported as its .seed

    def __post_init__(self):
        check_sampling(**self.values(), **({} if self.seed is None else {"seed": self.seed}))

    def values(self) -> dict:
        """The keyword arguments of `sample`: all but the seed, which is what a generator begins with."""
        return {name: value for name, value in asdict(self).items() if name != "seed"}

    def filters(self) -> tuple:
        """(top_k, top_p, min_p) where one of them may leave out a token, else ()."""
        off = self.top_k <= 0 and self.top_p == 1 and self.min_p == 0
        return () if off or not self.temperature else (self.top_k, self.top_p, self.min_p)

    def generator(self, device: torch.device | str) -> torch.Generator:
        """Random numbers of one answer; its `initial_seed()` repeats them, also where no seed was given."""
        seed = chosen_seed(self.seed)
        return torch.Generator(device).manual_seed(secrets.randbits(32) if seed is None else seed)

    @classmethod
    def from_checkpoint(
        cls, generation_config: GenerationConfig, **overrides: Any
    ) -> "SamplingParams":
        """The checkpoint's own sampling values; overrides that are None change nothing."""
        own = {
            f.name: getattr(generation_config, f.name)
            for f in fields(cls)
            if hasattr(generation_config, f.name)
        }
        return cls(**own | {name: value for name, value in overrides.items() if value is not None})


GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token and its log-probability under the raw logits; `top`: the likeliest ones, where asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability), the likeliest first


def draw(
    logits: torch.Tensor, values: dict, generator: torch.Generator, *texts: list[int]
) -> torch.Tensor:
    """One token from logits (1,V) → (1,). `values`: SamplingParams.values(); `texts`: lists of the ids before it, which
    only the repetition penalty reads."""
    previous = None
    if values["repetition_penalty"] != 1:
        previous = torch.tensor([[*chain(*texts)]], device=logits.device)  # (1,N)
    return choose(logits, **values, previous=previous, generator=generator)


class Sampler:
    """How one row is drawn: its parameters, its random numbers, and the text so far, which the penalty reads.

    `tokens`, the answer so far, is the caller's own list and grows. `constrain(logits (1,V), tokens)` → logits, before
    each token is drawn.
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
        self.top = top  # so many of the likeliest tokens stand in each Step
        self.seed = signed(generator.initial_seed())
        self.values, self.filters = params.values(), params.filters()
        self.temperature, self.constrain = params.temperature, constrain
        self.generator, self.prompt, self.tokens = generator, prompt, tokens
        # Is it drawn from other logits than the model's?
        self.changes = bool(self.filters or constrain or params.repetition_penalty != 1)

    def constrained(self, logits: torch.Tensor) -> torch.Tensor:
        """(1,V) → (1,V)."""
        return logits if self.constrain is None else self.constrain(logits, self.tokens)


def sent(values: list, device: torch.device, dtype: type = numpy.int64) -> torch.Tensor:
    """torch.tensor(values, device=device) waits for all that a GPU was asked before; this does not. Memory that is not
    pinned has been read when the copy returns. (NumPy reads a list in a fifth of torch's time.)"""
    return torch.from_numpy(numpy.array(values, dtype)).to(device, non_blocking=True)


def together(device: torch.device) -> bool:
    """Are the rows of a step drawn by a counter, all at once? (mps has no fp64, in which the results come over.)"""
    return device.type == "cuda"


def next_steps(
    logits: torch.Tensor, samplers: Sequence[Sampler]
) -> list[Step] | list[Step | GenerationError]:
    """logits (B,V) → a Step for each row, or why it cannot have one: NaN, infinity, nothing left to draw from."""
    if together(logits.device):
        return by_counter(logits, samplers)
    return [by_generator(logits[b : b + 1], sampler) for b, sampler in enumerate(samplers)]


def by_generator(logits: torch.Tensor, sampler: Sampler) -> Step | GenerationError:
    """logits (1,V) → the Step that this row's generator gives."""
    left, texts = sampler.constrained(logits), (sampler.prompt, sampler.tokens)
    try:
        token = draw(left, sampler.values, sampler.generator, *texts)  # (1,)
    except GenerationError as error:
        return error
    (top,) = likeliest(logits, sampler.top) if sampler.top else [()]
    return Step(int(token), float(logprob(logits, token)), top)


def by_counter(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[Step | GenerationError]:
    """logits (B,V) → a Step for each row: its seed and the number of its token say what is drawn. One wait for all."""
    device, (left, temperatures) = logits.device, allowed(logits, samplers)
    seeds = [sampler.seed for sampler in samplers]  # (B)
    places = [len(sampler.tokens) for sampler in samplers]  # (B)
    numbers = sent([seeds, places], device).unbind()  # (B,) ×2
    temperature = sent(temperatures, device, numpy.float32)  # (B,)
    with gpu.on(device):
        drawn = drawing(device)(logits, temperature, *numbers, left)
    asking = [b for b, sampler in enumerate(samplers) if sampler.top]
    tops = top_of(logits, asking, samplers) if asking else ()
    tokens, logprobs, highest, *tops = brought(*drawn, *tops)
    steps: list[Step | GenerationError] = [
        Step(token, logprob) if math.isfinite(high) else unusable(high)
        for token, logprob, high in zip(tokens, logprobs, highest, strict=True)
    ]
    for b, *pairs in zip(asking, *tops, strict=True):
        if isinstance(steps[b], Step):
            top = tuple(zip(*pairs, strict=True))[: samplers[b].top]
            steps[b] = replace(steps[b], top=top)  # type: ignore[type-var]
    return steps


def top_of(logits: torch.Tensor, asking: list[int], samplers: Sequence[Sampler]) -> list:
    """likeliest_rows of the rows that ask for them, as many as any of these does: ids and log-probabilities (n,k)."""
    rows = logits if len(asking) == len(logits) else logits[sent(asking, logits.device)]
    return [*likeliest_rows(rows, max(samplers[b].top for b in asking))]


def brought(*tensors: torch.Tensor) -> list[list]:
    """Tensors of a device, of 4 or 8 bytes per number, as lists: by one copy, the one wait of a step."""
    whole = torch.cat([tensor.flatten().view(torch.int32) for tensor in tensors]).cpu().numpy()
    lists, start = [], 0
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
    """(B,V) fp32 that is drawn from, None where nothing is left out or changed; and each row's temperature for it.

    Rows with equal filters are filtered together.
    """
    temperatures = [sampler.temperature for sampler in samplers]
    if not any(sampler.changes for sampler in samplers):
        return None, temperatures
    left = logits.to(torch.float32, copy=True)  # (B,V)
    groups: dict[tuple, list[int]] = {}
    for b, sampler in enumerate(samplers):
        before = left[b : b + 1]  # (1,V)
        row = sampler.constrained(before)  # (1,V)
        if (penalty := sampler.values["repetition_penalty"]) != 1:
            seen = sent([sampler.prompt + sampler.tokens], row.device)  # (1,N)
            row = penalized(row, seen, penalty)
        if row is not before:  # else a launch for nothing
            left[b : b + 1] = row
        if sampler.filters:
            groups.setdefault((sampler.temperature, *sampler.filters), []).append(b)
    for filters, members in groups.items():
        rows = sent(members, left.device)  # (n,): a list would be copied there, with a wait
        left[rows] = kept(left[rows], *filters)
        for b in members:
            temperatures[b] = 1.0  # they are divided by it already
    return left, temperatures


@functools.cache
def drawing(device: torch.device) -> Callable:
    """The kernel that draws, or the same draw in torch's operators where there is no Triton."""
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
    """Was the newest token the last one, and why? `room`: tokens that the context leaves for the answer."""
    if tokens[-1] in eos_token_ids:
        return "stop"
    if len(tokens) == max_new_tokens:
        return "length"
    return "context" if len(tokens) == room else None
