"""Attention with one more score per query in the softmax: a learned sink, whose value is 0.

    with_sinks(attend, sinks)(q, k, v)      sinks (H,): the score, one per query head

A head that needs no key can attend to its sink. Let lse be the log-sum-exp of a query's scores. In
the larger softmax the weights of its keys sum to exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse −
sink). So the output of plain attention is multiplied by this share: once per query, however many
parts `attend` computes it in. The cost is a second product of queries and keys. Sources: Agarwal
et al. 2025, arXiv 2508.10925 (gpt-oss); eager_attention_forward in modeling_gpt_oss.py.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv.attention import Attend
from nanokv.windows import within

SCORES = 1 << 24  # scores that are stored at a time, 64 MiB in fp32
ROWS = 256  # queries of a block


def with_sinks(attend: Attend, sinks: Tensor) -> Attend:
    """`attend` with the score sinks[h] beside the keys' of each query of head h."""
    if hasattr(attend, "with_sinks"):  # an attention of several parts
        return attend.with_sinks(sinks)
    if hasattr(attend, "visible"):
        return Sinks(attend, sinks)
    return SinkKey(attend, sinks)


class Sinks:
    """`attend`, times the share that the keys have of each query's softmax."""

    def __init__(self, attend: Any, sinks: Tensor):
        self.attend = attend
        self.sinks = sinks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        y = self.attend(q, k, v)  # (B,H,T,D)
        lse = log_sum_exp(self.attend, q, k)  # (B,H,T)
        share = torch.sigmoid(lse - self.sinks.float()[:, None])
        return (y * share[..., None]).to(y.dtype)

    def within(self, width: int) -> "Sinks":
        """The same sinks in a layer with a window of `width` positions."""
        return Sinks(within(self.attend, width), self.sinks)


class SinkKey:
    """A function that does not say what it sees gets the sinks as one more key, the oldest.

    Queries and keys get one more dimension: it is 0 in all other keys, and the sink in the queries.
    """

    def __init__(self, attend: Attend, sinks: Tensor):
        self.attend = attend
        self.sinks = sinks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        D = q.shape[-1]
        # Attention divides by sqrt(D+1) in place of sqrt(D).
        sink = (self.sinks * math.sqrt(D + 1)).to(q.dtype)[:, None, None]  # (H,1,1)
        sink = sink.expand(*q.shape[:-1], 1)  # (B,H,T,1)
        q = torch.cat((q * math.sqrt((D + 1) / D), sink), -1)  # (B,H,T,D+1)
        k = F.pad(k, (0, 1, 1, 0))  # (B,Hk,1+S,D+1)
        v = F.pad(v, (0, 1, 1, 0))  # (B,Hk,1+S,D+1)
        k[:, :, 0, D] = 1
        return self.attend(q, k, v)[..., :D]


def log_sum_exp(attend: Any, q: Tensor, k: Tensor) -> Tensor:
    """Of the scores of the keys that each query sees in `attend`; −∞ if it sees none.

    q (B,H,T,D), k (B,Hk,S,D) → (B,H,T) fp32. At most SCORES scores are stored at a time, and a mask
    of ROWS rows.
    """
    T, S = q.shape[2], k.shape[2]
    parts = []
    for a in range(0, T, ROWS):
        b = min(a + ROWS, T)
        first, end = attend.span((a, b), T, S) if hasattr(attend, "span") else (0, S)
        mask = attend.visible((a, b), T, S - first, q.device)  # (…,t or 1,S−first)
        if mask is not None:
            mask = mask[..., : end - first]  # (…,t or 1,s)
        parts.append(by_keys(q[:, :, a:b], k[:, :, first:end], mask))  # (B,H,t)
    return torch.cat(parts, 2)


def by_keys(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """`log_sum_exp` of one block of rows, some keys at a time. q (B,H,t,D) → (B,H,t)."""
    B, H, t, D = q.shape
    Hk = k.shape[1]
    rows = q.reshape(B, Hk, -1, D).float() * D**-0.5  # (B,Hk,G·t,D)
    lse = rows.new_full((B, H, t), -torch.inf)
    n = max(1, SCORES // (B * H * t))
    for i, keys in enumerate(k.split(n, 2)):
        scores = rows @ keys.float().transpose(2, 3)  # (B,Hk,G·t,n)
        scores = scores.view(B, H, t, -1)  # (B,H,t,n)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., i * n : (i + 1) * n], -torch.inf)
        lse = torch.logaddexp(lse, scores.logsumexp(-1))
    return lse
