"""Running the real command in a subprocess, as a user's shell would: bytes in, bytes out, an exit code."""

import io
import os
import subprocess
import sys
from pathlib import Path

import nanokv
import warm

# The very package that this test process imported.
HOME = str(Path(nanokv.__file__).resolve().parents[1])


class FakeStdin(io.TextIOWrapper):
    """Piped bytes for a command in this process, or a terminal when `tty`."""

    def __init__(self, data: bytes = b"", tty: bool = False):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.tty = tty

    def isatty(self):
        return self.tty


def command(*argv) -> list:
    """The command line of `nanokv` with this interpreter; arguments are text, bytes or paths."""
    return [sys.executable, "-m", "nanokv", *(a if isinstance(a, bytes) else str(a) for a in argv)]


def environment(extra: dict | None = None) -> dict:
    """The test's environment without the variables that change what the command does; one thread; the kernels as
    conftest.py says."""
    drop = (
        "NANOKV_",
        "HF_",
        "FORCE_COLOR",
        "NO_COLOR",
        "COLUMNS",
        "PYTHONIOENCODING",
        "PYTHONUNBUFFERED",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    kept |= {"OMP_NUM_THREADS": "1", "TERM": "xterm", "PYTHONPATH": HOME}
    return kept | {"NANOKV_KERNELS": os.environ["NANOKV_KERNELS"]} | (extra or {})


def choice(completion: dict) -> dict:
    """The one answer in what --json, --jsonl and batch print."""
    (found,) = completion["choices"]
    return found


def text_of(completion: dict) -> str:
    """What it says, be it a message or the continuation of a text."""
    found = choice(completion)
    return found["message"]["content"] if "message" in found else found["text"]


def run_cli(
    *argv, stdin: bytes | None = b"", env: dict | None = None, timeout: float = 120, **popen
):
    """Run to the end → CompletedProcess with bytes. stdin None = the null device."""
    streams = {
        "stdin": subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    argv = command(*argv)
    with warm.start(argv, environment(env), **streams | popen) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def spawn_cli(*argv, env: dict | None = None, **popen) -> subprocess.Popen:
    """Start it and let it run; stdin is the null device, stdout and stderr are pipes."""
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    } | popen
    return warm.start(command(*argv), environment(env), **streams)


def errors_in(err: str) -> tuple[str, str]:
    """(message, hint) of a failure: exactly the one or two lines that the specification allows."""
    lines = err.splitlines()
    assert 1 <= len(lines) <= 2 and lines[0].startswith("nanokv: error: "), err
    assert len(lines) == 1 or lines[1].startswith("hint: "), err
    return lines[0].removeprefix("nanokv: error: "), lines[-1].removeprefix("hint: ") if len(
        lines
    ) == 2 else ""
