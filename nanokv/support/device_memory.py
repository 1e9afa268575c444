"""The memory of a GPU is full: torch's paragraph becomes an error with the numbers and what helps."""

import re
from typing import Any

import torch

from nanokv.errors import DeviceMemoryError

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LESS = "a smaller --context"
SMALLER = "--cache quantized:bits=8, or offloaded:to=host"


class full_memory_named:
    """Around a forward: torch.OutOfMemoryError becomes DeviceMemoryError.

    A class, because a generator costs twice as much, 2 µs of each step.
    """

    __slots__ = "cache", "model"

    def __init__(self, model: Any, cache: Any = None):
        self.model = model
        self.cache = cache

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise full_memory(error, self.model, self.cache) from error


def full_memory(error: BaseException, model: Any = None, cache: Any = None) -> DeviceMemoryError:
    """What torch.OutOfMemoryError says, and what weights and cache hold."""
    text = str(error)
    asked, free = (
        amount(rf"{words} ([\d.]+) (\w+)", text)
        for words in ("allocate", "capacity of .* of which")
    )
    whole = amount(r"capacity of ([\d.]+) (\w+)", text)
    parts = [f"{size(asked)} asked"] if asked else []
    if free is not None:
        parts.append(f"{size(free)} free" + (f" of {size(whole)}" if whole else ""))
    held = {"weights": weight_bytes(model), "cache": 0 if cache is None else cache.nbytes}
    parts += [f"{name} {size(count)}" for name, count in held.items() if count]
    message = "the memory of the GPU is full" + (f": {', '.join(parts)}" if parts else "")
    return DeviceMemoryError(message, hint_for(model, held))


def hint_for(model: Any, held: dict[str, int]) -> str:
    """The flags that make smaller what is largest."""
    flags = [LESS, SMALLER] if held["cache"] else [LESS]
    if getattr(model, "dtype", torch.float32) == torch.float32:
        flags = ["--dtype bfloat16", *flags]
    if held["weights"] > held["cache"]:
        flags.append("a smaller model")
    return "; ".join(flags)


def weight_bytes(model: Any) -> int:
    """Of every tensor once, also where two names share it."""
    if model is None:
        return 0
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def amount(pattern: str, text: str) -> int | None:
    """Bytes of "20.00 GiB" behind these words; None where torch says nothing of the kind."""
    found = re.search(pattern, text)
    return int(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else None


def size(count: int) -> str:
    """1.23 GB, 45.6 MB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
