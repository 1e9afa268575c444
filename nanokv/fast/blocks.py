"""Matrices in the blocks of a GGUF file, multiplied as they are stored.

    Q8_0                      32 weights with one scale                                8.5 bits
    Q4_0, Q5_0                32 weights with one scale                                4.5, 5.5
    Q4_1, Q5_1                32 weights with a scale and a least value                5, 6
    Q4_K, Q5_K               256 weights, a scale and a least value per 32             4.5, 5.5
    Q6_K                     256 weights, a scale per 16                               6.6

The kernels read the file's bytes (kernels/blocks.h; several rows: kernels/panels.h). They round
the activations of a few rows to 8 bits, as llama.cpp does, and those of more rows to bf16. A prompt
goes to torch's matrix product, over blocks turned into numbers. Without kernels the gguf package
turns them into numbers, which is slow.
"""

import ctypes
import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.errors import ConfigError
from nanokv.fast import native
from nanokv.fast.weights import Matrix

# Type → (weights of a block, bytes of a block).
SIZES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


class Blocks(Matrix):
    """Rows of blocks (N, bytes of a row) uint8 of one of the types in SIZES.

    `dtype`: of the model, and so of `dense`. ConfigError for another type or a part of a block.
    """

    fewest_rows = 256  # a call decodes all weights

    def __init__(self, blocks: Tensor, kind: str, dtype: torch.dtype, bias: Tensor | None = None):
        if kind not in SIZES:
            raise ConfigError(
                f"blocks of type {kind} have no kernels: {', '.join(SIZES)} have",
                hint="dequantize them",
            )
        weights, size = SIZES[kind]
        N, width = blocks.shape
        if blocks.dtype != torch.uint8 or width % size or not width:
            raise ConfigError(
                f"rows of {width} values of {blocks.dtype} are no blocks of type {kind}: "
                f"a block of {weights} weights has {size} bytes"
            )
        super().__init__(N, width // size * weights, bias)
        self.kind = kind
        self.format = kind.lower()
        self.dtype = dtype
        self.register_buffer("weight", blocks.contiguous())

    def dense(self) -> Tensor:
        return self.numbers(self.weight).to(self.dtype)

    def numbers(self, rows: Tensor) -> Tensor:
        """Rows of blocks (n, bytes of a row) → fp32 (n,K), by the kernels or the gguf package."""
        kernels = None
        if rows.device.type == "cpu":
            kernels = native.kernels()
        if kernels is None:
            return dequantized(rows, self.kind)
        rows = rows.contiguous()
        y = torch.empty(len(rows), self.K)
        struct = native.Weight.from_buffer_copy(self.struct)
        struct.data = rows.data_ptr()
        form = native.FORMATS[torch.float32]
        kernels.dense_rows(y.data_ptr(), ctypes.byref(struct), 0, len(rows), form)
        return y

    def rows(self, index: Tensor) -> Tensor:
        found = F.embedding(index, self.weight)  # (…, bytes of a row)
        return self.numbers(found.flatten(0, -2)).view(*index.shape, self.K)

    def few(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), dequantized(self.weight, self.kind))


def dequantized(rows: Tensor, kind: str) -> Tensor:
    """Rows of blocks (n, bytes of a row) uint8 → fp32 (n,K), by the gguf package."""
    import gguf

    known = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(rows.cpu().numpy(), known)).to(rows.device)


class Stacked(Matrix):
    """Matrices of one width, below each other: a product with all of them in one kernel call.

    Their formats may differ: files of 4 bits often give the values of attention 6.
    """

    def __init__(self, matrices: Sequence[Matrix]):
        super().__init__(sum(each.N for each in matrices), matrices[0].K)
        self.stack = nn.ModuleList(matrices)
        self.dtype = matrices[0].dtype

    @property
    def matrices(self) -> list[Matrix]:
        return cast(list[Matrix], list(self.stack))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # of the first matrix
        return self.matrices[0].weight

    @functools.cached_property
    def struct(self) -> native.Weight:
        """The first matrix's, which points to those of the others."""
        structs = [native.Weight.from_buffer_copy(each.struct) for each in self.matrices]
        for struct in structs:
            struct.width = self.N
        for struct, after in pairwise(structs):
            struct.next = ctypes.addressof(after)
            struct.after = after  # keeps it alive
        return structs[0]

    @functools.cached_property
    def most_rows(self) -> int:
        return min(each.most_rows for each in self.matrices)

    def product(self, x: Tensor) -> Tensor:
        return torch.cat([each.product(x) for each in self.matrices], -1)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for matrix in self.matrices:
            for first, part in matrix.parts():
                yield start + first, part
            start += matrix.N

    def dense(self) -> Tensor:
        return torch.cat([each.dense() for each in self.matrices])

    def few(self, x: Tensor) -> Tensor:
        return torch.cat([each(x) for each in self.matrices], -1)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.matrices)


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """The only matrix, or a Stacked of several."""
    if len(matrices) == 1:
        return matrices[0]
    return Stacked(matrices)
