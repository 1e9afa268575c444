"""A process to press Ctrl-C in: a random model of Qwen3-0.6B's shapes answers again and again, until it is stopped.

usage: python press.py plain|fast. It reads lines "CHUNK PROMPT" from stdin, and for each of them prints `begun` when
the prompt is being read or, where the prompt is one token, when the first token is there; then, once the answer was
stopped, the monotonic time, the tokens in the cache, the new tokens, and how many seconds one product of an MLP takes
for as many tokens (0 with kernels). SIGINT is handled as in the chat.
"""

import sys
import time

import torch
import torch.nn.functional as F

from nanokv.apps.cli.common import speed, terminal
from nanokv.apps.cli.common.options import CacheOptions, ModelOptions, OutputOptions
from nanokv.apps.cli.common.plan import Choice
from nanokv.apps.cli.common.random_model import load_random
from nanokv.decoding.generation import Generation


def one_product(chunk: int) -> float:
    """Seconds of torch's product of a chunk with the widest matrix of the model, the better of two."""
    x = torch.ones(chunk, 1024, dtype=torch.bfloat16)
    weight = torch.ones(3072, 1024, dtype=torch.bfloat16)
    seconds = []
    for _ in range(2):
        begun = time.monotonic()
        F.linear(x, weight)
        seconds.append(time.monotonic() - begun)
    return min(seconds)


def answer(loaded, model, chunk: int, prompt: int):
    """Until Ctrl-C, which nothing may have swallowed."""
    product = 0.0
    if model is loaded.model:  # kernels have no product as long as torch's
        product = one_product(min(chunk, prompt))
    ids = torch.randint(0, 1000, (prompt,), generator=torch.Generator().manual_seed(0))
    cache = loaded.make_cache()
    with terminal.Interrupt() as stop:
        endless = {"max_new_tokens": 10**6, "eos_token_ids": []}
        generation = Generation(model, ids, cache, **endless, should_stop=stop, chunk=chunk)
        if prompt > 1:
            print("begun", flush=True)
        for _ in generation:
            if len(generation.tokens) == 1:
                print("begun", flush=True)
    now = time.monotonic()
    assert generation.finish_reason == "interrupted" and not torch.is_inference_mode_enabled()
    print(now, cache.length, len(generation.tokens), product, flush=True)


def main():
    terminal.install_signals()
    wanted = ModelOptions("qwen3-0.6b-random", dtype="bfloat16")
    loaded = load_random(wanted, CacheOptions("static", context=8192))
    choice = Choice(sys.argv[1] == "fast", requested=True)
    model = speed.optimized(loaded.model, choice, OutputOptions(quiet=True))
    print("ready", flush=True)
    for line in sys.stdin:
        answer(loaded, model, *map(int, line.split()))


if __name__ == "__main__":
    main()
