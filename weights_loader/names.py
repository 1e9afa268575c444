"""The tensors that a checkpoint must contain, by config.json alone, and the files that hold them.

Hugging Face's names have one prefix that nanokv's lack: "model.layers.0..." and "layers.0...". Only
lm_head has no prefix, and a backbone that was saved alone has none at all. LFM2 has other names for
the parts of a layer, too (Family.names). This is plain
arithmetic: no tensor is read and no memory is allocated. Settings of the maths (rope, activation,
window) are checked in nanokv.config.
"""

import re
from collections.abc import Container, Iterable
from pathlib import Path

from .families import FAMILIES, Family, family_of
from .strict import CheckpointError, quote, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Shapes = dict[str, tuple[int, ...]]

# Field → largest plausible value. A typo or an attack (10**12) must not become an allocation.
SIZES = {
    "vocab_size": 10_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 4_000_000,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 65_536,
}
EXPERT_SIZES = {  # for families with experts
    "num_experts": 10_000,
    "num_experts_per_tok": 10_000,
    "moe_intermediate_size": 4_000_000,
    "decoder_sparse_step": 10_000,
}
LINEAR_SIZES = {  # for families whose layers have a recurrent state
    "linear_num_key_heads": 10_000,
    "linear_num_value_heads": 10_000,
    "linear_key_head_dim": 65_536,
    "linear_value_head_dim": 65_536,
    "linear_conv_kernel_dim": 1_000,
}
CONV_SIZES = {  # for families with layers of a short convolution
    "conv_L_cache": 1_000,
    "block_multiple_of": 1_000_000,
}
MOST_EXPERTS = 200_000  # in all layers; Qwen3-235B-A22B has 12,032
MOST_SHARED = 10_000  # layers with the same keys and values
OF_KEYS = re.compile(r"self_attn\.(k_proj|v_proj|k_norm)\.")
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
# "layers.0." or "", the part's name, and ".weight" or ".bias".
PLACE = re.compile(r"(layers\.\d+\.|)(.+)(\.\w+)")
# A buffer in old checkpoints. RoPE recomputes it.
IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def to_nanokv(name: str, model_type: str = "qwen3") -> str:
    """Hugging Face's name → nanokv's, in a checkpoint of this family."""
    if name == HEAD:
        return name
    return renamed(name.removeprefix("model."), FAMILIES[model_type].names)


def to_hugging_face(name: str, model_type: str = "qwen3") -> str:
    """nanokv's name → Hugging Face's; the inverse of to_nanokv."""
    if name == HEAD:
        return name
    theirs = {ours: theirs for theirs, ours in FAMILIES[model_type].names.items()}
    return f"model.{renamed(name, theirs)}"


def renamed(name: str, table: dict[str, str]) -> str:
    """The name with another name of its part, if the table has one."""
    found = PLACE.fullmatch(name) if table else None
    if found is None:
        return name
    return f"{found[1]}{table.get(found[2], found[2])}{found[3]}"


def whole_names(stored: Iterable[str], expected: Container[str]) -> dict[str, str]:
    """Stored name → Hugging Face's name.

    All names of a backbone that was saved alone (Qwen3-Embedding) lack "model.". If at least one
    name has the prefix, no name is changed.
    """
    named = {name: name for name in stored}
    if any(name.startswith("model.") for name in named):
        return named
    whole = {name: to_hugging_face(name) for name in named}
    return named | {name: full for name, full in whole.items() if full in expected}


def expected(config: dict) -> Shapes:
    """Hugging Face's name → shape of every tensor.

    lm_head is included, although a tied checkpoint may leave it out. Source: the parameters of
    transformers' class for this family. Raises CheckpointError with the field and its value.
    """
    family = family_of(config)
    found = sizes(config)
    C = found["hidden_size"]
    V = found["vocab_size"]
    attention = attention_shapes(family, found)
    attention |= bias_shapes(family, flag(config, "attention_bias"), attention)
    mixers = {"full_attention": attention}
    if family.linear_every:
        mixers["linear_attention"] = linear_shapes(found)
    if family.convolutions:
        mixers["conv"] = conv_shapes(found, flag(config, "conv_bias"))
    norms: Shapes = {f"{norm}.weight": (C,) for norm in family.norms}
    mlp = mlp_shapes("mlp.", C, found["intermediate_size"])
    experts = expert_shapes(family, found) if family.experts else {}
    shapes: Shapes = {EMBEDDING: (V, C)}
    for i in range(found["num_hidden_layers"]):
        sparse = family.experts and is_sparse(config, i)
        leaves = (
            norms | mixers.get(kind_of(config, family, i), attention) | (experts if sparse else mlp)
        )
        if family.shares_kv and i % size(config, "kv_sharing_factor", MOST_SHARED):
            leaves = {leaf: shape for leaf, shape in leaves.items() if not OF_KEYS.match(leaf)}
        shapes |= {f"layers.{i}.{leaf}": shape for leaf, shape in leaves.items()}
    shapes |= {"norm.weight": (C,), HEAD: (V, C)}
    kind = family.model_type
    return {to_hugging_face(name, kind): shape for name, shape in shapes.items()}


def attention_shapes(family: Family, found: dict[str, int]) -> Shapes:
    """Matrices and norms of the attention of a layer, (out, in) and (D,)."""
    C = found["hidden_size"]
    D = found["head_dim"]
    H = found["num_attention_heads"]
    Hk = found["num_key_value_heads"]
    gates = 2 if family.linear_every else 1  # q_proj computes a gate per value, too
    shapes: Shapes = {
        "self_attn.q_proj.weight": (gates * H * D, C),
        "self_attn.k_proj.weight": (Hk * D, C),
        "self_attn.v_proj.weight": (Hk * D, C),
        "self_attn.o_proj.weight": (C, H * D),
    }
    if family.whole_norm:
        shapes |= {"self_attn.q_norm.weight": (H * D,), "self_attn.k_norm.weight": (Hk * D,)}
    elif family.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
    if family.sinks:
        shapes["self_attn.sinks"] = (H,)
    return shapes


def bias_shapes(family: Family, attention_bias: bool, weights: Shapes) -> Shapes:
    """The biases of the attention of a layer, by the shapes of its matrices."""
    shapes = {}
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        biased = family.output_bias if leaf == "o_proj" else family.qkv_bias
        if biased is None:
            biased = attention_bias
        if biased:
            shapes[f"self_attn.{leaf}.bias"] = weights[f"self_attn.{leaf}.weight"][:1]
    return shapes


def linear_shapes(found: dict[str, int]) -> Shapes:
    """Parameters of a layer with the gated delta rule (Qwen3.5)."""
    C = found["hidden_size"]
    H = found["linear_num_value_heads"]
    keys = found["linear_num_key_heads"] * found["linear_key_head_dim"]
    values = H * found["linear_value_head_dim"]
    channels = 2 * keys + values
    shapes: Shapes = {
        "in_proj_qkv.weight": (channels, C),
        "in_proj_z.weight": (values, C),
        "in_proj_b.weight": (H, C),
        "in_proj_a.weight": (H, C),
        "conv1d.weight": (channels, 1, found["linear_conv_kernel_dim"]),
        "A_log": (H,),
        "dt_bias": (H,),
        "norm.weight": (found["linear_value_head_dim"],),
        "out_proj.weight": (C, values),
    }
    return {f"linear_attn.{leaf}": shape for leaf, shape in shapes.items()}


def conv_shapes(found: dict[str, int], biased: bool) -> Shapes:
    """Parameters of a layer with a short convolution (LFM2)."""
    C = found["hidden_size"]
    shapes: Shapes = {
        "in_proj.weight": (3 * C, C),
        "conv.weight": (C, 1, found["conv_L_cache"]),
        "out_proj.weight": (C, C),
    }
    if biased:
        shapes |= {"in_proj.bias": (3 * C,), "conv.bias": (C,), "out_proj.bias": (C,)}
    return {f"conv.{leaf}": shape for leaf, shape in shapes.items()}


def kind_of(config: dict, family: Family, layer: int) -> str:
    """What mixes positions in this layer, as layer_types names it."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple) and layer < len(kinds):
        return str(kinds[layer])
    if family.convolutions:
        return "full_attention" if layer in attention_layers(config) else "conv"
    every = family.linear_every and (config.get("full_attention_interval") or family.linear_every)
    if every is None or (layer + 1) % every == 0:
        return "full_attention"
    return "linear_attention"


def attention_layers(config: dict) -> Container[int]:
    """Numbers of the layers with attention (full_attn_idxs); all, if there is no list."""
    layers = range(size(config, "num_hidden_layers", SIZES["num_hidden_layers"]))
    found = config.get("full_attn_idxs")
    if found is None:
        return layers
    if not isinstance(found, list) or not all(type(i) is int and i in layers for i in found):
        raise CheckpointError(
            f"config.json: full_attn_idxs is {quote(found)}, not a list of numbers below "
            f"num_hidden_layers {len(layers)}"
        )
    return found


def mlp_shapes(prefix: str, C: int, width: int) -> Shapes:
    """The three matrices of a SwiGLU MLP."""
    shapes = {"gate_proj": (width, C), "up_proj": (width, C), "down_proj": (C, width)}
    return {f"{prefix}{leaf}.weight": shape for leaf, shape in shapes.items()}


def expert_shapes(family: Family, found: dict[str, int]) -> Shapes:
    """The router and the experts of a layer."""
    C = found["hidden_size"]
    E = found["num_experts"]
    if family.stacked:
        return stacked_shapes(C, E, found["moe_intermediate_size"])
    shapes: Shapes = {"mlp.gate.weight": (E, C)}
    for expert in range(E):
        shapes |= mlp_shapes(f"mlp.experts.{expert}.", C, found["moe_intermediate_size"])
    return shapes


def stacked_shapes(C: int, E: int, width: int) -> Shapes:
    """The router and the experts of a layer, all experts in one tensor (E,in,out) for each matrix."""
    return {
        "mlp.router.weight": (E, C),
        "mlp.router.bias": (E,),
        "mlp.experts.gate_up_proj": (E, C, 2 * width),
        "mlp.experts.gate_up_proj_bias": (E, 2 * width),
        "mlp.experts.down_proj": (E, width, C),
        "mlp.experts.down_proj_bias": (E, C),
    }


def is_sparse(config: dict, layer: int) -> bool:
    """Whether this layer has experts instead of an MLP.

    Every decoder_sparse_step-th layer has experts, except the layers in mlp_only_layers.
    """
    step = config.get("decoder_sparse_step", 1)
    return (layer + 1) % step == 0 and layer not in (config.get("mlp_only_layers") or ())


def sizes(config: dict) -> dict[str, int]:
    """The sizes that determine every shape, checked to be whole numbers within their limits.

    Sizes of experts are included if the family has experts.
    """
    config = one_spelling(config)
    family = family_of(config)
    limits = SIZES
    if family.experts:
        limits = SIZES | EXPERT_SIZES
    if family.linear_every:
        limits = SIZES | LINEAR_SIZES
    if family.convolutions:
        limits = SIZES | CONV_SIZES
    found = {name: size(config, name, limit) for name, limit in limits.items()}
    heads = found["num_attention_heads"]
    kv_heads = found["num_key_value_heads"]
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    if family.experts:
        check_experts(config, found)
    if family.convolutions:
        attention_layers(config)  # raises for numbers that are no layer's
        flag(config, "conv_bias")
        found["intermediate_size"] = adjusted(config, found)
    return found


def adjusted(config: dict, found: dict[str, int]) -> int:
    """The width of LFM2's MLP: with block_auto_adjust_ff_dim, 2/3 of intermediate_size.

    That is multiplied, and rounded up to a multiple. As Lfm2MLP of transformers does it.
    """
    width = found["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim") is not None:
        if not flag(config, "block_auto_adjust_ff_dim"):
            return width
    width = int(2 * width / 3)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1e3:
        raise CheckpointError(
            f"config.json: block_ffn_dim_multiplier is {quote(factor)}, not a number from 0 "
            "to 1,000"
        )
    multiple = found["block_multiple_of"]
    width = -(-int(factor * width) // multiple) * multiple
    largest = SIZES["intermediate_size"]
    if not 1 <= width <= largest:
        raise CheckpointError(
            f"config.json: intermediate_size {found['intermediate_size']:,} is adjusted to "
            f"{width:,}; it must be from 1 to {largest:,}"
        )
    return width


def one_spelling(config: dict) -> dict:
    """The config with one name per field: num_experts for transformers 5's num_local_experts.

    LFM2 has other names (Family.spellings). CheckpointError if two names of a field contradict.
    """
    family = family_of(config)
    for theirs, ours in ({"num_local_experts": "num_experts"} | family.spellings).items():
        if theirs not in config:
            continue
        config = dict(config)
        value = config.pop(theirs)
        if value is not None and config.setdefault(ours, value) != value:
            raise CheckpointError(
                f"config.json: {ours} {quote(config[ours])} contradicts {theirs} {quote(value)}"
            )
    return config


def check_experts(config: dict, found: dict[str, int]) -> None:
    """CheckpointError for impossible numbers of experts, or a malformed mlp_only_layers."""
    experts = found["num_experts"]
    total = experts * found["num_hidden_layers"]
    if total > MOST_EXPERTS:
        raise CheckpointError(
            f"config.json: {total:,} experts in all layers, at most {MOST_EXPERTS:,} are plausible"
        )
    chosen = found["num_experts_per_tok"]
    if chosen > experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {chosen} is more than num_experts {experts}"
        )
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(
            f"config.json: mlp_only_layers is {quote(layers)}, not a list of layer numbers"
        )


def flag(config: dict, field: str) -> bool:
    """A bool field. Null or absent means false."""
    value = config.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {field} is {quote(value)}, not true or false")
    return value


def is_tied(config: dict) -> bool:
    """Whether the config says, under any name, that the embedding is the head."""
    return flag(one_spelling(config), "tie_word_embeddings")


def size(config: dict, field: str, limit: int) -> int:
    """A whole number from 1 to `limit`. An absent field gets the family's default, if any."""
    defaults = family_of(config).defaults
    if field not in config and field not in defaults:
        raise CheckpointError(
            f"config.json: {field} is missing",
            hint=f"it has {len(config)} fields; is it a model's?",
        )
    value = config.get(field, defaults.get(field))
    # Null means as many KV heads as query heads, as in transformers.
    if value is None and field == "num_key_value_heads":
        return size(config, "num_attention_heads", limit)
    if value is None and field == "moe_intermediate_size" and field in defaults:
        return size(config, "intermediate_size", limit)
    if value is None and field == "head_dim" and defaults[field] is None:
        C = size(config, "hidden_size", SIZES["hidden_size"])
        heads = size(config, "num_attention_heads", SIZES["num_attention_heads"])
        value = C // heads
    if type(value) is not int or not 1 <= value <= limit:
        shown = repr(value)[:40]
        raise CheckpointError(
            f"config.json: {field} is {shown}; it must be a whole number from 1 to {limit:,}"
        )
    return value


def missing_weights(folder: Path) -> list[str]:
    """Names of the missing weight files: model.safetensors, or shards that the index names."""
    if (folder / SINGLE).is_file():
        return []
    if not (folder / INDEX).is_file():
        return [SINGLE]
    shards = sorted(set(read_weight_map(folder / INDEX).values()))
    return [shard for shard in shards if not (folder / shard).is_file()]


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name → shard.

    CheckpointError unless each shard is a bare file name, so that no path leaves the folder.
    """
    index = read_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(index.get("metadata", {}), dict):
        raise CheckpointError(f"{path}: metadata is {quote(index['metadata'])}, not an object")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing, empty or not an object")
    for name, shard in weight_map.items():
        if not is_shard_name(shard):
            raise CheckpointError(
                f"{path}: tensor {quote(name)} is said to be in {quote(shard)}; "
                "a shard must be a .safetensors file in the same folder"
            )
    return weight_map


def is_shard_name(shard: object) -> bool:
    """Whether this is a .safetensors file name without a path."""
    if not isinstance(shard, str) or set(shard) & set("/\\:\0"):
        return False
    return shard.endswith(".safetensors")
