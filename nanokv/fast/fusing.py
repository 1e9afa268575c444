"""The weights of several products as one: q, k and v, and gate and up. Half as many products, the same bytes."""

import torch


def fused(*linears):
    """Weights and biases one below the other; the parts become views, so that they are not stored twice.

    Each part stays the same Parameter: whoever trains it, or holds it, goes on.
    """
    weights = [part.weight.detach() for part in linears]
    weight = side_by_side(weights) if len(weights) > 1 else None
    weight = torch.cat(weights) if weight is None else weight  # (ΣN,K)
    bias = None if linears[0].bias is None else torch.cat([part.bias for part in linears])
    start = 0
    for part in linears:
        part.weight.data = weight[start : start + part.out_features]
        start += part.out_features
    return weight, bias


def side_by_side(weights):
    """One tensor over these (N,K) if they lie one below the other in one storage, as prefetch.py puts them; or None."""
    first, at = weights[0], weights[0].data_ptr()
    storage, rows = first.untyped_storage().data_ptr(), 0
    for weight in weights:
        inside = weight.untyped_storage().data_ptr() == storage and weight.is_contiguous()
        if not inside or weight.data_ptr() != at or weight.dtype != first.dtype:
            return None
        at, rows = at + weight.nbytes, rows + weight.shape[0]
    return first.as_strided((rows, first.shape[1]), first.stride())
