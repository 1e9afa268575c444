"""What things cost before they are run: formulas.py in bytes and FLOPs, memory.py as the table of `nanokv memory`."""

from nanokv.costs.formulas import *  # noqa: F403 its __all__, which is `nanokv.costs`
