"""With several processes (`pytest -n`): a test marked serial runs while no other does."""

import fcntl
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

# Any two files that exist can be locked.
TURNSTILE, ROOM = Path(__file__), Path(__file__).with_name("every_test_ran.py")
# The open file of the room, while a test of this process is in it.
INSIDE: ContextVar = ContextVar("INSIDE", default=None)


@contextmanager
def turn(alone: bool):
    """All but the one that wants to be alone may be in the room together. It waits for them inside the turnstile, so
    that no other goes in before it."""
    with open(ROOM) as room:
        enter(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        before = INSIDE.set(room)
        try:
            yield
        finally:
            INSIDE.reset(before)
            fcntl.flock(room, fcntl.LOCK_UN)  # for a process that a test forked, too


def enter(room, how: int) -> None:
    with open(TURNSTILE) as turnstile:
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(room, how)


@contextmanager
def alone():
    """For a part of a test: it leaves the room and comes back alone. It may hold no other lock meanwhile."""
    room = INSIDE.get()
    if room is None:  # there are no others
        yield
        return
    fcntl.flock(room, fcntl.LOCK_UN)
    enter(room, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(room, fcntl.LOCK_SH)
