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
    "lfm2": "lfm2",
    "qwen3_5_text": "qwen35",
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
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
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
    "qwen3_5_text": {"post_attention_layernorm": "post_attention_norm"},
}
ENDS = {
    "model.embedding_norm.weight": "token_embd_norm.weight",
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
    if architecture == "lfm2":  # its config has the width before it is adjusted
        values["lfm2.feed_forward_length"] = len(arrays(reference)["blk.0.ffn_up.weight"])
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
        "attention.layer_norm_rms_epsilon": getattr(config, "norm_eps", None)
        or config.rms_norm_eps,
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
    if architecture == "lfm2":  # without the sizes of a head, which are C / H
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            del found[key]
        kinds = config.layer_types
        found |= {
            "attention.head_count_kv": [
                config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds
            ],
            "shortconv.l_cache": config.conv_L_cache,
        }
    if architecture == "qwen35":
        found |= linear_keys(config)
    if architecture in ("olmo2", "gemma3", "gpt-oss"):
        found["attention.sliding_window"] = config.sliding_window
    if architecture == "olmo2":
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        found["attention.sliding_window_pattern"] = windows
    return {f"{architecture}.{key}": value for key, value in found.items()}


def linear_keys(config) -> dict:
    values = config.linear_num_value_heads
    rope = config.rope_parameters
    found = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config.linear_value_head_dim,
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
    }
    if config.layer_types[0] == "full_attention":
        linear = [kind == "linear_attention" for kind in config.layer_types]
        return found | {"attention.recurrent_layers": linear}
    return found | {"full_attention_interval": 4}


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
    stacked, gate and up of gpt-oss apart, 1 added to the norms of Gemma and Qwen3.5, whose value heads change
    places."""
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
        shifted = config.model_type in ("gemma3_text", "qwen3_5_text") and "linear_attn" not in name
        if shifted and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if name in ENDS:
            found[ENDS[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest.startswith("linear_attn."):
            array = tiled(rest.removeprefix("linear_attn."), array, config)
        if rest.endswith(("conv.conv.weight", "conv1d.weight")):
            array = array[:, 0]
        if rest == "linear_attn.A_log":
            found[f"blk.{layer}.ssm_a"] = -np.exp(array, dtype=np.float64).astype(np.float32)
            continue
        if rest == "linear_attn.dt_bias":
            found[f"blk.{layer}.ssm_dt.bias"] = array
            continue
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


def tiled(leaf: str, array, config):
    """The value heads of Qwen3.5: the first of each key head, then the second of each, and so on."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    order = [head * (values // keys) + i for i in range(values // keys) for head in range(keys)]
    wide = leaf.startswith(("in_proj_qkv", "in_proj_z", "conv1d", "out_proj"))
    width = config.linear_value_head_dim if wide else 1
    before = 2 * keys * config.linear_key_head_dim
    first = before if leaf.startswith(("in_proj_qkv", "conv1d")) else 0
    numbers = [first + head * width + i for head in order for i in range(width)]
    if leaf.startswith("norm"):
        return array
    if leaf.startswith("out_proj"):
        return np.ascontiguousarray(array[:, numbers])
    return array[[*range(first), *numbers]]


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
