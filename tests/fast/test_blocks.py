"""Weights in the blocks of a GGUF file: the numbers are those of the gguf package, to the bit, in every type.

test_instructions.py runs these tests again with kernels for other processors.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from blocks import matrix, raw_blocks, widths
from nanokv.errors import ConfigError
from nanokv.fast import native
from nanokv.fast import weights as fast_weights
from nanokv.fast.blocks import SIZES, Blocks, Stacked, dequantized, stacked
from nanokv.fast.weights import Dense
from small_model import needs_kernels

TYPES = pytest.mark.parametrize("type_", SIZES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def gap(a, b):
    return float((a - b).abs().max() / b.abs().max())


@TYPES
def test_products_with_blocks_hold_the_numbers_of_the_gguf_package(code, type_):
    """Rows looked up one by one, the whole matrix, and parts of it: equal to the bit."""
    for K in widths(type_):
        found = matrix(type_, 37, K)
        expected = dequantized(found.weight, type_)
        assert expected.shape == (37, K) == (found.N, found.K)
        assert torch.equal(found.dense(), expected)
        index = torch.tensor([[3, 36], [0, 3]])
        assert torch.equal(found.rows(index), expected[index])


@TYPES
def test_products_with_blocks(code, type_):
    """Activations are rounded to 8 bits by the kernels: within 2 % of the largest, in every width."""
    for K in widths(type_):
        for N in (37, 8):
            found = matrix(type_, N, K, bias=torch.arange(N).float())
            expected = dequantized(found.weight, type_).double()
            for rows in (1, 2, 4, 5, 9, 32, 40):
                x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1))
                y = x.double() @ expected.T + found.bias
                assert found(x).shape == (rows, N) and gap(found(x).double(), y) <= 0.02


@needs_kernels
@TYPES
def test_products_with_blocks_and_whole_numbers(type_):
    """Whole numbers up to 127 are their own codes in 8 bits, so nothing but the sums is rounded."""
    for K in widths(type_):
        found, g = matrix(type_, 37, K), torch.Generator().manual_seed(0)
        expected = dequantized(found.weight, type_).double()
        for rows in (1, 3, 7, 8):  # a row, four rows at a time, and panels with a part of four
            x = torch.randint(-127, 128, (rows, K), generator=g).float()
            x[:, ::32] = 127
            assert gap(found(x).double(), x.double() @ expected.T) <= 1e-6


@needs_kernels
@TYPES
@DTYPES
def test_products_with_blocks_that_the_kernels_make_dense(monkeypatch, dtype, type_):
    """To the bit, however many rows are made at a time; bf16 is rounded once."""
    monkeypatch.setattr(native, "multiplies_bf16", lambda kernels: True)
    K = widths(type_)[-1]
    found = matrix(type_, 37, K, dtype)
    expected = dequantized(found.weight, type_).to(dtype)
    for count in (K, 3 * K, fast_weights.UNPACKED):
        monkeypatch.setattr(fast_weights, "UNPACKED", count)
        parts = [(first, part.clone()) for first, part in found.parts()]
        assert len(parts) == -(-37 // max(1, count // K))
        assert torch.equal(torch.cat([part for _, part in parts]), expected)
    x = torch.randn(140, K)
    assert gap(found.product(x).float(), F.linear(x.to(dtype), expected).float()) < (
        1e-5 if dtype == torch.float32 else 0.02
    )


def mixed(dtype) -> list:
    """Matrices of three formats, one of them dense, with and without biases."""
    g = torch.Generator().manual_seed(2)
    return [
        matrix("Q4_K", 40, 256, dtype, torch.randn(40, generator=g)),
        matrix("Q6_K", 33, 256, dtype, seed=1),
        Dense(torch.randn(5, 256, generator=g).to(dtype), torch.randn(5, generator=g)),
        matrix("Q4_K", 8, 256, dtype, torch.randn(8, generator=g), seed=2),
    ]


@DTYPES
def test_products_with_blocks_of_several_types_below_each_other(code, dtype):
    """One call, the columns of each matrix in their order, for few rows and for many."""
    found = Stacked(mixed(dtype))
    alone = mixed(dtype)
    assert (found.N, found.K) == (86, 256)
    assert found.nbytes == sum(part.nbytes for part in alone)
    assert torch.equal(found.dense(), torch.cat([part.dense() for part in alone]))
    for rows in (1, 2, 5, 9, 31, 140):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        expected = torch.cat([part(x) for part in alone], -1)
        assert gap(found(x), expected) <= (0.02 if rows > 8 and dtype == torch.bfloat16 else 1e-5)
        assert gap(found.product(x).float(), expected) <= 0.02
    other = copy.deepcopy(found)
    expected = found(x[:1])
    for buffer in found.buffers():
        buffer.zero_()
    assert torch.equal(other(x[:1]), expected)
    assert not found(x[:1]).any()


def test_one_matrix_is_not_stacked():
    only = matrix("Q8_0", 8, 32)
    assert stacked([only]) is only and isinstance(stacked([only, only]), Stacked)


@TYPES
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_products_with_blocks_keep_what_is_no_number(code, type_, bad):
    found, x = matrix(type_, 8, 512), torch.randn(2, 512)
    x[0, 300] = bad
    y = found(x)
    assert not y[0].isfinite().any() and y[1].isfinite().all()


@pytest.mark.parametrize(
    ("blocks", "type_", "message"),
    [
        (torch.zeros(4, 33, dtype=torch.uint8), "Q8_0", r"33 values .* a block of 32 weights has"),
        (torch.zeros(4, 0, dtype=torch.uint8), "Q4_0", "rows of 0 values"),
        (torch.zeros(4, 72, dtype=torch.uint8), "Q4_K", "256 weights has 144 bytes"),
        (torch.zeros(4, 34), "Q8_0", "float32 are no blocks"),
        (torch.zeros(4, 66, dtype=torch.uint8), "IQ2_XXS", "no kernels: Q4_0, Q4_1"),
    ],
)
def test_what_are_no_blocks_is_refused(blocks, type_, message):
    with pytest.raises(ConfigError, match=message):
        Blocks(blocks, type_, torch.float32)


@needs_kernels
def test_nothing_behind_the_last_block_is_read():
    """A mapped file may end there. (test_instructions.py does this for every type, with the address sanitizer.)"""
    whole = raw_blocks("Q4_1", 3, 96)
    longer = torch.full((3 * 60 + 64,), 255, dtype=torch.uint8)
    longer[:180] = whole.flatten()
    x = torch.randn(1, 96)
    found = Blocks(longer[:180].view(3, 60), "Q4_1", torch.float32)
    assert torch.equal(found(x), Blocks(whole, "Q4_1", torch.float32)(x))
