"""Configs with the shapes of the models in the articles, for the formulas of nanokv/costs."""

from dataclasses import replace

from nanokv.config import Config
from nanokv.costs.memory import FAMILY

QWEN = FAMILY["Qwen/Qwen3-0.6B"]
KIB = 1024


def shape(layers: int, kv_heads: int, head_dim: int, heads: int | None = None) -> Config:
    """A config with the given cache shape; its other numbers are QWEN's and mean nothing.

    `heads` query heads; by default as many as KV heads.
    """
    return replace(
        QWEN,
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_attention_heads=heads or kv_heads,
    )


LLAMA_2_70B = shape(80, 8, 128, heads=64)
LLAMA_2_70B_MHA = shape(80, 64, 128)  # as if it had no grouped-query attention
SMOLLM2_135M = shape(30, 3, 64, heads=9)
SMOLLM2_135M_MHA = shape(30, 9, 64)
EXAMPLE_OF_ARTICLE_3 = shape(24, 32, 128)
