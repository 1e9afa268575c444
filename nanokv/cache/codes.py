"""Numbers in few bits: codes with a scale and an offset, the levels of Lloyd and Max, packing, and
the rotations that are applied before.
"""

import functools
import itertools
import math

import torch
from torch import Tensor

ULP = 2**-10  # fp16: the relative distance between neighbouring numbers
TINY = 2**-24  # fp16: the smallest positive number
LARGEST = 65_000.0  # the largest |x| for quantize: low and scale must stay below fp16's 65,504


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """x → (codes uint8, scale, low), asymmetric along `dim`: x ≈ codes · scale + low.

    The error is at most scale / 2. Scale and low are fp16 and computed before the codes. Low is
    rounded down and scale up: rounded to nearest, they could leave the smallest and the largest
    value outside the codes' range by more than half a step.
    """
    x = x.float()
    low = x.amin(dim, keepdim=True)
    low = (low - low.abs() * ULP - TINY).half()
    scale = ((x.amax(dim, keepdim=True) - low.float()) / (2**bits - 1) * (1 + ULP) + TINY).half()
    codes = ((x - low.float()) / scale.float()).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, low


def dequantize(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """fp32 values; `scale` and `low` broadcast along the dimension that quantize reduced."""
    return codes * scale.float() + low.float()


def pack(codes: Tensor, bits: int) -> Tensor:
    """(…,D) codes of `bits` bits → (…,D·bits/8) bytes. 3 bits are stored as 2 bits and 1 bit."""
    if bits == 3:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), -1)
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (-1, per_byte))  # (…,D/n,n)
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    return (parts << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack."""
    if bits == 3:
        low, high = packed.split((packed.shape[-1] // 3 * 2, packed.shape[-1] // 3), -1)
        return unpack(low, 2) | unpack(high, 1) << 2
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


@functools.cache
def lloyd_max(bits: int, device: torch.device | None = None) -> Tensor:
    """(2^bits,): the levels with the least squared error for a standard normal variable, ascending.

    Each level is the mean of its cell, and cells end half-way between levels (Max 1960, Lloyd
    1982). The mean of a cell has a closed form; no sample is drawn.
    """
    n = 2**bits
    levels = [4 * (i + 0.5) / n - 2 for i in range(n)]
    for _ in range(1000):  # 4 bits: to 1e-7 of the fixed point
        ends = [
            -math.inf,
            *((a + b) / 2 for a, b in itertools.pairwise(levels)),
            math.inf,
        ]
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in ends]
        below = [(1 + math.erf(x / math.sqrt(2))) / 2 for x in ends]
        levels = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(n)]
    with torch.inference_mode(False):
        return torch.tensor(levels, device=device)


def lloyd_max_error(bits: int) -> float:
    """The mean squared error of these levels for a standard normal variable.

    The least error makes each level the mean of its cell, so it is 1 − E[level²] (Max 1960).
    """
    levels = lloyd_max(bits).double().tolist()
    ends = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    below = [(1 + math.erf(x / math.sqrt(2))) / 2 for x in ends]
    shares = (high - low for low, high in itertools.pairwise(below))
    return 1 - sum(share * level**2 for share, level in zip(shares, levels, strict=True))


@functools.cache
def random_rotation(D: int, seed: int, device: torch.device | None = None) -> Tensor:
    """(D,D), orthogonal; x @ R turns, and R.T turns back. The same seed gives the same matrix.

    Random signs before Hadamard's matrix if D is a power of two, else the Q of a random matrix.
    """
    draw = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False):
        if D & (D - 1) == 0:
            signs = torch.randint(0, 2, (D, 1), generator=draw) * 2.0 - 1.0
            return (signs * hadamard(D)).to(device)
        q, r = torch.linalg.qr(torch.randn(D, D, generator=draw))
        return (q * r.diagonal().sign()).to(device)  # these signs make every rotation as likely


@functools.cache
def random_projection(D: int, seed: int, device: torch.device | None = None) -> Tensor:
    """(D,D) standard normal numbers, independent of random_rotation's."""
    draw = torch.Generator().manual_seed(seed + 2**32)
    with torch.inference_mode(False):
        return torch.randn(D, D, generator=draw).to(device)


@functools.cache
def hadamard(D: int, device: torch.device | None = None) -> Tensor:
    """(D,D), orthogonal and symmetric, so it is its own inverse.

    Block diagonal: Sylvester's matrix, whose size is the largest power of two that divides D.
    """
    with torch.inference_mode(False):
        block = torch.ones(1, 1, device=device)
        while D % (2 * block.shape[0]) == 0:
            block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
        return torch.block_diag(*[block / block.shape[0] ** 0.5] * (D // block.shape[0]))
