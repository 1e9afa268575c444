"""Attention of a decode step over pages, in Triton. Keys and values are read once, in place.

One query row cannot keep a GPU busy: with a program per row and KV head there would be 8 programs
for 132 processors. Therefore the tokens of a row are split into parts with a program each, and a
second kernel merges the partial results by their log-sum-exp (Dao et al. 2023, "Flash-Decoding for
long-context inference"; paging: Kwon et al. 2023, arXiv 2309.06180).
"""

import torch
import triton  # type: ignore[import-untyped]  # Triton has no type hints
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from nanokv.fast.gpu.kernels import PLACE, aligned, check, place_of

TILE_ROWS = 16  # query rows of a matrix instruction; the G rows of a KV head are padded to this
TILE_BYTES = 16_384  # of keys, and of values: 64 tokens of 128 bf16 numbers
WARPS = 8  # the fp32 tiles do not fit into the registers of 4 warps
# Pipeline stages. A page is looked up two blocks before its tile is copied, and the tile is copied
# two blocks before it is used. So a program has 2 × 2 × 16 kB of loads in flight, and two programs
# fit on a processor. By Little's law 4 TB/s at 0.7 µs need 3 MB in flight, 21 kB for each of 132
# processors.
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

    softmax(q kᵀ) v without the scores in memory: the kernel keeps the highest score so far and the
    sum of exp(score − highest), and scales the earlier sums down when a higher score comes (Milakov
    & Gimelshein 2018, arXiv 1805.02867). `scale` is log2(e) / sqrt(D), because a GPU computes 2ˣ,
    not eˣ. With one split y is the result and `sums` is None.
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
    listed = tl.where(table != 0, end, 0)  # tokens below this have a page in the table
    table = table.to(tl.pointer_type(tl.int32)) + b * table_stride

    g = tl.arange(0, ROWS)  # padded
    d = tl.arange(0, WIDTH)  # padded
    mine = (g < G)[:, None] & (d < D)[None, :]  # (ROWS,WIDTH)
    row = (b * Hk + h) * G + g  # (ROWS,): rows of q, which has B·H
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
    # In a part without tokens, or a padded row, y is 0 / 1 and the log-sum-exp is −inf.
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
    """Merge the parts of one query row per program, each weighted by its share of the whole sum.

    parts (B·H,SPLITS,D); sums (B·H,SPLITS) holds log2 Σ 2^score. parallel/merge.py does the same
    between processes.
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
    """q (B,H,D) over the cache of one layer → (B,H,D). Row b sees lengths[layer,b] tokens.

    A row that sees no token gets 0. places (L,8) and lengths (L,B): see kernels.places and
    split_heads_into_pages. splits: the number of parts of a row's tokens (see `splits_for`), fixed
    at the launch; the device computes where each part ends. Reads 2·S·Hk·D numbers per row, and
    with splits > 1 writes and reads B·H·splits·(D+1) fp32 numbers.
    """
    check(q, places, lengths)
    B, H, D = q.shape
    if out is None:
        out = torch.empty_like(q)
    WIDTH = triton.next_power_of_2(D)
    G = H // kv_heads
    # At least the rows of a matrix instruction.
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
    """The number of splits: a power of two that gives each processor about two programs.

    It is 1 if there are enough rows and heads without a split.
    """
    wanted = 2 * processors // (rows * kv_heads)
    return min(MOST_SPLITS, 1 << max(wanted, 1).bit_length() - 1)
