"""Checks that all ranks compute the same, by comparing the inputs of 64 forwards at a time.

Ranks take the same decisions because they have the same logits, bit by bit: an all_reduce gives
every rank the same sums. If that fails (another library on one machine, a clock, a random number),
the ranks would continue with different tokens and add up results of different texts. The answer
would be fluent and wrong.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from nanokv.errors import ParallelError
from nanokv.parallel.group import Alone, Group, byte_tensor

EVERY = 64  # forwards between two comparisons; a comparison sends 8·64 bytes


class Watch:
    """A forward pre-hook that records the inputs and compares them with those of other ranks."""

    def __init__(self, ranks: Group | Alone, every: int = EVERY):
        self.ranks = ranks
        self.every = every
        self.step = 0
        # (tokens, start_pos) of each forward. Reading them here would wait for the device.
        self.recent: list[tuple[Tensor, Any]] = []

    def __call__(self, model: nn.Module, inputs: tuple) -> None:
        """inputs: tokens (B,T), cache, start_pos, attend."""
        self.step += 1
        self.recent.append((inputs[0], inputs[2]))
        if len(self.recent) == self.every:
            self.compare()

    def compare(self) -> None:
        """ParallelError on every rank if one differs from rank 0, naming the first such forward."""
        marks = torch.stack([mark(tokens, start) for tokens, start in self.recent])  # (N,8)
        first = self.step - len(self.recent) + 1
        self.recent.clear()
        everyone = self.ranks.gather(marks)  # (n,N,8)
        differs = (everyone != everyone[:1]).any(-1)  # (n,N)
        if differs.any():
            at = int(differs.any(0).nonzero()[0])
            ranks = ", ".join(str(rank) for rank in differs[:, at].nonzero().flatten().tolist())
            raise ParallelError(
                f"the ranks have drifted apart: in step {first + at} rank {ranks} has other "
                "tokens or lengths than rank 0",
                "the same versions, files and flags on every rank",
            )


def mark(tokens: Tensor, start_pos: Any) -> Tensor:
    """A hash of these tokens at these positions, (8,) uint8."""
    text = f"{tuple(tokens.shape)} {tokens.tolist()} {torch.as_tensor(start_pos).tolist()}"
    return byte_tensor(hashlib.sha256(text.encode()).digest()[:8])
