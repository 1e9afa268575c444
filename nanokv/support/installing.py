"""The command that installs a missing package into the environment in use.

It names the running interpreter, because a bare `pip` often belongs to another one. It names each
package with its tested range instead of an extra of nanokv, because nanokv is on no index and pip
would search an index for it.
"""

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
BY_MAKE = ("dev", "course")  # the extras that `make setup` installs


def hint(packages: Iterable[str]) -> str:
    """The command that installs these packages or modules.

    In the environment of `make setup` it is `make setup`, if that installs them.
    """
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
    """The requirement for pip: the name with the range tested with nanokv, or the bare name."""
    return next((text for text, _ in declared(name)), name)


def by_make(name: str) -> bool:
    """Whether `make setup` installs this package."""
    return any(extra in ("", *BY_MAKE) for _, extra in declared(name))


def declared(name: str) -> list[tuple[str, str]]:
    """(requirement, extra or "") for each requirement of nanokv on this package."""
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
