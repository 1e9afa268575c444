"""Each notebook with its solution is run once a session, for all tests that read what came out."""

from functools import cache
from pathlib import Path

from nanokv.course import running, twins

WALL = 900  # seconds; only a notebook that hangs takes as long


@cache
def solved(path: Path) -> running.Run:
    return running.run(twins.read(path).solution(), WALL)
