"""A small model with random weights that optimize, the bench and its rows can all take, and the mark for kernels."""

import pytest
import torch

import nanokv
from nanokv.fast import native
from nanokv.loading import build
from nanokv.model import Qwen3

KERNELS = native.library()[0]
needs_kernels = pytest.mark.skipif(
    KERNELS is None, reason=f"no native kernels here: {native.library()[1]}"
)


def small(dtype=torch.float32, **changes):
    """(model, 40 ids): 3 layers, G = 2, a head width that is no multiple of C / H; norms that are not 1."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    config = nanokv.Config(**sizes | changes)
    generator = torch.Generator().manual_seed(5)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Qwen3(config).named_parameters()}
    state = {
        name: (torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)).to(dtype)
        for name, shape in shapes.items()
    }
    ids = torch.randint(config.vocab_size, (1, 40), generator=generator)
    return build(config, state), ids
