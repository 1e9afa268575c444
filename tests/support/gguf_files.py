"""Tiny GGUF files with the `gguf` package's own writer: metadata as llama.cpp's converter writes it, a real tokenizer,
weights of a tiny transformers model in any type that the package can write."""

import json

import gguf
import numpy as np
import torch

from oracle import unfused
from weights_loader.gguf_writing import add_key

SIZES = {"vocab_size": 320, "tie_word_embeddings": False}
SHAPES = {
    "qwen3": SIZES,
    "qwen3-tied": SIZES | {"tie_word_embeddings": True},
    "qwen2": SIZES | {"model_type": "qwen2"},
    "llama": SIZES | {"model_type": "llama", "head_dim": None, "num_key_value_heads": 1},
    "llama-3.1": SIZES
    | {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "moe": SIZES | {"model_type": "qwen3_moe", "norm_topk_prob": True, "moe_intermediate_size": 64},
    "yarn": SIZES
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
    "olmo3": "olmo2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
OWN_NAMES = {
    "olmo3": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gemma3_text": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt_oss": {
        "post_attention_layernorm": "post_attention_norm",
        "self_attn.sinks": "attn_sinks",
        "mlp.router": "ffn_gate_inp",
    },
}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(path, reference, tokenizer_folder=None, kind: str = "F32", changes=()):
    """The file of a transformers model; `changes`: (key, value or None) that are set, or left out, at the end."""
    config = reference.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(str(path), architecture)
    values = metadata(config, architecture) | (
        tokenizer(tokenizer_folder) if tokenizer_folder else {}
    )
    for key, value in changes:
        values.pop(key, None)
        if value is not None:
            values[key] = value
    for key, value in values.items():
        add_key(writer, key, value)
    for name, array in arrays(reference).items():
        if array.ndim == 1 or array.shape[-1] % 32 or kind == "F32":
            writer.add_tensor(name, array)
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(config, architecture: str) -> dict:
    heads = config.num_attention_heads
    both = config.rope_parameters
    rope = both.get("full_attention", both)
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    found["attention.value_length"] = found["rope.dimension_count"] = found["attention.key_length"]
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    if architecture == "qwen3moe":
        found |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if architecture == "gpt-oss":  # head_dim is said, and feed_forward_length once more
        found |= {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.intermediate_size,
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    if architecture in ("olmo2", "gemma3", "gpt-oss"):
        found["attention.sliding_window"] = config.sliding_window
    if architecture == "olmo2":
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        found["attention.sliding_window_pattern"] = windows
    return {f"{architecture}.{key}": value for key, value in found.items()}


def tokenizer(folder) -> dict:
    """From tokenizer.json of tiny_checkpoint.py: ids 0, 1, 2 are control tokens, text is cut by GPT-2's rule."""
    fields = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(fields["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in fields["added_tokens"]}
    merges = [
        " ".join(pair) if isinstance(pair, list) else pair for pair in fields["model"]["merges"]
    ]
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": [3 if id in special else 1 for _, id in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": template,
    }


def arrays(reference) -> dict:
    """GGUF name → fp32 array, as convert_hf_to_gguf.py arranges them: q and k of Llama and SmolLM3 permuted, experts
    stacked, gate and up of gpt-oss apart, 1 added to Gemma's norms."""
    config, found = reference.config, {}
    state = {}
    for name, tensor in reference.state_dict().items():
        gpt_oss = config.model_type == "gpt_oss"
        state |= apart(name, tensor) if gpt_oss else unfused(name, tensor)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stacks = {}
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if name in ENDS:
            found[ENDS[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        if part.startswith("mlp.experts.ffn_"):
            found[f"blk.{layer}.{part.removeprefix('mlp.experts.')}.{kind}"] = array
            continue
        if part.startswith("mlp.experts."):
            stacks.setdefault((layer, part.rsplit(".", 1)[1]), []).append(array)
            continue
        leaf = (LEAVES | OWN_NAMES.get(config.model_type, {}))[part]
        if config.model_type in ("llama", "smollm3") and leaf in heads:
            array = permuted(array, heads[leaf])
        found[f"blk.{layer}.{leaf}.{kind}"] = array
    for (layer, part), experts in stacks.items():
        found[f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight"] = np.stack(experts)
    if config.rope_parameters.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = rope_factors(reference)
    return found


def apart(name, tensor) -> dict:
    """As conversion/gpt_oss.py: columns of gate and up apart, matrices transposed, sinks with .weight behind them."""
    prefix, leaf = name.rsplit(".", 1)
    if leaf == "sinks":
        return {f"{name}.weight": tensor}
    if not prefix.endswith("experts"):
        return {name: tensor}
    kind = "bias" if leaf.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.transpose(-1, -2)
    if leaf.startswith("down"):
        return {f"{prefix}.ffn_down_exps.{kind}": tensor.contiguous()}
    gate, up = (tensor[:, i::2].contiguous() for i in (0, 1))
    return {f"{prefix}.ffn_gate_exps.{kind}": gate, f"{prefix}.ffn_up_exps.{kind}": up}


def permuted(array, heads: int):
    """Rows of a head: first half and second half → pairs side by side."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def rope_factors(reference):
    """What Llama 3.1's frequencies are divided by."""
    rotary, theta = reference.model.rotary_emb, reference.config.rope_parameters["rope_theta"]
    D = 2 * len(rotary.inv_freq)
    plain = 1.0 / theta ** (torch.arange(0, D, 2).float() / D)
    return (plain / rotary.inv_freq).numpy().astype(np.float32)
