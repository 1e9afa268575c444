"""Decode steps of families with blocks of their own, plain and fast: python tests/tools/family_steps.py [tokens]

Random weights in bf16, 8 layers of 1,024, one thread, a growing cache after `tokens` tokens (1,024).
The models take turns in one process, and the figure is the median of processor time per step, which
other programs lengthen less than the clock.
"""

import statistics
import sys
import time

import torch

from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.fast import optimize
from nanokv.inference import decode, prefill_chunks
from nanokv.loading import random_model

STEPS, ROUNDS = 12, 6
SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6}
BOTH = {"full_attention": ROPE, "sliding_attention": ROPE | {"rope_theta": 1e4}}
FAMILIES = {
    "smollm3": {"rope_parameters": ROPE},
    "olmo3": {"rope_parameters": BOTH, "sliding_window": 512},
    "gemma3_text": {
        "rope_parameters": BOTH,
        "sliding_window": 512,
        "query_pre_attn_scalar": 128,
    },
    "gpt_oss": {
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 1024,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    "qwen3_cla": {"rope_parameters": ROPE, "kv_sharing_factor": 2},
    "qwen3_5_text": {
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
}


def seconds(family: str, tokens: int) -> dict[str, float]:
    """Processor time of a step, by the format of weights."""
    config = Config.from_dict(SIZES | FAMILIES[family] | {"model_type": family})
    plain = random_model(config, torch.bfloat16, "cpu")
    models = {"plain": plain, "bf16": optimize(plain)}
    models |= {weights: optimize(plain, weights) for weights in ("int8", "int4")}
    caches, spent = {}, {name: [] for name in models}
    for name, model in models.items():
        caches[name] = make_cache("growing", config, 1)
        prefill_chunks(model, torch.randint(0, 32_000, (1, tokens)), caches[name])
    for _ in range(ROUNDS):
        for name, model in models.items():
            began = time.process_time()
            for token in range(STEPS):
                decode(model, [[token]], caches[name], caches[name].length)
            spent[name].append((time.process_time() - began) / STEPS)
    return {name: statistics.median(each[1:]) for name, each in spent.items()}


def main(tokens: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for family in FAMILIES:
        found = seconds(family, tokens)
        cells = [f"{name} {1 / s:5.1f} ({found['plain'] / s:.1f}×)" for name, s in found.items()]
        print(f"{family:13}", "tokens per second:", ", ".join(cells), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
