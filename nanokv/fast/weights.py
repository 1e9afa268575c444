"""A matrix (N,K) as decoding reads it: fp32 and bf16 as they are, int8 and int4 as codes and scales.

    fp32, bf16   4 and 2 bytes per weight: nn.Linear's own tensor, shared with the plain model
    int8         1 byte per weight and one fp32 scale per row                            ≈ 8.0 bits
    int4         half a byte per weight and one bf16 scale for every 32 of a row      = 4.5 bits

Few rows of activations (decode, short prompts) go to the native kernels, or to torch's own low-bit operators where no
compiler is; many rows (prefill) go to torch's matrix product, over weights that are made dense for the moment of use,
and made fp32 where the processor does not multiply bf16.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.config import Config
from nanokv.errors import ConfigError
from nanokv.fast import native, torch_ops

# Weights of a row that share a scale in int4, and activations that share one in int8 and int4.
GROUP = 32
# Weights made dense at a time: 32 MB of bf16, and torch's product of fewer columns is slower.
UNPACKED = 1 << 24
# Weights made fp32 at a time: 4 MB, which the product finds in the processor's cache.
WIDENED = 1 << 20
# The scales that int4 tries for a group: its value of largest magnitude by each of these.
DIVISORS = (-8.0, -8.4, -7.6, -7.2, 7.0)


class Addressed(nn.Module):
    """A module whose tensors kernels know by their addresses: what was made from these is dropped when they change."""

    made = "struct", "torch_form", "most_rows", "product_dtype"  # cached properties

    def forget(self) -> None:
        for name in self.made:
            self.__dict__.pop(name, None)

    # Behind .to(), .half(), .share_memory() …
    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> "Addressed":
        for tensor in self.buffers(recurse=False):
            dtype = function(tensor.new_empty(0)).dtype
            if dtype != tensor.dtype:
                raise ConfigError(
                    f"an optimized model keeps its dtypes: {tensor.dtype} was to become {dtype}",
                    hint="load the model in that dtype, then optimize it",
                )
        self.forget()
        return super()._apply(function, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # for copy and pickle
        return {name: value for name, value in self.__dict__.items() if name not in self.made}


class Matrix(Addressed):
    """x (…,K) → x·wᵀ + bias (…,N) in fp32. `dense` gives the weights back as a tensor (N,K)."""

    format: Any  # what the kernels call it: "int8", "int4", a dtype
    dtype: torch.dtype  # of the model
    weight: Tensor  # (N,K), or codes
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, N: int, K: int, bias: Tensor | None = None):
        super().__init__()
        self.N = N
        self.K = K
        if bias is not None:
            bias = bias.detach().float().contiguous()
        self.register_buffer("bias", bias)
        self.scale = None

    @functools.cached_property
    def struct(self) -> native.Weight:
        """What a kernel is given; made once."""
        return native.Weight(
            data=native.pointer(self.weight),
            scale=native.pointer(self.scale),
            bias=native.pointer(self.bias),
            N=self.N,
            K=self.K,
            format=native.FORMATS[self.format],
        )

    @functools.cached_property
    def most_rows(self) -> int:
        """Rows of activations up to which the kernels win, or torch's operators for few; above, torch's blocked product
        does. More than 32 rows are rounded to bf16 only where the model is in bf16."""
        kernels = native.kernels()
        if kernels is None or self.dtype == torch.float32:
            return 32
        return kernels.most_rows(ctypes.byref(self.struct))

    @functools.cached_property
    def product_dtype(self) -> torch.dtype:
        """What torch multiplies many rows in: the weights' dtype, or fp32 where the processor multiplies no bf16."""
        if self.weight.device.type != "cpu" or self.dtype != torch.bfloat16:
            return self.dtype
        kernels = native.kernels()
        if kernels is None or native.multiplies_bf16(kernels):
            return self.dtype
        return torch.float32

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.K
        kernels = native.kernels()
        if self.weight.device.type != "cpu" or rows > self.most_rows:
            return self.product(x).float()
        if kernels is None:
            y = self.few(x)
            if self.bias is not None:
                y = y + self.bias
            return y
        x = x.float().contiguous()
        y = x.new_empty(*x.shape[:-1], self.N)
        for first, end in self.at_once(rows):
            output = y.data_ptr() + 4 * first * self.N
            input = x.data_ptr() + 4 * first * self.K
            kernels.linear(output, input, end - first, ctypes.byref(self.struct))
        return y

    def at_once(self, rows: int) -> list[tuple[int, int]]:
        """(first, end) of the rows that go into one product: at most 2³² multiplications, so that Ctrl-C is heard, but
        32 rows, which are as fast as fewer."""
        step = max(32, 2**32 // (self.N * self.K))
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def product(self, x: Tensor) -> Tensor:
        """The same by torch, over dense weights and in `product_dtype`; at most 2³² multiplications in one call."""
        flat = x.to(self.product_dtype).reshape(-1, self.K)  # (rows,K)
        columns = []
        for first, weight in self.parts():  # (n,K)
            bias = None
            if self.bias is not None:
                bias = self.bias[first : first + len(weight)].to(weight.dtype)
            rows = flat.split(max(1, 2**32 // weight.numel()))
            # torch.autocast gives another dtype.
            y = [F.linear(part, weight, bias).to(weight.dtype) for part in rows]
            columns.append(joined(y, 0))  # (rows,n)
        return joined(columns, 1).view(*x.shape[:-1], -1)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, those rows as a dense tensor), all of them one after the other; each is read before the next."""
        dtype = self.product_dtype
        kernels = None
        if self.weight.device.type == "cpu" and self.weight.dtype != dtype:
            kernels = native.kernels()
        if kernels is None:
            yield 0, self.dense()
            return
        most = UNPACKED if dtype == self.dtype else WIDENED
        step = max(1, most // self.K)
        room = torch.empty(min(step, self.N), self.K, dtype=dtype)
        matrix = ctypes.byref(self.struct)
        for first in range(0, self.N, step):
            part = room[: self.N - first]  # (n,K)
            end = first + len(part)
            kernels.dense_rows(part.data_ptr(), matrix, first, end, native.FORMATS[dtype])
            yield first, part

    def dense(self) -> Tensor:
        """The weights (N,K), in the model's dtype."""
        raise NotImplementedError

    def rows(self, index: Tensor) -> Tensor:
        """Rows `index` (…) of the weights, fp32 (…,K)."""
        raise NotImplementedError

    def few(self, x: Tensor) -> Tensor:
        """The fastest operator of torch for a row or two, without bias."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that one decode step reads."""
        return sum(t.nbytes for t in (self.weight, self.scale, self.bias) if t is not None)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts as one tensor, without a copy where there is one only."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Dense(Matrix):
    """fp32 or bf16, as loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        N, K = weight.shape
        super().__init__(N, K, bias)
        # The memory is shared, the tensor is not.
        self.register_buffer("weight", weight.detach().contiguous())

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # read only: as loaded
        return self.weight.dtype

    format = dtype

    def dense(self) -> Tensor:
        return self.weight

    def rows(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight).float()

    def few(self, x: Tensor) -> Tensor:
        return torch_ops.linear(x.to(self.weight.dtype), self.weight).float()


class Int8(Matrix):
    """w ≈ codes · scale with one scale per row: |error| ≤ largest of the row / 254."""

    format = "int8"
    scale: Tensor  # (N,) fp32

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        check_width(weight, GROUP)
        N, K = weight.shape
        super().__init__(N, K, bias)
        scale = weight.abs().amax(1).float() / 127  # (N,)
        # Row after row, as kernels read.
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        # An fp32 copy of a whole vocabulary would cost gigabytes.
        for first in range(0, self.N, 4096):
            part = slice(first, first + 4096)
            s = scale[part, None].clamp(min=1e-30)
            codes[part] = (weight[part].float() / s).round_().to(torch.int8)
        del self.scale
        self.register_buffer("weight", codes)
        self.register_buffer("scale", scale)
        self.dtype = weight.dtype

    def dense(self) -> Tensor:
        return self.weight.to(self.dtype) * self.scale[:, None].to(self.dtype)  # (N,K)

    def rows(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.weight).float() * self.scale[index][..., None]

    def few(self, x: Tensor) -> Tensor:
        return torch_ops.linear_int8(x, self.weight, self.scale)


class Int4(Matrix):
    """w ≈ (code − 8) · scale, codes 0 … 15, one scale for 32 weights; bytes hold group 2g low and group 2g+1 high.

    A row with an odd number of groups is filled up with one of zeros.
    """

    format = "int4"
    scale: Tensor  # (N,K/32) bf16

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        check_width(weight, GROUP)
        N, K = weight.shape
        super().__init__(N, K, bias)
        packed = []
        scale = []
        for part in weight.split(1024):  # searching for scales takes several fp32 copies
            part = F.pad(part.float(), (0, self.K % (2 * GROUP)))
            codes, s = quantize_int4(part.unflatten(1, (-1, GROUP)))  # (n,g,32), (n,g)
            pairs = codes.unflatten(1, (-1, 2))  # (n,g/2,2,32)
            packed.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1))  # (n,K/2)
            scale.append(s)
        del self.scale
        self.register_buffer("weight", torch.cat(packed))
        self.register_buffer("scale", torch.cat(scale))  # (N,K/32) bf16
        self.dtype = weight.dtype

    def codes(self) -> Tensor:
        """(N,g,32) int8 in −8 … 7, filled up to an even number of groups."""
        pairs = self.weight.unflatten(1, (-1, GROUP))  # (N,g/2,32)
        return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1, 2).to(torch.int8) - 8

    def dense(self) -> Tensor:
        weight = self.codes().to(self.dtype) * self.scale[..., None].to(self.dtype)  # (N,g,32)
        return weight.flatten(1)[:, : self.K]

    @functools.cached_property
    def torch_form(self) -> tuple[Tensor, Tensor]:
        """The layout of torch's own operator, made when it is needed: a second copy of the codes."""
        return torch_ops.pack_int4(self.codes().flatten(1), self.scale)

    def few(self, x: Tensor) -> Tensor:
        return torch_ops.linear_int4(F.pad(x, (0, self.K % (2 * GROUP))), self.torch_form, GROUP)


def quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """(…,32) → codes uint8 (…,32) in 0 … 15, scale bf16 (…): of a few scales the one with the least squared error.

    The value of largest magnitude becomes −8, the end of the range that reaches further, or a little beyond it.
    """
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))  # (…,1) with its sign
    best_error, best_codes, best_scale = rounded_int4(x, largest / DIVISORS[0])
    for divisor in DIVISORS[1:]:
        error, codes, scale = rounded_int4(x, largest / divisor)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_codes = torch.where(better, codes, best_codes)
        best_scale = torch.where(better, scale, best_scale)
    return (best_codes + 8).to(torch.uint8), best_scale.squeeze(-1).bfloat16()


def rounded_int4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(…,32) and a scale (…,1) → squared error (…,1), codes (…,32) in −8 … 7, scale as bf16 keeps it."""
    scale = scale.bfloat16().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (x / scale).round_().clamp_(-8, 7)
    error = (codes * scale - x).square().sum(-1, keepdim=True)
    return error, codes, scale


def check_dense(config: Config) -> None:
    """ConfigError for a mixture of experts: which weights a token needs is known in the middle of a layer only."""
    if config.experts:
        raise ConfigError(
            f"{config.family.title} has experts, and neither kernels nor compiled blocks route tokens to them",
            hint="use the plain model: leave out --fast (or nanokv.optimize)",
        )


def check_width(weight: Tensor, multiple: int) -> None:
    """Codes come in groups."""
    N, K = weight.shape
    if K % multiple:
        raise ConfigError(
            f"a matrix of {N} × {K} has no whole groups of {multiple} inputs",
            hint='use weights="bf16" or "fp32" for this model',
        )


FORMATS: dict[str, type[Dense] | type[Int8] | type[Int4]] = {
    "fp32": Dense,
    "bf16": Dense,
    "int8": Int8,
    "int4": Int4,
}
