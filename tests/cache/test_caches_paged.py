"""Pages: reference counts, copy on write, an empty pool, and prefixes that may only be shared if they are equal.

After every test that uses it, `pool` must be whole again: each page free exactly once, no count left.
"""

import gc

import pytest
import torch

from nanokv.cache import make_cache
from nanokv.cache.pool import PagePool
from nanokv.cache.prefix import PrefixPool
from nanokv.cache.prefix_index import HashIndex
from nanokv.errors import CacheError, CapacityError
from nanokv.inference import decode, prefill, score
from oracle import SHAPES, TOLERANCE, gap, pair, random_ids, whole_again

pytestmark = pytest.mark.sampled

PAGE = 4


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


@pytest.fixture
def pool(model):
    """8 pages of 4 tokens."""
    with whole_again(PagePool(model.config, 8, PAGE)) as pool:
        yield pool


@pytest.fixture(params=["hash", "radix"])
def prefixes(model, request):
    """12 pages of 4 tokens with an index; at the end the index is the only owner of what it lists."""
    pool = PrefixPool(model.config, 12, PAGE, request.param)
    yield pool
    gc.collect()
    listed = sorted(pool.index.pages())
    assert len(set(listed)) == len(listed)
    assert [pool.references[page] for page in listed] == [1] * len(listed)
    assert sorted(pool.free + listed) == list(range(12))


def paged(model, pool, rows=1):
    return make_cache("paged", model.config, batch_size=rows, page=PAGE, pool=pool)


def books(pool):
    return list(pool.references), sorted(pool.free)


# --- pages ----------------------------------------------------------------------------------------------------------


def test_a_page_is_taken_when_its_first_token_comes(model, pool):
    cache, ids = paged(model, pool), random_ids(0, 1, 9)
    for i in range(9):
        decode(model, ids[:, i : i + 1], cache, start_pos=i)
        assert 8 - len(pool.free) == i // PAGE + 1
    cache.truncate(4)
    assert len(pool.free) == 7
    cache.free()
    assert (len(pool.free), cache.length, cache.nbytes) == (8, 0, 0)


def test_a_fork_shares_pages_until_one_of_them_writes(model, pool):
    """Copy on write: only the page that is written is copied, once, and the other reads what it read before."""
    cache, ids = paged(model, pool), random_ids(1, 1, 10)
    prefill(model, ids, cache)
    fork = cache.fork()
    assert pool.references.count(2) == 3
    before = [layer.state()["key"].clone() for layer in cache]
    expected = score(model, torch.cat((ids, random_ids(2, 1, 1)), 1))[:, -1]
    assert gap(decode(model, random_ids(2, 1, 1), fork, start_pos=10), expected) <= TOLERANCE
    assert fork.tables[0][:2] == cache.tables[0][:2]
    assert fork.tables[0][2] != cache.tables[0][2]
    assert len(pool.free) == 8 - 4
    assert all(
        torch.equal(layer.state()["key"], old) for layer, old in zip(cache, before, strict=True)
    )
    table = list(cache.tables[0])
    decode(model, random_ids(3, 1, 1), cache, start_pos=10)
    assert cache.tables[0] == table  # its page is its own again: nothing to copy


def test_rewriting_an_older_shared_page_copies_it(model, pool):
    cache, ids = paged(model, pool), random_ids(4, 1, 8)
    prefill(model, ids, cache)
    fork = cache.fork()
    fork.truncate(2)
    prefill(model, random_ids(5, 1, 3), fork, start_pos=2)
    more = random_ids(6, 1, 2)
    assert (
        gap(
            prefill(model, more, cache, start_pos=8), score(model, torch.cat((ids, more), 1))[:, -1]
        )
        <= TOLERANCE
    )


def test_the_last_owner_of_a_page_need_not_copy_it(model, pool):
    """Two equal rows on 7 of 8 pages: one copy is enough, and only one page is left."""
    cache = paged(model, pool)
    prefill(model, random_ids(7, 1, 26), cache)
    cache.reorder([0, 0])
    assert len(pool.free) == 1
    decode(model, random_ids(8, 2, 1), cache, start_pos=26)
    assert len(pool.free) == 0
    assert cache.nbytes == 8 * pool.bytes_per_page


@pytest.mark.parametrize("tokens", [9, 20])
def test_an_exhausted_pool_refuses_and_changes_nothing(model, pool, tokens):
    """A half-taken request would leak pages, or leave some layers longer than others."""
    first, second = paged(model, pool), paged(model, pool)
    prefill(model, random_ids(9, 1, 20), first)
    prefill(model, random_ids(10, 1, 6), second)
    before = books(pool), [list(second.tables[0])], second.nbytes
    with pytest.raises(CapacityError, match=r"exhausted: \d pages of 4 tokens wanted, 1 of 8 free"):
        prefill(model, random_ids(11, 1, tokens), second, start_pos=6)
    assert (books(pool), second.tables, second.nbytes) == before
    assert (first.length, second.length) == (20, 6)
    first.free()
    prefill(model, random_ids(11, 1, tokens), second, start_pos=6)
    assert second.length == 6 + tokens


def test_copy_on_write_needs_a_page_too(model, pool):
    cache = paged(model, pool)
    prefill(model, random_ids(12, 1, 30), cache)
    fork = cache.fork()
    before = books(pool)
    with pytest.raises(CapacityError, match="1 pages of 4 tokens wanted, 0 of 8 free"):
        decode(model, random_ids(13, 1, 1), fork, start_pos=30)
    assert books(pool) == before
    del cache
    decode(model, random_ids(13, 1, 1), fork, start_pos=30)


def test_a_failed_forward_gives_its_pages_back(model, pool, monkeypatch):
    cache = paged(model, pool)
    prefill(model, random_ids(14, 1, 6), cache)
    before = books(pool)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prefill(model, random_ids(15, 1, 11), cache, start_pos=6)
    assert books(pool) != before
    cache.truncate(6)
    assert books(pool) == before


def test_a_cache_that_is_dropped_gives_its_pages_back_at_once(model, pool):
    cache = paged(model, pool, rows=2)
    prefill(model, random_ids(16, 2, 5), cache)
    fork = cache.fork()
    del cache
    assert len(pool.free) == 4
    del fork
    assert len(pool.free) == 8


def test_keys_of_another_shape_or_dtype_do_not_enter_a_shared_pool(model, pool):
    """One KV head would broadcast over two."""
    cache, other = paged(model, pool), paged(model, pool)
    prefill(model, random_ids(17, 1, 3), cache)
    for k in (
        torch.zeros(1, 1, 2, 32),
        torch.zeros(1, 2, 2, 32, dtype=torch.float16),
        torch.zeros(1, 2, 2, 1),
    ):
        with pytest.raises(CacheError, match="cannot append keys"):
            other[0].append(k, k)
    assert (other.length, other.tables) == (0, [[]])


@pytest.mark.parametrize(
    "options", [{"page": 0}, {"page": -1}, {"page": 2.0}, {"pages": -3}], ids=str
)
@pytest.mark.parametrize("name", ["paged", "prefix"])
def test_page_sizes_that_make_no_sense_are_refused(model, name, options):
    with pytest.raises(CacheError, match="page"):
        make_cache(name, model.config, **options)


# --- prefixes -------------------------------------------------------------------------------------------------------


def ask(model, pool, ids, salt=""):
    """One request: reuse, prefill the rest, remember. Returns the cache and the logits."""
    cache = make_cache("prefix", model.config, pool=pool, salt=salt)
    n = cache.reuse(ids)
    assert cache.hits == cache.length == n
    logits = prefill(model, torch.tensor([ids[n:]]), cache, start_pos=n)
    cache.remember(ids)
    return cache, logits


def tokens(seed, count):
    return random_ids(seed, 1, count)[0].tolist()


@pytest.mark.parametrize(
    ("length", "hits"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_the_same_prompt_again_recomputes_at_least_one_token(model, prefixes, length, hits):
    """A whole hit would leave nothing to compute logits from."""
    ids = tokens(20, length)
    first, expected = ask(model, prefixes, ids)
    again, logits = ask(model, prefixes, ids)
    assert (first.hits, again.hits) == (0, hits)
    assert gap(logits, expected) <= TOLERANCE
    assert again.tables[0][: hits // PAGE] == first.tables[0][: hits // PAGE]


def test_only_the_common_whole_pages_are_shared(model, prefixes):
    ids = tokens(21, 14)
    ask(model, prefixes, ids)
    other = ids[:6] + [(ids[6] + 1) % 151] + ids[7:]
    cache, logits = ask(model, prefixes, other)
    assert cache.hits == 4
    assert gap(logits, score(model, torch.tensor([other]))[:, -1]) <= TOLERANCE
    # The same pages after another beginning are not the same.
    assert ask(model, prefixes, [*ids[4:12], 1])[0].hits == 0


def test_decoding_after_a_hit_never_writes_into_what_is_shared(model, prefixes):
    ids = tokens(22, 9)
    _, expected = ask(model, prefixes, ids)
    cache, _ = ask(model, prefixes, ids)
    cache.truncate(3)  # an edited turn: inside a page that the index holds
    prefill(model, random_ids(23, 1, 4), cache, start_pos=3)
    cache, logits = ask(model, prefixes, ids)
    assert cache.hits == 8
    assert gap(logits, expected) <= TOLERANCE


def test_salts_share_nothing(model, prefixes):
    ids = tokens(24, 9)
    assert ask(model, prefixes, ids, "alice")[0].hits == 0
    assert ask(model, prefixes, ids, "bob")[0].hits == 0
    assert ask(model, prefixes, ids)[0].hits == 0
    assert ask(model, prefixes, ids, "alice")[0].hits == 8
    with pytest.raises(CacheError, match="salt is 5"):
        make_cache("prefix", model.config, salt=5)


@pytest.mark.parametrize(
    "hash_",
    [
        lambda parent, part: b"same",
        lambda parent, part: bytes([sum(part) % 2]),
        lambda parent, part: parent,
    ],
    ids=["constant", "two values", "parent only"],
)
def test_a_hash_collision_costs_a_recomputation_and_never_a_wrong_answer(
    model, prefixes, monkeypatch, hash_
):
    """Pages of other tokens, of another parent and of another tenant all get the same hash."""
    monkeypatch.setattr(HashIndex, "hash", staticmethod(hash_))
    beginnings = [tokens(30 + i, 4) for i in range(3)]
    for step in range(18):
        i, j = step % 3, step * 7 % 3
        ids = beginnings[i] + beginnings[j] + tokens(40 + step % 2, 3)
        cache, logits = ask(model, prefixes, ids, salt=("", "other")[step % 5 == 0])
        assert gap(logits, score(model, torch.tensor([ids]))[:, -1]) <= TOLERANCE, step
        del cache


def test_a_child_of_an_evicted_parent_is_not_found_through_a_colliding_one(
    model, prefixes, monkeypatch
):
    depth_only = staticmethod(lambda parent, part: b"root" if len(parent) == 32 else parent + b".")
    monkeypatch.setattr(HashIndex, "hash", depth_only)
    x, y, z = tokens(50, 4), tokens(51, 4), tokens(52, 4)
    ask(model, prefixes, [*x, *z, 1])
    ask(model, prefixes, [*y, 1])  # takes the root's place in the index
    cache, logits = ask(model, prefixes, [*y, *z, 1])
    assert cache.hits == 4
    assert gap(logits, score(model, torch.tensor([[*y, *z, 1]]))[:, -1]) <= TOLERANCE


def test_eviction_takes_the_least_recently_used_leaves_first_and_never_live_pages(model, prefixes):
    old, recent = tokens(60, 12), tokens(61, 12)
    ask(model, prefixes, old)
    live, _ = ask(model, prefixes, recent)
    kept = [layer.state()["key"].clone() for layer in live]
    assert len(prefixes.free) == 12 - 6
    big, _ = ask(model, prefixes, tokens(62, 31))  # 8 pages: two must go
    assert big.length == 31
    assert all(
        torch.equal(layer.state()["key"], was) for layer, was in zip(live, kept, strict=True)
    )
    del big
    cache, _ = ask(model, prefixes, old)
    assert cache.hits == 4  # the leaves went, the root stayed
    del cache
    assert ask(model, prefixes, recent)[0].hits == 8


def test_live_pages_are_not_evicted_even_if_nothing_else_is_left(model, prefixes):
    live, _ = ask(model, prefixes, tokens(63, 40))
    before = books(prefixes), list(prefixes.index.pages())
    with pytest.raises(CapacityError, match="3 pages of 4 tokens wanted, 2 of 12 free"):
        ask(model, prefixes, tokens(64, 12))
    gc.collect()
    assert (books(prefixes), list(prefixes.index.pages())) == before
    assert live.length == 40


def test_a_request_that_fails_evicts_nothing(model, prefixes):
    """2 free, 3 idle, 7 live: 6 pages can't be had, so the idle ones must not be lost for it."""
    ask(model, prefixes, tokens(65, 12))
    live, _ = ask(model, prefixes, tokens(66, 28))
    assert (len(prefixes.free), live.length) == (2, 28)
    with pytest.raises(CapacityError):
        ask(model, prefixes, tokens(67, 24))
    assert ask(model, prefixes, tokens(65, 12))[0].hits == 8


@pytest.mark.parametrize("kind", ["paged", "prefix"])
def test_pages_that_were_asked_for_are_shared_by_the_rows(model, kind):
    for rows, tokens in ((1, 36), (2, 16), (4, 8)):
        assert make_cache(kind, model.config, batch_size=rows, page=4, pages=9).capacity == tokens
    assert make_cache(kind, model.config, page=4).capacity is None  # grows
