"""What another process has prefilled, on its way into the engine's pages.

A prefill process takes it from the cache of a finished request, `taken`; the engine of a decode process puts it into
the pages of a new one, `extend`, behind those that it found in its own index. Rows are sent, not pages: pages that are
not full would be sent with their empty slots, and both sides would need pages of one size.
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
    logits: Tensor | None = None  # (1,V); None where only the prefix is of use
    start: int = 0
    reused: int = 0  # of the tokens: not computed there, because its own index had them
    # When the request arrived that this was computed for.
    asked: float = field(default_factory=perf_counter)

    def check(self, config: Config, dtype: torch.dtype | None) -> None:
        """HandoverError for another shape, length or dtype than this model's; None: any dtype."""
        L, Hk, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        want = [L, Hk, len(self.tokens) - self.start, D]
        for name, found in (("keys", self.keys), ("values", self.values)):
            if list(found.shape) != want or not 0 <= self.start < len(self.tokens):
                raise HandoverError(
                    f"{name} of {len(self.tokens)} tokens from token {self.start} on have the shape "
                    f"{list(found.shape)}, not {want} (L,Hk,T,D)"
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
        """Append what a paged cache of one row on this device does not hold yet; CapacityError changes nothing."""
        held = cache.length - self.start
        for layer, *rows in zip(cache, self.keys, self.values, strict=True):
            keys, values = (x[None, :, held:].to(device) for x in rows)  # (1,Hk,T,D) ×2
            layer.write(keys, values)

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return self.keys.nbytes + self.values.nbytes


def taken(cache: KVCache, tokens: Sequence[int], start: int = 0, **facts: Any) -> Prefilled:
    """From the cache of one sequence that keeps exact values; tokens[:start] are left out.

    Each layer's rows are gathered as a whole first: one copy of S rows, of one layer at a time.
    """
    if cache.sizes.batch_size != 1 or cache.length != len(tokens):
        raise HandoverError(
            f"{len(tokens)} tokens do not belong to {cache!r}", "send the ids that it holds with it"
        )
    held: list[Tensor] = []
    for i, layer in enumerate(cache):
        state = layer.state()
        if set(state) != {"key", "value"} or state["key"].shape[2] != len(tokens):
            kind = cache.made.name
            raise HandoverError(
                f"pages hold keys and values of all tokens, a {kind} cache does not keep them",
                "prefill into a cache that keeps exact values",
            )
        rows = [state[name][0, :, start:] for name in ("key", "value")]  # (Hk,T,D) ×2
        held = held or [x.new_empty(len(cache), *x.shape) for x in rows]  # (L,Hk,T,D) ×2
        held[0][i], held[1][i] = rows
    keys, values = held
    return Prefilled(tokens, keys, values, start=start, **facts)
