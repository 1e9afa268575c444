"""`optimize` turns a loaded model into one that decodes at the speed of the memory.

`optimize` is imported on first use, because building.py must be importable without torch: the
command line checks whether kernels are built before it imports torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanokv.fast.optimizing import optimize

__all__ = ["optimize"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "optimize":
            raise AttributeError(f"module 'nanokv.fast' has no attribute {name!r}")
        from nanokv.fast.optimizing import optimize

        return optimize
