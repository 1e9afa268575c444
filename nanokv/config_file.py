"""Check config.json and generation_config.json: plain dicts in, the fields of a `Config` out.

A setting that changes the maths and is not implemented here (another rope type, sliding layers,
another activation) raises with the field's name and value: an error is better than a model that
runs with the wrong formula. Each field is either read (READ), implemented for some values only
(SOME), or known to be harmless (HARMLESS). Any other field raises, unless its value switches
nothing on (`is_off`).

Defaults follow the config class of the family in transformers (Qwen3: head_dim 128, Llama: hidden /
heads). Any other absent size is an error.
"""

import math
import re
import warnings
from pathlib import Path
from typing import Any

from nanokv import config_layers
from nanokv.errors import ConfigError, UnimplementedError
from weights_loader import families, names
from weights_loader.neutral import ALWAYS, is_off
from weights_loader.strict import CheckpointError, CheckpointWarning, read_object

POSITIONS = 100_000_000  # largest plausible context; names.SIZES has the limits of the other sizes
DTYPES = ("float32", "bfloat16", "float16")
ROPE_FIELDS = {  # rope_type → its fields
    "default": set(),
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "attn_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}
READ = names.SIZES.keys() | {
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "original_max_position_embeddings",
    "attention_bias",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "model_type",
}
READ_EXPERTS = names.EXPERT_SIZES.keys() | {"norm_topk_prob", "mlp_only_layers"}
READ_STACKED = {"num_experts", "num_experts_per_tok"}
SILU = ("silu", "swish")  # two names for the same function
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
SOME = {  # fields that change the maths, with the values that this model implements
    **dict.fromkeys(ACTIVATIONS, SILU),
    "use_sliding_window": (False,),
    "mlp_bias": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "position_embedding_type": ("rope", "rotary"),
    "norm_type": ("rmsnorm", "rms_norm", "rms"),
    # The router. The next four are DeepSeek's names, with the values that switch nothing on.
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1, 0),
    "topk_group": (1, 0),
    "moe_layer_freq": (1,),
}
# Where the published checkpoint is quantized: what to take instead.
BF16 = {"gpt_oss": "take a checkpoint in bf16, such as unsloth/gpt-oss-20b-BF16"}
QUANTIZED = re.compile("(quantization|compression)(_config)?")  # tensors are not plain numbers
# Fields for sampling, training, labels and bookkeeping. The logits do not depend on them.
HARMLESS = frozenset(
    """
    architectures transformers_version use_cache sliding_window max_window_layers
    attn_implementation name_or_path experts_implementation cache_implementation
    initializer_range attention_dropout gradient_checkpointing neftune_noise_alpha use_bfloat16
    torchscript tf_legacy_loss output_attentions output_hidden_states return_dict output_scores
    return_dict_in_generate chunk_size_feed_forward pretraining_tp is_decoder
    tie_encoder_decoder unsloth_fixed unsloth_version id2label label2id num_labels problem_type
    finetuning_task task_specific_params tokenizer_class model_name prefix bos_token_id
    eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id
    forced_eos_token_id max_length min_length max_new_tokens do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size bad_words_ids encoder_no_repeat_ngram_size
    num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens output_router_logits router_aux_loss_coef is_llama_config
    transformers.js_config auto_map seq_length max_seq_length max_seq_len max_sequence_length
    model_max_length tokenizer_model_max_length
    """.split()
)
# More harmless fields, by pattern: dropout, losses and initial weights; token ids; kernels and
# training.
HARMLESS_NAMES = re.compile(
    "_.*|(.*_)?(dropout|pdrop|loss|initializer|init)(_.*)?|.*_token_ids?|(bos|eos|pad|unk)_token|"
    "(use_)?flash_?att.*|gradient_checkpointing.*|unsloth_.*"
)
# Types of harmless fields, as transformers checks them. Another type means a damaged file.
TYPES = {
    "architectures": (list, None),
    "transformers_version": (str, None),
    "problem_type": (str, None),
    "id2label": (dict, None),
    "label2id": (dict, None),
    "chunk_size_feed_forward": (int,),
    "output_hidden_states": (bool, None),
    "return_dict": (bool, None),
    "use_cache": (bool,),
    "is_encoder_decoder": (bool,),
    "attention_dropout": (float, int),
    "initializer_range": (float, int),
    "sliding_window": (int, None),
    "max_window_layers": (int,),
    "bos_token_id": (int, None),
    "pad_token_id": (int, None),
    "eos_token_id": (int, list, None),
}
# Fields of generation_config.json that are read.
SAMPLED = {
    "eos_token_id",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
}
# Fields of generation_config.json that are not implemented → the values, besides null, that have
# no effect.
NEUTRAL = {
    "num_beams": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "max_time": (),
    "stop_strings": ([],),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ([], {}),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "guidance_scale": (1.0,),
    "watermarking_config": (),
    "dola_layers": (),
    "penalty_alpha": (0.0,),
    "num_return_sequences": (1,),
    "cache_implementation": ("dynamic", "static", "offloaded", "offloaded_static"),
}
# The same for fields that only count with do_sample.
NEUTRAL_SAMPLED = {"typical_p": (1.0,), "top_h": (), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,)}
# Fields of generation_config.json without effect here: the caller limits the length of an answer,
# beam fields only count with num_beams, and the rest concerns how transformers runs or returns.
NO_EFFECT = frozenset(
    """
    max_length max_new_tokens early_stopping length_penalty diversity_penalty num_beam_groups
    low_memory bos_token_id pad_token_id decoder_start_token_id transformers_version
    renormalize_logits output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate use_cache cache_config max_cache_len compile_config disable_compile
    continuous_batching_config prefill_chunk_size is_assistant num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit
    assistant_lookbehind assistant_ensemble_weight target_lookbehind prompt_lookup_num_tokens
    max_matching_ngram_size speculation_type use_mtp
    """.split()
)


def model_fields(fields: dict) -> dict[str, Any]:
    """A config.json → the fields of a `Config`.

    "yarn", "llama3" and "experts" hold the fields of Yarn, Llama3Rope and Experts, if present.
    Raises ConfigError, with name and value, for a field that changes the maths and is not
    implemented.
    """
    if not isinstance(fields, dict):
        raise ConfigError(f"config.json holds a {type(fields).__name__}, not an object")
    family = _family(fields)
    if "norm_eps" in family.spellings:  # transformers reads no other name of it
        fields = {"norm_eps": family.eps} | fields
    fields = _by_loader(names.one_spelling, fields)
    _refuse_unimplemented(fields, family)
    sizes = _by_loader(names.sizes, fields)
    if sizes["head_dim"] % 2:
        raise ConfigError(f"head_dim {sizes['head_dim']} is odd: RoPE rotates pairs of dimensions")
    layers = config_layers.layer_fields(fields, family, sizes["num_hidden_layers"])
    theta, scaling = _rope(config_layers.global_rope(fields, family), family.theta)
    return {
        **{name: sizes[name] for name in names.SIZES},
        "max_position_embeddings": _context(fields, scaling.get("yarn")),
        "rms_norm_eps": _positive(fields, "rms_norm_eps", family.eps, largest=1.0),
        "rope_theta": theta,
        **scaling,
        "attention_bias": _flag(fields, "attention_bias") and family.qkv_bias is None,
        "tie_word_embeddings": _flag(fields, "tie_word_embeddings", family.tied),
        "torch_dtype": dtype_of(fields),
        "model_type": family.model_type,
        "experts": _experts(fields, sizes, family) if family.experts else None,
        **layers,
    }


def written(fields: dict, family: families.Family) -> dict:
    """The config.json of a model whose `Config` has these fields."""
    fields = dict(fields)
    yarn, llama3, experts = (fields.pop(name) for name in ("yarn", "llama3", "experts"))
    layers = {name: fields.pop(name) for name in config_layers.FIELDS}
    layers["num_hidden_layers"] = fields["num_hidden_layers"]
    layers["rms_norm_eps"] = fields["rms_norm_eps"]
    theta = fields.pop("rope_theta")
    rope: dict[str, Any] = {"rope_type": "default"}
    if yarn:
        rope = {"rope_type": "yarn"} | _without_nulls(yarn)
    elif llama3:
        rope = {"rope_type": "llama3"} | _without_nulls(llama3)
    if family.qkv_bias is not None:
        del fields["attention_bias"]
    if experts:
        experts["mlp_only_layers"] = list(experts["mlp_only_layers"])
    if experts and family.stacked:
        chosen = experts["num_experts_per_tok"]
        experts = {"num_local_experts": experts["num_experts"], "num_experts_per_tok": chosen}
    return {
        "architectures": [family.architecture],
        "hidden_act": family.activation,
        **fields,
        **(experts or {}),
        "rope_theta": theta,
        "rope_parameters": rope | {"rope_theta": theta},
        **config_layers.written(layers, family, rope | {"rope_theta": theta}),
    }


def generation_settings(config: dict, generation: dict) -> dict:
    """The generation settings of both files together; generation_config.json takes precedence.

    Old checkpoints keep these settings in config.json. Its other fields are left out.
    """
    kept = SAMPLED | NEUTRAL.keys() | NEUTRAL_SAMPLED.keys()
    old = {name: value for name, value in config.items() if name in kept}
    return _without_nulls(old) | _without_nulls(generation)


def _without_nulls(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if value is not None}


def generation_fields(fields: dict) -> dict[str, Any]:
    """A generation_config.json → the fields of a `GenerationConfig`.

    Sampling parameters only count with `do_sample`.
    """
    eos = eos_token_ids(fields) or ()
    # These ids are not used, but a wrong type means a damaged file.
    for name in ("bos_token_id", "pad_token_id", "decoder_start_token_id"):
        if type(fields.get(name, 0)) not in (int, type(None)):
            raise ConfigError(f"{name} {shown(fields[name])} is not an id")
    penalty = _number(fields, "repetition_penalty", 1.0)
    sampled = fields.get("do_sample") is not None and _flag(fields, "do_sample")
    if not sampled:
        _warn_unused(fields, NEUTRAL)
        return {"eos_token_ids": eos, "repetition_penalty": penalty}
    _warn_unused(fields, NEUTRAL | NEUTRAL_SAMPLED)
    return {
        "eos_token_ids": eos,
        "temperature": _number(fields, "temperature", 1.0),
        "top_k": _number(fields, "top_k", 50),  # transformers' default when sampling
        "top_p": _number(fields, "top_p", 1.0),
        "min_p": _number(fields, "min_p", 0.0),
        "repetition_penalty": penalty,
    }


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1: YaRN's sharpening of attention over a longer context.

    1 if the context is not extended.
    """
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def optional(path: Path) -> dict:
    """The JSON object in a file; {} if the file does not exist."""
    if not path.is_file():
        return {}
    return read_object(path, ConfigError)


def eos_token_ids(fields: dict) -> tuple[int, ...] | None:
    """`eos_token_id` of config.json or generation_config.json as a tuple; None if absent or null.

    The files hold one id or a list of ids.
    """
    eos = fields.get("eos_token_id")
    if eos is None:
        return None
    if not isinstance(eos, list):
        eos = [eos]
    if not all(type(i) is int and i >= 0 for i in eos):
        raise ConfigError(f"eos_token_id {shown(eos)} is not an id or a list of ids")
    return tuple(eos)


def _warn_unused(fields: dict, neutral: dict[str, tuple]) -> None:
    """Warn once, naming the fields that have an effect in transformers and none here."""
    unused = [
        f"{shown(name)[1:-1]} {shown(value)}"
        for name, value in _without_nulls(fields).items()
        if _has_effect(name, value, neutral)
    ]
    if unused:
        first = ", ".join(unused[:5])
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        warnings.warn(
            f"generation_config.json: not implemented, without effect here: {first}{more}",
            CheckpointWarning,
            stacklevel=5,
        )


def _has_effect(name: str, value: object, neutral: dict[str, tuple]) -> bool:
    """Whether transformers would answer differently with this field."""
    if name.startswith("_"):
        return False
    if name in neutral:
        return value not in neutral[name]
    return name not in SAMPLED | NO_EFFECT | NEUTRAL_SAMPLED.keys()


def _family(fields: dict) -> families.Family:
    try:
        return families.family_of(fields)
    except CheckpointError as error:
        raise UnimplementedError(error.message, error.hint) from error


def _refuse_unimplemented(fields: dict, family: families.Family) -> None:
    some = SOME | _values_of_family(fields, family)
    _check_values(fields, some, family)
    _check_types(fields)
    _check_layer_types(fields, family)
    in_tables = READ | some.keys() | HARMLESS | config_layers.read_by(family)
    if family.experts:
        in_tables |= READ_STACKED if family.stacked else READ_EXPERTS
    for name, value in fields.items():
        if name not in in_tables and not HARMLESS_NAMES.fullmatch(name) and not is_off(name, value):
            _refuse_unknown(name, value, family)


def _check_values(fields: dict, some: dict[str, tuple], family: families.Family) -> None:
    """ConfigError for a field of `some` with a value that is not implemented."""
    for name, values in some.items():
        value = fields.get(name, values[0])
        off = not (value or values[0]) or (value is None and name != "hidden_act")
        if value not in values and not off:
            known = " or ".join(map(repr, values))
            raise UnimplementedError(
                f"{name} {shown(value)} is not implemented: {family.title} has {name} {known} only"
            )


def _check_types(fields: dict) -> None:
    """ConfigError for a harmless field of the wrong type."""
    for name, kinds in TYPES.items():
        if name in fields and not any(type(fields[name]) is (kind or type(None)) for kind in kinds):
            words = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} is {shown(fields[name])}: {words} was expected")


def _check_layer_types(fields: dict, family: families.Family) -> None:
    layers = fields.get("layer_types")
    checked = family.full_every or family.linear_every or family.convolutions
    if layers is None or checked:  # by config_layers
        return
    if not isinstance(layers, list):
        layers = [layers]
    other = sorted({str(kind) for kind in layers} - {"full_attention"})
    if other:
        raise UnimplementedError(
            f"layer_types holds {', '.join(other)}: only full_attention is implemented"
        )


def _values_of_family(fields: dict, family: families.Family) -> dict[str, tuple]:
    """Like SOME, for fields whose implemented values depend on the family."""
    biased = family.qkv_bias
    if biased is None:
        biased = _flag(fields, "attention_bias")
    values: dict[str, tuple] = {
        "qk_norm": (family.qk_norm,),
        "use_qk_norm": (family.qk_norm,),
        # The tensors of the checkpoint decide which biases exist.
        "qkv_bias": (biased, False),
    }
    if not family.experts:
        values |= {"num_experts": (0,), "decoder_sparse_step": (1,)}
    if not family.window_switch and not family.full_every:
        values["sliding_window"] = (None,)
    if family.activation != "silu":
        values |= dict.fromkeys(ACTIVATIONS, (family.activation,))
    if family.model_type == "gpt_oss":
        values |= _values_of_gpt_oss(fields)
    if family.convolutions:
        values |= _values_of_lfm2(fields)
    return values


def _values_of_gpt_oss(fields: dict) -> dict[str, tuple]:
    """The constants of its experts, biases, and its config's second names of two fields."""
    rope = _rope_object(fields, "rope_parameters") | _rope_object(fields, "rope_scaling")
    original = "original_max_position_embeddings"
    return {
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
        "experts_per_token": (fields.get("num_experts_per_tok"),),
        "initial_context_length": (fields.get(original) or rope.get(original, 4096),),
    }


def _values_of_lfm2(fields: dict) -> dict[str, tuple]:
    """Fields of published files that transformers does not read: second names, and constants."""
    width = (fields.get("hidden_size"),)
    return {
        "attention_bias": (False,),
        "block_dim": width,
        "conv_dim": width,
        "conv_dim_out": width,
        "num_heads": (fields.get("num_attention_heads"),),
        "block_norm_eps": (fields.get("rms_norm_eps"),),
        "block_use_swiglu": (True,),
        "use_pos_enc": (True,),
    }


def _refuse_unknown(name: str, value: object, family: families.Family):
    label = shown(name)[1:-1]
    if QUANTIZED.fullmatch(name):
        raise UnimplementedError(
            f"{label} {shown(value)} is not implemented: the checkpoint is quantized",
            hint=BF16.get(family.model_type, "take the original in bf16, or a GGUF file"),
        )
    if ALWAYS.fullmatch(name):
        raise UnimplementedError(
            f"{label} {shown(value)} is not implemented: {family.title} has {label} True only"
        )
    raise UnimplementedError(
        f"{label} {shown(value)} is not implemented: it is no field of a {family.title} config "
        "and may change the maths",
        hint=f"where it does not, remove {label} from config.json",
    )


def is_harmless(name: str) -> bool:
    """Whether no family's logits depend on a field of this name."""
    return name in HARMLESS or HARMLESS_NAMES.fullmatch(name) is not None


def shown(value: object) -> str:
    """A value for a message: its repr, which escapes control characters, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _by_loader(check, *args):
    """Call one of the loader's checks and raise its CheckpointError as a ConfigError.

    The loader owns the checks of sizes, because it needs the sizes before it allocates memory.
    """
    try:
        return check(*args)
    except CheckpointError as error:
        raise ConfigError(error.message, error.hint) from error


def _positive(fields: dict, name: str, default: float, largest: float = 1e30) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
        raise ConfigError(
            f"{name} is {shown(value)}: a number above 0 and at most {largest:g} was expected"
        )
    return float(value)


def _number(fields: dict, name: str, default):
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ConfigError(f"{name} is {shown(value)}: a number was expected")
    if value != type(default)(value):
        raise ConfigError(f"{name} is {shown(value)}: a whole number was expected")
    return type(default)(value)


def _flag(fields: dict, name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}: true or false was expected")
    return value


def dtype_of(fields: dict) -> str:
    """The dtype of a config.json; fp32 if it names none. Raises ConfigError for another one."""
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype {shown(name)} is not one of {', '.join(DTYPES)}")
    return name


def _rope(fields: dict, default: float = 10_000.0) -> tuple[float, dict[str, Any]]:
    """(theta, {} or {"yarn": …} or {"llama3": …}).

    Read from transformers 5's `rope_parameters`, or from `rope_theta` and `rope_scaling`. Both
    spellings may be present; ConfigError if they disagree.
    """
    new, old = (_rope_object(fields, name) for name in ("rope_parameters", "rope_scaling"))
    if new and old and _without_theta(new) != _without_theta(old):
        raise ConfigError(f"rope_parameters {shown(new)} contradicts rope_scaling {shown(old)}")
    rope = new | old
    theta = _positive({**fields, **rope}, "rope_theta", default)
    if (outer := _positive(fields, "rope_theta", theta)) != theta:
        raise ConfigError(f"rope_theta is {shown(outer)}, but rope_parameters says {shown(theta)}")
    kind = _rope_type(rope)
    if kind == "linear" and rope.get("factor") == 1:  # positions divided by 1
        return theta, {}
    if not isinstance(kind, str) or kind not in ROPE_FIELDS:
        raise UnimplementedError(
            f"rope_type {shown(kind)} is not implemented: 'default', 'yarn' and 'llama3' are"
        )
    known = {"rope_type", "type", "rope_theta"} | ROPE_FIELDS[kind]
    for name, value in rope.items():
        if name not in known and not is_off(name, value):
            label = shown(name)[1:-1]
            raise UnimplementedError(
                f"rope_type {shown(kind)} with {label} {shown(value)} is not implemented"
            )
    if kind == "yarn":
        return theta, {kind: _yarn(fields, rope, theta)}
    if kind == "llama3":
        return theta, {kind: _llama3(fields, rope)}
    return theta, {}


def _rope_object(fields: dict, name: str) -> dict:
    """The object under one of the two spellings; {} if it is absent or off."""
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {shown(value)}: an object was expected")
    return value


def _rope_type(rope: dict) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _without_theta(rope: dict) -> dict:
    """The fields on which the two spellings must agree."""
    said = _without_nulls(rope)
    said.pop("rope_theta", None)
    said.pop("type", None)
    return said | {"rope_type": _rope_type(rope)}


def _said_context(fields: dict) -> int:
    return _by_loader(names.size, fields, "max_position_embeddings", POSITIONS)


def _context(fields: dict, yarn: dict | None) -> int:
    """The context: max_position_embeddings, or YaRN's factor × original if that is larger.

    Qwen's instructions for long texts add YaRN and leave max_position_embeddings unchanged. vLLM
    derives its max_model_len in the same way.
    """
    said = _said_context(fields)
    if yarn is None:
        return said
    factor = yarn["factor"]
    original = yarn["original_max_position_embeddings"]
    extended = factor * original
    if extended > POSITIONS:
        product = f"factor {factor:g} × original_max_position_embeddings {original:,}"
        raise ConfigError(f"rope_type 'yarn': {product} is more than {POSITIONS:,} positions")
    return max(said, int(extended))


def _original_context(fields: dict, rope: dict) -> int:
    """The context before its extension, as in transformers.

    The field of the config, else the field of the rope object, else max_position_embeddings.
    """
    name = "original_max_position_embeddings"
    for place in (fields, rope):
        if place.get(name) is not None:
            return _by_loader(names.size, place, name, POSITIONS)
    return _said_context(fields)


def _llama3(fields: dict, rope: dict) -> dict[str, Any]:
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if rope.get(name) is None:
            raise ConfigError(f"rope_type 'llama3' lacks {name}")
    low = _positive(rope, "low_freq_factor", 1.0)
    high = _positive(rope, "high_freq_factor", 1.0)
    if low >= high:
        raise ConfigError(
            f"rope_type 'llama3': low_freq_factor {low:g} is not below high_freq_factor {high:g}"
        )
    return {
        "factor": _positive(rope, "factor", 1.0),
        "original_max_position_embeddings": _original_context(fields, rope),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _experts(fields: dict, sizes: dict[str, int], family: families.Family) -> dict[str, Any]:
    return {
        **{name: sizes[name] for name in names.EXPERT_SIZES},
        # A softmax over the chosen experts alone is one over all, scaled to a sum of 1.
        "norm_topk_prob": family.stacked or _flag(fields, "norm_topk_prob"),
        "mlp_only_layers": tuple(fields.get("mlp_only_layers") or ()),
    }


def _yarn(fields: dict, rope: dict, theta: float) -> dict[str, Any]:
    if "factor" not in rope:
        raise ConfigError("rope_type 'yarn' lacks factor")
    if theta <= 1:
        raise ConfigError(f"rope_type 'yarn' needs a rope_theta above 1, not {shown(theta)}")
    original = _original_context(fields, rope)
    said = _without_nulls(rope)
    factor = _positive(said, "factor", _said_context(fields) / original)  # null means the ratio
    # A beta of 0 means the default, as in transformers.
    betas = {name: value for name, value in said.items() if value != 0}
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": _positive(betas, "beta_fast", 32.0),
        "beta_slow": _positive(betas, "beta_slow", 1.0),
        "attention_factor": _attention_factor(said, factor),
        "truncate": _flag(said, "truncate", True),
    }


def _attention_factor(rope: dict, factor: float) -> float | None:
    """The number by which a YaRN config multiplies cos and sin; None means 0.1 ln(factor) + 1.

    `attention_factor` is the complete value. `mscale` and `mscale_all_dim` together give a
    quotient, as in transformers. `attn_factor` multiplies the value that the others give, as in
    llama.cpp and in vLLM of 2025. DeepSeek-R1-0528-Qwen3-8B has 0.8782 = 1 / (0.1 ln 4 + 1), which
    cancels the sharpening. transformers ignores `attn_factor` with a warning.
    """
    if "attention_factor" in rope:
        return _positive(rope, "attention_factor", 1.0)
    own = None
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        above = _positive(rope, "mscale", 1.0)
        below = _positive(rope, "mscale_all_dim", 1.0)
        own = yarn_scale(factor, above) / yarn_scale(factor, below)
    if "attn_factor" not in rope:
        return own
    if own is None:
        own = yarn_scale(factor)
    return _positive(rope, "attn_factor", 1.0) * own
