"""The sentences that conversations are made of: one TOML file per topic, beside this module.

A phrasing that a list contains twice is drawn twice as often. Their order matters: the same seed
gives another corpus when two lines change places.
"""

import tomllib
from importlib.resources import files
from typing import Any


def phrases(name: str) -> dict[str, Any]:
    """The content of nanokv/school/training/NAME.toml."""
    path = files("nanokv.school.training") / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))
