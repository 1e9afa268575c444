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
    evicts = True
    newest_only = False  # the entries that stay are always the last ones

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

    @property
    def newest_only(self) -> bool:  # type: ignore[override]  # read-only
        return self.sinks == 0

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
        seen = weights(q, held, None if mask is None else mask[-t:], self.bias(held))
        seen = seen.mean(2)  # (B,Hk,t,n)
        score = held.notes[0] * (1 - t / window) + seen.sum(2) / window  # (B,Hk,n)
        return held._replace(notes=(score, *held.notes[1:]))

    def bias(self, held: Held) -> Tensor | None:
        """(B,Hk,n): what attention adds to the scores of each entry; None: nothing."""
        return None


class AttentionMatching(SnapKV):
    """The entries with the most attention by the newest queries; then biases and values are fitted,
    so that attention over what stays gives nearly what it gave over all entries.

    The reference queries are the newest of the append. An entry that stays counts as exp(bias)
    entries, so that the sum of exp(scores) is as before; values follow by least squares, near the
    old ones. The newest `recent` entries are not changed.
    """

    name = "matching"
    numbers = 2  # the score of SnapKV, the bias
    attends = True
    queries = 64  # tokens
    rounds = 20
    ridge = 1e-2  # of the mean square of a query's weights

    def scores(self, held: Held) -> Tensor:
        return held.notes[0]

    def bias(self, held: Held) -> Tensor:
        return held.notes[1]

    def attend(self, held: Held, q: Tensor, mask: Tensor | None) -> Tensor:
        bias = self.bias(held)[:, :, None].to(q.dtype)  # (B,Hk,1,n)
        if mask is not None:
            bias = bias.masked_fill(~mask.to(q.device), -torch.inf)  # (B,Hk,T,n)
        bias = bias.repeat_interleave(q.shape[1] // bias.shape[1], 1)  # (B,H,T or 1,n)
        return Masked(bias)(q, held.keys, held.values)

    def reduced(self, held: Held, q: Tensor | None = None) -> Held:
        if held.entries <= self.budget or q is None:
            return held
        return self.fitted(held, self.chosen(held), q[:, :, -self.queries :])

    def fitted(self, held: Held, index: Tensor, q: Tensor) -> Held:
        """The entries index (B,Hk,m), with biases and values for the queries (B,H,t,D)."""
        stays = held.taken(index)
        old = (index < held.entries - self.recent)[:, :, None]  # (B,Hk,1,m)
        whole = weights(q, held, None, self.bias(held)).flatten(2, 3)  # (B,Hk,Q,n), Q = G·t
        part = whole.gather(3, index[:, :, None].expand(*whole.shape[:3], -1))  # (B,Hk,Q,m)
        factor = self.factors(part, old)  # (B,Hk,1,m)
        part = part * factor
        part = part / part.sum(3, keepdim=True)
        values = stays.values.to(part.dtype)
        missing = whole @ held.values.to(part.dtype) - part @ values  # (B,Hk,Q,D)
        values = values + self.change(part * old, missing)
        score, bias = stays.notes
        notes = score, bias + factor.squeeze(2).log().float()
        return stays._replace(values=values.to(held.values.dtype), notes=notes)

    def factors(self, part: Tensor, old: Tensor) -> Tensor:
        """Positive factors (B,Hk,1,m) that bring the sum of `part` (B,Hk,Q,m) over m near 1.

        Multiplicative updates of non-negative least squares (Lee & Seung 2001).
        """
        tiny = torch.finfo(part.dtype).tiny
        factor = torch.ones_like(part[:, :, :1])  # (B,Hk,1,m)
        wanted = part.sum(2, keepdim=True) + tiny  # (B,Hk,1,m)
        for _ in range(self.rounds):
            sums = (part * factor).sum(3, keepdim=True)  # (B,Hk,Q,1)
            factor = torch.where(old, factor * wanted / ((part * sums).sum(2, True) + tiny), factor)
        return factor

    def change(self, part: Tensor, missing: Tensor) -> Tensor:
        """The smallest change of values (B,Hk,m,D) with part (B,Hk,Q,m) @ change ≈ `missing`."""
        square = part @ part.transpose(2, 3)  # (B,Hk,Q,Q)
        diagonal = square.diagonal(dim1=2, dim2=3)  # (B,Hk,Q)
        ridge = self.ridge * diagonal.mean(2)[:, :, None, None] + torch.finfo(part.dtype).tiny
        square = square + ridge * torch.eye(square.shape[3], device=part.device, dtype=part.dtype)
        return part.transpose(2, 3) @ torch.linalg.solve(square, missing)


class Quest(Policy):
    """All entries stay. Each query reads the pages with the largest bounds of its scores, and the
    page that it is in: at most `budget` entries.

    The bound is from the smallest and largest number per channel of a page's keys. Of the query
    heads of a KV head, the largest bound counts. A query in a prompt reads pages too, so the result
    does not depend on the parts in which a prompt is read.
    """

    name = "quest"
    attends = True
    evicts = False

    def __init__(self, budget: int, page: int):
        super().__init__(budget)
        self.page = page

    def noted(self, held: Held, T: int) -> tuple[Tensor, ...]:
        """Smallest and largest keys (B,Hk,pages,D) ×2 of the full pages."""
        pages = held.entries // self.page
        none = held.keys[:, :, :0].clone()
        low, high = held.notes or (none, none)
        known = low.shape[2]
        new = held.keys[:, :, known * self.page : pages * self.page]
        new = new.unflatten(2, (pages - known, self.page))  # (B,Hk,new,page,D)
        if known < pages:
            low = torch.cat((low, new.amin(3)), 2)
            high = torch.cat((high, new.amax(3)), 2)
        return low, high

    def reduced(self, held: Held, q: Tensor | None = None) -> Held:
        return held

    def first(self, held: Held, n: int) -> Held:
        cut = super().first(held, n)
        return cut._replace(notes=tuple(note[:, :, : n // self.page] for note in cut.notes))

    def attend(self, held: Held, q: Tensor, mask: Tensor | None) -> Tensor:
        if held.entries <= self.budget // self.page * self.page:  # all pages would be read
            return super().attend(held, q, mask)
        if q.shape[2] == 1 and mask is None:
            return self.read(held, q)
        seen = self.visible(held, q)
        if mask is not None:
            seen = seen & mask.to(seen.device)
        return Masked(seen)(q, held.keys, held.values)

    def pages(self, held: Held, q: Tensor) -> Tensor:
        """(B,Hk,T,k) int64: the pages that the last T queries (B,H,T,D) read beside their own; for
        one that has fewer pages before its own, any number."""
        low, high = (note.to(exact(q))[:, :, None].transpose(3, 4) for note in held.notes)
        B, _, T, D = q.shape
        q = q.to(exact(q)).reshape(B, low.shape[1], -1, T, D)  # (B,Hk,G,T,D)
        bound = q.relu() @ high - (-q).relu() @ low  # (B,Hk,G,T,pages)
        bound = bound.amax(2)  # (B,Hk,T,pages)
        page = torch.arange(bound.shape[3], device=q.device)
        hidden = page >= self.own_page(held, T).to(q.device)[:, None]  # (T,pages)
        k = min(self.budget // self.page - 1, bound.shape[3])
        return bound.masked_fill(hidden, -torch.inf).topk(k, dim=3).indices

    def own_page(self, held: Held, T: int) -> Tensor:
        """(T,) the page of each of the last T queries."""
        return torch.arange(held.entries - T, held.entries) // self.page

    def visible(self, held: Held, q: Tensor) -> Tensor:
        """(B,H,T,n) bool: the entries in the pages of each query, later ones too."""
        H, T = q.shape[1:3]
        pages = self.pages(held, q)  # (B,Hk,T,k)
        count = -(-held.entries // self.page)
        seen = torch.zeros(*pages.shape[:3], count, dtype=torch.bool, device=q.device)
        seen = seen.scatter(3, pages, True)
        own = self.own_page(held, T).to(q.device)
        page = torch.arange(count, device=q.device)
        seen = (seen & (page < own[:, None])) | (page == own[:, None])  # (B,Hk,T,count)
        seen = seen.repeat_interleave(self.page, 3)[..., : held.entries]  # (B,Hk,T,n)
        return seen.repeat_interleave(H // seen.shape[1], 1)

    def read(self, held: Held, q: Tensor) -> Tensor:
        """One query per row, q (B,H,1,D) → (B,H,1,D): only its pages are copied."""
        within = torch.arange(self.page, device=q.device)
        index = self.pages(held, q)[:, :, 0, :, None] * self.page + within  # (B,Hk,k,page)
        start = int(self.own_page(held, 1)) * self.page
        own = torch.arange(start, held.entries, device=q.device)
        index = torch.cat((index.flatten(2), own.expand(*index.shape[:2], -1)), 2)  # (B,Hk,m)
        part = held._replace(notes=()).taken(index)
        return Decode()(q, part.keys, part.values)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Window, HeavyHitters, SnapKV, KeyNorms, AttentionMatching, Quest)
}


def make_policy(policy: str, budget: int, sinks: int, recent: int | None, page: int) -> Policy:
    """The policy of these options, which options.py has checked."""
    if policy == "window":
        return Window(budget, sinks)
    if policy == "quest":
        return Quest(budget, page)
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
