"""One token drawn, and the decision whether it was the last: for the loop, for the engine and for batches alike.

`draw` changes nothing but its generator. Its caller commits the token afterwards, in one line: Ctrl-C may come between
any two lines, and a draw that was cut short can be repeated.
"""

import secrets
from dataclasses import asdict, dataclass, fields
from itertools import chain
from typing import Any

import torch

from nanokv.config import GenerationConfig
from nanokv.decoding.ranges import check_sampling, chosen_seed
from nanokv.decoding.sample import choose


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


def reason_to_end(
    tokens: list[int], eos_token_ids: tuple[int, ...], max_new_tokens: int, room: int
) -> str | None:
    """Was the newest token the last one, and why? `room`: tokens that the context leaves for the answer."""
    if tokens[-1] in eos_token_ids:
        return "stop"
    if len(tokens) == max_new_tokens:
        return "length"
    return "context" if len(tokens) == room else None
