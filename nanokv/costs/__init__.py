"""Costs computed before a run: formulas.py in bytes and FLOPs, memory.py for `nanokv memory`."""

from nanokv.costs.formulas import *  # noqa: F403 its __all__, which is `nanokv.costs`
