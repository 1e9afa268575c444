"""The last `window` positions, and optionally the first few tokens as attention sinks.

Memory stays constant however long the text gets; tokens that left the window are forgotten. With a
model trained with full attention this changes the answers, so the tests compare with a
recomputation under the same band mask. A query sees the sinks right before its window, at a
distance that training covered, as if the evicted tokens did not exist: each query gets a copy of
the sink keys, rotated forward by as many positions as were evicted.
Reference: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).
"""

from typing import Self

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Index, Sizes, causal
from nanokv.cache.checks import Expected, check_append
from nanokv.config import Config
from nanokv.errors import UnsupportedError
from nanokv.rope import apply_rope, rope_frequencies


class SlidingCache(LayerCache):
    """`keys`, `values` (B,Hk,n,D): the sinks, then at most window − 1 past tokens.

    `length` counts all tokens seen, also the forgotten ones.
    """

    lossless = False
    keys: Tensor  # None until the first append
    values: Tensor

    def __init__(self, config: Config, window: int, sinks: int):
        self._expected = Expected(config.num_key_value_heads, config.head_dim)
        self.config = config
        self.window = window
        self.sinks = sinks
        self._rollback((0, None, None))

    @property
    def held(self) -> int:
        """Keys held."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, self.keys, self._expected)
        keys, values = k, v
        if self.keys is not None:
            keys = torch.cat((self.keys, k), 2)  # (B,Hk,n+T,D)
            values = torch.cat((self.values, v), 2)  # (B,Hk,n+T,D)
        evicted = self.evicted(k.shape[2])  # (T,), before the length changes
        self.keep(self.length + k.shape[2], keys, values)
        if not self.sinks or int(evicted[-1]) == 0:
            return keys, values
        moved = self.moved_sinks(keys[:, :, : self.sinks], evicted)  # (B,Hk,T·sinks,D)
        copies = values[:, :, : self.sinks].repeat(1, 1, len(evicted), 1)  # (B,Hk,T·sinks,D)
        keys = torch.cat((moved, keys[:, :, self.sinks :]), 2)  # (B,Hk,S,D)
        values = torch.cat((copies, values[:, :, self.sinks :]), 2)  # (B,Hk,S,D)
        return keys, values

    def keep(self, length: int, keys: Tensor, values: Tensor) -> None:
        """Hold the sinks and the last window − 1 of `keys` and `values` (B,Hk,n+T,D)."""
        end = keys.shape[2]
        s = min(self.sinks, length)
        start = end - min(self.window - 1, max(0, end - self.sinks))
        keys = torch.cat((keys[:, :, :s], keys[:, :, start:]), 2)
        values = torch.cat((values[:, :, :s], values[:, :, start:]), 2)
        self._rollback((length, keys, values))

    def evicted(self, T: int) -> Tensor:
        """(T,) tokens that each of the next T queries can no longer see."""
        return (self.length + torch.arange(T) - (self.window - 1) - self.sinks).clamp(min=0)

    def moved_sinks(self, sinks: Tensor, evicted: Tensor) -> Tensor:
        """A copy of the sinks (B,Hk,sinks,D) per query, rotated by the number of evicted tokens.

        The stored keys include YaRN's attention factor, so it is not applied again.
        """
        speed, _ = rope_frequencies(self.config, sinks.device)
        angle = evicted.to(sinks.device)[:, None].float() * torch.cat((speed, speed))  # (T,D)
        rope = angle.cos()[:, None, None, None], angle.sin()[:, None, None, None]  # (T,1,1,1,D)
        moved = apply_rope(sinks.float(), rope).to(sinks.dtype)  # (T,B,Hk,sinks,D)
        return moved.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B,Hk,T·sinks,D)

    def within(self, T: int) -> int | None:
        """The keys of T more queries, while the window holds every token."""
        end = self.length + T
        return end if end <= self.window else None

    @causal(within)
    def mask(self, T: int) -> Tensor | None:
        """(T,S) bool: for each query a band of `window` keys and its copy of the sinks.

        None for one query, which sees all keys.
        """
        if T == 1:
            return None
        s = min(self.sinks, self.length)  # sinks already stored, at positions 0 … s−1
        past = torch.arange(self.length - (self.held - s), self.length + T)  # (n,) after the sinks
        position = torch.cat((torch.arange(s), past))  # (s+n,)
        query = self.length + torch.arange(T)[:, None]  # (T,1)
        visible = (position <= query) & ((position > query - self.window) | (position < self.sinks))
        if not self.sinks or int(self.evicted(T)[-1]) == 0:
            return visible
        own = torch.eye(T, dtype=torch.bool).repeat_interleave(self.sinks, dim=1)  # (T,T·sinks)
        own &= torch.arange(self.sinks).repeat(T) <= query
        return torch.cat((own, visible[:, self.sinks :]), 1)

    @property
    def sizes(self) -> Sizes:
        """Rows, keys and bytes held; tokens can be rolled back until one leaves the window."""
        rows = None if self.keys is None else self.keys.shape[0]
        draft = max(0, self.sinks + self.window - 1 - self.length)
        return Sizes(rows, self.held, self.nbytes, draft)

    def _check_truncate(self, n: int):
        super()._check_truncate(n)
        if 0 < n < self.length and self.held < self.length:
            raise UnsupportedError(
                f"a sliding cache cannot go back to {n}: "
                f"{self.length - self.held} of its {self.length} tokens are gone",
                hint="truncate(0) and prefill again",
            )

    def _snapshot(self):
        # Keys are never written in place, so the snapshot still has the tokens that leave the
        # window.
        return self.length, self.keys, self.values

    def _rollback(self, snapshot):
        # One statement, so an interrupt never leaves keys and length of different steps.
        self.length, self.keys, self.values = snapshot

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        if n == 0:
            self._rollback((0, None, None))
        elif n < self.length:
            self._rollback((n, self.keys[:, :, :n].clone(), self.values[:, :, :n].clone()))

    def fork(self) -> Self:
        copy = type(self)(self.config, self.window, self.sinks)
        copy._rollback(self._snapshot())
        return copy

    def reorder(self, index: Index) -> None:
        if self.keys is not None:
            self._rollback((self.length, self.keys[index], self.values[index]))

    def state(self) -> dict[str, Tensor]:
        if self.keys is None:
            return {}
        return {"key": self.keys, "value": self.values, "length": torch.tensor(self.length)}

    def restore(self, state: dict[str, Tensor]) -> None:
        self._rollback((int(state.get("length", 0)), state.get("key"), state.get("value")))

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        if self.keys is None:
            return 0
        return self.keys.nbytes + self.values.nbytes
