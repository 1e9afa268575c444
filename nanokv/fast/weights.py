"""The matrices (N,K) that a decode step reads, in four formats.

    fp32, bf16   4 or 2 bytes per weight: nn.Linear's tensor, shared with the plain model
    int8         1 byte per weight and one fp32 scale per row                           ≈ 8.0 bits
    int4         half a byte per weight and one bf16 scale per 32 weights of a row      = 4.5 bits

Few rows of activations (decode, short prompts) go to the native kernels, or to torch's low-bit
operators if there is no compiler. Many rows (prefill) go to torch's matrix product. For it, codes
are converted to a dense matrix just before use, and bf16 weights to fp32 if the processor has no
bf16 products.
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

# Number of weights of a row that share a scale in int4, and of activations in int8 and int4.
GROUP = 32
# Number of codes converted to a dense matrix at a time: 32 MB of bf16. With fewer columns torch's
# product is slower.
UNPACKED = 1 << 24
# Number of bf16 weights converted to fp32 at a time: 4 MB, which stay in the processor's cache
# until the product reads them.
WIDENED = 1 << 20
# The int4 scales tried for a group are its value of largest magnitude divided by each of these.
DIVISORS = (-8.0, -8.4, -7.6, -7.2, 7.0)


class Addressed(nn.Module):
    """A module that caches values derived from the addresses or contents of its tensors.

    The cached values are dropped whenever the tensors change. ConfigError for a change of dtype.
    """

    made = "struct", "torch_form", "most_rows", "product_dtype"  # cached properties

    def forget(self) -> None:
        for name in self.made:
            self.__dict__.pop(name, None)

    # Called by .to(), .half(), .share_memory() and the like.
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
    """x (…,K) → x·wᵀ + bias (…,N) in fp32. `dense` returns the weights as a tensor (N,K)."""

    format: Any  # a key of native.FORMATS
    fewest_rows = 32  # of activations in a kernel call
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
        """The matrix as the kernels read it, made once."""
        return native.Weight(
            data=native.pointer(self.weight),
            scale=native.pointer(self.scale),
            bias=native.pointer(self.bias),
            N=self.N,
            K=self.K,
            format=native.FORMATS[self.format],
            width=self.N,
        )

    @functools.cached_property
    def most_rows(self) -> int:
        """The most rows of activations for the kernels, or for torch's low-bit operators.

        For more rows torch's blocked product is faster. More than 32 rows go to the kernels only if
        the model is in bf16, because the kernels then round the activations to bf16.
        """
        kernels = native.kernels()
        if kernels is None or self.dtype == torch.float32:
            return 32
        return kernels.most_rows(ctypes.byref(self.struct))

    @functools.cached_property
    def product_dtype(self) -> torch.dtype:
        """The dtype of torch's product: the model's, or fp32 if there are no bf16 instructions."""
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
        """(first, end) of the rows of each kernel call.

        A call does at most 2³² multiplications, so that Ctrl-C takes effect soon. But it has at
        least `fewest_rows` if there are as many, because fewer rows take no less time.
        """
        step = max(self.fewest_rows, 2**32 // (self.N * self.K))
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def product(self, x: Tensor) -> Tensor:
        """The product by torch, over dense weights, in `product_dtype`.

        A call of torch does at most 2³² multiplications, so that Ctrl-C takes effect soon.
        """
        flat = x.to(self.product_dtype).reshape(-1, self.K)  # (rows,K)
        columns = []
        for first, weight in self.parts():  # (n,K)
            bias = None
            if self.bias is not None:
                bias = self.bias[first : first + len(weight)].to(weight.dtype)
            rows = flat.split(max(1, 2**32 // weight.numel()))
            # The cast is for torch.autocast, under which the result has another dtype.
            y = [F.linear(part, weight, bias).to(weight.dtype) for part in rows]
            columns.append(y[0] if len(y) == 1 else torch.cat(y))  # (rows,n)
        whole = columns[0] if len(columns) == 1 else torch.cat(columns, 1)  # (rows,N)
        return whole.view(*x.shape[:-1], -1)

    def parts(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, dense rows (n,K)) for all rows. A part may overwrite the part before it."""
        dtype = self.product_dtype
        kernels = None
        if self.weight.device.type == "cpu" and self.weight.dtype != dtype:
            kernels = native.kernels()
        if kernels is None:
            yield 0, self.dense().to(dtype)
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
        """The product by torch's fastest operator for few rows, without bias."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that one decode step reads."""
        return sum(t.nbytes for t in (self.weight, self.scale, self.bias) if t is not None)


class Dense(Matrix):
    """fp32 or bf16, as loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        N, K = weight.shape
        super().__init__(N, K, bias)
        # Another tensor over the same memory as the plain model's.
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
    """w ≈ codes · scale with one scale per row: |error| ≤ largest magnitude of the row / 254."""

    format = "int8"
    scale: Tensor  # (N,) fp32

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        check_width(weight, GROUP)
        N, K = weight.shape
        super().__init__(N, K, bias)
        scale = weight.abs().amax(1).float() / 127  # (N,)
        # Contiguous rows, as the kernels read them.
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        # 4,096 rows at a time: an fp32 copy of a whole vocabulary would take gigabytes.
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
    """w ≈ (code − 8) · scale with codes 0 … 15 and one scale per 32 weights.

    The low halves of 32 bytes hold group 2g, the high halves group 2g+1. A row with an odd number
    of groups is padded with a group of zeros.
    """

    format = "int4"
    scale: Tensor  # (N,K/32) bf16

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        check_width(weight, GROUP)
        N, K = weight.shape
        super().__init__(N, K, bias)
        packed = []
        scale = []
        for part in weight.split(1024):  # the search for scales makes several fp32 copies
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
        """(N,g,32) int8 in −8 … 7, padded to an even number of groups."""
        pairs = self.weight.unflatten(1, (-1, GROUP))  # (N,g/2,32)
        return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1, 2).to(torch.int8) - 8

    def dense(self) -> Tensor:
        weight = self.codes().to(self.dtype) * self.scale[..., None].to(self.dtype)  # (N,g,32)
        return weight.flatten(1)[:, : self.K]

    @functools.cached_property
    def torch_form(self) -> tuple[Tensor, Tensor]:
        """The codes in the layout of torch's operator: a second copy, made on first use."""
        return torch_ops.pack_int4(self.codes().flatten(1), self.scale)

    def few(self, x: Tensor) -> Tensor:
        return torch_ops.linear_int4(F.pad(x, (0, self.K % (2 * GROUP))), self.torch_form, GROUP)


def quantize_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    """(…,32) → codes uint8 (…,32) in 0 … 15 and scale bf16 (…).

    Of a few scales, the one with the least squared error is taken. Most scales map the value of
    largest magnitude to −8, the wider end of the range, or near it.
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
    """(…,32) and a scale (…,1) → squared error (…,1), codes (…,32) in −8 … 7, scale as bf16."""
    scale = scale.bfloat16().float()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (x / scale).round_().clamp_(-8, 7)
    error = (codes * scale - x).square().sum(-1, keepdim=True)
    return error, codes, scale


def check_dense(config: Config) -> None:
    """ConfigError for experts or a family's own layers, which neither kernels nor compiled blocks support.

    The weights that a token needs are known only in the middle of a layer.
    """
    if config.family.own_parts:
        raise ConfigError(
            f"{config.family.title} has layers of its own kinds, "
            "which neither GPU kernels nor compiled blocks compute",
            hint="use the plain model: leave out --fast (or nanokv.optimize)",
        )
    if config.experts:
        raise ConfigError(
            f"{config.family.title} has experts, "
            "and neither kernels nor compiled blocks route tokens to them",
            hint="use the plain model: leave out --fast (or nanokv.optimize)",
        )


def check_width(weight: Tensor, multiple: int) -> None:
    """ConfigError unless the inputs form whole groups of `multiple`."""
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
MakeMatrix = Callable[..., Matrix]  # (weight, bias or None)


def formats(dtype: torch.dtype, weights: str | None) -> tuple[str, MakeMatrix, MakeMatrix]:
    """The format, and what makes a matrix and the table of the vocabulary of a model's tensor.

    `weights` as in `optimize`; None: the model's own. ConfigError for a dtype without kernels and
    for an unknown format.
    """
    own = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    name = str(dtype).removeprefix("torch.")
    if dtype not in own:
        raise ConfigError(
            f"there are no kernels for a model in {name}", hint="load it in bfloat16 or float32"
        )
    if weights is None:
        weights = own[dtype]
    known = own[dtype], "int8", "int4"
    if weights not in known:
        raise ConfigError(
            f"weights={weights!r} is not a format for a model in {name}",
            hint=f"one of: {', '.join(known)}; load the model in another dtype for the rest",
        )
    if weights in ("int8", "int4"):
        return weights, FORMATS[weights], Int8
    return weights, Dense, Dense
