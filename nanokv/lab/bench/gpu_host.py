"""The Python part of a decode step on a GPU: the same code, with the GPU's work left out.

Graph replays and the draw of a token are replaced by no-ops, and the model has the 28 layers of
Qwen3-0.6B, but tiny ones. The time that remains is spent in the generation loop or the engine, the
checks, the caches, and the inputs of a step and their copies. The figures are meaningful on a
machine without a GPU as well; a GPU adds the driver's time per copy and launch.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nanokv.attention import Attend
from nanokv.cache import KVCache, make_cache
from nanokv.config import Config
from nanokv.decoding import draw
from nanokv.decoding.generation import generate
from nanokv.engine import Engine
from nanokv.engine import engine as engines
from nanokv.fast.gpu.model import GpuTransformer, recorded
from nanokv.inference import decode, prefill
from nanokv.loading import random_model

LAYERS = 28
CONTEXT = 4096
PROMPT = 100  # tokens
STEPS = 100
MANY = 256  # requests of the engine


class Nothing(GpuTransformer):
    """The GPU model without its kernels. Its caches grow as usual."""

    def run_layers(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: KVCache,  # type: ignore[override]  # it reads pages too
        attend: Attend,
    ) -> Tensor:
        """Append uninitialised keys and values to every layer's cache."""
        Hk = self.config.num_key_value_heads
        D = self.config.head_dim
        for layer in cache:
            layer.append(*x.new_empty(2, len(x), Hk, x.shape[1], D))
        return x

    def step(self, tokens: Tensor, positions: Tensor, places: Any, lengths: Any) -> Tensor:
        return self.norm.weight.new_zeros(len(tokens), self.config.hidden_size)


def nothing(config: Config, device: str) -> Nothing:
    """A model with LAYERS layers, each of the sizes in `config`."""
    config = replace(config, num_hidden_layers=LAYERS, max_position_embeddings=CONTEXT)
    model = recorded(random_model(config, torch.float32, device))
    model.__class__ = Nothing
    return model  # type: ignore[return-value]  # its class was replaced the line above


def draw_nothing(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, filtered: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probabilities and highest logits (B,) ×3, without drawing."""
    tokens = torch.zeros_like(seeds)
    return tokens, temperature, temperature


@contextmanager
def without_work() -> Iterator[None]:
    """Take the GPU's code path for drawing on any device, and draw nothing."""
    with (
        mock.patch.object(draw, "together", lambda device: True),
        mock.patch.object(engines, "together", lambda device: True),
        mock.patch.object(draw, "drawing", lambda device: draw_nothing),
    ):
        yield


def host_rows(config: Config, device: str) -> Iterator[dict]:
    """Seconds of Python per step: of `decode` and `generate` over some caches, and of the engine
    with 1 and with MANY requests."""
    model = nothing(config, device)
    ways = [(path, kind, 1) for path in ("decode", "generate") for kind in ("growing", "paged")]
    makers = {"decode": decodes, "generate": tokens, "engine": engine_steps}
    with without_work():
        for path, kind, rows in [*ways, ("engine", "prefix", 1), ("engine", "prefix", MANY)]:
            row = {"path": path, "cache": kind, "rows": rows}
            yield row | timed(makers[path](model, kind, rows))


def timed(step: Callable[[], object]) -> dict:
    """Median and 90th percentile of STEPS steps: some steps add a page or grow a slab."""
    for _ in range(3):
        step()
    seconds = []
    for _ in range(STEPS):
        began = perf_counter()
        step()
        seconds.append(perf_counter() - began)
    return {"host_s": statistics.median(seconds), "slow_s": statistics.quantiles(seconds, n=10)[-1]}


def decodes(model: Nothing, kind: str, rows: int) -> Callable[[], object]:
    """A step is one forward pass of `rows` rows."""
    cache = make_cache(kind, model.config, rows)
    prompt = torch.zeros(rows, PROMPT, dtype=torch.int64, device=model.device)
    prefill(model, prompt, cache)
    return lambda: decode(model, prompt[:, :1], cache, cache.length)


def tokens(model: Nothing, kind: str, rows: int) -> Callable[[], object]:
    """A step is one token of `generate`."""
    answer = generate(
        model, [1] * PROMPT, make_cache(kind, model.config), CONTEXT - PROMPT, eos_token_ids=[]
    )
    return lambda: next(answer)


def engine_steps(model: Nothing, kind: str, rows: int) -> Callable[[], object]:
    """A step of an engine in which all `rows` requests decode; 1 in 16 needs a new page per
    step."""
    V = model.config.vocab_size
    new = STEPS + 8
    pages = rows * (1 + (PROMPT + new) // 16)
    engine = Engine(model, pages, step_tokens=rows * PROMPT, max_running=rows)
    for b in range(rows):
        prompt = [b % V, b // V] + [1] * (PROMPT - 2 - b % 16)
        engine.submit(prompt, max_new_tokens=new, eos_token_ids=[])
    engine.step()
    return engine.step
