"""Keys and values that another process has prefilled, on their way into the engine's pages.

The prefill process takes them from the cache of a finished request (`taken`). The engine of the
decode process appends them to a new request's pages (`extend`), after the pages that it found in
its index. Rows are sent, not pages: a page that is not full would be sent with its empty slots, and
both sides would need the same page size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nanokv.cache import KVCache
from nanokv.config import Config
from nanokv.errors import HandoverError


@dataclass(frozen=True, eq=False)
class Prefilled:
    """Keys and values of tokens[start:], and the logits that follow the last one."""

    tokens: Sequence[int]
    keys: Tensor  # (L,Hk,T,D), T = len(tokens) − start
    values: Tensor
    logits: Tensor | None = None  # (1,V); None if only the prefix is used
    start: int = 0
    reused: int = 0  # tokens that the prefill process found in its index
    asked: float = field(default_factory=perf_counter)  # when the request arrived

    def check(self, config: Config, dtype: torch.dtype | None) -> None:
        """HandoverError for a shape, length or dtype that does not fit; None accepts any dtype."""
        L, Hk, D = config.num_kv_layers, config.num_key_value_heads, config.head_dim
        want = [L, Hk, len(self.tokens) - self.start, D]
        for name, found in (("keys", self.keys), ("values", self.values)):
            if list(found.shape) != want or not 0 <= self.start < len(self.tokens):
                raise HandoverError(
                    f"{name} of {len(self.tokens)} tokens from token {self.start} on have "
                    f"the shape {list(found.shape)}, not {want} (L,Hk,T,D)"
                )
            if dtype not in (None, found.dtype):
                raise HandoverError(
                    f"{name} are in {found.dtype}, this engine computes in {dtype}",
                    "load the model with the same dtype in both processes",
                )
        if self.logits is not None and list(self.logits.shape) != [1, config.vocab_size]:
            raise HandoverError(
                f"logits have the shape {list(self.logits.shape)}, not [1, {config.vocab_size}]"
            )

    def extend(self, cache: Any, device: torch.device | str) -> None:
        """Append the tokens that `cache` lacks. cache: paged, one row, on `device`.

        If the pages are not enough, raises CapacityError and changes nothing.
        """
        held = cache.length - self.start
        for layer, *rows in zip(cache, self.keys, self.values, strict=True):
            keys, values = (x[None, :, held:].to(device) for x in rows)  # (1,Hk,T,D) ×2
            layer.write(keys, values)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


def taken(cache: KVCache, tokens: Sequence[int], start: int = 0, **facts: Any) -> Prefilled:
    """tokens[start:] of a cache of one sequence.

    Gathers one layer at a time, which costs a copy of its S rows. Raises HandoverError for a
    cache of other tokens, of several rows, or without exact values.
    """
    if cache.sizes.batch_size != 1 or cache.length != len(tokens):
        raise HandoverError(
            f"{len(tokens)} tokens were passed for {cache!r}",
            "pass the ids of the tokens it holds",
        )
    if cache.config is not None and cache.config.states:
        raise HandoverError(
            f"{cache.config.states} of {len(cache)} layers have a recurrent state, which is not "
            "handed over",
            "submit the prompt: this engine prefills it",
        )
    held: list[Tensor] = []
    for i, layer in enumerate(cache):
        state = layer.state()
        if set(state) != {"key", "value"} or state["key"].shape[2] != len(tokens):
            kind = cache.made.name
            raise HandoverError(
                f"pages need keys and values of all tokens, which a {kind} cache does not keep",
                "prefill into a cache that keeps exact values",
            )
        rows = [state[name][0, :, start:] for name in ("key", "value")]  # (Hk,T,D) ×2
        held = held or [x.new_empty(len(cache), *x.shape) for x in rows]  # (L,Hk,T,D) ×2
        held[0][i], held[1][i] = rows
    keys, values = held
    return Prefilled(tokens, keys, values, start=start, **facts)
