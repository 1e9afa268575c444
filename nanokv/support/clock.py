"""Time stamps of one start, for `nanokv profile --start`: each writes a line into the file that NANOKV_STAMPS names.

Without that variable a stamp costs a look at a constant. No torch: the first stamp comes before it.
"""

import os
import time

FILE = os.environ.get("NANOKV_STAMPS") or None


def stamp(name: str) -> None:
    """What has just been done, and when: seconds of the machine's clock, which processes share."""
    if FILE is not None:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(f"{time.time():.6f} {name}\n")
