"""Draws a token for every row of a recorded step, in Triton, without waiting for the host.

The plain form is `draw_rows` in decoding/counter.py. Both take the same random words for a seed,
position and token, so they draw the same token unless rounding in a logarithm decides. A row of
151,936 logits is cut into chunks with a program each, and a second kernel takes the best chunk.
Reads B·V·n bytes for n bytes per logit, twice as many with `filtered`.
"""

import torch
import triton  # type: ignore[import-untyped]  # Triton has no type hints
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from nanokv.fast.gpu.kernels import check

CHUNK = 2048  # logits per program: 75 programs for a row of Qwen3
WORDS = 4  # random words per counter
WARPS = 4


@triton.jit
def gumbel_of(seed, position, counter):
    """counter (N,) int32 → Gumbel noise (4N,) of the tokens 4·counter … 4·counter + 3.

    See counter.gumbel.
    """
    zero = tl.zeros_like(counter)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = zero + (position >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, counter, low, high, zero)  # (N,) ×4
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # (4N,): a b c d a b c d …
    u = (words.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    series = u * (1 + u * (0.5 + u * (1.0 / 3 + u / 4)))
    u = tl.minimum(u, 1 - 1.0 / 16777216.0)
    return -tl.log(tl.where(u < 1.0 / 64, series, -tl.log(1 - u)))


@triton.jit
def draw_chunk_kernel(
    logits, filtered, temperature, seeds, positions, best, which, raw, tops, sums, highest, V,
    CHUNK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One chunk of a row per program.

    counter.py, draw_rows:  torch.where(greedy, scaled, scaled + noise).argmax(-1)
                            logits.log_softmax(-1)

    Writes for each chunk: the best score with its token and raw logit; the highest raw logit and
    Σ exp(logit − highest); and the highest scaled logit, NaN if any scaled logit is NaN.
    """
    b = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)  # (CHUNK,)
    inside = token < V
    none = float("-inf")
    logit = tl.load(logits + b * V + token, inside, none).to(tl.float32)  # (CHUNK,)
    scaled = logit
    if filtered is not None:
        scaled = tl.load(filtered + b * V + token, inside, none).to(tl.float32)
    t = tl.load(temperature + b)
    scaled /= tl.where(t == 0, 1, t)
    score = scaled
    if t != 0:
        counter = chunk * (CHUNK // WORDS) + tl.arange(0, CHUNK // WORDS)
        score += gumbel_of(tl.load(seeds + b), tl.load(positions + b), counter)
    winner = tl.argmax(score, 0)  # the first of equal scores
    at = b * tl.num_programs(1) + chunk
    is_winner = tl.arange(0, CHUNK) == winner
    tl.store(best + at, tl.max(score, 0))
    tl.store(which + at, tl.minimum(chunk * CHUNK + winner, V - 1))
    tl.store(raw + at, tl.sum(tl.where(is_winner, logit, 0), 0))
    top = tl.max(logit, 0)
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp(logit - tl.where(top > none, top, 0)), 0))
    broken = tl.sum((scaled != scaled).to(tl.int32), 0) > 0  # tl.max ignores NaN
    tl.store(highest + at, tl.where(broken, float("nan"), tl.max(scaled, 0)))


@triton.jit
def draw_merge_kernel(
    best, which, raw, tops, sums, highest, tokens, logprobs, highests, chunks, PADDED: tl.constexpr
):
    """Take the best chunk of a row, one row per program; merge the sums as in attention.py."""
    b = tl.program_id(0)
    c = tl.arange(0, PADDED)
    inside = c < chunks
    at = b * chunks + c
    none = float("-inf")
    winner = tl.argmax(tl.load(best + at, inside, none), 0)  # the first of equal scores
    winner = tl.minimum(winner, chunks - 1) + b * chunks
    tops = tl.load(tops + at, inside, none)  # (PADDED,)
    top = tl.max(tops, 0)
    top = tl.where(top > none, top, 0)
    total = tl.sum(tl.load(sums + at, inside, 0) * tl.exp(tops - top), 0)
    high = tl.load(highest + at, inside, none)
    broken = tl.sum((high != high).to(tl.int32), 0) > 0
    tl.store(tokens + b, tl.load(which + winner).to(tl.int64))
    tl.store(logprobs + b, tl.load(raw + winner) - top - tl.log(total))
    tl.store(highests + b, tl.where(broken, float("nan"), tl.max(high, 0)))


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filtered: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """counter.draw_rows in two launches.

    logits (B,V), temperature (B,) fp32, seeds and positions (B,) int64, filtered (B,V) → tokens
    (B,) int64, logprobs (B,) and highest (B,) fp32. `out`: memory for the three results.
    """
    check(logits, temperature, seeds, positions, filtered)
    B, V = logits.shape
    chunks = triton.cdiv(V, CHUNK)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return logits.new_empty(shape, dtype=dtype)

    tokens, logprobs, highests = out or (new(B, dtype=torch.int64), new(B), new(B))
    best, raw, tops, sums, highest = (new(B, chunks) for _ in range(5))
    which = new(B, chunks, dtype=torch.int32)
    parts = best, which, raw, tops, sums, highest
    draw_chunk_kernel[B, chunks](
        logits, filtered, temperature, seeds, positions, *parts, V, CHUNK, WORDS, num_warps=WARPS
    )
    padded = triton.next_power_of_2(chunks)
    draw_merge_kernel[(B,)](*parts, tokens, logprobs, highests, chunks, padded, num_warps=1)
    return tokens, logprobs, highests
