"""The last `window` positions, and optionally the first few tokens as attention sinks.

Memory stays constant however long the text gets; tokens that left the window are forgotten. With a
model trained with full attention this changes the answers, so the tests compare with a
recomputation under the same band mask. A query sees the sinks right before its window, at a
distance that training covered, as if the evicted tokens did not exist: each query gets a copy of
the sink keys, rotated forward by as many positions as were evicted.
Reference: StreamingLLM (Xiao et al. 2023, arXiv 2309.17453).
"""

import torch

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Sizes, causal
from nanokv.cache.checks import check_append
from nanokv.errors import UnsupportedError
from nanokv.rope import apply_rope, rope_frequencies


class SlidingCache(LayerCache):
    """`keys`, `values` (B,Hk,n,D): the sinks, then at most window − 1 past tokens; `length` counts all seen."""

    def __init__(self, config, window: int, sinks: int):
        self._expected = config.num_key_value_heads, config.head_dim, None, None
        self.config, self.window, self.sinks, self.length = config, window, sinks, 0
        self.keys = self.values = None

    def append(self, k, v):
        check_append(k, v, self.keys, self._expected)
        if self.keys is not None:
            keys, values = (
                torch.cat((self.keys, k), 2),
                torch.cat((self.values, v), 2),
            )  # (B,Hk,n+T,D)
        else:
            keys, values = k, v
        evicted, length, end = self.evicted(k.shape[2]), self.length + k.shape[2], keys.shape[2]
        s, keep = min(self.sinks, length), min(self.window - 1, max(0, end - self.sinks))
        held = (
            torch.cat((x[:, :, :s], x[:, :, end - keep :]), 2) for x in (keys, values)
        )  # (B,Hk,n',D) ×2
        self._rollback((length, *held))
        if not self.sinks or int(evicted[-1]) == 0:
            return keys, values
        moved = self.moved_sinks(keys[:, :, : self.sinks], evicted)  # (B,Hk,T·sinks,D)
        copies = values[:, :, : self.sinks].repeat(1, 1, len(evicted), 1)  # (B,Hk,T·sinks,D)
        return torch.cat((moved, keys[:, :, self.sinks :]), 2), torch.cat(
            (copies, values[:, :, self.sinks :]), 2
        )

    def evicted(self, T: int):
        """(T,) tokens that have left the window when each of the next T queries is asked."""
        return (self.length + torch.arange(T) - (self.window - 1) - self.sinks).clamp(min=0)

    def moved_sinks(self, sinks, evicted):
        """One copy of the sinks a query, rotated on by what that query no longer sees; YaRN's factor is in them."""
        speed, _ = rope_frequencies(self.config, sinks.device)
        angle = evicted.to(sinks.device)[:, None].float() * torch.cat((speed, speed))  # (T,D)
        rope = angle.cos()[:, None, None, None], angle.sin()[:, None, None, None]  # (T,1,1,1,D)
        moved = apply_rope(sinks.float(), rope).to(sinks.dtype)  # (T,B,Hk,sinks,D)
        return moved.permute(1, 2, 0, 3, 4).flatten(2, 3)  # (B,Hk,T·sinks,D)

    def within(self, T: int) -> int | None:
        """The keys of T more queries, while the window holds every token."""
        return self.length + T if self.length + T <= self.window else None

    @causal(within)
    def mask(self, T: int):
        """(T,S) bool: for each query a band of `window` keys and its copy of the sinks.

        None for one query, which sees all keys.
        """
        if T == 1:
            return None
        held = 0 if self.keys is None else self.keys.shape[2]
        s = min(self.sinks, self.length)
        # Positions of what follows the sinks.
        past = torch.arange(self.length - (held - s), self.length + T)  # (n,)
        query = self.length + torch.arange(T)[:, None]  # (T,1)
        first = torch.arange(s)  # sinks that are stored already are at positions 0 … s−1
        position = torch.cat((first, past))  # (n,)
        visible = (position <= query) & ((position > query - self.window) | (position < self.sinks))
        if not self.sinks or int(self.evicted(T)[-1]) == 0:
            return visible
        own = torch.eye(T, dtype=torch.bool).repeat_interleave(self.sinks, dim=1)  # (T,T·sinks)
        own &= torch.arange(self.sinks).repeat(T) <= query
        return torch.cat((own, visible[:, self.sinks :]), 1)

    @property
    def sizes(self) -> Sizes:
        """A guess may be as long as nothing leaves the window."""
        B, held = (None, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[2])
        return Sizes(B, held, self.nbytes, max(0, self.sinks + self.window - 1 - self.length))

    def _check_truncate(self, n: int):
        super()._check_truncate(n)
        held = 0 if self.keys is None else self.keys.shape[2]
        if 0 < n < self.length and held < self.length:
            raise UnsupportedError(
                f"a sliding cache cannot go back to {n}: {self.length - held} of its {self.length} tokens are gone",
                hint="truncate(0) and prefill again",
            )

    def _snapshot(self):
        # Keys are never written in place, so the snapshot still has the tokens that leave the
        # window.
        return self.length, self.keys, self.values

    def _rollback(self, snapshot):
        # One statement, so an interrupt never leaves keys and length of different steps.
        self.length, self.keys, self.values = snapshot

    def truncate(self, n: int):
        self._check_truncate(n)
        if n == 0:
            self._rollback((0, None, None))
        elif n < self.length:
            self._rollback((n, self.keys[:, :, :n].clone(), self.values[:, :, :n].clone()))

    def fork(self):
        copy = type(self)(self.config, self.window, self.sinks)
        copy._rollback(self._snapshot())
        return copy

    def reorder(self, index):
        if self.keys is not None:
            self._rollback((self.length, self.keys[index], self.values[index]))

    def state(self) -> dict:
        if self.keys is None:
            return {}
        return {"key": self.keys, "value": self.values, "length": torch.tensor(self.length)}

    def restore(self, state: dict):
        self._rollback((int(state.get("length", 0)), state.get("key"), state.get("value")))

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes
