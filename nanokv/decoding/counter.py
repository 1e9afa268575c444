"""Random draws that depend only on a seed and a position, not on the batch or on earlier draws.

A generator has a state, so its numbers depend on all numbers before. Here the noise of token i at a
position is a function of (seed, position, i), computed by Philox 4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"; the generator of CUDA's torch and of Triton). The
argmax of logits/temperature + Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et
al. 2014, arXiv 1411.0030). It takes one pass, without a sum over V and without a sort.

fast/gpu/draw.py computes the same in a kernel, from the same random words.
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORDS = 4  # random words per counter
MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four counter words and two key words → four random words.

    All are int64 in 0 … 2³²−1, of shapes that broadcast. Every round multiplies two words and mixes
    the upper halves into the other two. A 64-bit product may overflow int64; both halves are still
    right.
    """
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        left = a * MULTIPLIERS[0]
        right = c * MULTIPLIERS[1]
        a = ((right >> 32) & MASK) ^ b ^ k
        b = right & MASK
        c = ((left >> 32) & MASK) ^ d ^ m
        d = left & MASK
        k = (k + KEY_STEPS[0]) & MASK
        m = (m + KEY_STEPS[1]) & MASK
    return a, b, c, d


def random_words(seeds: Tensor, positions: Tensor, V: int) -> Tensor:
    """seeds and positions (B,) int64 → (B,V) int64 in 0 … 2³²−1.

    Token i gets word i % 4 of the counter (i // 4, position, 0) with the key `seed`.
    """
    seeds = seeds[:, None]  # (B,1)
    positions = positions[:, None]  # (B,1)
    key = seeds & MASK, (seeds >> 32) & MASK
    index = torch.arange(-(-V // WORDS), device=seeds.device)[None]  # (1,V/4)
    counter = index, positions & MASK, (positions >> 32) & MASK, torch.zeros_like(index)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), -1)  # (B,V/4,4)
    return words.flatten(1)[:, :V]


def gumbel(seeds: Tensor, positions: Tensor, V: int) -> Tensor:
    """seeds and positions (B,) int64 → (B,V) fp32: −log(−log(1 − u)) of uniform u in (0,1)."""
    return -exponential(random_words(seeds, positions, V)).log()


def exponential(words: Tensor) -> Tensor:
    """Random words → −log(1 − u) in fp32, with u = (word + ½) / 2³².

    The smallest u give the highest noise, which lets an unlikely token win. They would be lost in
    1 − u, so a series replaces it for small u (Triton has no log1p).
    """
    u = (words.to(torch.float32) + 0.5) * 2.0**-32
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4)))
    # 1 − 2⁻²⁴ is the largest fp32 number below 1.
    return torch.where(u < 1 / 64, series, -(1 - u.clamp(max=1 - 2.0**-24)).log())


def draw_rows(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filtered: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw from each row of logits (B,V) → tokens (B,) int64, logprobs and highest (B,) fp32.

    temperature (B,) fp32, where 0 takes the first of the highest logits; seeds and positions (B,)
    int64. `filtered` (B,V), if given, is drawn from instead: −inf for tokens that a filter removed,
    not divided by the temperature. Log-probabilities are those of the raw logits. `highest` is the
    highest logit drawn from, divided by the temperature; if it is not finite, the token of that
    row is meaningless.
    """
    logits = logits.float()
    drawn_from = logits
    if filtered is not None:
        drawn_from = filtered.float()
    greedy = (temperature == 0)[:, None]  # (B,1)
    scaled = drawn_from / torch.where(greedy, 1, temperature[:, None])  # (B,V)
    noise = gumbel(seeds, positions, logits.shape[1])  # (B,V)
    tokens = torch.where(greedy, scaled, scaled + noise).argmax(-1)  # (B,)
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]  # (B,)
    return tokens, logprobs, scaled.amax(-1)
