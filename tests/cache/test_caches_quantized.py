"""Quantized keys and values: what is stored, how far off it may be, and what must never change once it is stored.

transformers quantizes the whole past again at every flush and cannot crop what is quantized; both are tested here.
"""

import pytest
import torch

from nanokv import costs
from nanokv.cache import KVCache, make_cache
from nanokv.cache.codes import dequantize, hadamard, pack, quantize, unpack
from nanokv.cache.schemes import Channel, Token
from nanokv.errors import CacheError
from nanokv.inference import decode, prefill, score, verify_draft
from oracle import SHAPES, gap, pair, random_ids

pytestmark = pytest.mark.sampled

SMALL = {"group": 4, "residual": 3}


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


def new(model, rows=1, **options):
    return make_cache("quantized", model.config, batch_size=rows, **(SMALL | options))


def randn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dim", [2, 3], ids=["per channel", "per token"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
@pytest.mark.parametrize("shift", [0.0, 1.0, -1000.0])
def test_no_value_is_off_by_more_than_half_a_step(bits, dim, scale, shift):
    """Scales are fp16: rounded to nearest, the largest value of a block would fall off the end of the codes."""
    x = randn(0, 2, 3, 16, 8) * scale + shift
    codes, step, low = quantize(x, bits, dim)
    assert codes.max().item() < 2**bits
    assert step.dtype == low.dtype == torch.float16
    error = (dequantize(codes, step, low) - x).abs()
    # The last term is the rounding of fp32 itself.
    assert (error <= step.float() / 2 + x.abs().max() * 3e-7).all()


def test_a_constant_block_is_exact_to_fp16():
    for value in (0.0, 1.0, -3.25):
        codes, step, low = quantize(torch.full((1, 1, 4, 4), value), 4, 2)
        assert (dequantize(codes, step, low) - value).abs().max() <= abs(value) * 2e-3 + 1e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_loses_nothing_and_takes_the_bytes_it_says(bits):
    codes = torch.randint(
        0, 2**bits, (2, 3, 5, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, 5, 16 * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


def test_keys_with_an_outlier_channel_want_a_scale_a_channel():
    """One channel 50 times the rest, as in Qwen3's keys: a scale per token spends all codes on it."""
    k = randn(1, 1, 2, 32, 64)
    k[..., 7] *= 50
    others = torch.arange(64) != 7

    def error(x, dim):
        return (dequantize(*quantize(x, 4, dim)) - x)[..., others].pow(2).mean().sqrt().item()

    channel, token = error(k, dim=2), error(k, dim=3)
    assert channel < 0.15
    assert token > 5 * channel
    turned = k @ hadamard(64)
    back = dequantize(*quantize(turned, 4, 3)) @ hadamard(64)
    # Rotation helps who has one scale per token.
    assert (back - k)[..., others].pow(2).mean().sqrt() < 0.6 * token


@pytest.mark.parametrize("D", [2, 4, 12, 32, 96, 128])
def test_the_rotation_is_orthogonal_symmetric_and_spreads(D):
    H = hadamard(D)
    assert torch.equal(H, H.T)
    assert gap(H @ H, torch.eye(D)) < 1e-6
    assert hadamard(D).is_inference() is False
    block = D & -D  # the largest power of two in D
    assert H.abs().max() == pytest.approx(block**-0.5)


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 8},
        {"bits": 4},
        {"bits": 2},
        {"k_bits": 8, "v_bits": 4},
        {"bits": 4, "rotate": "hadamard"},
    ],
    ids=str,
)
def test_bytes_are_what_the_bits_say(model, options):
    """Packed codes, fp16 scales, the exact rest: equal to the formula after every single token."""
    cache, ids = new(model, 2, **options), random_ids(0, 2, 30)
    for i in range(30):
        decode(model, ids[:, i : i + 1], cache, start_pos=i)
        assert cache.nbytes == costs.cache_bytes(
            "quantized", model.config, i + 1, 2, 4, **SMALL, **options
        )
    for codes, name in zip(
        zip(*(layer.codes for layer in cache), strict=True), ("k_bits", "v_bits"), strict=True
    ):
        bits = options.get(name, options.get("bits"))
        # Tokens · rows · L · Hk · D.
        assert sum(x.nbytes for x in codes) == 24 * 2 * 3 * 2 * 32 * bits // 8


def test_the_defaults_are_8_bits_groups_of_32_and_32_exact_tokens(model):
    cache = make_cache("quantized", model.config)
    prefill(model, random_ids(0, 1, 100), cache)
    decode(model, random_ids(1, 1, 1), cache, start_pos=100)
    assert all(
        layer.blocks == [32, 32] and layer.schemes == (Channel(8), Token(8)) and layer.newest == 37
        for layer in cache
    )
    assert cache.nbytes == costs.cache_bytes("quantized", model.config, 101, 1, 4)


def test_four_bits_take_a_quarter_of_bf16_and_a_little(model):
    assert costs.cache_bytes(
        "quantized", model.config, 4096, 1, 2, bits=4
    ) < 0.36 * costs.cache_bytes("dict", model.config, 4096, 1, 2)


def test_codes_once_made_never_change(model):
    """transformers quantizes everything again at each flush: errors add up and each flush costs O(S)."""
    cache, ids = new(model, bits=4, rotate="hadamard"), random_ids(1, 1, 40)
    prefill(model, ids[:, :11], cache)
    decode(model, ids[:, 11:12], cache, start_pos=11)
    old = [[x.clone() for x in (*layer.codes, *layer.scales)] for layer in cache]
    assert old[0][0].shape[2] == 8
    for i in range(12, 40):
        decode(model, ids[:, i : i + 1], cache, start_pos=i)
    for layer, before in zip(cache, old, strict=True):
        assert layer.codes[0].shape[2] == 36
        for now, then in zip((*layer.codes, *layer.scales), before, strict=True):
            assert torch.equal(now[:, :, : then.shape[2]], then)


@pytest.mark.parametrize("chunks", [(30,), (1,) * 30, (7, 1, 22), (29, 1)], ids=str)
def test_chunks_do_not_change_what_is_stored(chunks):
    """The same tensors in, the same codes out, however they were cut (a model's own keys depend on what it read).

    What an append brings is exact until the next one, so one more token makes all equal.
    """
    model = pair(**SHAPES["G2-tied"])[1]
    k, v = randn(2, 1, 2, 30, 32), randn(3, 1, 2, 30, 32)
    whole, cut = new(model)[0], new(model)[0]
    whole.append(k, v)
    for a, b in zip(k.split(chunks, 2), v.split(chunks, 2), strict=True):
        cut.append(a, b)
    assert whole.blocks == []
    for layer in (whole, cut):
        layer.append(k[:, :, :1], v[:, :, :1])
    assert whole.blocks == cut.blocks == [4] * 6
    for name, tensor in whole.state().items():
        assert torch.equal(cut.state()[name], tensor), name


@pytest.mark.parametrize("rotate", ["none", "hadamard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_back_is_within_half_a_step_and_the_newest_is_exact(model, rotate, dtype):
    layer = new(model, 2, bits=4, rotate=rotate)[0]
    k, v = randn(4, 2, 2, 21, 32).to(dtype), randn(5, 2, 2, 21, 32).to(dtype)
    keys, values = layer.append(k, v)
    assert torch.equal(keys, k)  # exact in the call that brings them
    assert torch.equal(values, v)
    new_k, new_v = randn(6, 2, 2, 1, 32).to(dtype), randn(7, 2, 2, 1, 32).to(dtype)
    keys, values = layer.append(new_k, new_v)
    assert keys.dtype == values.dtype == dtype
    q = sum(layer.blocks)
    assert q == 16
    assert torch.equal(keys[:, :, q:], torch.cat((k[:, :, q:], new_k), 2))
    k_step, _, v_step, _ = (x.float() for x in layer.scales)
    rounding = 0 if dtype == torch.float32 else 0.02  # bf16 on the way out
    assert ((values[:, :, :q] - v[:, :, :q]).abs() <= v_step / 2 + 1e-5 + rounding).all()
    error = (keys[:, :, :q] - k[:, :, :q]).float()
    if rotate == "hadamard":  # the bound holds in the rotated basis
        error = error @ hadamard(32)
        rounding *= 6
    assert (error.abs() <= k_step.repeat_interleave(4, 2) / 2 + 1e-5 + rounding).all()
    assert error.abs().max() > 0.01  # 4 bits are not exact: something was quantized


@pytest.mark.parametrize("keep", [21, 20, 17, 16, 15, 13, 12, 5, 4, 1, 0])
def test_truncate_forgets_and_leaves_the_rest_alone(model, keep):
    """Group-wise crop in transformers reports the old length, and fails when nothing exact is left."""
    cache = new(model, 2, bits=4)
    prefill(model, random_ids(2, 2, 20), cache)
    decode(model, random_ids(2, 2, 21)[:, 20:], cache, start_pos=20)
    assert cache[0].blocks == [4] * 4
    before = [tuple(x.clone() for x in layer.dense()) for layer in cache]
    bytes_before = cache.nbytes
    cache.truncate(keep)
    assert cache.length == keep
    for layer, (k, v) in zip(cache, before, strict=True):
        assert layer.blocks == [
            len(block) for block in torch.arange(min(keep, 16)).split(4) if len(block)
        ]
        assert not keep or layer.scales[0].shape[2] == len(layer.blocks)
        keys, values = layer.dense() if keep else (k[:, :, :0], v[:, :, :0])
        assert torch.equal(keys, k[:, :, :keep])
        assert torch.equal(values, v[:, :, :keep])
    assert cache.nbytes < bytes_before or keep == 21
    more = random_ids(3, 2, 9)
    prefill(model, more, cache, start_pos=keep)
    assert cache.length == keep + 9
    for layer, (k, _) in zip(cache, before, strict=True):
        # What was quantized is still the same; the exact rest may have been quantized since.
        kept = min(keep, 16)
        assert torch.equal(layer.dense()[0][:, :, :kept], k[:, :, :kept])


def test_a_guess_within_rollback_leaves_no_trace(model):
    """Beyond it a block would be quantized that a run without the guess still holds exactly."""
    ids, cache = random_ids(4, 1, 40), new(model, bits=2)
    for i in range(24):
        decode(model, ids[:, i : i + 1], cache, start_pos=i)
        room, plain = cache.sizes.max_rollback, cache.fork()
        assert 1 <= room <= 7
        guess = verify_draft(model, ids[:, i + 1 : i + 1 + room], cache, start_pos=i + 1)
        # Plain decoding sees nothing in codes that the guess saw exactly.
        for n in range(1, room + 1):
            assert (
                gap(
                    decode(model, ids[:, i + n : i + n + 1], plain, start_pos=i + n),
                    guess[:, n - 1],
                )
                < 1e-4
            )
        plain.truncate(i + 1)
        cache.truncate(i + 1)
        assert all(torch.equal(cache[0].state()[k], x) for k, x in plain[0].state().items())
    full = new(model, bits=2)
    prefill(model, ids[:, :5], full)
    plain, room = full.fork(), full.sizes.max_rollback
    guess = verify_draft(model, ids[:, 5 : 6 + room], full, start_pos=5)[:, -1]
    for n in range(5, 6 + room):
        last = decode(model, ids[:, n : n + 1], plain, start_pos=n)
    assert gap(last, guess) > 1e-3  # one token more, and it would


def test_rows_move_with_their_scales(model):
    """transformers' batch_repeat_interleave leaves quantized rows where they are, without a word."""
    ids, cache = random_ids(5, 3, 20), new(model, 3, bits=4)
    prefill(model, ids, cache)
    dense = [layer.dense() for layer in cache]
    cache.reorder([2, 0, 0, 1])
    for layer, (k, v) in zip(cache, dense, strict=True):
        assert torch.equal(layer.dense()[0], k[[2, 0, 0, 1]])
        assert torch.equal(layer.dense()[1], v[[2, 0, 0, 1]])
    fork = cache.fork()
    decode(model, random_ids(6, 4, 1), fork, start_pos=20)
    fork.truncate(3)
    for layer, (k, _) in zip(cache, dense, strict=True):
        assert torch.equal(layer.dense()[0], k[[2, 0, 0, 1]])


@pytest.mark.parametrize("tokens", [3, 6, 7, 21])
@pytest.mark.parametrize("truncated", [0, 5])
def test_saved_codes_come_back_bit_for_bit(model, tmp_path, tokens, truncated):
    cache = new(model, 2, k_bits=8, v_bits=4, rotate="hadamard", residual=0)
    prefill(model, random_ids(7, 2, tokens), cache)
    cache.truncate(max(1, tokens - truncated))
    cache.save(tmp_path / "c")
    loaded = KVCache.load(tmp_path / "c", model.config)
    assert (loaded.length, loaded.nbytes) == (cache.length, cache.nbytes)
    more = random_ids(8, 2, 5)
    assert torch.equal(
        prefill(model, more, loaded, start_pos=cache.length),
        prefill(model, more, cache, start_pos=cache.length),
    )


def test_more_bits_are_nearer_to_the_exact_answer(model):
    ids = random_ids(9, 2, 60)
    expected = score(model, ids)
    errors = []
    for bits in (2, 4, 8):
        cache = new(model, 2, bits=bits)
        prefill(model, ids[:, :50], cache)
        errors.append(gap(prefill(model, ids[:, 50:], cache, start_pos=50), expected[:, -1]))
    assert errors[0] > 2 * errors[1] > 20 * errors[2] > 0, errors


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 3},
        {"bits": 16},
        {"k_bits": 5},
        {"v_bits": -1},
        {"group": 0},
        {"residual": -1},
        {"rotate": "random"},
        {"group": 2.5},
        {"bits": "4"},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(model, options):
    with pytest.raises(CacheError, match=r"expected|implemented"):
        make_cache("quantized", model.config, **options)
