"""Matrices in the blocks of a GGUF file: quantized by the gguf package, or random blocks where it only reads a type."""

import gguf
import numpy
import torch

from nanokv.fast.blocks import SIZES, Blocks


def raw_blocks(type_: str, N: int, K: int, seed: int = 0) -> torch.Tensor:
    """(N, bytes of a row) uint8; values of about 1 in the small types, and of any sign in all."""
    rng = numpy.random.default_rng(seed)
    if not type_.endswith("_K"):
        values = rng.standard_normal((N, K), numpy.float32)
        return torch.from_numpy(
            gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_])
        ).clone()
    weights, size = SIZES[type_]
    raw = rng.integers(0, 256, (N, K // weights, size), numpy.uint8)
    # The scales are fp16: any bytes would make some of them NaN or infinite.
    scales = rng.uniform(0.001, 0.01, (N, K // weights, 2)).astype(numpy.float16).view(numpy.uint8)
    if type_ == "Q6_K":
        raw[..., 208:] = scales[..., :2]
    else:
        raw[..., :4] = scales
    return torch.from_numpy(raw.reshape(N, -1))


def matrix(type_: str, N: int, K: int, dtype=torch.float32, bias=None, seed: int = 0) -> Blocks:
    return Blocks(raw_blocks(type_, N, K, seed), type_, dtype, bias)


def widths(type_: str) -> list[int]:
    """Odd and even numbers of groups, and more than one step of the kernels."""
    return [256, 512, 768] if type_.endswith("_K") else [32, 64, 96, 288, 544]
