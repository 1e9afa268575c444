"""What a batch of rows promises when one of them fails, and what memory and masks do at the edges of every kind."""

import pytest
import torch

from nanokv import costs
from nanokv.cache import CACHES, BatchCache, PagePool, make_cache
from nanokv.cache.batch import width
from nanokv.cache.options import growing_slots
from nanokv.cache.stores import HostStore
from nanokv.decoding.batching import generate_padded
from nanokv.decoding.generation import generate
from nanokv.errors import CapacityError
from nanokv.inference import decode, prefill, score
from oracle import SHAPES, TOLERANCE, gap, pair, random_ids

pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


def zeros(T=1, B=1):
    return torch.zeros(B, 2, T, 32)


def filled(model, kind, tokens, **options):
    cache = make_cache(kind, model.config, capacity=options.pop("capacity", 64), **options)
    if tokens:
        prefill(model, random_ids(1, 1, tokens), cache)
    return cache


def state_of(cache):
    return [{name: x.clone() for name, x in layer.state().items()} for layer in cache]


def equal(a, b):
    return all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        for x, y in zip(a, b, strict=True)
    )


KINDS = [
    ("dict", {}),
    ("static", {}),
    ("growing", {}),
    ("paged", {"page": 3}),
    ("offloaded", {}),
    ("sliding", {"window": 5}),
    ("sliding", {"window": 5, "sinks": 2}),
    ("quantized", {"bits": 2, "group": 4, "residual": 0}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), CapacityError("full")]
)
@pytest.mark.parametrize("T", [1, 3])
def test_a_row_that_fails_leaves_the_rows_before_it_as_they_were(
    model, kind, options, error, T, monkeypatch
):
    """A window forgets and codes are rounded for good, so a truncate cannot take those back."""
    rows = [filled(model, kind, 9, **options), filled(model, "dict", 9)]
    batch, before, clean = BatchCache(rows, model.config), state_of(rows[0]), rows[0].fork()
    with monkeypatch.context() as patch:
        patch.setattr(rows[1][0], "append", lambda k, v: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            batch[0].append(zeros(T, 2), zeros(T, 2))
    assert batch.length == 9
    assert equal(state_of(rows[0]), before)
    assert rows[0].nbytes == clean.nbytes
    ids = random_ids(3, 2, T)
    logits = prefill(model, ids, batch, 9)
    assert gap(logits[:1], prefill(model, ids[:1], clean, 9)) <= TOLERANCE


def test_a_batch_that_failed_has_not_kept_pages(model):
    """3 pages, 2 in use: the first row got the third, the second row none."""
    pool = PagePool(model.config, 3, 4)
    rows = [make_cache("paged", model.config, pool=pool) for _ in range(2)]
    for row in rows:
        prefill(model, random_ids(1, 1, 4), row)
    batch = BatchCache(rows, model.config)
    with pytest.raises(CapacityError, match="exhausted"):
        decode(model, random_ids(2, 2, 1), batch, 4)
    assert (len(pool.free), batch.length) == (1, 4)


def test_a_batch_can_do_what_its_weakest_row_can(model):
    rows = [filled(model, "static", 3, capacity=n) for n in (20, 12, 30)] + [
        filled(model, "dict", 3)
    ]
    assert BatchCache(rows, model.config).capacity == 12
    rows = [filled(model, "sliding", 3, window=n) for n in (20, 12, 30)] + [
        filled(model, "dict", 3)
    ]
    assert BatchCache(rows, model.config).sizes.max_rollback == 12 - 1 - 3
    assert BatchCache([filled(model, "dict", 3)], model.config).capacity is None


def test_rows_of_equal_width_and_unequal_masks_are_not_taken_for_alike(model):
    """A dict row and a window of 5, both 4 long: the masks of 4 more tokens differ in a corner."""
    rows = [filled(model, "dict", 4), filled(model, "sliding", 4, window=5)]
    alone = [row.fork() for row in rows]
    batch, ids = BatchCache(rows, model.config), random_ids(2, 2, 4)
    mask = batch.mask(4)
    assert mask.shape == (2, 1, 4, 8)
    assert not torch.equal(mask[0], mask[1])
    logits = prefill(model, ids, batch, 4)
    for b, row in enumerate(alone):
        assert gap(logits[b : b + 1], prefill(model, ids[b : b + 1], row, 4)) <= TOLERANCE


ALL = [
    *KINDS,
    ("prefix", {"page": 4}),
    ("offloaded", {"to": "host"}),
    ("batch", {"of": "sliding", "window": 4}),
]


@pytest.mark.parametrize(("kind", "options"), ALL, ids=str)
@pytest.mark.parametrize("before", [0, 1, 4, 6, 11])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_width_says_how_many_keys_an_append_returns(model, kind, options, before, T):
    cache = filled(model, kind, before, **options)
    mask = cache.mask(T)
    wide = width(cache[0], T, mask)
    keys, values = cache[0].append(zeros(T), zeros(T))
    assert wide == keys.shape[2] == values.shape[2]
    assert mask is None or mask.shape[-1] == wide


def test_width_of_ragged_rows_is_that_of_the_widest(model):
    """generate_padded over sliding rows asked for it and got the length instead."""
    batch = BatchCache([filled(model, "sliding", n, window=4) for n in (9, 2)], model.config)
    wide = width(batch[0], 3, batch.mask(3))
    assert wide == batch[0].append(zeros(3, 2), zeros(3, 2))[0].shape[2]


@pytest.mark.parametrize(
    ("of", "options"), [("sliding", {"window": 5}), ("static", {}), ("paged", {})], ids=str
)
def test_padded_prompts_over_a_batch_of_rows(model, of, options):
    prompts = [random_ids(seed, 1, n)[0].tolist() for seed, n in ((1, 9), (2, 4))]
    cache = make_cache("batch", model.config, 2, 64, of=of, **options)
    got = generate_padded(model, prompts, cache, max_new_tokens=8, eos_token_ids=[])
    for prompt, answer in zip(prompts, got, strict=True):
        alone = make_cache(of, model.config, 1, 64, **options)
        assert list(generate(model, prompt, alone, max_new_tokens=8, eos_token_ids=[])) == answer


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 33, 64, 65])
def test_a_slab_grows_to_the_next_power_of_two_and_not_beyond(model, tokens):
    """Exactly 16, 32 or 64 in one append fill it; one more doubles it."""
    cache = make_cache("growing", model.config)
    for layer in cache:
        layer.append(zeros(tokens), zeros(tokens))
    expected = next(n for n in (16, 32, 64, 128) if n >= tokens)
    assert cache[0].keys.shape[2] == growing_slots(tokens) == expected
    assert cache.nbytes == costs.cache_bytes("growing", model.config, tokens, 1, 4)
    cache[0].append(zeros(), zeros())
    assert cache[0].keys.shape[2] == (expected if tokens < expected else 2 * expected)


@pytest.mark.parametrize("expected", [10, 16, 31, 32, 100])
def test_a_slab_ends_where_no_more_tokens_are_expected(model, expected):
    """No doubling for the last few, and no limit: one token more than was said is stored as any other."""
    cache, slots = make_cache("growing", model.config, capacity=expected), set()
    for tokens in range(1, expected + 2):
        for layer in cache:
            layer.append(zeros(), zeros())
        slots.add(cache[0].keys.shape[2])
        assert cache.nbytes == costs.cache_bytes(
            "growing", model.config, tokens, 1, 4, capacity=expected
        )
    assert {n for n in slots if n < expected} <= {16, 32} and expected in slots and len(slots) <= 4
    assert max(slots) == growing_slots(expected + 1) and cache.capacity is None


def test_a_flush_leaves_no_view_of_something_larger(model):
    """The exact tokens are few; a view of what they were cut from would keep all of it in memory."""
    layer = make_cache("quantized", model.config, group=4, residual=2)[0]
    layer.append(torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32))
    layer.append(zeros(), zeros())
    tensors = (*layer.exact, *layer.codes, *layer.scales)
    assert layer.exact[0].shape[2] == 5
    assert sum(x.untyped_storage().nbytes() for x in tensors) == layer.nbytes
    layer.truncate(7)
    tensors = (*layer.exact, *layer.codes, *layer.scales)
    assert sum(x.untyped_storage().nbytes() for x in tensors) == layer.nbytes


@pytest.mark.parametrize(
    ("keep", "blocks"), [(12, [4, 4, 4]), (9, [4, 4, 1]), (8, [4, 4]), (7, [4, 3]), (4, [4])]
)
def test_truncate_at_the_edge_of_a_block_leaves_no_empty_block(model, keep, blocks):
    layer = make_cache("quantized", model.config, group=4, residual=0)[0]
    k = torch.randn(1, 2, 16, 32, generator=torch.Generator().manual_seed(0))
    layer.append(k, k)
    layer.append(k[:, :, :1], k[:, :, :1])
    assert layer.blocks == [4] * 4
    layer.truncate(keep)
    assert layer.blocks == blocks
    assert layer.scales[0].shape[2] == len(blocks)
    assert (layer.length, layer.newest) == (keep, 0)
    keys, _ = layer.append(zeros(), zeros())
    assert gap(keys[:, :, :keep], k[:, :, :keep]) < 0.02


def test_host_rows_copy_fewer_than_two_tokens_for_each_that_comes(monkeypatch):
    store, one, copied = HostStore(), torch.zeros(1, 2, 1, 1, 2), 0
    for n in range(1500):
        before = store.rows
        store.write(n, one)
        if before is not None and store.rows is not before:
            copied += n
        assert copied < 2 * (n + 1)
        assert len(store.rows) <= max(64, 2 * n)
    assert copied > 0


@pytest.mark.parametrize("kind", sorted(CACHES))
def test_score_still_agrees_after_all_of_this(model, kind):
    ids = random_ids(9, 1, 20)
    cache = make_cache(kind, model.config, capacity=64)
    assert gap(prefill(model, ids, cache), score(model, ids)[:, -1]) <= TOLERANCE
