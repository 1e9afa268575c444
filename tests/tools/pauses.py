"""Pauses between the tokens of 8 streams, alone and beside long prompts, in the engine itself.

    python tests/tools/pauses.py [--model tiny] [--tokens 1900] [--prompts 3] [--step-tokens 256]

Counted is the processor time of one thread, which other programs of the machine hardly change. `make load
ARGS="--scenario long"` measures the same by the clock and through the server. Each row is one choice: steps of a
fixed size, as with --step-tokens, and the engine's budget.
"""

import argparse
import itertools
import random
import sys
import time
from pathlib import Path

import torch

import nanokv
from nanokv.checkpoint import Model
from nanokv.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parent))

from load import quantile, source_of

STREAMS, WARM, ALONE = 8, 20, 60  # streams, and their steps before the first prompt
CHOICES = {"fixed": False, "budget": True}


def seconds(engine: Engine) -> float:
    """Of the next step."""
    began = time.process_time()
    engine.step()
    return time.process_time() - began


def measured(model: Model, paced: bool, options: argparse.Namespace) -> list[float]:
    """Milliseconds: p50 and p99 of a step alone, p50 and p99 beside prompts, p50 until the prompts' first tokens."""
    rng = random.Random(0)
    vocabulary = range(model.config.vocab_size)
    engine = Engine(
        model,
        pages=STREAMS * 128 + options.tokens // 8,
        step_tokens=options.step_tokens,
        clock=time.process_time,
        paced=paced,
    )
    for _ in range(STREAMS):
        engine.submit(rng.choices(vocabulary, k=20), max_new_tokens=1_900, eos_token_ids=[])
    for _ in range(WARM):
        engine.step()
    alone = [seconds(engine) for _ in range(ALONE)]
    beside: list[float] = []
    first: list[float] = []
    for _ in range(options.prompts):
        before = len(beside)
        prompt = rng.choices(vocabulary, k=options.tokens)
        request = engine.submit(prompt, max_new_tokens=1, eos_token_ids=[])
        while not request.tokens:
            beside.append(seconds(engine))
        first.append(sum(beside[before:]))
    parts = itertools.product((alone, beside), (0.5, 0.99))
    return [quantile(steps, part) * 1e3 for steps, part in parts] + [quantile(first, 0.5) * 1e3]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, a GGUF file or a folder")
    parser.add_argument("--tokens", type=int, default=1_900, help="of a prompt (default: 1,900)")
    parser.add_argument("--prompts", type=int, default=3, help="(default: 3)")
    parser.add_argument("--step-tokens", type=int, default=256, help="(default: 256)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    plain, _ = nanokv.load(str(source_of(options.model)), dtype=torch.bfloat16)
    model = nanokv.optimize(plain)
    print("| steps | alone p50, p99 (ms) | beside p50, p99 (ms) | p99 / alone | first (ms) |")
    for name, paced in CHOICES.items():
        p50, p99, beside_p50, beside_p99, first = measured(model, paced, options)
        times = f"{p50:.1f}, {p99:.1f} | {beside_p50:.1f}, {beside_p99:.1f}"
        print(f"| {name} | {times} | {beside_p99 / p99:.1f} | {first:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
