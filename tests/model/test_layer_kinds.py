"""Models whose layers differ: windows by layer, layers without RoPE, two RoPE bases. Logits against transformers in one
pass, in random chunks, step by step and after tokens were taken back; then what the config of such a model may say.
"""

import pytest
import torch

from nanokv.attention import Causal, Masked, causal_mask, prefill_attention
from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.decoding.generation import generate
from nanokv.decoding.speculative import PromptLookup, speculate
from nanokv.errors import ConfigError, UnsupportedError
from nanokv.fast import optimize
from nanokv.inference import decode, prefill, score, verify_draft
from nanokv.lab.study.debug import record
from nanokv.lab.trace.recorder import Watch
from nanokv.sinks import with_sinks
from nanokv.windows import Window, band, within
from oracle import LAYERED, all_logits, gap, pair, random_ids, reference_logits, tiny_config

ALLOWED = 3e-5  # logits up to 8


@pytest.fixture(scope="module", params=LAYERED)
def models(request):
    return pair(**LAYERED[request.param])


def test_one_pass(models):
    reference, ours = models
    ids = random_ids(1, 2, 41)
    assert gap(score(ours, ids), reference_logits(reference, ids)) <= ALLOWED


@pytest.mark.parametrize("chunks", [(1,), (13, 1, 6), (5, 8, 3, 1, 1), (40, 1)])
def test_chunks_and_steps(models, chunks):
    reference, ours = models
    ids = random_ids(2, 2, 41)
    got = all_logits(ours, ids, make_cache("dict", ours.config, 2), chunks)
    assert gap(got, reference_logits(reference, ids)) <= ALLOWED


def test_a_long_text_over_windows_that_are_full(models):
    """More tokens than a window and its spare positions: old keys are gone from windowed layers only."""
    reference, ours = models
    ids = random_ids(3, 1, 150)
    cache = make_cache("growing", ours.config)
    got = all_logits(ours, ids, cache, (50, 1, 1, 30))
    assert gap(got, reference_logits(reference, ids)) <= ALLOWED
    held = [layer.sizes.held for layer in cache]
    window = ours.config.sliding_window
    assert held == [150 if seen is None else window - 1 + 64 for seen in ours.config.windows]


@pytest.mark.parametrize("name", ["dict", "static", "growing", "paged:page=3", "prefix"])
def test_tokens_that_are_taken_back(models, name):
    reference, ours = models
    ids, others = random_ids(4, 1, 100), random_ids(5, 1, 9)
    cache = make_cache(name, ours.config, capacity=128)
    all_logits(ours, ids, cache, (100,))
    for back in (1, 30, 50):
        cache.truncate(100 - back)
        got = verify_draft(ours, others, cache, 100 - back)
        whole = torch.cat((ids[:, : 100 - back], others), 1)
        assert gap(got, reference_logits(reference, whole)[:, -9:]) <= ALLOWED
        cache.truncate(100 - back)
        verify_draft(ours, ids[:, 100 - back :], cache, 100 - back)


def test_speculation_gives_the_same_tokens(models):
    _, ours = models
    ids = [3, 5, 8, 5, 8, 5, 8, 13] * 4
    plain = generate(ours, ids, max_new_tokens=90)
    drafted = speculate(ours, ids, PromptLookup(1), max_new_tokens=90)
    assert list(plain) == list(drafted)
    assert drafted.report.proposed > drafted.report.accepted  # wrong guesses were taken back


def test_the_config_is_written_and_read_again(models):
    _, ours = models
    assert Config.from_dict(ours.config.to_dict()) == ours.config


@pytest.mark.parametrize("name", ["smollm3", "olmo3", "gemma3_text"])
def test_patterns_without_lists_are_those_of_transformers(name):
    theirs = tiny_config(name, num_hidden_layers=13, rope_parameters=None)
    fields = theirs.to_dict()
    for absent in ("layer_types", "no_rope_layers", "rope_parameters"):
        fields.pop(absent, None)
    ours = Config.from_dict(fields)
    if name == "smollm3":
        assert [int(i not in ours.unrotated) for i in range(13)] == theirs.no_rope_layers
        return
    kinds = ["full_attention" if w is None else "sliding_attention" for w in ours.windows]
    assert kinds == theirs.layer_types
    assert ours.rope_theta == theirs.rope_parameters["full_attention"]["rope_theta"]
    assert ours.local_rope_theta == theirs.rope_parameters["sliding_attention"]["rope_theta"]


WRONG = {
    "one kind too few": ({"layer_types": ["full_attention"] * 6}, "6 kinds for 7 layers"),
    "another kind": ({"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
    "a window of 0": ({"sliding_window": 0}, "sliding_window is .0."),
    "soft caps": ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    "caps of logits": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    "both directions": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "an extended local context": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}},
        "factor",
    ),
    "another activation": ({"hidden_activation": "silu"}, "hidden_activation 'silu'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_changes_the_maths_is_refused_by_name(wrong):
    changes, words = WRONG[wrong]
    fields = tiny_config(**LAYERED["gemma3-G2"]).to_dict()
    Config.from_dict(fields)
    with pytest.raises(ConfigError, match=words):
        Config.from_dict(fields | changes)


def test_a_list_of_layers_without_rope_must_have_a_flag_per_layer():
    fields = tiny_config(**LAYERED["smollm3-G2"]).to_dict()
    with pytest.raises(ConfigError, match="5 zeros and ones"):
        Config.from_dict(fields | {"no_rope_layers": [1, 0]})


@pytest.mark.parametrize("name", ["sliding:window=6", "evicting:budget=6"])
def test_caches_that_drop_positions_themselves_are_refused(name):
    config = pair(**LAYERED["olmo3-G2"])[1].config
    with pytest.raises(UnsupportedError, match="4 of 5 layers of OLMo 3 have a window of 7"):
        make_cache(name, config)


def test_compiled_blocks_are_refused(models):
    _, ours = models
    with pytest.raises(ConfigError, match="layers of its own kinds"):
        optimize(ours, compile=32)


# --- the attention of a window --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "S"), [(1, 9), (4, 9), (9, 9), (3, 3), (700, 1500)])
def test_a_window_is_a_band_over_all_keys(T, S):
    """Whether the cache returned all keys or only the last ones that a query of these T may see."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, T, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, S, 16, generator=generator)
    width = 5
    query = torch.arange(S - T, S)[:, None]
    seen = (torch.arange(S) <= query) & (torch.arange(S) > query - width)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
    right = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double().repeat_interleave(2, 1)
    assert torch.equal(band(T, S, width), seen)
    least = min(S, T + width - 1)
    for keys, values in ((k, v), (k[:, :, -least:], v[:, :, -least:])):
        for attend in (Causal(), lambda q, k, v: Causal()(q, k, v)):
            if T > 9 and not isinstance(attend, Causal):
                continue  # one query at a time
            assert gap(within(attend, width)(q, keys, values), right) <= 1e-6


@pytest.mark.parametrize("block", [3, 5, 100])
def test_a_long_call_is_computed_in_blocks_each_with_its_rows_of_the_mask(block, monkeypatch):
    """Rows with padding of their own: every row of the mask is another."""
    T, S, width, pads = 12, 20, 4, torch.tensor([0, 7])
    q = torch.randn(2, 4, T, 16)
    k, v = torch.randn(2, 2, 2, S, 16)
    mask = causal_mask(T, S)[None, None] & (torch.arange(S) >= pads[:, None, None, None])
    mask[..., 0, 3] = mask[..., 5, 12] = False  # so that rows differ in more than the end
    blocks = [(a, min(a + block, T)) for a in range(0, T, block)]
    monkeypatch.setattr("nanokv.windows.row_blocks", lambda q, S: blocks)
    seen = mask & band(T, S, width)
    right = prefill_attention(q, k, v, seen)
    assert gap(within(Masked(mask), width)(q, k, v), right) <= 1e-6
    ours = with_sinks(within(Masked(mask), width), torch.zeros(4))
    lse = ((q @ k.repeat_interleave(2, 1).mT) / 4).masked_fill(~seen, -torch.inf).logsumexp(-1)
    assert gap(ours(q, k, v), right * lse.sigmoid()[..., None]) <= 1e-6


def test_a_window_wider_than_the_text_changes_nothing():
    q, k, v = torch.randn(3, 1, 2, 12, 16)
    assert gap(Window(Causal(), 12)(q, k, v), Causal()(q, k, v)) <= 1e-6
    assert torch.equal(band(12, 12, 12), causal_mask(12, 12))


def test_prefill_of_a_batch_with_padding_hides_padding_and_what_is_older(models):
    """Rows of different lengths beside each other give what each gives alone."""
    _, ours = models
    ids = random_ids(6, 2, 30)
    alone = [
        prefill(ours, ids[b : b + 1, :n], make_cache("dict", ours.config))
        for b, n in ((0, 30), (1, 11))
    ]
    batch = make_cache("batch", ours.config, 2)
    rows = [prefill(ours, ids[b : b + 1, :n], batch.rows[b]) for b, n in ((0, 30), (1, 11))]
    assert all(gap(one, two) == 0 for one, two in zip(alone, rows, strict=True))
    after = decode(ours, ids[:, :1], batch, batch.length)
    for b, n in ((0, 30), (1, 11)):
        cache = make_cache("dict", ours.config)
        prefill(ours, ids[b : b + 1, :n], cache)
        assert gap(after[b : b + 1], decode(ours, ids[b : b + 1, :1], cache, n)) <= ALLOWED


def test_instruments_that_know_plain_blocks_alone_refuse(models):
    """A picture of attention without its window, or a comparison of other operations, would be wrong."""
    _, ours = models
    with pytest.raises(UnsupportedError, match=f"{ours.config.family.title} has its own"):
        record(ours, random_ids(7, 1, 5))
    with pytest.raises(UnsupportedError, match=f"{ours.config.family.title} has its own"):
        Watch(ours, range(2))
