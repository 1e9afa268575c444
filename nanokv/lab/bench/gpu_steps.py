"""The plans of a GPU run, and how it times a prefill and a decode step.

gpu.py, which makes the report, and gpu_ranks.py use this module.
"""

import gc
import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanokv import costs
from nanokv.cache import make_cache
from nanokv.checkpoint import Model
from nanokv.config import Config
from nanokv.costs.memory import FAMILY
from nanokv.errors import NanoKVError
from nanokv.fast import torch_ops
from nanokv.fast.compiled import Compiled
from nanokv.inference import prefill_chunk, prefill_chunks
from nanokv.lab.bench.machine import Bandwidth, now
from nanokv.lab.bench.runners import Ours, Transformers
from nanokv.model import Transformer

TINY = Config(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
WARM_UP = 3  # untimed steps: the first one compiles and records a CUDA graph
ALIGNED = 64  # a slab's slots are a multiple of this
SPARE = 6 << 30  # bytes left free on the GPU for activations and the allocator


@dataclass(frozen=True)
class Requests:
    """Random prompts of `shortest` … `longest` tokens, answered with `new` tokens each."""

    count: int
    shortest: int
    longest: int
    new: int


@dataclass(frozen=True)
class Plan:
    """Sizes of everything that a run measures."""

    config: Config
    device: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # of decode; the most important first, because time may run out
    prompts: tuple[int, ...]  # tokens of each prefill
    requests: Requests  # of the engine
    steps: int  # decode steps per round
    rounds: int
    backend: str = "inductor"

    @property
    def room(self) -> int:
        """Tokens decoded after the prompt."""
        return WARM_UP + self.steps * self.rounds


QUICK = Plan(
    FAMILY["Qwen/Qwen3-0.6B"],
    "cuda",
    batches=(1, 16),
    contexts=(1024, 8192, 128),
    prompts=(1024, 8192, 128),
    requests=Requests(64, shortest=8, longest=512, new=64),
    steps=16,
    rounds=3,
)
FULL = replace(
    QUICK,
    batches=(1, 4, 16, 64),
    contexts=(128, 1024, 8192, 32_768),
    requests=Requests(256, shortest=100, longest=1024, new=512),
    steps=32,
    rounds=5,
)
SMALL = Plan(
    TINY,
    "cpu",
    batches=(2,),
    contexts=(24,),
    prompts=(24,),
    requests=Requests(3, shortest=4, longest=12, new=4),
    steps=2,
    rounds=2,
    backend="eager",
)


def random_ids(config: Config, batch: int, tokens: int, device: str) -> Tensor:
    """(B,T) int64, the same on every device."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(config.vocab_size, (batch, tokens), generator=generator)
    return ids.to(device)


def gap(a: Tensor, b: Tensor) -> float:
    """Largest difference, divided by the largest absolute value of b; nan if either has a nan."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


class Nano(Ours):
    """Our model. If `backend` is given, decode is compiled, and a step on a GPU replays one CUDA
    graph; the prefill always uses the plain model."""

    def __init__(
        self, model: Transformer, cache: str, batch: int, backend: str | None = None
    ) -> None:
        weights = "compiled" if backend else "plain"
        dtype = model.embed_tokens.weight.dtype
        super().__init__(model, weights, cache, {}, batch, dtype)
        self.plain = model
        self.backend = backend

    def start(self, ids: Tensor, room: int) -> None:
        capacity = -(-(ids.shape[1] + room) // ALIGNED) * ALIGNED
        if self.backend:
            self.model: Any = Compiled(self.plain, capacity, self.batch, backend=self.backend)
        self.store = make_cache(self.cache, self.plain.config, self.batch, capacity)
        logits = prefill_chunks(self.plain, ids, self.store, chunk=part_of(self.plain, self.batch))
        self.token = logits.argmax(-1, keepdim=True)  # (B,1)


def part_of(model: Model, batch: int) -> int:
    """Tokens per row in one forward pass of a prefill, so that every batch size has about the same
    number of tokens in flight."""
    return prefill_chunk(model, batch)


class Peer(Transformers):
    """transformers, with the prefill in chunks. If `backend` is given, decode is compiled as the
    documentation of transformers advises."""

    def __init__(
        self, model: Transformer, cache: str, batch: int, backend: str | None = None
    ) -> None:
        super().__init__(model, cache, batch)
        self.part = part_of(model, batch)
        self.compiled = None
        if backend:
            self.weights += " compiled"
            how = {"backend": backend}
            if backend == "inductor":
                how = {"mode": "reduce-overhead"}
            self.compiled = torch_ops.compile_alone(self.model.forward, fullgraph=True, **how)

    def forward(self, ids: Tensor) -> None:
        if self.compiled is None or ids.shape[1] > 1:
            for part in ids.split(self.part, dim=1):
                super().forward(part)
            return
        torch.compiler.cudagraph_mark_step_begin()
        logits = self.compiled(  # (B,1,V)
            ids, past_key_values=self.store, use_cache=True, logits_to_keep=1
        ).logits
        self.token = logits[:, -1].argmax(-1, keepdim=True)


def why(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def let_go(plan: Plan) -> None:
    """Free the memory of the previous runner."""
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.empty_cache()


def prefill_row(runner: Ours | Transformers, tokens: int, plan: Plan) -> dict:
    """Seconds of a prefill into an empty cache: the median of the rounds after a warm-up. If it
    fails, the row has the reason instead."""
    row = {"runner": f"{runner.engine} {runner.weights} {runner.cache}", "tokens": tokens}
    ids = random_ids(plan.config, runner.batch, tokens, plan.device)
    times = []
    try:
        for _ in range(plan.rounds + 1):
            began = now(plan.device)
            runner.start(ids, plan.room)
            times.append(now(plan.device) - began)
    except (RuntimeError, NanoKVError) as error:
        return row | {"failed": why(error)}
    seconds = statistics.median(times[1:])
    return row | {"prefill_s": seconds, "tok_s": tokens / seconds, "first_s": times[0]}


def decode_row(runner: Ours | Transformers, context: int, plan: Plan, bandwidth: Bandwidth) -> dict:
    """Seconds per decode step: the median of the rounds. If it fails, the row has the reason
    instead. The context grows by one token per step."""
    row = {
        "runner": f"{runner.engine} {runner.weights} {runner.cache}",
        "batch": runner.batch,
        "context": context,
    }
    wanted = costs.kv_bytes(plan.config, context + plan.room, runner.batch, 2) * 5 // 4 + SPARE
    if plan.device == "cuda" and wanted > torch.cuda.mem_get_info()[0]:
        return row | {"failed": f"the cache and its working memory need {wanted / 1e9:,.0f} GB"}
    try:
        began = now(plan.device)
        runner.start(random_ids(plan.config, runner.batch, context, plan.device), plan.room)
        prefill_s = now(plan.device) - began
        first_s = steps(runner, WARM_UP, plan.device)  # includes compiling and recording
        times = []
        for _ in range(plan.rounds):
            times.append(steps(runner, plan.steps, plan.device) / plan.steps)
    # out of memory, or the compiler failed
    except (RuntimeError, NanoKVError) as error:
        return row | {"failed": why(error)}
    seconds = statistics.median(times)
    read = runner.step_bytes(context + plan.room // 2)
    bandwidth.probe(read)
    return row | {
        "prefill_s": prefill_s,
        "first_s": first_s,
        "decode_s": seconds,
        "spread": (max(times) - min(times)) / seconds,
        "tok_s": runner.batch / seconds,
        "step_bytes": read,
    }


def steps(runner: Ours | Transformers, count: int, device: str) -> float:
    """Seconds of `count` decode steps."""
    began = now(device)
    for _ in range(count):
        runner.step()
    return now(device) - began


def add_share(row: dict, bandwidth: Bandwidth) -> None:
    """Set row["share"], the share of the memory bandwidth that a measured row reached.

    The bandwidth is the best one measured so far, so call this again after the last row.
    """
    if "decode_s" in row:
        row["share"] = row["step_bytes"] / bandwidth.best(row["step_bytes"]) / row["decode_s"]
