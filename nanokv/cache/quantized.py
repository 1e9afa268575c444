"""Keys and values in 8, 4 or 2 bits, as KIVI does (Liu et al. 2024, arXiv 2402.02750).

Keys have a few channels that are far larger than the rest, so each channel of a block of `group`
tokens gets a scale; values have no such channels, so each token gets a scale. The newest tokens
stay exact: a block is quantized once, when an append finds `residual + group` exact tokens. The
tokens of an append stay exact until the next append, so repeating a failed forward gives the same
answer. With `rotate`, a Hadamard rotation spreads the large channels first. Every append returns a
dense copy (2·S·Hk·D values per layer): this saves memory, not bandwidth.
"""

import torch

from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import Sizes
from nanokv.cache.checks import check_append
from nanokv.cache.codes import LARGEST, dequantize, hadamard, pack, quantize, unpack
from nanokv.errors import CacheError


class QuantizedCache(LayerCache):
    """Packed codes and scales of the old tokens; the newest, at least `residual` of them, are exact."""

    def __init__(self, k_bits: int, v_bits: int, group: int, residual: int, rotate: str):
        self.bits, self.group, self.residual, self.rotate = (
            (k_bits, v_bits),
            group,
            residual,
            rotate,
        )
        self.clear()

    def clear(self):
        """exact   (keys, values), each (B,Hk,r,D)
        codes   (keys, values), each (B,Hk,q,D·bits/8) uint8
        scales  keys: (B,Hk,blocks,D) ×2 (scale, low); values: (B,Hk,q,1) ×2
        blocks  tokens in each block of keys: `group`, or fewer in one that was truncated"""
        self._rollback(((), (), (), []))

    @property
    def length(self) -> int:  # type: ignore[override]  # read-only
        return sum(self.blocks) + self.newest

    def append(self, k, v):
        check_append(k, v, self.exact[0] if self.exact else None, self._expected)
        self.check_range(k, v)
        if self.due:
            self.flush(self.due)
        self.exact = _cat(self.exact, (k, v))
        return self.dense()

    def check_range(self, k, v):
        """fp16 scales end at 65,504; the look at the largest value makes a GPU wait once per layer."""
        for name, x in (("keys", self.rotated(k)), ("values", v)):
            largest = x.abs().max().item()
            if not largest <= LARGEST:  # NaN too
                raise CacheError(
                    f"cannot quantize {name} of size {largest:g}: "
                    f"{LARGEST:g} is the largest that fp16 scales allow",
                    hint="use a cache that keeps them as they are",
                )

    def rotated(self, k):
        """In the basis in which keys are quantized; its own inverse."""
        return k.float() @ hadamard(k.shape[-1], k.device) if self.rotate == "hadamard" else k

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
        """A guess ends where plain decoding would quantize a block that the guess sees exactly."""
        guess = self.residual + self.group - (self.newest - self.due * self.group)
        return Sizes(
            self.exact[0].shape[0] if self.exact else None, self.length, self.nbytes, guess
        )

    def flush(self, blocks: int):
        """Quantize the oldest so many groups of exact tokens; codes that exist already are not touched."""
        n = blocks * self.group
        k, v = (x[:, :, :n] for x in self.exact)  # (B,Hk,n,D)
        k = self.rotated(k)
        # A channel of a block.
        k, k_scale, k_low = quantize(k.unflatten(2, (blocks, self.group)), self.bits[0], dim=3)
        v, v_scale, v_low = quantize(v, self.bits[1], dim=3)  # a token
        codes = _cat(self.codes, (pack(k.flatten(2, 3), self.bits[0]), pack(v, self.bits[1])))
        scales = _cat(self.scales, (k_scale.squeeze(3), k_low.squeeze(3), v_scale, v_low))
        exact = tuple(x[:, :, n:].clone() for x in self.exact)
        self._rollback((exact, codes, scales, self.blocks + [self.group] * blocks))

    def dense(self):
        """(B,Hk,S,D) ×2 in the dtype of what was appended."""
        if not self.blocks:
            return self.exact
        k_scale, k_low, v_scale, v_low = self.scales
        # output_size and non_blocking: no wait for the GPU.
        times = torch.tensor(self.blocks).to(k_scale.device, non_blocking=True)
        k_scale, k_low = (
            x.repeat_interleave(times, dim=2, output_size=sum(self.blocks))
            for x in (k_scale, k_low)
        )  # (B,Hk,q,D)
        k = self.rotated(dequantize(unpack(self.codes[0], self.bits[0]), k_scale, k_low))
        v = dequantize(unpack(self.codes[1], self.bits[1]), v_scale, v_low)
        return tuple(
            torch.cat((old.to(new.dtype), new), 2)
            for old, new in zip((k, v), self.exact, strict=True)
        )

    def truncate(self, n: int):
        self._check_truncate(n)
        quantized = sum(self.blocks)
        if n == 0:
            self.clear()
        elif n < quantized:
            blocks = list(self.blocks)
            while sum(blocks) - blocks[-1] >= n:
                blocks.pop()
            blocks[-1] -= sum(blocks) - n
            sizes = len(blocks), len(blocks), n, n
            scales = tuple(
                x[:, :, :size].clone() for x, size in zip(self.scales, sizes, strict=True)
            )
            exact, codes = (
                tuple(x[:, :, :end].clone() for x in g)
                for g, end in ((self.exact, 0), (self.codes, n))
            )
            self._rollback((exact, codes, scales, blocks))
        elif n < self.length:
            self.exact = tuple(x[:, :, : n - quantized].clone() for x in self.exact)

    def _snapshot(self):
        # Nothing of it is ever written in place.
        return self.exact, self.codes, self.scales, self.blocks

    def _rollback(self, snapshot):
        # In one line: they never contradict each other.
        self.exact, self.codes, self.scales, self.blocks = snapshot

    def fork(self):
        copy = type(self)(*self.bits, self.group, self.residual, self.rotate)
        copy._rollback(self._snapshot())
        return copy

    def reorder(self, index):
        *groups, blocks = self._snapshot()
        self._rollback((*(tuple(x[index] for x in group) for group in groups), blocks))

    def state(self) -> dict:
        groups = {"exact": self.exact, "codes": self.codes, "scales": self.scales}
        state = {f"{name}{i}": x for name, tensors in groups.items() for i, x in enumerate(tensors)}
        return state | {"blocks": torch.tensor(self.blocks, dtype=torch.int64)} if state else {}

    def restore(self, state: dict):
        names = ("exact", "codes", "scales")
        groups = (
            tuple(state[key] for key in sorted(state) if key.startswith(name)) for name in names
        )
        self._rollback((*groups, state["blocks"].tolist() if state else []))

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read-only
        return sum(x.nbytes for x in (*self.exact, *self.codes, *self.scales))


def _cat(old: tuple, new: tuple) -> tuple:
    return tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True)) if old else new
