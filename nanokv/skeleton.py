"""A model without memory, to which loaded tensors are assigned: no weight exists twice, and none is drawn in vain."""

import torch
from torch.overrides import TorchFunctionMode

from nanokv.config import Config
from nanokv.model import Qwen3


class NotInitialised(TorchFunctionMode):
    """torch.nn.init does nothing. (On the meta device it would do nothing either, but import torch's compiler first:
    1.7 s.)"""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def skeleton(config: Config) -> Qwen3:
    """A Qwen3 on the meta device: every parameter has its name and shape, and no values."""
    with torch.device("meta"), NotInitialised():
        return Qwen3(config)
