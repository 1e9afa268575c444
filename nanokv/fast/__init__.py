"""`optimize` turns a loaded model into one that decodes at the speed of the memory.

`batch_invariant` turns that model into one whose rows do not depend on other rows. Both are
imported on first use, because building.py must be importable without torch: the command line checks
whether kernels are built before it imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanokv.fast.invariant import batch_invariant
    from nanokv.fast.optimizing import optimize

__all__ = ["batch_invariant", "optimize"]


if not TYPE_CHECKING:
    HOME = {"batch_invariant": "invariant", "optimize": "optimizing"}

    def __getattr__(name: str) -> Any:
        if name not in HOME:
            raise AttributeError(f"module 'nanokv.fast' has no attribute {name!r}")
        return getattr(importlib.import_module(f"nanokv.fast.{HOME[name]}"), name)
