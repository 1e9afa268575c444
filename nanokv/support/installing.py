"""What to type when a package is missing: a line that works where it is printed.

The interpreter that runs is named, because a bare `pip` is often another one's. Packages are named by themselves and in
the ranges that were tested: nanokv is on no index, and pip would look for it there to install its extras.
"""

import re
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BY_MAKE = ("dev", "course")  # the extras that `make setup` installs


def hint(packages) -> str:
    """The line that installs these packages or modules; in the environment that make made, `make setup` if it does."""
    names = list(dict.fromkeys(package.split(".")[0] for package in packages))
    if (
        Path(sys.prefix) == CHECKOUT / ".venv"
        and (CHECKOUT / "Makefile").is_file()
        and all(map(by_make, names))
    ):
        return (
            "make setup"
            if Path.cwd() == CHECKOUT
            else f"make -C {shlex.quote(str(CHECKOUT))} setup"
        )
    asked = [
        f'"{text}"' if text != name else name
        for name, text in zip(names, map(requirement, names), strict=True)
    ]
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(asked)}"


def requirement(name: str) -> str:
    """What pip has to be asked for: the range that nanokv was tested with, or the bare name."""
    return next((text for text, _ in declared(name)), name)


def by_make(name: str) -> bool:
    """Whether `make setup` brings this package."""
    return any(extra in ("", *BY_MAKE) for _, extra in declared(name))


def declared(name: str) -> list[tuple[str, str]]:
    """(range, extra or "") of each time that nanokv asks for this package."""
    from importlib import metadata  # 20 ms

    try:
        texts = metadata.requires("nanokv") or []
    except metadata.PackageNotFoundError:
        return []
    found = (re.fullmatch(rf"({re.escape(name)}[<>=!~][^;]*?)\s*(;.*)?", text) for text in texts)
    return [
        (one[1], "".join(re.findall(r'extra == "(\w+)"', one[2] or ""))) for one in found if one
    ]
