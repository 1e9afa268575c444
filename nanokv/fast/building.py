"""Builds the native kernels once and caches the library, which native.py loads.

This module does not import torch: `nanokv chat` checks for kernels before it imports torch.

The library is compiled for the processor it is built on, so its file name contains a key: a hash
of the sources, the flags and the processor. An explicit request (--fast, nanokv.optimize) waits
for the compiler. Otherwise `begin` starts the build in a separate process at the lowest priority,
and the next start of the program uses the result. kernels.lock allows one build at a time. When a
build fails, the reason is written to kernels-KEY.failed, and only an explicit request tries again.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nanokv.errors import ConfigError
from nanokv.fast import private

FOLDER = Path(__file__).with_name("kernels")
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("decode", "prefill", "recurrent"))
# The parts of -ffast-math that let the compiler vectorize sums. The full flag is wrong here: a
# library linked with it flushes denormals to zero for all code in the thread that loads it, and the
# compiler may assume that NaN and infinity do not occur.
MATH = (
    "-fassociative-math",
    "-freciprocal-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-ffp-contract=fast",
)
FLAGS = ("-O3", "-march=native", *MATH, "-std=c++17", "-shared", "-fPIC")
TIMEOUT = 120  # seconds for the compiler, and for waiting until another process has built
BACKGROUND_TIMEOUT = 1200  # seconds for the compiler at the lowest priority on a busy machine
USUAL_COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = "no C++ compiler found: install g++ or clang++, or set CXX"
SECONDS = 10  # a build takes about this long; 4 to 8 were measured
MODES = {
    "on": "built in the background where they are missing",
    "explicit": "built for --fast and nanokv.optimize only",
    "off": "never used",
}
Usable = Callable[[Path], Any]  # returns None for a library that cannot be used
# The program of the background process. The path of this package comes first only for this import,
# so that another installed nanokv is not used.
CODE = """import sys
sys.path.insert(0, sys.argv[1])
from nanokv.fast.building import main
sys.path.append(sys.path.pop(0))
sys.exit(main())"""


class State(NamedTuple):
    """Whether the kernels can be loaded now, and if not, why."""

    ready: bool
    why: str = ""  # a few words
    detail: str = ""  # the full reason, if there is more to say
    missing: bool = False  # a build would help: there is a compiler and no failed build


def mode() -> str:
    """The value of NANOKV_KERNELS, a key of MODES. ConfigError for any other value."""
    wanted = os.environ.get("NANOKV_KERNELS") or "on"
    if wanted not in MODES:
        raise ConfigError(
            f"NANOKV_KERNELS is {wanted!r}: {', '.join(MODES)}", hint="unset NANOKV_KERNELS"
        )
    return wanted


def state() -> State:
    """The state of the kernels on this machine. Starts no build."""
    if mode() == "off":
        return State(False, "NANOKV_KERNELS=off")
    try:
        compiler = find_compiler()
        if compiler is None:
            return State(False, "no C++ compiler", NO_COMPILER)
        stem = stem_of(compiler)
        if stem.parent.exists():
            private.check_folder(stem.parent)
        if first(stem, private.is_whole):
            return State(True)
        if not can_write(stem.parent):
            return State(
                False,
                "no place to keep kernels",
                f"{stem.parent} cannot be written: set NANOKV_CACHE",
            )
        with contextlib.suppress(FileNotFoundError):
            failure = failure_note(stem).read_text(errors="replace").strip()
            return State(False, "kernels did not build", f"the kernels did not build: {failure}")
    except (OSError, ValueError) as error:  # ValueError: unclosed quotes in CXX
        return State(False, "no kernels", str(error))
    return State(False, "kernels are not built", missing=True)


# --- building -------------------------------------------------------------------------------------


def obtain(
    compiler: list[str],
    usable: Usable,
    timeout: float | None = None,
    wait: float | None = None,
) -> Any:
    """usable(path) of the library; builds the library if no cached one is usable.

    timeout: seconds for the compiler. wait: seconds to wait for another process that is building;
    defaults to `timeout`.
    """
    stem = stem_of(compiler)
    private.make_folder(stem.parent)
    private.check_folder(stem.parent)
    if (found := first(stem, usable)) is not None:
        return found
    from filelock import FileLock

    if timeout is None:
        timeout = TIMEOUT
    if wait is None:
        wait = timeout
    # The system releases the lock when its holder is killed.
    with FileLock(stem.with_name("kernels.lock"), timeout=wait):
        if (found := first(stem, usable)) is not None:  # built while this process waited
            return found
        for leftover in stem.parent.glob("building-*"):  # from a build that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        return build_noted(compiler, stem, usable, timeout)


def first(stem: Path, usable: Usable) -> Any:
    """The first result of usable() over the cached files that is not None."""
    for path in private.kept(stem):
        try:
            if (found := usable(path)) is not None:
                return found
        except PermissionError:
            raise
        except (OSError, AttributeError):  # a symbolic link, or a library of something else
            pass
    return None


def build_noted(compiler: list[str], stem: Path, usable: Usable, timeout: float) -> Any:
    """Build and return usable() of the library.

    A failure is written to the failure note, and a success removes the note.
    """
    note = failure_note(stem)
    for path in private.kept(stem):  # none of them was usable
        path.unlink()
    try:
        path = build(compiler, stem, timeout)
        try:
            found = usable(path)
        except (OSError, AttributeError) as error:
            path.unlink()
            raise OSError(f"the compiled library cannot be loaded: {error}") from error
    except (OSError, subprocess.SubprocessError) as error:
        with contextlib.suppress(OSError):
            note.write_text(f"{compiler[0]}: {reason(error)}\n")
        raise
    note.unlink(missing_ok=True)
    return found


def build(compiler: list[str], stem: Path, timeout: float) -> Path:
    """Compile the library and return its path.

    The compiler writes to a temporary folder, and the finished file is renamed into place, so the
    final name never holds a partial library.
    """
    with tempfile.TemporaryDirectory(prefix="building-", dir=stem.parent) as work:
        target = Path(work) / f"{stem.name}.so"
        run = functools.partial(
            subprocess.run,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        try:  # torch has loaded its OpenMP runtime already: the kernels share its threads
            run([*compiler, *FLAGS, "-fopenmp", *map(str, SOURCES), "-o", str(target)])
        except subprocess.CalledProcessError:  # Apple's clang has no OpenMP: one thread
            run([*compiler, *FLAGS, *map(str, SOURCES), "-o", str(target)])
        target.chmod(0o600)
        with target.open("rb") as file:
            path = private.named(stem, file.read())
            os.fsync(file.fileno())  # a power cut must not leave a partial file under this name
        os.replace(target, path)
    return path


def loaded(path: Path) -> ctypes.CDLL | None:
    """The loaded library, or None if the file is incomplete."""
    checked = private.open_checked(path)
    if checked is None:
        return None
    return ctypes.CDLL(checked)


def reason(error: Exception) -> str:
    """The cause in one line; of a compiler's output, the first line that contains "error"."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout} seconds"
    output = getattr(error, "stderr", None) or str(error)
    lines = output.strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error" in line.lower()), lines[0])


# --- in the background ----------------------------------------------------------------------------


def begin() -> None:
    """Start a build in the background and return at once.

    The process has no terminal and runs in a new session, so neither Ctrl-C nor a hang-up ends it.
    It imports the package from the same place as this process, and nothing from the user's working
    folder (-P).
    """
    command = [sys.executable, "-P", "-c", CODE, str(Path(__file__).resolve().parents[2])]
    # As an absolute path, because the process runs in "/".
    environment = os.environ | {"NANOKV_CACHE": str(folder().parent)}
    with contextlib.suppress(OSError):  # without a process the plain model keeps running
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/" if os.name == "posix" else None,
            start_new_session=True,
        )
        # Reap the process, which would otherwise stay a zombie.
        threading.Thread(target=process.wait, daemon=True).start()


def main() -> int:
    """The background process that `begin` starts. Returns its exit code: 0 if there are kernels."""
    if hasattr(os, "nice"):
        os.nice(19)
    # A failure is in the note already, or another process holds the lock.
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        if state().missing:
            compiler = find_compiler()
            assert compiler is not None  # `missing` implies a compiler
            obtain(compiler, loaded, BACKGROUND_TIMEOUT, wait=0)
    return 0 if state().ready else 1


# --- names and places -----------------------------------------------------------------------------


def find_compiler() -> list[str] | None:
    """The command of the compiler: $CXX, which may have arguments, or the first usual name found.

    None if there is no compiler; a $CXX that does not exist is not replaced by another compiler.
    ValueError if $CXX has unclosed quotes.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or USUAL_COMPILERS:
        found = shutil.which(name)
        if found:
            return [os.path.abspath(found), *wanted[1:]]
    return None


def build_key(compiler: list[str]) -> str:
    """16 hex digits that identify the sources, the compiler with its flags, and the processor."""
    source = b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()))
    parts = source, " ".join(compiler).encode(), " ".join(FLAGS).encode(), processor().encode()
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def stem_of(compiler: list[str]) -> Path:
    """The path without suffix with which the names of this library's files begin."""
    return folder() / f"kernels-{build_key(compiler)}"


def failure_note(stem: Path) -> Path:
    """The file with the reason of a failed build. An explicit request (--fast) builds again."""
    return stem.with_name(f"{stem.name}.failed")


def can_write(folder: Path) -> bool:
    """Whether this user can create files in the folder, or create the folder."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def folder() -> Path:
    """The folder of compiled kernels. OSError if the user has no home folder."""
    base = os.environ.get("NANOKV_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache").absolute() / "nanokv"
    except RuntimeError:  # no HOME, and no entry for this user in the password database
        raise OSError("this user has no home folder: set NANOKV_CACHE") from None


def processor() -> str:
    """A text that identifies the processor, on which -march=native depends."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() + platform.machine()
    kinds = "model name", "flags", "Features", "CPU "  # x86; the last two: Arm
    return "".join(sorted({line for line in text.splitlines() if line.startswith(kinds)}))
