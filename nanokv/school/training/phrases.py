"""The sentences that the conversations are made of: each kind in a TOML file beside this one, read when imported.

A line that stands twice is drawn twice as often. The order counts: another one makes another corpus of a seed.
"""

import tomllib
from importlib.resources import files


def phrases(name: str) -> dict:
    """What nanokv/school/training/NAME.toml holds."""
    return tomllib.loads(
        (files("nanokv.school.training") / f"{name}.toml").read_text(encoding="utf-8")
    )
