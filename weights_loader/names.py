"""Which tensors a Qwen3 checkpoint must hold (names and shapes, from config.json alone), and which files hold them.

The map between Hugging Face's names and ours is one prefix: "model.layers.0..." there, "layers.0..." here;
only lm_head has no prefix. Plain arithmetic: no tensor is read and no memory is taken.
Not checked here: anything about the maths (rope, activation, window); that is nanokv.config's job.
"""

import re
from pathlib import Path

from .strict import CheckpointError, quote, read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

SIZES = {  # field: largest plausible value. 10**12 is a typo or an attack; it must not become an allocation
    "vocab_size": 10_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 4_000_000,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 65_536,
}
DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128}  # transformers' Qwen3Config where the file is silent
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # old buffer: RoPE recomputes it


def to_nanokv(name: str) -> str:
    """Hugging Face name → ours."""
    return name if name == HEAD else name.removeprefix("model.")


def to_hugging_face(name: str) -> str:
    """Our name → Hugging Face's; the inverse of to_nanokv."""
    return name if name == HEAD else f"model.{name}"


def expected(config: dict) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every tensor, lm_head included (a tied checkpoint may leave it out).

    Source: the parameters of transformers' Qwen3ForCausalLM. Raises CheckpointError naming field and value.
    """
    V, C, I, L, H, Hk, D = sizes(config).values()  # noqa: E741, I: the width of the MLP
    linears = {  # leaf: (out, in)
        "self_attn.q_proj": (H * D, C),
        "self_attn.k_proj": (Hk * D, C),
        "self_attn.v_proj": (Hk * D, C),
        "self_attn.o_proj": (C, H * D),
        "mlp.gate_proj": (I, C),
        "mlp.up_proj": (I, C),
        "mlp.down_proj": (C, I),
    }
    layer = {f"{leaf}.weight": shape for leaf, shape in linears.items()}
    layer |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    layer |= {"input_layernorm.weight": (C,), "post_attention_layernorm.weight": (C,)}
    if flag(config, "attention_bias"):
        layer |= {f"{leaf}.bias": shape[:1] for leaf, shape in linears.items() if leaf.startswith("self_attn")}
    shapes = {EMBEDDING: (V, C)}
    shapes |= {f"layers.{i}.{leaf}": shape for i in range(L) for leaf, shape in layer.items()}
    shapes |= {"norm.weight": (C,), HEAD: (V, C)}
    return {to_hugging_face(name): shape for name, shape in shapes.items()}


def sizes(config: dict) -> dict[str, int]:
    """The seven sizes that decide every shape, each a whole number within SIZES."""
    kind = config.get("model_type", "qwen3")
    if kind != "qwen3":
        raise CheckpointError(
            f"config.json: model_type is {quote(kind)}; only dense Qwen3 (model_type \"qwen3\") is implemented"
        )
    found = {field: size(config, field, limit) for field, limit in SIZES.items()}
    heads, kv_heads = found["num_attention_heads"], found["num_key_value_heads"]
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return found


def flag(config: dict, field: str) -> bool:
    """A field that is true, false or absent (false)."""
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {field} is {quote(value)}, not true or false")
    return value


def size(config: dict, field: str, limit: int) -> int:
    """A whole number from 1 to `limit`; a field that is absent has its default, if it has one."""
    if field not in config and field not in DEFAULTS:
        raise CheckpointError(f"config.json: {field} is missing", hint=f"it has {len(config)} fields; is it a model's?")
    value = config.get(field, DEFAULTS.get(field))
    if value is None and field == "num_key_value_heads":  # null: as many as query heads, as in transformers
        return size(config, "num_attention_heads", limit)
    if type(value) is not int or not 1 <= value <= limit:
        raise CheckpointError(
            f"config.json: {field} is {repr(value)[:40]}; it must be a whole number from 1 to {limit:,}"
        )
    return value


def missing_weights(folder: Path) -> list[str]:
    """Names of the weight files that a folder lacks: the single one, or shards that its index names."""
    if (folder / SINGLE).is_file():
        return []
    if not (folder / INDEX).is_file():
        return [SINGLE]
    shards = sorted(set(read_weight_map(folder / INDEX).values()))
    return [shard for shard in shards if not (folder / shard).is_file()]


def read_weight_map(path: Path) -> dict[str, str]:
    """tensor name → shard, each a bare file name: nothing that the index says can leave its folder."""
    index = read_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(index.get("metadata", {}), dict):
        raise CheckpointError(f"{path}: metadata is {quote(index['metadata'])}, not an object")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing, empty or not an object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or set(shard) & set("/\\:\0"):
            raise CheckpointError(
                f"{path}: tensor {quote(name)} is said to be in {quote(shard)}; "
                "a shard must be a .safetensors file in the same folder"
            )
    return weight_map
