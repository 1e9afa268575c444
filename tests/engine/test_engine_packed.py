"""Prompts of different lengths in one forward: each gets the logits and leaves the cache of a prefill of its own."""

from dataclasses import replace

import pytest
import torch

import nanokv
from nanokv.cache import CACHES, PagePool, make_cache
from nanokv.cache.packed import PackedCache
from nanokv.engine import Engine
from nanokv.engine.packed import prefill_packed
from nanokv.errors import CacheError, CapacityError
from nanokv.fast import native
from nanokv.fast.model import Block
from nanokv.inference import decode, prefill
from oracle import SHAPES, TOLERANCE, gap, interrupt_at, pair, random_ids, reference_logits

pytestmark = pytest.mark.sampled

LENGTHS = [5, 33, 1, 12]
FEW = [5, 13, 1, 9]  # fewer in all than the rows of one kernel call


@pytest.fixture(scope="module")
def models():
    """(reference, ours), fp32."""
    return pair(**SHAPES["G2-untied-bias"])


def prompts(seed: int, lengths=LENGTHS) -> list[list[int]]:
    return [random_ids(seed + i, 1, n)[0].tolist() for i, n in enumerate(lengths)]


def caches(kind, model, **options):
    return [make_cache(kind, model.config, capacity=128, **options) for _ in LENGTHS]


@pytest.mark.parametrize("kind", sorted(CACHES))
@pytest.mark.parametrize("fast", [False, True], ids=["plain", "optimized"])
def test_each_prompt_is_as_if_it_were_alone(models, kind, fast):
    """From the start, from where the last chunk ended, and in a decode after it, over caches of every kind."""
    model = nanokv.optimize(models[1]) if fast else models[1]
    together, apart = caches(kind, model), caches(kind, model)
    for seed in (0, 10):
        starts = [cache.length for cache in together]
        logits = prefill_packed(model, prompts(seed), together, starts)  # (B,V)
        expected = [
            prefill(model, [ids], own, own.length)
            for ids, own in zip(prompts(seed), apart, strict=True)
        ]
        assert gap(logits, torch.cat(expected)) <= TOLERANCE
        assert [cache.length for cache in together] == [
            start + n for start, n in zip(starts, LENGTHS, strict=True)
        ]
    for mine, own in zip(together, apart, strict=True):
        assert (
            gap(decode(model, [[7]], mine, mine.length), decode(model, [[7]], own, own.length))
            <= TOLERANCE
        )


def test_one_prompt_may_go_alone(models):
    model, ids = models[1], prompts(5)[1]
    (cache, *_), own = caches("dict", model), make_cache("dict", model.config)
    assert gap(prefill_packed(model, [ids], [cache], [0]), prefill(model, [ids], own)) <= TOLERANCE
    assert cache.length == len(ids)


def test_the_logits_are_those_of_transformers(models):
    """Of a first chunk, and of a second one whose queries see the first."""
    (reference, model), four, known = models, caches("dict", models[1]), [[] for _ in LENGTHS]
    for seed in (20, 30):
        logits = prefill_packed(model, prompts(seed), four, [len(ids) for ids in known])
        known = [ids + more for ids, more in zip(known, prompts(seed), strict=True)]
        expected = [reference_logits(reference, torch.tensor([ids]))[:, -1] for ids in known]
        assert gap(logits, torch.cat(expected)) <= TOLERANCE


def test_bf16_over_pages(models):
    """The causal kernel takes each sequence by itself; products of other sizes round alike to the precision of bf16."""
    model = nanokv.optimize(nanokv.load("tiny", dtype=torch.bfloat16)[0])
    together, apart = caches("paged", model), caches("paged", model)
    logits = prefill_packed(model, prompts(0), together, [0] * len(LENGTHS))
    expected = torch.cat(
        [prefill(model, [ids], own, 0) for ids, own in zip(prompts(0), apart, strict=True)]
    )
    assert gap(logits, expected) <= 0.03 * expected.abs().max().item()


@pytest.mark.parametrize("kind", ["dict", "static", "paged"])
def test_what_failed_half_way_is_mended_by_truncating(models, monkeypatch, kind):
    model, together = models[1], caches(kind, models[1])
    prefill_packed(model, prompts(0), together, [0] * len(LENGTHS))
    with monkeypatch.context() as patch:
        interrupt_at(patch, model.layers[1], 1)
        with pytest.raises(KeyboardInterrupt):
            prefill_packed(model, prompts(10), together, LENGTHS)
    for cache, length in zip(together, LENGTHS, strict=True):
        cache.truncate(length)
    clean = caches(kind, model)
    prefill_packed(model, prompts(0), clean, [0] * len(LENGTHS))
    again, expected = (
        prefill_packed(model, prompts(10), mine, LENGTHS) for mine in (together, clean)
    )
    assert torch.equal(again, expected)


def test_a_layer_is_written_for_all_or_for_none(models):
    """The third sequence has no room: the first two hold what they held."""
    model = models[1]
    tight = [make_cache("static", model.config, capacity=n) for n in (64, 64, 6, 64)]
    prefill_packed(model, [[1]] * 4, tight, [0] * 4)
    with pytest.raises(CacheError):
        prefill_packed(model, [[1, 2], [1, 2, 3], [1] * 9, [1]], tight, [1] * 4)
    assert [cache[0].length for cache in tight] == [1] * 4


def test_what_does_not_fit_together_is_refused(models):
    model, four = models[1], caches("dict", models[1])
    with pytest.raises(ValueError, match="start_pos"):
        prefill_packed(model, prompts(0), four, [0, 0, 3, 0])
    for some in (four[:3], [four[0]] * 4, []):
        with pytest.raises((CacheError, ValueError)):
            prefill_packed(model, prompts(0), some, [0] * len(some))
    for wrong, words in (
        (make_cache("dict", replace(model.config, rope_theta=5.0)), "another model"),
        (make_cache("dict", model.config, batch_size=2), "of one sequence each"),
    ):
        with pytest.raises(CacheError, match=words):
            prefill_packed(model, [[1], [2]], [four[0], wrong], [0, 0])
    with pytest.raises(IndexError, match="outside the vocabulary"):
        prefill_packed(model, [[1], [10**6]], four[:2], [0, 0])
    assert [cache.length for cache in four] == [0] * 4


def test_a_packed_cache_says_what_it_is(models):
    packed = PackedCache(caches("dict", models[1]), LENGTHS, models[1].config)
    assert repr(packed).startswith("<PackedCache 'packed': 3 layers")


# --- in one kernel call -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast(models):
    if native.kernels() is None:
        pytest.skip("no kernels on this machine")
    return nanokv.optimize(models[1])


def over_one_pool(model, pages=64):
    pool = PagePool(model.config, pages, 4)
    return [make_cache("paged", model.config, pool=pool) for _ in LENGTHS]


@pytest.fixture
def layers_called(monkeypatch):
    """The rows of every call of a layer: none in a forward that is one kernel call."""
    called, forward = [], Block.forward
    monkeypatch.setattr(
        Block, "forward", lambda self, x, *rest: called.append(len(x)) or forward(self, x, *rest)
    )
    return called


def together(model, caches, seed):
    return prefill_packed(model, prompts(seed, FEW), caches, [cache.length for cache in caches])


def test_pages_of_one_pool_are_one_call(models, fast, layers_called):
    """And give what layer by layer gives; a caller's own `append` is still called."""
    paged, dense, own = over_one_pool(fast), caches("dict", fast), over_one_pool(fast)
    appended = []
    append = own[1][0].append
    own[1][0].append = lambda k, v: appended.append(k.shape) or append(k, v)
    for seed in (0, 10):
        logits = together(fast, paged, seed)
        assert not layers_called
        expected = together(fast, dense, seed)
        assert gap(logits, expected) <= TOLERANCE
        assert gap(together(fast, own, seed), expected) <= TOLERANCE
        assert [cache.length for cache in paged] == [cache.length for cache in dense]
        layers_called.clear()
    assert appended == [(1, fast.config.num_key_value_heads, FEW[1], fast.config.head_dim)] * 2


def test_more_rows_than_the_kernels_are_fast_for_go_layer_by_layer(fast, layers_called):
    for n, layer_by_layer in ((fast.most_packed, False), (fast.most_packed + 1, True)):
        cache = over_one_pool(fast)[0]
        prefill_packed(fast, [random_ids(3, 1, n)[0].tolist()], [cache], [0])
        assert bool(layers_called) == layer_by_layer


def test_one_call_copies_shared_pages_before_it_writes(fast):
    paged = over_one_pool(fast)
    together(fast, paged, 0)
    forks, before = [cache.fork() for cache in paged], [cache[0].state()["key"] for cache in paged]
    together(fast, forks, 10)
    for cache, fork, keys in zip(paged, forks, before, strict=True):
        assert torch.equal(cache[0].state()["key"], keys)
        assert torch.equal(fork[0].state()["key"][:, :, : cache.length], keys)


def test_one_call_takes_pages_for_all_or_for_none(fast):
    paged = over_one_pool(fast, pages=9)  # 10 are needed
    with pytest.raises(CapacityError, match="exhausted"):
        together(fast, paged, 0)
    assert [cache.length for cache in paged] == [0] * 4 and len(paged[0].pool.free) == 9


def test_one_call_that_failed_is_mended_by_truncating(fast, monkeypatch):
    paged, clean = over_one_pool(fast), over_one_pool(fast)
    for mine in (paged, clean):
        together(fast, mine, 0)
    with monkeypatch.context() as patch:
        patch.setattr(native, "addresses", lambda structs: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            together(fast, paged, 10)
    for cache, length in zip(paged, FEW, strict=True):
        cache.truncate(length)
    assert torch.equal(together(fast, paged, 10), together(fast, clean, 10))


def test_decodes_join_the_prompts_of_a_step(fast):
    """One forward, if the rows are few; every answer is that of a prompt alone."""
    engine = Engine(fast, pages=80, page_size=4, step_tokens=20)
    asked = [engine.submit(ids, max_new_tokens=12, eos_token_ids=[]) for ids in prompts(30, FEW)]
    engine.run()
    steps = engine.metrics.steps
    assert engine.metrics.forwards == steps
    for ids, request in zip(prompts(30, FEW), asked, strict=True):
        expected = nanokv.generate(fast, ids, max_new_tokens=12, eos_token_ids=[])
        assert request.tokens == list(expected)
    assert engine.metrics.decode_tokens == 4 * 12 - 3  # the shortest prompt is a decode too
    assert engine.metrics.prefill_tokens == sum(FEW) - 1


# --- in the engine ------------------------------------------------------------------------------------------------


def test_all_prompts_of_a_step_are_one_forward(models):
    engine = Engine(models[1], pages=40, page_size=4, step_tokens=64)
    for ids in prompts(30):
        engine.submit(ids, max_new_tokens=3, eos_token_ids=[])
    engine.step()
    assert engine.metrics.forwards == 2  # prompts of one token are decodes from the first step on
    engine.run()
    assert engine.metrics.forwards == 4


def test_who_begins_alike_waits_for_the_first_of_them_and_others_do_not(models):
    """Four prompts, three with one beginning of two pages: it is computed once, then the two others go together."""
    engine = Engine(models[1], pages=40, page_size=4, step_tokens=256)
    beginning = random_ids(50, 1, 9)[0].tolist()
    ids = [
        beginning + [1, 2, 3],
        beginning + [4, 5],
        random_ids(51, 1, 7)[0].tolist(),
        beginning + [6],
    ]
    asked = [engine.submit(prompt, max_new_tokens=1) for prompt in ids]
    salted = engine.submit(beginning + [1], max_new_tokens=1, salt="another tenant")
    engine.step()
    assert engine.metrics.forwards == 2
    assert [request.reused_tokens for request in asked] == [
        0,
        8,
        0,
        8,
    ] and salted.reused_tokens == 0
    for prompt, request in zip(ids, asked, strict=True):
        assert request.tokens == list(nanokv.generate(models[1], prompt, max_new_tokens=1))
