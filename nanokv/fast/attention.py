"""Attention of a decode step by a kernel, for blocks that no kernel computes whole.

It takes the place of attention.Decode, and reads keys and values where `append` left them. A window
is the first key that a row sees, and a sink is one more score when the parts of the keys are
merged: once per query. Whatever the kernel does not read goes to the plain attention.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from nanokv.attention import Attend, Decode
from nanokv.fast import native
from nanokv.sinks import with_sinks
from nanokv.windows import within


def by_kernel(attend: Attend) -> Attend:
    """`attend`, by the kernel if that computes the same: exactly a Decode without a mask."""
    if type(attend) is not Decode or vars(attend).get("mask") is not None:
        return attend
    if native.kernels() is None:
        return attend
    return KernelDecode(attend, attend)


class KernelDecode:
    """One query per row over the newest `width` keys, with a score per head beside theirs.

    `plain` computes the same by torch; `decode` says how many keys each row sees.
    """

    def __init__(
        self, decode: Decode, plain: Attend, width: int | None = None, sinks: Tensor | None = None
    ):
        self.decode = decode
        self.plain = plain
        self.width = width
        self.sinks = sinks

    def within(self, width: int) -> "KernelDecode":
        """The same in a layer with a window of `width` positions."""
        return KernelDecode(self.decode, within(self.plain, width), width, self.sinks)

    def with_sinks(self, sinks: Tensor) -> "KernelDecode":
        """The same with the score sinks[h] beside the keys' of head h."""
        return KernelDecode(self.decode, with_sinks(self.plain, sinks), self.width, sinks)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,1,D), k and v (B,Hk,S,D) → (B,H,1,D)."""
        rows = self.decode.rows
        if not readable(q, k, v) or (rows is not None and k.shape[2] > rows.max()):
            return self.plain(q, k, v)
        kernels: Any = native.kernels()
        B, H, _, D = q.shape
        Hk, S = k.shape[1:3]
        first = self.first(B, S)  # (B,)
        end = torch.full_like(first, S)  # (B,)
        pages = native.Pages(
            keys=k.data_ptr(),
            values=v.data_ptr(),
            page_stride=k.stride(0),
            head_stride=k.stride(1),
            page_size=S,
            lengths=end.data_ptr(),
            first=first.data_ptr(),
            format=native.FORMATS[k.dtype],
        )
        query = q.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        y = torch.empty_like(query)  # (B,H,1,D)
        sinks = None if self.sinks is None else self.sinks.detach().float().contiguous()
        addresses = ctypes.byref(pages), native.pointer(sinks)
        kernels.attend_step(y.data_ptr(), query.data_ptr(), B, H, Hk, D, *addresses)
        return y.to(q.dtype)

    def first(self, B: int, S: int) -> Tensor:
        """(B,) int32: the first of S keys that each row sees."""
        most = S if self.width is None else min(S, self.width)
        if self.decode.rows is None:
            return torch.full((B,), S - most, dtype=torch.int32)
        return S - self.decode.rows.clamp(max=most).to(torch.int32)


def readable(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel reads these: on the CPU, of one shape and dtype, each head's keys end to end."""
    B, H, T, D = q.shape
    if T != 1 or k.dim() != 4 or k.shape != v.shape or k.stride() != v.stride():
        return False
    if k.shape[0] != B or k.shape[3] != D or H % k.shape[1] or k.stride()[2:] != (D, 1):
        return False
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float32, torch.bfloat16):
        return False
    return q.device.type == k.device.type == v.device.type == "cpu"
