"""Tiny random models of transformers, and ours with the same weights: the two sides of every parity test.

The norm weights are random (all ones would hide a norm that is skipped or swapped), the init range is 0.12 (with 0.02
a random model's logits are nearly equal), and head_dim differs from hidden / heads. transformers is the reference
here and nowhere at run time.
"""

import gc
import inspect
import itertools
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from nanokv.config import Config
from nanokv.inference import decode, score, verify_draft
from nanokv.loading import build
from weights_loader.names import to_nanokv

TOLERANCE = 1e-5  # fp32, logits of size 4: measured 3e-7 … 4e-6
SHAPES = {  # name → what it differs in; G = query heads per KV head
    "G1-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "G2-tied": {"num_key_value_heads": 2},
    "G4-bias": {"num_key_value_heads": 1, "attention_bias": True},
    "G2-untied-bias": {
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "G3-yarn": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-G2": {"model_type": "llama", "head_dim": None},
    "llama-G4-rope-bias": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2-G2": {"model_type": "qwen2"},
    "moe-normed": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "moe-every-2nd": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 2,
        "num_hidden_layers": 4,
        "mlp_only_layers": [3],
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}
BOTH_BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LAYERED = {  # layers that differ from each other; windows that are full after 7 tokens
    "smollm3-G2": {"model_type": "smollm3", "num_hidden_layers": 5},
    "smollm3-own": {"model_type": "smollm3", "no_rope_layers": [0, 1, 1], "attention_bias": True},
    "olmo3-G2": {
        "model_type": "olmo3",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "tie_word_embeddings": False,
        "rope_parameters": BOTH_BASES,
    },
    "olmo3-G1-yarn": {
        "model_type": "olmo3",
        "num_key_value_heads": 4,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 256,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3-G2": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 7,
        "query_pre_attn_scalar": 32,
        "rope_parameters": BOTH_BASES,
    },
    "gemma3-G4-scaled": {
        "model_type": "gemma3_text",
        "num_key_value_heads": 1,
        "sliding_window": 7,
        "layer_types": ["sliding_attention"] * 3,
        "query_pre_attn_scalar": 48,
        "rope_parameters": BOTH_BASES,
    },
}
HYBRID = {  # a recurrent state in most layers
    "qwen35-G2": {
        "model_type": "qwen3_5_text",
        "initializer_range": 0.06,  # at 0.12 transformers' steps are 7e-5 from its own pass
        "num_hidden_layers": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    },
    "qwen35-G4-own": {
        "model_type": "qwen3_5_text",
        "initializer_range": 0.06,  # at 0.12 transformers' steps are 7e-5 from its own pass
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", *["linear_attention"] * 3],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
        },
    },
}
HYBRID |= {
    "lfm2-G2": {
        "model_type": "lfm2",
        "num_hidden_layers": 5,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.3,
        "full_attn_idxs": [2, 4],
    },
    "lfm2-G4-bias": {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", *["conv"] * 3],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 4,
        "conv_bias": True,
        "norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}
ORIGINAL_64 = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 6, "sliding_window": 7}
LAYERED |= {
    "gptoss-G2": GPT_OSS
    | {
        "num_hidden_layers": 5,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 256,
        "rope_parameters": ORIGINAL_64,
        "tie_word_embeddings": False,
    },
    "gptoss-G1-full": GPT_OSS
    | {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    },
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def tiny_config(model_type: str = "qwen3", **changes):
    """A transformers config: V 151, C 64, H 4, Hk 2, D 32 (H·D = 128 ≠ C), 3 layers."""
    fields = {
        "vocab_size": 151,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "initializer_range": 0.12,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | changes
    experts = EXPERTS if model_type == "qwen3_moe" else {}
    return AutoConfig.for_model(model_type, **experts | fields)


def randomise_(model, seed: int):
    """Norms that scale by 0.5 … 1.5, random biases and sinks, in place."""
    generator = torch.Generator().manual_seed(seed)
    # Gemma and Qwen3.5 scale by 1 + weight, except in Qwen3.5's norm with a gate.
    shifted = model.config.model_type in ("gemma3_text", "qwen3_5_text")
    for name, weight in model.named_parameters():
        if "norm" in name:
            offset = 1.0 if shifted and not name.endswith("linear_attn.norm.weight") else 0.0
            weight.data.uniform_(0.5 - offset, 1.5 - offset, generator=generator)
        elif name.endswith(("A_log", "dt_bias")):
            weight.data.uniform_(-1.0, 1.0, generator=generator)
        elif name.endswith("bias"):
            weight.data.normal_(0, 0.3, generator=generator)
        elif name.endswith("sinks"):  # scores are about as large
            weight.data.normal_(1, 1, generator=generator)


def tiny_reference(seed: int = 0, **changes):
    """A random transformers model in eval mode, sdpa attention; does not touch the global random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(**changes), experts_implementation="eager"
        )
    randomise_(model, seed)
    model.generation_config.eos_token_id = None  # fixed-length answers
    return model.requires_grad_(False).eval()


def copy_of(reference):
    """Our model on the very tensors of a transformers model, by name; every name must match."""
    family = reference.config.model_type
    state = {to_nanokv(name, family): x for name, x in reference.state_dict().items()}
    if reference.config.model_type == "qwen3_moe":
        fused, state = state, {}
        for name, tensor in fused.items():
            state |= unfused(name, tensor)
    if reference.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return build(Config.from_dict(reference.config.to_dict()), state)


def sharing(model, factor: int = 2):
    """A twin of a plain Qwen3: of `factor` layers in turn, only the first has keys and values."""
    config = replace(model.config, model_type="qwen3_cla", kv_sharing_factor=factor)
    shared = [f"layers.{i}.self_attn." for i in range(99) if config.shares_kv(i)]
    without = tuple(f"{at}{part}." for at in shared for part in ("k_proj", "v_proj", "k_norm"))
    state = model.state_dict()
    kept = {name: tensor for name, tensor in state.items() if not name.startswith(without)}
    return build(config, kept)


def unfused(name: str, tensor) -> dict:
    """transformers keeps the experts of a layer in two tensors; checkpoints, and we, in three for each expert."""
    prefix, _, leaf = name.rpartition(".")
    if not prefix.endswith("mlp.experts"):
        return {name: tensor}
    names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    return {
        f"{prefix}.{expert}.{part}.weight": matrix
        for expert, both in enumerate(tensor)
        for part, matrix in zip(names, both.chunk(len(names)), strict=True)
    }


def pair(seed: int = 0, **changes):
    """(reference, ours) with the same weights."""
    reference = tiny_reference(seed, **changes)
    return reference, copy_of(reference)


def pair_from_disk(folder, seed: int = 0, dtype=torch.bfloat16, **changes):
    """(reference, ours) in a half-width dtype, the reference read from disk.

    `reference.to(bfloat16)` would cast the rotary frequencies too (cos wrong by 0.05 at position 300);
    `from_pretrained(dtype=…)` keeps them in fp32, which is what a user of transformers gets.
    """
    tiny_reference(seed, **changes).save_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )
    reference.requires_grad_(False).eval()
    assert reference.model.rotary_emb.inv_freq.dtype == torch.float32
    reference.generation_config.eos_token_id = None
    return reference, copy_of(reference)


def random_ids(seed: int, batch: int, tokens: int, vocabulary: int = 151):
    """(batch, tokens) int64."""
    return torch.randint(
        0, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(seed)
    )


def reference_logits(reference, ids):
    """(B,T,V) of the reference without a cache."""
    with torch.inference_mode():
        return reference(ids, use_cache=False).logits


def all_logits(model, ids, cache, chunks):
    """(B,T,V): a chunk of one goes through decode."""
    first = start = cache.length
    out, sizes = [], itertools.cycle(chunks)
    while start < first + ids.shape[1]:
        part = ids[:, start - first :][:, : next(sizes)]
        if part.shape[1] == 1:
            out.append(decode(model, part, cache, start)[:, None])
        else:
            out.append(verify_draft(model, part, cache, start))
        start += part.shape[1]
    return torch.cat(out, 1)


def new_reference_cache(reference) -> DynamicCache:
    """An empty DynamicCache; pass it as `past_key_values`."""
    return DynamicCache(config=reference.config)


def reference_step(reference, ids, cache):
    """Append ids to the reference's cache; (B,V) logits of the last position."""
    with torch.inference_mode():
        return reference(ids, past_key_values=cache, use_cache=True).logits[:, -1]


def log_probability(model, ids, tokens: list[int]) -> float:
    """Of `tokens` after ids (1,N), summed, by our own forward without a cache."""
    whole = torch.cat((ids, torch.tensor([tokens])), 1)
    log_probs = score(model, whole)[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(tokens)[:, None]).sum().item()


def interrupt_at(monkeypatch, layer, at: int):
    """From now on the at-th forward of this block is a Ctrl-C."""
    forward, calls = type(layer).forward, []

    def break_once(self, *args):
        if self is layer:
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt
        return forward(self, *args)

    monkeypatch.setattr(type(layer), "forward", break_once)


class Press:
    """A should_stop whose Ctrl-C comes inside a forward, as apps/cli/common/terminal.py's Interrupt does it."""

    pressed = listening = False

    def __call__(self):
        return self.pressed

    @contextmanager
    def raising(self):
        self.listening = True
        try:
            yield
        finally:
            self.listening = False

    def inside(self, monkeypatch, layer, call: int):
        """At this call of this block."""
        forward, calls = type(layer).forward, []

        def press_once(block, *args):
            if block is layer:
                calls.append(1)
                if len(calls) == call:
                    assert self.listening
                    self.pressed = True
                    raise KeyboardInterrupt
            return forward(block, *args)

        monkeypatch.setattr(type(layer), "forward", press_once)


@contextmanager
def whole_again(pool):
    """The pool; at the end every page must be free exactly once, with no reference left."""
    yield pool
    gc.collect()
    assert sorted(pool.free) == list(range(len(pool.references)))
    assert not any(pool.references)


def gap(ours, theirs) -> float:
    """Largest absolute difference; refuses to compare different shapes by broadcasting."""
    assert ours.shape == theirs.shape, (tuple(ours.shape), tuple(theirs.shape))
    return (ours.double() - theirs.double()).abs().max().item()


SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
ANSWER = {"max_new_tokens": 64, "eos_token_ids": None}  # what all ways to an answer begin with


def defaults(function) -> dict:
    """What a caller gets who says nothing: a promise as much as the result is."""
    parameters = inspect.signature(function).parameters.items()
    return {
        name: p.default
        for name, p in parameters
        if p.default is not p.empty and not callable(p.default)
    }


class Clock:
    """In place of perf_counter: a call of `module.name` takes so many seconds, and nothing else takes any."""

    def __init__(self, monkeypatch):
        self.now, self.monkeypatch = 1000.0, monkeypatch

    def __call__(self) -> float:
        return self.now

    def slow(self, module, name: str, seconds: float):
        real = getattr(module, name)

        def call(*args, **options):
            self.now += seconds
            return real(*args, **options)

        self.monkeypatch.setattr(module, name, call)


def put(layer, k, v):
    """What a decode kernel does with a cache in place: a slot per row, (B,Hk,1,D) ×2 written there → the Pages."""
    pages = layer.pages(k)
    size = pages.keys.shape[2]
    for b, last in enumerate((pages.lengths - 1).tolist()):
        page = b if pages.table is None else int(pages.table[b, last // size])
        pages.keys[page, :, last % size], pages.values[page, :, last % size] = (
            k[b, :, 0],
            v[b, :, 0],
        )
    return pages
