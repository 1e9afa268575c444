"""Time stamps of a program start, for `nanokv profile --start`.

Each stamp appends a line to the file named by NANOKV_STAMPS. Without this variable a stamp costs a
comparison with None. This module does not import torch, because the first stamp comes before it.
"""

import os
import time

FILE = os.environ.get("NANOKV_STAMPS") or None


def stamp(name: str) -> None:
    """Note that a step of the start is done, with the machine's clock, which processes share."""
    if FILE is not None:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(f"{time.time():.6f} {name}\n")
