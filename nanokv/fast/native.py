"""Loads the kernels that building.py builds, and describes their arguments to ctypes.

If there are no kernels, `library()` returns None and the reason. A library is loaded only if it is
complete and lies in a folder that no other user can write to (private.py).
"""

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanokv.fast import building, private

if TYPE_CHECKING:
    from nanokv.cache import capabilities

FORMATS: dict[torch.dtype | str, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    "int8": 2,
    "int4": 3,
    # the types of GGUF files that have kernels
    "q4_0": 4,
    "q4_1": 5,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "q4_k": 9,
    "q5_k": 10,
    "q6_k": 11,
}
# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
POINTER = ctypes.c_void_p
LONG = ctypes.c_int64
INT = ctypes.c_int32
FLOAT = ctypes.c_float


class Weight(ctypes.Structure):
    """A matrix as the kernels read it. The module that made it keeps the memory alive.

    `next` points to a Weight with further rows, in a format of their own; `width` counts all rows.
    """

    _fields_ = [
        ("data", POINTER),
        ("scale", POINTER),
        ("bias", POINTER),
        ("N", LONG),
        ("K", LONG),
        ("format", INT),
        ("width", LONG),
        ("next", POINTER),
    ]


class Pages(ctypes.Structure):
    """The addresses of the cached keys and values of each row."""

    _fields_ = [
        ("keys", POINTER),
        ("values", POINTER),
        ("page_stride", LONG),
        ("head_stride", LONG),
        ("page_size", LONG),
        ("table", POINTER),
        ("table_stride", LONG),
        ("lengths", POINTER),
        ("sequence", POINTER),
        ("first", POINTER),
        ("format", INT),
    ]


class Layer(ctypes.Structure):
    """One layer as the kernels read it. The block that made it keeps the memory alive."""

    _fields_ = [
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, LONG) for name in ("H", "Hk", "D")),
        ("eps", FLOAT),
        ("format", INT),
    ]


BEFORE = POINTER, POINTER, LONG, POINTER, POINTER, LONG, POINTER, POINTER, POINTER
AFTER = POINTER, POINTER, LONG, POINTER, POINTER
STEPS = POINTER, LONG, POINTER, LONG, POINTER, POINTER, LONG, POINTER
# name: (arguments, result). The functions `…_fixed` add in one order for any number of rows.
SIGNATURES = {
    "times": ((), ctypes.POINTER(ctypes.c_double * 6)),
    "instructions": ((), ctypes.c_char_p),
    "linear": ((POINTER, POINTER, LONG, POINTER), None),
    "linear_fixed": ((POINTER, POINTER, LONG, POINTER), None),
    "most_rows": ((POINTER,), LONG),
    "dense_rows": ((POINTER, POINTER, LONG, LONG, INT), None),
    "before_cache": (BEFORE, None),
    "before_cache_fixed": (BEFORE, None),
    "after_cache": (AFTER, None),
    "after_cache_fixed": (AFTER, None),
    "norm_rows": ((POINTER, POINTER, LONG, LONG, POINTER, FLOAT, INT), None),
    "split_rows": (
        (
            POINTER,
            *[LONG] * 5,  # B, T, H, Hk, D
            *[POINTER] * 2,  # the norms of q and k
            FLOAT,
            *[POINTER] * 2,  # cos, sin
            LONG,
            *[POINTER] * 3,  # q, k, v
            INT,
            INT,
        ),
        None,
    ),
    "gate_rows": ((POINTER, POINTER, LONG, LONG, INT), None),
    "add_rows": ((POINTER, POINTER, LONG, INT), None),
    "has_flash": ((LONG,), INT),
    "flash_attention": ((*[POINTER] * 4, *[LONG] * 8), None),
    "forward_step": (
        (
            POINTER,
            POINTER,
            POINTER,
            LONG,
            POINTER,
            LONG,
            POINTER,
            POINTER,
            LONG,
            POINTER,
            POINTER,
            FLOAT,
        ),
        None,
    ),
    "attend_step": ((POINTER, POINTER, *[LONG] * 4, POINTER, POINTER), None),
    "gated_delta_step": ((*[POINTER] * 8, *[LONG] * 3), None),
    "steps": (STEPS, None),
    "steps_fixed": (STEPS, None),
}


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """(loaded kernels or None, one line that names the code in use). May wait for the compiler."""
    if building.mode() == "off":
        return None, "torch operators (NANOKV_KERNELS=off)"
    try:
        compiler = building.find_compiler()
    except ValueError as error:
        return None, f"torch operators (CXX is {os.environ['CXX']!r}: {error})"
    if compiler is None:
        return None, f"torch operators ({building.NO_COMPILER})"
    try:
        kernels, path = building.obtain(compiler, load)
    except (OSError, subprocess.SubprocessError) as error:
        why = building.reason(error)
        return None, f"torch operators (the kernels did not build with {compiler[0]}: {why})"
    keep_freed_memory()
    instructions = kernels.instructions().decode()
    return kernels, f"native kernels ({instructions}, {Path(compiler[0]).name}, {path})"


def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MB of freed memory in this process. No effect without glibc.

    A prefill frees its buffers, at most 32 MB each, after every operator. By default glibc
    returns free memory at the end of the heap to the system, and every page of it causes a page
    fault when it is used again: 225,000 faults of 4 KB in a prefill of 1,024 tokens (shapes of
    Qwen3-0.6B). With this setting there are none.
    """
    if sys.platform != "linux":
        return
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):
        c_library.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc's own tuning reaches
        c_library.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def built() -> bool:
    """Whether `library` can load kernels without running the compiler."""
    if not building.state().ready:
        return False
    compiler = building.find_compiler()
    assert compiler is not None  # a ready state implies a compiler
    return building.first(building.stem_of(compiler), load) is not None


def kernels() -> ctypes.CDLL | None:
    """The loaded kernels, or None."""
    # In a new thread torch sets OpenMP's thread count only when it is first asked for the number.
    torch.get_num_threads()
    return library()[0]


def has_tiles(kernels: ctypes.CDLL) -> bool:
    """Whether the kernels use the processor's matrix tiles (AMX); False for emulated tiles."""
    return kernels.instructions().endswith(b", tiles")


def multiplies_bf16(kernels: ctypes.CDLL) -> bool:
    """Whether the processor has an instruction for bf16 products.

    Without one, torch's bf16 product takes two to four times as long as its fp32 product (AVX2: 44
    and 165 GFLOP/s on two cores). On Arm nothing was measured, and the answer is True.
    """
    return kernels.instructions() not in (b"AVX2", b"AVX-512")


def load(path: Path) -> tuple[ctypes.CDLL, Path] | None:
    """(library with typed functions, its path), or None if the file is incomplete."""
    checked = private.open_checked(path)
    if checked is None:
        return None
    return typed(checked), path


def typed(path: str | Path) -> ctypes.CDLL:
    """The library, with the argument and result types of its functions set."""
    kernels = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes = arguments
        function.restype = result
    return kernels


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of the first value of a contiguous CPU tensor; None becomes a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def pages_struct(pages: "capabilities.Pages") -> Pages:
    """The cache's Pages as the kernels read them.

    Made once and stored on the Pages object, so the struct lives as long as the tensors.
    """
    made = vars(pages).get("struct")
    if made is None:
        keys = pages.keys  # (P,Hk,page,D)
        values = pages.values
        if keys.stride() != values.stride() or keys.stride()[2:] != (keys.shape[3], 1):
            keys = keys.contiguous()
            values = values.contiguous()
        made = Pages(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            page_stride=keys.stride(0),
            head_stride=keys.stride(1),
            page_size=keys.shape[2],
            lengths=pages.lengths.data_ptr(),
            format=FORMATS[keys.dtype],
        )
        if pages.table is not None:
            made.table = pages.table.data_ptr()
            made.table_stride = pages.table.shape[1]
        if pages.sequence is not None:
            made.sequence = pages.sequence.data_ptr()
        made.tensors = keys, values  # keeps the memory behind the addresses alive
        vars(pages)["struct"] = made
    return made


def addresses(structs: Sequence[ctypes.Structure]) -> ctypes.Array[POINTER]:
    """An array of pointers to the structs. The caller keeps the structs alive."""
    return (POINTER * len(structs))(*map(ctypes.addressof, structs))
