"""Other people's clients for tests: a venv and an npm folder in the user's cache, never in an extra of this project.

Versions are exact: clients/requirements.txt and clients/package-lock.json. They are installed once, by uv (seconds; pip
takes a minute), and again when a version changes. node is a wheel too. Where a registry does not answer, the tests that
ask for it are skipped; whatever else goes wrong fails them.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "clients"
UV = "uv==0.13.9"
SECONDS = 900  # for one step of the installation, or a client on a busy machine


def python_clients() -> Path:
    """The venv: what requirements.txt names, node and npm among it."""
    return installed("clients-python", ("requirements.txt",), install_python)


def node_clients(python: Path) -> Path:
    """The folder whose node_modules package-lock.json describes; `python` is the venv."""
    npm = python / "bin" / "npm"
    return installed(
        "clients-node",
        ("package.json", "package-lock.json"),
        lambda folder: install_node(folder, npm),
    )


def installed(name: str, pins: tuple[str, ...], install: Callable[[Path], None]) -> Path:
    """The folder; it is made anew unless it is complete and has these versions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanokv-tests"
    cache.mkdir(parents=True, exist_ok=True)
    folder, wanted = cache / name, b"".join((HERE / pin).read_bytes() for pin in pins)
    stamp = folder / "complete"
    with open(cache / f"{name}.lock", "w") as lock:  # of several test processes one installs
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_bytes() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            install(folder)
            stamp.write_bytes(wanted)
    return folder


def install_python(folder: Path) -> None:
    """pip brings uv, which shows that there is an index; uv brings the rest."""
    run([sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    first = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "1",
        UV,
    ]
    answers(first, "no Python package can be fetched")
    uv = [folder / "bin" / "uv", "pip", "install", "--quiet", "--no-deps", "--python", python]
    run([*uv, "--requirement", HERE / "requirements.txt"])


def install_node(folder: Path, npm: Path) -> None:
    """Exactly what the lock says."""
    answers([npm, "ping", "--fetch-retries", "1"], "no npm package can be fetched")
    folder.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    run([npm, "ci", "--no-audit", "--no-fund"], cwd=folder)


def answers(command: list, why: str) -> None:
    """Run; where it fails, the registry is out of reach and the test is skipped."""
    try:
        run(command)
    except AssertionError as error:
        pytest.skip(f"{why}: {str(error).splitlines()[-1]}")


def run(command: list, script: str = "", cwd: Path | None = None, **variables: str) -> str:
    """What it prints, with `script` as its input; AssertionError with what it says where it fails."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=kept | {"NO_PROXY": "127.0.0.1"} | variables,
    ) as process:
        try:
            out, said = process.communicate(script, SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{command[-1]} took more than {SECONDS} s") from None
    assert process.returncode == 0, (
        f"{command}: exit code {process.returncode}\n{out[-8_000:]}{said[-4_000:]}"
    )
    return out
