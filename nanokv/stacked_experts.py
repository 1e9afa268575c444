"""The mixture of experts of gpt-oss: biases, a clamped SwiGLU, and one tensor for all experts.

Reference: GptOssTopKRouter and GptOssExperts in modeling_gpt_oss.py of transformers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanokv.config import Experts
from nanokv.model import MixtureOfExperts

ALPHA = 1.702  # x · sigmoid(1.702 x) is close to GELU
LIMIT = 7.0


class StackedExperts(MixtureOfExperts):
    """A router sends each token through k of E MLPs: top-k, then a softmax over the chosen."""

    experts: Any  # a Stack

    def __init__(self, C: int, sizes: Experts):
        nn.Module.__init__(self)  # other parameters than the base class
        self.sizes = sizes
        self.router = nn.Linear(C, sizes.num_experts)
        self.experts = Stack(C, sizes.num_experts, sizes.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)  # (N,C), N = B·T tokens
        scores, chosen = self.router(rows).topk(self.sizes.num_experts_per_tok)  # (N,k) ×2
        weights = scores.softmax(-1)  # (N,k)
        y = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():  # weights of experts without tokens are not read
            # n tokens chose this expert: token `row` as its choice number `slot`.
            slot, row = torch.where(chosen.T == expert)  # (n,) ×2
            part = self.experts(rows[row], expert)  # (n,C)
            y.index_add_(0, row, part * weights[row, slot, None])
        return y.view_as(x)  # (B,T,C)


class Stack(nn.Module):
    """All experts of a layer. Matrices are (in, out), gate and up in turn: columns 0, 2, … gate."""

    def __init__(self, C: int, E: int, width: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(E, C, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(E, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(E, width, C))
        self.down_proj_bias = nn.Parameter(torch.empty(E, C))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """x (n,C) through one expert → (n,C)."""
        both = x @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]  # (n,2·width)
        return clamped_swiglu(both) @ self.down_proj[expert] + self.down_proj_bias[expert]  # (n,C)


def clamped_swiglu(both: Tensor) -> Tensor:
    """gate · sigmoid(ALPHA · gate) · (up + 1). (n,2·width), gate and up in turn → (n,width)."""
    gate = both[:, ::2].clamp(max=LIMIT)  # (n,width)
    up = both[:, 1::2].clamp(-LIMIT, LIMIT)  # (n,width)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
