"""What a cache must refuse, with a typed error and nothing changed: each of these would otherwise be a wrong answer.

Another model, other weights, other options than the file's, a page given back twice, numbers that fp16 cannot hold.
"""

import copy
import dataclasses
import json

import pytest
import torch

import nanokv
from nanokv import costs
from nanokv.cache import (
    CACHES,
    BatchCache,
    DictCache,
    KVCache,
    PagePool,
    PrefixPool,
    make_cache,
    offloaded,
)
from nanokv.cache.codes import LARGEST
from nanokv.cache.options import check_options
from nanokv.cache.pool import ElasticPool
from nanokv.cache.prefix import ElasticPrefixPool
from nanokv.cache.sliding import SlidingCache
from nanokv.errors import CacheError, CapacityError, UnsupportedError
from nanokv.inference import decode, prefill, score
from nanokv.lab.study.mla import LatentCache
from oracle import SHAPES, TOLERANCE, gap, pair, random_ids

pytestmark = pytest.mark.sampled

ALONE = sorted(set(CACHES) - {"batch"})


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


@pytest.fixture(scope="module")
def other_config(model):
    """The same shapes, other angles: keys would fit and be wrong."""
    return dataclasses.replace(model.config, rope_theta=50.0)


def filled(model, kind, tokens=9, batch=1, **options):
    cache = make_cache(kind, model.config, batch, 64, **options)
    prefill(model, random_ids(1, batch, tokens), cache)
    return cache


def zeros(T=1, B=1, Hk=2, D=32, dtype=torch.float32):
    return torch.zeros(B, Hk, T, D, dtype=dtype)


# --- files ----------------------------------------------------------------------------------------------------------

CONTRADICTIONS = [
    (
        "quantized",
        {"group": 8, "residual": 0},
        [{"rotate": "hadamard"}, {"k_bits": 4}, {"bits": 4}, {"group": 4}],
    ),
    ("quantized", {"bits": 4}, [{"bits": 8}, {"residual": 8}]),
    ("sliding", {"window": 12}, [{"window": 5}, {"window": 100}, {"sinks": 4}]),
    ("sliding", {}, [{"window": 5}]),
    ("batch", {"of": "sliding", "window": 12}, [{"window": 5}, {"of": "dict"}]),
    ("paged", {"page": 4}, [{"batch_size": 3}, {"dtype": torch.float64}]),
]


@pytest.mark.parametrize(("kind", "options", "others"), CONTRADICTIONS, ids=str)
def test_load_refuses_options_that_contradict_the_file(model, tmp_path, kind, options, others):
    filled(model, kind, 40, **options).save(tmp_path / "c")
    for other in others:
        with pytest.raises(CacheError, match=rf"{next(iter(other))}=.* contradicts .*/c"):
            KVCache.load(tmp_path / "c", model.config, **other)
    KVCache.load(tmp_path / "c", model.config, **options)


def test_a_window_that_came_from_the_capacity_is_in_the_file(model, tmp_path):
    cache = make_cache("sliding", model.config, capacity=12)
    prefill(model, random_ids(1, 1, 40), cache)
    cache.save(tmp_path / "c")
    loaded = KVCache.load(tmp_path / "c", model.config, capacity=64)
    assert loaded.made.options["window"] == loaded[0].window == 12
    ids = random_ids(2, 1, 1)
    assert torch.equal(decode(model, ids, loaded, 40), decode(model, ids, cache, 40))


def test_load_may_say_where_the_bytes_go(model, tmp_path):
    filled(model, "paged", page=3).save(tmp_path / "paged")
    pool = PagePool(model.config, 20, 4)
    for options in ({"pool": pool}, {"page": 5}, {"pages": 9}, {"capacity": 100}):
        cache = KVCache.load(tmp_path / "paged", model.config, **options)
        assert cache.length == 9
    assert len(pool.free) == 20
    filled(model, "offloaded").save(tmp_path / "far")
    assert KVCache.load(tmp_path / "far", model.config, to="host").length == 9


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dict", {}),
        ("static", {}),
        ("growing", {}),
        ("paged", {"page": 4}),
        ("prefix", {"page": 4}),
        ("batch", {"of": "paged"}),
    ],
    ids=str,
)
def test_a_file_is_loaded_onto_the_device_of_the_model_that_goes_on(model, tmp_path, kind, options):
    """The meta device stands for a GPU. What was saved on a CPU lay on the CPU, and the next decode refused it."""
    filled(model, kind, **options).save(tmp_path / "c")
    loaded = KVCache.load(tmp_path / "c", model.config, device="meta")
    assert loaded.length == 9
    for layer in loaded:
        assert {tensor.device.type for tensor in layer.state().values()} == {"meta"}
    there = zeros().to("meta")
    keys, values = loaded[0].append(there, there)
    assert keys.device.type == values.device.type == "meta" and keys.shape[2] == 10


def test_each_layer_goes_to_the_device_by_itself(model, tmp_path, monkeypatch):
    """An offloaded cache may be larger than the device: one layer is there at a time, and host memory keeps it."""
    filled(model, "offloaded", to="host").save(tmp_path / "c")
    moved, to = [], torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda x, *args, **how: moved.append(x) or to(x, *args, **how)
    )
    restored = []
    monkeypatch.setattr(
        offloaded.OffloadedLayer, "restore", lambda layer, state: restored.append(len(moved))
    )
    with pytest.raises(CacheError, match="reads 0 from it"):
        KVCache.load(tmp_path / "c", model.config, device="cpu")
    assert restored == [2 * (i + 1) for i in range(len(model.layers))]


def test_a_file_follows_the_pool_that_is_given(model, tmp_path):
    filled(model, "paged", page=4).save(tmp_path / "c")
    pool = PagePool(model.config, 20, 4)
    pool.storage(zeros().to("meta"))
    loaded = KVCache.load(tmp_path / "c", model.config, pool=pool)
    assert {tensor.device.type for tensor in loaded[0].state().values()} == {"meta"}


def test_a_device_that_is_not_there_is_refused_before_the_file_is_read(model, tmp_path):
    for device, text in (("gpu", "which torch does not know"), ("cuda:99", "but torch")):
        with pytest.raises(CacheError, match=f"device is '{device}', {text}"):
            KVCache.load(tmp_path / "none", model.config, device=device)


def test_keys_of_another_device_are_refused_with_the_way_to_load_them(model):
    cache, there = filled(model, "dict"), zeros().to("meta")
    with pytest.raises(CacheError, match="the keys are on meta, the cache on cpu") as caught:
        cache[0].append(there, there)
    assert "device=" in caught.value.hint


def test_load_says_that_a_folder_is_gone(model, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    filled(model, "offloaded", folder=str(place)).save(tmp_path / "c")
    place.rmdir()
    with pytest.raises(CacheError, match=r"no file can be made in .*/place") as caught:
        KVCache.load(tmp_path / "c", model.config)
    assert "folder=" in caught.value.hint
    assert KVCache.load(tmp_path / "c", model.config, folder=str(tmp_path)).length == 9


@pytest.mark.parametrize(
    "tokens", [[1, 2], range(99), ["a"] * 9, [1.9] * 9, [True] * 9, [[1] * 9] * 2], ids=str
)
def test_ids_that_are_not_those_of_the_cache_are_not_saved(model, tmp_path, tokens):
    with pytest.raises(CacheError, match="tokens"):
        filled(model, "dict").save(tmp_path / "c", tokens=tokens)
    assert not list(tmp_path.iterdir())


def test_ids_of_ragged_rows_are_saved_as_a_list_each(model, tmp_path):
    batch = BatchCache([filled(model, "dict", n) for n in (3, 5)], model.config)
    with pytest.raises(CacheError, match="cannot all hold the same ids"):
        batch.save(tmp_path / "c", tokens=[1, 2, 3])
    with pytest.raises(CacheError, match="4 tokens were passed for a cache that holds 5"):
        batch.save(tmp_path / "c", tokens=[[1, 2, 3], [1, 2, 3, 4]])
    batch.save(tmp_path / "c", tokens=[[1, 2, 3], [1, 2, 3, 4, 5]])
    assert KVCache.load(tmp_path / "c", model.config).tokens == [[1, 2, 3], [1, 2, 3, 4, 5]]
    filled(model, "dict", 3).save(tmp_path / "c", tokens=torch.tensor([7, 8, 9]))
    loaded = KVCache.load(tmp_path / "c", model.config)
    assert loaded.tokens == loaded.fork().tokens == [7, 8, 9]


def test_a_cache_that_cannot_be_rebuilt_as_it_was_is_refused(model, tmp_path):
    """Made by hand, so it does not know its kind: 9 tokens seen, 4 kept, would come back as a dict cache of 4."""
    cache = KVCache([SlidingCache(model.config, 5, 0) for _ in range(3)], model.config)
    prefill(model, random_ids(1, 1, 9), cache)
    cache.save(tmp_path / "c")
    with pytest.raises(CacheError, match="says 9 tokens, but a dict cache reads 4"):
        KVCache.load(tmp_path / "c", model.config)
    by_hand = KVCache([DictCache() for _ in range(3)])
    with pytest.raises(CacheError, match="without a config"):
        by_hand.save(tmp_path / "d")
    with pytest.raises(CacheError, match="no folder"):
        filled(model, "dict").save(tmp_path / "nowhere" / "c")


def test_decode_takes_one_token_and_says_how_many_it_got(model):
    cache = filled(model, "dict", 3)
    with pytest.raises(ValueError, match="got 2"):
        decode(model, random_ids(1, 1, 2), cache, start_pos=3)
    assert cache.length == 3


def test_a_sliding_layer_made_by_itself_knows_what_the_config_says(model):
    layer = SlidingCache(model.config, 5, 0)
    for wrong, told in (({"Hk": 3}, "KV heads 3 .* 2"), ({"D": 16}, "head_dim 16 .* 32")):
        with pytest.raises(CacheError, match=told):
            layer.append(zeros(**wrong), zeros(**wrong))
    assert layer.length == 0


def test_a_fingerprint_that_is_asked_for_must_be_there(model, tmp_path):
    filled(model, "dict").save(tmp_path / "c")
    with pytest.raises(CacheError, match="does not say which weights"):
        KVCache.load(tmp_path / "c", model.config, model_fingerprint="0123456789abcdef")


def test_a_salt_is_not_in_the_file(model, tmp_path):
    cache = make_cache("prefix", model.config, salt="tenant-secret")
    prefill(model, random_ids(1, 1, 9), cache)
    cache.save(tmp_path / "c")
    assert b"tenant-secret" not in (tmp_path / "c").read_bytes()
    with pytest.raises(CacheError, match="salt, which is not stored"):
        KVCache.load(tmp_path / "c", model.config)  # would share its pages with everybody
    assert KVCache.load(tmp_path / "c", model.config, salt="tenant-secret").salt == "tenant-secret"


def test_who_has_the_old_file_open_reads_the_old_bytes(model, tmp_path):
    """Written in place, a reader would see half of each."""
    cache = filled(model, "dict")
    cache.save(tmp_path / "c")
    old = (tmp_path / "c").read_bytes()
    with open(tmp_path / "c", "rb") as reader:
        cache.truncate(4)
        cache.save(tmp_path / "c")
        assert reader.read() == old
    assert (tmp_path / "c").read_bytes() != old


def test_rows_are_in_the_file(model, tmp_path):
    filled(model, "dict", batch=3).save(tmp_path / "c")
    data = (tmp_path / "c").read_bytes()
    assert (
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["rows"] == "3"
    )


# --- another model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dict", "sliding", "paged", "batch"])
def test_the_model_refuses_a_cache_of_another_config(model, other_config, kind):
    with pytest.raises(ValueError, match=r"made for another model, with .*rope_theta=50\b"):
        prefill(model, random_ids(1, 1, 4), make_cache(kind, other_config))
    same = dataclasses.replace(model.config)  # equal, not identical
    prefill(model, random_ids(1, 1, 4), make_cache(kind, same))
    fewer = dataclasses.replace(model.config, num_hidden_layers=2)
    with pytest.raises(ValueError, match="with 2 layers"):
        prefill(model, random_ids(1, 1, 4), make_cache(kind, fewer))


def test_a_pool_serves_one_config_and_says_what_contradicts_it(model, other_config):
    for kind, make in (("paged", PagePool), ("prefix", PrefixPool)):
        pool = make(model.config, 8, 4)
        with pytest.raises(CacheError, match="another config"):
            make_cache(kind, other_config, pool=pool)
        with pytest.raises(CacheError, match="page=16 contradicts the pool, which has page=4"):
            make_cache(kind, model.config, pool=pool, page=16)
        with pytest.raises(CacheError, match="pages=3 contradicts"):
            make_cache(kind, model.config, pool=pool, pages=3)
        assert make_cache(kind, model.config, pool=pool, page=4, pages=8).pool is pool
        with pytest.raises(CacheError, match=f"a {make.__name__} was expected"):
            make_cache(kind, model.config, pool=5)
    with pytest.raises(CacheError, match="a PrefixPool was expected"):
        make_cache("prefix", model.config, pool=PagePool(model.config, 8, 4))


def test_a_row_of_another_config_is_refused(model, other_config):
    with pytest.raises(CacheError, match="another model"):
        BatchCache(
            [make_cache("dict", model.config), make_cache("dict", other_config)], model.config
        )


@pytest.mark.parametrize("kind", sorted(CACHES))
def test_the_first_append_is_checked_too(model, kind):
    """Before, only what was held already could contradict: heads, head_dim, and the dtype that was asked for."""
    for k in (zeros(3, Hk=1), zeros(3, D=8)):
        cache = make_cache(kind, model.config)
        with pytest.raises(CacheError, match="cannot append keys"):
            cache[0].append(k, k)
    cache = make_cache(kind, model.config, dtype=torch.bfloat16)
    for fresh in (cache, cache.fork()):
        with pytest.raises(
            CacheError,
            match=r"dtype torch.float32 to a cache that was made for dtype torch.bfloat16",
        ):
            fresh[0].append(zeros(3), zeros(3))
    cache = make_cache(kind, model.config, device="meta")
    with pytest.raises(CacheError, match="device cpu to a cache that was made for device meta"):
        cache[0].append(zeros(), zeros())
    cache = make_cache(kind, model.config, dtype=torch.float32, device="cpu")
    cache[0].append(zeros(), zeros())


@pytest.mark.parametrize("kind", sorted(CACHES))
@pytest.mark.parametrize(
    "v",
    [
        zeros(1),
        zeros(3).double(),
        zeros(3, Hk=1),
        zeros(3, B=2),
    ],
    ids=["T", "dtype", "Hk", "B"],
)
def test_values_that_differ_from_their_keys_are_refused(model, kind, v):
    """A slab broadcasts one token over three, cat promotes, and a file of bytes shifts everything behind it."""
    cache = make_cache(kind, model.config, capacity=32)
    layer = cache[0]
    layer.append(zeros(3), zeros(3))
    with pytest.raises(CacheError, match="both must be alike"):
        layer.append(zeros(3), v)
    with pytest.raises(CacheError, match="both must be alike"):
        layer.append(zeros(0), zeros(0))
    assert layer.length == 3


# --- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(CACHES))
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_fork(model, kind, copied):
    """A shallow copy of a paged cache gave its pages back when it died, and the next sequence wrote over them."""
    cache, more = filled(model, kind), random_ids(2, 1, 1)
    twin = copied(cache)
    logits = decode(model, more, twin, 9)
    del twin
    assert gap(decode(model, more, cache, 9), logits) <= TOLERANCE
    assert cache.length == 10


def test_a_page_cannot_be_given_back_twice(model):
    pool = PagePool(model.config, 3, 4)
    pages = pool.take(2)
    pool.release(pages)
    with pytest.raises(CacheError, match=f"page {pages[0]} was given back twice"):
        pool.release(pages[:1])
    assert sorted(pool.free) == [0, 1, 2]


def test_remember_wants_the_ids_of_what_is_held(model):
    """More are cut: pages behind the last token hold nothing yet."""
    pool = PrefixPool(model.config, 8, 4)
    cache, ids = make_cache("prefix", model.config, pool=pool), random_ids(1, 1, 9)
    prefill(model, ids, cache)
    cache.reserve(9, 16)
    with pytest.raises(CacheError, match="8 tokens for a cache that holds 9"):
        cache.remember(ids[0, :8])
    assert not pool.index
    cache.remember([*ids[0].tolist(), 1, 2, 3, 4, 5, 6, 7])
    assert len(pool.index) == 2  # not the third page and not the fourth
    cache.free()


def test_hits_and_salt_follow_the_cache(model):
    pool = PrefixPool(model.config, 12, 4)
    first, ids = (
        make_cache("prefix", model.config, pool=pool, salt="a"),
        random_ids(1, 1, 9)[0].tolist(),
    )
    prefill(model, torch.tensor([ids]), first)
    first.fork().remember(ids)
    other, same = (make_cache("prefix", model.config, pool=pool, salt=salt) for salt in ("", "a"))
    assert (other.reuse(ids), same.reuse(ids)) == (0, 8)
    assert same.hits == same.fork().hits == 8
    same.truncate(0)
    assert same.hits == 0


def test_reuse_begins_with_an_empty_table(model):
    """Pages that were reserved for an empty cache are not part of the prefix that is found."""
    pool = PrefixPool(model.config, 12, 4)
    first, ids = make_cache("prefix", model.config, pool=pool), random_ids(1, 1, 9)
    prefill(model, ids, first)
    first.remember(ids[0])
    first.free()
    cache = make_cache("prefix", model.config, pool=pool)
    cache.reserve(0, 12)
    assert cache.reuse(ids[0].tolist()) == 8
    assert gap(prefill(model, ids[:, 8:], cache, 8), score(model, ids)[:, -1]) <= TOLERANCE
    del cache
    assert len(pool.free) == 12 - 2


def test_what_is_found_was_used_just_now(model):
    """`find` without a note of it would let a prefix in daily use be evicted before one that nobody asks for."""
    pool = PrefixPool(model.config, 4, 4)

    def ask(ids):
        cache = make_cache("prefix", model.config, pool=pool)
        n = cache.reuse(ids)
        prefill(model, torch.tensor([ids[n:]]), cache, n)
        return cache, n

    a, b = (random_ids(seed, 1, 5)[0].tolist() for seed in (1, 2))
    for ids in (a, b):
        cache, _ = ask(ids)
        cache.remember(ids)
        cache.free()
    cache = make_cache("prefix", model.config, pool=pool)
    assert cache.reuse(a) == 4  # found, and never remembered again
    cache.free()
    ask(random_ids(3, 1, 12)[0].tolist())[0].free()  # three pages: one must go
    assert (ask(a)[1], ask(b)[1]) == (4, 0)


def test_a_half_failed_append_leaves_pages_for_others(model):
    """Layer 0 took a page, layers 1 and 2 never came; truncate between two lengths of layers frees what is free."""
    pool = PagePool(model.config, 3, 4)
    cache = make_cache("paged", model.config, pool=pool)
    prefill(model, random_ids(1, 1, 6), cache)
    cache[0].append(zeros(5), zeros(5))
    assert len(pool.free) == 0
    cache.truncate(7)  # layer 0 holds 7, the others 6
    assert len(pool.free) == 1
    assert [layer.length for layer in cache] == [7, 6, 6]
    cache.truncate(6)
    more = random_ids(2, 1, 4)
    whole = torch.cat((random_ids(1, 1, 6), more), 1)
    assert gap(prefill(model, more, cache, 6), score(model, whole)[:, -1]) <= TOLERANCE


@pytest.mark.parametrize("kind", ["paged", "prefix"])
def test_a_pool_that_grows_begins_small_and_doubles(model, kind):
    """A whole context at once is memory that a GPU really gives away: 40,960 tokens for the first one."""
    config = dataclasses.replace(model.config, max_position_embeddings=40_960)
    cache = make_cache(kind, config, batch_size=2)
    k = zeros(B=2)
    for n in range(1, 400):
        for layer in cache:
            layer.append(k, k)
        assert cache.pool.nbytes <= 4 * max(cache.nbytes, 2 * cache.pool.bytes_per_page), n
    assert cache.nbytes == costs.cache_bytes(kind, config, 399, 2, 4)


def test_growing_a_pool_copies_fewer_than_two_pages_for_each_that_is_taken(model, monkeypatch):
    copied, grow = [], ElasticPool.exhausted

    def counted(self, count):
        copied.append(len(self.references))
        grow(self, count)

    monkeypatch.setattr(ElasticPool, "exhausted", counted)
    pool = ElasticPool(model.config, 1, 1)
    pool.storage(zeros())
    for n in range(1, 300):
        pool.take(1)
        assert sum(copied) < 2 * n
        assert pool.nbytes == len(pool.references) * pool.bytes_per_page


def test_an_elastic_prefix_pool_grows_before_it_forgets(model):
    pool = ElasticPrefixPool(model.config, 2, 4, keep=8)
    for seed in range(4):  # 12 pages in all, of which the pool keeps what fits into 8
        cache, ids = (
            make_cache("prefix", model.config, pool=pool),
            random_ids(seed, 1, 13)[0].tolist(),
        )
        prefill(model, torch.tensor([ids]), cache)
        cache.remember(ids)
        cache.free()
        if seed == 0:
            assert len(pool.index) == 3 and len(pool.references) <= 8
    assert len(pool.references) == 8
    assert make_cache("prefix", model.config, pool=pool).reuse(ids) == 12


@pytest.mark.parametrize(("keep", "pages"), [(4, [4, 4]), (5, [4, 8])])
def test_an_elastic_prefix_pool_grows_only_for_pages_that_it_lacks(model, keep, pages):
    """What is free is used up first; from `keep` pages on, what nobody uses is forgotten first."""
    pool, found = ElasticPrefixPool(model.config, 4, 4, keep=keep), []
    for seed in range(2):
        cache = make_cache("prefix", model.config, pool=pool)
        ids = random_ids(seed, 1, 16)
        prefill(model, ids, cache)
        found.append(len(pool.references))
        cache.remember(ids[0])
        cache.free()
    assert found == pages


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-7e4, 7e4, float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_what_fp16_scales_cannot_hold_is_refused_before_it_is_stored(model, value, where):
    """Below −65,504 the offset became −inf, and every later read NaN."""
    layer = make_cache("quantized", model.config, group=4, residual=0)[0]
    layer.append(zeros(3), zeros(3))
    wrong = zeros(8)
    wrong[0, 0, 0, 0] = value
    with pytest.raises(CacheError, match=f"cannot quantize {where} of size"):
        layer.append(*((wrong, zeros(8)) if where == "keys" else (zeros(8), wrong)))
    assert layer.length == 3


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_largest_number_that_is_taken_comes_back(model, bits):
    layer = make_cache("quantized", model.config, bits=bits, group=4, residual=0)[0]
    k = torch.full((1, 2, 4, 32), LARGEST)
    k[:, :, 1:] = -LARGEST
    layer.append(k, k)
    for dense in layer.append(zeros(), zeros()):
        assert (dense[:, :, :4] - k).abs().max() <= 0.01 * LARGEST


def test_a_rotation_may_make_a_number_too_large(model):
    k = torch.full((1, 2, 4, 32), 60_000.0)
    make_cache("quantized", model.config)[0].append(k, k)
    with pytest.raises(CacheError, match="cannot quantize keys"):
        make_cache("quantized", model.config, rotate="hadamard")[0].append(k, k)


@pytest.mark.parametrize("residual", [0, 3])
@pytest.mark.parametrize("T", [1, 5])
def test_a_failed_forward_over_codes_can_be_repeated(model, monkeypatch, residual, T):
    """Blocks were quantized at the end of an append: taken back, the retry read codes where the first try did not."""
    cache = make_cache("quantized", model.config, bits=2, group=4, residual=residual)
    prefill(model, random_ids(1, 1, 7), cache)
    clean, more = cache.fork(), random_ids(2, 1, T)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1].mlp, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prefill(model, more, cache, 7)
    cache.truncate(7)
    assert torch.equal(prefill(model, more, cache, 7), prefill(model, more, clean, 7))
    options = {"bits": 2, "group": 4, "residual": residual}
    assert (
        cache.nbytes
        == clean.nbytes
        == costs.cache_bytes("quantized", model.config, 7 + T, 1, 4, last=T, **options)
    )


def test_a_host_store_forgets_the_dtype_with_the_tokens(model):
    cache = make_cache("offloaded", model.config, to="host")
    layer, k = cache[0], torch.randn(1, 2, 4, 32, generator=torch.Generator().manual_seed(0))
    layer.append(k.bfloat16(), k.bfloat16())
    layer.truncate(0)
    layer.append(k, k)
    keys, _ = layer.append(k, k)
    assert keys.dtype == torch.float32
    assert torch.equal(keys[:, :, :4], k)


# --- small things ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(CACHES))
@pytest.mark.parametrize("n", [-1, 1.5, None])
def test_a_layer_refuses_to_go_back_to_nowhere(model, kind, n):
    cache = filled(model, kind)
    with pytest.raises(CacheError, match="a number of tokens ≥ 0 was expected"):
        cache[0].truncate(n)
    assert cache.length == 9


@pytest.mark.parametrize("n", [-1, [9, -1], [9], [9, 9, 9], [9, 1.5]], ids=str)
def test_a_batch_wants_a_length_for_each_row(model, n):
    batch = BatchCache([filled(model, "dict"), filled(model, "dict")], model.config)
    with pytest.raises(CacheError, match=r"a number of tokens ≥ 0 for each of 2 rows was expected"):
        batch.truncate(n)
    assert [row.length for row in batch.rows] == [9, 9]


def test_a_latent_cache_refuses_it_too():
    cache = LatentCache()
    cache.append(torch.zeros(1, 5, 8), torch.zeros(1, 5, 4))
    with pytest.raises(CacheError, match="truncate"):
        cache.truncate(-1)
    assert cache.length == 5


def test_an_option_said_twice_must_say_one_thing(model):
    cache = make_cache("quantized:bits=4", model.config, bits=4, residual=8)
    assert (cache.made.options["bits"], cache.made.options["residual"]) == (4, 8)
    with pytest.raises(
        CacheError, match="bits is 4 in the cache's name and 8 as an argument"
    ) as caught:
        make_cache("quantized:bits=4", model.config, bits=8)
    assert "bits=8" in caught.value.hint


def test_a_pool_is_an_option_for_programs_only(model):
    """A flag can hold its text, not the object."""
    pool = PagePool(model.config, 4, 4)
    assert make_cache("paged", model.config, pool=pool).pool is pool
    with pytest.raises(
        CacheError, match=r"cache 'paged' has no option pool: its options are page, pages$"
    ):
        check_options("paged", {"pool": "4"})


def test_no_layers_and_no_rows_are_said_so(model):
    with pytest.raises(CacheError, match="no layers"):
        KVCache([]).mask(2)
    with pytest.raises(CacheError, match="no rows"):
        BatchCache([], model.config)
    cache = make_cache("dict", model.config)
    with pytest.raises(CacheError, match="two rows"):
        BatchCache([cache, cache], model.config)
    with pytest.raises(CacheError, match=r"bits is 8\.0"):
        make_cache("quantized", model.config, bits=8.0)


@pytest.mark.parametrize("kind", sorted(CACHES))
def test_an_empty_cache_knows_how_many_rows_it_was_made_for(model, kind):
    cache = make_cache(kind, model.config, batch_size=2)
    with pytest.raises(CacheError, match="row 9 of a cache with 2 rows"):
        cache.reorder([0, 9])
    cache.reorder([0, 1, 1])
    cache.reorder([2])
    assert cache.sizes.batch_size == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("nonsense", 5), "no cache is called"),
        (("paged", 5, {"pagesize": 4}), "no option pagesize"),
        (("quantized", 5, {"bits": 3}), "bits is 3"),
        (("dict", -5), "tokens is -5"),
        (("dict", 2.5), "tokens is 2.5"),
        (("batch", 5, {"of": "batch"}), "of is 'batch'"),
        (("quantized", 5, {"last": -1}), "last is -1"),
    ],
    ids=str,
)
def test_costs_of_nonsense_are_refused(model, arguments, match):
    kind, tokens, options = (*arguments, {})[:3]
    with pytest.raises(CacheError, match=match):
        costs.cache_bytes(kind, model.config, tokens, 1, 4, **options)


def test_costs_of_more_than_a_static_cache_holds_are_refused(model):
    with pytest.raises(CapacityError, match="50 tokens do not fit into a static cache of 8"):
        costs.cache_bytes("static", model.config, 50, 1, 4, capacity=8)
    assert costs.cache_bytes("static", model.config, 8, 1, 4, capacity=8) > 0


def test_what_cannot_be_undone_is_refused_in_all_rows_or_none(model):
    """Row 0 was cut before row 1 refused."""
    rows = [filled(model, "dict"), filled(model, "sliding", window=5)]
    batch = BatchCache(rows, model.config)
    for n in (7, [7, 7]):
        with pytest.raises(UnsupportedError, match="cannot go back"):
            batch.truncate(n)
    with pytest.raises(UnsupportedError, match="cannot go back"):
        batch[0].truncate(7)
    assert [row.length for row in rows] == [9, 9]
    batch.truncate([7, 9])


def test_a_cache_says_what_it_is_and_copies_as_one():
    """Not as the list that it is: thousands of numbers, and a copy that would append to the same layers."""
    config = nanokv.load("tiny")[0].config
    cache = nanokv.make_cache("dict", config)
    for layer in cache:
        layer.append(*torch.zeros(2, 1, config.num_key_value_heads, 5, config.head_dim))
    assert repr(cache) == f"<KVCache 'dict': 6 layers × 5 tokens, {cache.nbytes:,} B>"
    one = nanokv.KVCache(cache[:1])
    assert repr(one) == f"<KVCache 'dict': 1 layers × 5 tokens, {one.nbytes:,} B>"
    assert repr(nanokv.KVCache()) == "<KVCache 'dict': 0 layers × 0 tokens, 0 B>"
    twin = cache.copy()
    twin.truncate(2)
    assert (cache.length, twin.length, twin.made.name) == (5, 2, "dict")
    with pytest.raises(CacheError, match="config is a Transformer, not a Config") as caught:
        nanokv.make_cache("dict", nanokv.load("tiny")[0])
    assert caught.value.__notes__ == ["hint: pass model.config"]
