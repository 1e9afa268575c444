"""Context parallelism: spreads the positions of one long sequence over the ranks.

The cache of the sequence then need not fit on one rank.

    group = nanokv.parallel.group.start()
    cache = ContextCache(make_cache("dict", model.config), group, page=16)
    for token in nanokv.generate(model, ids, cache, seed=0): ...     the same on every rank

    position   0 … 15    16 … 31    32 … 47    48 … 63    64 …
    2 ranks    rank 0    rank 1     rank 0     rank 1     rank 0

Pages are assigned to the ranks in turn, so at every length all ranks store and read about the same
number of positions.

Every rank has all weights and computes q, k and v of every token. It keeps the keys and values of
its own positions and attends to them. Then the outputs and their log-sum-exps are gathered and
merged (merge.py), so all ranks continue with the same hidden states. Per layer and token a rank
receives 4·B·H·(D+1) bytes from each other rank, whatever the length of the sequence; sending the
keys and values instead would take 2·B·S·Hk·D values.

Cache and attention are divided by the number of ranks. The products with the weights are not, which
is the job of tensor parallelism. In a prefill the queries see the keys of all ranks up to their own
position. Ring attention (Liu et al. 2023, arXiv 2310.01889) also splits the queries of a prompt.
Yang et al. 2024 (arXiv 2411.01783) compare sending results, as here, with sending keys and values.
"""

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Index, Made, Sizes
from nanokv.cache.checks import check_append, refuse_states
from nanokv.errors import CacheError, CapacityError, ParallelError, UnsupportedError
from nanokv.parallel.merge import merge, partial_attention

# The caches that keep exact values and need not know the positions of their tokens.
KINDS = ("dict", "static", "growing", "paged", "offloaded")


class Ranks(Protocol):
    """The part of a group that is used here; nanokv.parallel.group has Group and Alone."""

    rank: int
    size: int

    def gather(self, x: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Deal:
    """The positions of a rank: pages of `page` positions are assigned to the ranks in turn."""

    rank: int
    ranks: int
    page: int

    def count(self, n: int) -> int:
        """How many of the first n positions belong to this rank: n / ranks, give or take a page."""
        rounds, rest = divmod(n, self.page * self.ranks)
        return rounds * self.page + min(max(rest - self.rank * self.page, 0), self.page)

    def positions(self, n: int) -> Tensor:
        """The positions below n of this rank, oldest first: (count(n),) int64."""
        own = torch.arange(self.count(n))
        return (own // self.page * self.ranks + self.rank) * self.page + own % self.page

    def most(self, slots: int) -> int:
        """The longest sequence if every rank has `slots` slots. Rank 0 is the first to run out."""
        return slots // self.page * self.page * self.ranks + slots % self.page


class ContextCache(KVCache):
    """A cache of one sequence, or of B sequences of the same length, over the ranks of a group.

    `share` stores the positions of this rank and is empty at first. Every rank must make the same
    calls with the same tokens, and sample with the same seed. If a rank is at another position or
    was given other tokens, the next forward raises ParallelError. `nbytes` counts this rank's
    share, which differs from another rank's by at most a page. append, truncate, fork and reorder
    do the same to the share. UnsupportedError for rows of different lengths, files, and shares
    that forget or round.
    """

    made = Made("context")

    def __init__(self, share: KVCache, group: Ranks, page: int = 16, length: int = 0):
        if share.made.name not in KINDS:
            raise UnsupportedError(
                f"the positions of a rank cannot lie in a {share.made.name!r} cache",
                f"one of: {', '.join(KINDS)}",
            )
        if share.config is not None:
            refuse_states(share.config, "context")
        if share.config is not None and any(share.config.windows):
            raise UnsupportedError(
                f"the positions of {share.config.family.title} cannot be split over ranks: "
                "layers with a window see the end of all positions"
            )
        if share.config is not None and share.config.family.sinks:
            raise UnsupportedError(
                f"the positions of {share.config.family.title} cannot be split over ranks: "
                "each rank would count the sinks"
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
        """The capacity of all ranks together, if every rank has a share like this one."""
        if self.share.capacity is None:
            return None
        return self.deal.most(self.share.capacity)

    def attention(self, T: int) -> "ContextAttention":
        """The attention of the next T queries.

        CapacityError if they do not fit. Every rank raises it here, before any rank waits for
        another.
        """
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
        self.share.truncate(self.deal.count(n))  # the whole share: a paged cache frees pages
        for layer in self:
            layer.length = min(n, layer.length)

    def fork(self) -> "ContextCache":
        return type(self)(self.share.fork(), self.group, self.deal.page, self.length)

    def reorder(self, index: Index) -> None:
        length = self.length
        self.share.reorder(index)
        # The share may have new layer objects.
        self[:] = [ContextLayer(layer, self.deal, length) for layer in self.share]


class ContextLayer(LayerCache):
    """One layer of this rank's share. `length` counts the positions of all ranks."""

    def __init__(self, share: LayerCache, deal: Deal, length: int):
        self.share = share
        self.deal = deal
        self.length = length

    # The result is not a tensor on purpose; see Share.
    def append(self, k: Tensor, v: Tensor) -> "tuple[Share, Share]":  # type: ignore[override]
        """k and v (B,Hk,T,D) of all new tokens → all of this rank's positions, (B,Hk,S_r,D) ×2."""
        check_append(k, v, expected=self.share._expected)
        start = self.length
        end = start + k.shape[2]
        # This rank's tokens among the T new ones.
        own = self.deal.positions(end)[self.deal.count(start) :] - start  # (t,)
        if len(own):
            keys, values = self.share.append(k[:, :, own], v[:, :, own])  # (B,Hk,S_r,D) ×2
        else:
            keys, values = self.stored(k, v)
        self.length = end
        return Share(keys), Share(values)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's keys and values (B,Hk,S_r,D) ×2, when none of the new k and v is its own."""
        state = self.share.state()
        if not state:  # this rank has no page yet
            return k[:, :, :0], v[:, :, :0]  # (B,Hk,0,D) ×2
        keys = state["key"]
        check_append(k, v, keys)
        return keys, state["value"]

    def mask(self, T: int) -> NoReturn:
        raise UnsupportedError(
            f"rank {self.deal.rank} holds {self.deal.count(self.length)} of {self.length} "
            "positions, but a mask covers all keys",
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
    """Keys or values of one rank's positions.

    Not a tensor, because any attention but ContextAttention would take them for all positions. Any
    such use raises CacheError.
    """

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
    """Attention of T queries, the same on every rank, over the keys of all ranks.

    Each rank attends to its own keys, and the results are gathered and merged.
    """

    def __init__(self, group: Ranks, deal: Deal, start: int, T: int):
        self.group = group
        self.start = start
        self.T = T
        self.checked = False
        self.mask: Tensor | None = None  # one query is the newest token and sees everything
        if T > 1:
            query = start + torch.arange(T)[:, None]  # (T,1)
            self.mask = deal.positions(start + T) <= query  # (T,S_r)

    def __call__(self, q: Tensor, k: Share, v: Share) -> Tensor:
        """q (B,H,T,D) → (B,H,T,D), with the same bits on all ranks."""
        if not self.checked:  # once, in the first layer
            self.check_alike(q)
        mask = self.mask
        if mask is not None:
            mask = mask.to(q.device)
        outputs, lse = partial_attention(q, k.own, v.own, mask)  # (B,H,T,D), (B,H,T)
        # Outputs and log-sum-exps go in one message.
        parts = self.group.gather(torch.cat((outputs, lse[..., None]), -1))  # (ranks,B,H,T,D+1)
        return merge(parts[..., :-1], parts[..., -1]).to(q.dtype)

    def check_alike(self, q: Tensor) -> None:
        """ParallelError unless all ranks have the same position, rows and tokens.

        The queries of the first layer depend only on the tokens and their positions. Their means
        over D are compared: another token changes a mean by about rms / √D, different rounding by
        far less. Costs two messages per forward.
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
                "feed every rank the same tokens, sample with the same seed, and use whole "
                "weights, not a tensor-parallel part",
            )
        self.checked = True
