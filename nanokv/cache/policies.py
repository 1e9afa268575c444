"""Which entries of a cache stay when it is over its budget, or which ones a query reads: one small
class per paper.

    Window             the first tokens and the newest (Xiao et al. 2023, arXiv 2309.17453)
    HeavyHitters       most attention so far, H2O (Zhang et al. 2023, arXiv 2306.14048)
    SnapKV             most attention by the newest queries (Li et al. 2024, arXiv 2404.14469)
    KeyNorms           short keys (Devoto et al. 2024, arXiv 2406.11430)
    AttentionMatching  fits what stays to what was (Zweiger et al. 2026, arXiv 2602.16284)
    Quest              all stay, each query reads some pages (Tang et al. 2024, arXiv 2406.10774)

An entry is a token's key and value in one KV head. Scores are per KV head, so the heads of a layer
keep different tokens. The query heads that share a KV head are averaged.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv.attention import Causal, Decode, Masked, is_causal
from nanokv.cache.options import newest

QUERIES = 256  # whose attention weights are in memory at a time


class Held(NamedTuple):
    """What one layer holds, oldest first; replaced as a whole, never written in place."""

    keys: Tensor  # (B,Hk,n,D), rotated by their true positions
    values: Tensor  # (B,Hk,n,D)
    positions: Tensor  # (B,Hk,n) int32
    notes: tuple[Tensor, ...] = ()  # the policy's own

    @property
    def entries(self) -> int:
        """Entries per KV head."""
        return self.keys.shape[2]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Held":
        """All tensors, changed."""
        keys, values, positions, notes = self
        return Held(change(keys), change(values), change(positions), tuple(map(change, notes)))

    def taken(self, index: Tensor) -> "Held":
        """The entries index (B,Hk,m); for notes of one number per entry."""
        wide = index[..., None].expand(*index.shape, self.keys.shape[3])  # (B,Hk,m,D)
        return Held(
            self.keys.gather(2, wide),
            self.values.gather(2, wide),
            self.positions.gather(2, index),
            tuple(note.gather(2, index) for note in self.notes),
        )


class Policy:
    """Keeps the entries with the highest scores; the first `sinks` tokens and the newest `recent`
    entries always stay."""

    name = ""  # as in policy=…
    numbers = 0  # fp32 numbers per entry that it notes
    watches = False  # needs the queries of every append
    attends = False  # computes attention itself

    def __init__(self, budget: int, sinks: int = 0, recent: int = 0):
        self.budget = budget  # entries per KV head
        self.sinks = sinks
        self.recent = recent

    def noted(self, held: Held, T: int) -> tuple[Tensor, ...]:
        """The notes of `held`, which got T more entries."""
        B, Hk, n, _ = held.keys.shape
        notes = (
            held.notes or (held.keys.new_zeros(B, Hk, n - T, dtype=torch.float32),) * self.numbers
        )
        return tuple(F.pad(note, (0, T)) for note in notes)  # (B,Hk,n) each

    def scores(self, held: Held) -> Tensor:
        """(B,Hk,n): the highest stay."""
        raise NotImplementedError

    def watched(self, held: Held, q: Tensor, mask: Tensor | None) -> Held:
        """`held` after the queries (B,H,T,D), the last T entries, have attended to it."""
        return held

    def reduced(self, held: Held, q: Tensor | None = None) -> Held:
        """`held` within the budget. `q`: the newest queries, if the policy watches."""
        if held.entries <= self.budget:
            return held
        return held.taken(self.chosen(held))

    def chosen(self, held: Held) -> Tensor:
        """(B,Hk,budget) int64, ascending: the entries that stay."""
        scores = self.scores(held).masked_fill(held.positions < self.sinks, torch.inf)
        scores[:, :, held.entries - self.recent :] = torch.inf
        return scores.topk(self.budget, dim=2).indices.sort(dim=2).values

    def first(self, held: Held, n: int) -> Held:
        """The first n entries of a cache that has evicted nothing."""
        return held.each(lambda x: x[:, :, :n].clone())

    def attend(self, held: Held, q: Tensor, mask: Tensor | None) -> Tensor:
        """q (B,H,T,D), mask (T,n) → (B,H,T,D)."""
        return attention_of(mask, q.shape[2])(q, held.keys, held.values)


class Window(Policy):
    """The newest entries."""

    name = "window"

    def scores(self, held: Held) -> Tensor:
        return held.positions.double()


class KeyNorms(Policy):
    """The shortest keys, which were seen to get more attention. Needs no queries."""

    name = "norms"

    def scores(self, held: Held) -> Tensor:
        return -torch.linalg.vector_norm(held.keys, dim=3, dtype=exact(held.keys))


class HeavyHitters(Policy):
    """The entries with the largest sum of attention weights over all queries so far."""

    name = "h2o"
    numbers = 1
    watches = True

    def scores(self, held: Held) -> Tensor:
        return held.notes[0]

    def watched(self, held: Held, q: Tensor, mask: Tensor | None) -> Held:
        (total,) = held.notes
        for start in range(0, q.shape[2], QUERIES):
            rows = slice(start, start + QUERIES)
            seen = weights(q[:, :, rows], held, None if mask is None else mask[rows])
            total = total + seen.mean(2).sum(2)  # (B,Hk,n)
        return held._replace(notes=(total,))


class SnapKV(Policy):
    """The entries, and their neighbours, with the most attention by the newest `recent` queries.

    An append of at least `recent` tokens is scored as in the paper, which evicts once, after the
    prompt. In shorter ones the weights of T queries replace T/recent of the old score, so that no
    queries are stored.
    """

    name = "snapkv"
    numbers = 1
    watches = True
    pooled = 5  # entries: a score is their mean

    def scores(self, held: Held) -> Tensor:
        old = held.notes[0][:, :, : held.entries - self.recent]  # (B,Hk,n−recent)
        old = F.avg_pool1d(old, self.pooled, stride=1, padding=self.pooled // 2)
        return F.pad(old, (0, self.recent))

    def watched(self, held: Held, q: Tensor, mask: Tensor | None) -> Held:
        window = max(1, self.recent)
        q = q[:, :, -window:]
        t = q.shape[2]
        seen = weights(q, held, None if mask is None else mask[-t:]).mean(2)  # (B,Hk,t,n)
        score = held.notes[0] * (1 - t / window) + seen.sum(2) / window  # (B,Hk,n)
        return held._replace(notes=(score, *held.notes[1:]))


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Window, HeavyHitters, SnapKV, KeyNorms)
}


def make_policy(policy: str, budget: int, sinks: int, recent: int | None) -> Policy:
    """The policy of these options, which options.py has checked."""
    if policy == "window":
        return Window(budget, sinks)
    return POLICIES[policy](budget, sinks, newest(budget) if recent is None else recent)


def attention_of(mask: Tensor | None, T: int) -> Decode | Causal | Masked:
    """The plain attention of T queries under this mask."""
    if T == 1:
        return Decode(mask)
    if mask is not None and is_causal(mask):
        return Causal(mask.shape[1])
    return Masked(mask)


def exact(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def weights(q: Tensor, held: Held, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Attention weights of q (B,H,t,D), mask (t,n), bias (B,Hk,n) → (B,Hk,G,t,n)."""
    return logits(q, held, mask, bias).softmax(-1)


def logits(q: Tensor, held: Held, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """q kᵀ / sqrt(D) of q (B,H,t,D), plus the bias (B,Hk,n) → (B,Hk,G,t,n)."""
    B, _, t, D = q.shape
    q = q.to(exact(q)).reshape(B, held.keys.shape[1], -1, t, D) * D**-0.5  # (B,Hk,G,t,D)
    keys = held.keys[:, :, None].to(q.dtype)  # (B,Hk,1,n,D)
    scores = q @ keys.transpose(3, 4)  # (B,Hk,G,t,n)
    if bias is not None:
        scores = scores + bias[:, :, None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask.to(scores.device), -torch.inf)
    return scores
