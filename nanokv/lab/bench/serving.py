"""Serve many requests of mixed lengths at once: our engine and transformers' generate_batch take
turns, round after round."""

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from nanokv.checkpoint import Model
from nanokv.engine import Engine
from nanokv.errors import NanoKVError
from nanokv.lab.bench.remote import LEAST, PeerError, Process

PAGE = 16
Measure = Callable[[float], tuple[float, int]]  # time limit → (seconds, generated tokens)


@dataclass
class Served:
    """Seconds of every round for the same requests; `tokens` are generated in each round."""

    label: str
    measure: Measure
    prompt_tokens: int
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    error: str = ""  # why a peer stopped; "" while it runs

    def figures(self) -> dict:
        """The median seconds, and tokens per second over all requests, as JSON values."""
        seconds = statistics.median(self.seconds)
        return {
            "label": self.label,
            "seconds": seconds,
            "rounds": len(self.seconds),
            "prompt_tokens": self.prompt_tokens,
            "generated": self.tokens,
            "tok_s": self.tokens / seconds,
        }


def timed(serve: Callable[[], list]) -> tuple[float, int]:
    """(seconds, generated tokens) of `serve`, which returns a list of ids per request."""
    began = time.perf_counter()
    answers = serve()
    return time.perf_counter() - began, sum(map(len, answers))


def requests_of(
    vocab_size: int, count: int, longest: int, seed: int = 0, shortest: int = 8
) -> list[list[int]]:
    """`count` prompts of random ids, `shortest` to `longest` tokens each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, max(longest, shortest) + 1, (count,), generator=generator)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths.tolist()]


def pages_for(prompts: list[list[int]], new_tokens: int) -> int:
    """Pages that hold every prompt and its answer at once, with one spare page per prompt."""
    return sum(-(-(len(prompt) + new_tokens) // PAGE) + 1 for prompt in prompts)


def engine(model: Model, prompts: list[list[int]], new_tokens: int) -> Callable[[], list]:
    """A function that serves the prompts with our engine. It has pages for all of them, so that no
    request is preempted; transformers does not preempt either."""
    pages = pages_for(prompts, new_tokens)

    def serve():
        running = Engine(model, pages=pages, page_size=PAGE, max_running=len(prompts))
        asked = [
            running.submit(prompt, max_new_tokens=new_tokens, eos_token_ids=[])
            for prompt in prompts
        ]
        running.run()
        return [request.tokens for request in asked]

    return serve


def ours(model: Model, prompts: list[list[int]], new_tokens: int) -> Measure:
    """A `measure` for our engine."""
    serve = engine(model, prompts, new_tokens)
    return lambda patience: timed(serve)


def theirs(process: Process) -> Measure:
    """A `measure` for the peer that peer.generate_batch makes."""
    with suppress(PeerError):  # the first measurement raises it again
        process.start()
    return process.ask


def generate_batch(reference: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], list]:
    """A function that serves the prompts with transformers. `reference` is its model, with the same
    weights."""
    import transformers

    settings = {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1
        ),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(
            **batching(transformers.ContinuousBatchingConfig, prompts, new_tokens, reference.device)
        ),
        "progress_bar": False,
    }

    def serve():
        answers = reference.generate_batch(prompts, **settings)
        found = {
            tuple(answer.prompt_ids): list(answer.generated_tokens) for answer in answers.values()
        }
        missing = [prompt for prompt in prompts if tuple(prompt) not in found]
        if missing:
            raise NanoKVError(
                f"transformers' generate_batch left {len(missing)} of {len(prompts)} prompts "
                "unanswered"
            )
        return [found[tuple(prompt)] for prompt in prompts]

    return serve


def batching(
    kind: type, prompts: list[list[int]], new_tokens: int, device: str | torch.device
) -> dict:
    """Settings of transformers' continuous batching: our page size, and on a CPU the other sizes of
    our engine too. On a GPU the rest are its defaults. Up to transformers 5.17 a page was called a
    block."""
    known = inspect.signature(kind).parameters
    page = "page_size" if "page_size" in known else "block_size"
    settings = {page: PAGE}
    if torch.device(device).type == "cpu":
        settings["num_blocks"] = pages_for(prompts, new_tokens)
        settings["max_batch_tokens"] = 256
        settings["use_cuda_graph"] = False
    return {name: value for name, value in settings.items() if name in known}


def rounds(served: list[Served], repeat: int) -> Iterator[Served]:
    """A warm-up and `repeat` rounds of all in turn; yields after each measurement. A peer that
    fails is not measured again."""
    slowest = 0.0
    for turn in range(repeat + 1):
        shift = turn % len(served)
        for one in served[shift:] + served[:shift]:
            if not one.error:
                slowest = max(slowest, serve_once(one, turn, max(LEAST, 20 * slowest)))
            yield one


def serve_once(one: Served, turn: int, patience: float) -> float:
    """Measure one round and return its seconds, 0 if a peer fails. Round 0 is not recorded."""
    try:
        seconds, one.tokens = one.measure(patience)
    except PeerError as error:
        one.error = str(error)
        return 0.0
    if turn:
        one.seconds.append(seconds)
    return seconds
