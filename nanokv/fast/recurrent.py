"""A decode step of the gated delta rule that reads and writes its state once.

The kernel (kernels/recurrent.cpp) writes the new state over the old one or into another tensor.
Without kernels the step is that of nanokv/recurrent.py.
"""

import torch
from torch import Tensor

from nanokv import recurrent
from nanokv.fast import native


def delta_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
) -> recurrent.Pair:
    """recurrent.gated_delta_steps for one token: the same arguments and results, a new S.

    The marks of a cache (cache/state.py) share the old one.
    """
    new = torch.empty_like(S)
    q, k, v, g, beta = (x[:, :, 0] for x in (q, k, v, g, beta))
    y = gated_delta_step(q, k, v, g, beta, S, new)  # (B,H,Dv)
    return y[:, :, None], new


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S: Tensor,
    new: Tensor | None = None,
) -> Tensor:
    """One token per row → y (B,H,Dv) in fp32. `new` becomes the state after S (B,H,Dk,Dv).

    None: S itself does. q, k (B,H,Dk) from recurrent.delta_keys, v (B,H,Dv), g and beta (B,H). No
    gradient. Raises ValueError if S or `new` is not contiguous fp32, or if the shapes do not fit.
    """
    new = S if new is None else new
    check(q, k, v, g, beta, new)
    check(q, k, v, g, beta, S)
    q, k, v, g, beta = (x.detach().float() for x in (q, k, v, g, beta))
    kernels = None
    if S.device.type == "cpu":
        kernels = native.kernels()
    if kernels is None:
        q, k, v, g, beta = (x[:, :, None] for x in (q, k, v, g, beta))
        y, after = recurrent.gated_delta_steps(q, k, v, g, beta, S)
        new.copy_(after)
        return y[:, :, 0]  # (B,H,Dv)
    parts = [x.contiguous() for x in (q, k, v, g, beta)]
    y = torch.empty_like(v, memory_format=torch.contiguous_format)  # (B,H,Dv)
    B, H, Dk, Dv = S.shape
    kernels.gated_delta_step(*map(native.pointer, (y, *parts, S, new)), B * H, Dk, Dv)
    return y


def check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> None:
    """ValueError for an S that the kernel cannot change, and for shapes that it would misread."""
    if S.dtype != torch.float32 or not S.is_contiguous():
        kind = "contiguous" if S.is_contiguous() else "not contiguous"
        raise ValueError(f"the state is {S.dtype} and {kind}: pass a contiguous fp32 tensor")
    B, H, Dk, Dv = S.shape
    expected = [(B, H, Dk), (B, H, Dk), (B, H, Dv), (B, H), (B, H)]
    found = [tuple(x.shape) for x in (q, k, v, g, beta)]
    if found != expected:
        raise ValueError(
            f"q, k, v, g and beta have the shapes {found}, but a state {tuple(S.shape)} needs "
            f"{expected}"
        )
