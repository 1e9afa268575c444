"""What one order of sums changes and costs: docs/batch-invariance.md has the figures.

    python tests/tools/invariance.py flips [--quantize int8]
    python tests/tools/invariance.py price [--quantize int8] [--model wide]

flips  greedy answers of the bundled model, each alone and as row 0 of 4 and of 9 equal rows: how many are not the same
price  processor time of the batch-invariant model ÷ that of the ordinary one, medians of pairs; decode steps read a
       cache of 128 to 152 tokens. `wide` has the widths of SmolLM2-135M, 8 layers and random weights

One thread, bf16.
"""

import argparse
import dataclasses
import itertools
import statistics
import time

import torch

import nanokv
from nanokv.model import Transformer

NAMES = ("Zorbla", "Anna", "Miso", "Tarik", "Lena", "Bo", "Quill", "Ines")
THINGS = ("a cat called Miso", "a red car", "two dogs", "a blue boat", "an old piano")
ENDS = ("What is my name?", "What do I have?", "Tell me a story about it.")
BATCHES = (1, 4, 9)
NEW = 48  # tokens of an answer
CACHED, STEPS = 128, 24
WIDE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 16_384,
}


def models(options: argparse.Namespace) -> dict[str, Transformer]:
    """The ordinary fast model and the batch-invariant one, over the same weights."""
    plain, _ = nanokv.load("tiny", dtype=torch.bfloat16)
    if options.model == "wide":
        torch.manual_seed(0)
        plain = Transformer(dataclasses.replace(plain.config, **WIDE)).to(torch.bfloat16).eval()
    fast = nanokv.optimize(plain, options.quantize)
    return {"ordinary": fast, "batch-invariant": nanokv.batch_invariant(fast)}


def answer(model: Transformer, ids: torch.Tensor, rows: int) -> list[int]:
    """Row 0 of the greedy answers to `rows` times ids (1,T)."""
    cache = nanokv.make_cache("growing", model.config, rows)
    logits = nanokv.prefill(model, ids.repeat(rows, 1), cache)  # (rows,V)
    tokens = []
    for _ in range(NEW):
        best = logits.argmax(-1, keepdim=True)  # (rows,1)
        tokens.append(best[0].item())
        logits = nanokv.decode(model, best, cache, cache.length)
    return tokens


def flips(options: argparse.Namespace) -> None:
    _, tokenizer = nanokv.load("tiny")
    talks = list(itertools.product(NAMES, THINGS, ENDS))
    for name, model in models(options).items():
        count = 0
        for who, thing, end in talks:
            said = (f"My name is {who}. I have {thing}.", f"Nice to meet you, {who}.", end)
            roles = ("user", "assistant", "user")
            messages = [{"role": r, "content": text} for r, text in zip(roles, said, strict=True)]
            ids = torch.tensor([tokenizer.encode(tokenizer.render(messages))])
            alone, *others = (answer(model, ids, rows) for rows in BATCHES)
            count += any(other != alone for other in others)
        print(f"{name}: {count} of {len(talks)} answers depend on the number of rows", flush=True)


def prefill_s(model: Transformer, _: int) -> float:
    ids = torch.randint(0, model.config.vocab_size, (1, 512))
    cache = nanokv.make_cache("growing", model.config)
    began = time.process_time()
    nanokv.prefill(model, ids, cache)
    return time.process_time() - began


def decode_s(model: Transformer, rows: int) -> float:
    """Of a step, the mean of STEPS."""
    vocabulary = model.config.vocab_size
    cache = nanokv.make_cache("growing", model.config, rows)
    nanokv.prefill(model, torch.randint(0, vocabulary, (rows, CACHED)), cache)
    token = torch.randint(0, vocabulary, (rows, 1))
    began = time.process_time()
    for _ in range(STEPS):
        nanokv.decode(model, token, cache, cache.length)
    return (time.process_time() - began) / STEPS


def price(options: argparse.Namespace) -> None:
    ordinary, invariant = models(options).values()
    parts = [("prefill of 512", prefill_s, 1)]
    parts += [(f"decode, {rows} rows", decode_s, rows) for rows in (1, 8, 32)]
    for name, seconds, rows in parts:
        pairs = [(seconds(ordinary, rows), seconds(invariant, rows)) for _ in range(options.rounds)]
        ratio = statistics.median(after / before for before, after in pairs)
        print(f"{name}: {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("flips", "price"))
    parser.add_argument("--model", choices=("tiny", "wide"), default="tiny")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=15, help="pairs (default: 15)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"flips": flips, "price": price}[options.what](options)


if __name__ == "__main__":
    main()
