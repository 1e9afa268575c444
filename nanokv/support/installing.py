"""What to type when a package is missing: a line that works where it is printed.

The interpreter that runs is named, because a bare `pip` is often another one's. Packages are named by themselves and in
the ranges that were tested: nanokv is on no index, and pip would look for it there to install its extras.
"""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BY_MAKE = ("dev", "course")  # the extras that `make setup` installs


def hint(packages: Iterable[str]) -> str:
    """The line that installs these packages or modules; in the environment that make made, `make setup` if it does."""
    names = list(dict.fromkeys(package.split(".")[0] for package in packages))
    made = Path(sys.prefix) == CHECKOUT / ".venv" and (CHECKOUT / "Makefile").is_file()
    if made and all(map(by_make, names)):
        if Path.cwd() == CHECKOUT:
            return "make setup"
        return f"make -C {shlex.quote(str(CHECKOUT))} setup"
    asked = []
    for name in names:
        text = requirement(name)
        asked.append(name if text == name else f'"{text}"')
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
    pattern = re.compile(rf"({re.escape(name)}[<>=!~][^;]*?)\s*(;.*)?")
    found = []
    for text in texts:
        one = pattern.fullmatch(text)
        if one:
            extras = re.findall(r'extra == "(\w+)"', one[2] or "")
            found.append((one[1], "".join(extras)))
    return found
