"""The operations of a layer between its products, in Triton: norm, heads, rotation, SwiGLU.

Each kernel quotes the line of the plain model that it replaces, and rounds where that line rounds:
fp32 inside, then the model's dtype. A launcher takes tensors, chooses the grid and starts the
kernel. It writes to `out` or to new memory and never waits for the device, so a step can be
recorded as a CUDA graph.

A layer of a decode step is 7 launches, or 6 if attention has one split. N rows, n bytes per number,
S cached tokens:

    launch                                     file        reads
    product(norm=…)              x → q, k, v   products    (H+2Hk)·D·C·n, the weights
    split_heads_into_pages       k, v → cache  kernels     N·(H+2Hk)·D·n
    paged_attention              partial sums  attention   N·2·Hk·S·D·n, the cache
    merge                        y             attention   N·H·splits·(D+1)·4
    product(add=x)               x + o(y)      products    C·H·D·n
    product(norm=…, swiglu=True) gate, up      products    2I·C·n
    product(add=x)               x + down      products    C·I·n

`product` takes few rows only. More rows go through torch's product, and two `rms_norm` (N·2C·n
each, with the residual) and `swiglu` (N·2I·n) become separate launches: 10 per layer. In Qwen3-0.6B
the weights of a layer are 31 MB and the rows between the products a few kB, so for the latter a
launch costs more time than the reads. The draw is two launches per step.

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

PER_THREAD = 8  # numbers per thread: 16 bytes of bf16, the widest load
WARP = 32  # threads
PLACE = 8  # numbers in a row of `places`
Heads = tuple[int, int, int]  # H, Hk, D


@triton.jit
def held(x, DTYPE: tl.constexpr):
    """x in fp32 → x rounded to the model's dtype, in fp32."""
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
    """RMSNorm of every row: x (N,C), weight (C,) → (N,C).

    With `add` (N,C), x + add is first stored in x and then normed. Reads and writes N·C numbers,
    twice as many with `add`.
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
    """silu(gate) · up in fp32, with silu(gate) rounded to DTYPE; silu(z) = z / (1 + e⁻ᶻ)."""
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
    """silu(gate) · up of a product (N,2I) with gate first → (N,I). Reads N·2I numbers."""
    check(gate_up)
    N = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(N, width)
    BLOCK = min(1024, triton.next_power_of_2(width))
    grid = N, triton.cdiv(width, BLOCK)
    swiglu_kernel[grid](gate_up, out, width, BLOCK, num_warps=warps(BLOCK))
    return out


# --- heads: norm, rotation, and the store into the cache ------------------------------------------


@triton.jit
def halves_of_row(row, D: tl.constexpr, HALF: tl.constexpr):
    """The D numbers at `row` as two halves (1,HALF) in fp32: of cos, sin or a norm's weight."""
    i = tl.arange(0, HALF)[None, :]
    first = tl.load(row + i, i < D // 2, 0)
    second = tl.load(row + D // 2 + i, i < D // 2, 0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def halves_of_heads(
    qkv, n, head, q_norm, k_norm, eps, cos, sin, angle,
    H: tl.constexpr, Hk: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of row n of qkv: normed if the family norms q and k, then q and k rotated.

    model.py, Attention:  q = self.q_norm(q);  k = self.k_norm(k)
    rope.py:              x1, x2 = x.chunk(2, dim=-1)
                          x * cos + torch.cat((-x2, x1), -1) * sin

    head (R,) → the first and the second half of each head, (R,HALF) ×2, in fp32 rounded to the
    model's dtype. Dimension i is rotated with i + D/2, so a thread holds both.
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
    turned = (head < H + Hk)[:, None]  # v stays as it is
    return tl.where(turned, z1, x1), tl.where(turned, z2, x2)


@triton.jit
def store_heads(at, first, second, mine, D: tl.constexpr, HALF: tl.constexpr):
    """Store both halves of the heads that are `mine` (R,) at the addresses `at` (R,)."""
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
    """R heads of one token per program; see halves_of_heads.

    model.py, Attention:  .view(B, T, -1, self.head_dim).transpose(1, 2)
    """
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * R + tl.arange(0, R)  # (R,): the heads of q, then of k, then of v
    first, second = halves_of_heads(
        qkv, n, head, q_norm, k_norm, eps, cos, sin, n % angles, H, Hk, D, HALF
    )
    b = n // T
    t = n % T
    own = head - H  # (R,): the number of the head within k
    store_heads(q + ((b * H + head) * T + t) * D, first, second, head < H, D, HALF)
    is_k = (own >= 0) & (own < Hk)
    store_heads(k + ((b * Hk + own) * T + t) * D, first, second, is_k, D, HALF)
    own -= Hk  # within v
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
    """qkv (B·T,(H+2Hk)·D) of a prefill → q (B,H,T,D) and k (B,Hk,T,D), normed and rotated, and v.

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
    # The kernel takes angle n % angles: T angles are shared by all rows, B·T are one per token.
    angles = cos.numel() // D
    split_heads_kernel[grid](
        qkv, q_norm, k_norm, eps, cos, sin, angles, q, k, v, T, H, Hk, D, HALF, R,
        num_warps=warps(R * HALF),
    )  # fmt: skip
    return q, k, v


@triton.jit
def place_of(places, layer, like, PLACE: tl.constexpr, ALIGNED: tl.constexpr):
    """The location of a layer's cache: row `layer` of places, addresses as pointers like `like`.

    Addresses and strides are declared to be multiples of ALIGNED numbers, so that the compiler can
    use wide loads.
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
    """R heads of one row per program; see halves_of_heads.

    cache/view.py, View.write:  keys[layer][page, :, slot] = k, and the same for the values
    """
    b = tl.program_id(0)
    head = tl.program_id(1) * R + tl.arange(0, R)  # (R,): the heads of q, then of k, then of v
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
        own = head - H  # (R,): the number of the head within k
        is_k = (own >= 0) & (own < Hk)
        store_heads(keys + at + own * head_stride, first, second, is_k, D, HALF)
        own -= Hk  # within v
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
    """qkv (B,(H+2Hk)·D) of one token per row → q (B,H,D), normed and rotated. For a decode step.

    k and v are written to the cache. cos and sin: (B,D), or any shape of B·D numbers. places (L,8)
    int64: the location of the cache, see `places`. lengths (L,B) int32 includes the new token; 0
    marks a row of padding, which writes only its q. Reads and writes B·(H+2Hk)·D numbers.
    """
    check(qkv, q_norm, k_norm, cos, sin, places, lengths)
    H, Hk, D = heads
    B = len(qkv)
    q = qkv.new_empty(B, H, D) if out is None else out
    HALF = triton.next_power_of_2(D // 2)
    R = 1  # a program has one head and one warp: with one row there are few programs
    split_heads_into_pages_kernel[B, H + 2 * Hk](
        qkv, q_norm, k_norm, eps, cos, sin, q, places, layer, lengths, B, H, Hk, D, HALF, R,
        PLACE, aligned(D, qkv.dtype), num_warps=1,
    )  # fmt: skip
    return q


# --- shared by the launchers ----------------------------------------------------------------------


def check(*tensors: Tensor | None) -> None:
    """ValueError unless the tensors are contiguous, which the kernels assume."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"a kernel needs contiguous tensors, not strides {tensor.stride()}")


def warps(numbers: int) -> int:
    """Number of warps for a program of `numbers` (a power of two): 16 bytes of bf16 per thread."""
    return min(max(numbers // (WARP * PER_THREAD), 1), 16)


def aligned(D: int, dtype: torch.dtype) -> int:
    """How many of the D numbers of a head one load may take: 16 bytes, less if D is no multiple."""
    widest = 16 // dtype.itemsize
    return min(widest, D & -D)  # the largest power of two that divides D


def places(pages: Sequence["Pages"], out: Tensor | None = None) -> Tensor:
    """The location of a cache for the kernels: Pages of L layers → (L,8) int64 on their device.

    A row holds the addresses of keys and values; the strides of page, head and token, in numbers;
    the tokens per page; the address and the row stride of the page table, or 0 and 0. A recorded
    step reads the rows at every replay, so `out` can be overwritten for another cache. The caller
    keeps the tensors alive.
    """
    rows = [place(layer) for layer in pages]
    host = torch.tensor(rows, dtype=torch.int64)  # (L,8)
    if out is None:
        return host.to(pages[0].keys.device)
    return out.copy_(host, non_blocking=True)


def place(pages: "Pages") -> list[int]:
    """A row of `places`. ValueError if the kernels could not read this layout."""
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
