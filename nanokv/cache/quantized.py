"""Keys and values in few bits. schemes.py has the ways to round them; the default is that of KIVI
(Liu et al. 2024, arXiv 2402.02750).

Keys have a few channels that are far larger than the rest, so each channel of a block of `group`
tokens gets a scale; values have no such channels, so each token gets a scale. The newest tokens
stay exact: a block is quantized once, when an append finds `residual + group` exact tokens. The
tokens of an append stay exact until the next append, so repeating a failed forward gives the same
answer. The `first` tokens of a sequence stay exact for ever: models put much attention on them.
Every append returns a dense copy (2·S·Hk·D values per layer): this saves memory, not bandwidth.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.checks import check_append
from nanokv.cache.codes import LARGEST
from nanokv.cache.schemes import Scheme
from nanokv.errors import CacheError


class Held(NamedTuple):
    """All that one layer holds; replaced as a whole, never written in place. Empty at first."""

    exact: tuple[Tensor, ...] = ()  # keys, values: (B,Hk,r,D) each
    codes: tuple[Tensor, ...] = ()  # keys, values: (B,Hk,q,D·bits/8) uint8 each
    # Those of the keys' scheme, then of the values': (B,Hk,q,…) or (B,Hk,blocks,…). By default
    # scale and low of keys (B,Hk,blocks,D), scale and low of values (B,Hk,q,1).
    scales: tuple[Tensor, ...] = ()
    blocks: list[int] = []  # tokens per block: `group`, or fewer after truncate
    start: tuple[Tensor, ...] = ()  # keys, values of the first tokens: (B,Hk,f,D) each, exact


TENSORS = ("exact", "codes", "scales", "start")  # the fields of Held that are tensors


class QuantizedCache(LayerCache):
    """Packed codes and scales of the old tokens; the newest, at least `residual`, are exact."""

    lossless = False
    exact: tuple[Tensor, ...]  # these five are those of Held
    codes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    blocks: list[int]
    start: tuple[Tensor, ...]

    def __init__(self, keys: Scheme, values: Scheme, group: int, residual: int, first: int = 0):
        self.schemes = keys, values
        self.units = *keys.units, *values.units  # of each of `scales`
        self.group = group
        self.residual = residual
        self.first = first
        self._rollback(Held())

    @property
    def length(self) -> int:  # type: ignore[override]  # read-only
        return self.started + sum(self.blocks) + self.newest

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, self.exact[0] if self.exact else None, self._expected)
        self.check_range(k, v)
        if self.due:
            self.flush(self.due)
        self.keep(k, v)
        keys, values = self.dense()  # (B,Hk,S,D) ×2
        return keys, values

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Add new tokens as they are: the first ones to `start`, the others to `exact`."""
        n = max(0, self.first - self.started)
        start = self.start
        if n:
            start = _cat(start, (k[:, :, :n].clone(), v[:, :, :n].clone()))
        exact = _cat(self.exact, (k[:, :, n:], v[:, :, n:]))
        self._rollback(self._snapshot()._replace(exact=exact, start=start))

    def check_range(self, k: Tensor, v: Tensor) -> None:
        """CacheError for NaN and for values beyond the range of fp16 scales, which ends at 65,504.

        Reading the largest value makes a GPU synchronise twice per layer.
        """
        for name, x, scheme in zip(("keys", "values"), (k, v), self.schemes, strict=True):
            largest = scheme.largest(x)
            if not largest <= LARGEST:  # NaN too
                raise CacheError(
                    f"cannot quantize {name} of size {largest:g}: "
                    f"{LARGEST:g} is the largest that fp16 scales allow",
                    hint="use a cache that keeps them as they are",
                )

    @property
    def started(self) -> int:
        """Tokens in `start`."""
        return self.start[0].shape[2] if self.start else 0

    @property
    def newest(self) -> int:
        """Exact tokens after those in `start`."""
        return self.exact[0].shape[2] if self.exact else 0

    @property
    def due(self) -> int:
        """Blocks that the next append will quantize."""
        return max(0, (self.newest - self.residual) // self.group)

    @property
    def sizes(self) -> Sizes:
        """Rows, keys and bytes held, and how many drafted tokens can be rolled back.

        A longer draft would see as exact a block that plain decoding has quantized by then.
        """
        rows = self.exact[0].shape[0] if self.exact else None
        draft = self.residual + self.group - (self.newest - self.due * self.group)
        return Sizes(rows, self.length, self.nbytes, draft)

    def flush(self, blocks: int) -> None:
        """Quantize the oldest `blocks` groups of exact tokens; existing codes are not touched."""
        n = blocks * self.group
        # (B,Hk,blocks,group,D) ×2
        grouped = (x[:, :, :n].unflatten(2, (blocks, self.group)) for x in self.exact)
        (k_codes, *k_scales), (v_codes, *v_scales) = (
            scheme.encode(x) for scheme, x in zip(self.schemes, grouped, strict=True)
        )
        self._rollback(
            Held(
                exact=tuple(x[:, :, n:].clone() for x in self.exact),
                codes=_cat(self.codes, (k_codes, v_codes)),
                scales=_cat(self.scales, (*k_scales, *v_scales)),
                blocks=self.blocks + [self.group] * blocks,
                start=self.start,
            )
        )

    def dense(self) -> tuple[Tensor, ...]:
        """(B,Hk,S,D) ×2 in the dtype of the appended tensors."""
        parts = [part for part in (self.start, self.decoded(), self.exact) if part]
        if len(parts) == 1:
            return self.exact
        dtype = self.exact[0].dtype
        return tuple(torch.cat([x.to(dtype) for x in x], 2) for x in zip(*parts, strict=True))

    def decoded(self) -> tuple[Tensor, ...]:
        """(B,Hk,q,D) ×2 of the quantized tokens; () if there are none."""
        if not self.blocks:
            return ()
        # output_size and non_blocking: no wait for the GPU.
        times = torch.tensor(self.blocks).to(self.codes[0].device, non_blocking=True)
        each = [
            x.repeat_interleave(times, dim=2, output_size=sum(self.blocks)) if per == "block" else x
            for x, per in zip(self.scales, self.units, strict=True)
        ]  # (B,Hk,q,…) each
        keys, values = self.schemes
        n = len(keys.units)
        return keys.decode(self.codes[0], *each[:n]), values.decode(self.codes[1], *each[n:])

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        older = self.length - self.newest
        if n == 0:
            self._rollback(Held())
        elif n < older:
            self._rollback(self._first(n))
        elif n < self.length:
            self.exact = tuple(x[:, :, : n - older].clone() for x in self.exact)

    def _first(self, n: int) -> Held:
        """The first n tokens, none of them in `exact`; the last block may become shorter."""
        exact = tuple(x[:, :, :0].clone() for x in self.exact)
        start = tuple(x[:, :, :n].clone() for x in self.start)
        q = n - self.started  # quantized tokens
        if q <= 0:
            return Held(exact=exact, start=start)
        blocks = list(self.blocks)
        while sum(blocks) - blocks[-1] >= q:
            blocks.pop()
        blocks[-1] -= sum(blocks) - q
        rows = {"token": q, "block": len(blocks)}
        scales = zip(self.scales, self.units, strict=True)
        return Held(
            exact=exact,
            codes=tuple(x[:, :, :q].clone() for x in self.codes),
            scales=tuple(x[:, :, : rows[per]].clone() for x, per in scales),
            blocks=blocks,
            start=start,
        )

    def _snapshot(self) -> Held:
        return Held(self.exact, self.codes, self.scales, self.blocks, self.start)

    def _rollback(self, snapshot: Held) -> None:
        # One statement, so an interrupt never leaves codes without their scales.
        self.exact, self.codes, self.scales, self.blocks, self.start = snapshot

    def fork(self) -> Self:
        copy = type(self)(*self.schemes, self.group, self.residual, self.first)
        copy._rollback(self._snapshot())
        return copy

    def reorder(self, index: Index) -> None:
        self._rollback(
            Held(
                exact=tuple(x[index] for x in self.exact),
                codes=tuple(x[index] for x in self.codes),
                scales=tuple(x[index] for x in self.scales),
                blocks=self.blocks,
                start=tuple(x[index] for x in self.start),
            )
        )

    def state(self) -> dict[str, Tensor]:
        if not self.exact:
            return {}
        state = {"blocks": torch.tensor(self.blocks, dtype=torch.int64)}
        for name in TENSORS:
            tensors = getattr(self, name)
            state |= {f"{name}{i}": tensor for i, tensor in enumerate(tensors)}
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        if not state:
            self._rollback(Held())
            return
        held = {
            name: tuple(state[f"{name}{i}"] for i in range(len(state)) if f"{name}{i}" in state)
            for name in TENSORS
        }
        blocks = state["blocks"].tolist()
        if blocks and len(held["scales"]) != len(self.units):
            raise CacheError(
                f"{len(held['scales'])} scales per layer: these schemes have {len(self.units)}"
            )
        self._rollback(Held(**held, blocks=blocks))

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        return sum(x.nbytes for x in (*self.start, *self.exact, *self.codes, *self.scales))


def _cat(old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each old tensor followed by the new one, along the tokens; `old` may be empty."""
    if not old:
        return tuple(new)
    return tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
