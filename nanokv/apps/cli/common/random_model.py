"""Models of published shapes with random weights: for timing and memory, without a download.

`qwen3-0.6b-random` has the shape of Qwen/Qwen3-0.6B, `smollm2-135m-random` that of SmolLM2-135M.
`qwen3-moe-0.6b-random` is a small mixture of experts that nobody published: 579 M weights, 183 M of
them in a step.
"""

import time
from dataclasses import replace
from pathlib import Path

from nanokv.apps.cli.common.loading import (
    check_address_space,
    check_device,
    check_memory,
    choose_context,
    find_device,
    thread_count,
)
from nanokv.apps.cli.common.options import CacheOptions, ModelOptions
from nanokv.apps.cli.common.plan import Loaded, Plan
from nanokv.apps.cli.common.terminal import loading
from nanokv.config import Config, Experts
from nanokv.costs.free_memory import available_memory
from nanokv.costs.memory import FAMILY
from nanokv.parallel.group import ALONE, Ranks

SMOLLM2 = Config(  # from the published config.json of HuggingFaceTB/SmolLM2-135M
    model_type="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    torch_dtype="bfloat16",
)
RANDOM = {f"{name.removeprefix('Qwen/').lower()}-random": config for name, config in FAMILY.items()}
RANDOM["smollm2-135m-random"] = SMOLLM2
RANDOM["qwen3-moe-0.6b-random"] = replace(
    FAMILY["Qwen/Qwen3-0.6B"],
    model_type="qwen3_moe",
    vocab_size=49_152,
    num_hidden_layers=12,
    experts=Experts(32, 4, 384, norm_topk_prob=True),
)


def load_random(model: ModelOptions, cache: CacheOptions, ranks: Ranks = ALONE) -> Loaded:
    """Build the model in --dtype (auto: bf16, as published), with the same weights every time.

    With several ranks, each builds its part.
    """
    with loading():
        return _build(model, cache, ranks)


def _build(wanted: ModelOptions, cache: CacheOptions, ranks: Ranks) -> Loaded:
    start = time.perf_counter()
    check_device(wanted.device)
    ranks.hear()  # the other ranks wait here until rank 0 has asked its questions
    plan = plan_random(wanted, cache, ranks)
    check_address_space()
    import torch

    if ranks.size == 1:  # the parts of several ranks are made on the CPU
        plan = replace(plan, device=find_device(wanted.device))
    check_memory(plan, available_memory(plan.device))
    torch.set_num_threads(plan.threads)
    dtype = getattr(torch, plan.dtype_name)
    if ranks.size == 1:
        from nanokv.loading import random_model

        model = random_model(plan.config, dtype, plan.device)
    else:
        from nanokv.parallel.shards import random_shard

        model = random_shard(plan.config, ranks, dtype)
        ranks.meet()
    known = vars(plan) | {"config": model.config}
    return Loaded(
        **known, model=model, tokenizer=None, dtype=dtype, load_s=time.perf_counter() - start
    )


def plan_random(wanted: ModelOptions, cache: CacheOptions, ranks: Ranks) -> Plan:
    """The plan of a random model on the CPU."""
    config = RANDOM[wanted.source]
    dtype_name = wanted.dtype
    if dtype_name == "auto":
        dtype_name = config.torch_dtype
    return Plan(
        wanted.source,
        wanted.source,
        Path("."),
        config,
        dtype_name,
        wanted.threads or thread_count(ranks.size),
        "cpu",
        choose_context(cache.context, config),
        cache.name,
        cache.options,
        ranks=ranks,
    )
