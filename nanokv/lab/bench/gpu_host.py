"""What Python costs in a decode step of a GPU, where the next step waits for it: the same code with nothing behind it.

The GPU computes while Python prepares the step, but each token is waited for before the next step begins, so what
Python takes comes on top. Here replays, kernels and the draw are replaced by nothing, and a model of Qwen3-0.6B's 28
layers has tiny ones. What is left are the loop or the engine, the checks, caches, inputs and their copies.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from unittest import mock

import torch

from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.decoding import draw
from nanokv.decoding.generation import generate
from nanokv.engine import Engine
from nanokv.engine import engine as engines
from nanokv.fast.gpu.model import GpuTransformer, recorded
from nanokv.inference import decode
from nanokv.loading import random_model

LAYERS = 28
PROMPT = 100


class Nothing(GpuTransformer):
    """The model of a GPU whose kernels compute nothing. Its caches grow as ever."""

    def run_layers(self, x, rope, cache, attend):
        """Keys and values that nobody wrote."""
        Hk, D = self.config.num_key_value_heads, self.config.head_dim
        for layer in cache:
            layer.append(*x.new_empty(2, len(x), Hk, x.shape[1], D))
        return x

    def step(self, tokens, positions, places, lengths):
        return self.norm.weight.new_zeros(len(tokens), self.config.hidden_size)


def nothing(config: Config, device: str) -> Nothing:
    """As many layers as Qwen3-0.6B, each of tiny matrices."""
    plain = random_model(replace(config, num_hidden_layers=LAYERS), torch.float32, device)
    model = recorded(plain)
    model.__class__ = Nothing
    return model


def draw_nothing(logits, temperature, seeds, positions, filtered=None):
    """Tokens, log-probabilities and highest logits of nobody."""
    tokens = torch.zeros_like(seeds)
    return tokens, temperature, temperature


@contextmanager
def without_work():
    """The draw of a GPU, on any device, by nobody."""
    with (
        mock.patch.object(draw, "together", lambda device: True),
        mock.patch.object(engines, "together", lambda device: True),
        mock.patch.object(draw, "drawing", lambda device: draw_nothing),
    ):
        yield


def host_rows(
    config: Config, device: str, tokens: int, requests: tuple[int, ...]
) -> Iterator[dict]:
    """Seconds of Python per step: of `decode` and `generate` over some caches, and of the engine."""
    model = nothing(config, device)
    with without_work():
        for kind in ("growing", "static", "paged"):
            yield {
                "path": "decode",
                "cache": kind,
                "rows": 1,
                **timed(decodes(model, kind), tokens),
            }
        for kind in ("growing", "paged"):
            yield {
                "path": "generate",
                "cache": kind,
                "rows": 1,
                **timed(tokens_of(model, kind), tokens),
            }
        for rows in requests:
            yield {
                "path": "engine",
                "cache": "prefix",
                "rows": rows,
                **timed(steps_of(model, rows, tokens), tokens),
            }


def timed(step: Callable[[], object], count: int) -> dict:
    """The median, and the tenth that took longest: pages come in some steps and not in others."""
    for _ in range(3):
        step()
    seconds = []
    for _ in range(count):
        began = perf_counter()
        step()
        seconds.append(perf_counter() - began)
    return {"host_s": statistics.median(seconds), "slow_s": statistics.quantiles(seconds, n=10)[-1]}


def decodes(model, kind: str) -> Callable[[], object]:
    cache = make_cache(kind, model.config, capacity=model.config.max_position_embeddings)
    model(torch.zeros(1, PROMPT, dtype=torch.int64, device=model.device), cache, 0, None)
    token = torch.zeros(1, 1, dtype=torch.int64)

    def step():
        decode(model, token, cache, cache.length)

    return step


def tokens_of(model, kind: str) -> Callable[[], object]:
    cache = make_cache(kind, model.config)
    answer = generate(model, [1] * PROMPT, cache, max_new_tokens=10**6, eos_token_ids=[])
    return lambda: next(answer)


def steps_of(model, rows: int, tokens: int) -> Callable[[], object]:
    """Of an engine all of whose requests decode."""
    engine = Engine(model, pages=rows * (2 + (PROMPT + tokens + 8) // 16), max_running=rows)
    for b in range(rows):
        engine.submit(
            [b % 64] + [1] * (PROMPT - 1 - b % 7), max_new_tokens=tokens + 8, eos_token_ids=[]
        )
    while any(
        request.pending > 1 for request in [*engine.scheduler.running, *engine.scheduler.waiting]
    ):
        engine.step()
    return engine.step
