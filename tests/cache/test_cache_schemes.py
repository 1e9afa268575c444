"""The schemes of the quantized cache: their error against theory, their bytes by hand, and that no operation of the
cache depends on the scheme. The oracles are the tables of Max (1960) and arithmetic by hand."""

from dataclasses import replace

import pytest
import torch

from nanokv import costs
from nanokv.cache import KVCache, make_cache
from nanokv.cache.codes import lloyd_max, pack, random_rotation, unpack
from nanokv.cache.schemes import QJL, Channel, Lloyd, Outliers, Rotated, Token
from nanokv.errors import CacheError
from nanokv.lab.study.equality import small_model

SPECS = {  # every scheme, for keys and for values
    "token and channel": {"bits": 4, "keys": "token", "values": "channel"},
    "rotated": {"bits": 4, "keys": "token", "rotate": "hadamard", "v_rotate": "hadamard"},
    "lloyd": {"bits": 3, "keys": "lloyd", "values": "lloyd", "seed": 5},
    "qjl and exact": {"bits": 4, "keys": "qjl", "values": "exact", "first": 3},
    "exact and qjl": {"bits": 2, "keys": "exact", "values": "qjl", "first": 5},
    "outliers": {"k_bits": 1, "keys": "lloyd", "outliers": 3, "first": 1},
}


@pytest.fixture(scope="module")
def config():
    small = small_model().config
    return replace(small, num_hidden_layers=3, num_key_value_heads=2, head_dim=32)


def new(config, rows=1, **options):
    return make_cache("quantized", config, rows, **({"group": 4, "residual": 3} | options))


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gap(a, b):
    return (a - b).abs().max().item()


def unit_vectors(seed, n, D):
    x = randn(seed, 1, 1, 1, n, D)
    return x / x.norm(dim=-1, keepdim=True)


def through(scheme, x):
    """(1,1,1,n,D) → (n,D), encoded and decoded; one block, so every scale has a row per token or one for all."""
    codes, *scales = scheme.encode(x)
    n = x.shape[3]
    return scheme.decode(codes, *(s.expand(*s.shape[:2], n, -1) for s in scales))[0, 0]


# --- the numbers ----------------------------------------------------------------------------------------------------

MAX_1960 = {
    1: (0.7980,),
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # of a normal variable
FINITE = {1: 0.358, 2: 0.114, 3: 0.033, 4: 0.0092}  # of a unit vector of 64 numbers


@pytest.mark.parametrize("bits", MAX_1960)
def test_the_levels_are_those_of_max(bits):
    levels = lloyd_max(bits).tolist()
    assert levels[2 ** (bits - 1) :] == pytest.approx(MAX_1960[bits], rel=1e-3)
    assert levels == pytest.approx([-x for x in reversed(levels)], abs=1e-6)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("bits", DISTORTION)
def test_the_error_on_unit_vectors_is_the_closed_form(bits, D):
    """A little below it: a coordinate of a unit vector has shorter tails than a normal variable."""
    x = unit_vectors(bits, 4000, D)
    error = (through(Lloyd(bits, seed=1), x) - x[0, 0, 0]).pow(2).sum(-1).mean().item()
    assert 0.95 * DISTORTION[bits] < error < DISTORTION[bits]
    if D == 64:
        assert error == pytest.approx(FINITE[bits], rel=0.02)


def test_inner_products_through_qjl_have_no_bias_and_those_of_lloyd_have():
    """Over 200 seeds, for each vector with itself: Lloyd's levels shrink it by the distortion."""
    x = unit_vectors(0, 16, 32)
    found = {QJL: [], Lloyd: []}
    for kind, rows in found.items():
        for seed in range(200):
            y = through(kind(2 if kind is QJL else 1, seed), x)
            rows.append((y * x[0, 0, 0]).sum(-1) - 1)  # (16,)
    errors = torch.stack(found[QJL])  # (200,16)
    z = errors.mean(0) / (errors.std(0) / 200**0.5)
    assert z.abs().max() < 4.5 and z.pow(2).mean() < 2.5
    assert torch.stack(found[Lloyd]).mean(0).max() < -0.3  # −0.36 in theory


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_error_of_qjl_is_that_of_one_bit_less_times_half_pi(bits):
    """|r|² · π/2 for the rest r, over all projections: about five times Lloyd's at the same bits."""
    x = unit_vectors(bits, 4000, 128)
    error = (through(QJL(bits, seed=1), x) - x[0, 0, 0]).pow(2).sum(-1).mean().item()
    assert error == pytest.approx(torch.pi / 2 * DISTORTION[bits - 1], rel=0.05)


@pytest.mark.parametrize("D", [32, 48, 96])
def test_the_random_rotation_is_orthogonal_and_belongs_to_its_seed(D):
    R = random_rotation(D, 3)
    assert gap(R @ R.T, torch.eye(D)) < 1e-5
    assert gap(R, random_rotation(D, 4)) > 0.1
    assert not R.is_inference()


def test_three_bits_take_three_bits():
    codes = torch.randint(0, 8, (2, 5, 16), generator=torch.Generator().manual_seed(0))
    packed = pack(codes.to(torch.uint8), 3)
    assert packed.shape == (2, 5, 6) and packed.dtype == torch.uint8  # 16 · 3 / 8
    assert torch.equal(unpack(packed, 3), codes.to(torch.uint8))


def test_a_scale_per_token_and_per_channel_by_hand():
    """2 bits have 4 levels: 0 … 3 in a row are exact, and so are 0, 10, 20, 30 down a column."""
    rows = torch.tensor([[0.0, 1, 2, 3], [10, 20, 30, 40], [-3, -2, -1, 0], [5, 5, 5, 5]])
    down = rows.T.contiguous()
    for scheme, x in ((Token(2), rows), (Channel(2), down)):
        assert gap(through(scheme, x[None, None, None]), x) < 0.1
    # The other way round, a scale spans 0 … 40 or more: steps of 13.
    assert gap(through(Token(2), down[None, None, None]), down) > 2
    assert gap(through(Channel(2), rows[None, None, None]), rows) > 2


@pytest.mark.parametrize("of", [Token(4), Rotated(Token(4)), Lloyd(4, 0)], ids=str)
def test_outlier_channels_leave_precision_to_the_rest(of):
    x = randn(1, 1, 2, 2, 32, 64)
    x[:, 0, ..., 7] += 60
    x[:, 1, ..., 9] -= 80
    scheme = Outliers(of, 2)
    codes, *scales = scheme.encode(x)
    index = scales[-1]  # (B,Hk,blocks,n)
    assert (index[0, 0] == 7).any(-1).all() and (index[0, 1] == 9).any(-1).all()
    per_token = [
        s.repeat_interleave(32, 2) if unit == "block" else s
        for s, unit in zip(scales, scheme.units, strict=True)
    ]
    error = scheme.decode(codes, *per_token) - x.flatten(2, 3)
    alone = [
        s.repeat_interleave(32, 2) if unit == "block" else s
        for s, unit in zip(of.encode(x)[1:], of.units, strict=True)
    ]
    without = of.decode(of.encode(x)[0], *alone) - x.flatten(2, 3)
    assert error.pow(2).mean().sqrt() < 0.4 * without.pow(2).mean().sqrt()
    assert error.abs().max() < 1


# --- bytes ----------------------------------------------------------------------------------------------------------

# One head of 32 numbers: (bytes per token, bytes per block), counted by hand.
BY_HAND = {
    "channel": ({"keys": "channel", "bits": 4}, (16, 32 * 2 * 2)),
    "token": ({"keys": "token", "bits": 2}, (8 + 2 + 2, 0)),
    "lloyd": ({"keys": "lloyd", "bits": 3}, (12 + 2, 0)),
    "qjl": ({"keys": "qjl", "bits": 3}, (8 + 4 + 2 + 2, 0)),
    "exact": ({"keys": "exact", "bits": 2}, (32 * 4, 0)),
    "outliers": ({"keys": "lloyd", "bits": 1, "outliers": 3}, (4 + 2 + 3, 3 * (2 + 2 + 2))),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_by_hand(config, name):
    options, (token, block) = BY_HAND[name]
    options = options | {"values": "exact", "group": 4, "residual": 0, "first": 2}
    cache = new(config, 2, **options)
    for layer in cache:
        for T in (11, 1):  # 2 at the start, 8 in two blocks, 1 + 1 exact
            layer.append(randn(0, 2, 2, T, 32), randn(1, 2, 2, T, 32))
    heads = 2 * 2 * 3  # rows, KV heads, layers
    exact = (2 * 4 + 8) * 32 * 4  # keys and values of 4 tokens, the values of 8
    assert cache.nbytes == heads * (8 * token + 2 * block + exact)
    assert cache.nbytes == costs.cache_bytes("quantized", config, 12, 2, 4, **options)


@pytest.mark.parametrize("name", SPECS)
def test_the_formula_holds_after_every_token(config, name):
    cache = new(config, **SPECS[name])
    for i in range(25):
        for layer in cache:
            layer.append(randn(i, 1, 2, 1, 32), randn(i + 99, 1, 2, 1, 32))
        options = {"group": 4, "residual": 3} | SPECS[name]
        assert cache.nbytes == costs.cache_bytes("quantized", config, i + 1, 1, 4, **options)


# --- what the cache does with any scheme ----------------------------------------------------------------------------


def tokens(n, rows=1):
    return randn(7, rows, 2, n, 32), randn(8, rows, 2, n, 32)


def fed(layer, n, start=0, rows=1):
    """One token at a time; returns the last keys and values."""
    k, v = tokens(60, rows)
    for i in range(start, n):
        dense = layer.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    return dense


def alike(a, b):
    """Up to fp32: a rotation of one row is another product than that of many. A code is 0.01 and more."""
    return all(x.shape == y.shape and gap(x, y) < 1e-5 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", SPECS)
def test_a_rolled_back_draft_and_a_fork_leave_no_trace(config, name):
    layer, plain = new(config, **SPECS[name])[0], new(config, **SPECS[name])[0]
    k, v = randn(1, 1, 2, 9, 32), randn(2, 1, 2, 9, 32)
    for i in range(24):
        fed(layer, i + 1, i)
        n = min(9, layer.sizes.max_rollback)
        fork = layer.fork()
        for draft in (layer, fork):
            draft.append(k[:, :, :n], v[:, :, :n])
        layer.truncate(i + 1)
        fed(plain, i + 1, i)
        plain.append(k[:, :, :1], v[:, :, :1])  # quantizes what is due, as any append
        plain.truncate(i + 1)
        assert layer.length == plain.length and layer.nbytes == plain.nbytes
        assert alike(layer.dense(), plain.dense())
    assert alike(fed(layer, 40, 24), fed(plain, 40, 24))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("keep", [1, 2, 4, 7, 15, 21, 23])
def test_truncate_keeps_what_was_read(config, name, keep):
    layer = new(config, **SPECS[name])[0]
    before = [x[:, :, :keep].clone() for x in fed(layer, 24)]
    layer.truncate(keep)
    assert layer.length == keep and alike(layer.dense(), before)
    first = SPECS[name].get("first", 0)
    if keep <= first:  # nothing was quantized, so what follows is as from the beginning
        assert alike(fed(layer, 24, keep), fed(new(config, **SPECS[name])[0], 24))
    else:
        assert alike([x[:, :, :keep] for x in fed(layer, 24, keep)], before) or keep > 16


@pytest.mark.parametrize("name", SPECS)
def test_saved_and_reordered_it_reads_the_same(config, name, tmp_path):
    cache = new(config, 3, **SPECS[name])
    for layer in cache:
        fed(layer, 20, rows=3)
    cache.reorder([2, 0])
    cache.save(tmp_path / "c")
    loaded = KVCache.load(tmp_path / "c", config)
    assert loaded.nbytes == cache.nbytes and loaded.made == cache.made
    k, v = randn(3, 2, 2, 6, 32), randn(4, 2, 2, 6, 32)
    assert alike(cache[1].append(k, v), loaded[1].append(k, v))
    alone = new(config, 3, **SPECS[name])[0]
    whole = fed(alone, 20, rows=3)
    assert alike(cache[0].dense(), [x[[2, 0]] for x in whole])


def test_a_file_of_another_scheme_is_refused(config):
    state = new(config, keys="lloyd", bits=4)[0]
    fed(state, 20)
    with pytest.raises(CacheError, match="3 scales per layer: these schemes have 4"):
        new(config)[0].restore(state.state())


def test_the_first_tokens_stay_exact_and_the_rest_does_not(config):
    layer = new(config, bits=2, first=6)[0]
    keys, values = fed(layer, 40)
    for dense, appended in zip((keys, values), tokens(60), strict=True):
        assert torch.equal(dense[:, :, :6], appended[:, :, :6])
        assert gap(dense[:, :, 6:30], appended[:, :, 6:30]) > 0.1


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": "turbo"}, "keys is 'turbo': channel, token, lloyd, qjl, exact are implemented"),
        ({"bits": 3}, "bits is 3: 2, 4, 8 are implemented for keys=channel"),
        ({"keys": "lloyd"}, "bits is 8: 1, 2, 3, 4 are implemented for keys=lloyd"),
        ({"v_bits": 1, "values": "qjl"}, "v_bits is 1: 2, 3, 4 are implemented for values=qjl"),
        ({"bits": 4, "keys": "lloyd", "rotate": "hadamard"}, "rotate means nothing to keys=lloyd"),
        ({"values": "exact", "v_rotate": "hadamard"}, "v_rotate means nothing to values=exact"),
        ({"keys": "exact", "outliers": 2}, "outliers means nothing to keys=exact"),
        ({"seed": 1}, "seed means nothing to keys=channel and values=token"),
        ({"outliers": 32}, "outliers is 32: fewer than head_dim 32"),
        ({"first": -1}, "first is -1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["quantized", "batch"])
def test_options_that_contradict_each_other_are_refused(config, options, message, kind):
    of = {"of": "quantized"} if kind == "batch" else {}
    with pytest.raises(CacheError, match=message):
        make_cache(kind, config, **of, **options)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"bits": 3}, "bits=4, or with bits=3 keys=lloyd or keys=qjl"),
        ({"values": "lloyd", "k_bits": 8}, "bits=4, or with bits=8 values=channel or values=token"),
        ({"v_bits": 1, "values": "qjl"}, "v_bits=4, or with v_bits=1 values=lloyd"),
    ],
)
def test_bits_that_a_scheme_lacks_come_with_what_has_them(config, options, hint):
    with pytest.raises(CacheError) as error:
        make_cache("quantized", config, **options)
    assert error.value.hint == hint


def test_a_norm_that_fp16_cannot_hold_is_refused(config):
    """Each number is below 65,000; the norm of 32 of them is not."""
    layer = new(config, bits=4, keys="lloyd")[0]
    k = torch.full((1, 2, 1, 32), 20_000.0)
    with pytest.raises(CacheError, match="cannot quantize keys of size 113137"):
        layer.append(k, torch.zeros_like(k))
    with pytest.raises(CacheError, match="keys of size nan"):
        layer.append(k * torch.nan, torch.zeros_like(k))
    assert layer.length == 0
