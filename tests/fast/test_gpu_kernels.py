"""Triton's kernels against the plain lines that they stand for: in the interpreter, or on a GPU
where there is one.

fp32 within 5e-6 of the largest number. bf16 and fp16 to the bit where no sum is ordered
differently. And compiled for two GPUs without having one: nothing spilled, wide loads, shared
memory that fits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

# Before the kernels.
from triton_interpreter import DEVICE  # isort: split

from nanokv.attention import Decode, decode_attention
from nanokv.cache import make_cache
from nanokv.cache.capabilities import Pages
from nanokv.decoding.counter import draw_rows
from nanokv.fast.gpu import kernels
from nanokv.fast.gpu.attention import paged_attention, splits_for
from nanokv.fast.gpu.draw import draw
from nanokv.fast.gpu.products import product
from nanokv.model import RMSNorm
from nanokv.rope import apply_rope
from small_model import small

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest number: rounding once more or less, where sums are ordered differently.
CLOSE = {torch.float32: 5e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def new(*shape, dtype):
    return torch.randn(shape).to(DEVICE, dtype)


def norm_of(width, dtype):
    norm = RMSNorm(width, EPS).requires_grad_(False)
    norm.weight.normal_()
    return norm.to(DEVICE, dtype)


def gap(mine, plain):
    return float((mine.double() - plain.double()).abs().max() / plain.double().abs().max())


def assert_equal_but(mine, plain, share):
    """Close everywhere, and in 16 bits the same number nearly everywhere."""
    assert mine.dtype == plain.dtype and mine.shape == plain.shape
    assert gap(mine, plain) <= CLOSE[mine.dtype]
    if mine.dtype != torch.float32:
        assert (mine != plain).float().mean() <= share


@every_dtype
@pytest.mark.parametrize("C", [40, 256])
def test_rms_norm_and_its_residual(C, dtype):
    norm, x, more = norm_of(C, dtype), new(5, C, dtype=dtype), new(5, C, dtype=dtype)
    assert_equal_but(kernels.rms_norm(x, norm.weight, EPS), norm(x), 0.01)
    summed, out = x + more, torch.empty_like(x)
    y = kernels.rms_norm(x, norm.weight, EPS, more, out)
    assert y is out
    assert torch.equal(x, summed)
    assert_equal_but(y, norm(summed), 0.01)


@every_dtype
def test_swiglu(dtype):
    gate_up = new(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    assert_equal_but(kernels.swiglu(gate_up), F.silu(gate) * up, 0.01)


def plain_heads(qkv, heads, q_norm, k_norm, rope, T):
    """The lines of model.Attention between the products and the cache."""
    H, Hk, D = heads
    parts = qkv.split([H * D, Hk * D, Hk * D], -1)
    q, k, v = (part.reshape(len(qkv) // T, T, -1, D).transpose(1, 2) for part in parts)
    if q_norm is not None:
        q, k = q_norm(q), k_norm(k)
    return apply_rope(q, rope), apply_rope(k, rope), v


@pytest.mark.sampled
@every_dtype
@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 1, 80), (6, 3, 20)])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_split_heads(heads, normed, ragged, dtype):
    (H, Hk, D), B, T = heads, 2, 3
    q_norm, k_norm = (norm_of(D, dtype), norm_of(D, dtype)) if normed else (None, None)
    weights = (q_norm.weight, k_norm.weight) if normed else (None, None)
    qkv = new(B * T, (H + 2 * Hk) * D, dtype=dtype)
    angles = (B, 1, T, D) if ragged else (T, D)
    rope = new(*angles, dtype=dtype), new(*angles, dtype=dtype)
    mine = kernels.split_heads(qkv, heads, *weights, EPS, *rope, T)
    plain = plain_heads(qkv, heads, q_norm, k_norm, rope, T)
    for part, expected in zip(mine, plain, strict=True):
        assert_equal_but(part, expected, 0.01)


def cache_of(lengths, Hk, D, page, dtype):
    """Keys and values (B,Hk,S,D), the same in pages of `page` tokens (None: one slab per row), NaN
    where none is.
    """
    B, S = len(lengths), max(lengths)
    dense = new(2, B, Hk, S, D, dtype=dtype)
    rows = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    if page is None:
        slabs = torch.full((2, B, Hk, S + 3, D), torch.nan, dtype=dtype, device=DEVICE)
        for b, length in enumerate(lengths):
            slabs[:, b, :, :length] = dense[:, b, :, :length]
        return dense, Pages(*slabs, rows)
    n = -(-S // page)
    table = torch.randperm(B * n).to(DEVICE, torch.int32).view(B, n)
    pages = torch.full((2, B * n, Hk, page, D), torch.nan, dtype=dtype, device=DEVICE)
    for b, length in enumerate(lengths):
        for t in range(length):
            pages[:, table[b, t // page], :, t % page] = dense[:, b, :, t]
    return dense, Pages(*pages, rows, table)


def test_places_say_where_layers_lie_and_refuse_what_cannot_be_read():
    _, pages = cache_of([3, 2], 2, 32, 4, torch.float32)
    row = kernels.places([pages, pages])[1].tolist()
    assert row[:2] == [pages.keys.data_ptr(), pages.values.data_ptr()]
    assert row[2:] == [2 * 4 * 32, 4 * 32, 32, 4, pages.table.data_ptr(), 1]
    filled = torch.empty(2, 8, dtype=torch.int64, device=DEVICE)
    assert kernels.places([pages, pages], filled) is filled
    assert filled[1].tolist() == row
    wide = torch.zeros(2, 2, 4, 33, device=DEVICE)[..., :32]
    with pytest.raises(ValueError, match="multiples of 4 numbers"):
        kernels.place(Pages(wide, wide, [3, 2]))
    with pytest.raises(ValueError, match="differently"):
        by_tokens = pages.values.transpose(1, 2).contiguous().transpose(1, 2)
        kernels.place(Pages(pages.keys, by_tokens, [3, 2]))


@pytest.mark.sampled
@every_dtype
@pytest.mark.parametrize("page", [16, 5, None])
@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 1, 80)])
def test_split_heads_into_pages(heads, page, dtype):
    (H, Hk, D), lengths, layers, layer = heads, [6, 0, 17, 1], 3, 1
    B = len(lengths)
    _, pages = cache_of([6, 1, 17, 1], Hk, D, page, dtype)
    before = pages.keys.clone()
    q_norm, k_norm = norm_of(D, dtype), norm_of(D, dtype)
    qkv = new(B, (H + 2 * Hk) * D, dtype=dtype)
    rope = new(B, 1, 1, D, dtype=dtype), new(B, 1, 1, D, dtype=dtype)
    all_lengths = torch.zeros(layers, B, dtype=torch.int32, device=DEVICE)
    all_lengths[layer] = torch.tensor(lengths)
    places = kernels.places([pages] * layers)
    places[0] = places[2] = 0  # of other layers nothing is read
    y = kernels.split_heads_into_pages(
        qkv, heads, q_norm.weight, k_norm.weight, EPS, *rope, places, layer, all_lengths
    )
    q, k, v = plain_heads(qkv, heads, q_norm, k_norm, rope, 1)
    assert_equal_but(y, q[:, :, 0], 0.01)
    size, written = pages.keys.shape[2], set()
    for b, length in enumerate(lengths):
        if length:
            entry = b if page is None else int(pages.table[b, (length - 1) // size])
            at = entry, (length - 1) % size
            assert_equal_but(pages.keys[at[0], :, at[1]], k[b, :, 0], 0.01)
            assert torch.equal(pages.values[at[0], :, at[1]], v[b, :, 0])
            written.add(at)
    for entry in range(len(before)):
        for slot in range(size):
            if (entry, slot) not in written:
                now, then = pages.keys[entry, :, slot], before[entry, :, slot]
                assert torch.equal(now.nan_to_num(9), then.nan_to_num(9))


@pytest.mark.parametrize(
    "lengths, heads, page, splits, dtype",
    [
        ([5, 200, 77], (4, 2, 32), 16, 4, torch.float32),
        ([1, 9, 130, 3], (5, 1, 80), 5, 3, torch.float32),
        ([70, 0, 100], (1, 1, 128), None, 1, torch.float32),
        ([40, 1], (16, 2, 256), 7, 2, torch.float32),
        ([33, 64], (6, 2, 96), 16, 8, torch.float32),
        ([65, 0, 3], (3, 1, 16), None, 3, torch.float32),
        ([20, 130], (4, 2, 64), 16, 1, torch.bfloat16),
        ([0, 130, 65], (4, 2, 128), 16, 4, torch.bfloat16),
        ([130], (2, 1, 128), None, 4, torch.float16),
    ],
)
def test_paged_attention(lengths, heads, page, splits, dtype):
    (H, Hk, D), B = heads, len(lengths)
    dense, pages = cache_of(lengths, Hk, D, page, dtype)
    q = new(B, H, D, dtype=dtype)
    all_lengths = torch.zeros(2, B, dtype=torch.int32, device=DEVICE)
    all_lengths[1] = pages.lengths
    y = paged_attention(q, kernels.places([pages] * 2), 1, all_lengths, splits, Hk)
    for b, length in enumerate(lengths):
        if not length:
            assert torch.equal(y[b], torch.zeros_like(y[b]))
            continue
        k, v = (part[b : b + 1, :, :length].double() for part in dense)
        plain = decode_attention(q[b : b + 1, :, None].double(), k, v)[0, :, 0]
        assert gap(y[b], plain) <= CLOSE[dtype]


@pytest.mark.parametrize("name", ["paged", "static", "growing"])
def test_a_layer_of_a_real_cache(name):
    """Written and read by the kernels: what `append` and plain attention give, and the same state
    afterwards.
    """
    config = small()[0].config
    H, Hk, D, B = config.num_attention_heads, config.num_key_value_heads, config.head_dim, 2
    plain, mine = (make_cache(name, config, capacity=40, batch_size=B) for _ in range(2))
    for cache in (plain, mine):
        torch.manual_seed(1)
        for layer in cache:
            layer.append(*new(2, B, Hk, 16, D, dtype=torch.float32))
    for _ in range(2):  # the second token is in the page of the first
        qkv, rope = new(B, (H + 2 * Hk) * D, dtype=torch.float32), new(2, B, D, dtype=torch.float32)
        q, k, v = plain_heads(qkv, (H, Hk, D), None, None, rope[:, :, None, None], 1)
        expected = [decode_attention(q, *layer.append(k, v)) for layer in plain]
        pages = mine.pages(k)
        places = kernels.places(pages)
        lengths = torch.stack([layer.lengths for layer in pages]).to(DEVICE)  # (L,B)
        for layer in range(len(pages)):
            y = kernels.split_heads_into_pages(
                qkv, (H, Hk, D), None, None, EPS, *rope, places, layer, lengths
            )
            assert (
                gap(paged_attention(y, places, layer, lengths, 2, Hk), expected[layer][:, :, 0])
                < 1e-6
            )
    for ours, theirs in zip(mine, plain, strict=True):
        for key, value in theirs.state().items():
            torch.testing.assert_close(ours.state()[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_layer_of_a_step_is_seven_launches(dtype, monkeypatch):
    """And gives what the plain block gives, to the rounding of one number of attention."""
    model = small(dtype)[0].to(DEVICE)
    config, block = model.config, model.layers[0]
    attention, mlp = block.self_attn, block.mlp
    heads = _, Hk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    plain, mine = (make_cache("static", config, capacity=40) for _ in range(2))
    old = new(2, 1, Hk, 16, D, dtype=dtype)
    for cache in (plain, mine):
        cache[0].append(*old)
    x, rope = new(1, config.hidden_size, dtype=dtype), new(2, 1, D, dtype=dtype)
    expected = block(x[:, None], tuple(rope), plain[0], Decode())[:, 0]
    qkv = torch.cat(
        [part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    )
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    pages = mine[0].pages(new(1, Hk, 1, D, dtype=dtype))
    places, lengths = kernels.places([pages]), pages.lengths[None].to(DEVICE)
    launches, kind = [], type(kernels.rms_norm_kernel)
    run = kind.run
    monkeypatch.setattr(
        kind, "run", lambda kernel, *a, **k: launches.append(kernel) or run(kernel, *a, **k)
    )

    with torch.no_grad():
        y = product(x, qkv, norm=(block.input_layernorm.weight, EPS))
        norms = attention.q_norm.weight, attention.k_norm.weight
        q = kernels.split_heads_into_pages(y, heads, *norms, EPS, *rope, places, 0, lengths)
        y = paged_attention(q, places, 0, lengths, 2, Hk).view(1, -1)
        x = product(y, attention.o_proj.weight, add=x, out=x)
        norm = block.post_attention_layernorm.weight, EPS
        y = product(x, gate_up, norm=norm, swiglu=True)
        x = product(y, mlp.down_proj.weight, add=x, out=x)
    assert len(launches) == 7
    assert gap(x, expected) <= (2e-6 if dtype == torch.float32 else 2**-7)


def test_as_many_splits_as_keep_a_gpu_busy():
    assert [splits_for(rows, 8) for rows in (1, 2, 4, 16, 64, 256)] == [32, 16, 8, 2, 1, 1]
    assert splits_for(1, 1) == 64


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("N, K, M", [(1, 40, 30), (3, 300, 17), (8, 64, 21), (1, 5000, 3)])
def test_product_with_what_stands_before_and_after_it(N, K, M, dtype):
    x, weight = new(N, K, dtype=dtype), new(M, K, dtype=dtype) / K**0.5
    bias, residual, norm = new(M, dtype=dtype), new(N, M, dtype=dtype), norm_of(K, dtype)
    given = norm.weight, EPS
    assert_equal_but(product(x, weight), F.linear(x, weight), 0.02)
    y = product(x, weight, bias, given, residual)
    assert_equal_but(y, residual + F.linear(norm(x), weight, bias), 0.02)
    both = new(2 * M, K, dtype=dtype) / K**0.5
    gate, up = F.linear(norm(x), both).chunk(2, -1)
    assert_equal_but(product(x, both, norm=given, swiglu=True), F.silu(gate) * up, 0.02)
    expected = residual + F.linear(x, weight)
    assert product(x, weight, add=residual, out=residual) is residual
    assert_equal_but(residual, expected, 0.02)


def test_product_says_how_many_rows_it_takes():
    with pytest.raises(ValueError, match="9 rows: at most 8"):
        product(torch.zeros(9, 16), torch.zeros(4, 16))
    with pytest.raises(ValueError, match="contiguous"):
        product(torch.zeros(16, 1).T, torch.zeros(16, 4).T)


def places_of_draws(B):
    seeds = torch.tensor([1, 2, -3, 2**40 + 5, 2])[:B]
    positions = torch.tensor([0, 7, 2**33, 9, 7])[:B]
    return seeds.to(DEVICE), positions.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("filtering", [False, True])
def test_draw_is_the_plain_draw(filtering, dtype):
    B, V = 5, 5003
    logits = (3 * torch.randn(B, V)).to(DEVICE, dtype)
    temperature = torch.tensor([0.0, 1.0, 0.7, 2.0, 1.0]).to(DEVICE)
    filtered = None
    if filtering:
        filtered = logits.float().masked_fill(torch.rand(B, V).to(DEVICE) < 0.99, -torch.inf)
    tokens, logprobs, highest = draw(logits, temperature, *places_of_draws(B), filtered)
    expected = draw_rows(logits, temperature, *places_of_draws(B), filtered)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(highest, expected[2], rtol=1e-6, atol=0)
    alone = draw(
        logits[1:2], temperature[1:2], *(part[1:2] for part in places_of_draws(B)),
        None if filtered is None else filtered[1:2],
    )  # fmt: skip
    assert torch.equal(alone[0], tokens[1:2])


def test_draw_takes_the_first_of_equals_and_shows_what_is_broken():
    B, V = 5, 4100
    logits = torch.zeros(B, V).to(DEVICE)
    logits[0, [70, 3000]] = 5.0
    logits[1, 4099] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = -torch.inf
    tokens, _, highest = draw(logits, torch.zeros(B).to(DEVICE), *places_of_draws(B))
    assert tokens[0] == 70 and tokens[4] == 0
    assert highest[0] == 5 and highest[4] == 0
    assert highest[1].isnan() and highest[2] == torch.inf and highest[3] == -torch.inf
    assert (0 <= tokens).all() and (tokens < V).all()


@pytest.fixture(scope="module", params=[80, 90])
def compiled(request, tmp_path_factory):
    """What the compiler made of every kernel for the A100 or the H100, see
    support/compiled_kernels.py.
    """
    script = Path(__file__).parents[1] / "support" / "compiled_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, script, str(request.param)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
def test_compiled_without_spills_with_wide_loads(compiled):
    names = {result["kernel"] for result in compiled}
    assert len(names) == 9
    for result in compiled:
        assert result["spilled"] == 0, result
        # What every GPU since Ampere grants to a program.
        assert result["shared"] <= 99 * 1024, result
        loads = {int(width): count for width, count in result["loads"].items()}
        if result["kernel"] in ("product_kernel", "paged_attention_kernel", "swiglu_kernel"):
            # Weights, keys and values; narrow are places, the numbers of pages, a bias.
            assert loads[16] >= 2, result
            assert loads.get(2, 0) <= 4, result
            assert 16 * loads[16] > 0.6 * sum(width * n for width, n in loads.items()), result
