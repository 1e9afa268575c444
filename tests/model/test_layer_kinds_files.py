"""Files of SmolLM3, OLMo 3 and Gemma 3: config.json and folders against transformers, and what is refused by name.

Their logits over caches are in test_matrix.py, their GGUF files in tests/weights/test_gguf_layer_kinds.py.
"""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nanokv import costs
from nanokv.config import Config
from nanokv.errors import ConfigError
from nanokv.inference import score
from nanokv.loading import load, skeleton
from oracle import LAYERED, gap, random_ids, reference_logits, tiny_config, tiny_reference
from tiny_checkpoint import write_tokenizer
from weights_loader import names

COMMON = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
}
GEMMA = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
SLIDING, FULL = "sliding_attention", "full_attention"
PUBLISHED = {  # facts of config.json files on the hub
    "HuggingFaceTB/SmolLM3-3B": COMMON
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "bos_token_id": 128000,
        "eos_token_id": 128012,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": [FULL] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "allenai/Olmo-3-7B": COMMON
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "vocab_size": 100278,
    },
    "google/gemma-3-270m-it": GEMMA
    | {
        "_sliding_window_pattern": 6,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 3,
        "num_hidden_layers": 18,
        "use_bidirectional_attention": False,
    },
    "google/gemma-3-1b-it": GEMMA
    | {
        "cache_implementation": "hybrid",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "sliding_window_pattern": 6,
    },
}
EXPECTED = {  # RoPE bases of layers that see all, and of the others; window; the former's numbers
    "HuggingFaceTB/SmolLM3-3B": (5e6, None, None, range(36)),
    "allenai/Olmo-3-7B": (5e5, 5e5, 4096, range(3, 32, 4)),
    "google/gemma-3-270m-it": (1e6, 1e4, 512, range(5, 18, 6)),
    "google/gemma-3-1b-it": (1e6, 1e4, 512, range(5, 26, 6)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    """Windows and bases by hand; tensors are those of transformers' model on the meta device."""
    config = Config.from_dict(PUBLISHED[name])
    theta, local, window, full = EXPECTED[name]
    assert (config.rope_theta, config.local_rope_theta) == (theta, local)
    numbers = range(config.num_hidden_layers)
    assert config.windows == tuple(None if layer in full else window for layer in numbers)
    assert config.unrotated == (tuple(range(3, 36, 4)) if "SmolLM3" in name else ())
    assert config.tie_word_embeddings == ("Olmo" not in name)
    if config.yarn:
        assert (config.yarn.factor, config.local.yarn) == (8.0, None)
    fields = copy.deepcopy(PUBLISHED[name])  # transformers writes into what it is given
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    assert names.expected(PUBLISHED[name]) == shapes
    assert costs.parameters(config) == theirs.num_parameters()
    ours = skeleton(config).state_dict()
    assert {names.to_hugging_face(key): tuple(p.shape) for key, p in ours.items()} == shapes


@pytest.mark.parametrize("name", LAYERED)
def test_a_folder_that_transformers_saved_is_read_and_ours_is_read_by_it(name, tmp_path):
    reference, ids = tiny_reference(**LAYERED[name] | {"vocab_size": 320}), random_ids(1, 2, 40)
    reference.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs")
    model, tokenizer = load(tmp_path / "theirs")
    assert gap(score(model, ids), reference_logits(reference, ids)) <= 3e-5
    model.save(tmp_path / "ours", tokenizer)
    assert Config.from_folder(tmp_path / "ours") == model.config
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(reference)
    # The experts of a model that was read run by another function than those of `reference`.
    allowed = 1e-5 if name.startswith("gptoss") else 0
    assert gap(reference_logits(back, ids), reference_logits(reference, ids)) <= allowed


@pytest.mark.parametrize("family", ["smollm3", "olmo3", "gemma3_text"])
def test_a_silent_config_has_the_defaults_of_its_family(family):
    """Of transformers' class: windows, bases, layers without RoPE, tied embeddings, eps."""
    sizes = {
        "vocab_size": 151,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 13,
        "num_attention_heads": 8,
        "max_position_embeddings": 512,
    }
    theirs = AutoConfig.for_model(family, **sizes)
    ours = Config.from_dict(sizes | {"model_type": family})
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", 8)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope = theirs.rope_parameters
    if family == "smollm3":
        assert ours.rope_theta == rope["rope_theta"]
        rotated = [int(layer not in ours.unrotated) for layer in range(13)]
        assert rotated == theirs.no_rope_layers
        return
    assert list(ours.layer_types) == theirs.layer_types
    assert ours.sliding_window == theirs.sliding_window
    assert ours.rope_theta == rope[FULL]["rope_theta"]
    assert ours.local_rope_theta == rope[SLIDING]["rope_theta"]
    assert ours.query_pre_attn_scalar == getattr(theirs, "query_pre_attn_scalar", None)


BASES = {
    FULL: {"rope_type": "default", "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma3-G2", "attn_logit_softcapping", 50.0),
        ("gemma3-G2", "final_logit_softcapping", 30.0),
        ("gemma3-G2", "use_bidirectional_attention", True),
        ("gemma3-G2", "hidden_activation", "silu"),
        ("gemma3-G2", "layer_types", [SLIDING] * 6),
        ("gemma3-G2", "layer_types", ["chunked_attention"] * 7),
        ("gemma3-G2", "sliding_window", 0),
        ("gemma3-G2", "sliding_window", None),
        ("gemma3-G2", "query_pre_attn_scalar", 0),
        ("gemma3-G2", "no_rope_layers", [1] * 7),
        (
            "gemma3-G2",
            "rope_parameters",
            BASES | {FULL: BASES[FULL] | {"rope_type": "linear", "factor": 8.0}},
        ),
        (
            "gemma3-G2",
            "rope_parameters",
            BASES | {SLIDING: BASES[SLIDING] | {"rope_type": "linear", "factor": 8.0}},
        ),
        ("olmo3-G2", "layer_types", [FULL] * 4),
        ("olmo3-G2", "clip_qkv", 8.0),
        ("olmo3-G2", "query_pre_attn_scalar", 48),
        ("olmo3-G2", "rope_local_base_freq", 1e4),
        ("olmo3-G2", "sliding_window_pattern", 2),
        ("smollm3-G2", "use_sliding_window", True),
        ("smollm3-G2", "layer_types", [SLIDING] * 5),
        ("smollm3-G2", "no_rope_layers", [1, 1, 1, 0]),
        ("smollm3-G2", "no_rope_layers", [1, 1, 1, 0, 2]),
        ("smollm3-G2", "mlp_bias", True),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(name, field, value):
    fields = tiny_config(**LAYERED[name]).to_dict()
    Config.from_dict(fields)
    words = "linear|with factor" if field == "rope_parameters" else field
    with pytest.raises(ConfigError, match=words):
        Config.from_dict(fields | {field: value})


def test_gemmas_linear_rope_of_4b_is_refused():
    fields = PUBLISHED["google/gemma-3-1b-it"]
    with pytest.raises(ConfigError, match="linear"):
        Config.from_dict(fields | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
