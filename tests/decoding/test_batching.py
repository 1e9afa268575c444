"""Prompts of different lengths in one batch: every row must say what it says alone, whoever its neighbours are.

Alone means nanokv.generate, which other tests compare with transformers; the batch as a whole is compared with
transformers' generate on left-padded prompts too. The last tests measure what prefilling in chunks is for: memory.
"""

import subprocess
import sys

import pytest
import torch

import nanokv
from cli_helpers import environment
from nanokv.cache import CACHES, make_cache
from nanokv.cache.padded import PaddedCache
from nanokv.decoding import batching
from nanokv.decoding.batching import generate_padded, generate_ragged
from nanokv.decoding.generation import SamplingParams, generate
from nanokv.errors import CacheError, CapacityError, ContextError, GenerationError, UnsupportedError
from nanokv.inference import prefill, prefill_chunks, score
from oracle import ANSWER, SHAPES, TOLERANCE, defaults, gap, interrupt_at, pair, random_ids

pytestmark = pytest.mark.sampled

LENGTHS = (3, 11, 1, 7)
PROMPTS = [random_ids(i, 1, n)[0].tolist() for i, n in enumerate(LENGTHS)]
NEW = 8


@pytest.fixture(scope="module")
def models():
    return pair(**SHAPES["G2-untied-bias"])


@pytest.fixture(scope="module")
def alone(models):
    """What each prompt gives by itself, never stopped."""
    return [
        list(generate(models[1], prompt, max_new_tokens=NEW, eos_token_ids=[]))
        for prompt in PROMPTS
    ]


@pytest.fixture(params=[generate_padded, generate_ragged])
def way(request):
    return request.param


def test_every_row_equals_its_solo_run(models, alone, way):
    assert way(models[1], PROMPTS, max_new_tokens=NEW, eos_token_ids=[]) == alone
    assert (
        way(models[1], PROMPTS[::-1], max_new_tokens=NEW, eos_token_ids=[], chunk=4) == alone[::-1]
    )


@pytest.mark.parametrize("cache", ["static", "growing", "paged", "prefix"])
def test_padded_rows_of_the_bundled_model_say_the_same_on_the_fast_one(cache):
    """In words, as a user meets it: short rows once read their padding on every cache that kernels write in place."""
    plain, tokenizer = nanokv.load("tiny")
    fast = nanokv.optimize(nanokv.load("tiny")[0])
    questions = (
        "Hello!",
        "My name is Zorbla. I live in Oslo. What is my name?",
        "What is a KV cache?",
        "12 + 30 = ?",
    )
    prompts = [
        tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]))
        for text in questions
    ]
    own = make_cache(cache, plain.config, len(prompts), 200)
    assert generate_padded(fast, prompts, own) == [
        list(generate(plain, prompt)) for prompt in prompts
    ]


def test_rows_equal_transformers_with_left_padding(models, alone, way):
    reference, model = models
    pads = [max(LENGTHS) - n for n in LENGTHS]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(pads, PROMPTS, strict=True)])
    seen = torch.tensor([[0] * pad + [1] * n for pad, n in zip(pads, LENGTHS, strict=True)])
    eos = [alone[0][4], alone[3][2]]  # rows end at different steps
    with torch.inference_mode():
        out = reference.generate(
            ids,
            attention_mask=seen,
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=eos,
            pad_token_id=0,
        )[:, ids.shape[1] :]
    ours = way(model, PROMPTS, max_new_tokens=NEW, eos_token_ids=eos)
    assert len({len(row) for row in ours}) > 1
    for row, theirs in zip(ours, out.tolist(), strict=True):
        assert row == theirs[: len(row)]
        assert not any(theirs[len(row) :])  # only padding follows
        assert len(row) == NEW or row[-1] in eos


def test_rows_that_ended_leave_the_batch(models, alone, way):
    """A batch that drags finished rows along costs the longest answer times all rows."""
    _, model = models
    eos, sizes = [alone[0][4], alone[3][2]], []
    ours = way(model, PROMPTS, max_new_tokens=NEW, eos_token_ids=eos)
    hook = model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape))
    try:
        way(model, PROMPTS, max_new_tokens=NEW, eos_token_ids=eos)
    finally:
        hook.remove()
    decodes = sizes[1:] if way is generate_padded else sizes[len(PROMPTS) :]
    assert [rows for rows, _ in decodes] == [
        sum(len(row) > step for row in ours) for step in range(1, max(map(len, ours)))
    ]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.9, "top_k": 20}, {"temperature": 1.2, "repetition_penalty": 1.3}]
)
def test_sampling_with_a_seed_a_row_equals_solo(models, way, params):
    """One generator for the batch would make a row's text depend on its neighbours."""
    _, model = models
    seeds = [11, 12, 13, 11]
    expected = [
        list(generate(model, prompt, max_new_tokens=NEW, eos_token_ids=[5], seed=seed, **params))
        for prompt, seed in zip(PROMPTS, seeds, strict=True)
    ]
    rows = [SamplingParams(seed=seed, **params) for seed in seeds]
    assert way(model, PROMPTS, max_new_tokens=NEW, params=rows, eos_token_ids=[5]) == expected


@pytest.mark.parametrize("name", sorted(CACHES))
def test_both_ways_work_over_every_cache(models, alone, name):
    _, model = models
    options = {"quantized": {"residual": 64}}.get(name, {})  # nothing is quantized yet: exact
    inner = make_cache(name, model.config, len(PROMPTS), capacity=32, **options)
    assert generate_padded(model, PROMPTS, inner, NEW, eos_token_ids=[]) == alone
    of = {} if name == "batch" else {"of": name}
    rows = make_cache("batch", model.config, len(PROMPTS), capacity=32, **of, **options)
    assert generate_ragged(model, PROMPTS, rows, NEW, eos_token_ids=[]) == alone


def test_a_window_slides_over_padding(models):
    """Distances decide what a window holds, and padding in front changes none of them."""
    _, model = models
    expected = [
        list(
            generate(
                model, prompt, make_cache("sliding", model.config, window=5), NEW, eos_token_ids=[]
            )
        )
        for prompt in PROMPTS
    ]
    cache = make_cache("sliding", model.config, len(PROMPTS), window=5)
    assert generate_padded(model, PROMPTS, cache, NEW, eos_token_ids=[]) == expected
    cache = make_cache("batch", model.config, len(PROMPTS), of="sliding", window=5, sinks=2)
    generate_ragged(model, PROMPTS, cache, NEW)
    with pytest.raises(UnsupportedError, match="sinks"):
        generate_padded(model, PROMPTS, make_cache("sliding", model.config, 4, window=5, sinks=2))


def test_ragged_rows_go_on_from_what_they_hold(models, alone):
    """A second turn: each row's cache has its first turn, and only the new tokens are given."""
    _, model = models
    cache = make_cache("batch", model.config, len(PROMPTS))
    for prompt, row in zip(PROMPTS, cache.rows, strict=True):
        if len(prompt) > 2:
            prefill(model, [prompt[:2]], row, 0)
    rest = [prompt[2:] or prompt for prompt in PROMPTS]
    assert generate_ragged(model, rest, cache, NEW, eos_token_ids=[]) == alone


@pytest.mark.parametrize("name", ["dict", "static"])
def test_padded_logits_equal_every_row_alone(models, name):
    _, model = models
    cache = PaddedCache(make_cache(name, model.config, 2, capacity=16), [4, 0])
    ids = torch.tensor([[0] * 4 + PROMPTS[1][:5], PROMPTS[1][:9]])
    assert cache.length.tolist() == [-4, 0] and cache.sizes.batch_size == 2
    assert cache.capacity == (12 if name == "static" else None)
    for part in ids.split([2, 4, 3], dim=1):
        logits = prefill(model, part, cache, cache.length)
    assert cache.length.tolist() == [5, 9]
    assert gap(logits[:1], score(model, ids[:1, 4:])[:, -1]) <= TOLERANCE
    assert gap(logits[1:], score(model, ids[1:])[:, -1]) <= TOLERANCE
    before = cache.nbytes
    other = cache.fork()
    other.reorder([1])
    prefill(model, ids[:1, :3], other, other.length)
    other.truncate(torch.tensor([9]))
    assert (
        other.length.tolist() == [9] and cache.length.tolist() == [5, 9] and cache.nbytes == before
    )
    cache.truncate([2, 6])
    assert cache.length.tolist() == [2, 6]
    again = prefill(model, ids[:, 6:], cache, cache.length)
    assert gap(again, logits) <= TOLERANCE


def test_a_padded_cache_is_copied_only_when_a_row_ends(models, alone, monkeypatch):
    copied, drop = [], batching._drop_rows
    monkeypatch.setattr(
        batching, "_drop_rows", lambda cache, keep: (copied.append(keep), drop(cache, keep))[1]
    )
    assert (
        generate_padded(models[1], PROMPTS, max_new_tokens=NEW, eos_token_ids=[]) == alone
        and copied == []
    )
    first = alone[0][2]
    generate_padded(models[1], PROMPTS[:2], max_new_tokens=NEW, eos_token_ids=[first])
    assert copied == [[1]] and first not in alone[0][:2] + alone[1]


def test_what_a_padded_cache_cannot_do_is_refused(models, tmp_path):
    config = models[1].config
    cache = PaddedCache(make_cache("dict", config, 2), [3, 0])
    # The file would not say where the padding is.
    with pytest.raises(UnsupportedError, match="saved"):
        cache.save(tmp_path / "cache")
    with pytest.raises(UnsupportedError, match="same column"):
        cache.truncate([2, 2])
    with pytest.raises(CacheError, match="pads"):
        PaddedCache(make_cache("dict", config, 2), [-1, 0])


def test_a_padded_cache_goes_back_to_lengths_it_had_and_to_its_beginning(models):
    _, model = models
    cache = PaddedCache(make_cache("dict", model.config, 2), [3, 0])
    columns = random_ids(0, 2, 5)
    whole = prefill(model, columns, cache, cache.length)
    cache.truncate([1, 4])
    assert cache.length.tolist() == [1, 4] and cache.inner.length == 4
    for start in (4, 0):
        cache.truncate(cache.length if start else 0)
        assert cache.inner.length == start
        again = prefill(model, columns[:, start:], cache, cache.length)
        assert gap(again, whole) <= TOLERANCE


def test_a_full_cache_ends_the_ragged_rows_one_by_one(models):
    _, model = models
    cache = make_cache("batch", model.config, len(PROMPTS), capacity=13, of="static")
    answers = generate_ragged(model, PROMPTS, cache, 50, eos_token_ids=[])
    assert [len(row) for row in answers] == [11, 3, 13, 7]
    assert [row.length for row in cache.rows] == [13] * 4  # every row holds all but its last token


def test_padding_that_would_cut_an_answer_is_refused(models):
    """Alone, a prompt of 3 has 11 new tokens in 13 slots; behind 8 columns of padding only 3."""
    _, model = models

    def static(capacity):
        return make_cache("static", model.config, len(PROMPTS), capacity=capacity)

    with pytest.raises(
        CapacityError,
        match=r"prompt 0 \(3 tokens\) may get 11 new tokens, but .* room for 3 after 8",
    ) as e:
        generate_padded(model, PROMPTS, static(13), 50, eos_token_ids=[])
    assert e.value.hint == "a capacity of 21, max_new_tokens=3, or generate_ragged"
    with pytest.raises(CapacityError, match="room for 3 after"):
        generate_padded(
            model, [[1] * 4, [1] * 14], make_cache("static", model.config, 2, capacity=16), NEW
        )
    expected = [
        list(generate(model, prompt, max_new_tokens=3, eos_token_ids=[])) for prompt in PROMPTS
    ]
    assert generate_padded(model, PROMPTS, static(13), 3, eos_token_ids=[]) == expected


@pytest.mark.parametrize("at", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("kind", ["dict", "paged"])
def test_an_interrupted_ragged_batch_leaves_every_row_as_it_was(
    models, alone, monkeypatch, kind, at
):
    """In a prefill or in a decode, after rows have left: all rows are there, and go on from before."""
    _, model = models
    cache = make_cache("batch", model.config, len(PROMPTS), of=kind)
    prefill(model, [PROMPTS[1][:2]], cache.rows[1], 0)
    rest = [PROMPTS[0], PROMPTS[1][2:], *PROMPTS[2:]]
    eos = [alone[0][1]]
    interrupt_at(monkeypatch, model.layers[1], at)
    with pytest.raises(KeyboardInterrupt):
        generate_ragged(model, rest, cache, NEW, eos_token_ids=eos)
    monkeypatch.undo()
    assert [{part.length for part in row} for row in cache.rows] == [{0}, {2}, {0}, {0}]
    assert generate_ragged(model, rest, cache, NEW, eos_token_ids=[]) == alone


def test_wrong_batches_are_refused_before_any_work(models, way):
    _, model = models
    with pytest.raises(GenerationError, match="no prompts"):
        way(model, [])
    with pytest.raises(GenerationError, match="prompt 1: the prompt is empty"):
        way(model, [[1], []])
    with pytest.raises(GenerationError, match="prompt 1: id 999"):
        way(model, [[1], [2, 999]])
    with pytest.raises(GenerationError, match="1 sampling params for 2 prompts"):
        way(model, [[1], [2]], params=[SamplingParams()])
    with pytest.raises(ContextError):
        way(model, [[1], [2] * 600])


def test_a_cache_that_does_not_fit_the_batch_is_refused(models):
    _, model = models
    used = make_cache("dict", model.config)
    prefill(model, [[1, 2]], used, 0)
    with pytest.raises(CacheError, match="holds 2 tokens"):
        generate_padded(model, [[1]], used)
    with pytest.raises(CacheError, match="2 prompts"):
        generate_ragged(model, [[1], [2]], make_cache("dict", model.config, 2))


# --- chunked prefill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 7, 50])
def test_chunks_give_the_same_logits(models, chunk):
    _, model = models
    ids = random_ids(3, 2, 21)
    cache = make_cache("growing", model.config, 2)
    assert gap(prefill_chunks(model, ids, cache, 0, chunk), score(model, ids)[:, -1]) <= TOLERANCE
    assert cache.length == 21
    more = torch.cat((ids, ids[:, :5]), 1)
    assert (
        gap(prefill_chunks(model, more[:, 21:], cache, 21, chunk=2), score(model, more)[:, -1])
        <= TOLERANCE
    )


@pytest.mark.parametrize("chunk", [0, -1, 2.5, None])
def test_a_chunk_is_at_least_one_token(models, chunk):
    with pytest.raises(ValueError, match="chunk is"):
        prefill_chunks(models[1], [[1, 2]], make_cache("dict", models[1].config), 0, chunk)


PEAK = """
import pathlib, re, resource, sys, torch
torch.set_num_threads(1)
def peak():  # in kB; ru_maxrss alone would begin with what the test process had when it started this one
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:[^0-9]*([0-9]+)", pathlib.Path("/proc/self/status").read_text())[1])
from nanokv.config import Config
from nanokv.inference import prefill, prefill_chunks
from nanokv.cache import make_cache
from nanokv.model import Qwen3
sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=6144, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, head_dim=16, max_position_embeddings=8192, tie_word_embeddings=True)
torch.manual_seed(0)
model = Qwen3(Config.from_dict({"model_type": "qwen3", **sizes})).eval()
ids = torch.randint(97, (1, 4096))
def run(tokens):
    cache = make_cache("static", model.config, capacity=4096)
    chunk = int(sys.argv[1])
    return prefill_chunks(model, tokens, cache, 0, chunk) if chunk else prefill(model, tokens, cache, 0)
run(ids[:, :32])  # libraries and thread buffers are not what is measured
before = peak()
logits = run(ids)
print(peak() - before, *logits[0].tolist())
"""


@pytest.mark.slow
def test_chunks_bound_the_peak_memory():
    """4,096 tokens through an MLP 6,144 wide: 100 MB an activation at once, 6 MB in chunks of 256."""
    peaks, logits = {}, {}
    for chunk in (0, 256):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(chunk)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peak, *values = done.stdout.split()
        # ru_maxrss: bytes there, kB elsewhere.
        peaks[chunk] = int(peak) * (1 if sys.platform == "darwin" else 1024)
        logits[chunk] = torch.tensor([float(value) for value in values])
    assert gap(logits[0], logits[256]) <= TOLERANCE
    assert peaks[0] > 100e6  # otherwise nothing was measured
    assert peaks[256] < peaks[0] / 4


def test_who_says_nothing_gets_64_greedy_tokens_per_row():
    for function in (generate_padded, generate_ragged):
        assert defaults(function) == ANSWER | {
            "cache": None,
            "params": SamplingParams(),
            "chunk": None,
        }
