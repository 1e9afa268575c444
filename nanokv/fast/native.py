"""Builds the kernels once, keeps the result, and calls it. Where no compiler is, `library()` is None and says why.

The compiler writes for the processor that it runs on, so the file is kept under a name that holds the source, the
flags and the processor. `NANOKV_KERNELS=off` leaves the kernels out; `CXX` names another compiler. Code is loaded only
whole, and only from a folder that nobody else can write to (private.py).
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from nanokv.errors import ConfigError
from nanokv.fast import private

FOLDER = Path(__file__).with_name("kernels")
SOURCES = FOLDER / "decode.cpp", FOLDER / "prefill.cpp"
# What of -ffast-math makes sums into vectors. Not the whole: a library linked with it turns small numbers into zeros in
# the thread that loads it, for everybody's code, and forgets that there are NaN and infinity.
MATH = ("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
        "-ffp-contract=fast")  # fmt: skip
FLAGS = ("-O3", "-march=native", *MATH, "-std=c++17", "-shared", "-fPIC")
FORMATS = {torch.float32: 0, torch.bfloat16: 1, "int8": 2, "int4": 3}
TIMEOUT = 120  # seconds that the compiler may take
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Weight(ctypes.Structure):
    """A matrix as the kernels see it; the module that made it keeps the memory alive."""

    _fields_ = [("data", POINTER), ("scale", POINTER), ("bias", POINTER), ("N", LONG), ("K", LONG), ("format", INT)]


class Pages(ctypes.Structure):
    """Where the cached keys and values of each row lie."""

    _fields_ = [
        ("keys", POINTER), ("values", POINTER), ("page_stride", LONG), ("head_stride", LONG), ("page_size", LONG),
        ("table", POINTER), ("table_stride", LONG), ("lengths", POINTER), ("format", INT),
    ]  # fmt: skip


class Layer(ctypes.Structure):
    """All that one layer needs; the block that made it keeps the memory alive."""

    _fields_ = [
        *((name, Weight) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, LONG) for name in ("H", "Hk", "D")), ("eps", FLOAT), ("format", INT),
    ]  # fmt: skip


SIGNATURES = {  # name: (arguments, result)
    "times": ((), ctypes.POINTER(ctypes.c_double * 6)),
    "linear": ((POINTER, POINTER, LONG, POINTER), None),
    "dense_rows": ((POINTER, POINTER, LONG, LONG, INT), None),
    "before_cache": ((POINTER, POINTER, LONG, POINTER, POINTER, LONG, POINTER, POINTER, POINTER), None),
    "after_cache": ((POINTER, POINTER, LONG, POINTER, POINTER), None),
    "norm_rows": ((POINTER, POINTER, LONG, LONG, POINTER, FLOAT, INT), None),
    "split_rows": ((POINTER, *[LONG] * 5, POINTER, POINTER, FLOAT, POINTER, POINTER, LONG, *[POINTER] * 3, INT), None),
    "gate_rows": ((POINTER, POINTER, LONG, LONG, INT), None),
    "add_rows": ((POINTER, POINTER, LONG, INT), None),
    "has_flash": ((LONG,), INT),
    "flash_attention": ((*[POINTER] * 4, *[LONG] * 8), None),
    "steps": ((POINTER, LONG, POINTER, LONG, POINTER, POINTER, LONG, POINTER), None),
}


@functools.cache
def library():
    """(the loaded kernels or None, one line that says which code runs and why)."""
    wanted = os.environ.get("NANOKV_KERNELS") or "on"
    if wanted not in ("on", "off"):
        raise ConfigError(f"NANOKV_KERNELS is {wanted!r}: on or off", hint="unset NANOKV_KERNELS")
    if wanted == "off":
        return None, "torch operators (NANOKV_KERNELS=off)"
    try:
        compiler = find_compiler()
    except ValueError as error:
        return None, f"torch operators (CXX is {os.environ['CXX']!r}: {error})"
    if compiler is None:
        return None, "torch operators (no C++ compiler found: install g++ or clang++, or set CXX)"
    try:
        kernels, path = load(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"torch operators (the kernels did not build with {compiler[0]}: {reason(error)})"
    return kernels, f"native kernels ({Path(compiler[0]).name}, {path})"


def kernels():
    """The loaded kernels or None."""
    torch.get_num_threads()  # sets OpenMP's thread count in a new thread: torch does that at the first question only
    return library()[0]


def find_compiler() -> list[str] | None:
    """$CXX, which may have arguments, or the first of the usual names; a $CXX that is not there is not replaced.
    ValueError if its quotes are not closed."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return [found, *wanted[1:]]
    return None


def load(compiler: list[str]):
    """(the library with the types of its functions, its path). A file that cannot be loaded is built once more."""
    stem = folder() / f"kernels-{build_key(compiler)}"
    if stem.parent.exists():
        private.check_folder(stem.parent)
    for path in private.kept(stem):
        try:
            if (checked := private.open_checked(path)) is not None:
                return typed(checked), path
        except PermissionError:
            raise
        except (OSError, AttributeError):  # a link, not ours
            pass
        path.unlink()
    path = build(compiler, stem)
    return typed(private.open_checked(path) or path), path


def typed(path):
    """The library, its functions with the types of what they take and return."""
    kernels = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, result
    return kernels


def build_key(compiler: list[str]) -> str:
    """Names the source, the compiler with its flags, and the processor."""
    source = b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()))
    parts = source, " ".join(compiler).encode(), " ".join(FLAGS).encode(), processor().encode()
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build(compiler: list[str], stem: Path) -> Path:
    """Compile into a folder beside it, then rename: two processes may build at once. The path of the library."""
    private.make_folder(stem.parent)
    private.check_folder(stem.parent)
    with tempfile.TemporaryDirectory(dir=stem.parent) as work:
        target = Path(work) / f"{stem.name}.so"
        run = functools.partial(
            subprocess.run, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
        )
        try:  # torch's own OpenMP runtime is loaded already, so both share one team of threads
            run([*compiler, *FLAGS, "-fopenmp", *map(str, SOURCES), "-o", str(target)])
        except subprocess.CalledProcessError:  # Apple's clang has none: one thread
            run([*compiler, *FLAGS, *map(str, SOURCES), "-o", str(target)])
        target.chmod(0o600)
        with target.open("rb") as file:
            path = private.named(stem, file.read())
            os.fsync(file.fileno())  # or a power cut could leave half of it under the final name
        os.replace(target, path)
    return path


def reason(error) -> str:
    """What went wrong, in one line: of a compiler's output the first that names an error."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout} seconds"
    lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)


def folder() -> Path:
    """Where compiled kernels are kept between runs."""
    base = os.environ.get("NANOKV_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache").absolute() / "nanokv"
    except RuntimeError:  # no HOME, and no name for this user
        raise OSError("this user has no home folder: set NANOKV_CACHE") from None


def processor() -> str:
    """What -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() + platform.machine()
    kinds = "model name", "flags", "Features", "CPU "  # x86; the last two: Arm
    return "".join(sorted({line for line in text.splitlines() if line.startswith(kinds)}))


def pointer(tensor):
    """Address of a contiguous CPU tensor's first value; None stays a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def pages_struct(pages):
    """The cache's Pages as the kernels take it; made once for each, and kept on it: it lives as long as its tensors."""
    made = vars(pages).get("struct")
    if made is None:
        keys, values = pages.keys, pages.values  # (P,Hk,page,D)
        if keys.stride() != values.stride() or keys.stride()[2:] != (keys.shape[3], 1):
            keys, values = keys.contiguous(), values.contiguous()
        table, width = (None, 0) if pages.table is None else (pages.table.data_ptr(), pages.table.shape[1])
        made = pages.struct = Pages(
            keys.data_ptr(), values.data_ptr(), keys.stride(0), keys.stride(1), keys.shape[2], table, width,
            pages.lengths.data_ptr(), FORMATS[keys.dtype],
        )  # fmt: skip
        made.tensors = keys, values  # these live as long as their addresses
    return made


def addresses(structs):
    """What a kernel takes for a list of structs, each of which somebody keeps alive: an array of pointers."""
    return (POINTER * len(structs))(*map(ctypes.addressof, structs))
