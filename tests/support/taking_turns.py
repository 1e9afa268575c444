"""With several processes (`pytest -n`): a test marked serial runs while no other does."""

import fcntl
from contextlib import contextmanager
from pathlib import Path

# Any two files that exist can be locked.
TURNSTILE, ROOM = Path(__file__), Path(__file__).with_name("every_test_ran.py")


@contextmanager
def turn(alone: bool):
    """All but the one that wants to be alone may be in the room together. It waits for them inside the turnstile, so
    that no other goes in before it."""
    with open(ROOM) as room:
        with open(TURNSTILE) as turnstile:
            fcntl.flock(turnstile, fcntl.LOCK_EX)
            fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # for a process that a test forked, too
