"""Inputs on which a learner's function is tried.

The first are small, with round numbers, so that a failing one is easy to type in and to follow by
hand. An exercise writes one function for all sizes:

    inputs = lambda rng: (rng.randint(1, 200), tensor(rng, 3, 4))
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanokv.school.course.feedback import typed

if TYPE_CHECKING:
    import torch


class Growing(random.Random):
    """A random.Random whose `randint` draws from the lowest `size` (a share) of its range."""

    size = 1.0

    def randint(self, a: int, b: int) -> int:
        return super().randint(a, min(b, a + max(1, round(self.size * (b - a)))))


def drawn(inputs: Callable, seed: str, number: int) -> list[tuple]:
    """`number` draws of `inputs(rng)`, sorted by the length of their code.

    The size of the draws grows over the first half, and is full for the second.
    """
    rng = Growing(seed)
    found = []
    for i in range(number):
        rng.size = min(1.0, 2 * i / number)
        found.append(inputs(rng))
    return sorted(found, key=lambda arguments: len(typed(arguments)))


def tensor(rng: random.Random, *shape: int) -> "torch.Tensor":
    """A tensor of whole numbers from −2 to 2 while inputs are small, of normal numbers later."""
    import torch

    source = torch.Generator().manual_seed(rng.getrandbits(32))
    if getattr(rng, "size", 1.0) < 1:
        return torch.randint(-2, 3, shape, generator=source).float()
    return torch.randn(shape, generator=source)
