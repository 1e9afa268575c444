"""What one torch has and another lacks: operators for one row of activations, and an option of torch.compile.

Without native kernels nn.Linear is far from the memory's speed for a single row: bf16 weights are re-laid out at every
call, fp32 goes through a general matrix product. torch has faster operators, some of them private; each is used in this
file alone, falls back to a plain product where it is missing, and is compared with one in the tests, so that a release
that changes it is noticed. `make compat` runs the package on the oldest and the newest torch.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (…,K) · weightᵀ in their common dtype. bf16: torch's own dot products; fp32: oneDNN's inner product."""
    if x.numel() == weight.shape[1] and weight.dtype == torch.bfloat16:
        # oneDNN re-lays the whole weight out at every call.
        with torch.backends.mkldnn.flags(enabled=False):
            return F.linear(x, weight)
    if weight.dtype == torch.float32 and has(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x (…,K) with int8 codes (N,K) and scales (N,) → fp32 (…,N)."""
    rows = x.reshape(-1, x.shape[-1])
    if has(torch.ops.aten, "_weight_int8pack_mm"):  # in fp32 it is ten times slower
        y = torch.ops.aten._weight_int8pack_mm(rows.bfloat16(), codes, scale.bfloat16())
    else:
        y = F.linear(rows.bfloat16(), codes.bfloat16()) * scale.bfloat16()
    return y.float().reshape(*x.shape[:-1], -1)


def pack_int4(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes (N,K) in −8 … 7 and scales (N,K/32) → what linear_int4 takes."""
    if has(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and len(codes) % 16 == 0:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes + 8).int(), 1)
        pairs = torch.stack((scale, torch.zeros_like(scale)), -1)  # (N,K/32,2): scale, offset
        return packed, pairs.transpose(0, 1).contiguous()
    return codes, scale


def linear_int4(x: Tensor, packed: tuple[Tensor, Tensor], group: int) -> Tensor:
    """x (…,K) with weights from pack_int4 → fp32 (…,N)."""
    weight, scale = packed
    rows = x.reshape(-1, x.shape[-1]).bfloat16()
    if weight.dtype == torch.uint8:  # packed
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, group, scale)
    else:
        groups = weight.bfloat16().unflatten(1, (-1, group))  # (N,K/32,32)
        y = F.linear(rows, (groups * scale[..., None]).flatten(1))
    return y.float().reshape(*x.shape[:-1], -1)


def compile_alone(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """torch.compile with a count of recompiles of its own: it gives up after 8, one for each width of a prompt.

    Up to torch 2.12 the count belongs to the function's code, so a plain function gets a copy of it.
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
    """Does this torch have the operator?"""
    try:
        return getattr(namespace, name) is not None
    except (AttributeError, RuntimeError):
        return False
