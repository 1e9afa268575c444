"""config.json: published ones are read right, and what is not implemented or malformed raises with name and value."""

import json
import warnings

import pytest
from transformers import Qwen3Config

import nanokv.config_file as module
from nanokv.config import Config, GenerationConfig
from nanokv.errors import ConfigError, NanoKVError
from oracle import tiny_config, tiny_reference
from weights_loader import names
from weights_loader.strict import CheckpointError

pytestmark = pytest.mark.sampled

FAMILY = {  # layers, hidden, heads, KV heads, intermediate, tied
    "0.6B": (28, 1024, 16, 8, 3072, True),
    "1.7B": (28, 2048, 16, 8, 6144, True),
    "4B": (36, 2560, 32, 8, 9728, True),
    "8B": (36, 4096, 32, 8, 12288, False),
    "14B": (40, 5120, 40, 8, 17408, False),
    "32B": (64, 5120, 64, 8, 25600, False),
}
SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.fixture
def fields():
    """A config.json as published for Qwen3 (transformers 4 spelling), small sizes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "max_window_layers": 3,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151,
    }


# --- what is accepted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", FAMILY)
def test_published_configs_of_the_dense_family(qwen3_files, size):
    config = Config.from_folder(qwen3_files / size)
    layers, hidden, heads, kv_heads, intermediate, tied = FAMILY[size]
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (
        layers,
        hidden,
        heads,
    )
    assert (config.num_key_value_heads, config.intermediate_size) == (kv_heads, intermediate)
    assert config.tie_word_embeddings == tied
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (
        128,
        151936,
        40960,
    )
    assert (config.rope_theta, config.yarn, config.rms_norm_eps) == (1e6, None, 1e-6)
    assert (config.attention_bias, config.torch_dtype) == (False, "bfloat16")
    assert Config.from_folder(qwen3_files / size / "config.json") == config


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True},
        {"rope_parameters": YARN | {"rope_theta": 1e6}},
        {
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "attention_factor": 1.5, "beta_fast": 20, "beta_slow": 2}
        },
        {"rope_parameters": None},
    ],
    ids=["default", "untied-bias", "yarn", "yarn-all-fields", "no-rope"],
)
def test_what_save_pretrained_writes_is_read(tmp_path, changes):
    reference = tiny_reference(**changes)
    reference.save_pretrained(tmp_path)
    config = Config.from_folder(tmp_path)
    theirs = reference.config
    same = {
        *SIZES,
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
    }
    # Which YaRN extends.
    for name in same - ({"max_position_embeddings"} if config.yarn else set()):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (config.yarn is not None) == (theirs.rope_parameters["rope_type"] == "yarn")
    assert config.torch_dtype == "float32"


def test_every_field_that_transformers_knows_is_read_or_known_harmless():
    """The long form (`use_diff=False`) names every field of PreTrainedConfig and Qwen3Config."""
    written = json.loads(tiny_config().to_json_string(use_diff=False))
    assert len(written) > 30
    assert Config.from_dict(written) == Config.from_dict(tiny_config().to_dict())


@pytest.mark.parametrize(
    "extra",
    [
        {"unsloth_fixed": True, "unsloth_version": "2025.5.1"},
        {"_name_or_path": "Qwen/Qwen3-0.6B", "_attn_implementation_autoset": True},
        {
            "pad_token_id": 151654,
            "temperature": 0.6,
            "top_k": 20,
            "max_length": 40,
            "do_sample": True,
        },
        {
            "attention_dropout": 0.1,
            "initializer_range": 0.5,
            "use_cache": False,
            "max_window_layers": 1,
        },
        {"sliding_window": 4096, "use_sliding_window": False},
        {
            "quantization_config": None,
            "quantization": {},
            "auto_map": {"AutoModel": "m.M"},
            "anything": None,
        },
        {
            "original_max_position_embeddings": 2048,
            "model_max_length": 512,
            "max_sequence_length": 512,
            "seq_length": 64,
        },
        {"hidden_act": "swish"},
        {"hidden_activation": "silu", "activation_function": "swish"},
        {"attention_bias": None},
        {
            "resid_pdrop": 0.1,
            "hidden_dropout_prob": 0.1,
            "router_z_loss_coef": 0.01,
            "init_std": 0.006,
        },
        {"image_token_id": 9, "unk_token_id": 0, "mask_token_ids": [3]},
        {
            "use_flash_attention_2": True,
            "use_flashattn": True,
            "use_cache": False,
            "unsloth_something": 3,
        },
        {"layer_types": ["full_attention"] * 3},
        {"id2label": {"0": "A"}, "label2id": {"A": 0}, "problem_type": None, "pruned_heads": {}},
        {
            "partial_rotary_factor": 1.0,
            "qk_norm": True,
            "mlp_bias": False,
            "use_mrope": False,
            "num_experts": 0,
        },
    ],
)
def test_fields_that_do_not_change_the_maths_are_ignored(fields, extra):
    assert Config.from_dict(fields | extra) == Config.from_dict(fields)


def test_dtype_may_be_spelled_in_three_ways(fields):
    del fields["torch_dtype"]
    assert Config.from_dict(fields).torch_dtype == "float32"
    assert Config.from_dict(fields | {"dtype": "float16"}).torch_dtype == "float16"
    assert Config.from_dict(fields | {"torch_dtype": "torch.bfloat16"}).torch_dtype == "bfloat16"
    assert (
        Config.from_dict(fields | {"dtype": "bfloat16", "torch_dtype": "float16"}).torch_dtype
        == "bfloat16"
    )


# --- defaults, as transformers' -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "absent", ["rope_theta", "head_dim", "tie_word_embeddings", "attention_bias", "rms_norm_eps"]
)
def test_an_absent_field_means_what_it_means_to_transformers(fields, absent):
    """theta 10,000 (not 1e6), head_dim 128 (not hidden / heads), not tied, no bias, eps 1e-6."""
    del fields[absent]
    theirs = Qwen3Config(**{k: v for k, v in fields.items() if k != "model_type"})
    expected = (
        theirs.rope_parameters["rope_theta"] if absent == "rope_theta" else getattr(theirs, absent)
    )
    assert getattr(Config.from_dict(fields), absent) == expected
    assert expected == {"rope_theta": 10_000, "head_dim": 128, "rms_norm_eps": 1e-6}.get(
        absent, False
    )


def test_null_kv_heads_are_all_heads_and_absent_ones_are_32(fields):
    assert Config.from_dict(fields | {"num_key_value_heads": None}).num_key_value_heads == 4
    assert Qwen3Config(**fields | {"num_key_value_heads": None}).num_key_value_heads == 4
    del fields["num_key_value_heads"]
    assert Qwen3Config(**fields).num_key_value_heads == 32
    assert Config.from_dict(fields | {"num_attention_heads": 64}).num_key_value_heads == 32
    with pytest.raises(
        ConfigError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 32"
    ):
        Config.from_dict(fields)


def test_legacy_and_new_rope_spellings_agree(fields):
    legacy = Config.from_dict(fields | {"rope_scaling": YARN})
    older = {("type" if name == "rope_type" else name): value for name, value in YARN.items()}
    older = Config.from_dict(fields | {"rope_scaling": older})
    both = fields | {"rope_parameters": YARN | {"rope_theta": 1000000}}
    new = {k: v for k, v in both.items() if k not in ("rope_theta", "rope_scaling")}
    assert legacy == older == Config.from_dict(both) == Config.from_dict(new)
    assert legacy.rope_theta == 1e6
    assert (legacy.yarn.factor, legacy.yarn.original_max_position_embeddings) == (4.0, 32768)
    assert (legacy.yarn.beta_fast, legacy.yarn.beta_slow, legacy.yarn.attention_factor) == (
        32.0,
        1.0,
        None,
    )


def test_theta_inside_rope_parameters_counts(fields):
    del fields["rope_theta"]
    assert (
        Config.from_dict(
            fields | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
        ).rope_theta
        == 5e6
    )
    assert (
        Config.from_dict(fields | {"rope_parameters": {"rope_type": "default"}}).rope_theta
        == 10_000
    )
    assert (
        Config.from_dict(fields | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}).rope_theta
        == 10_000
    )
    assert Config.from_dict(fields | {"rope_scaling": {}}).yarn is None


def test_yarn_without_its_original_context_uses_the_maximum(fields):
    rope = {"rope_type": "yarn", "factor": 4.0}
    theirs = Qwen3Config(**fields | {"rope_scaling": dict(rope)})
    ours = Config.from_dict(fields | {"rope_scaling": rope}).yarn
    assert (
        ours.original_max_position_embeddings
        == theirs.rope_parameters["original_max_position_embeddings"]
        == 512
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"attention_factor": 0.9}},
        {"attention_bias": True, "tie_word_embeddings": False, "rope_theta": 123.5},
    ],
)
def test_to_dict_is_a_config_json_for_us_and_for_transformers(fields, changes):
    config = Config.from_dict(fields | changes)
    written = json.loads(json.dumps(config.to_dict()))
    assert Config.from_dict(written) == config
    theirs = Qwen3Config(**{k: v for k, v in written.items() if k != "model_type"})
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert Config.from_dict(theirs.to_dict()) == config


# --- what is refused, with its name and value -----------------------------------------------------------------------

NOT_IMPLEMENTED = {
    "hidden_act": "gelu",
    "use_sliding_window": True,
    "partial_rotary_factor": 0.5,
    "num_experts": 128,
    "qk_norm": False,
    "use_qk_norm": False,
    "mlp_bias": True,
    "add_cross_attention": True,
    "is_encoder_decoder": True,
    "pruned_heads": {"0": [1]},
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.0625,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "query_pre_attn_scalar": 144,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
    "quantization": {"bits": 4},
    "compression_config": {"quant_method": "compressed-tensors"},
    "per_layer_config": {"0": {"head_dim": 64}},
    "causal": False,
    "is_causal": False,
    "use_rope": False,
    "rope": 0,
    "use_rotary_position_embeddings": False,
    "use_rms_norm": False,
    "swiglu": False,
    "no_rope_layers": [1, 0, 1],
    "logits_scaling": 0.0,
    "attention_scale": 0,
    "rotary_pct": 0.0,
    "attention_scaling": True,
    "qkv_bias": True,
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "rms_norm_offset": 1.0,
    "use_something_new": True,
    "position_embedding_type": "alibi",
    "norm_type": "layernorm",
    "scoring_func": "sigmoid",
    "n_group": 8,
    "hidden_activation": "relu2",
}


@pytest.mark.parametrize("name", NOT_IMPLEMENTED)
def test_a_field_that_changes_the_maths_is_refused_by_name_and_value(fields, name):
    value = NOT_IMPLEMENTED[name]
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(fields | {name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


OFF = {
    "qkv_bias": (False, 0, None),
    "shared_expert_intermediate_size": (0, None, False),
    "n_shared_experts": (0,),
    "num_nextn_predict_layers": (0,),
    "use_qk_norm": (True, None),
    "use_something_new": (False, 0, 0.0, "", [], {}),
    "sliding_window_pattern": (None, 0, []),
    "no_rope_layers": ([], None),
    "attn_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (1, 1.0, None),
    "residual_multiplier": (1.0,),
    "routed_scaling_factor": (1.0,),
    "lora": ({},),
    "scoring_func": ("softmax",),
    "position_embedding_type": ("rope", None),
    "norm_type": ("rmsnorm",),
    "n_group": (1, 0, None),
    "topk_group": (1,),
    "decoder_sparse_step": (1, None),
    "num_local_experts": (0, None),
    "eos_token": ("</s>",),
    "cache_implementation": ("static",),
    "tie_word_embeddings": (True,),
    "gradient_checkpointing_kwargs": ({"use_reentrant": False},),
    "rotary_pct": (1.0, 1),
    "partial_rotary_factor": (1, None),
    "rms_norm_offset": (0, 0.0),
    "scale_embeddings": (0,),
    "use_rope": (True, None),
    "is_causal": (True,),
    "use_rms_norm": (True,),
    "rope": (True,),
    "mlp_bias": (0, None),
    "num_experts": (0, None, False),
    "use_mrope": (0, None),
    "pruned_heads": ([], None),
    "use_logit_scale": (False,),
}


@pytest.mark.parametrize("name", OFF)
def test_a_value_that_switches_nothing_on_changes_nothing_whatever_the_name(fields, name):
    """transformers computes the same with it, because it reads no such field, or reads it so."""
    plain = Config.from_dict(fields)
    for value in OFF[name]:
        assert Config.from_dict(fields | {name: value}) == plain, value


@pytest.mark.parametrize("name", ["quantization_config", "quantization", "compression_config"])
def test_the_hint_of_a_quantized_checkpoint_names_the_original(fields, name):
    with pytest.raises(ConfigError, match="the checkpoint is quantized") as caught:
        Config.from_dict(fields | {name: {"bits": 4}})
    assert "original" in caught.value.hint


def test_a_long_value_is_cut_in_the_message(fields):
    with pytest.raises(
        ConfigError, match=r"vision_config .{70,80}\.\.\. is not implemented"
    ) as caught:
        Config.from_dict(fields | {"vision_config": {str(i): i for i in range(1000)}})
    assert len(str(caught.value)) < 250
    assert "vision_config" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["model_type", "rms_norm_eps", "dtype", "rope_parameters", "\x1b[2J" + "k" * 100_000]
)
def test_no_message_is_as_long_or_as_wild_as_the_file(fields, name):
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(fields | {name: "\x1b\x9b" + "x" * 100_000})
    assert len(str(caught.value) + caught.value.hint) < 400 and str(caught.value).isprintable()


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        {"rope_type": "proportional"},
        {"type": "linear", "factor": 2.0},
        {"rope_type": None},
    ],
    ids=lambda rope: str(next(iter(rope.values()))),
)
def test_other_rope_types_are_refused(fields, spelling, rope):
    kind = rope.get("rope_type", rope.get("type"))
    with pytest.raises(ConfigError, match=f"rope_type {kind!r}"):
        Config.from_dict(fields | {spelling: rope})


@pytest.mark.parametrize(
    ("rope", "names"),
    [
        (YARN | {"mscale": "x", "mscale_all_dim": 1.0}, ["mscale", "'x'"]),
        (YARN | {"mscale": 1.0, "mscale_all_dim": -7.2}, ["mscale_all_dim", "-7.2"]),
        (YARN | {"truncate": "no"}, ["truncate", "'no'"]),
        (YARN | {"apply_yarn_scaling": False}, ["apply_yarn_scaling", "False"]),
        (YARN | {"extrapolation_factor": 0.5}, ["extrapolation_factor", "0.5"]),
        (YARN | {"attn_factor": 0}, ["attn_factor", "0"]),
        (YARN | {"attn_factor": [1.0]}, ["attn_factor", "[1.0]"]),
        (YARN | {"factor": 1e9}, ["factor", "1e+09", "32,768"]),
        ({"rope_type": "linear", "factor": 1.5}, ["linear"]),
        (YARN | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.25},
            ["partial_rotary_factor", "0.25"],
        ),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, ["mrope_section", "24"]),
        ({"rope_type": "default", "factor": 4.0}, ["factor", "4.0"]),
        ({"full_attention": {"rope_type": "default"}}, ["full_attention"]),
        ({"rope_type": "yarn"}, ["yarn", "factor"]),
        (YARN | {"factor": "4"}, ["factor", "'4'"]),
        (YARN | {"factor": 0}, ["factor", "0"]),
        (YARN | {"original_max_position_embeddings": 0}, ["original_max_position_embeddings", "0"]),
        (
            YARN | {"original_max_position_embeddings": 1.5},
            ["original_max_position_embeddings", "1.5"],
        ),
        (YARN | {"attention_factor": -1.0}, ["attention_factor", "-1.0"]),
        (YARN | {"beta_fast": "x"}, ["beta_fast", "'x'"]),
        (YARN | {"rope_theta": 1.0}, ["yarn", "rope_theta"]),
        ("yarn", ["rope_parameters", "'yarn'"]),
        ([4.0], ["rope_parameters", "4.0"]),
    ],
    ids=str,
)
def test_a_rope_that_is_not_quite_ours_is_refused(fields, rope, names):
    del fields["rope_theta"]
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(fields | {"rope_parameters": rope})
    for name in names:
        assert name in str(caught.value)


def test_values_that_transformers_assumes_anyway_are_accepted_in_a_rope(fields):
    rope = YARN | {
        "truncate": True,
        "partial_rotary_factor": 1.0,
        "mscale": None,
        "mrope_section": [],
        "beta_fast": 0,
    }
    rope |= {
        "mrope_interleaved": False,
        "extrapolation_factor": 1.0,
        "apply_yarn_scaling": True,
        "finetuned": True,
    }
    assert Config.from_dict(fields | {"rope_scaling": rope}) == Config.from_dict(
        fields | {"rope_scaling": YARN}
    )


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {},
        False,
        {"rope_type": "default"},
        {"type": "default", "factor": 1.0},
        {"type": "linear", "factor": 1.0},
    ],
    ids=str,
)
def test_a_rope_that_extends_nothing(fields, rope):
    assert Config.from_dict(fields | {"rope_scaling": rope}) == Config.from_dict(fields)


@pytest.mark.parametrize(
    ("said", "rope", "context"),
    [
        (1280, {"factor": 4.0, "original_max_position_embeddings": 1024}, 4096),  # Qwen's recipe
        (131072, {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (8192, {"factor": 2.0, "original_max_position_embeddings": 2048}, 8192),
        (1280, {"factor": 2.5, "original_max_position_embeddings": 1025}, 2562),
        (512, {"factor": 4.0}, 2048),  # the original is all that the file says, as in transformers
        (4096, {"factor": None, "original_max_position_embeddings": 1024}, 4096),
    ],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_yarn_extends_the_context_and_the_written_config_says_so(
    fields, spelling, said, rope, context
):
    del fields["rope_scaling"]
    config = Config.from_dict(
        fields | {"max_position_embeddings": said, spelling: {"rope_type": "yarn"} | rope}
    )
    assert config.max_position_embeddings == context
    written = config.to_dict()
    assert Config.from_dict(written) == config and written["max_position_embeddings"] == context


@pytest.mark.parametrize("said", [None, "512", 0, [512]])
@pytest.mark.parametrize(
    "rope", [YARN, YARN | {"factor": None}, {"rope_type": "yarn", "factor": 4.0}], ids=str
)
def test_yarn_beside_a_context_that_is_none(fields, said, rope):
    fields |= {"max_position_embeddings": said, "rope_scaling": rope}
    for bad in (
        fields,
        {name: value for name, value in fields.items() if name != "max_position_embeddings"},
    ):
        with pytest.raises(ConfigError, match="max_position_embeddings"):
            Config.from_dict(bad)


def test_llama3_says_its_whole_context_itself(fields):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert Config.from_dict(fields | {"rope_scaling": rope}).max_position_embeddings == 512


def test_one_rope_in_two_spellings_may_leave_out_what_the_other_says(fields):
    new = YARN | {"rope_theta": 1e6}
    both = Config.from_dict(fields | {"rope_parameters": new, "rope_scaling": YARN})
    assert both == Config.from_dict(fields | {"rope_parameters": new})


@pytest.mark.parametrize(
    ("rope", "scale"),
    [
        ({}, 1.138629436),
        ({"attention_factor": 0.75}, 0.75),
        ({"attn_factor": 0.8782488562869419}, 1.0),
        ({"attn_factor": 0.5}, 0.569314718),
        ({"attention_factor": 0.75, "attn_factor": 0.5}, 0.75),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707}, 1.138629436),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attn_factor": 0.5}, 0.5324108),
        ({"factor": 1.0, "attn_factor": 0.9}, 0.9),
    ],
    ids=str,
)
def test_attention_factor_replaces_and_attn_factor_multiplies(fields, rope, scale):
    """0.1 ln 4 + 1 = 1.1386; DeepSeek-R1-0528-Qwen3-8B multiplies it by 0.8782, which makes 1."""
    config = Config.from_dict(fields | {"rope_scaling": YARN | rope})
    assert config.yarn.scale == pytest.approx(scale, rel=1e-6)
    assert Config.from_dict(config.to_dict()) == config


def test_contradictions_are_refused(fields):
    with pytest.raises(
        ConfigError, match=r"rope_theta is 1000000\.0, but rope_parameters says 5000000\.0"
    ):
        Config.from_dict(fields | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}})
    with pytest.raises(ConfigError, match="contradicts rope_scaling"):
        Config.from_dict(
            fields | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}
        )


@pytest.mark.parametrize(
    "kinds", [["full_attention", "sliding_attention"], ["linear_attention"], "sliding_attention"]
)
def test_other_layer_types_are_refused(fields, kinds):
    with pytest.raises(ConfigError, match=r"layer_types holds (sliding|linear)_attention"):
        Config.from_dict(fields | {"layer_types": kinds})


@pytest.mark.parametrize("name", SIZES)
def test_a_missing_size_is_named(fields, name):
    del fields[name]
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        Config.from_dict(fields)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, 10**12, [64], float("nan")], ids=str)
@pytest.mark.parametrize("name", [*SIZES, "head_dim", "num_key_value_heads"])
def test_an_absurd_size_is_refused_with_its_value(fields, name, value):
    with pytest.raises(ConfigError, match=name) as caught:
        Config.from_dict(fields | {name: value})
    assert repr(value) in str(caught.value)
    if name in names.SIZES:
        with pytest.raises(CheckpointError) as loader:
            names.expected(fields | {name: value})
        assert str(loader.value) == str(caught.value), "one rule, written once"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head_dim", 33),
        ("head_dim", None),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 8),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", -1e-6),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", 2.0),
        ("rms_norm_eps", None),
        ("rope_theta", 0),
        ("rope_theta", "1e6"),
        ("rope_theta", None),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("rope_theta", True),
        ("tie_word_embeddings", 1),
        ("tie_word_embeddings", "true"),
        ("attention_bias", 0),
        ("torch_dtype", "float8_e4m3fn"),
        ("dtype", "int8"),
        ("torch_dtype", 16),
        ("hidden_act", None),
        ("hidden_act", "relu"),
        ("model_type", None),
    ],
    ids=lambda v: str(v)[:20],
)
def test_malformed_values_are_refused(fields, name, value):
    with pytest.raises(ConfigError, match=name.removeprefix("torch_")):
        Config.from_dict(fields | {name: value})


@pytest.mark.parametrize("not_an_object", [[], "qwen3", None, 3])
def test_a_config_that_is_no_object(not_an_object):
    with pytest.raises(ConfigError, match="not an object"):
        Config.from_dict(not_an_object)


def test_unreadable_files_are_named(tmp_path):
    for content in ("{", "", "\x00"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
            Config.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        Config.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError):
        Config.from_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        Config.from_folder(tmp_path)
    assert issubclass(ConfigError, NanoKVError)
    assert issubclass(ConfigError, ValueError)


# --- generation_config.json -----------------------------------------------------------------------------------------


def test_published_generation_config(qwen3_files):
    config = GenerationConfig.from_folder(qwen3_files / "0.6B")
    assert config.eos_token_ids == (151645, 151643)
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.6, 20, 0.95, 0.0)


def test_without_do_sample_the_checkpoint_is_greedy(tmp_path):
    """transformers ignores temperature and top_k of a file that does not say `do_sample: true`."""
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.9, "top_k": 7, "eos_token_id": 5}'
    )
    assert GenerationConfig.from_folder(tmp_path) == GenerationConfig(eos_token_ids=(5,))


def test_without_a_file_eos_comes_from_config_json(tmp_path):
    assert GenerationConfig.from_folder(tmp_path) == GenerationConfig()
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 4], "vocab_size": 9}')
    assert GenerationConfig.from_folder(tmp_path).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert GenerationConfig.from_folder(tmp_path).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 8, "do_sample": true}')
    assert GenerationConfig.from_folder(tmp_path) == GenerationConfig(
        (8,), temperature=1.0, top_k=50
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "[" * 100_000,
        '{"eos_token_id": "x"}',
        '{"eos_token_id": [-1]}',
        '{"eos_token_id": [true]}',
        '{"do_sample": true, "temperature": "hot"}',
        '{"do_sample": true, "top_k": [1]}',
        '{"do_sample": "false"}',
        '{"do_sample": true, "top_k": 2.9}',
    ],
    ids=lambda text: text[:40],
)
def test_malformed_generation_config_raises_a_config_error(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(
        ConfigError, match=r"generation_config|eos_token_id|temperature|top_k|do_sample"
    ):
        GenerationConfig.from_folder(tmp_path)


def warned(fields: dict) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GenerationConfig.from_dict(fields)
    assert len(caught) <= 1, "one warning names them all"
    return str(caught[0].message) if caught else ""


def test_every_field_of_transformers_has_its_place():
    """Read, neutral at certain values, or without effect; and no name is misspelt here."""
    from transformers import GenerationConfig as Reference

    places = [
        set(module.SAMPLED),
        set(module.NEUTRAL),
        set(module.NEUTRAL_SAMPLED),
        set(module.NO_EFFECT),
    ]
    fields = {name for name in Reference().to_dict() if not name.startswith("_")} | {
        "transformers_version"
    }
    assert set.union(*places) == fields and sum(map(len, places)) == len(fields)
    neutral = module.NEUTRAL | module.NEUTRAL_SAMPLED
    for name, value in Reference._get_default_generation_params().items():
        if name in neutral:
            assert value is None or value in neutral[name], name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("num_beams", 4),
        ("suppress_tokens", [5, 6]),
        ("min_new_tokens", 8),
        ("bad_words_ids", [[3]]),
        ("guidance_scale", 1.5),
        ("forced_eos_token_id", 0),
        ("penalty_alpha", 0.6),
        ("exponential_decay_length_penalty", [5, 1.1]),
        ("max_time", 0.5),
        ("stop_strings", "a"),
        ("cache_implementation", "quantized"),
        ("sequence_bias", [[[1], -10.0]]),
        ("encoder_repetition_penalty", 1.2),
        ("frequency_penalty", 0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("sampled", [True, False])
def test_a_field_that_is_not_implemented_is_named_with_its_value(name, value, sampled):
    """They were ignored in silence: the answers were others than those of transformers, and nobody could know why."""
    assert f"{name} {value!r}" in warned({name: value, "do_sample": sampled, "eos_token_id": 3})


@pytest.mark.parametrize(
    ("name", "value"), [("typical_p", 0.9), ("top_h", 0.4), ("epsilon_cutoff", 3e-4)]
)
def test_a_filter_counts_only_where_tokens_are_drawn(name, value):
    assert f"{name} {value!r}" in warned({name: value, "do_sample": True})
    assert warned({name: value, "do_sample": False}) == warned({name: value}) == ""


def test_neutral_values_and_published_files_warn_of_nothing(qwen3_files, tmp_path):
    from transformers import GenerationConfig as Reference

    assert (
        warned(Reference._get_default_generation_params() | {"transformers_version": "4.51.0"})
        == ""
    )
    for path in qwen3_files.glob("*/generation_config.json"):
        assert warned(json.loads(path.read_text())) == ""
    # Qwen3-0.6B-Base.
    base = {"bos_token_id": 1, "do_sample": False, "eos_token_id": 1, "max_new_tokens": 2048}
    assert warned(base) == ""
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 4, "num_beams": 3, "architectures": ["x"]}'
    )
    with pytest.warns(match=r"generation_config\.json: .*: num_beams 3$"):
        GenerationConfig.from_folder(tmp_path)


def test_a_warning_is_short_however_much_there_is_to_say():
    text = warned({f"x{i}" + "y" * 10_000: "z" * 10_000 for i in range(50)})
    assert len(text) < 1200 and "and 45 more" in text


@pytest.mark.parametrize("value", [[], "", 0, 1, {}, "true"], ids=repr)
def test_do_sample_is_true_or_false(value):
    """An empty list counted as false."""
    with pytest.raises(ConfigError, match="do_sample is"):
        GenerationConfig.from_dict({"do_sample": value, "temperature": 0.5})
