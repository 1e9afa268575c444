"""torch features that not every release has: operators for one row, and an option of compile.

For a single row nn.Linear is much slower than the memory allows: without native kernels it
converts the layout of bf16 weights at every call, and sends fp32 weights through a general matrix
product. torch has faster operators, some of them private. They are used only in this file. Each
one falls back to a plain product if it is missing, and a test compares it with a plain product,
which detects a release that changes it. `make compat` runs the package with the oldest and the
newest torch.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…,K) · weightᵀ (K,N) → (…,N) in their common dtype.

    One row of bf16 uses torch's dot products, fp32 uses oneDNN's inner product.
    """
    if x.numel() == weight.shape[1] and weight.dtype == torch.bfloat16:
        # oneDNN would convert the layout of the whole weight at every call.
        with torch.backends.mkldnn.flags(enabled=False):
            return F.linear(x, weight)
    if weight.dtype == torch.float32 and has(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (…,K) with int8 codes (N,K) and scales (N,) → fp32 (…,N)."""
    rows = x.reshape(-1, x.shape[-1])
    if has(torch.ops.aten, "_weight_int8pack_mm"):  # ten times slower in fp32, hence bf16
        y = torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), codes, scale.bfloat16())
    else:
        y = F.linear(rows.bfloat16(), codes.bfloat16()) * scale.bfloat16()
    return y.float().reshape(*x.shape[:-1], -1)


def pack_int4(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes (N,K) in −8 … 7 and scales (N,K/32) → the weights as linear_int4 takes them."""
    if has(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and len(codes) % 16 == 0:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes + 8).int(), 1)
        pairs = torch.stack((scale, torch.zeros_like(scale)), -1)  # (N,K/32,2): scale, offset
        return packed, pairs.transpose(0, 1).contiguous()
    return codes, scale


def linear_int4(x: Tensor, packed: tuple[Tensor, Tensor], group: int) -> Tensor:
    """x (…,K) with weights from pack_int4 → fp32 (…,N)."""
    weight, scale = packed
    rows = x.reshape(-1, x.shape[-1]).bfloat16()
    if weight.dtype == torch.uint8:  # packed by torch
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, group, scale)
    else:
        groups = weight.bfloat16().unflatten(1, (-1, group))  # (N,K/32,32)
        y = F.linear(rows, (groups * scale[..., None]).flatten(1))
    return y.float().reshape(*x.shape[:-1], -1)


def compile_alone(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """torch.compile with a separate recompile count for each call of this function.

    torch gives up after 8 recompiles, and each width of a prompt takes one. Up to torch 2.12 the
    count belongs to the code object of the function, so the function is copied with its code.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        how["isolate_recompiles"] = True
        return torch.compile(function, **how)
    if isinstance(function, types.FunctionType):
        function = types.FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__
        )
    return torch.compile(function, **how)


def has(namespace: Any, name: str) -> bool:
    """Whether this torch has the operator."""
    try:
        return getattr(namespace, name) is not None
    except (AttributeError, RuntimeError):
        return False
