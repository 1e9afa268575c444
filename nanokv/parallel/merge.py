"""Attention over parts of the keys, and the exact merge of the results by their log-sum-exps.

The parts may be on several ranks (context.py), or be computed in parallel for one query (`Split`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanokv.attention import Masked, Rows, last_keys, row_blocks
from nanokv.errors import CacheError
from nanokv.windows import within


class Split:
    """`Masked` with the keys in n parts: attention over each part, then a merge.

    GPUs need this for decode (split-K; Flash-Decoding, Dao et al. 2023), because one query over a
    long cache is too little work for many cores, and the parts can be computed in parallel. Here
    they are computed one after another. With the parts on several machines it is context
    parallelism (nanokv/parallel/context.py). mask: bool (T,S) or (B,1,T,S); None = every key.
    """

    def __init__(self, mask: Tensor | None, n: int):
        if type(n) is not int or n < 1:
            raise CacheError(f"n is {n!r}: keys are split into a whole number ≥ 1 of parts")
        self.mask = mask
        self.n = n

    def within(self, width: int) -> Callable[..., Tensor]:
        """The keys of a window, in one part."""
        return within(Masked(self.mask), width)

    def visible(self, rows: Rows, T: int, S: int, device: torch.device) -> Tensor | None:
        """What these of T queries see of the last S keys, bool (…,rows or 1,S); None: all."""
        return last_keys(self.mask, rows, S, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        if self.mask is not None and self.mask.shape[-1] != k.shape[2]:
            raise CacheError(
                f"attention got {k.shape[2]} keys, but the mask has {self.mask.shape[-1]} columns"
            )
        # All parts are views; some may be empty.
        keys = k.tensor_split(self.n, 2)  # (B,Hk,S_p,D) each
        values = v.tensor_split(self.n, 2)  # (B,Hk,S_p,D) each
        masks: Sequence[Tensor | None] = [None] * self.n
        if self.mask is not None:
            masks = self.mask.tensor_split(self.n, -1)  # (…,T,S_p) each
        parts = [partial_attention(q, *part) for part in zip(keys, values, masks, strict=True)]
        outputs, lse = map(torch.stack, zip(*parts, strict=True))  # (n,B,H,T,D), (n,B,H,T)
        return self.merged(outputs, lse).to(q.dtype)

    def merged(self, outputs: Tensor, lse: Tensor) -> Tensor:
        """`merge`, for a subclass with another one."""
        return merge(outputs, lse)


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, and the log-sum-exp of their scores, for `merge`.

    q (B,H,T,D), k and v (B,Hk,S,D), S ≥ 0, mask bool (T,S) or (B,1,T,S) → outputs (B,H,T,D), lse
    (B,H,T), both fp32. A query that sees none of these keys has lse −∞ and output 0. SDPA returns
    no lse, so the scores are stored: 4·B·H·T·S bytes, on a CPU for one block of rows at a time
    (row_blocks: 256 rows over 8,192 keys of Qwen3-0.6B, 134 MB). Keys and values in half
    precision are copied to fp32.
    """
    blocks = row_blocks(q, max(1, k.shape[2]))
    if len(blocks) > 1:
        return _by_blocks(q, k, v, mask, blocks)
    B, H, T, D = q.shape
    Hk, S = k.shape[1:3]
    # One product for the G heads of a group, which share their keys.
    grouped = q.reshape(B, Hk, -1, D).float()  # (B,Hk,G·T,D)
    scores = grouped @ k.float().transpose(2, 3) * D**-0.5  # (B,Hk,G·T,S)
    scores = scores.view(B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)  # (B,H,T)
    # The softmax, or 0 if the query sees no key.
    weights = (scores - finite(lse)[..., None]).exp()  # (B,H,T,S)
    outputs = weights.view(B, Hk, H // Hk * T, S) @ v.float()  # (B,Hk,G·T,D)
    return outputs.view(B, H, T, D), lse


def _by_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, blocks: Sequence[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    """`partial_attention`, for one block of query rows at a time."""
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], q.shape[2], -1)  # (…,T,S): one row may serve all
    outputs = []
    lses = []
    for a, b in blocks:
        own = None if mask is None else mask[..., a:b, :]
        output, lse = partial_attention(q[:, :, a:b], k, v, own)
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def merge(outputs: Tensor, lse: Tensor) -> Tensor:
    """Attention over P disjoint sets of keys → exact attention over all of them, in any order.

    outputs (P,B,H,T,D), lse (P,B,H,T) → (B,H,T,D). In a softmax over all keys the weights of part
    p sum to exp(lse_p) / Σ exp(lse). Each output is normalised within its part, so it is
    multiplied by this share (Milakov & Gimelshein 2018, arXiv 1805.02867). A part in which a
    query sees no key, lse −∞, is ignored, whatever its output. A query that sees no key in any
    part gets 0, as in SDPA.
    """
    shares = (lse - finite(lse.logsumexp(0))).exp()[..., None]  # (P,B,H,T,1): they sum to 1
    # Outputs without a share may be NaN, and 0 times NaN would be NaN.
    return (shares * outputs.masked_fill(shares == 0, 0)).sum(0)  # (B,H,T,D)


def finite(lse: Tensor) -> Tensor:
    """lse with −∞ replaced by 0, because −∞ − (−∞) is NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
