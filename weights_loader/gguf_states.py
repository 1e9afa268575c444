"""What a GGUF file says of models with a state instead of keys in most layers.

    LFM2      architecture lfm2; a layer with 0 key-value heads has a short convolution
    Qwen3.5   architecture qwen35; every fourth layer has attention, the others the gated delta rule

Qwen3.5's value heads are in another order, its norms are stored as 1 + w, and A_log as −exp(A_log)
(gguf_forms.py). Sources: the `gguf` package's constants.py, tensor_mapping.py and gguf_writer.py;
LFM2 in transformers' modeling_gguf_pytorch_utils.py. What neither says was found with llama.cpp:
a tiny file of random numbers gives the probabilities of transformers, and with a form left out, the
other order of heads or another number of rotated dimensions it does not.
"""

from typing import Any

from .gguf_forms import Exponential, Form, Shifted, Squeezed, Tiled
from .names import SIZES
from .strict import CheckpointError, quote

FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"
KV_HEADS, ROTATED = "attention.head_count_kv", "rope.dimension_count"
INNER, INTERVAL, RECURRENT, SECTIONS = (
    "ssm.inner_size",
    "full_attention_interval",
    "attention.recurrent_layers",
    "rope.dimension_sections",
)
KEYS = {  # key after the architecture's name → field of config.json
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "qwen3_5_text": {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    },
}
OTHER_KEYS = {"lfm2": set(), "qwen3_5_text": {INNER, INTERVAL, RECURRENT, SECTIONS}}
PARTS = {  # their name → nanokv's, of the parts of a layer
    "lfm2": {
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    },
    "qwen3_5_text": {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
}
# The whole names of the other parameters of a layer.
PARAMETERS = {"qwen3_5_text": {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}}
USUAL_INTERVAL = 4  # llama.cpp's, where a file has no key


def keys_of(model_type: str) -> set[str]:
    """The keys that are read for this family, without the architecture's name."""
    if model_type not in KEYS:
        return set()
    return KEYS[model_type].keys() | OTHER_KEYS[model_type]


# --- tensors --------------------------------------------------------------------------------------


def forms(config: dict[str, Any], name: str) -> tuple[Form, ...]:
    """The forms of this tensor in a file, in the order in which they are made.

    `name` is Hugging Face's.
    """
    if config["model_type"] == "lfm2":
        return (Squeezed(),) if name.endswith(".conv.conv.weight") else ()
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return (Shifted(1.0),)
    _, _, leaf = name.partition(".linear_attn.")
    last: dict[str, tuple[Form, ...]] = {
        "A_log": (Exponential(),),
        "conv1d.weight": (Squeezed(),),
    }
    return heads_of(config, leaf) + last.get(leaf, ())


def heads_of(config: dict[str, Any], leaf: str) -> tuple[Form, ...]:
    """The order of the value heads in a parameter of the gated delta rule; () if it is the same."""
    Hk = config["linear_num_key_heads"]
    H = config["linear_num_value_heads"]
    Dv = config["linear_value_head_dim"]
    keys = 2 * Hk * config["linear_key_head_dim"]  # q and k are in front
    order = {
        "in_proj_qkv.weight": Tiled(Hk, H, Dv, first=keys),
        "conv1d.weight": Tiled(Hk, H, Dv, first=keys),
        "in_proj_z.weight": Tiled(Hk, H, Dv),
        "out_proj.weight": Tiled(Hk, H, Dv, dim=1),
        "in_proj_a.weight": Tiled(Hk, H),
        "in_proj_b.weight": Tiled(Hk, H),
        "A_log": Tiled(Hk, H),
        "dt_bias": Tiled(Hk, H),
    }
    if H == Hk or leaf not in order:
        return ()
    return (order[leaf],)


# --- reading --------------------------------------------------------------------------------------


def sizes(path: Any, own: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of config.json that the sizes of all layers depend on.

    CheckpointError for a missing key, or for numbers of key-value heads that are no pattern.
    """
    if model_type not in KEYS:
        return {}
    found = {field: whole(path, own, key) for key, field in KEYS[model_type].items()}
    if model_type == "lfm2":
        return found | {"num_key_value_heads": kv_heads(path, own)}
    heads = found["linear_num_value_heads"]
    inner = whole(path, own, INNER)
    if inner % heads:
        raise CheckpointError(
            f"{path}: {INNER} {inner} is no multiple of ssm.time_step_rank {heads}"
        )
    return found | {"linear_value_head_dim": inner // heads}


def whole(path: Any, own: dict[str, Any], key: str) -> int:
    """The value of a key, which must be a whole number from 1."""
    value = own.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{path}: {key} is {quote(value)}: a whole number from 1 was expected"
        )
    return value


def kv_heads(path: Any, own: dict[str, Any]) -> Any:
    """The key-value heads of LFM2's layers with attention."""
    said = own.get(KV_HEADS)
    if not isinstance(said, list):
        return said
    counts = set(said) - {0}
    if len(counts) != 1:
        raise CheckpointError(
            f"{path}: {KV_HEADS} is {quote(said)}: one number was expected for all layers with "
            "attention, and 0 for the others"
        )
    return counts.pop()


def layer_fields(path: Any, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json for the kinds of the layers. CheckpointError for an odd pattern."""
    layers = whole(path, own, "block_count")
    largest = SIZES["num_hidden_layers"]
    if layers > largest:
        raise CheckpointError(f"{path}: block_count is {layers:,}, at most {largest:,}")
    if fields["model_type"] == "lfm2":
        heads = own.get(KV_HEADS)
        if not isinstance(heads, list):
            heads = [heads] * layers
        kinds = [FULL if count else CONV for count in heads]
        return {
            "layer_types": kinds,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": fields.get("rms_norm_eps"),
        }
    rotated = whole(path, own, ROTATED)
    D = whole(path, {"attention.key_length": fields["head_dim"]} | own, "attention.key_length")
    if rotated > D:
        raise CheckpointError(f"{path}: {ROTATED} is {rotated}, the heads have {D} dimensions")
    share = {"partial_rotary_factor": rotated / D}
    return {
        "layer_types": linear_pattern(path, own, layers),
        "rope_parameters": fields["rope_parameters"] | share,
    } | share


def linear_pattern(path: Any, own: dict[str, Any], layers: int) -> list[str]:
    """The kind of each layer of Qwen3.5, by a list of flags or by the interval."""
    flags = own.get(RECURRENT)
    if flags is not None:
        if not isinstance(flags, list):
            raise CheckpointError(f"{path}: {RECURRENT} is {quote(flags)}, not a list of flags")
        return [LINEAR if flag else FULL for flag in flags]
    every = whole(path, {INTERVAL: USUAL_INTERVAL} | own, INTERVAL)
    return [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]


# --- writing --------------------------------------------------------------------------------------


def layer_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Key → value, without the architecture's name."""
    kind = config["model_type"]
    found: dict[str, Any] = {key: config[field] for key, field in KEYS[kind].items()}
    kinds = config["layer_types"]
    if kind == "lfm2":
        heads = config["num_key_value_heads"]
        return found | {KV_HEADS: [heads if layer == FULL else 0 for layer in kinds]}
    found[INNER] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    rotated = int(config["head_dim"] * config["partial_rotary_factor"])
    found[ROTATED] = rotated
    # Axes of images, whose positions are equal in text: 11, 11, 10 of 32 pairs, 0 of the fourth.
    found[SECTIONS] = [(rotated // 2 + more) // 3 for more in (2, 1, 0)] + [0]
    every = kinds.index(FULL) + 1 if FULL in kinds else 1
    if kinds == [LINEAR if (layer + 1) % every else FULL for layer in range(len(kinds))]:
        return found | {INTERVAL: every}
    return found | {RECURRENT: [layer == LINEAR for layer in kinds]}
