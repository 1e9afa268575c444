"""Keys and values that another process has prefilled, on their way into the engine's pages.

The prefill process takes them from the cache of a finished request (`taken`). The engine of the
decode process appends them to a new request's pages (`extend`), after the pages that it found in
its index. Rows are sent, not pages: a page that is not full would be sent with its empty slots, and
both sides would need the same page size. Recurrent layers send their state after the last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nanokv.cache import KVCache
from nanokv.cache.state import Mark, StateLayer
from nanokv.config import Config
from nanokv.errors import HandoverError, UnsupportedError


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
    conv: Tensor | None = None  # (R,C,K−1) of R recurrent layers after the last token
    S: Tensor | None = None  # (R,H,Dk,Dv) fp32; None: their layers have no S

    def check(self, config: Config, dtype: torch.dtype | None) -> None:
        """HandoverError for a shape, length or dtype that does not fit; None accepts any dtype."""
        L, Hk, D = config.num_kv_layers, config.num_key_value_heads, config.head_dim
        L -= config.states
        states = 0 if self.conv is None else len(self.conv)
        if states != config.states:
            raise HandoverError(
                f"{states} states of recurrent layers follow the {len(self.tokens)} tokens, "
                f"not {config.states}"
            )
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
        keyed = [layer for layer in cache if not isinstance(layer, StateLayer)]
        for layer, *rows in zip(keyed, self.keys, self.values, strict=True):
            keys, values = (x[None, :, held:].to(device) for x in rows)  # (1,Hk,T,D) ×2
            layer.write(keys, values)
        for state, mark in zip(cache.states, self.marks(device), strict=True):
            state.resume(mark)

    def marks(self, device: torch.device | str) -> list[Mark]:
        """The states, one per recurrent layer."""
        if self.conv is None:
            return []
        conv = self.conv[:, None].to(device)  # (R,1,C,K−1)
        S = [None] * len(conv) if self.S is None else self.S[:, None].to(device)  # (R,1,H,Dk,Dv)
        return [Mark(len(self.tokens), *pair) for pair in zip(conv, S, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        tensors = (self.keys, self.values, self.conv, self.S)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


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
    states = [layer.state() for layer in cache if isinstance(layer, StateLayer)]
    found: dict[str, Any] = {
        name: torch.cat([state[name] for state in states])  # (R,…)
        for name in ("conv", "S")
        if states and name in states[0]
    }
    keyed = [layer for layer in cache if not isinstance(layer, StateLayer)]
    held: list[Tensor] = []
    for i, layer in enumerate(keyed):
        state = layer.state()
        if set(state) != {"key", "value"} or state["key"].shape[2] != len(tokens):
            kind = cache.made.name
            raise HandoverError(
                f"pages need keys and values of all tokens, which a {kind} cache does not keep",
                "prefill into a cache that keeps exact values",
            )
        rows = [state[name][0, :, start:] for name in ("key", "value")]  # (Hk,T,D) ×2
        held = held or [x.new_empty(len(keyed), *x.shape) for x in rows]  # (L,Hk,T,D) ×2
        held[0][i], held[1][i] = rows
    keys, values = held
    return Prefilled(tokens, keys, values, start=start, **found, **facts)


def whole_pages(cache: KVCache, page_size: int) -> KVCache:
    """The cache, or a fork of its full pages, after which its recurrent layers must have a state.

    Without such a state another request could not continue after the pages. HandoverError then.
    """
    n = cache.length // page_size * page_size
    if not any(isinstance(layer, StateLayer) for layer in cache) or cache.length == n:
        return cache
    shorter = cache.fork()
    try:
        shorter.truncate(n)
    except UnsupportedError as error:
        raise HandoverError(
            f"a prefix of full pages of {page_size} tokens ends after {n} of {cache.length} "
            f"tokens: {error}",
            f"hand over the cache of the first {n} tokens",
        ) from error
    shorter.tokens = cache.tokens[:n]
    return shorter
