"""Recurrent layers in the engine: answers as if alone, snapshots, and what is left afterwards."""

import random
from dataclasses import replace

import pytest

import nanokv
from nanokv.cache import make_cache
from nanokv.cache.snapshots import Snapshots, Stops
from nanokv.config import Config
from nanokv.costs.formulas import kv_bytes_per_token, state_bytes
from nanokv.engine import Engine
from nanokv.engine.prefilled import taken
from nanokv.errors import HandoverError
from nanokv.inference import prefill
from oracle import HYBRID, pair


@pytest.fixture(scope="module", params=HYBRID)
def model(request):
    return pair(**HYBRID[request.param] | {"vocab_size": 40})[1]


@pytest.fixture(scope="module")
def one():
    """The family with keys in the last layer only."""
    return pair(**HYBRID["qwen35-G2"] | {"vocab_size": 40})[1]


def alone(model, ids, new):
    return list(nanokv.generate(model, ids, max_new_tokens=new, eos_token_ids=()))


def ids_of(seed, n):
    chosen = random.Random(seed)
    return [chosen.randrange(40) for _ in range(n)]


def check_pool(engine):
    """No page is held but by the index, and every snapshot belongs to an indexed page."""
    pool = engine.pool
    pool.settle()
    held = set(pool.index.pages())
    assert {page for page, owners in enumerate(pool.references) if owners} == held
    assert all(pool.references[page] == 1 for page in held)
    assert pool.snapshots.marks.keys() <= held
    assert len(pool.snapshots) <= pool.snapshots.most


def submit(engine, ids, new):
    return engine.submit(ids, max_new_tokens=new, eos_token_ids=())


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize(
    "page, every",
    [
        (4, 8),
        pytest.param(16, 512, marks=pytest.mark.slow),
        pytest.param(3, 30, marks=pytest.mark.slow),
    ],
)
def test_random_traffic_is_answered_as_if_alone(model, index, page, every):
    """Shared beginnings, edited turns, cancelled requests, preemption and eviction in a small pool."""
    chosen = random.Random(page)
    pages = 200 // page
    engine = Engine(
        model, pages, page, prefix=index, snapshots=5, snapshot_every=every, step_tokens=96
    )
    known = [ids_of(1, 90)]
    wanted = []
    for _ in range(10):
        old = chosen.choice(known)
        ids = old[: chosen.randrange(1, len(old))] + ids_of(
            chosen.random(), chosen.randrange(1, 60)
        )
        ids = ids[:110]
        request = submit(engine, ids, chosen.randrange(1, 12))
        known.append(ids)
        wanted.append(request)
        for _ in range(chosen.randrange(4)):
            engine.step()
        if chosen.random() < 0.2:
            engine.cancel(chosen.choice(wanted))
    engine.run()
    for request in wanted:
        answer = alone(model, request.prompt, request.max_new_tokens)
        assert request.tokens == answer[: len(request.tokens)]
        assert request.finish_reason == "cancelled" or len(request.tokens) == len(answer)
    assert engine.metrics.reused_tokens > 0 and engine.pool.snapshots.hits > 0
    check_pool(engine)


def test_a_resumed_request_counts_once(one):
    engine = Engine(one, pages=64, page_size=4)
    for expected in (0, 1, 2):
        request = submit(engine, ids_of(1, 30), 3)
        engine.run()
        assert (engine.pool.snapshots.hits, bool(request.reused_tokens)) == (expected, expected > 0)


def test_a_preempted_request_resumes_at_its_last_full_page(one):
    engine = Engine(one, pages=12, page_size=4, snapshot_every=8)
    requests = [submit(engine, ids_of(seed, 12), 20) for seed in (1, 2)]
    engine.run()
    assert engine.metrics.preemptions > 0
    for request in requests:
        assert request.tokens == alone(one, request.prompt, 20)
    # It computes its prompt and at most a page of what it knew.
    assert engine.metrics.prefill_tokens < 24 + 4 * engine.metrics.preemptions + 20
    check_pool(engine)


def test_the_next_turn_and_the_edited_turn_compute_only_what_follows_a_snapshot(one):
    engine = Engine(one, pages=64, page_size=4, snapshot_every=40)
    first = submit(engine, ids_of(1, 103), 9)
    engine.run()
    assert engine.metrics.prefill_tokens == 103
    # 103 + 8 tokens were fed; the last full page ends at 108.
    longer = submit(engine, first.known + ids_of(2, 5), 3)
    engine.run()
    assert longer.reused_tokens == 108
    again = submit(engine, first.prompt, 3)
    engine.run()
    assert again.reused_tokens == 100  # the last full page before the last token
    # Parted at 90: known pages end at 88, where no state is, so it resumes at 80 …
    edited = submit(engine, first.prompt[:90] + ids_of(3, 75), 3)
    engine.run()
    assert edited.reused_tokens == 80
    # … and leaves a snapshot there for the next one.
    twice = submit(engine, first.prompt[:90] + ids_of(4, 5), 3)
    engine.run()
    assert twice.reused_tokens == 88
    for request in (longer, again, edited, twice):
        assert request.tokens == alone(one, request.prompt, 3)


def test_equal_prompts_at_once_are_computed_once(one):
    engine = Engine(one, pages=64, page_size=4)
    requests = [submit(engine, ids_of(1, 99), 3) for _ in range(3)]
    engine.run()
    assert engine.metrics.prefill_tokens == 99 + 2 * 3
    assert len({tuple(request.tokens) for request in requests}) == 1


def test_a_snapshot_leaves_with_its_page_and_the_oldest_beyond_the_limit(one):
    engine = Engine(one, pages=12, page_size=4, snapshots=2)
    pool = engine.pool
    held = []
    for seed in range(4):
        submit(engine, ids_of(seed, 10), 2)
        engine.run()
        check_pool(engine)
        held.append(len(pool.snapshots))
    assert held == [1, 2, 2, 2]  # a snapshot for each request, of which the newest two stay
    first, last = (pool.snapshots.usable(pool.find(ids_of(seed, 10), "")) for seed in (0, 3))
    assert not first and last
    each = pool.snapshots.bytes_each
    pages = pool.take(len(pool.free) + 8)  # all but the last pages of the newest request
    assert len(pool.index) == 0 or pool.snapshots.nbytes == each * len(pool.snapshots)
    check_taken = set(pages) & pool.snapshots.marks.keys()
    assert not check_taken
    pool.release(pages)


def test_an_interrupted_eviction_leaves_no_snapshot_of_another_sequence(one, monkeypatch):
    engine = Engine(one, pages=8, page_size=4)
    submit(engine, ids_of(1, 18), 2)
    engine.run()
    with monkeypatch.context() as patch:
        patch.setattr(
            Snapshots, "drop", lambda self, pages: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            engine.pool.take(8)
    check_pool(engine)
    request = submit(engine, ids_of(2, 18), 3)
    engine.run()
    assert request.tokens == alone(one, request.prompt, 3)


@pytest.mark.parametrize("tokens", [30, 100])
def test_an_interrupted_forward_is_repeated(one, tokens, monkeypatch):
    """After a long chunk a recurrent layer has no state to go back to: the prompt starts again."""
    engine = Engine(one, pages=64, page_size=4)
    request = submit(engine, ids_of(1, tokens), 4)
    right = type(one.layers[3].self_attn).forward
    calls = iter(range(100))

    def once(*args):
        if next(calls) == 0:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(type(one.layers[3].self_attn), "forward", once)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    engine.run()
    assert request.tokens == alone(one, request.prompt, 4)
    check_pool(engine)


@pytest.mark.parametrize("kind", ["dict", "paged"])
def test_a_cache_from_elsewhere_is_a_prefix_up_to_its_last_full_page(one, kind):
    engine = Engine(one, pages=64, page_size=4)
    cache = make_cache(kind, one.config)
    prefill(one, [ids_of(1, 30)], cache)
    cache.tokens = ids_of(1, 30)
    assert engine.add_prefix(cache) == 28
    assert cache.length == 30
    check_pool(engine)
    request = submit(engine, ids_of(1, 30) + ids_of(2, 3), 3)
    engine.run()
    assert request.reused_tokens == 28
    assert request.tokens == alone(one, request.prompt, 3)


def test_a_cache_without_the_state_after_its_last_full_page_is_refused(one):
    engine = Engine(one, pages=4, page_size=128)
    cache = make_cache("dict", one.config)
    ids = ids_of(1, 230)
    prefill(one, [ids], cache)  # the page's end is more than SPARE tokens back
    cache.tokens = ids
    with pytest.raises(HandoverError, match="ends after 128 of 230 tokens") as error:
        engine.add_prefix(cache)
    assert "first 128 tokens" in error.value.hint
    check_pool(engine)


def test_another_process_prefills(one):
    """The states after the prompt go along; a hand-over without them is refused."""
    engine = Engine(one, pages=64, page_size=4)
    cache = make_cache("dict", one.config)
    ids = ids_of(1, 30)
    logits = prefill(one, [ids], cache)
    given = taken(cache, ids, logits=logits)
    request = engine.submit(ids, max_new_tokens=5, eos_token_ids=(), prefilled=given)
    engine.run()
    assert request.tokens == alone(one, ids, 5)
    assert engine.metrics.prefill_tokens == 0
    with pytest.raises(HandoverError, match="0 states of recurrent layers"):
        engine.submit(ids, prefilled=replace(given, conv=None))
    check_pool(engine)


def test_snapshots_are_those_of_one_row_not_of_the_batch(one):
    """A row's state is a view of the batch's tensor after a decode step."""
    engine = Engine(one, pages=64, page_size=4)
    for seed in range(4):
        submit(engine, ids_of(seed, 18), 6)
    engine.run()
    snapshots = engine.pool.snapshots
    tensors = [x for marks in snapshots.marks.values() for mark in marks for x in mark.tensors()]
    assert sum(x.untyped_storage().nbytes() for x in tensors) == snapshots.nbytes
    assert snapshots.bytes_each == state_bytes(one.config, 4)


def test_a_snapshot_of_qwen35_weighs_as_much_as_1572_tokens():
    """Its default text config. By hand: 24 layers × (4·32·128·128 + 2·8192·3) B, and 8 layers × 4,096 B."""
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 8
    fields = pair(**HYBRID["qwen35-G2"])[1].config.to_dict() | {
        "num_hidden_layers": 32,
        "layer_types": kinds,
        "hidden_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    config = Config.from_dict(fields)
    assert state_bytes(config, 2) == 24 * 2_146_304 == 51_511_296
    assert kv_bytes_per_token(config, 2) == 32_768
    assert 51_511_296 // 32_768 == 1572
    kept = 2 * 8192 * 4 * 24 + 4 * 32 * 128 * 128 * 24  # with K inputs of the convolution
    assert kept == 32_768 * 1584


def test_where_chunks_end():
    snapshots = Snapshots(page_size=16, every=128)
    stops = Stops(branch=48, last=288)
    assert snapshots.chunk(0, 300, stops) == 48
    assert snapshots.chunk(48, 300, stops) == 128
    assert snapshots.chunk(256, 300, stops) == 300  # a short chunk, whose states are all at hand
    assert snapshots.chunk(128, 400, stops) == 256
    assert snapshots.due(300, stops) == [48, 256, 288]
    assert snapshots.reach(64, 300, stops) == 48
    assert snapshots.reach(32, 300, stops) == 0
