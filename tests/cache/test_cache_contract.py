"""What every cache must do, run over every name in CACHES: a new cache is held to all of this by its entry there.

The reference is the model without a cache (`score`) and, in the random sequences at the end, plain Python lists of
tensors. Every kind can truncate, fork, reorder and save; a layer that cannot says so by UnsupportedError, from the base
class. Nothing but how bytes count may differ between caches that keep exact values.
"""

import copy
import hashlib
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import save_file

from nanokv import cache as cache_module
from nanokv import costs
from nanokv.attention import causal_mask, is_causal
from nanokv.cache import CACHES, DictCache, KVCache, LayerCache, NoCache, make_cache
from nanokv.cache.capabilities import causal_keys
from nanokv.config import Config
from nanokv.decoding.generation import generate
from nanokv.errors import CacheError, ContextError, UnsupportedError
from nanokv.inference import decode, prefill, score
from oracle import SHAPES, TOLERANCE, gap, pair, pair_from_disk, random_ids

pytestmark = pytest.mark.sampled

CAPACITY = 64
# Truncate moves an end mark; fork, reorder and load take what they need anew.
KEEPS_MEMORY = ("static", "growing")
# The same kinds with other options; none of them forgets or rounds anything within these tests.
VARIANTS = {
    "paged page=1": ("paged", {"page": 1}),
    "paged page=3": ("paged", {"page": 3}),
    "prefix page=4": ("prefix", {"page": 4}),
    "prefix radix": ("prefix", {"page": 4, "index": "radix"}),
    "sliding sinks": ("sliding", {"window": 60, "sinks": 4}),
    "quantized 4 bits": ("quantized", {"bits": 4, "residual": CAPACITY}),
    "quantized K8V4 hadamard": (
        "quantized",
        {"k_bits": 8, "v_bits": 4, "rotate": "hadamard", "residual": CAPACITY},
    ),
    "offloaded host": ("offloaded", {"to": "host"}),
    "batch of paged": ("batch", {"of": "paged", "page": 3}),
    "batch of static": ("batch", {"of": "static"}),
    "batch of quantized": ("batch", {"of": "quantized"}),
    "batch of growing": ("batch", {"of": "growing"}),
    "batch of offloaded": ("batch", {"of": "offloaded"}),
}
KINDS = {kind: (kind, {}) for kind in CACHES} | VARIANTS


def make(name, config, batch_size=1, **sizes):
    kind, options = KINDS[name]
    return make_cache(kind, config, batch_size=batch_size, capacity=CAPACITY, **sizes, **options)


def made_with(name):
    """(name, options) as the cache itself knows them: what was left to the capacity is decided."""
    kind, options = KINDS[name]
    decided = {
        "batch": {"of": "dict"},
        "sliding": {"window": CAPACITY},
        "evicting": {"budget": CAPACITY},
    }.get(kind, {})
    return kind, decided | options


def expected_bytes(name, config, tokens, batch, itemsize):
    kind, options = KINDS[name]
    return costs.cache_bytes(kind, config, tokens, batch, itemsize, capacity=CAPACITY, **options)


def keeps_memory(name):
    kind, options = KINDS[name]
    return options.get("of", kind) in KEEPS_MEMORY


# On the tests where options could make a difference.
VARIANTS_TOO = pytest.mark.parametrize("name", sorted(KINDS))


@pytest.fixture(params=sorted(CACHES))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model():
    """G = 2, untied, random biases."""
    return pair(**SHAPES["G2-untied-bias"])[1]


@pytest.fixture(scope="module")
def bf16_model(tmp_path_factory):
    return pair_from_disk(tmp_path_factory.mktemp("bf16"), **SHAPES["G2-tied"])[1]


@pytest.fixture
def new(name, model):
    """new(batch_size) → an empty cache of this kind."""
    return lambda batch=1: make(name, model.config, batch)


def contents(cache):
    """Every stored tensor of every layer, as values that can be compared later (clones)."""
    return [{key: tensor.clone() for key, tensor in layer.state().items()} for layer in cache]


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)
        for x, y in zip(a, b, strict=True)
    )


def feed(model, ids, cache, *chunks):
    """Prefill in chunks (decode for chunks of one); logits after the last token."""
    for chunk in ids.split(list(chunks) if chunks else ids.shape[1], dim=1):
        step = decode if chunk.shape[1] == 1 else prefill
        logits = step(model, chunk, cache, start_pos=cache.length)
    return logits


# --- the same answers on every path ---------------------------------------------------------------------------------


def test_a_new_cache_is_empty(new, model):
    cache = new()
    assert isinstance(cache, KVCache)
    assert len(cache) == model.config.num_hidden_layers
    assert cache.length == cache.nbytes == cache.sizes.held == 0
    assert all(isinstance(layer, LayerCache) and layer.length == 0 for layer in cache)
    assert len({id(layer) for layer in cache}) == len(cache)


@pytest.mark.parametrize("batch", [1, 3])
def test_prefill_equals_score(new, model, batch):
    ids = random_ids(0, batch, 21)
    cache = new(batch)
    assert gap(prefill(model, ids, cache, start_pos=0), score(model, ids)[:, -1]) <= TOLERANCE
    assert cache.length == 21


@VARIANTS_TOO
@pytest.mark.parametrize("batch", [1, 3])
def test_decode_equals_score_at_every_position(new, model, batch):
    ids = random_ids(1, batch, 24)
    expected, cache = score(model, ids), new(batch)
    for i in range(24):  # from the first token on: decode works on an empty cache too
        assert (
            gap(decode(model, ids[:, i : i + 1], cache, start_pos=i), expected[:, i]) <= TOLERANCE
        ), i
        assert cache.length == i + 1


@VARIANTS_TOO
@pytest.mark.parametrize(
    "chunks", [(1, 20), (20, 1), (7, 7, 7), (2, 3, 5, 11), (1,) * 21, (10, 1, 10)], ids=str
)
def test_chunks_equal_the_whole(new, model, chunks):
    ids = random_ids(2, 2, 21)
    assert gap(feed(model, ids, new(2), *chunks), score(model, ids)[:, -1]) <= TOLERANCE


def test_bf16(name, bf16_model):
    """bf16 in, bf16 kept: half the bytes; logits within three times what chunking changes in transformers itself."""
    ids, config = random_ids(3, 2, 30), bf16_model.config
    cache = make(name, config, 2, dtype=torch.bfloat16)
    logits = feed(bf16_model, ids, cache, 20, 1, 9)
    assert logits.dtype == torch.bfloat16
    assert gap(logits, score(bf16_model, ids)[:, -1]) <= 0.1
    assert cache.nbytes == expected_bytes(name, config, 30, 2, 2)


@VARIANTS_TOO
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 17), (3, 40)])
def test_bytes_equal_the_formula_to_the_byte(new, name, model, batch, tokens):
    cache = new(batch)
    feed(model, random_ids(4, batch, tokens), cache)
    assert (
        cache.nbytes
        == expected_bytes(name, model.config, tokens, batch, 4)
        == sum(layer.nbytes for layer in cache)
    )


@VARIANTS_TOO
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 17), (3, 40)])
def test_used_bytes_are_those_of_the_tokens(new, name, model, batch, tokens):
    """Kinds that reserve room show the formula's bytes here; the others hold nothing but what is used."""
    cache = new(batch)
    assert cache.sizes.used_nbytes == 0
    feed(model, random_ids(4, batch, tokens), cache)
    reserves = {"static", "growing", "paged", "prefix"} & {KINDS[name][0], KINDS[name][1].get("of")}
    exact = expected_bytes("dict", model.config, tokens, batch, 4)
    assert cache.sizes.used_nbytes == (exact if reserves else cache.nbytes) <= cache.nbytes
    assert cache.sizes.used_nbytes == sum(layer.sizes.used_nbytes for layer in cache)
    if cache.sizes.max_rollback is None:
        cache.truncate(tokens - 1)
        assert cache.sizes.used_nbytes == (
            exact * (tokens - 1) // tokens if reserves else cache.nbytes
        )


def test_the_mask_is_pure_and_bottom_right(new, model):
    cache = new()
    feed(model, random_ids(5, 1, 5), cache)
    before = contents(cache)
    mask = cache.mask(3)
    assert mask.tolist() == [[True] * 6 + [False] * 2, [True] * 7 + [False], [True] * 8]
    assert cache.mask(1) is None
    assert cache.length == 5
    assert same(contents(cache), before)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("T", [1, 2, 7])
def test_a_plainly_causal_mask_is_known_without_making_it(new, model, monkeypatch, tokens, T):
    cache = new()
    if tokens:
        feed(model, random_ids(5, 1, tokens), cache)
    mask = cache.mask(T)
    with monkeypatch.context() as patch:
        patch.setattr("nanokv.cache.base.causal_mask", None)
        patch.setattr("nanokv.cache.sliding.torch", None)
        keys = causal_keys(cache, T)
    assert keys == (None if T == 1 else tokens + T)
    assert is_causal(mask) == (keys is not None)


def test_a_mask_of_the_caller_s_own_is_asked(new, model):
    """In a subclass, on one object, or in one layer."""

    def own(T):
        asked.append(T)
        return causal_mask(T, T)

    asked, caches = [], [new(), new(), new()]
    caches[0].__class__ = type("Own", (type(caches[0]),), {"mask": lambda self, T: own(T)})
    caches[1].mask = own
    wrapped = getattr(caches[2], "rows", [caches[2]])[0]
    wrapped[0].mask = own
    for count, cache in enumerate(caches, 1):
        if cache is caches[2] and type(cache).__name__ == "PagedBatch":
            continue  # its mask is its own
        assert causal_keys(cache, 3) is None
        feed(model, random_ids(5, 1, 3), cache)
        assert len(asked) >= count


# --- start_pos ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, 4, 6, 10, -1])
def test_a_wrong_start_pos_raises_with_both_numbers_and_writes_nothing(new, model, wrong):
    cache = new()
    feed(model, random_ids(6, 1, 5), cache)
    before = contents(cache)
    for step, T in ((prefill, 3), (decode, 1)):
        with pytest.raises(ValueError, match=f"start_pos is {wrong}, but the cache holds 5 tokens"):
            step(model, random_ids(7, 1, T), cache, start_pos=wrong)
    assert cache.length == 5
    assert same(contents(cache), before)


def test_an_id_outside_the_vocabulary_raises_before_anything_is_written(new, model):
    cache = new()
    feed(model, random_ids(8, 1, 5), cache)
    for bad in (151, -1):
        with pytest.raises((IndexError, ValueError)):
            prefill(model, torch.tensor([[1, bad]]), cache, start_pos=5)
    assert cache.length == 5


# --- truncate -------------------------------------------------------------------------------------------------------


@VARIANTS_TOO
@pytest.mark.parametrize("keep", [0, 1, 6, 11])
def test_truncate_equals_never_happened(new, name, model, keep):
    """Same bytes and, after that, bit-equal logits: a rejected draft leaves no trace."""
    ids, rest = random_ids(9, 2, 12), random_ids(10, 2, 4)
    cache, clean = new(2), new(2)
    feed(model, ids, cache, *[keep, 12 - keep] if keep else [12])
    cache.truncate(keep)
    if keep:
        feed(model, ids[:, :keep], clean)
    assert cache.length == keep
    assert same(contents(cache), contents(clean))
    if keeps_memory(name):
        assert cache.nbytes == expected_bytes(name, model.config, 12, 2, 4)
        assert cache.fork().nbytes == clean.nbytes
    else:
        assert cache.nbytes == clean.nbytes
    assert torch.equal(feed(model, rest, cache), feed(model, rest, clean))
    assert same(contents(cache), contents(clean))


def test_a_layer_goes_back_by_itself(new, model):
    """As `rollback` does it for most caches."""
    ids, cache, other = random_ids(8, 2, 9), new(2), new(2)
    feed(model, ids, cache)
    feed(model, ids[:, :5], other)
    new_k, new_v = torch.randn(2, 2, 2, 1, 32, generator=torch.Generator().manual_seed(0))
    for layer, expected in zip(cache, other, strict=True):
        layer.truncate(5)
        assert layer.length == 5
        for ours, theirs in zip(
            layer.append(new_k, new_v), expected.append(new_k, new_v), strict=True
        ):
            assert gap(ours, theirs) <= TOLERANCE


def test_truncate_is_absolute_and_idempotent(new, name, model):
    cache = new()
    feed(model, random_ids(11, 1, 12), cache)
    for n, left in ((7, 7), (7, 7), (9, 7), (1000, 7), (3, 3), (0, 0), (0, 0), (5, 0)):
        cache.truncate(n)
        assert cache.length == left, f"truncate({n})"


@pytest.mark.parametrize("n", [-1, 1.0, "1", None, True])
def test_truncate_refuses_what_is_no_number_of_tokens(new, name, model, n):
    cache = new()
    feed(model, random_ids(12, 1, 4), cache)
    with pytest.raises(CacheError, match="truncate"):
        cache.truncate(n)
    assert cache.length == 4


def test_truncated_rows_give_their_memory_back(model):
    """The dict cache copies what it keeps: a view would hold the forgotten rows as long as the cache lives."""
    cache = make_cache("dict", model.config)
    feed(model, random_ids(13, 1, 40), cache)
    cache.truncate(10)
    for tensor in cache[0].values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


# --- a forward pass that fails half-way -----------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["self_attn.q_proj", "self_attn.o_proj", "mlp"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_failed_forward_is_noticed_and_truncate_mends_it(
    new, name, model, layer, part, monkeypatch
):
    """Layers before the failure hold new tokens, later ones do not: unmended, positions would silently shift."""
    prompt, more = random_ids(14, 2, 9), random_ids(15, 2, 5)
    cache, clean = new(2), new(2)
    feed(model, prompt, cache)
    feed(model, prompt, clean)

    def fail(*args, **kwargs):
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(model.layers[layer].get_submodule(part), "forward", fail)
        with pytest.raises(MemoryError, match="injected"):
            prefill(model, more, cache, start_pos=9)
    if (layer, part) == (0, "self_attn.q_proj"):  # failed before the first append
        assert cache.length == 9
    elif (layer, part) in ((2, "self_attn.o_proj"), (2, "mlp")):  # every layer had appended
        assert cache.length == 14
    else:
        with pytest.raises(CacheError, match="layers hold between 9 and 14 tokens") as caught:
            _ = cache.length
        assert "truncate" in caught.value.hint
        with pytest.raises(CacheError, match="between 9 and 14"):
            prefill(model, more, cache, start_pos=9)
    cache.truncate(9)
    assert cache.length == 9
    assert same(contents(cache), contents(clean))
    assert torch.equal(
        prefill(model, more, cache, start_pos=9), prefill(model, more, clean, start_pos=9)
    )


# --- fork and reorder -----------------------------------------------------------------------------------------------


@VARIANTS_TOO
def test_fork_and_parent_do_not_touch_each_other(new, name, model):
    cache = new(2)
    feed(model, random_ids(16, 2, 8), cache)
    fork, before = cache.fork(), contents(cache)
    assert type(fork) is type(cache)
    assert (fork.length, fork.made.name, fork.made.options, fork.config) == (
        8,
        *made_with(name),
        model.config,
    )
    feed(model, random_ids(17, 2, 3), fork)
    fork.reorder([1, 0])
    fork.truncate(2)
    assert same(contents(cache), before)
    frozen = contents(fork)
    feed(model, random_ids(18, 2, 4), cache)
    cache.truncate(1)
    assert same(contents(fork), frozen)


def test_fork_continues_with_the_same_logits(new, name, model):
    cache, more = new(), random_ids(20, 1, 3)
    feed(model, random_ids(19, 1, 8), cache)
    assert torch.equal(feed(model, more, cache.fork()), feed(model, more, cache))


def test_reorder_makes_rows_equal(new, name, model):
    ids = random_ids(21, 2, 9)
    cache, alone = new(2), new(1)
    feed(model, ids, cache)
    cache.reorder([1, 1])
    next_ids = random_ids(22, 1, 1)
    logits = decode(model, next_ids.expand(2, 1), cache, start_pos=9)
    assert torch.equal(logits[0], logits[1])
    feed(model, ids[1:], alone)
    assert gap(logits[:1], decode(model, next_ids, alone, start_pos=9)) <= TOLERANCE


@pytest.mark.parametrize(
    "index",
    [
        [2, 0, 1],
        (1, 1, 1),
        torch.tensor([0, 0, 2]),
        torch.tensor([2, 1, 0]).int(),
    ],
    ids=["list", "tuple", "tensor", "int32"],
)
def test_reorder_takes_rows_from_where_the_index_says(new, name, model, index):
    cache, ids, more = new(3), random_ids(23, 3, 7), random_ids(24, 3, 4)
    feed(model, ids, cache)
    cache.reorder(index)
    ids = ids[torch.as_tensor(index).long()]
    assert (
        gap(feed(model, more, cache), score(model, torch.cat((ids, more), 1))[:, -1]) <= TOLERANCE
    )


@VARIANTS_TOO
@pytest.mark.parametrize("index", [[0, 0, 1, 1], [1]], ids=["grow", "shrink"])
def test_the_batch_may_grow_and_shrink(new, name, model, index):
    cache, ids, more = new(2), random_ids(25, 2, 7), random_ids(26, len(index), 2)
    feed(model, ids, cache)
    cache.reorder(index)
    assert (
        gap(feed(model, more, cache), score(model, torch.cat((ids[index], more), 1))[:, -1])
        <= TOLERANCE
    )
    most = expected_bytes(name, model.config, 9, len(index), 4)
    # Rows that were made equal own their full pages together.
    shared = KINDS[name][0] in ("paged", "prefix")
    assert cache.nbytes == most or (
        shared and expected_bytes(name, model.config, 9, 1, 4) < cache.nbytes < most
    )


@pytest.mark.parametrize("index", [[2], [-1], [], [[0]], [0.5], [True, False], 1], ids=str)
def test_reorder_refuses_rows_that_do_not_exist(new, name, model, index):
    cache = new(2)
    feed(model, random_ids(27, 2, 3), cache)
    before = contents(cache)
    with pytest.raises(CacheError, match="reorder"):
        cache.reorder(index)
    assert same(contents(cache), before)


@VARIANTS_TOO
def test_operations_on_an_empty_cache(new, name, model, tmp_path):
    cache = new()
    cache.truncate(0)
    cache.truncate(5)
    cache.reorder([0])
    cache = cache.fork()
    cache.save(tmp_path / "empty")
    cache = KVCache.load(tmp_path / "empty", model.config)
    assert cache.length == 0
    ids = random_ids(28, 1, 6)
    assert gap(feed(model, ids, cache), score(model, ids)[:, -1]) <= TOLERANCE


@pytest.mark.parametrize("operation", ["truncate", "fork", "reorder", "save"])
def test_what_a_layer_cannot_do_is_refused_by_type(model, tmp_path, operation):
    """A kind that does not implement an operation gets this from the base class, which names the class."""
    args = {"truncate": (0,), "fork": (), "reorder": ([0],), "save": (tmp_path / "x",)}[operation]
    with pytest.raises(UnsupportedError, match="LayerCache cannot"):
        getattr(KVCache([LayerCache()], model.config), operation)(*args)


# --- save and load --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(new, name, model, tmp_path):
    """(path, the cache that was saved): 2 rows of 6 tokens, with ids and a fingerprint."""
    cache, path = new(2), tmp_path / "cache.safetensors"
    feed(model, random_ids(30, 2, 6), cache)
    cache.save(path, tokens=[5, 6, 7, 8, 9, 10], model_fingerprint="0123456789abcdef")
    return path, cache


@VARIANTS_TOO
def test_load_continues_with_bit_equal_logits(saved, name, model):
    path, cache = saved
    loaded = KVCache.load(path, model.config, model_fingerprint="0123456789abcdef")
    assert (loaded.made.name, loaded.made.options) == made_with(name)
    assert (loaded.length, loaded.capacity, loaded.tokens) == (
        6,
        cache.capacity,
        [5, 6, 7, 8, 9, 10],
    )
    assert loaded.nbytes == cache.nbytes
    assert same(contents(loaded), contents(cache))
    more = random_ids(31, 2, 5)
    assert torch.equal(feed(model, more, loaded), feed(model, more, cache))


def test_bf16_survives_the_file(name, bf16_model, tmp_path):
    cache = make(name, bf16_model.config, dtype=torch.bfloat16)
    feed(bf16_model, random_ids(32, 1, 6), cache)
    cache.save(tmp_path / "c")
    loaded, more = KVCache.load(tmp_path / "c", bf16_model.config), random_ids(33, 1, 3)
    assert torch.equal(feed(bf16_model, more, loaded), feed(bf16_model, more, cache))


def test_every_single_changed_byte_is_noticed(saved, model):
    """Loading must refuse, or (a blank that became another blank in the header's padding) give the very same cache."""
    path, cache = saved
    data, expected = path.read_bytes(), contents(cache)
    header = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for i in [*range(header), *range(header, len(data), 61), len(data) - 1]:
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        try:
            loaded = KVCache.load(path, model.config)
        except CacheError:
            refused += 1
        else:
            assert i < header, f"byte {i} of the tensors was changed and nobody noticed"
            assert same(contents(loaded), expected)
            assert loaded.tokens == [5, 6, 7, 8, 9, 10]
    assert refused > header * 0.95


def test_a_truncated_file_is_refused(saved, model):
    path, _ = saved
    data = path.read_bytes()
    for n in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(CacheError, match=r"cache\.safetensors"):
            KVCache.load(path, model.config)


def test_files_that_are_no_cache_are_refused(model, tmp_path):
    with pytest.raises(CacheError, match="not a readable cache file"):
        KVCache.load(tmp_path / "missing", model.config)
    with pytest.raises(CacheError, match="not a readable cache file"):
        KVCache.load(tmp_path, model.config)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CacheError, match="not a readable cache file"):
        KVCache.load(tmp_path / "text", model.config)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CacheError, match="not a saved KV cache"):
        KVCache.load(tmp_path / "model.safetensors", model.config)


@pytest.mark.parametrize(
    ("field", "value"), [("rope_theta", 5.0), ("num_hidden_layers", 4), ("rms_norm_eps", 1e-5)]
)
def test_another_config_is_refused_by_field(saved, model, field, value):
    """Same shapes, other theta: the keys would fit and be wrong."""
    fields = model.config.to_dict()
    if field == "rope_theta":
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": value}
    other = Config.from_dict(fields | {field: value})
    with pytest.raises(CacheError, match=f"belongs to another model: .*{field}.* differ"):
        KVCache.load(saved[0], other)


def test_other_weights_are_refused(saved, model):
    path, _ = saved
    with pytest.raises(CacheError, match="other weights: 0123456789ab, not fedcba987654"):
        KVCache.load(path, model.config, model_fingerprint="fedcba9876543210")
    # The caller who does not say which weights takes the risk.
    assert KVCache.load(path, model.config).length == 6


def test_save_replaces_a_file_only_when_it_is_whole(saved, model, monkeypatch):
    path, cache = saved
    before = hashlib.sha256(path.read_bytes()).hexdigest()

    def full_disk(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nanokv.cache.saving.save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            cache.save(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    feed(model, random_ids(34, 2, 1), cache)
    cache.save(path)
    assert KVCache.load(path, model.config).length == 7
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_cache_with_unequal_layers_is_not_saved(new, name, model, tmp_path):
    cache = new()
    feed(model, random_ids(35, 1, 4), cache)
    shape = (1, model.config.num_key_value_heads, 1, model.config.head_dim)
    cache[0].append(torch.zeros(shape), torch.zeros(shape))
    with pytest.raises(CacheError, match="between 4 and 5"):
        cache.save(tmp_path / "c")
    assert not list(tmp_path.iterdir())


# --- make_cache, NoCache, and what the dict cache refuses -----------------------------------------------------------


def test_nothing_is_generated_with_a_cache_that_keeps_nothing(model):
    """Not even one token after one: every decode would see one token and no past."""
    with pytest.raises(ContextError, match="needs 1 of 0 tokens"):
        next(iter(generate(model, [1], NoCache(len(model.layers)), max_new_tokens=1)))


def test_an_unknown_cache_or_option_is_named_with_the_known_ones(name, model):
    with pytest.raises(
        CacheError, match=r"no cache is called 'dcit': the caches are .*dict"
    ) as caught:
        make_cache("dcit", model.config)
    assert caught.value.hint == "did you mean 'dict'?"
    kind, options = KINDS[name]
    with pytest.raises(CacheError, match=f"cache '{kind}' has no option colour, flavour: it"):
        make_cache(kind, model.config, flavour=1, colour=2, **options)


def test_caches_are_exported_by_the_package():
    import nanokv

    assert nanokv.CACHES is cache_module.CACHES
    assert nanokv.make_cache is make_cache
    assert nanokv.NoCache is NoCache


def test_no_cache_keeps_nothing(model):
    cache, ids = NoCache(3), random_ids(36, 2, 5)
    first = prefill(model, ids, cache, start_pos=0)
    assert (cache.length, cache.nbytes, len(cache)) == (0, 0, 3)
    cache.truncate(0)
    cache.truncate(7)
    cache.reorder([1, 0])
    assert torch.equal(prefill(model, ids, cache.fork(), start_pos=0), first)
    with pytest.raises(ValueError, match="start_pos is 5, but the cache holds 0"):
        prefill(model, ids, cache, start_pos=5)


def test_dict_cache_is_literally_a_dict(model):
    cache = make_cache("dict", model.config)
    assert [dict(layer) for layer in cache] == [{}, {}, {}]
    feed(model, random_ids(37, 1, 5), cache)
    assert all(isinstance(layer, DictCache | dict) for layer in cache)
    assert list(cache[0]) == ["key", "value"]
    assert cache[0]["key"].shape == cache[0]["value"].shape == (1, 2, 5, 32)


@VARIANTS_TOO
def test_another_batch_or_dtype_is_refused_before_anything_is_written(new, name, model, bf16_model):
    """cat would promote bf16 to fp32 without a word, and a broadcast batch would be a wrong answer."""
    cache = new(2)
    feed(model, random_ids(38, 2, 4), cache)
    before = contents(cache)
    with pytest.raises(CacheError, match=r"cannot append keys \(1, 2, 3, 32\)"):
        prefill(model, random_ids(39, 1, 3), cache, start_pos=4)
    half = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(CacheError, match=r"bfloat16 to a cache of .*float32"):
        prefill(half, random_ids(40, 2, 3), cache, start_pos=4)
    assert same(contents(cache), before)
    assert cache.length == 4


# --- random sequences of everything, against plain lists ------------------------------------------------------------

SMALL = Config.from_dict(
    {
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": CAPACITY,
    }
)
B = 2


class AnySequence(RuleBasedStateMachine):
    """A cache and, beside it, for each layer a list of (k, v) pairs, one a token. They must never differ.

    Forked parents are kept with their own lists and compared after every step as well.
    """

    kind = "dict"

    @initialize(seed=st.integers(0, 10**6), layers=st.sampled_from([1, 2]))
    def start(self, seed, layers):
        self.generator = torch.Generator().manual_seed(seed)
        self.config = replace(SMALL, num_hidden_layers=layers)
        self.cache = make(self.kind, self.config, B)
        self.lists = [[] for _ in self.cache]
        self.parents = []
        self.rows_share = False

    @precondition(lambda self: len(self.lists[0]) <= CAPACITY - 10)
    @rule(T=st.integers(1, 9))
    def append(self, T):
        mask = self.cache.mask(T)
        S = len(self.lists[0]) + T
        assert (mask is None) == (T == 1)
        assert mask is None or mask.shape == (T, S)
        for layer, kept in zip(self.cache, self.lists, strict=True):
            k, v = (torch.randn(B, 2, T, 4, generator=self.generator) for _ in range(2))
            kept += zip(k.unbind(2), v.unbind(2), strict=True)
            keys, values = layer.append(k.clone(), v.clone())
            assert torch.equal(keys, torch.stack([pair[0] for pair in kept], 2))
            assert torch.equal(values, torch.stack([pair[1] for pair in kept], 2))

    @rule(n=st.integers(0, CAPACITY))
    def truncate(self, n):
        self.cache.truncate(n)
        for kept in self.lists:
            del kept[n:]

    @precondition(lambda self: len(self.parents) < 3)
    @rule(keep_parent=st.booleans())
    def fork(self, keep_parent):
        fork, lists = self.cache.fork(), [list(kept) for kept in self.lists]
        if keep_parent:  # go on with the parent instead, and watch the child
            fork, self.cache = self.cache, fork
        self.parents.append((self.cache, self.lists))
        self.cache, self.lists = fork, lists

    @rule(index=st.lists(st.integers(0, B - 1), min_size=B, max_size=B))
    def reorder(self, index):
        self.cache.reorder(index)
        self.rows_share |= KINDS[self.kind][0] in ("paged", "prefix")
        for kept in self.lists:
            kept[:] = [(k[index], v[index]) for k, v in kept]

    @rule()
    def save_and_load(self):
        path = self.folder / "cache"
        self.cache.save(path, tokens=range(len(self.lists[0])))
        self.cache = KVCache.load(path, self.config)
        assert self.cache.tokens == list(range(len(self.lists[0])))

    @invariant()
    def lengths_and_bytes_agree(self):
        for cache, lists in [(self.cache, self.lists), *self.parents]:
            S = len(lists[0])
            assert cache.length == S
            if keeps_memory(self.kind):
                assert cache.nbytes >= expected_bytes(self.kind, self.config, S, B, 4)
            elif not self.rows_share:
                assert cache.nbytes == expected_bytes(self.kind, self.config, S, B, 4)
            else:  # rows that were made equal own pages together
                assert expected_bytes(self.kind, self.config, S, 1, 4) <= cache.nbytes
                assert cache.nbytes <= expected_bytes(self.kind, self.config, S, B, 4)

    def teardown(self):
        """At the end every cache, the forked ones too, still returns exactly its own tokens."""
        zero = torch.zeros(B, 2, 1, 4)
        for cache, lists in (
            [(self.cache, self.lists), *self.parents] if hasattr(self, "cache") else []
        ):
            for layer, kept in zip(cache, lists, strict=True):
                keys, values = layer.append(zero, zero)
                assert torch.equal(
                    keys, torch.stack([pair[0] for pair in kept] + [zero[:, :, 0]], 2)
                )
                assert torch.equal(
                    values, torch.stack([pair[1] for pair in kept] + [zero[:, :, 0]], 2)
                )


@VARIANTS_TOO
def test_any_sequence_of_operations(name, tmp_path, monkeypatch):
    # Hundreds of files that nobody needs after a power cut.
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    machine = type("AnySequence", (AnySequence,), {"kind": name, "folder": tmp_path})
    relaxed = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
    examples = 40 if name in CACHES else 12
    many = settings(max_examples=examples, stateful_step_count=20, **relaxed)
    run_state_machine_as_test(machine, settings=many)


def test_metadata_of_a_saved_cache_is_plain_json(saved):
    """Readable without this program: format, kind, length, config, ids."""
    data = saved[0].read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert (header["format"], header["length"], header["model"]) == (
        "nanokv-cache-1",
        "6",
        "0123456789abcdef",
    )
    assert json.loads(header["tokens"]) == [5, 6, 7, 8, 9, 10]
    assert json.loads(header["config"])["model_type"] == "qwen3"
