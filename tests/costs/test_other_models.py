"""`nanokv memory` for models that nanokv counts and does not run: equal to the byte to transformers' caches.

The oracle builds each architecture on torch's meta device and fills its cache: below the window, above it, and by a
prefill and decodes. Sizes are the defaults of transformers, with fewer layers.
"""

import json
import subprocess
import sys

import pytest

import transformers_fields
from cli_helpers import environment
from meta_cache import cached_bytes, model_of
from nanokv.costs.other import kinds
from nanokv.costs.other.estimate import count
from nanokv.costs.other.fields import table
from nanokv.costs.other.table import ARCHITECTURES
from nanokv.errors import ConfigError

L = "num_hidden_layers"
HYBRID = ["linear_attention", "full_attention"] * 4
FIELDS = {  # what a config of this architecture needs beside its defaults, and variants with other rules
    "bamba": [{"attn_layer_indices": [1, 5]}],
    "cohere2_moe": [{"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}],
    "deepseek_v2": [{"num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 64}],
    "deepseek_v4": [{}, {"compress_ratios": [0, 4, 128, 4, 0, 4, 128, 4]}],
    "falcon": [
        {},
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 8,
            "num_attention_heads": 32,
            "hidden_size": 64,
        },
    ],
    "gemma3_text": [{}, {"use_bidirectional_attention": True}, {"sliding_window_pattern": 3}],
    "gemma3n_text": [{L: 12, "num_kv_shared_layers": 5}],
    "gemma4_text": [
        {},
        {L: 12, "num_kv_shared_layers": 4},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 128},
        {"per_layer_config": {"5": {"head_dim": 64}, "7": {"head_dim": 64}}},
    ],
    "glm_moe_dsa": [{}, {"index_topk_freq": 3}, {"indexer_types": ["full", "shared"] * 4}],
    "granitemoehybrid": [
        {"layer_types": HYBRID},
        {"layers_block_type": ["mamba", "attention"] * 4},
    ],
    "hunyuan_v1_dense": [{"head_dim": 128}],
    "hunyuan_v1_moe": [{"head_dim": 128}],
    "kimi_linear": [
        {},
        {
            "linear_attn_config": {
                "full_attn_layers": [3, 8],
                "kda_layers": [1, 2, 4, 5, 6, 7],
                "num_heads": 16,
                "head_dim": 64,
                "short_conv_kernel_size": 3,
            }
        },
    ],
    "lfm2": [{"full_attn_idxs": [2, 5]}, {"layer_types": ["conv", "full_attention"] * 4}],
    "lfm2_moe": [{"layer_types": ["conv", "full_attention"] * 4}],
    "llama": [{}, {"num_key_value_heads": 8, "head_dim": 64}],
    "llama4_text": [{}, {"no_rope_layers": [1, 0] * 4}],
    "mimo_v2_flash": [{}, {"sliding_window_size": 100}],
    "minimax_m3_vl_text": [{}, {"layer_types": ["full_attention", "minimax_m3_sparse"] * 4}],
    "ministral": [{"head_dim": 128}],
    "mistral": [{}, {"sliding_window": None}],
    "nemotron": [{"head_dim": 128, "num_key_value_heads": 8}],
    "nemotron_h": [
        {"hybrid_override_pattern": "M*-EM"},
        {"layers_block_type": ["mamba", "moe", "attention"]},
    ],
    "olmo_hybrid": [
        {},
        {"linear_num_key_heads": 12, "linear_num_value_heads": 24, "linear_key_head_dim": 64},
    ],
    "phi3": [{}, {"sliding_window": 2048}],
    "qwen2": [{}, {"use_sliding_window": True, "max_window_layers": 3}],
    "qwen2_moe": [{}, {"use_sliding_window": True, "max_window_layers": 5}],
    "qwen3": [{"use_sliding_window": True, "max_window_layers": 3}],
    "qwen3_moe": [{"use_sliding_window": True}],
    "qwen3_next": [{}, {"full_attention_interval": 3, "linear_num_value_heads": 16}],
    "smollm3": [{}, {"use_sliding_window": True, "sliding_window": 512}],
    "zamba2": [{"layers_block_type": ["mamba", "hybrid", "mamba"]}],
}
SCANS = {"falcon_mamba", "jamba", "mamba", "zamba"}  # transformers computes them token by token
FIRST = """
bamba deepseek_v3 deepseek_v32 deepseek_v4 falcon_h1 gemma2 gemma3_text gemma3n_text gemma4_text gpt2 gpt_oss
kimi_linear lfm2 llama llama4_text mamba2 mimo_v2_flash mistral nemotron_h olmo3 olmo_hybrid qwen2 qwen3_5_text
""".split()
CASES = [
    pytest.param(
        name, fields, marks=[] if name in FIRST and not i else [pytest.mark.slow], id=f"{name}-{i}"
    )
    for name in sorted(ARCHITECTURES)
    for i, fields in enumerate(FIELDS.get(name, [{}]))
]


def small(name: str, fields: dict) -> dict:
    """The config.json of a model with few layers."""
    lists = [value for key, value in fields.items() if key in ("layer_types", "layers_block_type")]
    sizes = {} if name in ("nemotron_h", "gpt_neo") else {L: len(lists[0]) if lists else 8}
    return {"model_type": name} | sizes | fields


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_bytes_equal_transformers_cache(name, fields):
    config = small(name, fields)
    model = model_of(config, "bfloat16")
    longer = {"gpt_neo": 1500, "mpt": 1500}.get(name, 90 if name in SCANS else 9000)
    lengths = [[40], [longer, 1]]
    for tokens in lengths:
        counted = count(name, config, "bfloat16", sum(tokens))
        assert counted.cached(sum(tokens), 2) == cached_bytes(model, tokens, 2), tokens


def test_fp32_doubles_what_is_not_fp32_already():
    config = small("olmo_hybrid", {})
    for dtype in ("bfloat16", "float32"):
        found = count("x", config, dtype, 100).cached(100, 3)
        assert found == cached_bytes(model_of(config, dtype), [100], 3)


@pytest.mark.parametrize(
    ("outer", "name", "inner"),
    [
        (
            "gemma3",
            "gemma3_text",
            {"hidden_size": 640, L: 7, "sliding_window": 512},
        ),  # no model_type, no heads
        ("qwen3_5", "qwen3_5_text", {"model_type": "qwen3_5_text", L: 4}),
        ("llava", "mistral", {"model_type": "mistral", L: 3, "num_key_value_heads": 2}),
        ("mistral3", "mistral", {L: 3}),
    ],
)
def test_the_text_part_of_a_multimodal_config(outer, name, inner):
    """With the defaults of the text model inside."""
    counted = count(
        "x", {"model_type": outer, "torch_dtype": "bfloat16", "text_config": inner}, "auto", 700
    )
    assert counted.architecture == name and counted.dtype == "bfloat16"
    alone = {"model_type": name} | inner
    assert counted.cached(700, 1) == cached_bytes(model_of(alone, "bfloat16"), [700], 1)


@pytest.mark.slow
def test_the_table_is_that_of_transformers(monkeypatch):
    """After an update of transformers: python tests/tools/transformers_fields.py --write."""
    monkeypatch.setattr(transformers_fields.known, "table", table)
    assert transformers_fields.text_of(
        transformers_fields.made_table()
    ) == transformers_fields.FILE.read_text("utf-8")


def test_the_arithmetic_by_hand():
    """gpt-oss-120b: 36 layers, 8 KV heads of 64 in bf16; every second layer keeps 127 tokens; sinks are weights."""
    counted = count("gpt-oss", {"model_type": "gpt_oss", "dtype": "bfloat16"}, "auto", 131_072)
    row = 8 * 2 * 64 * 2
    assert counted.cached(131_072, 4) == 4 * 18 * row * (131_072 + 127)
    assert counted.cached(100, 1) == 36 * row * 100
    assert counted.per_token == 18 * row


def test_deepseek_keeps_the_latent_and_says_what_expanding_costs():
    """DeepSeek-V3: 512 + 64 numbers per token and layer; 128 heads × (128 + 64 + 128) expanded: 71 times as much."""
    counted = count("x", {"model_type": "deepseek_v3", "dtype": "bfloat16"}, "auto", 1000)
    assert counted.cached(1000, 1) == 61 * 576 * 2 * 1000
    assert counted.elsewhere() == {"keys and values expanded to every head": 61 * 40_960 * 2 * 1000}


def test_one_snapshot_of_qwen35_weighs_as_much_as_1584_tokens():
    """24 layers of 32 × 128 × 128 numbers in fp32 and 8,192 × 4 in bf16, beside 8 × 2 × 4 × 256 × 2 bytes per token."""
    counted = count("x", {"model_type": "qwen3_5_text", "dtype": "bfloat16"}, "auto", 1)
    assert counted.state == 24 * (32 * 128 * 128 * 4 + 8192 * 4 * 2) == 51_904_512
    assert counted.per_token == 32_768 and counted.snapshot_tokens() == 1584
    needed = 24 * (32 * 128 * 128 * 4 + 8192 * 3 * 2) + 32_768
    assert counted.elsewhere() == {kinds.COLUMNS: needed}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3_6"}, r"model_type 'qwen3_6' is not known"),
        ({"model_type": 5}, r"model_type 5 is not known"),
        ({"model_type": "whisper"}, r"model_type 'whisper' is not known"),
        (
            {"model_type": "gpt_oss", "kv_window_per_head": 64},
            r"kv_window_per_head 64 is no field of gpt_oss",
        ),
        (
            {"model_type": "gpt_oss", "shared_kv_groups": [1, 2]},
            r"shared_kv_groups \[1, 2\] is no field",
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["full_attention", "spiral"] * 18},
            r"layer_types has spiral",
        ),
        (
            {"model_type": "gpt_oss", "layer_types": ["full_attention"]},
            r"layer_types has 1 entries for 36 layers",
        ),
        ({"model_type": "gpt_oss", "layer_types": "full"}, r"a list of words was expected"),
        ({"model_type": "gpt_oss", "head_dim": -64}, r"head_dim is -64: a whole number above 0"),
        ({"model_type": "gpt_oss", "head_dim": 64.0}, r"head_dim is 64.0"),
        ({"model_type": "gpt_oss", "num_key_value_heads": True}, r"num_key_value_heads is True"),
        ({"model_type": "gpt_oss", "dtype": "float8"}, r"dtype 'float8' is not one of"),
        ({"model_type": "gpt_oss", "per_layer_config": [1]}, r"objects were expected"),
        (
            {"model_type": "gemma3", "text_config": [1]},
            r"text_config is \[1\]: an object was expected",
        ),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 35}, r"num_kv_shared_layers is 35"),
        ({"model_type": "kimi_linear", "linear_attn_config": 3}, r"linear_attn_config is 3"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
            r"hybrid_override_pattern is 'MX'",
        ),
        ({"model_type": "gpt2", "add_cross_attention": True}, r"add_cross_attention"),
        ({"model_type": "exaone4", "sliding_window": 0}, r"sliding_window is 0"),
        ({"model_type": "mamba"}, r"names no context"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
            r"kv_cache_scheme .* quantizes the cache",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        count("x", fields)


def test_a_field_that_is_off_or_harmless_is_no_reason_to_refuse():
    plain = {"model_type": "gpt_oss", "dtype": "bfloat16"}
    more = plain | {
        "kv_window_per_head": None,
        "use_cache": True,
        "share_heads": False,
        "rms_eps": 3,
        "eos_token_id": 2,
    }
    assert count("x", plain) == count("x", more)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def qwen35(tmp_path):
    fields = {
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": {"max_position_embeddings": 262_144},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_the_report_in_80_columns(cli, qwen35):
    code, out, err = cli("memory", qwen35, "--batch", 2, "--fits", "80GB")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    told = " ".join(out.split())
    assert "24 Gated DeltaNet – 51.90 MB 49.50 MiB 99.00 MiB" in told
    assert "8 full attention 32,768 B – 8.000 GiB 16.00 GiB" in told
    assert 'counted, not run: config.json: model_type "qwen3_5" is not implemented' in told
    assert "weighs as much as 1,584 tokens" in told
    assert "9 sequences of 262,144 tokens" in told and "the weights come on top" in told


def test_json_and_the_weights_beside_the_config(cli, qwen35):
    (qwen35 / "model.safetensors").write_bytes(b"x" * 1000)
    code, out, _ = cli("memory", qwen35, "--context", 1000, "--json", "--fits", "1GB")
    found = json.loads(out)
    assert code == 0 and not found["runs"] and found["weights_bytes"] == 1000
    assert found["kv_bytes"] == 51_904_512 + 32_768_000
    assert [(row["kind"], row["count"]) for row in found["layers"]] == [
        ("Gated DeltaNet", 24),
        ("full attention", 8),
    ]
    assert found["fits"]["max_batch"] == (10**9 - 1000) // found["kv_bytes"]


@pytest.mark.parametrize(
    "flags", [["--check"], ["--link", "1GB/s"], ["--cache", "paged"], ["--plot", "x.png"]]
)
def test_flags_that_need_a_model_that_runs_are_refused(cli, qwen35, flags):
    code, out, err = cli("memory", qwen35, *flags)
    assert (code, out) == (2, "") and err.splitlines()[1] == f"hint: leave out {flags[0]}"


def test_a_qwen3_with_a_window_is_counted_and_a_damaged_one_refused(cli, tmp_path):
    fields = json.loads((table_of_qwen3()).read_text())
    window = fields | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(window))
    code, out, _ = cli("memory", tmp_path, "--context", 1000)
    assert code == 0 and "counted, not run: use_sliding_window True" in " ".join(out.split())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": -1}))
    assert cli("memory", tmp_path)[0] == 2


def table_of_qwen3():
    import weights_loader

    return weights_loader.config_file("tiny")


def test_a_name_of_transformers_means_its_default_sizes(cli):
    code, out, _ = cli("memory", "deepseek_v3", "--context", 1000, "--json")
    found = json.loads(out)
    assert code == 0 and found["kv_bytes"] == 61 * 576 * 2 * 1000
    assert found["reason"] == "these are the default sizes of deepseek_v3 in transformers"


def test_counting_imports_neither_torch_nor_transformers(qwen35):
    code = (
        "import sys; from nanokv.apps.cli import main; assert main(['memory', sys.argv[1], '--json']) == 0; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code, qwen35], capture_output=True, env=environment(), check=True
    )


@pytest.mark.parametrize("typed", ["gpt-oss", "GPT_OSS", "gptoss"])
def test_a_model_type_in_another_spelling_is_suggested(cli, typed):
    code, out, err = cli("memory", typed)
    assert (code, out) == (2, "") and "hint: did you mean gpt_oss?" in err
