"""Joins the weights of several products into one matrix: q, k and v, and gate and up.

A layer then needs fewer products and reads the same bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def fused(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weights (ΣN,K) and the biases (ΣN,), or None, of the modules, stacked by rows.

    Each module's weight becomes a view of the result, so nothing is stored twice. The Parameter
    objects stay the same, so an optimizer that holds them can still train them.
    """
    weights = [part.weight.detach() for part in linears]
    weight = side_by_side(weights)
    if weight is None or len(weights) == 1:
        weight = torch.cat(weights)  # (ΣN,K)
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([part.bias for part in linears])
    start = 0
    for part in linears:
        part.weight.data = weight[start : start + part.out_features]
        start += part.out_features
    return weight, bias


def side_by_side(weights: Sequence[Tensor]) -> Tensor | None:
    """One tensor (ΣN,K) over these weights (N,K), if they are adjacent in one storage; else None.

    weights_loader/prefetch.py loads them that way.
    """
    first = weights[0]
    storage = first.untyped_storage().data_ptr()
    address = first.data_ptr()
    rows = 0
    for weight in weights:
        inside = weight.untyped_storage().data_ptr() == storage and weight.is_contiguous()
        if not inside or weight.data_ptr() != address or weight.dtype != first.dtype:
            return None
        address += weight.nbytes
        rows += weight.shape[0]
    return first.as_strided((rows, first.shape[1]), first.stride())
