"""Llama, Qwen2 and Qwen3-MoE beside Qwen3: their config files, tensors and folders against transformers, and what is
refused by name. That their logits are transformers' is in test_model_parity.py; caches and kernels in test_matrix.py.
"""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from nanokv import costs
from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.decoding.generation import generate
from nanokv.errors import ConfigError
from nanokv.fast import optimize
from nanokv.inference import prefill, score
from nanokv.loading import load, skeleton
from nanokv.model import MixtureOfExperts
from oracle import (
    HYBRID,
    LAYERED,
    SHAPES,
    gap,
    pair,
    random_ids,
    reference_logits,
    tiny_config,
    tiny_reference,
)
from tiny_checkpoint import write_tokenizer
from weights_loader import CheckpointError, families, names

FAMILIES = {
    name: shape for name, shape in SHAPES.items() if shape.get("model_type", "qwen3") != "qwen3"
}  # the Qwen3 shapes have their tests in test_config.py and test_weights_loader.py
COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
PUBLISHED = {  # facts of config.json files on the hub
    "HuggingFaceTB/SmolLM2-135M-Instruct": COMMON
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "vocab_size": 49152,
    },
    "meta-llama/Llama-3.2-1B-Instruct": COMMON
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "vocab_size": 128256,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": COMMON
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen/Qwen3-30B-A3B": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
PARAMETERS = {  # as their model cards count them
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}


def published(name: str) -> dict:
    """A copy: transformers writes into what it is given."""
    return copy.deepcopy(PUBLISHED[name])


def llama(**changes) -> dict:
    return published("HuggingFaceTB/SmolLM2-135M-Instruct") | changes


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    config, fields = Config.from_dict(PUBLISHED[name]), PUBLISHED[name]
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    assert config.head_dim == fields.get("head_dim", width // heads), (
        "hidden / heads where the file is silent"
    )
    assert costs.parameters(config) == PARAMETERS[name]
    assert config.qk_norm == ("Qwen3" in name) and config.qkv_bias == ("Qwen2.5" in name)
    assert not config.output_bias


@pytest.mark.parametrize("name", [*PUBLISHED, *FAMILIES])
def test_tensors_are_those_of_transformers(name):
    """Names and shapes, against transformers' own model on the meta device; and ours has the same."""
    fields = published(name) if name in PUBLISHED else tiny_config(**SHAPES[name]).to_dict()
    if name == "Qwen/Qwen3-30B-A3B":
        fields |= {"num_hidden_layers": 2}  # 18,000 names otherwise
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    expected = {
        key: tuple(value.shape)
        for key, value in theirs.state_dict().items()
        if ".experts." not in key
    }
    shapes = names.expected(fields)
    assert {key: shape for key, shape in shapes.items() if ".experts." not in key} == expected
    for key, value in theirs.state_dict().items():
        if key.endswith("experts.gate_up_proj"):
            E, width, C = value.shape
            prefix = key.removesuffix("gate_up_proj")
            found = {
                shapes[f"{prefix}{expert}.{part}_proj.weight"]
                for expert in range(E)
                for part in ("gate", "up")
            }
            assert found == {(width // 2, C)} and f"{prefix}{E}.up_proj.weight" not in shapes
    ours = skeleton(Config.from_dict(fields)).state_dict()
    assert {names.to_hugging_face(key): tuple(p.shape) for key, p in ours.items()} == shapes


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_a_silent_config_has_the_defaults_of_its_family(family):
    """head_dim and KV heads are 128 and 32 for Qwen3 alone."""
    fields = tiny_config(model_type=family).to_dict()
    for name in ("head_dim", "num_key_value_heads"):
        fields.pop(name, None)
    sizes = {"num_attention_heads": 32, "hidden_size": 128}
    theirs = AutoConfig.for_model(**fields | sizes)
    ours = Config.from_dict(fields | sizes)
    assert ours.head_dim == getattr(theirs, "head_dim", 4) == 4
    assert (
        ours.num_key_value_heads
        == theirs.num_key_value_heads
        == {"llama": 32, "qwen2": 32, "qwen3_moe": 4}[family]
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_that_transformers_saved_is_read_and_ours_is_read_by_it(name, tmp_path):
    reference, ids = tiny_reference(**SHAPES[name]), random_ids(1, 2, 9)
    reference.save_pretrained(tmp_path / "theirs")
    write_tokenizer_for(tmp_path / "theirs")
    model, tokenizer = load(tmp_path / "theirs")
    assert gap(score(model, ids), reference_logits(reference, ids)) <= 1e-5
    model.save(tmp_path / "ours", tokenizer)
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", experts_implementation="eager"
    ).eval()
    assert type(back) is type(reference)
    assert torch.equal(reference_logits(back, ids), reference_logits(reference, ids))
    assert Config.from_folder(tmp_path / "ours") == model.config


@pytest.mark.parametrize("family", sorted(families.FAMILIES.keys() - {"qwen3_cla"}))
def test_a_backbone_that_transformers_saved_alone_is_read(family, tmp_path):
    """As Qwen3-Embedding was: `layers.0…` without `model.`, and the embedding is the head."""
    reference, ids = (
        tiny_reference(model_type=family, tie_word_embeddings=True),
        random_ids(1, 2, 9),
    )
    reference.model.save_pretrained(tmp_path)
    write_tokenizer_for(tmp_path)
    assert "Model" in json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    model, _ = load(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert gap(reference_logits(theirs, ids), reference_logits(reference, ids)) <= 1e-5
    assert gap(score(model, ids), reference_logits(theirs, ids)) <= 1e-5


CARRIED = {  # fields that published checkpoints carry and that switch nothing on, by the family
    "qwen3_moe": {  # Qwen3-Coder-30B-A3B-Instruct
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
        "max_window_layers": 28,
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
        "num_nextn_predict_layers": 0,
    },
    "qwen3": {
        "num_experts": 0,
        "rope_scaling": None,
        "use_qk_norm": True,
        "mlp_bias": False,
        "first_k_dense": 0,
    },
    "qwen2": {  # DeepSeek-R1-Distill-Qwen, and what trainers leave behind
        "use_mrope": False,
        "max_window_layers": 21,
        "sliding_window": 4096,
        "qkv_bias": True,
        "attention_bias": False,
        "_attn_implementation_autoset": True,
        "logit_scale": 1.0,
        "num_key_value_groups": 0,
    },
    "llama": {  # SmolLM2, Granite's names with neutral values, unsloth
        "rope_interleaved": False,
        "is_llama_config": True,
        "pretraining_tp": 1,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1,
        "unsloth_fixed": True,
        "head_dim": None,
        "use_rope": True,
        "sliding_window": 0,
        "final_logit_softcapping": None,
        "rope_scaling": {"type": "linear", "factor": 1.0},
    },
}


@pytest.mark.parametrize("family", CARRIED)
def test_fields_that_switch_nothing_on_leave_the_logits_of_transformers(family, tmp_path):
    sizes = (
        {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16} if family == "llama" else {}
    )
    reference, ids = tiny_reference(model_type=family, **sizes), random_ids(1, 2, 40)
    reference.save_pretrained(tmp_path)
    write_tokenizer_for(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    if "rope_scaling" in CARRIED[family]:
        fields.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(fields | CARRIED[family]))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert gap(score(load(tmp_path)[0], ids), reference_logits(theirs, ids)) <= 1e-5


def test_a_context_beyond_what_the_file_says_has_the_logits_of_transformers(tmp_path):
    """Qwen's recipe: YaRN is added and max_position_embeddings stays. 2,000 tokens, of which the file announces 640."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    reference = tiny_reference(rope_parameters=rope, max_position_embeddings=640)
    reference.save_pretrained(tmp_path / "it")
    write_tokenizer_for(tmp_path / "it")
    model, tokenizer = load(tmp_path / "it")
    assert model.config.max_position_embeddings == 2048
    ids = random_ids(0, 1, 2000)
    cache = make_cache("dict", model.config)
    assert gap(prefill(model, ids, cache, 0), reference_logits(reference, ids)[:, -1]) <= 1e-5
    model.save(tmp_path / "again", tokenizer)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert back.config.max_position_embeddings == 2048
    assert gap(reference_logits(back, ids), reference_logits(reference, ids)) == 0.0


def write_tokenizer_for(folder):
    """Of fewer ids than the embedding has rows."""
    write_tokenizer(folder)
    fields = json.loads((folder / "tokenizer.json").read_text())
    few = {token: id for token, id in fields["model"]["vocab"].items() if id < 100}
    fields["model"] |= {"vocab": few, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_answers_are_those_of_transformers(name, values):
    """48 tokens of three prompts, and again over two turns in one cache."""
    reference, ours = pair(6, **SHAPES[name])
    for seed in range(3):
        ids = random_ids(seed, 1, 4 + 5 * seed)
        sampler = (
            {"do_sample": bool(values), "top_k": 0, "top_p": 1.0} | values
            if values
            else {"do_sample": False}
        )
        with torch.random.fork_rng():
            set_seed(seed)
            theirs = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=48,
                pad_token_id=0,
                **sampler,
            )[0, ids.shape[1] :].tolist()
        cache = make_cache("dict", ours.config)
        assert list(generate(ours, ids, cache, max_new_tokens=48, seed=seed, **values)) == theirs
        more = torch.tensor([theirs[-1:] + [7, 8, 9]])  # the newest token is not in the cache yet
        whole = torch.cat((ids, torch.tensor([theirs]), more[:, 1:]), 1)
        assert (
            gap(prefill(ours, more, cache, cache.length), reference_logits(reference, whole)[:, -1])
            <= 1e-5
        )


# --- experts --------------------------------------------------------------------------------------------------------


def experts_of(model) -> list[MixtureOfExperts]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)]


@pytest.mark.parametrize("tokens", [1, 2, 3000])
@pytest.mark.parametrize("load", ["even", "one takes all", "one takes none"])
def test_experts_equal_those_of_transformers_whatever_their_load(tokens, load):
    reference, ours = pair(3, **SHAPES["moe-normed"])
    theirs, mine = reference.model.layers[1].mlp, ours.layers[1].mlp
    # Every token has a positive first channel, and the router listens to nothing else.
    if load != "even":
        gate = torch.zeros_like(mine.gate.weight)
        gate[0, 0] = 50.0 if load == "one takes all" else -50.0
        theirs.gate.weight.data.copy_(gate)
        mine.gate.weight.data.copy_(gate)
    x = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    x[..., 0] = 1.0
    counts = torch.bincount(mine.gate(x[0]).topk(2).indices.flatten(), minlength=6)
    if load != "even":
        assert counts[0] == (tokens if load == "one takes all" else 0)
    assert gap(mine(x), theirs(x)) <= 1e-5


def test_a_decode_step_reads_the_chosen_experts_only():
    """Bytes of the weights that a product touches: k experts of E, in each layer that has a router."""
    _, ours = pair(4, **SHAPES["moe-normed"])
    read = 0

    def count(module, args):
        nonlocal read
        read += sum(p.nbytes for p in module.parameters())

    for mlp in experts_of(ours):
        for expert in mlp.experts:
            expert.register_forward_pre_hook(count)
    score(ours, random_ids(5, 1, 1))  # no cache: the bytes of a decode step's products are the same
    sizes = ours.config.experts
    each = 3 * 64 * sizes.moe_intermediate_size * 4
    assert read == 3 * sizes.num_experts_per_tok * each < 3 * sizes.num_experts * each
    active = costs.active_weights(ours.config)
    attention = 3 * 2 * 64 * 32 * (4 + 2)
    assert active == attention + read // 4 + 3 * 64 * sizes.num_experts


def test_which_layers_have_experts():
    _, ours = pair(**SHAPES["moe-every-2nd"])  # 4 layers, every second, but not the last
    assert [isinstance(layer.mlp, MixtureOfExperts) for layer in ours.layers] == [
        False,
        True,
        False,
        False,
    ]
    assert costs.parameters(ours.config) == sum(p.numel() for p in ours.parameters())


@pytest.mark.parametrize("compile", [None, 32])
def test_no_kernel_routes_tokens_and_the_refusal_says_so(compile):
    _, ours = pair(**SHAPES["moe-normed"])
    with pytest.raises(ConfigError, match="Qwen3-MoE has experts") as caught:
        optimize(ours, compile=compile)
    assert "plain model" in caught.value.hint


# --- refused by name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["mistral", "gemma2", "gemma3", "olmo2", "phi3", "qwen3_next", "LLAMA", 7]
)
def test_other_families_are_refused_by_name(kind):
    with pytest.raises(ConfigError, match="model_type") as caught:
        Config.from_dict(llama(model_type=kind))
    assert str(kind) in str(caught.value) and ", llama," in caught.value.hint
    with pytest.raises(CheckpointError, match="model_type"):
        names.expected(llama(model_type=kind))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "mlp_bias", True),
        ("llama", "qk_norm", True),
        ("llama", "num_experts", 8),
        ("llama", "use_qk_norm", True),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "no_rope_layers", [1]),
        ("llama", "hidden_act", "gelu"),
        ("llama", "sliding_window", 4096),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "qk_norm", True),
        ("qwen2", "layer_types", ["sliding_attention"]),
        ("qwen2", "use_mrope", True),
        ("qwen3", "num_experts", 8),
        ("qwen3_moe", "num_experts_per_tok", 7),
        ("qwen3_moe", "num_experts", 0),
        ("qwen3_moe", "num_experts", 10**9),
        ("qwen3_moe", "mlp_only_layers", "all"),
        ("qwen3_moe", "norm_topk_prob", "yes"),
        ("qwen3_moe", "qk_norm", False),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("qwen3_moe", "num_local_experts", 7),
        ("llama", "num_experts_per_tok", 2),
    ],
)
def test_a_field_that_a_family_does_not_know_is_refused(family, field, value):
    fields = tiny_config(model_type=family).to_dict()
    if "num_local_experts" in fields and field == "num_local_experts":
        fields["num_experts"] = 6
    elif field == "num_experts":
        fields.pop("num_local_experts", None)
    Config.from_dict(fields)
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(fields | {field: value})
    assert field in str(caught.value)


def test_so_many_experts_that_their_names_alone_would_fill_the_memory():
    fields = tiny_config(model_type="qwen3_moe").to_dict() | {"num_hidden_layers": 9_999}
    fields |= {"num_experts": 9_999, "num_local_experts": 9_999}
    with pytest.raises(CheckpointError, match="99,980,001 experts in all layers"):
        names.expected(fields)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"low_freq_factor": None}, "lacks low_freq_factor"),
        ({"high_freq_factor": 1.0}, "is not below"),
        ({"factor": 0}, "factor is 0"),
        ({"factor": None}, "lacks factor"),
        ({"beta_fast": 32}, "beta_fast"),
        ({"original_max_position_embeddings": "x"}, "original_max_position_embeddings"),
    ],
    ids=str,
)
def test_a_llama3_rope_that_is_not_quite_one_is_refused(change, words):
    rope = published("meta-llama/Llama-3.2-1B-Instruct")["rope_scaling"]
    Config.from_dict(llama(rope_scaling=rope))
    with pytest.raises(ConfigError, match=words):
        Config.from_dict(llama(rope_scaling=rope | change))


def test_every_family_is_tried_here():
    """Qwen3-CLA is no class of transformers: tests/cache/test_shared_layers.py."""
    shapes = SHAPES | LAYERED | HYBRID
    tried = {shape.get("model_type", "qwen3") for shape in shapes.values()}
    assert tried | {"qwen3_cla"} == set(families.FAMILIES)
