"""A layer of experts in the fast model: attention by kernels, and the chosen experts one by one.

The router's choice is known only in the middle of a layer, so a decode step is not one kernel call,
and torch attends. The step reads the weights of the chosen experts alone.
"""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.config import Config, Experts
from nanokv.fast.model import Layer, Way
from nanokv.fast.weights import Matrix
from nanokv.model import MixtureOfExperts


class Expert(nn.Module):
    """A small MLP: x (n,C) → down(silu(gate(x)) · up(x)), (n,C) fp32."""

    def __init__(self, gate_up: Matrix, down: Matrix):
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)  # (n,I) ×2
        return self.down(F.silu(gate) * up)


class Mixture(MixtureOfExperts):
    """The plain model's mixture over a router (E,C) and fast experts."""

    def __init__(self, sizes: Experts, router: Matrix, experts: Iterable[Expert]):
        super(MixtureOfExperts, self).__init__()  # of the plain modules none is made
        own: Any = self  # its modules are of other classes
        self.sizes = sizes
        own.gate = router
        self.experts = nn.ModuleList(experts)


class ExpertBlock(Layer):
    """A layer whose MLP is a mixture of experts."""

    def __init__(
        self,
        config: Config,
        qkv: Matrix,
        o: Matrix,
        mixture: Mixture,
        norms: dict[str, Tensor | None],
    ):
        super().__init__(config, qkv, o, norms)
        self.mlp = mixture

    def add_mlp(self, kernels: ctypes.CDLL, x: Tensor, way: Way) -> None:
        x += self.mlp_path(self.rows_normed(kernels, x, self.mlp_norm, x.dtype))

    def mlp_path(self, x: Tensor) -> Tensor:
        return self.mlp(x)  # (B,T,C)
