"""Context parallel: one long sequence whose positions are spread over ranks, so its cache need not fit on one of them.

    group = nanokv.parallel.group.start()
    cache = ContextCache(make_cache("dict", model.config), group, page=16)
    for token in nanokv.generate(model, ids, cache, seed=0): ...     the same on every rank

    position   0 … 15    16 … 31    32 … 47    48 … 63    64 …       pages are dealt out in turn: at every length all
    2 ranks    rank 0    rank 1     rank 0     rank 1     rank 0     ranks have equally much to keep and to read

Every rank has all weights and computes q, k and v of every token. It keeps the keys and values of its own positions,
and attends to those. Then outputs and log-sum-exps are gathered and merged (merge.py), so that all ranks
go on with the same hidden states. Per layer and token a rank receives 4·B·H·(D+1) bytes from each other rank, however
long the sequence is; sending the keys instead would take 2·B·S·Hk·D values. Cache and attention are divided by the
number of ranks. The products with the weights are not: tensor parallelism does that. In a prefill the queries see the
keys of all ranks up to their own position. Ring attention (Liu et al. 2023, arXiv 2310.01889) splits the queries of a
prompt too; Yang et al. 2024 (arXiv 2411.01783) say when it is better that results travel, as here, and when keys.
"""

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Index, Made, Sizes
from nanokv.cache.checks import check_append
from nanokv.errors import CacheError, CapacityError, ParallelError, UnsupportedError
from nanokv.parallel.merge import merge, partial_attention

# They keep exact values, and count no positions themselves.
KINDS = ("dict", "static", "growing", "paged", "offloaded")


class Ranks(Protocol):
    """What is asked of a group: nanokv.parallel.group has Group and Alone."""

    rank: int
    size: int

    def gather(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Deal:
    """Which positions are a rank's: pages of `page` positions are dealt out in turn."""

    rank: int
    ranks: int
    page: int

    def count(self, n: int) -> int:
        """How many of the first n positions are this rank's: n / ranks, give or take a page."""
        rounds, rest = divmod(n, self.page * self.ranks)
        return rounds * self.page + min(max(rest - self.rank * self.page, 0), self.page)

    def positions(self, n: int) -> Tensor:
        """Those, oldest first, (count(n),) int64."""
        own = torch.arange(self.count(n))
        return (own // self.page * self.ranks + self.rank) * self.page + own % self.page

    def most(self, slots: int) -> int:
        """How long a sequence may be if every rank has so many slots: rank 0 runs out first."""
        return slots // self.page * self.page * self.ranks + slots % self.page


class ContextCache(KVCache):
    """One sequence, or B of one length, over the ranks of a group; this rank's positions lie in `share`, empty now.

    Every rank makes the same calls with the same tokens, and samples with the same seed: a rank that is elsewhere, or
    was fed other tokens, is told by ParallelError at the next forward. `nbytes` are this rank's: its share of the
    positions, at most a page more than another's. append, truncate, fork and reorder are those of the share. What it
    cannot do raises UnsupportedError: rows of different lengths, files, shares that forget or round.
    """

    made = Made("context")

    def __init__(self, share: KVCache, group: Ranks, page: int = 16, length: int = 0):
        if share.made.name not in KINDS:
            raise UnsupportedError(
                f"the positions of a rank cannot lie in a {share.made.name!r} cache",
                f"one of: {', '.join(KINDS)}",
            )
        if type(page) is not int or page < 1:
            raise CacheError(f"page is {page!r}: a whole number ≥ 1 of positions was expected")
        self.share = share
        self.group = group
        self.deal = Deal(group.rank, group.size, page)
        expected = self.deal.count(length)
        if share.length != expected:
            raise CacheError(
                f"the share holds {share.length} tokens, but {expected} of {length} are "
                f"those of rank {group.rank}",
                "give it an empty cache",
            )
        super().__init__((ContextLayer(layer, self.deal, length) for layer in share), share.config)

    @property
    def capacity(self) -> int | None:
        """Of all ranks together, if each has a share like this one."""
        if self.share.capacity is None:
            return None
        return self.deal.most(self.share.capacity)

    def attention(self, T: int) -> "ContextAttention":
        """For the next T queries. CapacityError here, on every rank, before one of them has begun to wait."""
        capacity = self.capacity
        if capacity is not None and self.length + T > capacity:
            raise CapacityError(
                f"the ranks hold {self.length} of {capacity} tokens: {T} more do not fit",
                "give each rank a larger share, one that grows, or use more ranks",
            )
        return ContextAttention(self.group, self.deal, self.length, T)

    def truncate(self, n: int) -> None:
        for layer in self:
            layer._check_truncate(n)
        self.share.truncate(self.deal.count(n))  # as a whole: a paged one gives pages back
        for layer in self:
            layer.length = min(n, layer.length)

    def fork(self) -> "ContextCache":
        return type(self)(self.share.fork(), self.group, self.deal.page, self.length)

    def reorder(self, index: Index) -> None:
        length = self.length
        self.share.reorder(index)
        # It may have made new layers.
        self[:] = [ContextLayer(layer, self.deal, length) for layer in self.share]


class ContextLayer(LayerCache):
    """One layer of this rank. `length` counts the positions of all ranks."""

    def __init__(self, share: LayerCache, deal: Deal, length: int):
        self.share = share
        self.deal = deal
        self.length = length

    # A Share is not a Tensor on purpose: see there.
    def append(self, k: Tensor, v: Tensor) -> "tuple[Share, Share]":  # type: ignore[override]
        """(B,Hk,T,D) ×2, of every new token → (B,Hk,S_r,D) ×2, of this rank's positions, for ContextAttention."""
        check_append(k, v, expected=self.share._expected)
        start = self.length
        end = start + k.shape[2]
        # Which of the T new ones.
        own = self.deal.positions(end)[self.deal.count(start) :] - start  # (t,)
        if len(own):
            keys, values = self.share.append(k[:, :, own], v[:, :, own])  # (B,Hk,S_r,D) ×2
        else:
            keys, values = self.stored(k, v)
        self.length = end
        return Share(keys), Share(values)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(B,Hk,S_r,D) ×2 that this rank has, where none of the new k and v is its own."""
        state = self.share.state()
        if not state:  # no page has come to this rank yet
            return k[:, :, :0], v[:, :, :0]  # (B,Hk,0,D) ×2
        keys = state["key"]
        check_append(k, v, keys)
        return keys, state["value"]

    def mask(self, T: int) -> NoReturn:
        raise UnsupportedError(
            f"rank {self.deal.rank} holds {self.deal.count(self.length)} of {self.length} positions, and a mask speaks "
            "of all keys",
            "attend by cache.attention(T); rows of a batch must be of one length",
        )

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        self.share.truncate(self.deal.count(n))
        self.length = min(n, self.length)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read only: the share counts them
        return self.share.nbytes

    @property
    def sizes(self) -> Sizes:
        return self.share.sizes


class Share:
    """Keys or values of one rank. No tensor, because any other attention would take them for those of all positions."""

    def __init__(self, own: Tensor):
        self.own = own

    def __getattr__(self, name: str) -> NoReturn:
        raise CacheError(FOREIGN, "attend by cache.attention(T), as prefill and decode do")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise CacheError(FOREIGN, "attend by cache.attention(T), as prefill and decode do")


FOREIGN = (
    "these are the keys of one rank's positions, and this attention does not know the other ranks"
)


class ContextAttention:
    """T queries, the same on every rank, over the keys of all ranks: q is attended to on the spot, results are sent."""

    def __init__(self, group: Ranks, deal: Deal, start: int, T: int):
        self.group = group
        self.start = start
        self.T = T
        self.checked = False
        self.mask: Tensor | None = None  # the newest token sees everything
        if T > 1:
            query = start + torch.arange(T)[:, None]  # (T,1)
            self.mask = deal.positions(start + T) <= query  # (T,S_r)

    def __call__(self, q: Tensor, k: Share, v: Share) -> Tensor:
        """q (B,H,T,D) → (B,H,T,D), bit-equal on all ranks."""
        if not self.checked:  # by the first layer
            self.check_alike(q)
        mask = self.mask
        if mask is not None:
            mask = mask.to(q.device)
        outputs, lse = partial_attention(q, k.own, v.own, mask)  # (B,H,T,D), (B,H,T)
        # In one message.
        parts = self.group.gather(torch.cat((outputs, lse[..., None]), -1))  # (ranks,B,H,T,D+1)
        return merge(parts[..., :-1], parts[..., -1]).to(q.dtype)

    def check_alike(self, q: Tensor) -> None:
        """ParallelError unless all ranks are at one position, with rows and queries alike.

        The first layer's queries depend on the tokens and their positions alone. Their means over D are compared:
        another token moves those by about rms / √D, other rounding by far less. Costs two messages per forward.
        """
        B, _, T, D = q.shape
        mine = torch.tensor([B, T, self.start], device=q.device)
        calls = self.group.gather(mine).tolist()  # (ranks,3)
        for rank, call in enumerate(calls):
            if call != calls[0]:
                own = "{} rows × {} tokens at position {}".format(*call)
                first = "{} rows × {} tokens at position {}".format(*calls[0])
                raise ParallelError(
                    f"rank {rank} was given {own}, rank 0 {first}",
                    "every rank must be fed the same tokens",
                )
        means = self.group.gather(q.float().mean(-1))  # (ranks,B,H,T)
        far = (means - means[0]).abs() > 0.1 * D**-0.5 * q.float().square().mean().sqrt()
        if far.any():
            rank, _, _, token = far.nonzero()[0].tolist()
            raise ParallelError(
                f"rank {rank} was fed another token than rank 0 at position {self.start + token}",
                "feed every rank the same tokens, sample with the same seed, and use whole weights, "
                "not a tensor-parallel part",
            )
        self.checked = True
