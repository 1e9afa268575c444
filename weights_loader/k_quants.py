"""Quantize to Q4_K and Q6_K, two types of GGUF. The `gguf` package can only dequantize them.

A super-block of 256 numbers has one fp16 scale. Its sub-blocks have whole-number scales below it:

    Q4_K  8 sub-blocks of 32: x ≈ d·s·q − dmin·m,  0 ≤ q ≤ 15,  0 ≤ s, m ≤ 63     144 bytes
    Q6_K  16 sub-blocks of 16: x ≈ d·s·q,  −32 ≤ q ≤ 31,  −128 ≤ s ≤ 127          210 bytes

The scales that rounding suggests are not the best ones. A few scales near them are tried, and for
each of them weighted least squares gives the best scale for its whole numbers. Method, weights and
numbers of tries: `make_qkx2_quants`, `make_qx_quants`, `quantize_row_q4_K_ref` and
`quantize_row_q6_K_ref` in llama.cpp, ggml/src/ggml-quants.c; layout of the bytes: `block_q4_K` and
`block_q6_K` in ggml-common.h. The loops over blocks are array operations here: dimension 0 is the
place in the sub-block, so that every operation runs over all n sub-blocks.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

SUPER = 256  # numbers per super-block
CHUNK = 512  # super-blocks per step, so that the arrays of a step fit in the processor's cache
TINY = np.float32(1e-15)  # a sub-block whose numbers are all smaller becomes zeros
Q4_TOP = 15
Q4_STEPS = [np.float32(-1 + 0.1 * step) for step in range(21)]
Q6_TOP = 32
Q6_STEPS = [np.float32(0.1 * step) for step in range(-9, 10)]


def quantize_q4_k(rows: Floats) -> Bytes:
    """(N,K) fp32 → (N,K/256·144) bytes. K is a multiple of 256, and all numbers are finite."""
    return _in_chunks(rows, _q4_k)


def quantize_q6_k(rows: Floats) -> Bytes:
    """(N,K) fp32 → (N,K/256·210) bytes. K is a multiple of 256, and all numbers are finite."""
    return _in_chunks(rows, _q6_k)


def _in_chunks(rows: Floats, quantize: Callable[[Floats], Bytes]) -> Bytes:
    blocks = rows.astype(np.float32, copy=False).reshape(-1, SUPER)
    parts = [quantize(blocks[first : first + CHUNK]) for first in range(0, len(blocks), CHUNK)]
    return np.concatenate(parts).reshape(len(rows), -1)


# --- Q4_K -----------------------------------------------------------------------------------------


def _q4_k(blocks: Floats) -> Bytes:
    """(n,256) → (n,144): d, dmin, 8 scales and 8 minima of 6 bits, 256 numbers of 4 bits."""
    count = len(blocks)
    x = np.ascontiguousarray(blocks.reshape(count * 8, 32).T)  # (32,8n)
    scale, minimum = _fit_scale_and_minimum(x)
    d, scales = _six_bits(scale.reshape(count, 8))
    dmin, minima = _six_bits(minimum.reshape(count, 8))
    step = (_wide(d) * scales).reshape(-1)  # (8n,)
    shift = (_wide(dmin) * minima).reshape(-1)
    numbers = np.clip(np.rint((x + shift) * _inverse(step)), 0, Q4_TOP).astype(np.uint8)
    pairs = numbers.T.reshape(count, 4, 2, 32)  # sub-blocks 2i and 2i+1 share bytes
    return np.concatenate(
        [
            d.view(np.uint8),
            dmin.view(np.uint8),
            _packed_scales(scales, minima),
            (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(count, 128),
        ],
        axis=1,
    )


def _fit_scale_and_minimum(x: Floats) -> tuple[Floats, Floats]:
    """(32,n) → scale (n,) and minimum (n,) with x ≈ scale·q − minimum; both are at least 0.

    The error of a number counts more, the larger the number is.
    """
    weight = np.sqrt(np.mean(x * x, axis=0)) + np.abs(x)
    sum_w = weight.sum(axis=0)
    weighted = weight * x
    sum_x = weighted.sum(axis=0)
    high = x.max(axis=0)
    low = np.minimum(x.min(axis=0), 0)
    scale = (high - low) / np.float32(Q4_TOP)
    q = _levels(x, low, _inverse(scale))
    best = _error(x, weight, q, scale, low)
    for step in Q4_STEPS:
        q = _levels(x, low, (step + Q4_TOP) * _inverse(high - low))
        weighted_q = weight * q
        sum_q = weighted_q.sum(axis=0)
        sum_xq = (weighted_q * x).sum(axis=0)
        sum_qq = (weighted_q * q).sum(axis=0)
        determinant = sum_w * sum_qq - sum_q * sum_q
        inverse = _inverse(determinant)
        new_scale = (sum_w * sum_xq - sum_x * sum_q) * inverse
        new_low = (sum_qq * sum_x - sum_q * sum_xq) * inverse
        above = new_low > 0
        new_scale = np.where(above, sum_xq * _inverse(sum_qq), new_scale)
        new_low = np.where(above, np.float32(0), new_low)
        error = _error(x, weight, q, new_scale, new_low)
        better = (determinant > 0) & (error < best)
        best = np.where(better, error, best)
        scale = np.where(better, new_scale, scale)
        low = np.where(better, new_low, low)
    return scale, -low


def _levels(x: Floats, low: Floats, inverse: Floats) -> Floats:
    """The whole numbers 0 … 15 that are nearest to (x − low)·inverse."""
    q = x - low
    q *= inverse
    np.rint(q, out=q)
    return np.clip(q, 0, Q4_TOP, out=q)


def _error(x: Floats, weight: Floats, q: Floats, scale: Floats, low: Floats) -> Floats:
    """The weighted squared error of scale·q + low, (n,)."""
    difference = scale * q
    difference += low
    difference -= x
    difference *= difference
    difference *= weight
    return difference.sum(axis=0)


def _six_bits(values: Floats) -> tuple[NDArray[np.float16], Bytes]:
    """(n,8) numbers ≥ 0 → fp16 d (n,1) and whole numbers 0 … 63 (n,8), d·number ≈ value."""
    largest = values.max(axis=1, keepdims=True)
    numbers = np.minimum(np.rint(values * (63 * _inverse(largest))), 63)
    return (largest / 63).astype(np.float16), numbers.astype(np.uint8)


def _packed_scales(scales: Bytes, minima: Bytes) -> Bytes:
    """Two (n,8) of 6 bits → (n,12). The upper 2 bits of the last four are beside the first four."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


# --- Q6_K -----------------------------------------------------------------------------------------


def _q6_k(blocks: Floats) -> Bytes:
    """(n,256) → (n,210): lower 4 bits and upper 2 bits of the numbers, 16 int8 scales, d."""
    count = len(blocks)
    x = np.ascontiguousarray(blocks.reshape(count * 16, 16).T)  # (16,16n)
    scale = _fit_scale(x).reshape(count, 16)
    largest = _of_largest_size(scale.T)[:, None]  # (n,1)
    d = (largest / -128).astype(np.float16)
    scales = np.minimum(np.rint(scale * (-128 * _inverse(largest))), 127).astype(np.int8)
    step = (_wide(d) * scales).reshape(-1)  # (16n,)
    numbers = np.clip(np.rint(x * _inverse(step)), -Q6_TOP, Q6_TOP - 1) + Q6_TOP
    halves = numbers.astype(np.uint8).T.reshape(count, 2, 4, 32)  # four runs of 32 per half
    low = halves & 15
    high = halves >> 4
    lower = low[:, :, :2] | low[:, :, 2:] << 4  # (n,2,2,32)
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return np.concatenate(
        [
            lower.reshape(count, 128),
            upper.reshape(count, 64),
            scales.view(np.uint8),
            d.view(np.uint8),
        ],
        axis=1,
    )


def _fit_scale(x: Floats) -> Floats:
    """(16,n) → scale (n,) with x ≈ scale·q; the error of a number counts as its square."""
    largest = _of_largest_size(x)
    weight = x * x
    weighted = weight * x
    scale = np.zeros_like(largest)
    best = np.zeros_like(largest)
    inverse = -_inverse(largest)
    for step in sorted(Q6_STEPS, key=lambda step: step != 0):  # 0 first
        q = x * ((Q6_TOP + step) * inverse)
        np.rint(q, out=q)
        np.clip(q, -Q6_TOP, Q6_TOP - 1, out=q)
        sum_xq = (weighted * q).sum(axis=0)
        q *= q
        q *= weight
        sum_qq = q.sum(axis=0)
        better = sum_xq * sum_xq > best * sum_qq
        scale = np.where(better, sum_xq * _inverse(sum_qq), scale)
        best = np.where(better, scale * sum_xq, best)
    return np.where(np.abs(largest) < TINY, np.float32(0), scale)


def _of_largest_size(x: Floats) -> Floats:
    """(k,n) → the number with the largest absolute value in each column, (n,)."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]


# --- both -----------------------------------------------------------------------------------------


def _inverse(values: Floats) -> Floats:
    """1 / value; 0 where the value is 0."""
    return np.divide(1, values, out=np.zeros_like(values), where=values != 0)


def _wide(values: NDArray[np.float16]) -> Floats:
    return values.astype(np.float32)
