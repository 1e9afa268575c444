"""Inputs on which a learner's function is tried: first small and round ones, so that the first that fails can be typed
in and followed by hand, then any.

    inputs = lambda rng: (rng.randint(1, 200), tensor(rng, 3, 4))     an exercise writes this once, for all sizes
"""

import random

from nanokv.school.course.feedback import typed


class Growing(random.Random):
    """random.Random whose `randint` stays at the low end of its range while `size`, a share of it, is below 1."""

    size = 1.0

    def randint(self, a: int, b: int) -> int:
        return super().randint(a, min(b, a + max(1, round(self.size * (b - a)))))


def drawn(inputs, seed: str, number: int) -> list[tuple]:
    """`inputs(rng)` for a size that grows over the first half; those that are short to type come first."""
    rng, found = Growing(seed), []
    for i in range(number):
        rng.size = min(1.0, 2 * i / number)
        found.append(inputs(rng))
    return sorted(found, key=lambda arguments: len(typed(arguments)))


def tensor(rng, *shape):
    """Whole numbers from −2 to 2 while inputs are small, normal ones after that."""
    import torch

    source = torch.Generator().manual_seed(rng.getrandbits(32))
    if getattr(rng, "size", 1.0) < 1:
        return torch.randint(-2, 3, shape, generator=source).float()
    return torch.randn(shape, generator=source)
