"""Ends every process that a submission started, even one that left its session or lost its parent.

Linux, where `unshare` may create a PID namespace: the submission sees only its own processes, and
the kernel ends all of them with the first. Linux without it: this process adopts the orphans of
its descendants and ends them afterwards; code of the same user can still kill this process itself.
Other systems: only processes that can still be found below the child are ended.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
ROUNDS = 250  # of 20 ms each: after 5 s, processes that fork faster than they are killed remain


@functools.cache
def namespace() -> tuple[str, ...]:
    """The command prefix that runs a program in a new PID namespace; () where that is not allowed.

    --mount-proc gives it a matching /proc: code that looks up its children there by number, as
    Jupyter does, must not find unrelated processes.
    """
    if sys.platform != "linux":
        return ()
    program = shutil.which("unshare")
    if program is None:
        return ()
    # First without a user namespace: root needs none, and would lose its rights in one.
    for user in ((), ("--user", "--map-current-user")):
        command = (program, *user, "--pid", "--fork", "--kill-child", "--mount-proc", "--")
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    return ()


@contextmanager
def adopting() -> Iterator[list[str]]:
    """Adopt the orphans of this process's descendants, and kill them at the end of the block.

    Yields a list, which afterwards contains the names of the processes killed.
    """
    import psutil  # type: ignore[import-untyped]  # psutil has no types

    left: list[str] = []
    if sys.platform != "linux":
        yield left
        return
    before = {process.pid for process in psutil.Process().children()}
    _subreaper(1)
    try:
        yield left
    finally:
        _end_orphans(before, left)
        _subreaper(0)


def _end_orphans(before: set[int], left: list[str]) -> None:
    """Kill all descendants in other sessions, except `before`, and add their names to `left`."""
    import psutil

    for _ in range(ROUNDS):
        found = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.pid not in before and _of_another_session(process.pid)
        ]
        left += [name for name in map(_killed, found) if name]
        if not found:
            return
        time.sleep(0.02)


def become_the_parent() -> None:
    """Adopt orphaned descendants for the rest of this process's life (Linux only)."""
    if sys.platform == "linux":
        _subreaper(1)


def _subreaper(on: int) -> None:
    ctypes.CDLL(None).prctl(SUBREAPER, on, 0, 0, 0)


def _of_another_session(pid: int) -> bool:
    """Does the process belong to a submission?

    A submission starts in a new session and cannot rejoin ours; our other children are in ours.
    """
    try:
        return os.getsid(pid) != os.getsid(0)
    except OSError:  # it has ended
        return False


def _killed(process) -> str:
    """Kill and reap a process. Returns its name, or "" if it had ended before."""
    import psutil

    try:
        name = ""
        if process.status() != psutil.STATUS_ZOMBIE:
            name = process.name()
        process.kill()
        os.waitpid(process.pid, 0)
        return name
    # The process has ended, or it is not our child: then its parent is killed too.
    except (psutil.Error, OSError):
        return ""
