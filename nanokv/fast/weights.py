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

import torch
import torch.nn.functional as F
from torch import nn

from nanokv.errors import ConfigError
from nanokv.fast import native, torch_ops

# Weights of a row that share a scale in int4, and activations that share one in int8 and int4.
GROUP = 32
# Weights made dense at a time: 32 MB of bf16, and torch's product of fewer columns is slower.
UNPACKED = 1 << 24
# Weights made fp32 at a time: 4 MB, which the product finds in the processor's cache.
WIDENED = 1 << 20


class Addressed(nn.Module):
    """A module whose tensors kernels know by their addresses: what was made from these is dropped when they change."""

    made = "struct", "torch_form", "most_rows", "product_dtype"  # cached properties

    def forget(self):
        for name in self.made:
            self.__dict__.pop(name, None)

    def _apply(self, function, recurse=True):  # behind .to(), .half(), .share_memory() …
        for tensor in self.buffers(recurse=False):
            dtype = function(tensor.new_empty(0)).dtype
            if dtype != tensor.dtype:
                raise ConfigError(
                    f"an optimized model keeps its dtypes: {tensor.dtype} was to become {dtype}",
                    hint="load the model in that dtype, then optimize it",
                )
        self.forget()
        return super()._apply(function, recurse)

    def _load_from_state_dict(self, *args, **kwargs):
        self.forget()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self):  # for copy and pickle
        return {name: value for name, value in self.__dict__.items() if name not in self.made}


class Matrix(Addressed):
    """x (…,K) → x·wᵀ + bias (…,N) in fp32. `dense` gives the weights back as a tensor (N,K)."""

    format: object  # what the kernels call it

    def __init__(self, N: int, K: int, bias=None):
        super().__init__()
        self.N, self.K = N, K
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous())
        self.scale = None

    @functools.cached_property
    def struct(self):
        """What a kernel is given; made once."""
        address, bias, scale = (native.pointer(t) for t in (self.weight, self.bias, self.scale))
        return native.Weight(address, scale, bias, self.N, self.K, native.FORMATS[self.format])

    @functools.cached_property
    def most_rows(self):
        """Rows of activations up to which the kernels win, or torch's operators for few; above, torch's blocked product
        does. More than 32 rows are rounded to bf16 only where the model is in bf16."""
        kernels = native.kernels()
        if kernels is None or self.dtype == torch.float32:
            return 32
        return kernels.most_rows(ctypes.byref(self.struct))

    @functools.cached_property
    def product_dtype(self):
        """What torch multiplies many rows in: the weights' dtype, or fp32 where the processor multiplies no bf16."""
        kernels = (
            native.kernels()
            if self.weight.device.type == "cpu" and self.dtype == torch.bfloat16
            else None
        )
        return self.dtype if kernels is None or native.multiplies_bf16(kernels) else torch.float32

    def forward(self, x):
        rows = x.numel() // self.K
        kernels = native.kernels()
        if self.weight.device.type != "cpu" or rows > self.most_rows:
            return self.product(x).float()
        if kernels is None:
            y = self.few(x)
            return y if self.bias is None else y + self.bias
        x = x.float().contiguous()
        y = x.new_empty(*x.shape[:-1], self.N)
        for first, end in self.at_once(rows):
            to, from_ = y.data_ptr() + 4 * first * self.N, x.data_ptr() + 4 * first * self.K
            kernels.linear(to, from_, end - first, ctypes.byref(self.struct))
        return y

    def at_once(self, rows: int):
        """(first, end) of the rows that go into one product: at most 2³² multiplications, so that Ctrl-C is heard, but
        32 rows, which are as fast as fewer."""
        step = max(32, 2**32 // (self.N * self.K))
        return [(first, min(first + step, rows)) for first in range(0, rows, step)]

    def product(self, x):
        """The same by torch, over dense weights and in `product_dtype`; at most 2³² multiplications in one call."""
        columns, flat = [], x.to(self.product_dtype).reshape(-1, self.K)  # (rows,K)
        for first, weight in self.parts():  # (n,K)
            bias = (
                None
                if self.bias is None
                else self.bias[first : first + len(weight)].to(weight.dtype)
            )
            rows = flat.split(max(1, 2**32 // weight.numel()))
            # torch.autocast gives another dtype.
            y = [F.linear(part, weight, bias).to(weight.dtype) for part in rows]
            columns.append(y[0] if len(y) == 1 else torch.cat(y))  # (rows,n)
        return (columns[0] if len(columns) == 1 else torch.cat(columns, 1)).view(*x.shape[:-1], -1)

    def parts(self):
        """(first row, those rows as a dense tensor), all of them one after the other; each is read before the next."""
        dtype = self.product_dtype
        kernels = (
            native.kernels()
            if self.weight.device.type == "cpu" and self.weight.dtype != dtype
            else None
        )
        if kernels is None:
            yield 0, self.dense()
            return
        step = max(1, (UNPACKED if dtype == self.dtype else WIDENED) // self.K)
        room = torch.empty(min(step, self.N), self.K, dtype=dtype)
        for first in range(0, self.N, step):
            part = room[: self.N - first]  # (n,K)
            kernels.dense_rows(
                part.data_ptr(),
                ctypes.byref(self.struct),
                first,
                first + len(part),
                native.FORMATS[dtype],
            )
            yield first, part

    def few(self, x):
        """The fastest operator of torch for a row or two, without bias."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that one decode step reads."""
        return sum(t.nbytes for t in (self.weight, self.scale, self.bias) if t is not None)


class Dense(Matrix):
    """fp32 or bf16, as loaded."""

    def __init__(self, weight, bias=None):
        super().__init__(*weight.shape, bias)
        # The memory is shared, the tensor is not.
        self.register_buffer("weight", weight.detach().contiguous())

    @property
    def dtype(self):
        return self.weight.dtype

    format = dtype

    def dense(self):
        return self.weight

    def rows(self, index):
        return F.embedding(index, self.weight).float()

    def few(self, x):
        return torch_ops.linear(x.to(self.weight.dtype), self.weight).float()


class Int8(Matrix):
    """w ≈ codes · scale with one scale per row: |error| ≤ largest of the row / 254."""

    format = "int8"

    def __init__(self, weight, bias=None):
        check_width(weight, GROUP)
        super().__init__(*weight.shape, bias)
        scale = weight.abs().amax(1).float() / 127  # (N,)
        # Row after row, as kernels read.
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        # An fp32 copy of a whole vocabulary would cost gigabytes.
        for part in range(0, self.N, 4096):
            s = scale[part : part + 4096, None].clamp(min=1e-30)
            codes[part : part + 4096] = (
                (weight[part : part + 4096].float() / s).round_().to(torch.int8)
            )
        del self.scale
        self.register_buffer("weight", codes)
        self.register_buffer("scale", scale)
        self.dtype = weight.dtype

    def dense(self):
        return self.weight.to(self.dtype) * self.scale[:, None].to(self.dtype)  # (N,K)

    def rows(self, index):
        return F.embedding(index, self.weight).float() * self.scale[index][..., None]

    def few(self, x):
        return torch_ops.linear_int8(x, self.weight, self.scale)


class Int4(Matrix):
    """w ≈ (code − 8) · scale, codes 0 … 15, one scale for 32 weights; bytes hold group 2g low and group 2g+1 high.

    A row with an odd number of groups is filled up with one of zeros.
    """

    format = "int4"

    def __init__(self, weight, bias=None):
        check_width(weight, GROUP)
        super().__init__(*weight.shape, bias)
        packed, scale = [], []
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

    def codes(self):
        """(N,g,32) int8 in −8 … 7, filled up to an even number of groups."""
        pairs = self.weight.unflatten(1, (-1, GROUP))  # (N,g/2,32)
        return torch.stack((pairs & 15, pairs >> 4), 2).flatten(1, 2).to(torch.int8) - 8

    def dense(self):
        # Gives (N,K).
        return (self.codes().to(self.dtype) * self.scale[..., None].to(self.dtype)).flatten(1)[
            :, : self.K
        ]

    @functools.cached_property
    def torch_form(self):
        """The layout of torch's own operator, made when it is needed: a second copy of the codes."""
        return torch_ops.pack_int4(self.codes().flatten(1), self.scale)

    def few(self, x):
        return torch_ops.linear_int4(F.pad(x, (0, self.K % (2 * GROUP))), self.torch_form, GROUP)


def quantize_int4(x):
    """(…,32) → codes uint8 (…,32) in 0 … 15, scale bf16 (…): of a few scales the one with the least squared error.

    The value of largest magnitude becomes −8, the end of the range that reaches further, or a little beyond it.
    """
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))  # (…,1) with its sign
    best_error = best_codes = best_scale = None
    for divisor in (-8.0, -8.4, -7.6, -7.2, 7.0):
        scale = (largest / divisor).bfloat16().float()
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = (x / scale).round_().clamp_(-8, 7)
        error = (codes * scale - x).square().sum(-1, keepdim=True)
        if best_error is None:
            best_error, best_codes, best_scale = error, codes, scale
        else:
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_codes, best_scale = (
                torch.where(better, codes, best_codes),
                torch.where(better, scale, best_scale),
            )
    return (best_codes + 8).to(torch.uint8), best_scale.squeeze(-1).bfloat16()


def check_dense(config) -> None:
    """ConfigError for a mixture of experts: which weights a token needs is known in the middle of a layer only."""
    if config.experts:
        raise ConfigError(
            f"{config.family.title} has experts, and neither kernels nor compiled blocks route tokens to them",
            hint="use the plain model: leave out --fast (or nanokv.optimize)",
        )


def check_width(weight, multiple: int):
    """Codes come in groups."""
    if weight.shape[1] % multiple:
        raise ConfigError(
            f"a matrix of {weight.shape[0]} × {weight.shape[1]} has no whole groups of {multiple} inputs",
            hint='use weights="bf16" or "fp32" for this model',
        )


FORMATS = {"fp32": Dense, "bf16": Dense, "int8": Int8, "int4": Int4}
