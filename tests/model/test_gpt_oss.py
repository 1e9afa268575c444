"""gpt-oss against transformers: logits in any chunks, its sinks over masks and parts, folders, refusals."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import nanokv.sinks
from nanokv import costs
from nanokv.attention import Causal, Decode, Masked, causal_attention, causal_mask
from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.errors import ConfigError, UnsupportedError
from nanokv.inference import score, verify_draft
from nanokv.loading import load
from nanokv.parallel.context import ContextCache
from nanokv.parallel.group import Alone
from nanokv.parallel.merge import Split
from nanokv.rope import rope_frequencies
from nanokv.sinks import with_sinks
from nanokv.windows import band, within
from oracle import LAYERED, gap, pair, random_ids, reference_logits, tiny_config, tiny_reference
from tiny_checkpoint import write_tokenizer
from weights_loader import names

SHAPES = [name for name in LAYERED if name.startswith("gptoss")]


@pytest.fixture(scope="module", params=SHAPES)
def models(request):
    return pair(**LAYERED[request.param])


def test_logits_are_those_of_transformers(models):
    reference, ours = models
    ids = random_ids(1, 2, 100)
    assert gap(score(ours, ids), reference_logits(reference, ids)) < 3e-5


@pytest.mark.parametrize("spec", ["dict", "static", "paged"])
def test_chunks_and_steps_give_the_logits_of_one_pass(models, spec):
    reference, ours = models
    ids = random_ids(2, 2, 90)
    cache = make_cache(spec, ours.config, 2, 90)
    sizes = [1, 9, 30, 1, 1, 17, 2, 1, 28]
    parts = [verify_draft(ours, part, cache, cache.length) for part in ids.split(sizes, 1)]
    assert gap(torch.cat(parts, 1), reference_logits(reference, ids)) < 3e-5


# --- sinks ----------------------------------------------------------------------------------------


def attention_by_hand(q, k, v, sinks, visible):
    """In fp64: a softmax with one more column, whose value is 0. visible bool (…,T,S)."""
    B, H, T, D = q.shape
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))  # (B,H,S,D)
    scores = (q @ k.mT / D**0.5).masked_fill(~visible, -torch.inf)  # (B,H,T,S)
    column = sinks.double()[:, None, None].expand(B, H, T, 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]  # (B,H,T,S)
    return weights @ v


def random_heads(T: int, S: int, B: int = 2):
    generator = torch.Generator().manual_seed(T + S)
    q, k, v = (
        torch.randn(B, heads, n, 16, generator=generator) for heads, n in ((6, T), (2, S), (2, S))
    )
    return q, k, v, torch.randn(6, generator=generator) * 2


def hidden(B: int, T: int, S: int):
    """A causal mask (B,1,T,S) with padding in row 1: its first query sees no key."""
    mask = causal_mask(T, S).expand(B, 1, T, S).clone()
    mask[1, :, :, : S - T + 1] = False
    return mask


ATTENTIONS = {  # name → (attention of T queries over S keys, what it shows)
    "causal": lambda T, S: (Causal(), causal_mask(T, S)),
    "masked": lambda T, S: (Masked(hidden(2, T, S)), hidden(2, T, S)),
    "every key": lambda T, S: (Masked(None), torch.ones(T, S, dtype=torch.bool)),
    "split": lambda T, S: (Split(hidden(2, T, S), 3), hidden(2, T, S)),
    "a function": lambda T, S: (causal_attention, causal_mask(T, S)),
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize(("T", "S"), [(9, 9), (4, 21), (40, 43)])
def test_a_sink_is_one_more_score_per_query(name, T, S, window, monkeypatch):
    """Once, however the rows and keys are split. Split after split of the log-sum-exp."""
    q, k, v, sinks = random_heads(T, S)
    attend, visible = ATTENTIONS[name](T, S)
    attend = with_sinks(attend, sinks)
    if window is not None:
        attend, visible = within(attend, window), visible & band(T, S, window)
    right = attention_by_hand(q, k, v, sinks, visible)
    assert gap(attend(q, k, v), right.float()) < 2e-6
    monkeypatch.setattr("nanokv.sinks.ROWS", 7)
    monkeypatch.setattr("nanokv.sinks.SCORES", 7 * 12 * 4)  # four keys at a time
    assert gap(attend(q, k, v), right.float()) < 2e-6


def test_a_step_over_rows_of_different_lengths():
    q, k, v, sinks = random_heads(1, 8)
    visible = torch.arange(8) >= 8 - torch.tensor([[8], [3]])  # (B,S)
    visible = visible[:, None, None]  # (B,1,1,S)
    for attend in (Decode(visible), Decode(rows=torch.tensor([8, 3]))):
        right = attention_by_hand(q, k, v, sinks, visible)
        assert gap(with_sinks(attend, sinks)(q, k, v), right.float()) < 2e-6


def test_a_long_prompt_stores_few_scores(monkeypatch):
    """A mask of 256 rows and 2²⁴ scores at a time, whatever T and S."""
    largest = []
    inner = nanokv.sinks.by_keys

    def watched(q, k, mask):
        largest.append(mask.numel())
        return inner(q, k, mask)

    monkeypatch.setattr("nanokv.sinks.by_keys", watched)
    q, k, v, sinks = random_heads(1200, 1200, 1)
    with_sinks(Causal(), sinks)(q, k, v)
    assert max(largest) <= 256 * 1200
    largest.clear()
    within(with_sinks(Causal(), sinks), 128)(q, k, v)
    assert max(largest) <= 256 * (256 + 128)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_folders_are_read_both_ways(name, tmp_path):
    (tmp_path / "theirs").mkdir()
    rows = write_tokenizer(tmp_path / "theirs")
    reference, ids = tiny_reference(**LAYERED[name], vocab_size=rows), random_ids(1, 2, 20)
    reference.save_pretrained(tmp_path / "theirs")
    model, tokenizer = load(tmp_path / "theirs")
    assert gap(score(model, ids), reference_logits(reference, ids)) < 3e-5
    assert costs.parameters(model.config) == sum(x.numel() for x in reference.parameters())
    model.save(tmp_path / "ours", tokenizer)
    back = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", experts_implementation="eager"
    ).eval()
    assert type(back) is type(reference)
    assert torch.equal(reference_logits(back, ids), reference_logits(reference, ids))
    assert Config.from_folder(tmp_path / "ours") == model.config


PUBLISHED = {  # openai/gpt-oss-20b, without quantization_config
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}


def test_the_published_config():
    config = Config.from_dict(PUBLISHED)
    assert costs.parameters(config) == 20_914_757_184  # as published: 20.9 billion
    assert config.windows == (128, None) * 12 and config.max_position_embeddings == 131_072
    silent = ("layer_types", "sliding_window", "rope_scaling", "rope_theta", "head_dim")
    silent += ("num_key_value_heads", "attention_bias", "rms_norm_eps", "swiglu_limit")
    fields = {name: value for name, value in PUBLISHED.items() if name not in silent}
    assert Config.from_dict(fields) == config


def test_how_far_llama_cpp_is_from_the_published_rope():
    """It rounds the bounds of YaRN's ramp, as `truncate` does; docs/real-models.md has the numbers."""
    config = Config.from_dict(PUBLISHED)
    exact, _ = rope_frequencies(config)
    rounded, _ = rope_frequencies(replace(config, yarn=replace(config.yarn, truncate=True)))
    change = rounded / exact - 1
    assert len(change) == 32 and int((change.abs() > 1e-6).sum()) == 9
    assert change.max().item() == pytest.approx(0.763, abs=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_those_of_transformers(name):
    fields = tiny_config(**LAYERED[name]).to_dict()
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(fields)))
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert names.expected(fields) == shapes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "checkpoint is quantized"),
        ({"attention_bias": False}, "attention_bias False"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0"),
        ({"swiglu_limit": 10.0}, "swiglu_limit 10.0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"experts_per_token": 8}, "experts_per_token 8"),
        ({"initial_context_length": 8192}, "initial_context_length 8192"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers \[1\]"),
        ({"moe_intermediate_size": 99}, "moe_intermediate_size 99"),
        ({"norm_topk_prob": True}, "norm_topk_prob True"),
        ({"rope_local_base_freq": 1e4}, "rope_local_base_freq 10000.0"),
        ({"sliding_window_pattern": 3}, "sliding_window_pattern 3"),
        ({"rope_scaling": {"full_attention": {"factor": 2}}}, "full_attention"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(change, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        Config.from_dict(PUBLISHED | change)
    if "quantization_config" in change:
        assert "bf16" in refusal.value.hint and "mxfp4" in str(refusal.value)


def test_attention_without_a_place_for_sinks_is_refused():
    """Also where no layer has a window."""
    config = Config.from_dict(PUBLISHED | {"layer_types": ["full_attention"] * 24})
    with pytest.raises(UnsupportedError, match="no place for the sinks"):
        make_cache("evicting", config)
    with pytest.raises(UnsupportedError, match="each rank would count the sinks"):
        ContextCache(make_cache("dict", config), Alone())
