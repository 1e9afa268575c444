"""A budget of entries per KV head: after every append, a policy decides which ones stay.

Keys keep the rotation of their true positions, and `length` counts all tokens seen. So an evicted
token leaves a gap, and the distance from a query to a kept key is the true one. (The sliding cache
closes the gap before its window instead.)

The queries of one append see all entries that were kept before and, causally, each other: a prompt
that is read at once is attended to in full and evicted from afterwards. In smaller parts, more is
forgotten on the way. policies.py has the policies. Some need the queries, which only attention has:
for these the cache gives its own attention object, which shows them to the layer.
"""

from typing import Any, Self

import torch
from torch import Tensor

from nanokv.attention import causal_mask
from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import Index, Sizes, causal
from nanokv.cache.checks import check_append
from nanokv.cache.policies import Held, Policy
from nanokv.errors import CacheError, UnsupportedError


class EvictingLayer(LayerCache):
    """`held` has at most policy.budget entries per KV head after an append; None: empty."""

    held: Held | None
    lossless = False

    def __init__(self, policy: Policy):
        self.policy = policy
        self._rollback((0, None, False))

    @property
    def entries(self) -> int:
        """Entries per KV head."""
        return 0 if self.held is None else self.held.entries

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, None if self.held is None else self.held.keys, self._expected)
        if self.unseen:
            raise CacheError(
                f"the policy {self.policy.name} was not shown the queries of the last append: "
                "another attention was used than cache.attention(T)",
                hint="prefill and decode use it; or take a policy that needs no queries: "
                "policy=window, policy=norms",
            )
        held = self.extended(k, v)
        stays = held if self.policy.watches else self.policy.reduced(held)
        self._rollback((self.length + k.shape[2], stays, self.policy.watches))
        return held.keys, held.values

    def extended(self, k: Tensor, v: Tensor) -> Held:
        """All that is held, then the new keys and values (B,Hk,T,D)."""
        B, Hk, T, _ = k.shape
        new = torch.arange(self.length, self.length + T, dtype=torch.int32, device=k.device)
        held = Held(k, v, new.expand(B, Hk, T))
        if self.held is not None:
            keys, values, positions, notes = self.held
            held = Held(
                torch.cat((keys, k), 2),  # (B,Hk,n+T,D)
                torch.cat((values, v), 2),  # (B,Hk,n+T,D)
                torch.cat((positions, held.positions), 2),  # (B,Hk,n+T)
                notes,
            )
        return held._replace(notes=self.policy.noted(held, T))

    def show(self, q: Tensor, mask: Tensor | None) -> None:
        """Let the policy see the queries (B,H,T,D) of the last append, then evict."""
        if self.held is None or not self.unseen:
            return
        held = self.policy.watched(self.held, q, mask)
        self._rollback((self.length, self.policy.reduced(held, q), False))

    @causal(lambda layer, T: layer.entries + T)
    def mask(self, T: int) -> Tensor | None:
        return causal_mask(T, self.entries + T)

    @property
    def sizes(self) -> Sizes:
        """Rows, entries and bytes held; tokens can be rolled back until something is evicted, if
        the policy does not remember queries."""
        rows = None if self.held is None else self.held.keys.shape[0]
        draft: int | None = None  # of Quest, any number
        if self.policy.evicts:
            draft = 0 if self.policy.watches else max(0, self.policy.budget - self.length)
        return Sizes(rows, self.entries, self.nbytes, draft)

    def _check_truncate(self, n: int):
        super()._check_truncate(n)
        if not 0 < n < self.length:
            return
        gone = self.length - self.entries
        reason = f"{gone} of its {self.length} tokens are gone from every head"
        if not gone:
            reason = f"its scores count the attention of all {self.length} tokens"
        if gone or self.policy.watches:
            raise UnsupportedError(
                f"an evicting cache with policy={self.policy.name} cannot go back to {n}: {reason}",
                hint="truncate(0) and prefill again",
            )

    def _snapshot(self):
        return self.length, self.held, self.unseen

    def _rollback(self, snapshot):
        # One statement, so an interrupt never leaves entries and length of different steps.
        self.length, self.held, self.unseen = snapshot

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        if n == 0:
            self._rollback((0, None, False))
        elif self.held is not None and n < self.length:
            self._rollback((n, self.policy.first(self.held, n), False))

    def fork(self) -> Self:
        copy = type(self)(self.policy)
        copy._rollback(self._snapshot())
        return copy

    def reorder(self, index: Index) -> None:
        if self.held is not None:
            held = self.held.each(lambda x: x[index])
            self._rollback((self.length, held, self.unseen))

    def state(self) -> dict[str, Tensor]:
        if self.held is None:
            return {}
        keys, values, positions, notes = self.held
        state = {"key": keys, "value": values, "positions": positions}
        state |= {f"note{i}": note for i, note in enumerate(notes)}
        return state | {"length": torch.tensor(self.length)}

    def restore(self, state: dict[str, Tensor]) -> None:
        if not state:
            self._rollback((0, None, False))
            return
        notes = tuple(state[f"note{i}"] for i in range(len(state) - 4))
        held = Held(state["key"], state["value"], state["positions"], notes)
        self._rollback((int(state["length"]), held, False))

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        """Bytes of keys, values, positions and notes."""
        if self.held is None:
            return 0
        keys, values, positions, notes = self.held
        return sum(x.nbytes for x in (keys, values, positions, *notes))


class EvictingCache(KVCache):
    """Layers of one policy."""

    @property
    def policy(self) -> Policy:
        first: Any = self[0]
        return first.policy

    def attention(self, T: int) -> "Watched | None":
        """The attention of the next T queries; None: any attention will do."""
        policy = self.policy
        if not (policy.watches or policy.attends):
            return None
        return Watched(self, self.mask(T))

    def _check_padding(self) -> None:
        if not self.policy.newest_only:
            raise UnsupportedError(
                f"an evicting cache with policy={self.policy.name} cannot hold padding: its entries "
                "are not the last columns of the rectangle",
                hint="prefill rows of equal length together, or each row alone; or take "
                "policy=window without sinks",
            )


class Watched:
    """Attention over an evicting cache, which shows each layer its queries."""

    def __init__(self, cache: EvictingCache, mask: Tensor | None):
        self.cache = cache
        self.mask = mask  # (T,n)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,n,D) as `append` returned them → (B,H,T,D)."""
        layer = self.layer_of(k)
        y = layer.policy.attend(layer.held._replace(values=v), q, self.mask)
        layer.show(q, self.mask)
        return y

    def layer_of(self, keys: Tensor) -> Any:
        """The layer whose last append returned these keys."""
        layer: Any
        for layer in self.cache:
            if layer.held is not None and layer.held.keys is keys:
                return layer
        raise CacheError(
            f"keys {tuple(keys.shape)} are not those that an append of this cache returned: a "
            f"policy={self.cache.policy.name} needs them unchanged"
        )
