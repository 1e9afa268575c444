"""Sliding windows and sinks against recomputation, one slab against its promises, offloaded layers, and ragged rows."""

import math
import sys
from functools import partial

import pytest
import torch

from nanokv import costs
from nanokv.attention import prefill_attention
from nanokv.cache import BatchCache, KVCache, NoCache, make_cache
from nanokv.cache.sliding import SlidingCache
from nanokv.cache.static import GrowingCache
from nanokv.config import Config
from nanokv.errors import CacheError, CapacityError, UnsupportedError
from nanokv.inference import decode, prefill, score
from nanokv.rope import apply_rope, rope_angles
from oracle import SHAPES, TOLERANCE, gap, pair, random_ids

pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


def randn(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- sliding: against a band mask, and against StreamingLLM by hand ---------------------------------------------------


def band_scores(model, ids, window):
    """No cache at all: every layer sees the last `window` positions, itself included."""
    T = ids.shape[1]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance < window)
    hidden = model(ids, NoCache(len(model.layers)), 0, partial(prefill_attention, mask=mask))
    return model.lm_head(hidden)


@pytest.mark.parametrize("window", [1, 2, 7, 30, 31])
@pytest.mark.parametrize("chunks", [(30,), (1,) * 30, (9, 1, 13, 7)], ids=str)
def test_a_window_equals_a_band_mask(model, window, chunks):
    ids, position = random_ids(0, 2, 30), 0
    expected, cache = (
        band_scores(model, ids, window),
        make_cache("sliding", model.config, batch_size=2, window=window),
    )
    for part in ids.split(list(chunks), 1):
        logits = (decode if part.shape[1] == 1 else prefill)(model, part, cache, start_pos=position)
        position += part.shape[1]
        assert gap(logits, expected[:, position - 1]) <= TOLERANCE
        assert cache.nbytes == costs.cache_bytes(
            "sliding", model.config, position, 2, 4, window=window
        )
    assert cache.length == 30


YARN = pair(**SHAPES["G3-yarn"])[1].config
PLAIN = pair(**SHAPES["G2-tied"])[1].config


@pytest.mark.parametrize("config", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize(("window", "sinks"), [(1, 1), (4, 2), (6, 4), (5, 0), (40, 4)])
@pytest.mark.parametrize("chunks", [(24,), (1,) * 24, (2, 1, 8, 13)], ids=str)
def test_sinks_stand_at_their_place_inside_the_cache(config, window, sinks, chunks):
    """StreamingLLM by hand: for each query, keys are rotated to 0, 1, 2, … in the order in which they are cached."""
    D, Hk, T = config.head_dim, 2, 24
    q, k, v = (randn(seed, 1, Hk, T, D) for seed in (1, 2, 3))
    rope = rope_angles(config, torch.arange(T), torch.float32)
    layer, got, position = SlidingCache(config, window, sinks), [], 0
    for t in chunks:
        part = slice(position, position + t)
        mask = layer.mask(t)
        keys, values = layer.append(*(apply_rope(k, rope)[:, :, part], v[:, :, part]))
        got.append(prefill_attention(apply_rope(q, rope)[:, :, part], keys, values, mask))
        position += t
        assert layer.keys.shape[2] == min(position, window - 1 + sinks)
    for p in range(T):
        seen = [i for i in range(p + 1) if i < sinks or i > p - window]
        places = rope_angles(config, torch.arange(len(seen)), torch.float64)
        here = tuple(x[-1:] for x in places)
        scores = (
            apply_rope(q[:, :, p : p + 1].double(), here)
            @ apply_rope(k[:, :, seen].double(), places).mT
        )
        expected = (scores / math.sqrt(D)).softmax(-1) @ v[:, :, seen].double()
        assert gap(torch.cat(got, 2)[:, :, p : p + 1], expected.float()) <= 2e-5, p


def test_memory_stays_constant_however_long_the_text(model):
    cache = make_cache("sliding", model.config, window=8, sinks=2)
    sizes = []
    for i in range(40):
        decode(model, random_ids(4, 1, 1), cache, start_pos=i)
        sizes.append(cache.nbytes)
    assert sizes[9:] == [sizes[8]] * 31
    layer = cache[0]
    assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes  # no view of something larger


def test_going_back_past_the_window_is_refused_and_changes_nothing(model):
    cache = make_cache("sliding", model.config, window=6)
    prefill(model, random_ids(5, 1, 5), cache)
    assert cache.sizes.max_rollback == 0
    cache.truncate(3)  # nothing has been forgotten yet
    assert cache.sizes.max_rollback == 2
    prefill(model, random_ids(6, 1, 9), cache, start_pos=3)
    before = {name: x.clone() for name, x in cache[0].state().items()}
    with pytest.raises(UnsupportedError, match="cannot go back to 11: 7 of its 12 tokens are gone"):
        cache.truncate(11)
    assert all(torch.equal(cache[0].state()[name], x) for name, x in before.items())
    cache.truncate(12)
    cache.truncate(0)
    ids = random_ids(7, 1, 5)
    assert gap(prefill(model, ids, cache), score(model, ids)[:, -1]) <= TOLERANCE


@pytest.mark.parametrize("options", [{"window": -1}, {"window": 2.0}, {"sinks": -1}], ids=str)
def test_windows_that_make_no_sense_are_refused(model, options):
    with pytest.raises(CacheError, match="whole number"):
        make_cache("sliding", model.config, **options)


# --- static and growing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["static", "batch"])
def test_overflow_is_refused_before_anything_is_written_in_any_layer(model, name):
    options = {"of": "static"} if name == "batch" else {}
    cache = make_cache(name, model.config, batch_size=2, capacity=8, **options)
    prefill(model, random_ids(8, 2, 6), cache)
    before = [layer.state() for layer in cache]
    before = [{key: x.clone() for key, x in state.items()} for state in before]
    for T in (3, 100):
        with pytest.raises(CapacityError, match=f"holds 6 of 8 tokens: {T} more do not fit"):
            prefill(model, random_ids(9, 2, T), cache, start_pos=6)
    assert [layer.length for layer in cache] == [6, 6, 6]
    for layer, old in zip(cache, before, strict=True):
        assert all(torch.equal(layer.state()[key], x) for key, x in old.items())
    prefill(model, random_ids(10, 2, 2), cache, start_pos=6)


def test_the_slab_stays_where_it_is_and_crop_moves_only_its_end(model):
    """transformers' StaticCache has no crop at all."""
    cache = make_cache("static", model.config, capacity=16)
    ids = random_ids(11, 1, 12)
    prefill(model, ids, cache)
    address = cache[0].keys.data_ptr()
    cache.truncate(5)
    more = random_ids(12, 1, 3)
    expected = score(model, torch.cat((ids[:, :5], more), 1))[:, -1]
    assert gap(prefill(model, more, cache, start_pos=5), expected) <= TOLERANCE
    assert cache[0].keys.data_ptr() == address


@pytest.mark.parametrize("name", ["static", "growing"])
def test_a_cache_reordered_inside_inference_mode_is_writable_outside(model, name):
    """torch refuses to write outside inference mode into a tensor that was made inside."""
    cache = make_cache(name, model.config, batch_size=2, capacity=16)
    with torch.inference_mode():
        prefill(model, random_ids(13, 2, 4), cache)
        cache.reorder([1, 0])
        cache = cache.fork()
    zeros = torch.zeros(2, 2, 1, 32)
    for layer in cache:
        layer.append(zeros, zeros)
    assert cache.length == 5


def test_growing_copies_fewer_than_two_tokens_for_each_that_comes(monkeypatch):
    """cat copies N²/2. Counted by the slabs: each time one is made, the tokens in use are copied into it."""
    copied = []
    make_room = GrowingCache.make_room

    def counted(self, slots, like):
        before = self.keys
        make_room(self, slots, like)
        if before is not None and self.keys is not before:
            copied.append(self.length)

    monkeypatch.setattr(GrowingCache, "make_room", counted)
    layer, one = GrowingCache(), torch.zeros(1, 1, 1, 2)
    for n in range(1, 1500):
        layer.append(one, one)
        assert sum(copied) < 2 * n
        assert layer.keys.shape[2] < max(2 * n, 17)
    assert copied == [16, 32, 64, 128, 256, 512, 1024]


# --- offloaded ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["disk", "host"])
def test_offloaded_layers_are_bit_equal_to_the_dict_cache(model, to, tmp_path):
    folder = {"folder": str(tmp_path)} if to == "disk" else {}
    far, near = (
        make_cache("offloaded", model.config, batch_size=2, to=to, **folder),
        make_cache("dict", model.config),
    )
    ids, position = random_ids(14, 2, 90), 0
    for t in (70, 1, 1, 5, 1):
        part = ids[:, position : position + t]
        assert torch.equal(
            prefill(model, part, far, position), prefill(model, part, near, position)
        )
        position += t
        if t == 5:
            position = 74
            far.truncate(position)
            near.truncate(position)
    for a, b in zip(far, near, strict=True):
        assert torch.equal(a.state()["key"], b["key"])
        # Not a view that keeps a whole chunk near.
        assert a.like.untyped_storage().nbytes() == a.like.nbytes
    assert list(tmp_path.iterdir()) == []  # a file without a name


@pytest.mark.parametrize("to", ["disk", "host"])
def test_a_single_layer_reads_ahead_only_what_is_written(to):
    """With one layer "the next layer" is this one: what is read ahead must hold the tokens of this step already, and
    the thread that reads must not move the place where this one writes."""
    one = Config.from_dict(
        {
            "vocab_size": 11,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 512,
        }
    )
    interval, generator = sys.getswitchinterval(), torch.Generator().manual_seed(0)
    sys.setswitchinterval(1e-6)  # the other thread gets its turn between any two bytecodes
    try:
        for _ in range(20):
            caches = make_cache("offloaded", one, to=to), make_cache("dict", one)
            for step in range(30):
                new = [torch.randn(1, 2, 4, 64, generator=generator) for _ in "kv"]
                ours, theirs = (cache[0].append(*new) for cache in caches)
                assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]), step
                if step % 7 == 6:
                    for cache in caches:
                        cache.truncate(cache.length - 5)
    finally:
        sys.setswitchinterval(interval)


def test_a_full_disk_is_an_error_that_truncate_mends(model, monkeypatch):
    cache, ids, more = (
        make_cache("offloaded", model.config),
        random_ids(15, 1, 6),
        random_ids(16, 1, 2),
    )
    prefill(model, ids, cache)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache[1].store, "write", full)
        with pytest.raises(OSError, match="No space"):
            prefill(model, more, cache, start_pos=6)
    cache.truncate(6)
    assert (
        gap(
            prefill(model, more, cache, start_pos=6), score(model, torch.cat((ids, more), 1))[:, -1]
        )
        <= TOLERANCE
    )


# --- ragged rows ----------------------------------------------------------------------------------------------------

MIX = [
    ("dict", {}),
    ("static", {}),
    ("growing", {}),
    ("paged", {"page": 3}),
    ("sliding", {"window": 7}),
    ("sliding", {"window": 5, "sinks": 2}),
    ("quantized", {"bits": 4, "group": 4, "residual": 2}),
    ("offloaded", {}),
]


def solo(model, seed, kind, options, length):
    cache = make_cache(kind, model.config, capacity=40, **options)
    prefill(model, random_ids(seed, 1, length), cache)
    return cache


@pytest.mark.parametrize(
    "lengths", [(3, 14, 9, 5, 20, 17, 11, 6), (9,) * 8], ids=["ragged", "equal"]
)
def test_rows_of_mixed_kinds_equal_their_solo_runs(model, lengths):
    """Rows of equal length but unequal width (a window) must be padded too: unmasked zeros would be seen as keys."""
    rows = [solo(model, i, *kind, n) for i, (kind, n) in enumerate(zip(MIX, lengths, strict=True))]
    batch = BatchCache([row.fork() for row in rows], model.config)
    for step, T in enumerate((1, 1, 3, 1, 4, 1)):
        ids = random_ids(100 + step, len(rows), T)
        logits = (
            prefill(model, ids, batch, batch.length)
            if T > 1
            else decode(model, ids, batch, batch.length)
        )
        for b, row in enumerate(rows):
            alone = prefill(model, ids[b : b + 1], row, row.length)
            # A last bit may turn a code into its neighbour.
            tolerance = 0.02 if MIX[b][0] == "quantized" else TOLERANCE
            assert gap(logits[b : b + 1], alone) <= tolerance, (step, MIX[b])
    assert (
        torch.as_tensor(batch.length).tolist() == [n + 11 for n in lengths]
        or batch.length == lengths[0] + 11
    )
    assert batch.nbytes == sum(row.nbytes for row in rows)


def test_each_row_goes_back_to_a_length_of_its_own(model):
    kinds = [("dict", {}), ("static", {}), ("paged", {"page": 3}), ("growing", {})]
    rows = [solo(model, i, *kind, 5 + 3 * i) for i, kind in enumerate(kinds)]
    batch = BatchCache([row.fork() for row in rows], model.config)
    prefill(model, random_ids(20, 4, 4), batch, batch.length)
    kept = torch.tensor([5, 7, 12, 14])
    batch.truncate(kept)
    assert torch.equal(batch.length, kept)
    for row, n in zip(rows, (5, 7, 11, 14), strict=True):
        row.truncate(n)
    prefill(model, random_ids(20, 4, 4)[2:3, :1], rows[2], 11)
    ids = random_ids(21, 4, 1)
    logits = decode(model, ids, batch, batch.length)
    for b, row in enumerate(rows):
        assert gap(logits[b : b + 1], decode(model, ids[b : b + 1], row, row.length)) <= TOLERANCE
    for wrong in ([1, 2, 3], [1, 2, 3, -1], [1, 2, 3, 1.5], -1):
        with pytest.raises(CacheError, match="truncate"):
            batch.truncate(wrong)
    assert torch.equal(batch.length, kept + 1)


def test_a_full_row_stops_the_step_before_any_row_has_changed(model):
    rows = [make_cache("dict", model.config), make_cache("static", model.config, capacity=6)]
    for row in rows:
        prefill(model, random_ids(22, 1, 6), row)
    batch = BatchCache(rows, model.config)
    with pytest.raises(CapacityError, match="holds 6 of 6 tokens: 1 more do not fit"):
        decode(model, random_ids(23, 2, 1), batch, 6)
    assert batch.length == 6
    assert batch.capacity == 6


def test_mixed_rows_are_not_saved_as_if_they_were_alike(model, tmp_path):
    alike = BatchCache(
        [solo(model, i, "paged", {"page": 3}, 4 + i) for i in range(2)], model.config
    )
    alike.save(tmp_path / "c")
    loaded = KVCache.load(tmp_path / "c", model.config)
    assert (loaded.made.name, loaded.made.options) == ("batch", {"of": "paged", "page": 3})
    assert loaded.length.tolist() == [4, 5]
    mixed = BatchCache(
        [solo(model, 0, "dict", {}, 4), solo(model, 1, "static", {}, 4)], model.config
    )
    with pytest.raises(UnsupportedError, match="mixed kinds"):
        mixed.save(tmp_path / "d")


def test_make_cache_names_what_a_batch_can_be_made_of(model):
    assert isinstance(make_cache("batch", model.config, of="paged", page=3), BatchCache)
    for of in ("batch", "dcit"):
        with pytest.raises(CacheError, match=f"of is '{of}': the caches are dict"):
            make_cache("batch", Config.from_dict(model.config.to_dict()), of=of)
