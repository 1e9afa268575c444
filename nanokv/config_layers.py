"""The fields of a config.json that make layers differ: windows, layers without RoPE, two bases.

Defaults are those of the config classes of transformers 5.23 (smollm3, olmo3, gemma3, gpt_oss, lfm2).
"""

from typing import Any

from nanokv.errors import ConfigError, UnimplementedError
from weights_loader import names
from weights_loader.families import Family
from weights_loader.strict import quote

FULL, SLIDING, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
# Fields of Config that this file reads and writes.
FIELDS = (
    "layer_types",
    "sliding_window",
    "local_rope_theta",
    "unrotated",
    "query_pre_attn_scalar",
    "linear",
    "conv",
    "partial_rotary_factor",
    "kv_sharing_factor",
)
LARGEST_WINDOW = 100_000_000
WINDOWS = {"layer_types", "sliding_window"}
GEMMA = {"sliding_window_pattern", "rope_local_base_freq", "query_pre_attn_scalar"}
STATES = names.LINEAR_SIZES.keys() | {
    "layer_types",
    "full_attention_interval",
    "partial_rotary_factor",
    "mamba_ssm_dtype",
    "attn_output_gate",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
}
CONVOLUTIONS = names.CONV_SIZES.keys() | {
    "layer_types",
    "full_attn_idxs",
    "conv_bias",
    "block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier",
}
# Of rope_parameters: read here, and sections for images, whose positions are equal in text.
OF_STATES = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}
UNROTATED = {"no_rope_layers", "no_rope_layer_interval"}


def read_by(family: Family) -> set[str]:
    """Names of the fields that are read for this family."""
    found: set[str] = set()
    if family.full_every:
        found |= WINDOWS
    if family.query_scale:
        found |= GEMMA
    if family.unrotated_every:
        found |= UNROTATED
    if family.linear_every:
        found |= STATES
    if family.convolutions:
        found |= CONVOLUTIONS
    if family.shares_kv:
        found.add("kv_sharing_factor")
    return found


def layer_fields(fields: dict, family: Family, layers: int) -> dict[str, Any]:
    """The values of FIELDS. Raises ConfigError for a list of another length or other kinds."""
    found: dict[str, Any] = {}
    if family.unrotated_every:
        found["unrotated"] = _unrotated(fields, family.unrotated_every, layers)
    if family.linear_every:
        return found | _states(fields, family.linear_every, layers)
    if family.convolutions:
        return found | _convolutions(fields, family, layers)
    if family.shares_kv:
        found["kv_sharing_factor"] = _whole(fields, "kv_sharing_factor", None)
    if not family.full_every:
        return found
    every = _whole(fields, "sliding_window_pattern", family.full_every)
    found["layer_types"] = _layer_types(fields, SLIDING, every, layers)
    if SLIDING in found["layer_types"]:
        found["sliding_window"] = _whole(
            {"sliding_window": family.window} | fields, "sliding_window"
        )
    if family.local_theta:
        found["local_rope_theta"] = _local_theta(fields, family)
    if family.query_scale:
        scale = _whole(fields, "query_pre_attn_scalar", family.query_scale)
        found["query_pre_attn_scalar"] = scale
    return found


def _states(fields: dict, every: int, layers: int) -> dict[str, Any]:
    """What differs in a model that has a recurrent state in most layers (Qwen3.5)."""
    every = _whole(fields, "full_attention_interval", every)
    kinds = _layer_types(fields, LINEAR, every, layers)
    if fields.get("mamba_ssm_dtype") not in (None, "float32"):
        dtype = quote(fields["mamba_ssm_dtype"])
        raise UnimplementedError(f"mamba_ssm_dtype {dtype} is not implemented: a state is float32")
    if fields.get("attn_output_gate") not in (None, True):
        raise UnimplementedError("attn_output_gate false is not implemented: Qwen3.5 has a gate")
    sizes = {name: names.size(fields, name, most) for name, most in names.LINEAR_SIZES.items()}
    if sizes["linear_num_value_heads"] % sizes["linear_num_key_heads"]:
        raise ConfigError(
            f"linear_num_value_heads {sizes['linear_num_value_heads']} is not a multiple of "
            f"linear_num_key_heads {sizes['linear_num_key_heads']}"
        )
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    said = fields.get("partial_rotary_factor")
    share = rope.get("partial_rotary_factor", 0.25 if said is None else said)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"partial_rotary_factor is {quote(share)}: above 0 and at most 1")
    D = names.size(fields, "head_dim", names.SIZES["head_dim"])
    if int(D * share) % 2 or int(D * share) == 0:
        raise ConfigError(
            f"partial_rotary_factor {share} of head_dim {D} is {int(D * share)}: "
            "RoPE rotates pairs of dimensions"
        )
    return {"layer_types": kinds, "linear": sizes, "partial_rotary_factor": float(share)}


def _convolutions(fields: dict, family: Family, layers: int) -> dict[str, Any]:
    """What differs in a model that has a short convolution in most layers (LFM2)."""
    numbers = range(layers)
    kinds = tuple(names.kind_of(fields, family, layer) for layer in numbers)
    if fields.get("layer_types") is not None:
        kinds = _layer_types(fields, CONV, 1, layers)
    said = fields.get("full_attn_idxs")
    if said is not None and set(said) != {layer for layer in numbers if kinds[layer] == FULL}:
        raise ConfigError(f"full_attn_idxs {quote(said)} contradicts layer_types {quote(kinds)}")
    K = names.size(fields, "conv_L_cache", names.CONV_SIZES["conv_L_cache"])
    sizes = {"conv_L_cache": K, "conv_bias": bool(fields.get("conv_bias"))}
    return {"layer_types": kinds, "conv": sizes}


def _layer_types(fields: dict, other: str, every: int, layers: int) -> tuple[str, ...]:
    """The kind of each layer: the list, or every n-th layer full and the rest `other`."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return tuple(other if (layer + 1) % every else FULL for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else "no list of"
        raise ConfigError(
            f"layer_types has {count} kinds for {layers} layers: one per layer was expected"
        )
    unknown = sorted({str(kind) for kind in kinds} - {FULL, other})
    if unknown:
        raise UnimplementedError(
            f"layer_types holds {', '.join(unknown)}: only {FULL} and {other} are implemented"
        )
    return tuple(kinds)


def _unrotated(fields: dict, every: int, layers: int) -> tuple[int, ...]:
    """Numbers of the layers without RoPE. `no_rope_layers` has a 0 for each of them."""
    rotated = fields.get("no_rope_layers")
    if rotated is None:
        every = _whole(fields, "no_rope_layer_interval", every)
        return tuple(layer for layer in range(layers) if (layer + 1) % every == 0)
    valid = isinstance(rotated, list) and all(type(flag) in (int, bool) for flag in rotated)
    if not valid or len(rotated) != layers or set(rotated) - {0, 1}:
        raise ConfigError(
            f"no_rope_layers is {quote(rotated)}: a list of {layers} zeros and ones was expected"
        )
    return tuple(layer for layer, flag in enumerate(rotated) if not flag)


def by_kind(fields: dict) -> dict[str, dict] | None:
    """`rope_parameters`, if it has one object per kind of layer; None if it is one for all."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or not rope.keys() & {FULL, SLIDING}:
        return None
    # transformers writes the last two beside the objects, and does not read them.
    other = sorted(rope.keys() - {FULL, SLIDING, "rope_type", "rope_theta"})
    if other or not all(isinstance(rope.get(kind), dict | None) for kind in (FULL, SLIDING)):
        raise ConfigError(
            f"rope_parameters is {quote(rope)}: an object for {FULL} and one for {SLIDING} "
            "were expected"
        )
    return {kind: rope.get(kind) or {} for kind in (FULL, SLIDING)}


def global_rope(fields: dict, family: Family) -> dict:
    """The fields with the RoPE of layers that see all positions, as one object."""
    if family.linear_every:
        rope = fields.get("rope_parameters") or fields.get("rope_scaling")
        if not isinstance(rope, dict):
            return fields
        kept = {name: value for name, value in rope.items() if name not in OF_STATES}
        return fields | {"rope_parameters": kept, "rope_scaling": None}
    if not fields.get("rope_parameters") and not fields.get("rope_scaling") and family.rope:
        return fields | {"rope_parameters": family.rope}
    kinds = by_kind(fields)
    if not family.local_theta or kinds is None:
        return fields
    theta = {} if "rope_theta" in kinds[FULL] else {"rope_theta": family.theta}
    return _without_rope(fields) | {"rope_parameters": kinds[FULL] | theta}


def _without_rope(fields: dict) -> dict:
    names = ("rope_parameters", "rope_scaling", "rope_theta")
    return {name: value for name, value in fields.items() if name not in names}


def _local_theta(fields: dict, family: Family) -> float:
    """The RoPE base of windowed layers. Their context is never extended."""
    kinds = by_kind(fields)
    local = {} if kinds is None else kinds[SLIDING]
    kind = local.get("rope_type", "default")
    extended = sorted(
        name
        for name, value in local.items()
        if name not in ("rope_type", "type", "rope_theta") and value is not None
    )
    if kind != "default" or extended:
        what = ", ".join(extended) or f"rope_type {quote(kind)}"
        raise UnimplementedError(
            f"rope_parameters of {SLIDING} with {what} is not implemented: 'default' is"
        )
    theta = local.get("rope_theta", fields.get("rope_local_base_freq", family.local_theta))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta <= 1e30:
        raise ConfigError(f"rope_theta of {SLIDING} is {quote(theta)}: a number above 0")
    return float(theta)


def _whole(fields: dict, name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= LARGEST_WINDOW:
        raise ConfigError(
            f"{name} is {quote(value)}: a whole number from 1 to {LARGEST_WINDOW:,} was expected"
        )
    return value


def written(fields: dict, family: Family, rope: dict) -> dict[str, Any]:
    """The fields of a config.json for a Config's `fields`; `rope` is that of full layers."""
    found: dict[str, Any] = {}
    if family.unrotated_every:
        layers = range(fields["num_hidden_layers"])
        found["no_rope_layers"] = [int(layer not in fields["unrotated"]) for layer in layers]
        # The default of transformers, 128004, may be beyond the vocabulary, which it refuses.
        found["pad_token_id"] = None
    if family.linear_every:
        found["layer_types"] = list(fields["layer_types"])
        share = {"partial_rotary_factor": fields["partial_rotary_factor"]}
        return found | fields["linear"] | share | {"rope_parameters": rope | share}
    if family.convolutions:
        found["layer_types"] = list(fields["layer_types"])
        width = {"block_auto_adjust_ff_dim": False, "norm_eps": fields["rms_norm_eps"]}
        return found | fields["conv"] | width
    if family.shares_kv:
        found["kv_sharing_factor"] = fields["kv_sharing_factor"]
    if not family.full_every:
        return found
    found["layer_types"] = list(fields["layer_types"])
    found["sliding_window"] = fields["sliding_window"]
    if family.query_scale:
        found["query_pre_attn_scalar"] = fields["query_pre_attn_scalar"]
    if not family.local_theta:
        return found
    local = {"rope_type": "default", "rope_theta": fields["local_rope_theta"]}
    return found | {"rope_parameters": {FULL: rope, SLIDING: local}}
