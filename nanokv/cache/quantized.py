"""Keys and values in 8, 4 or 2 bits, as KIVI does (Liu et al. 2024, arXiv 2402.02750).

Keys have a few channels that are far larger than the rest, so each channel of a block of `group`
tokens gets a scale; values have no such channels, so each token gets a scale. The newest tokens
stay exact: a block is quantized once, when an append finds `residual + group` exact tokens. The
tokens of an append stay exact until the next append, so repeating a failed forward gives the same
answer. With `rotate`, a Hadamard rotation spreads the large channels first. Every append returns a
dense copy (2·S·Hk·D values per layer): this saves memory, not bandwidth.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Index, Sizes
from nanokv.cache.checks import check_append
from nanokv.cache.codes import LARGEST, dequantize, hadamard, pack, quantize, unpack
from nanokv.errors import CacheError


class Held(NamedTuple):
    """All that one layer holds; replaced as a whole, never written in place. Empty at first."""

    exact: tuple[Tensor, ...] = ()  # keys, values: (B,Hk,r,D) each
    codes: tuple[Tensor, ...] = ()  # keys, values: (B,Hk,q,D·bits/8) uint8 each
    # scale and low of keys: (B,Hk,blocks,D) each; scale and low of values: (B,Hk,q,1) each
    scales: tuple[Tensor, ...] = ()
    blocks: list[int] = []  # tokens per block of keys: `group`, or fewer after truncate


class QuantizedCache(LayerCache):
    """Packed codes and scales of the old tokens; the newest, at least `residual`, are exact."""

    exact: tuple[Tensor, ...]  # these four are those of Held
    codes: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    blocks: list[int]

    def __init__(self, k_bits: int, v_bits: int, group: int, residual: int, rotate: str):
        self.bits = k_bits, v_bits
        self.group = group
        self.residual = residual
        self.rotate = rotate
        self._rollback(Held())

    @property
    def length(self) -> int:  # type: ignore[override]  # read-only
        return sum(self.blocks) + self.newest

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_append(k, v, self.exact[0] if self.exact else None, self._expected)
        self.check_range(k, v)
        if self.due:
            self.flush(self.due)
        self.exact = _cat(self.exact, (k, v))
        keys, values = self.dense()  # (B,Hk,S,D) ×2
        return keys, values

    def check_range(self, k: Tensor, v: Tensor) -> None:
        """CacheError for NaN and for values beyond the range of fp16 scales, which ends at 65,504.

        Reading the largest value makes a GPU synchronise twice per layer.
        """
        for name, x in (("keys", self.rotated(k)), ("values", v)):
            largest = x.abs().max().item()
            if not largest <= LARGEST:  # NaN too
                raise CacheError(
                    f"cannot quantize {name} of size {largest:g}: "
                    f"{LARGEST:g} is the largest that fp16 scales allow",
                    hint="use a cache that keeps them as they are",
                )

    def rotated(self, k: Tensor) -> Tensor:
        """Keys in the basis in which they are quantized; the rotation is its own inverse."""
        if self.rotate != "hadamard":
            return k
        return k.float() @ hadamard(k.shape[-1], k.device)

    @property
    def newest(self) -> int:
        """Exact tokens."""
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
        k_bits, v_bits = self.bits
        keys, values = (x[:, :, :n] for x in self.exact)  # (B,Hk,n,D)
        grouped = self.rotated(keys).unflatten(2, (blocks, self.group))  # (B,Hk,blocks,group,D)
        k, k_scale, k_low = quantize(grouped, k_bits, dim=3)  # one scale per channel and block
        v, v_scale, v_low = quantize(values, v_bits, dim=3)  # one scale per token
        codes = pack(k.flatten(2, 3), k_bits), pack(v, v_bits)
        scales = k_scale.squeeze(3), k_low.squeeze(3), v_scale, v_low
        self._rollback(
            Held(
                exact=tuple(x[:, :, n:].clone() for x in self.exact),
                codes=_cat(self.codes, codes),
                scales=_cat(self.scales, scales),
                blocks=self.blocks + [self.group] * blocks,
            )
        )

    def dense(self) -> tuple[Tensor, ...]:
        """(B,Hk,S,D) ×2 in the dtype of the appended tensors."""
        if not self.blocks:
            return self.exact
        k_bits, v_bits = self.bits
        k_codes, v_codes = self.codes
        k_scale, k_low, v_scale, v_low = self.scales
        # output_size and non_blocking: no wait for the GPU.
        times = torch.tensor(self.blocks).to(k_scale.device, non_blocking=True)
        k_scale, k_low = (
            x.repeat_interleave(times, dim=2, output_size=sum(self.blocks))
            for x in (k_scale, k_low)
        )  # (B,Hk,q,D)
        k = self.rotated(dequantize(unpack(k_codes, k_bits), k_scale, k_low))
        v = dequantize(unpack(v_codes, v_bits), v_scale, v_low)
        return tuple(
            torch.cat((old.to(new.dtype), new), 2)
            for old, new in zip((k, v), self.exact, strict=True)
        )

    def truncate(self, n: int) -> None:
        self._check_truncate(n)
        quantized = sum(self.blocks)
        if n == 0:
            self._rollback(Held())
        elif n < quantized:
            self._rollback(self._first(n))
        elif n < self.length:
            self.exact = tuple(x[:, :, : n - quantized].clone() for x in self.exact)

    def _first(self, n: int) -> Held:
        """The first n tokens, all of them quantized; the last block may become shorter."""
        blocks = list(self.blocks)
        while sum(blocks) - blocks[-1] >= n:
            blocks.pop()
        blocks[-1] -= sum(blocks) - n
        sizes = len(blocks), len(blocks), n, n
        scales = zip(self.scales, sizes, strict=True)
        return Held(
            exact=tuple(x[:, :, :0].clone() for x in self.exact),
            codes=tuple(x[:, :, :n].clone() for x in self.codes),
            scales=tuple(x[:, :, :size].clone() for x, size in scales),
            blocks=blocks,
        )

    def _snapshot(self) -> Held:
        return Held(self.exact, self.codes, self.scales, self.blocks)

    def _rollback(self, snapshot: Held) -> None:
        # One statement, so an interrupt never leaves codes without their scales.
        self.exact, self.codes, self.scales, self.blocks = snapshot

    def fork(self) -> Self:
        copy = type(self)(*self.bits, self.group, self.residual, self.rotate)
        copy._rollback(self._snapshot())
        return copy

    def reorder(self, index: Index) -> None:
        self._rollback(
            Held(
                exact=tuple(x[index] for x in self.exact),
                codes=tuple(x[index] for x in self.codes),
                scales=tuple(x[index] for x in self.scales),
                blocks=self.blocks,
            )
        )

    def state(self) -> dict[str, Tensor]:
        if not self.exact:
            return {}
        state = {"blocks": torch.tensor(self.blocks, dtype=torch.int64)}
        groups = {"exact": self.exact, "codes": self.codes, "scales": self.scales}
        for name, tensors in groups.items():
            state |= {f"{name}{i}": tensor for i, tensor in enumerate(tensors)}
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        if not state:
            self._rollback(Held())
            return
        exact, codes, scales = (
            tuple(state[key] for key in sorted(state) if key.startswith(name))
            for name in ("exact", "codes", "scales")
        )
        self._rollback(Held(exact, codes, scales, state["blocks"].tolist()))

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        return sum(x.nbytes for x in (*self.exact, *self.codes, *self.scales))


def _cat(old: Sequence[Tensor], new: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each old tensor followed by the new one, along the tokens; `old` may be empty."""
    if not old:
        return tuple(new)
    return tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
