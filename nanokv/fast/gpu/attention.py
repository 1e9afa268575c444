"""Attention of a decode step over pages, in Triton: keys and values are read once, where they lie,
in parts.

One query row alone cannot keep a GPU busy: a program per row and KV head would be 8 programs for
132 processors. So the tokens of a row are split, each part has a program, and a second kernel
merges the partial results by the logarithms of their sums (Dao et al. 2023, "Flash-Decoding for
long-context inference"; paging: Kwon et al. 2023, arXiv 2309.06180).
"""

import torch
import triton  # type: ignore[import-untyped]  # Triton has no type hints
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from nanokv.fast.gpu.kernels import PLACE, aligned, check, place_of

TILE_ROWS = 16  # query rows of a matrix instruction; the G rows of a KV head are padded to them
TILE_BYTES = 16_384  # of keys, and of values: 64 tokens of 128 numbers of bf16
WARPS = 8  # with 4 the tiles of fp32 do not fit into their registers
# A page is looked up two blocks before its tile is copied, and that two blocks before it is used: 2
# × 2 × 16 kB are on their way per program, and two programs fit on a processor. By Little's law 4
# TB/s at 0.7 µs are 3 MB on the way, 21 kB for each of 132 processors.
STAGES = 5
PROCESSORS = 132  # of an H100 or H200
MOST_SPLITS = 64
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["layer", "B"])
def paged_attention_kernel(
    q, places, layer, lengths, y, sums, B, scale,
    Hk: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PLACE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The G query heads of one KV head over one part of a row's tokens, BLOCK at a time.

    attention.py, decode_attention:  F.scaled_dot_product_attention(q, k, v)  # q (B,Hk,G,D)

    softmax(q kᵀ) v without the scores in memory: the highest score so far and the sum of exp(score
    − highest) are kept, and what was added before is scaled down when a higher one comes (Milakov &
    Gimelshein 2018, arXiv 1805.02867). `scale` holds 1/sqrt(D) and log2(e): a GPU has 2ˣ, not eˣ.
    With one split y is the result and `sums` is None.
    """
    b = tl.program_id(0)
    h = tl.program_id(1)
    split = tl.program_id(2)
    keys, values, page_stride, head_stride, token_stride, size, table, table_stride = place_of(
        places, layer, q, PLACE, ALIGNED
    )
    length = tl.load(lengths + layer * B + b)
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK  # whole blocks
    start = split * part
    end = tl.minimum(start + part, length)
    listed = tl.where(table != 0, end, 0)  # tokens whose page is in a table
    table = table.to(tl.pointer_type(tl.int32)) + b * table_stride

    g = tl.arange(0, ROWS)  # padded
    d = tl.arange(0, WIDTH)  # padded
    mine = (g < G)[:, None] & (d < D)[None, :]  # (ROWS,WIDTH)
    row = (b * Hk + h) * G + g  # (ROWS,), of the B·H rows of q
    q_tile = tl.load(q + row[:, None] * D + d[None, :], mine, 0)  # (ROWS,WIDTH)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS, WIDTH), tl.float32)  # Σ exp(score − highest) · v
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)  # (BLOCK,)
        seen = token < end
        page = tl.load(table + token // size, token < listed, b).to(tl.int64)  # (BLOCK,)
        at = page * page_stride + h * head_stride + (token % size) * token_stride
        here = seen[:, None] & (d < D)[None, :]  # (BLOCK,WIDTH)
        k = tl.load(keys + at[:, None] + d[None, :], here, 0)  # (BLOCK,WIDTH)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee") * scale  # (ROWS,BLOCK)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)  # (ROWS,)
        p = tl.exp2(scores - higher[:, None])  # (ROWS,BLOCK)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + at[:, None] + d[None, :], here, 0)  # (BLOCK,WIDTH)
        weighted *= shrink[:, None]
        weighted = tl.dot(p.to(v.dtype), v, weighted, input_precision="ieee")
        highest = higher
    # A part without tokens, and a padded row: 0 / 1, and a logarithm of −inf.
    total = tl.where(total > 0, total, 1)
    weighted /= total[:, None]
    if sums is None:
        tl.store(y + row[:, None] * D + d[None, :], weighted.to(y.dtype.element_ty), mine)
    else:
        out = row * SPLITS + split  # (ROWS,)
        tl.store(y + out[:, None] * D + d[None, :], weighted, mine)
        tl.store(sums + out, highest + tl.log2(total), g < G)


@triton.jit
def merge_kernel(
    parts, sums, y, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr
):
    """One query row per program: its parts, each weighted by its share of the whole sum.

    parallel/merge.py does the same between processes. parts (B·H,SPLITS,D) and sums (B·H,SPLITS),
    log2 of Σ 2^score.
    """
    row = tl.program_id(0)
    s = tl.arange(0, PADDED)
    d = tl.arange(0, WIDTH)
    sums = tl.load(sums + row * SPLITS + s, s < SPLITS, float("-inf"))  # (PADDED,)
    highest = tl.max(sums, 0)
    share = tl.exp2(sums - tl.where(highest > float("-inf"), highest, 0))  # (PADDED,)
    share /= tl.maximum(tl.sum(share, 0), 1e-30)  # a padded row: 0
    here = (s < SPLITS)[:, None] & (d < D)[None, :]
    at = parts + (row * SPLITS + s[:, None]) * D + d[None, :]
    merged = tl.sum(tl.load(at, here, 0) * share[:, None], 0)  # (WIDTH,)
    tl.store(y + row * D + d, merged.to(y.dtype.element_ty), d < D)


def paged_attention(
    q: Tensor,
    places: Tensor,
    layer: int,
    lengths: Tensor,
    splits: int,
    kv_heads: int,
    out: Tensor | None = None,
) -> Tensor:
    """q (B,H,D) over the cache of one layer → (B,H,D). Row b sees lengths[layer,b] tokens; one that
    sees none gets 0.

    places (L,8) and lengths (L,B): see kernels.places and split_heads_into_pages. splits: parts of
    a row's tokens, a number of the launch (see `splits_for`); where each ends is found on the
    device. Reads 2·S·Hk·D numbers per row, and with splits > 1 writes and reads B·H·splits·(D+1) of
    fp32.
    """
    check(q, places, lengths)
    B, H, D = q.shape
    if out is None:
        out = torch.empty_like(q)
    WIDTH = triton.next_power_of_2(D)
    G = H // kv_heads
    # A tile of WIDTH numbers needs as many rows as a matrix instruction.
    BLOCK = max(16, min(64, TILE_BYTES // (WIDTH * q.element_size())))
    ROWS = max(TILE_ROWS, triton.next_power_of_2(G))
    parts = out
    sums = None
    if splits > 1:
        parts = q.new_empty(B, H, splits, D, dtype=torch.float32)
        sums = q.new_empty(B, H, splits, dtype=torch.float32)
    paged_attention_kernel[B, kv_heads, splits](
        q, places, layer, lengths, parts, sums, B, D**-0.5 * LOG2_E,
        kv_heads, G, D, WIDTH, ROWS, BLOCK, splits, PLACE, aligned(D, q.dtype),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        merge_kernel[(B * H,)](parts, sums, out, D, WIDTH, splits, padded, num_warps=4)
    return out


def splits_for(rows: int, kv_heads: int, processors: int = PROCESSORS) -> int:
    """A power of two that gives each processor about two programs, and 1 where rows and heads do so
    alone.
    """
    wanted = 2 * processors // (rows * kv_heads)
    return min(MOST_SPLITS, 1 << max(wanted, 1).bit_length() - 1)
