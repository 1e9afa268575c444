"""What to type when a package is missing: a line that works where it is printed.

The interpreter that runs is named, because a bare `pip` is often another one's. Packages are named by themselves and in
the ranges that were tested: nanokv is on no index, and pip would look for it there to install its extras.
"""

import re
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def hint(modules) -> str:
    """The line that installs what these modules belong to: `make setup` for the environment that make made."""
    if Path(sys.prefix) == CHECKOUT / ".venv" and (CHECKOUT / "Makefile").is_file():
        return "make setup" if Path.cwd() == CHECKOUT else f"make -C {shlex.quote(str(CHECKOUT))} setup"
    packages = " ".join(dict.fromkeys(map(requirement, modules)))
    return f"{shlex.quote(sys.executable)} -m pip install {packages}"


def requirement(module: str) -> str:
    """What pip has to be asked for: the range that nanokv was tested with, in quotes, or the bare name."""
    from importlib import metadata  # 20 ms

    name = module.split(".")[0]
    try:
        declared = metadata.requires("nanokv") or []
    except metadata.PackageNotFoundError:
        declared = []
    ours = (re.fullmatch(rf"({re.escape(name)}[<>=!~][^;]*?)\s*(;.*)?", text) for text in declared)
    return next((f'"{found[1]}"' for found in ours if found), name)
