"""Draws that depend on a seed and a position and on nothing else: alone, in any batch, in any order
the same token.

A generator has a state: what it gives depends on all it gave before. Here the noise of token i at a
position is a function of (seed, position, i), computed by Philox 4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"; the generator of CUDA's torch and of Triton). The
argmax of logits/temperature + Gumbel noise is a draw from their softmax (Gumbel 1954; Maddison et
al. 2014, arXiv 1411.0030): no sum over V, no sort, and one pass.

fast/gpu/draw.py does the same in a kernel, with the same random words.
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORDS = 4  # that one counter gives
MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four counter words and two of a key, int64 in 0 … 2³²−1 of shapes that broadcast → four
    random words.

    Every round multiplies two words, whose upper halves are mixed into the other two. A product of
    64 bits wraps around in int64, and its halves are right nonetheless.
    """
    a, b, c, d = counter
    k, m = key
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = ((right >> 32) & MASK) ^ b ^ k, right & MASK
        c, d = ((left >> 32) & MASK) ^ d ^ m, left & MASK
        k, m = (k + KEY_STEPS[0]) & MASK, (m + KEY_STEPS[1]) & MASK
    return a, b, c, d


def random_words(seeds: Tensor, positions: Tensor, V: int) -> Tensor:
    """seeds and positions (B,) int64 → (B,V) int64 in 0 … 2³²−1.

    Token i gets word i % 4 of the counter (i // 4, position, 0) under the key `seed`.
    """
    seeds, positions = seeds[:, None], positions[:, None]  # (B,1)
    key = seeds & MASK, (seeds >> 32) & MASK
    index = torch.arange(-(-V // WORDS), device=seeds.device)[None]  # (1,V/4)
    counter = index, positions & MASK, (positions >> 32) & MASK, torch.zeros_like(index)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), -1)  # (B,V/4,4)
    return words.flatten(1)[:, :V]


def gumbel(seeds: Tensor, positions: Tensor, V: int) -> Tensor:
    """seeds and positions (B,) int64 → (B,V) fp32, −log(−log(1 − u)) of V uniform numbers u in
    (0,1).
    """
    return -exponential(random_words(seeds, positions, V)).log()


def exponential(words: Tensor) -> Tensor:
    """Random words → −log(1 − u) in fp32, with u = (word + ½) / 2³².

    The smallest u make the highest noise, by which an unlikely token wins. 1 − u rounds them away,
    and a series does not; log1p is no function of Triton.
    """
    u = (words.to(torch.float32) + 0.5) * 2.0**-32
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u / 4)))
    # 1 − 2⁻²⁴ is the highest below 1 in fp32.
    return torch.where(u < 1 / 64, series, -(1 - u.clamp(max=1 - 2.0**-24)).log())


def draw_rows(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    filtered: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A token for each row of logits (B,V) → tokens (B,) int64, logprobs (B,) fp32, highest (B,)
    fp32.

    temperature (B,) fp32, 0 = the first of the highest; seeds and positions (B,) int64. Drawn is
    from `filtered` (B,V) where it is given: what a filter left, −inf for the rest, not yet divided
    by the temperature. The log-probability is under the raw logits. `highest`: of what is drawn
    from, over the temperature; no finite number = the row has no token, and `tokens` says nothing.
    """
    logits = logits.float()
    drawn_from = logits if filtered is None else filtered.float()
    greedy = (temperature == 0)[:, None]  # (B,1)
    scaled = drawn_from / torch.where(greedy, 1, temperature[:, None])  # (B,V)
    noise = gumbel(seeds, positions, logits.shape[1])  # (B,V)
    tokens = torch.where(greedy, scaled, scaled + noise).argmax(-1)  # (B,)
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]  # (B,)
    return tokens, logprobs, scaled.amax(-1)
