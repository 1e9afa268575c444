"""The inputs of a recorded step of notebook 16. Needs no Triton."""

from dataclasses import dataclass, field

import torch


@dataclass
class Inputs:
    """Tensors at fixed addresses, for `rows` rows: everything that changes from step to step."""

    rows: int
    pages: int  # of the longest table
    tokens: torch.Tensor = field(init=False)  # (B,) int64
    positions: torch.Tensor = field(init=False)  # (B,) int64
    lengths: torch.Tensor = field(init=False)  # (B,) int32, with the new token; 0: unused row
    table: torch.Tensor = field(init=False)  # (B,pages) int32

    def __post_init__(self):
        self.tokens, self.positions = (torch.zeros(self.rows, dtype=torch.int64) for _ in "tp")
        self.lengths = torch.zeros(self.rows, dtype=torch.int32)
        self.table = torch.zeros(self.rows, self.pages, dtype=torch.int32)
