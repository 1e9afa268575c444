"""Ends everything that a submission has started, also what has left its session and killed its parents.

Linux, where `unshare` may make a PID namespace: the submission sees no process but its own, and the kernel ends all of
them with the first. Linux without: this process becomes the parent of what was orphaned below it, and ends that
afterwards; but code of the same user can still kill this process itself. Elsewhere: what can be found below the child.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
ROUNDS = 250  # of 20 ms: a process that forks faster than it is killed is given up after 5 s


@functools.cache
def namespace() -> tuple[str, ...]:
    """What to put before a command to run it in a PID namespace of its own; () where that is not allowed.

    --mount-proc: code in it that looks up its children by number (Jupyter does) must not find strangers.
    """
    program = shutil.which("unshare") if sys.platform == "linux" else None
    if program is None:
        return ()
    # Root needs none, and would lose its rights in one.
    for user in ((), ("--user", "--map-current-user")):
        command = (program, *user, "--pid", "--fork", "--kill-child", "--mount-proc", "--")
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return ()


@contextmanager
def adopting():
    """Orphans from below this process become its children while this runs, and are ended afterwards: yields a list,
    which then holds the names of those."""
    import psutil

    me, left, before = psutil.Process(), [], {p.pid for p in psutil.Process().children()}
    linux = sys.platform == "linux"
    if linux:
        _subreaper(1)
    try:
        yield left
    finally:
        for _ in range(ROUNDS if linux else 0):
            found = [
                p
                for p in me.children(recursive=True)
                if p.pid not in before and _of_another_session(p.pid)
            ]
            left += [name for name in map(_killed, found) if name]
            if not found:
                break
            time.sleep(0.02)
        if linux:
            _subreaper(0)


def become_the_parent() -> None:
    """As in `adopting`, for the rest of this process (Linux)."""
    if sys.platform == "linux":
        _subreaper(1)


def _subreaper(on: int) -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, on, 0, 0, 0)


def _of_another_session(pid: int) -> bool:
    """A submission begins in a session of its own and cannot come back into this one; other children are not its."""
    try:
        return os.getsid(pid) != os.getsid(0)
    except OSError:  # it has ended
        return False


def _killed(process) -> str:
    """Kill, and let the system forget it; its name, or "" if it had ended before."""
    import psutil

    try:
        name = process.name() if process.status() != psutil.STATUS_ZOMBIE else ""
        process.kill()
        os.waitpid(process.pid, 0)
        return name
    # It has ended, or it is not our own child: its parent is killed too.
    except (psutil.Error, OSError):
        return ""
