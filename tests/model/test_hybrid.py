"""Qwen3.5's text model: a recurrent state in most layers. Logits against transformers in one pass, in chunks, step by
step, with padding and after tokens were taken back; drafts, beams, batches and files as on every other model.
"""

import pytest
import torch

from nanokv import costs
from nanokv.cache import BatchCache, KVCache, PrefixPool, make_cache
from nanokv.cache.options import SPARE
from nanokv.cache.padded import PaddedCache
from nanokv.config import Config
from nanokv.decoding.beam import beam_search
from nanokv.decoding.generation import generate
from nanokv.decoding.speculative import PromptLookup, speculate
from nanokv.engine import Engine
from nanokv.errors import ConfigError, UnsupportedError
from nanokv.fast import optimize
from nanokv.inference import decode, prefill, score, verify_draft
from nanokv.loading import skeleton
from oracle import HYBRID, all_logits, gap, pair, random_ids, reference_logits, tiny_config
from weights_loader import names

ALLOWED = 3e-5  # logits up to 5; measured 7e-6 … 2e-5


@pytest.fixture(scope="module", params=HYBRID)
def models(request):
    return pair(**HYBRID[request.param])


@pytest.mark.parametrize("T", [1, 2, 41, 64, 65, 130])
def test_one_pass(models, T):
    reference, ours = models
    ids = random_ids(1, 2, T)
    assert gap(score(ours, ids), reference_logits(reference, ids)) <= ALLOWED


@pytest.mark.parametrize("chunks", [(1,), (13, 1, 6), (5, 8, 3, 1, 1), (40, 1)])
@pytest.mark.parametrize("kind", ["dict", "growing", "static"])
def test_chunks_and_steps(models, chunks, kind):
    reference, ours = models
    ids = random_ids(2, 2, 41)
    cache = make_cache(kind, ours.config, 2, 64)
    assert gap(all_logits(ours, ids, cache, chunks), reference_logits(reference, ids)) <= ALLOWED


@pytest.mark.parametrize("chunks", [(9,), (1,), (30, 1, 1), (64,)])
@pytest.mark.parametrize("back", [1, 7, 40, SPARE])
def test_tokens_that_are_taken_back(models, chunks, back):
    """The state after fewer tokens is that of a fresh run; the cache never asks the model."""
    reference, ours = models
    ids, others = random_ids(3, 2, 150), random_ids(4, 2, 6)
    cache = make_cache("dict", ours.config, 2)
    all_logits(ours, ids, cache, chunks)
    cache.truncate(150 - back)
    got = verify_draft(ours, others, cache, 150 - back)
    whole = torch.cat((ids[:, : 150 - back], others), 1)
    assert gap(got, reference_logits(reference, whole)[:, -6:]) <= ALLOWED
    cache.truncate(0)
    assert gap(prefill(ours, others, cache), reference_logits(reference, others)[:, -1]) <= ALLOWED


def test_truncations_at_random_beside_fresh_runs(models):
    """Twenty times: some tokens more, then some of them back, as drafts and edited turns do."""
    reference, ours = models
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    text, cache = random_ids(5, 1, 3), make_cache("growing", ours.config)
    prefill(ours, text, cache)
    for turn in range(20):
        more = random_ids(100 + turn, 1, draw(1, 20))
        got = verify_draft(ours, more, cache, cache.length)[:, -1]
        text = torch.cat((text, more), 1)
        assert gap(got, reference_logits(reference, text)[:, -1]) <= ALLOWED, f"turn {turn}"
        keep = text.shape[1] - draw(0, min(30, text.shape[1] - 1))
        cache.truncate(keep)
        text = text[:, :keep]


def test_a_state_goes_back_to_its_oldest_mark_and_no_further(models):
    _, ours = models
    cache = make_cache("dict", ours.config)
    prefill(ours, random_ids(6, 1, 100), cache)
    assert cache.sizes.max_rollback == 0  # one long chunk: a single mark at its end
    with pytest.raises(
        UnsupportedError, match="from 100 tokens to 99: its oldest state is that after 100"
    ):
        cache.truncate(99)
    assert {layer.length for layer in cache} == {100}  # no layer changed
    verify_draft(ours, random_ids(7, 1, 5), cache, 100)
    assert cache.sizes.max_rollback == 5
    cache.truncate(102)
    for step in range(140):
        decode(ours, random_ids(8 + step, 1, 1), cache, 102 + step)
    assert SPARE <= cache.sizes.max_rollback < 2 * SPARE


def test_speculation_gives_the_same_tokens(models):
    _, ours = models
    ids = [3, 5, 8, 5, 8, 5, 8, 13] * 4
    plain = generate(ours, ids, max_new_tokens=60)
    drafted = speculate(ours, ids, PromptLookup(1), max_new_tokens=60)
    assert list(plain) == list(drafted)
    assert drafted.report.proposed > drafted.report.accepted  # wrong guesses were taken back


def test_beams_are_those_of_the_dict_of_no_cache(models):
    """Rows change places; each hypothesis has the log-probability of a fresh pass over it."""
    _, ours = models
    ids = random_ids(9, 1, 9)[0].tolist()
    for beam in beam_search(ours, ids, beams=3, max_new_tokens=8, length_penalty=0.0):
        whole = torch.tensor([ids + beam.ids])
        logprobs = score(ours, whole).log_softmax(-1)[0, len(ids) - 1 : -1]
        fresh = logprobs.gather(1, whole[0, len(ids) :, None]).sum()
        assert abs(float(fresh) - beam.score) <= 1e-4


def test_rows_of_different_lengths_beside_each_other(models):
    _, ours = models
    ids, lengths = random_ids(10, 3, 30), (30, 4, 17)
    rows = [make_cache("dict", ours.config) for _ in lengths]
    for b, n in enumerate(lengths):
        prefill(ours, ids[b : b + 1, :n], rows[b])
    batch = BatchCache(rows, ours.config)
    steps = random_ids(11, 3, 4)
    got = [decode(ours, steps[:, :1], batch, batch.length)]
    got.append(verify_draft(ours, steps[:, 1:], batch, batch.length)[:, -1])
    batch.truncate([n + 2 for n in lengths])
    got.append(decode(ours, steps[:, 3:], batch, batch.length))
    for b, n in enumerate(lengths):
        alone = make_cache("dict", ours.config)
        prefill(ours, ids[b : b + 1, :n], alone)
        right = [decode(ours, steps[b : b + 1, :1], alone, n)]
        right.append(verify_draft(ours, steps[b : b + 1, 1:], alone, n + 1)[:, -1])
        alone.truncate(n + 2)
        right.append(decode(ours, steps[b : b + 1, 3:], alone, n + 2))
        for mine, other in zip(got, right, strict=True):
            assert gap(mine[b : b + 1], other) <= ALLOWED


def test_padding_never_reaches_a_state(models):
    """Prompts in one rectangle give what each gives alone, also after a row has left."""
    _, ours = models
    ids, lengths, T = random_ids(12, 3, 30), (3, 20, 11), 20
    pads = [T - n for n in lengths]
    cache = PaddedCache(make_cache("dict", ours.config, 3), pads)
    prompts = torch.stack(
        [torch.cat((ids[b, :0].new_zeros(p), ids[b, : T - p])) for b, p in enumerate(pads)]
    )
    prefill(ours, prompts[:, :8], cache, cache.length)
    got = prefill(ours, prompts[:, 8:], cache, cache.length)
    step = decode(ours, ids[:, -1:], cache, cache.length)
    cache.reorder([0, 2])
    last = decode(ours, ids[[0, 2], -2:-1], cache, cache.length)
    for b, n in enumerate(lengths):
        alone = make_cache("dict", ours.config)
        assert gap(got[b : b + 1], prefill(ours, ids[b : b + 1, :n], alone)) <= ALLOWED
        assert gap(step[b : b + 1], decode(ours, ids[b : b + 1, -1:], alone, n)) <= ALLOWED
        if b != 1:
            right = decode(ours, ids[b : b + 1, -2:-1], alone, n + 1)
            assert gap(last[[0, 2].index(b)][None], right) <= ALLOWED


@pytest.mark.parametrize("n", [5, 100])
def test_a_saved_cache_and_a_fork_are_continued(models, n, tmp_path):
    _, ours = models
    ids = random_ids(13, 1, n + 4)
    cache = make_cache("growing", ours.config)
    prefill(ours, ids[:, :n], cache)
    cache.save(tmp_path / "x.kv", ids[0, :n].tolist())
    loaded = KVCache.load(tmp_path / "x.kv", ours.config)
    fork = cache.fork()
    right = prefill(ours, ids[:, n:], cache, n)
    assert torch.equal(prefill(ours, ids[:, n:], loaded, n), right)
    assert torch.equal(prefill(ours, ids[:, n:], fork, n), right)


@pytest.mark.parametrize(
    "kind", ["paged", "prefix", "sliding:window=8", "evicting:budget=8", "offloaded"]
)
def test_caches_without_states_are_refused(models, kind):
    _, ours = models
    with pytest.raises(UnsupportedError, match=r"layers of Qwen3\.5 have a recurrent"):
        make_cache(kind, ours.config)


def test_the_engine_and_compiled_blocks_are_refused(models):
    _, ours = models
    with pytest.raises(UnsupportedError, match=r"layers of Qwen3\.5 have a recurrent"):
        Engine(ours)
    with pytest.raises(UnsupportedError, match=r"layers of Qwen3\.5 have a recurrent"):
        PrefixPool(ours.config, 4, 16)
    with pytest.raises(ConfigError, match="layers of its own kinds"):
        optimize(ours, compile=32)


# --- sizes and the config -------------------------------------------------------------------------------------------


def test_bytes_after_a_prompt_are_those_of_the_formula(models):
    _, ours = models
    cache = make_cache("dict", ours.config, 2)
    prefill(ours, random_ids(14, 2, 100), cache)
    assert cache.nbytes == costs.cache_bytes("dict", ours.config, 100, 2, 4)


def test_parameters_and_names(models):
    reference, ours = models
    state = skeleton(ours.config).state_dict()
    tied = ours.config.tie_word_embeddings
    count = sum(w.numel() for name, w in state.items() if not (tied and name == "lm_head.weight"))
    assert costs.parameters(ours.config) == count
    shapes = names.expected(reference.config.to_dict())
    theirs = {name: tuple(w.shape) for name, w in reference.state_dict().items()}
    assert shapes == theirs


def test_bytes_of_the_default_config():
    """A snapshot of Qwen3.5's default text config, by hand: S in fp32, 3 of 4 inputs of the convolution in bf16."""
    config = Config.from_dict({**tiny_config("qwen3_5_text").to_dict(), **DEFAULTS})
    assert config.states == 24
    each = 4 * 32 * 128 * 128 + 2 * (2 * 16 * 128 + 32 * 128) * 3
    assert costs.state_bytes(config, 2) == 24 * each == 51_511_296
    assert costs.kv_bytes_per_token(config, 2) == 2 * 8 * 4 * 256 * 2 == 32_768
    assert costs.state_bytes(config, 2) // 32_768 == 1_572  # tokens; transformers' K inputs: 1,584


DEFAULTS = {
    "num_hidden_layers": 32,
    "layer_types": None,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def test_the_config_is_written_and_read_again(models):
    _, ours = models
    assert Config.from_dict(ours.config.to_dict()) == ours.config


def test_the_pattern_without_a_list_is_that_of_transformers():
    theirs = tiny_config("qwen3_5_text", num_hidden_layers=13)
    fields = theirs.to_dict()
    del fields["layer_types"]
    assert list(Config.from_dict(fields).layer_types) == theirs.layer_types


WRONG = {
    "another kind": ({"layer_types": ["sliding_attention"] * 5}, "sliding_attention"),
    "a state in bf16": ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate"),
    "heads that do not divide": ({"linear_num_key_heads": 3}, "is not a multiple of"),
    "an odd number of dimensions": ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "pairs"),
    "no dimension": ({"rope_parameters": {"partial_rotary_factor": 0}}, "above 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_changes_the_maths_is_refused_by_name(wrong):
    changes, words = WRONG[wrong]
    fields = tiny_config(**HYBRID["qwen35-G2"]).to_dict()
    Config.from_dict(fields)
    with pytest.raises(ConfigError, match=words):
        Config.from_dict(fields | changes)
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        Config.from_dict(tiny_config("llama").to_dict() | {"partial_rotary_factor": 0.5})
