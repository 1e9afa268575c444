"""Checks over how many ranks a model can be split.

This module does not import torch, so a wrong flag is rejected before any process starts.

The query heads and the width of the MLP must be multiples of the number of ranks. A KV head is on
one rank or, if there are more ranks than KV heads, on several ranks that each store its cache. The
vocabulary and the experts need not be multiples, but every rank must have a part of the vocabulary.
"""

from nanokv.config import Config
from nanokv.errors import ParallelError


def check_sizes(config: Config, ranks: int) -> None:
    """ParallelError, naming the sizes, if the model cannot be split over `ranks` ranks."""
    bad = misfits(config, ranks)
    if bad:
        possible = [n for n in range(1, config.num_attention_heads + 1) if not misfits(config, n)]
        fits = " or ".join(map(str, possible))
        raise ParallelError(
            f"{config.family.title} cannot be split over {ranks} ranks: {'; '.join(bad)}",
            f"--tensor-parallel {fits} (torchrun: --nproc-per-node)",
        )


def misfits(config: Config, ranks: int) -> list[str]:
    """["num_attention_heads 6 is no multiple of 4", …], or [] if the model can be split."""
    n = ranks
    if n > 1 and config.family.own_parts:
        return [f"only the plain blocks are split, and {config.family.title} has its own"]
    whole = {"num_attention_heads": config.num_attention_heads}
    if has_mlp(config):
        whole["intermediate_size"] = config.intermediate_size
    bad = [f"{name} {value} is no multiple of {n}" for name, value in whole.items() if value % n]
    heads = config.num_key_value_heads
    if heads % n and n % heads:
        bad.append(f"num_key_value_heads {heads} neither divides {n} nor is divided by it")
    each = -(-config.vocab_size // n)  # rounded up
    if (n - 1) * each >= config.vocab_size:
        bad.append(f"vocab_size {config.vocab_size} leaves a rank of {n} without a word")
    return bad


def has_mlp(config: Config) -> bool:
    """Whether the model has a layer without experts."""
    return any(config.experts_of(layer) is None for layer in range(config.num_hidden_layers))
