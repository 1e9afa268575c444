"""What a layer does between its products, in Triton: norm, heads, rotation, SwiGLU.

Each kernel says which line of the plain model it stands for, and rounds where that line rounds:
fp32 inside, then the model's dtype. A launcher takes tensors, chooses the grid and starts the
kernel; it never waits for the device. Its result goes into `out`, or into new memory. So a step can
be recorded as a CUDA graph.

A layer of a decode step is 7 launches, 6 where attention has one split. N rows, n bytes per number,
S cached tokens:

    launch                                     file        reads
    product(norm=…)              x → q, k, v   products    (H+2Hk)·D·C·n, the weights
    split_heads_into_pages       k, v → cache  kernels     N·(H+2Hk)·D·n
    paged_attention              partial sums  attention   N·2·Hk·S·D·n, the cache
    merge                        y             attention   N·H·splits·(D+1)·4
    product(add=x)               x + o(y)      products    C·H·D·n
    product(norm=…, swiglu=True) gate, up      products    2I·C·n
    product(add=x)               x + down      products    C·I·n

More rows than product takes go through torch's product; then two `rms_norm` (N·2C·n each, with the
residual) and `swiglu` (N·2I·n) are launches of their own: 10 a layer. In Qwen3-0.6B the weights of
a layer are 31 MB, the rows between the products a few kB: there a launch costs more than what it
reads. The draw is two launches a step.

Triton: Tillet et al. 2019, "Triton: an intermediate language and compiler for tiled neural network
computations".
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-untyped]  # Triton has no type hints
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

if TYPE_CHECKING:
    from nanokv.cache.capabilities import Pages

PER_THREAD = 8  # numbers: 16 bytes of bf16, the widest load of a thread
WARP = 32  # threads
PLACE = 8  # numbers in a row of `places`
Heads = tuple[int, int, int]  # H, Hk, D


@triton.jit
def held(x, DTYPE: tl.constexpr):
    """x in fp32 → what is left of it in the model's dtype, in fp32 again."""
    return x.to(DTYPE).to(tl.float32)


# --- RMSNorm, with the residual -------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x, add, weight, y, C, eps, BLOCK: tl.constexpr):
    """One row of C numbers per program.

    model.py, Block:    x = x + self.self_attn(…)
    model.py, RMSNorm:  y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
                        return self.weight * y.to(x.dtype)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)  # (BLOCK,), C and the padding up to a power of two
    inside = column < C
    at = row * C + column
    dtype = x.dtype.element_ty
    h = tl.load(x + at, inside, 0).to(tl.float32)  # (BLOCK,)
    if add is not None:
        h = held(h + tl.load(add + at, inside, 0).to(tl.float32), dtype)
        tl.store(x + at, h.to(dtype), inside)
    w = tl.load(weight + column, inside, 0).to(tl.float32)  # (BLOCK,)
    scale = tl.rsqrt(tl.sum(h * h) / C + eps)
    tl.store(y + at, (w * held(h * scale, dtype)).to(dtype), inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """RMSNorm of every row: x (N,C), weight (C,) → (N,C). With `add` (N,C) x becomes x + add first,
    in its place.

    Reads N·C numbers, or twice as many, and writes as many.
    """
    check(x, weight, add)
    N, C = x.shape
    if out is None:
        out = torch.empty_like(x)
    BLOCK = triton.next_power_of_2(C)
    rms_norm_kernel[(N,)](x, add, weight, out, C, eps, BLOCK, num_warps=warps(BLOCK))
    return out


# --- SwiGLU ---------------------------------------------------------------------------------------


@triton.jit
def silu_times(gate, up, DTYPE: tl.constexpr):
    """silu(gate) · up, fp32 that DTYPE holds exactly; silu(z) = z / (1 + e⁻ᶻ)."""
    return held(gate / (1 + tl.exp(-gate)), DTYPE) * up


@triton.jit
def swiglu_kernel(gate_up, y, width, BLOCK: tl.constexpr):
    """BLOCK numbers of one row per program.

    model.py, MLP:  F.silu(self.gate_proj(x)) * self.up_proj(x)
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    inside = column < width
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, inside, 0).to(tl.float32)  # (BLOCK,)
    up = tl.load(at + width, inside, 0).to(tl.float32)  # (BLOCK,)
    dtype = y.dtype.element_ty
    tl.store(y + row * width + column, silu_times(gate, up, dtype).to(dtype), inside)


def swiglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) · up: (N,2I) from one product, gate first → (N,I). Reads N·2I numbers."""
    check(gate_up)
    N = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(N, width)
    BLOCK = min(1024, triton.next_power_of_2(width))
    grid = N, triton.cdiv(width, BLOCK)
    swiglu_kernel[grid](gate_up, out, width, BLOCK, num_warps=warps(BLOCK))
    return out


# --- heads: norm, rotation, and where they go -----------------------------------------------------


@triton.jit
def halves_of_row(row, D: tl.constexpr, HALF: tl.constexpr):
    """D numbers at `row` → both halves (1,HALF), fp32: of cos, of sin, of the weight of a norm."""
    i = tl.arange(0, HALF)[None, :]
    first = tl.load(row + i, i < D // 2, 0)
    second = tl.load(row + D // 2 + i, i < D // 2, 0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def halves_of_heads(
    qkv, n, head, q_norm, k_norm, eps, cos, sin, angle,
    H: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of row n of qkv, normed where the family has it, q and k rotated.

    model.py, Attention:  q = self.q_norm(q);  k = self.k_norm(k)
    rope.py:              x1, x2 = x.chunk(2, dim=-1)
                          x * cos + torch.cat((-x2, x1), -1) * sin

    head (R,) → the first and the second half of each, both (R,HALF) fp32 that the model's dtype
    holds. Dimension i turns with i + D/2, so a thread has both.
    """
    dtype = qkv.dtype.element_ty
    i = tl.arange(0, HALF)[None, :]  # (1,HALF), D/2 and the padding
    inside = i < D // 2
    here = inside & (head < H + 2 * Hk)[:, None]  # (R,HALF)
    at = qkv + n * (H + 2 * Hk) * D + head[:, None] * D + i  # (R,HALF)
    x1 = tl.load(at, here, 0).to(tl.float32)
    x2 = tl.load(at + D // 2, here, 0).to(tl.float32)
    y1 = x1
    y2 = x2
    if q_norm is not None:
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]  # (R,1)
        q1, q2 = halves_of_row(q_norm, D, HALF)  # (1,HALF) ×2
        k1, k2 = halves_of_row(k_norm, D, HALF)
        is_q = (head < H)[:, None]  # (R,1)
        y1 = held(tl.where(is_q, q1, k1) * held(x1 * scale, dtype), dtype)
        y2 = held(tl.where(is_q, q2, k2) * held(x2 * scale, dtype), dtype)
    c1, c2 = halves_of_row(cos + angle * D, D, HALF)  # (1,HALF) ×2
    s1, s2 = halves_of_row(sin + angle * D, D, HALF)
    z1 = held(y1 * c1, dtype) - held(y2 * s1, dtype)
    z2 = held(y2 * c2, dtype) + held(y1 * s2, dtype)
    turned = (head < H + Hk)[:, None]  # v is neither normed nor rotated
    return tl.where(turned, z1, x1), tl.where(turned, z2, x2)


@triton.jit
def store_heads(at, first, second, mine, D: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the heads that are `mine` (R,), to the addresses `at` (R,) of their first
    numbers.
    """
    i = tl.arange(0, HALF)[None, :]
    here = mine[:, None] & (i < D // 2)  # (R,HALF)
    to = at[:, None] + i
    dtype = at.dtype.element_ty
    tl.store(to, first.to(dtype), here)
    tl.store(to + D // 2, second.to(dtype), here)


@triton.jit(do_not_specialize=["angles", "T"])
def split_heads_kernel(
    qkv, q_norm, k_norm, eps, cos, sin, angles, q, k, v, T,
    H: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R heads of one token per program, see halves_of_heads.

    model.py, Attention:  .view(B, T, -1, self.head_dim).transpose(1, 2)
    """
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * R + tl.arange(0, R)  # (R,): those of q, of k, of v
    first, second = halves_of_heads(
        qkv, n, head, q_norm, k_norm, eps, cos, sin, n % angles, H, Hk, D, HALF
    )
    b = n // T
    t = n % T
    own = head - H  # (R,), of k
    store_heads(q + ((b * H + head) * T + t) * D, first, second, head < H, D, HALF)
    is_k = (own >= 0) & (own < Hk)
    store_heads(k + ((b * Hk + own) * T + t) * D, first, second, is_k, D, HALF)
    own -= Hk  # of v
    is_v = (own >= 0) & (own < Hk)
    store_heads(v + ((b * Hk + own) * T + t) * D, first, second, is_v, D, HALF)


def split_heads(
    qkv: Tensor,
    heads: Heads,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    T: int,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (B·T,(H+2Hk)·D) → q (B,H,T,D), k and v (B,Hk,T,D), q and k normed and rotated. For a
    prefill.

    heads: (H,Hk,D). q_norm and k_norm (D,), or None ×2. cos and sin (T,D), (B,T,D) or (B,1,T,D).
    Reads and writes B·T·(H+2Hk)·D numbers.
    """
    check(qkv, q_norm, k_norm, cos, sin)
    H, Hk, D = heads
    B = len(qkv) // T
    q, k, v = out or (qkv.new_empty(B, h, T, D) for h in (H, Hk, Hk))
    HALF = triton.next_power_of_2(D // 2)
    R = 8
    grid = B * T, triton.cdiv(H + 2 * Hk, R)
    # n % angles: the token, or the token of this row of the batch
    angles = cos.numel() // D
    split_heads_kernel[grid](
        qkv, q_norm, k_norm, eps, cos, sin, angles, q, k, v, T, H, Hk, D, HALF, R,
        num_warps=warps(R * HALF),
    )  # fmt: skip
    return q, k, v


@triton.jit
def place_of(places, layer, like, PLACE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a layer's cache lies: row `layer` of places, addresses as pointers of the type of
    `like`.

    ALIGNED numbers in a row of memory begin where as many would: what the compiler needs to know
    for wide loads.
    """
    row = places + layer * PLACE
    bytes_: tl.constexpr = ALIGNED * like.dtype.element_ty.primitive_bitwidth // 8
    keys = tl.multiple_of(tl.load(row).to(like.dtype), bytes_)
    values = tl.multiple_of(tl.load(row + 1).to(like.dtype), bytes_)
    page_stride = tl.multiple_of(tl.load(row + 2), ALIGNED)
    head_stride = tl.multiple_of(tl.load(row + 3), ALIGNED)
    token_stride = tl.multiple_of(tl.load(row + 4), ALIGNED)
    page_size = tl.load(row + 5).to(tl.int32)
    table = tl.load(row + 6)  # 0: none
    table_stride = tl.load(row + 7)
    return keys, values, page_stride, head_stride, token_stride, page_size, table, table_stride


@triton.jit(do_not_specialize=["layer", "B"])
def split_heads_into_pages_kernel(
    qkv, q_norm, k_norm, eps, cos, sin, q, places, layer, lengths, B,
    H: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, R: tl.constexpr,
    PLACE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """R heads of one row per program, see halves_of_heads.

    cache/view.py, View.write:  keys[layer][page, :, slot] = k, and so the values
    """
    b = tl.program_id(0)
    head = tl.program_id(1) * R + tl.arange(0, R)  # (R,): those of q, of k, of v
    first, second = halves_of_heads(
        qkv, b.to(tl.int64), head, q_norm, k_norm, eps, cos, sin, b, H, Hk, D, HALF
    )
    store_heads(q + (b * H + head) * D, first, second, head < H, D, HALF)
    token = tl.load(lengths + layer * B + b) - 1
    if token >= 0:  # not a padded row
        keys, values, page_stride, head_stride, token_stride, size, table, table_stride = place_of(
            places, layer, q, PLACE, ALIGNED
        )
        entry = table.to(tl.pointer_type(tl.int32)) + b * table_stride + token // size
        page = tl.load(entry, table != 0, b).to(tl.int64)
        at = page * page_stride + (token % size) * token_stride
        own = head - H  # (R,), of k
        is_k = (own >= 0) & (own < Hk)
        store_heads(keys + at + own * head_stride, first, second, is_k, D, HALF)
        own -= Hk  # of v
        is_v = (own >= 0) & (own < Hk)
        store_heads(values + at + own * head_stride, first, second, is_v, D, HALF)


def split_heads_into_pages(
    qkv: Tensor,
    heads: Heads,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    layer: int,
    lengths: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """qkv (B,(H+2Hk)·D), one token per row → q (B,H,D), normed and rotated; k and v go to the
    cache. For a decode.

    cos and sin (B,D), or of that many numbers. places (L,8) int64 says where, see `places`; lengths
    (L,B) int32 counts the new token; 0 is a row of padding, which writes nothing but its q. Reads
    and writes B·(H+2Hk)·D numbers.
    """
    check(qkv, q_norm, k_norm, cos, sin, places, lengths)
    H, Hk, D = heads
    B = len(qkv)
    q = qkv.new_empty(B, H, D) if out is None else out
    HALF = triton.next_power_of_2(D // 2)
    R = 1  # one head and one warp: a step of one row has nothing else to share out
    split_heads_into_pages_kernel[B, H + 2 * Hk](
        qkv, q_norm, k_norm, eps, cos, sin, q, places, layer, lengths, B, H, Hk, D, HALF, R,
        PLACE, aligned(D, qkv.dtype), num_warps=1,
    )  # fmt: skip
    return q


# --- what the launchers share ---------------------------------------------------------------------


def check(*tensors: Tensor | None) -> None:
    """A kernel walks through memory: rows must follow each other."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"a kernel needs contiguous tensors, not strides {tensor.stride()}")


def warps(numbers: int) -> int:
    """Warps of a program of so many numbers (a power of two), 16 bytes of bf16 for each thread."""
    return min(max(numbers // (WARP * PER_THREAD), 1), 16)


def aligned(D: int, dtype: torch.dtype) -> int:
    """How many of the D numbers of a head one load may take: 16 bytes, or less where D is not a
    multiple of that.
    """
    widest = 16 // dtype.itemsize
    return min(widest, D & -D)  # the largest power of two that divides D


def places(pages: Sequence["Pages"], out: Tensor | None = None) -> Tensor:
    """Where the layers of a cache lie: Pages of each of L layers → (L,8) int64 for the kernels; on
    the cache's device.

    A row: the addresses of keys and values; from page to page, head to head and token to token, in
    numbers; tokens per page; the address of the table and from row to row of it, or 0. A recorded
    step reads it each time, so `out` can be filled anew for another cache. Whoever fills it keeps
    the tensors alive.
    """
    rows = [place(layer) for layer in pages]
    host = torch.tensor(rows, dtype=torch.int64)  # (L,8)
    if out is None:
        return host.to(pages[0].keys.device)
    return out.copy_(host, non_blocking=True)


def place(pages: "Pages") -> list[int]:
    """A row of `places`. ValueError if the kernels could not read there."""
    keys = pages.keys
    values = pages.values
    strides = keys.stride()
    unit = aligned(keys.shape[3], keys.dtype)
    starts = [tensor.data_ptr() // keys.element_size() for tensor in (keys, values)]
    if values.stride() != strides or strides[3] != 1:
        raise ValueError(f"keys and values lie differently: strides {strides}, {values.stride()}")
    if any(number % unit for number in (*starts, *strides[:3])):
        raise ValueError(f"keys must begin at multiples of {unit} numbers: strides {strides}")
    row = [keys.data_ptr(), values.data_ptr(), *strides[:3], keys.shape[2]]
    if pages.table is None:
        return [*row, 0, 0]
    return [*row, pages.table.data_ptr(), pages.table.stride(0)]
