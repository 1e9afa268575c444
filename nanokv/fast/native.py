"""Builds the kernels once, keeps the result, and calls it. Where no compiler is, `library()` is None and says why.

The compiler writes for the processor that it runs on, so the file is kept under a name that holds the source, the
flags and the processor. `NANOKV_KERNELS=off` leaves the kernels out; `CXX` names another compiler.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).with_name("kernels")
SOURCES = FOLDER / "decode.cpp", FOLDER / "prefill.cpp"
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-std=c++17", "-shared", "-fPIC")
FORMATS = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3}
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Weight(ctypes.Structure):
    """A matrix as the kernels see it; `tensors` keeps the memory alive."""

    _fields_ = [("data", POINTER), ("scale", POINTER), ("bias", POINTER), ("N", LONG), ("K", LONG), ("format", INT)]


class Pages(ctypes.Structure):
    """Where the cached keys and values of each row lie."""

    _fields_ = [
        ("keys", POINTER), ("values", POINTER), ("page_stride", LONG), ("head_stride", LONG), ("page_size", LONG),
        ("table", POINTER), ("table_stride", LONG), ("lengths", POINTER), ("format", INT),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """All that one layer needs; `keep` holds the tensors alive whose addresses are in here."""

    _fields_ = [
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, LONG) for name in ("H", "Hk", "D")), ("eps", FLOAT), ("format", INT),
    ]  # fmt: skip


SIGNATURES = {  # name: (arguments, result)
    "times": ((), ctypes.POINTER(ctypes.c_double * 6)),
    "linear": ((POINTER, POINTER, LONG, POINTER), None),
    "before_cache": ((POINTER, POINTER, LONG, POINTER, POINTER, LONG, POINTER, POINTER, POINTER), None),
    "after_cache": ((POINTER, POINTER, LONG, POINTER, POINTER), None),
    "norm_rows": ((POINTER, POINTER, LONG, LONG, POINTER, FLOAT, INT), None),
    "split_rows": ((POINTER, *[LONG] * 5, POINTER, POINTER, FLOAT, POINTER, POINTER, LONG, *[POINTER] * 3, INT), None),
    "gate_rows": ((POINTER, POINTER, LONG, LONG, INT), None),
    "add_rows": ((POINTER, POINTER, LONG, INT), None),
    "has_flash": ((LONG,), INT),
    "flash_attention": ((*[POINTER] * 4, *[LONG] * 8), None),
    "step": ((POINTER, POINTER, LONG, POINTER, POINTER, LONG, POINTER), None),
}


@functools.cache
def library():
    """(the loaded kernels or None, one line that says which code runs and why)."""
    if os.environ.get("NANOKV_KERNELS", "on") == "off":
        return None, "torch operators (NANOKV_KERNELS=off)"
    compiler = next((found for name in (os.environ.get("CXX"), "c++", "g++", "clang++")
                     if name and (found := shutil.which(name))), None)  # fmt: skip
    if compiler is None:
        return None, "torch operators (no C++ compiler found: install g++ or clang++, or set CXX)"
    try:
        path = built(compiler)
        kernels = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return None, f"torch operators (the kernels did not build with {compiler}: {lines[0] if lines else error})"
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, result
    return kernels, f"native kernels ({Path(compiler).name}, {path})"


def built(compiler: str) -> Path:
    """The shared library for this source, compiler and processor; compiled only if it is not there yet."""
    source = b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()))
    key = hashlib.sha256(b"\0".join([source, compiler.encode(), " ".join(FLAGS).encode(), processor().encode()]))
    path = folder() / f"kernels-{key.hexdigest()[:16]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        target = Path(work) / path.name
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=120)
        try:  # torch's own OpenMP runtime is loaded already, so both share one team of threads
            run([compiler, *FLAGS, "-fopenmp", *map(str, SOURCES), "-o", str(target)])
        except subprocess.CalledProcessError:  # Apple's clang has none: one thread
            run([compiler, *FLAGS, *map(str, SOURCES), "-o", str(target)])
        os.replace(target, path)  # atomic: two processes may build at once
    return path


def folder() -> Path:
    """Where compiled kernels are kept between runs."""
    base = os.environ.get("NANOKV_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nanokv"


def processor() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        return "".join(sorted({line for line in text.splitlines() if line.startswith(("model name", "flags"))}))
    except OSError:
        return platform.processor() + platform.machine()


def pointer(tensor):
    """Address of a contiguous CPU tensor's first value; None stays a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def pages_struct(pages):
    """cache.base.Pages as the kernels take it, by reference; made once as long as the cache hands out the same one."""
    if pages.struct is None:
        keys, values = pages.keys, pages.values  # (P,Hk,page,D)
        if keys.stride() != values.stride() or keys.stride()[2:] != (keys.shape[3], 1):
            keys, values = keys.contiguous(), values.contiguous()
        table, width = (None, 0) if pages.table is None else (pages.table.data_ptr(), pages.table.shape[1])
        struct = Pages(
            keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), keys.shape[2], table, width,
            pages.lengths.data_ptr(), FORMATS[keys.dtype],
        )  # fmt: skip
        pages.struct = ctypes.byref(struct), keys, values  # these live as long as their addresses
    return pages.struct[0]
