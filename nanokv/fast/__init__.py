"""Speed, in a place of its own: `optimize` turns a loaded model into one that decodes at the memory's speed.

It is imported on first use: building.py, which says whether there are kernels, is asked before torch is imported.
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
