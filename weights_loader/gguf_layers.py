"""What a GGUF file says of layers that differ: windows, two RoPE bases, other norms, names, states.

    SmolLM3   architecture smollm3; every fourth layer has no RoPE, which no key says
    OLMo 3    architecture olmo2, with a window; every fourth layer sees all positions
    Gemma 3   architecture gemma3; every sixth layer sees all positions; norms are stored as 1 + w
    gpt-oss   architecture gpt-oss; every second layer sees all positions (experts: gguf_stacks.py)
    LFM2, Qwen3.5                    gguf_states.py

llama.cpp has the patterns in its code; a key replaces those of the last three. Where it computes
something else than the model, the file is refused, with one exception: YaRN of gpt-oss is read as
the model has it (`truncate` false), and llama.cpp rounds the pairs between which the speed changes.
Sources: llama.cpp's src/models/smollm3.cpp, olmo2.cpp, gemma3.cpp and openai-moe.cpp,
conversion/llama.py, olmo.py, gemma.py and gpt_oss.py.
"""

from typing import Any

from . import gguf_states
from .families import FAMILIES
from .gguf_forms import Form, Shifted
from .names import SIZES, one_spelling
from .strict import CheckpointError, quote

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW, PATTERN, LOCAL_BASE = (
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.freq_base_swa",
)
HINT = "a Hugging Face folder holds every model: give a folder instead of FILE.gguf"
OWN_PARTS = {  # norms and other parts of a layer, of families with their own
    "olmo3": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "gemma3_text": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "gpt_oss": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "qwen3_5_text": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
    },
}
PLAIN_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
PARAMETERS = {"gpt_oss": {"attn_sinks.weight": "self_attn.sinks"}} | gguf_states.PARAMETERS
ENDS = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
LFM2_ENDS = {"token_embd": "embed_tokens", "token_embd_norm": "norm", "output": "lm_head"}
# llama.cpp reads no rope_freqs.weight in files of these families.
NO_DIVISORS = {"smollm3", *OWN_PARTS, *gguf_states.KEYS}
PERMUTED = ("llama", "smollm3")  # families with permuted rows of q and k
LARGEST_GEMMA = 62  # layers of Gemma 3 27B, whose scores llama.cpp divides by another root


def own_parts(model_type: str) -> dict[str, str]:
    """Their name → ours, of the norms of a layer and of what differs from gguf_model.NAMES."""
    return OWN_PARTS.get(model_type, PLAIN_NORMS) | gguf_states.PARTS.get(model_type, {})


def own_parameters(model_type: str) -> dict[str, str]:
    """Their whole name → ours, of parameters that have no .weight or .bias behind them here."""
    return PARAMETERS.get(model_type, {})


def ends(model_type: str) -> dict[str, str]:
    """Their name → ours, of the tensors outside the layers."""
    return LFM2_ENDS if model_type == "lfm2" else ENDS


def keys_of(model_type: str) -> set[str]:
    """The keys that are read for this family, without the architecture's name."""
    if FAMILIES[model_type].full_every is None:
        return gguf_states.keys_of(model_type)
    return {WINDOW, PATTERN, LOCAL_BASE}


def forms(config: dict[str, Any], name: str) -> tuple[Form, ...]:
    """How a file holds the values of the tensor with this name; () if as the model has them."""
    kind = config["model_type"]
    if kind in gguf_states.KEYS:
        return gguf_states.forms(config, name)
    if kind == "gemma3_text" and name.endswith("norm.weight"):
        return (Shifted(1.0),)
    return ()


# --- reading --------------------------------------------------------------------------------------


def layer_fields(path: Any, own: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json, of a file's keys and the other fields.

    CheckpointError for keys that llama.cpp reads differently from the model, or not at all.
    """
    kind = fields["model_type"]
    rope = fields["rope_parameters"]
    if kind in NO_DIVISORS and rope["rope_type"] == "llama3":
        raise CheckpointError(
            f"{path}: rope_freqs.weight in a {FAMILIES[kind].title} file is not implemented"
        )
    if kind in gguf_states.KEYS:
        return gguf_states.layer_fields(path, own, fields)
    if FAMILIES[kind].full_every is None:
        return {}
    layers = fields.get("num_hidden_layers", 0)
    found: dict[str, Any] = {"layer_types": pattern(path, own, layers, FAMILIES[kind].full_every)}
    window = own.get(WINDOW)
    if not window:
        if kind == "olmo3":
            raise CheckpointError(
                f"{path}: architecture olmo2 without {WINDOW} is OLMo 2, which is not implemented: "
                "OLMo 3 is"
            )
        if kind == "gpt_oss":
            raise CheckpointError(
                f"{path}: architecture gpt-oss without {WINDOW} is not implemented: every second "
                "layer has a window"
            )
        found["layer_types"] = [FULL] * layers
    else:
        found["sliding_window"] = window
    if kind == "gpt_oss":
        check_gpt_oss(path, own, found["layer_types"], rope)
        return found | {"rope_parameters": sharp(rope)}
    base = {"olmo3": rope["rope_theta"], "gemma3_text": FAMILIES["gemma3_text"].local_theta}[kind]
    local = own.get(LOCAL_BASE, base)
    check_rope(str(path), kind, rope, local, bool(window))
    if kind == "gemma3_text":
        found |= {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar(fields)}
    return found | {
        "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": local}}
    }


def pattern(path: Any, own: dict[str, Any], layers: Any, every: int | None) -> list[str]:
    """The kind of each layer, by the key: a list of flags, or every n-th sees all positions."""
    value = own.get(PATTERN, every)
    if isinstance(value, list):
        return [SLIDING if flag else FULL for flag in value]
    largest = SIZES["num_hidden_layers"]
    if type(value) is not int or value < 1 or type(layers) is not int or layers > largest:
        raise CheckpointError(
            f"{path}: {PATTERN} is {quote(value)} for {quote(layers)} layers: a list of flags or "
            "a whole number from 1 was expected"
        )
    return [SLIDING if (layer + 1) % value else FULL for layer in range(layers)]


def check_gpt_oss(path: Any, own: dict[str, Any], kinds: list[str], rope: dict) -> None:
    """CheckpointError for a list of windows, which llama.cpp does not read, or a second RoPE base."""
    value = own.get(PATTERN)
    if isinstance(value, list) and kinds != every_second(len(kinds)):
        raise CheckpointError(
            f"{path}: {PATTERN} is {quote(value)}; llama.cpp's gpt-oss reads a whole number there, "
            "and takes every second layer",
            HINT,
        )
    local = own.get(LOCAL_BASE, rope["rope_theta"])
    if local != rope["rope_theta"]:
        raise CheckpointError(
            f"{path}: {LOCAL_BASE} is {quote(local)}; gpt-oss has one base for all layers, "
            f"{rope['rope_theta']:g}"
        )


def every_second(layers: int) -> list[str]:
    """The kind of each layer of gpt-oss: the first has a window."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def sharp(rope: dict[str, Any]) -> dict[str, Any]:
    """The RoPE with gpt-oss's YaRN: the pairs between which the speed changes are not rounded."""
    if rope["rope_type"] == "yarn":
        return rope | {"truncate": False}
    return rope


def scalar(config: dict[str, Any]) -> int:
    """The number whose root llama.cpp divides Gemma's scores by."""
    if config.get("num_hidden_layers") == LARGEST_GEMMA:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def check_rope(source: str, kind: str, rope: dict, local: Any, windowed: bool) -> None:
    """CheckpointError for a RoPE that llama.cpp computes in another way."""
    if kind == "olmo3" and local != rope["rope_theta"]:
        raise CheckpointError(
            f"{source}: {LOCAL_BASE} is {quote(local)}; llama.cpp's olmo2 has one base for all "
            f"layers, {rope['rope_theta']:g}",
            HINT,
        )
    if kind == "gemma3_text" and windowed and rope["rope_type"] == "yarn":
        raise CheckpointError(
            f"{source}: YaRN is not implemented in files of gemma3, where llama.cpp also scales "
            "the layers with windows",
            HINT,
        )


# --- writing --------------------------------------------------------------------------------------


def full_rope(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of the layers that see all positions."""
    rope = config["rope_parameters"]
    return rope.get(FULL, rope)


def keyed(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields that have keys: gpt-oss's have other names, or are implied."""
    if not FAMILIES[config["model_type"]].stacked:
        return config
    return one_spelling(config) | {"moe_intermediate_size": config["intermediate_size"]}


def layer_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Key → value, without the architecture's name. CheckpointError for what has no key."""
    kind = config["model_type"]
    rope = full_rope(config)
    if kind in NO_DIVISORS and rope["rope_type"] == "llama3":
        refuse(kind, "rope_type", "llama3")
    if kind in gguf_states.KEYS:
        return gguf_states.layer_keys(config)
    layers = config["num_hidden_layers"]
    if kind == "smollm3":
        usual = [int((layer + 1) % 4 != 0) for layer in range(layers)]
        if config["no_rope_layers"] != usual:
            refuse(kind, "no_rope_layers", config["no_rope_layers"])
    every = FAMILIES[kind].full_every
    if every is None:
        return {}
    if kind == "gpt_oss":
        if list(config["layer_types"]) != every_second(layers):
            refuse(kind, "layer_types", config["layer_types"])
        return {WINDOW: config["sliding_window"]}
    windowed = [layer == SLIDING for layer in config["layer_types"]]
    if not any(windowed):
        if kind == "olmo3":
            refuse(kind, "layer_types", "without a window")
        check_scalar(config)
        return {}
    local = config["rope_parameters"][SLIDING]["rope_theta"]
    check_rope("config.json", kind, rope, local, True)
    found: dict[str, Any] = {WINDOW: config["sliding_window"]}
    if kind == "gemma3_text":
        check_scalar(config)
        found[LOCAL_BASE] = float(local)
    usual_windows = [(layer + 1) % every != 0 for layer in range(layers)]
    if kind == "olmo3" or windowed != usual_windows:
        found[PATTERN] = windowed
    return found


def check_scalar(config: dict[str, Any]) -> None:
    """CheckpointError for a scale of Gemma's scores that no key says."""
    if config["model_type"] == "gemma3_text" and config["query_pre_attn_scalar"] != scalar(config):
        refuse("gemma3_text", "query_pre_attn_scalar", config["query_pre_attn_scalar"])


def refuse(kind: str, field: str, value: Any) -> None:
    raise CheckpointError(
        f"config.json: {field} {quote(value)} has no key in a GGUF file of {FAMILIES[kind].title}",
        HINT,
    )
