"""globals_restored(): undo what a graded test replaced in torch or nanokv, before the next test."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def globals_restored() -> Iterator[None]:
    """Restore the attributes of torch's and nanokv's modules and of nanokv's classes when the block
    ends, and torch's default dtype and grad mode.

    Only the attributes are restored, not the objects: an entry added to a dict of nanokv stays, and
    so does any other setting of torch.
    """
    before = [(place, dict(vars(place))) for place in places()]
    dtype = torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        for place, names in before:
            restore(place, names)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


def places() -> list:
    """Modules and classes whose attributes a test could replace."""
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "nanokv"]
    classes = {
        value for module in ours for value in vars(module).values() if inspect.isclass(value)
    }
    torches = [torch, torch.Tensor, torch.nn, torch.nn.functional, torch.testing]
    return [*torches, *ours, *(cls for cls in classes if cls.__module__.startswith("nanokv"))]


def restore(place: Any, names: dict[str, Any]) -> None:
    """Set attributes that are missing or changed, and delete new ones except imported modules."""
    now = dict(vars(place))
    for name, value in names.items():
        if now.get(name, names) is not value and not is_dunder(name):
            setattr(place, name, value)
    for name in now.keys() - names.keys():
        if not is_dunder(name) and not inspect.ismodule(now[name]):
            delattr(place, name)


def is_dunder(name: str) -> bool:
    """Python itself adds and removes __annotations__, __abstractmethods__ and the like."""
    return name.startswith("__") and name.endswith("__")
