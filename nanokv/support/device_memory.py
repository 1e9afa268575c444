"""Turns torch's out-of-memory error on a GPU into a short error with the numbers and a hint."""

import re
from typing import Any

import torch

from nanokv.errors import DeviceMemoryError

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LESS = "a smaller --context"
SMALLER = "--cache quantized:bits=8, or offloaded:to=host"


class full_memory_named:
    """A context for a forward in which torch.OutOfMemoryError becomes DeviceMemoryError.

    A class and not a generator, which would cost twice as much: 2 µs per step.
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
    """The error with the numbers of torch.OutOfMemoryError and the bytes of weights and cache."""
    held = {"weights": weight_bytes(model), "cache": 0}
    if cache is not None:
        held["cache"] = cache.nbytes
    parts = numbers_of(str(error))
    parts += [f"{name} {size(count)}" for name, count in held.items() if count]
    message = "the memory of the GPU is full"
    if parts:
        message += f": {', '.join(parts)}"
    return DeviceMemoryError(message, hint_for(model, held))


def numbers_of(text: str) -> list[str]:
    """The numbers in torch's message: ["20.00 GB asked", "1.23 GB free of 84.99 GB"]."""
    parts = []
    asked = amount(r"allocate ([\d.]+) (\w+)", text)
    if asked:
        parts.append(f"{size(asked)} asked")
    free = amount(r"capacity of .* of which ([\d.]+) (\w+)", text)
    whole = amount(r"capacity of ([\d.]+) (\w+)", text)
    if free is not None and whole:
        parts.append(f"{size(free)} free of {size(whole)}")
    elif free is not None:
        parts.append(f"{size(free)} free")
    return parts


def hint_for(model: Any, held: dict[str, int]) -> str:
    """The flags that reduce the largest of weights and cache."""
    flags = []
    if getattr(model, "dtype", torch.float32) == torch.float32:
        flags.append("--dtype bfloat16")
    flags.append(LESS)
    if held["cache"]:
        flags.append(SMALLER)
    if held["weights"] > held["cache"]:
        flags.append("a smaller model")
    return "; ".join(flags)


def weight_bytes(model: Any) -> int:
    """The bytes of all tensors. A tensor with two names counts once."""
    if model is None:
        return 0
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def amount(pattern: str, text: str) -> int | None:
    """The bytes of an amount such as "20.00 GiB" in the text; None if there is no match."""
    found = re.search(pattern, text)
    if found is None or found[2] not in UNITS:
        return None
    return int(float(found[1]) * UNITS[found[2]])


def size(count: int) -> str:
    """1.23 GB, 45.6 MB."""
    if count >= 1e9:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:,.1f} MB"
