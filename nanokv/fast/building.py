"""Builds the kernels once and keeps them, for native.py to load. No torch: `nanokv chat` asks before it imports that.

The compiler writes for the processor that it runs on, so the file is kept under a name that holds the source, the
flags and the processor. Who asks for kernels (--fast, nanokv.optimize) waits for the compiler. Who did not ask never
waits: `begin` starts a process of its own at the lowest priority, and the next start finds what it made. One build runs
at a time (kernels.lock). Why one failed stays beside it (kernels-KEY.failed), so that no start tries again by itself.
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
SOURCES = FOLDER / "decode.cpp", FOLDER / "prefill.cpp"
# What of -ffast-math makes sums into vectors. Not the whole: a library linked with it turns small numbers into zeros in
# the thread that loads it, for everybody's code, and forgets that there are NaN and infinity.
MATH = (
    "-fassociative-math",
    "-freciprocal-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-ffp-contract=fast",
)
FLAGS = ("-O3", "-march=native", *MATH, "-std=c++17", "-shared", "-fPIC")
TIMEOUT = 120  # seconds that the compiler may take, and that who asked waits for another's
BACKGROUND_TIMEOUT = 1200  # at the lowest priority, on a machine that is busy
USUAL_COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = "no C++ compiler found: install g++ or clang++, or set CXX"
SECONDS = 10  # that a build takes, about: 4 to 8 were measured
MODES = {
    "on": "built in the background where they are missing",
    "explicit": "built for --fast and nanokv.optimize only",
    "off": "never used",
}
Usable = Callable[[Path], Any]  # gives something for a library that can be used, or None
# This package first, whatever others of its name are installed; for nothing else.
CODE = """import sys
sys.path.insert(0, sys.argv[1])
from nanokv.fast.building import main
sys.path.append(sys.path.pop(0))
sys.exit(main())"""


class State(NamedTuple):
    """Are there kernels? `why` not, in a few words; `detail` in full, where there is more to say."""

    ready: bool
    why: str = ""
    detail: str = ""
    missing: bool = False  # nothing but a run of the compiler is missing


def mode() -> str:
    """NANOKV_KERNELS, a key of MODES."""
    wanted = os.environ.get("NANOKV_KERNELS") or "on"
    if wanted not in MODES:
        raise ConfigError(
            f"NANOKV_KERNELS is {wanted!r}: {', '.join(MODES)}", hint="unset NANOKV_KERNELS"
        )
    return wanted


def state() -> State:
    """What is there, without starting anything."""
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
    except (OSError, ValueError) as error:  # ValueError: quotes that are not closed in CXX
        return State(False, "no kernels", str(error))
    return State(False, "kernels are not built", missing=True)


# --- building -----------------------------------------------------------------------------------------------------


def obtain(
    compiler: list[str],
    usable: Usable,
    timeout: float | None = None,
    wait: float | None = None,
) -> Any:
    """usable(path) of the library, which is built where it is missing; `usable` gives None for a file that is not.

    timeout: seconds for the compiler; wait: for another process that builds, as long if it is not given.
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
    # The system gives it back when its holder is killed.
    with FileLock(stem.with_name("kernels.lock"), timeout=wait):
        if (found := first(stem, usable)) is not None:  # built while this process waited
            return found
        for left in stem.parent.glob("building-*"):  # of a build that was killed
            shutil.rmtree(left, ignore_errors=True)
        return build_noted(compiler, stem, usable, timeout)


def first(stem: Path, usable: Usable) -> Any:
    """usable() of the first kept file for which it gives something."""
    for path in private.kept(stem):
        try:
            if (found := usable(path)) is not None:
                return found
        except PermissionError:
            raise
        except (OSError, AttributeError):  # a link, not ours
            pass
    return None


def build_noted(compiler: list[str], stem: Path, usable: Usable, timeout: float) -> Any:
    """usable() of what was built. A failure is noted, an earlier one forgotten."""
    note = failure_note(stem)
    for path in private.kept(stem):  # not usable
        path.unlink()
    try:
        path = build(compiler, stem, timeout)
        try:
            found = usable(path)
        except (OSError, AttributeError) as error:
            path.unlink()
            raise OSError(f"what it made cannot be loaded: {error}") from error
    except (OSError, subprocess.SubprocessError) as error:
        with contextlib.suppress(OSError):
            note.write_text(f"{compiler[0]}: {reason(error)}\n")
        raise
    note.unlink(missing_ok=True)
    return found


def build(compiler: list[str], stem: Path, timeout: float) -> Path:
    """Compile into a folder beside it, then rename: there is the whole library or none. Its path."""
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


def loaded(path: Path) -> ctypes.CDLL | None:
    """The library, None if the file is not whole."""
    checked = private.open_checked(path)
    if checked is None:
        return None
    return ctypes.CDLL(checked)


def reason(error: Exception) -> str:
    """What went wrong, in one line: of a compiler's output the first that names an error."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout} seconds"
    output = getattr(error, "stderr", None) or str(error)
    lines = output.strip().splitlines() or [type(error).__name__]
    return next((line for line in lines if "error" in line.lower()), lines[0])


# --- in the background --------------------------------------------------------------------------------------------


def begin() -> None:
    """Start a build that nobody waits for: no terminal, a session of its own, so neither Ctrl-C nor a hang-up ends it.

    It finds the package where this process did, but nothing that lies in the user's working folder (-P).
    """
    command = [sys.executable, "-P", "-c", CODE, str(Path(__file__).resolve().parents[2])]
    # A relative one is not to be one of "/".
    environment = os.environ | {"NANOKV_CACHE": str(folder().parent)}
    with contextlib.suppress(OSError):  # no process can be started: then it stays plain
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/" if os.name == "posix" else None,
            start_new_session=True,
        )
        # Or it would stay in the table as a zombie.
        threading.Thread(target=process.wait, daemon=True).start()


def main() -> int:
    """What `begin` starts. Exit code 0: there are kernels now."""
    if hasattr(os, "nice"):
        os.nice(19)
    # Noted, or another process builds.
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        if state().missing:
            compiler = find_compiler()
            assert compiler is not None  # else nothing would be missing but a compiler
            obtain(compiler, loaded, BACKGROUND_TIMEOUT, wait=0)
    return 0 if state().ready else 1


# --- names and places ---------------------------------------------------------------------------------------------


def find_compiler() -> list[str] | None:
    """$CXX, which may have arguments, or the first of the usual names; a $CXX that is not there is not replaced.
    ValueError if its quotes are not closed."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for name in wanted[:1] or USUAL_COMPILERS:
        found = shutil.which(name)
        if found:
            return [os.path.abspath(found), *wanted[1:]]
    return None


def build_key(compiler: list[str]) -> str:
    """Names the source, the compiler with its flags, and the processor."""
    source = b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()))
    parts = source, " ".join(compiler).encode(), " ".join(FLAGS).encode(), processor().encode()
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def stem_of(compiler: list[str]) -> Path:
    """What the names of this library's files begin with."""
    return folder() / f"kernels-{build_key(compiler)}"


def failure_note(stem: Path) -> Path:
    """Where the reason of a failed build is kept; --fast tries again."""
    return stem.with_name(f"{stem.name}.failed")


def can_write(folder: Path) -> bool:
    """May this user make files there, or the folder itself?"""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return there.is_dir() and os.access(there, os.W_OK)


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
