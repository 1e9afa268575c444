"""Numbers in 8, 4 or 2 bits: codes with a scale and an offset, packing, and a Hadamard rotation."""

import functools

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
    """(…,D) codes of `bits` bits → (…,D·bits/8) bytes."""
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (-1, per_byte))  # (…,D/n,n)
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    return (parts << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack."""
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


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
