"""The fields of a config.json that make layers differ: windows, layers without RoPE, two bases.

Defaults are those of the config classes of transformers 5.23 (smollm3, olmo3, gemma3).
"""

from typing import Any

from nanokv.errors import ConfigError, UnimplementedError
from weights_loader.families import Family
from weights_loader.strict import quote

FULL, SLIDING = "full_attention", "sliding_attention"
# Fields of Config that this file reads and writes.
FIELDS = ("layer_types", "sliding_window", "local_rope_theta", "unrotated", "query_pre_attn_scalar")
LARGEST_WINDOW = 100_000_000
WINDOWS = {
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
}
UNROTATED = {"no_rope_layers", "no_rope_layer_interval"}


def read_by(family: Family) -> set[str]:
    """Names of the fields that are read for this family."""
    names: set[str] = set()
    if family.full_every:
        names |= WINDOWS
    if family.unrotated_every:
        names |= UNROTATED
    return names


def layer_fields(fields: dict, family: Family, layers: int) -> dict[str, Any]:
    """The values of FIELDS. Raises ConfigError for a list of another length or other kinds."""
    found: dict[str, Any] = {}
    if family.unrotated_every:
        found["unrotated"] = _unrotated(fields, family.unrotated_every, layers)
    if not family.full_every:
        return found
    found["layer_types"] = _layer_types(fields, family.full_every, layers)
    found["sliding_window"] = _whole(fields, "sliding_window", family.window)
    found["local_rope_theta"] = _local_theta(fields, family)
    if family.query_scale:
        scale = _whole(fields, "query_pre_attn_scalar", family.query_scale)
        found["query_pre_attn_scalar"] = scale
    return found


def _layer_types(fields: dict, every: int, layers: int) -> tuple[str, ...]:
    """The kind of each layer: the list, or every n-th layer full."""
    kinds = fields.get("layer_types")
    if kinds is None:
        every = _whole(fields, "sliding_window_pattern", every)
        return tuple(SLIDING if (layer + 1) % every else FULL for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else "no list of"
        raise ConfigError(
            f"layer_types has {count} kinds for {layers} layers: one per layer was expected"
        )
    other = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if other:
        raise UnimplementedError(
            f"layer_types holds {', '.join(other)}: only {FULL} and {SLIDING} are implemented"
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
    kinds = by_kind(fields)
    if not family.full_every or kinds is None:
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


def _whole(fields: dict, name: str, default: int | None) -> int:
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
    if not family.full_every:
        return found
    found["layer_types"] = list(fields["layer_types"])
    found["sliding_window"] = fields["sliding_window"]
    if family.query_scale:
        found["query_pre_attn_scalar"] = fields["query_pre_attn_scalar"]
    local = {"rope_type": "default", "rope_theta": fields["local_rope_theta"]}
    return found | {"rope_parameters": {FULL: rope, SLIDING: local}}
