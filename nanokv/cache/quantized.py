"""Keys and values in 8, 4 or 2 bits, as KIVI does (Liu et al. 2024, arXiv 2402.02750).

Keys have a few channels that are far larger than the rest, so each channel of a block of `group` tokens gets its own
scale; values have none, so each token gets one. The newest tokens stay exact: blocks are quantized once, when
`residual + group` exact tokens are there, and never again. A Hadamard rotation of the keys may spread the large
channels first. Every append hands out a dense copy (2·S·Hk·D values a layer): memory is saved, not bandwidth.
"""

import functools

import torch

from nanokv.cache.base import LayerCache, check_append

ULP, TINY = 2**-10, 2**-24  # fp16: relative distance of neighbours, and the smallest number


def quantize(x, bits: int, dim: int):
    """x → (codes uint8, scale, low), asymmetric along `dim`: x ≈ codes · scale + low, off by at most scale / 2.

    Scale and low are fp16, and made before the codes. Low is rounded down and scale up: to nearest, the smallest and
    the largest value could fall outside the codes' range by more than half a step.
    """
    x = x.float()
    low = x.amin(dim, keepdim=True)
    low = (low - low.abs() * ULP - TINY).half()
    scale = ((x.amax(dim, keepdim=True) - low.float()) / (2**bits - 1) * (1 + ULP) + TINY).half()
    codes = ((x - low.float()) / scale.float()).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, low


def dequantize(codes, scale, low):
    """fp32 values; `scale` and `low` broadcast over the dimension that they were taken along."""
    return codes * scale.float() + low.float()


def pack(codes, bits: int):
    """(…,D) codes of `bits` bits → (…,D·bits/8) bytes: 4-bit codes really take half a byte."""
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (-1, per_byte))  # (…,D/n,n)
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    return (parts << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed, bits: int):
    """The inverse of pack."""
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


@functools.cache
def hadamard(D: int, device=None):
    """(D,D) orthogonal and symmetric, so its own inverse: Sylvester's blocks of the largest power of two in D."""
    with torch.inference_mode(False):
        block = torch.ones(1, 1, device=device)
        while D % (2 * block.shape[0]) == 0:
            block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
        return torch.block_diag(*[block / block.shape[0] ** 0.5] * (D // block.shape[0]))


class QuantizedCache(LayerCache):
    """Packed codes and scales of the old tokens; the newest, at least `residual` of them, are exact."""

    def __init__(self, k_bits: int, v_bits: int, group: int, residual: int, rotate: str):
        self.bits, self.group, self.residual, self.rotate = (k_bits, v_bits), group, residual, rotate
        self.clear()

    def clear(self):
        self.exact = ()  # (keys, values), each (B,Hk,r,D)
        self.codes: tuple = ()  # (keys, values), each (B,Hk,q,D·bits/8) uint8
        self.scales: tuple = ()  # keys: (B,Hk,blocks,D) ×2 (scale, low); values: (B,Hk,q,1) ×2
        self.blocks: list[int] = []  # tokens in each block of keys: `group`, or fewer in one that was truncated

    @property
    def length(self) -> int:
        return sum(self.blocks) + (self.exact[0].shape[2] if self.exact else 0)

    @property
    def rows(self) -> int | None:
        return self.exact[0].shape[0] if self.exact else None

    def append(self, k, v):
        if self.exact:
            check_append(self.exact[0], k)
        self.exact = _cat(self.exact, (k, v))
        dense = self.dense()  # before the flush: the newest tokens are exact in the call that brings them
        blocks = (self.exact[0].shape[2] - self.residual) // self.group
        if blocks > 0:
            self.flush(blocks)
        return dense

    @property
    def rollback(self) -> int:
        """As long as nothing is quantized: codes stay codes, even if what came after them is taken back."""
        return max(0, self.residual + self.group - 1 - (self.exact[0].shape[2] if self.exact else 0))

    def flush(self, blocks: int):
        """Quantize the oldest so many groups of exact tokens; codes that exist already are not touched."""
        n = blocks * self.group
        k, v = (x[:, :, :n] for x in self.exact)  # (B,Hk,n,D)
        if self.rotate == "hadamard":
            k = k.float() @ hadamard(k.shape[-1], k.device)
        k, k_scale, k_low = quantize(k.unflatten(2, (blocks, self.group)), self.bits[0], dim=3)  # a channel of a block
        v, v_scale, v_low = quantize(v, self.bits[1], dim=3)  # a token
        self.codes = _cat(self.codes, (pack(k.flatten(2, 3), self.bits[0]), pack(v, self.bits[1])))
        self.scales = _cat(self.scales, (k_scale.squeeze(3), k_low.squeeze(3), v_scale, v_low))
        self.blocks += [self.group] * blocks
        self.exact = tuple(x[:, :, n:].clone() for x in self.exact)

    def dense(self):
        """(B,Hk,S,D) ×2 in the dtype of what was appended."""
        if not self.blocks:
            return self.exact
        k_scale, k_low, v_scale, v_low = self.scales
        times = torch.tensor(self.blocks, device=k_scale.device)
        k_scale, k_low = (x.repeat_interleave(times, dim=2) for x in (k_scale, k_low))  # (B,Hk,q,D)
        k = dequantize(unpack(self.codes[0], self.bits[0]), k_scale, k_low)
        v = dequantize(unpack(self.codes[1], self.bits[1]), v_scale, v_low)
        if self.rotate == "hadamard":
            k = k @ hadamard(k.shape[-1], k.device)
        return tuple(torch.cat((old.to(new.dtype), new), 2) for old, new in zip((k, v), self.exact, strict=True))

    def truncate(self, n: int):
        quantized = sum(self.blocks)
        if n == 0:
            self.clear()
        elif n < quantized:
            self.exact = tuple(x[:, :, :0].clone() for x in self.exact)
            while sum(self.blocks) - self.blocks[-1] >= n:
                self.blocks.pop()
            self.blocks[-1] -= sum(self.blocks) - n
            self.codes = tuple(x[:, :, :n].clone() for x in self.codes)
            sizes = len(self.blocks), len(self.blocks), n, n
            self.scales = tuple(x[:, :, :size].clone() for x, size in zip(self.scales, sizes, strict=True))
        elif n < self.length:
            self.exact = tuple(x[:, :, : n - quantized].clone() for x in self.exact)

    def fork(self):
        copy = QuantizedCache(*self.bits, self.group, self.residual, self.rotate)
        copy.exact, copy.codes, copy.scales, copy.blocks = self.exact, self.codes, self.scales, list(self.blocks)
        return copy  # tensors are shared: none is ever written in place

    def reorder(self, index):
        for name in ("exact", "codes", "scales"):
            setattr(self, name, tuple(x[index] for x in getattr(self, name)))

    def state(self) -> dict:
        groups = {"exact": self.exact, "codes": self.codes, "scales": self.scales}
        state = {f"{name}{i}": x for name, tensors in groups.items() for i, x in enumerate(tensors)}
        return state | {"blocks": torch.tensor(self.blocks, dtype=torch.int64)} if state else {}

    def restore(self, state: dict):
        self.clear()
        for name in ("exact", "codes", "scales"):
            setattr(self, name, tuple(state[key] for key in sorted(state) if key.startswith(name)))
        self.blocks = state["blocks"].tolist() if state else []

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.exact, *self.codes, *self.scales))


def _cat(old: tuple, new: tuple) -> tuple:
    return tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True)) if old else new
