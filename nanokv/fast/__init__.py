"""Speed, in a place of its own: `optimize` turns a loaded model into one that decodes at the memory's speed."""

from nanokv.fast.model import optimize

__all__ = ["optimize"]
