"""Muon (Jordan et al. 2024) for many small matrices: torch.optim.Muon, a shape at a time.

Muon replaces the momentum of a matrix by the nearest orthogonal one, in five Newton-Schulz
iterations of three products each. torch does that matrix by matrix, in bf16. A CPU without bf16
instructions then takes four times as long for it as for the gradients of a batch of 4,096 tokens.
Here all matrices of one shape are one batch of products, in the format that the machine multiplies
fast.
"""

from collections import defaultdict

import torch
from torch import Tensor

Shape = tuple[int, int]


class Muon(torch.optim.Muon):
    """torch.optim.Muon with the Newton-Schulz iterations in `dtype`; its state is the same.

    Nesterov's momentum; the rate is scaled so that an update is as large as AdamW's
    (match_rms_adamw: Liu et al. 2025, arXiv:2502.16982).
    """

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float, dtype: torch.dtype):
        super().__init__(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw")
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            for matrices in by_shape(group["params"]):
                self._update(matrices, group)

    def _update(self, matrices: list[Tensor], group: dict) -> None:
        """Update N matrices of one shape (R,C)."""
        directions = torch.stack([self._momentum(matrix, group) for matrix in matrices])  # (N,R,C)
        coefficients = group["ns_coefficients"]
        updates = directions.to(self.dtype)
        updates = orthogonal(updates, coefficients, group["ns_steps"], group["eps"])
        rate = group["lr"] * 0.2 * max(matrices[0].shape) ** 0.5
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.add_(update, alpha=-rate)

    def _momentum(self, matrix: Tensor, group: dict) -> Tensor:
        """The direction of the update: the gradient, mixed with the mean of the earlier ones."""
        assert matrix.grad is not None  # by_shape leaves the others out
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        mean = state["momentum_buffer"]
        mean.lerp_(matrix.grad, 1 - group["momentum"])
        return matrix.grad.lerp(mean, group["momentum"])


def by_shape(matrices: list[Tensor]) -> list[list[Tensor]]:
    """The matrices that have a gradient, in lists of one shape each."""
    found: dict[Shape, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        if matrix.grad is not None:
            rows, columns = matrix.shape
            found[rows, columns].append(matrix)
    return list(found.values())


def orthogonal(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Nearly orthogonal matrices with the singular vectors of these (N,R,C).

    Each singular value s becomes a·s + b·s³ + c·s⁵, `steps` times. With Jordan's coefficients
    nearly all of them end between 0.5 and 1.5, which trains as well as 1.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # (N,r,s), r ≤ s: the smaller Gram matrix
    # Then no singular value is above 1.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT  # (N,r,r)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
