"""The products of a decode step, in Triton: for few rows, bound by reading the weights once.

A product of one row does 2 operations per weight, so it needs no matrix instructions. Only x is
used more than once; it is small and comes from the GPU's caches. The speed depends on having enough
loads in flight (see attention.STAGES): a thread has 64 bytes of weights in flight before it
multiplies. The norm, SwiGLU and residual next to a product run in the same program, because a
separate launch would take as long as reading 8 MB.
"""

import triton  # type: ignore[import-untyped]  # Triton has no type hints
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from nanokv.fast.gpu.kernels import WARP, check, held, silu_times

# The most rows of x. N rows take N multiplications per weight, and with a norm about as many
# operations on x. Up to about 4 rows these take less time than the reads. For many rows torch's
# product is faster, because it uses matrix instructions.
MOST_ROWS = 8
TILE_BYTES = 8_192  # bytes of weights per program and turn
THREAD_BYTES = 64  # bytes of weights per thread: four loads of 16 bytes
PROGRAMS = 512  # the least number of programs: four for each of 132 processors


@triton.jit
def scale_of_row(x, K, eps, BLOCK_K: tl.constexpr):
    """The scale of one row x (K,).

    model.py, RMSNorm:  torch.rsqrt(x.float().pow(2).mean(-1) + eps)
    """
    k = tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, K, BLOCK_K):
        part = tl.load(x + first + k, first + k < K, 0).to(tl.float32)
        squares += part * part
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


@triton.jit
def rows_times_weights(
    x, weight, rows, norm, eps, K, N: tl.constexpr, PADDED: tl.constexpr, BLOCK_K: tl.constexpr
):
    """x (N,K), normed if `norm` is given, times some rows (R,) of weight → (R,PADDED) fp32.

    The first N of the PADDED columns are the result, the others are padding.
    """
    n = tl.arange(0, PADDED)
    k = tl.arange(0, BLOCK_K)
    at = weight + rows.to(tl.int64)[:, None] * K + k[None, :]  # (R,BLOCK_K)
    # Load the first weights before x is needed. Each weight is used once, so it is evicted first
    # and leaves the caches to x.
    w = tl.load(at, (k < K)[None, :], 0, eviction_policy="evict_first")
    scales = tl.zeros((PADDED,), tl.float32)
    if norm is not None:
        for row in range(N):
            scales += tl.where(n == row, scale_of_row(x + row * K, K, eps, BLOCK_K), 0)
    y = tl.zeros((rows.shape[0], PADDED), tl.float32)
    for first in range(0, K, BLOCK_K):
        column = first + k  # (BLOCK_K,)
        inside = column < K
        later = (column + BLOCK_K < K)[None, :]
        w_next = tl.load(at + first + BLOCK_K, later, 0, eviction_policy="evict_first")
        for row in range(N):
            part = tl.load(x + row * K + column, inside, 0).to(tl.float32)  # (BLOCK_K,)
            if norm is not None:  # model.py, RMSNorm:  self.weight * y.to(x.dtype)
                dtype = norm.dtype.element_ty
                scaled = held(part * tl.sum(tl.where(n == row, scales, 0), 0), dtype)
                part = held(tl.load(norm + column, inside, 0).to(tl.float32) * scaled, dtype)
            sums = tl.sum(w.to(tl.float32) * part[None, :], 1)  # (R,)
            y += tl.where((n == row)[None, :], sums[:, None], 0)
        w = w_next
    return y


@triton.jit
def product_kernel(
    x, weight, bias, norm, eps, add, out, M, K,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
):  # fmt: skip
    """BLOCK_M columns of the result per program, for all N rows.

    model.py, Block:      y = self.input_layernorm(x);  x + self.self_attn(…)
    model.py, Attention:  self.q_proj(x), and o_proj
    model.py, MLP:        F.silu(self.gate_proj(x)) * self.up_proj(x)
    """
    dtype = out.dtype.element_ty
    first = tl.program_id(0) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    n = tl.arange(0, PADDED)
    if SWIGLU:  # row 0 of gate, row 0 of up, row 1 of gate, …; up begins M rows after gate
        both = tl.arange(0, 2 * BLOCK_M)
        rows = tl.minimum(first + both // 2, M - 1) + both % 2 * M  # (2·BLOCK_M,)
        y = rows_times_weights(x, weight, rows, norm, eps, K, N, PADDED, BLOCK_K)
        pairs = tl.permute(tl.reshape(y, (BLOCK_M, 2, PADDED)), (0, 2, 1))  # (BLOCK_M,PADDED,2)
        gate, up = tl.split(pairs)  # (BLOCK_M,PADDED) ×2
        y = silu_times(held(gate, dtype), held(up, dtype), dtype)
    else:
        # Past the end the last row is read again.
        rows = tl.minimum(m, M - 1)
        y = rows_times_weights(x, weight, rows, norm, eps, K, N, PADDED, BLOCK_K)
        if bias is not None:
            y += tl.load(bias + rows).to(tl.float32)[:, None]
    here = (m < M)[:, None] & (n < N)[None, :]  # (BLOCK_M,PADDED)
    to = n[None, :] * M + m[:, None]
    if add is not None:
        y = held(y, dtype) + tl.load(add + to, here, 0).to(tl.float32)
    tl.store(out + to, y.to(dtype), here)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    add: Tensor | None = None,
    swiglu: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x (N,K) · weightᵀ with weight (M,K) → (N,M) for N ≤ 8 rows. ValueError for more rows.

    Sums are fp32 and are rounded as in the plain model. bias (M,) is added to the sum. norm:
    (weight (K,), eps) of an RMSNorm that is applied to x first. add (N,M): the residual, added
    last; it may be `out`. swiglu: weight (2M,K) holds gate and up, and the result is silu(gate) ·
    up. Reads M·K numbers, or 2·M·K, and per program x from the GPU's caches.
    """
    norm_weight, eps = norm or (None, 0.0)
    check(x, weight, bias, norm_weight, add)
    N, K = x.shape
    if N > MOST_ROWS or (swiglu and bias is not None):
        raise ValueError(f"product() of {N} rows: at most {MOST_ROWS}, and no bias with swiglu")
    R, BLOCK_K = tile(len(weight), K, x.element_size())
    M = len(weight)
    BLOCK_M = R
    if swiglu:
        M = len(weight) // 2
        BLOCK_M = max(R // 2, 1)
    if out is None:
        out = x.new_empty(N, M)
    threads = R * BLOCK_K * x.element_size() // THREAD_BYTES
    product_kernel[(triton.cdiv(M, BLOCK_M),)](
        x, weight, bias, norm_weight, eps, add, out, M, K,
        N, triton.next_power_of_2(N), BLOCK_M, BLOCK_K, swiglu, num_warps=max(threads // WARP, 1),
    )  # fmt: skip
    return out


def tile(rows: int, K: int, size: int) -> tuple[int, int]:
    """(rows, columns) of the tile of weights that a program reads in one turn.

    K numbers of `size` bytes per row. A tile has whole rows if they are short, and several rows if
    that leaves enough programs.
    """
    BLOCK_K = min(triton.next_power_of_2(K), TILE_BYTES // size)
    R = TILE_BYTES // (BLOCK_K * size)
    while R > 1 and rows // R < PROGRAMS:
        R //= 2
    return R, BLOCK_K
