"""Commands that start at once: forked from a process that has imported torch, instead of importing it each time.

Importing torch takes a second of the processor; the quick half of the tests starts hundreds of commands. The child is a
process of its own with its own environment, files, signals and terminal, and imports nanokv from the first line
on. What a start itself costs, imports or finds in the environment is tested by `subprocess`. Where forking is not to be
had (macOS, Windows), and with NANOKV_COLD_TESTS set, every command is started from nothing.
"""

import contextlib
import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

PARENT = Path(__file__).with_name("warm_parent.py")
# Read once, as the interpreter or a library begins: the child has what its parent began with.
READ_ONCE = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "ATEN_",
    "TORCH",
    "PYTORCH",
    "CUDA_",
    "TRITON_",
    "MALLOC_",
)
# These the child looks up itself, or they change nothing that a test sees.
LOOKED_UP = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
ONE_AT_A_TIME = threading.Lock()


def start(argv, env: dict, **options) -> subprocess.Popen:
    """subprocess.Popen(argv, env=env, **options); forked where this command and these options allow it.

    `terminal` (only where can_fork says yes): stdin becomes the terminal that controls it, as in a session of its own.
    """
    if not can_fork(argv, env, options):
        return subprocess.Popen(argv, env=env, **options)
    return Forked(argv, env=env, **options)


def can_fork(command: Sequence, env: dict, options: dict) -> bool:
    """A nanokv command, with text as arguments, in an environment that begins as the parent's did."""
    if sys.platform != "linux" or os.environ.get("NANOKV_COLD_TESTS"):
        return False
    if list(command[:3]) != [sys.executable, "-m", "nanokv"]:
        return False
    if not all(isinstance(part, str) for part in command):
        return False
    if options.keys() & {"preexec_fn", "pass_fds", "executable", "umask"}:
        return False
    return read_once({"LANG": "C.UTF-8"} | env) == read_once(parent_environment())


def read_once(env: dict) -> dict:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_ONCE) and name not in LOOKED_UP
    }


def parent_environment() -> dict:
    from cli_helpers import environment

    # Without a LANG the interpreter would take this one.
    return {"LANG": "C.UTF-8"} | environment()


@functools.cache
def parent() -> socket.socket:
    """The socket of the process that forks: one per process of the tests, ended when this one ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, str(PARENT), str(theirs.fileno())],
            env=parent_environment(),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours


class Forked(subprocess.Popen):
    """A Popen whose process is forked by another one, which tells its end through a pipe."""

    def __init__(self, argv, *, env, terminal=False, **options):
        self.terminal = terminal
        super().__init__(argv, env=env, **options)

    def _execute_child(self, *args):
        names = inspect.signature(subprocess.Popen._execute_child).parameters
        named = dict(zip(list(names)[1:], args, strict=True))
        self.ended, status = os.pipe()
        request = {
            "argv": list(named["args"][3:]),
            "env": named["env"],
            "cwd": os.fspath(named["cwd"] or os.getcwd()),
            "session": named["start_new_session"],
            "terminal": self.terminal,
        }
        given = [named["p2cread"], named["c2pwrite"], named["errwrite"]]
        streams = [own if file == -1 else file for own, file in enumerate(given)]
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        try:
            with ONE_AT_A_TIME:
                socket.send_fds(parent(), [json.dumps(request).encode()], [*streams, status])
                self.pid = int(parent().recv(64))
        finally:
            os.close(status)
            self._close_pipe_fds(*(named[name] for name in pipes))
        self._child_created = True

    def _try_wait(self, wait_flags):
        """(pid, status) of an ended process, else (0, 0): as os.waitpid() tells it of a child."""
        timeout = 0 if wait_flags & os.WNOHANG else None
        if not select.select([self.ended], [], [], timeout)[0]:
            return 0, 0
        told = os.read(self.ended, 64)
        # The parent itself is gone where nothing is told.
        return self.pid, int(told or b"9")

    def _internal_poll(self, *_, **__):
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode

    def _handle_exitstatus(self, status, *_):
        super()._handle_exitstatus(status)
        with contextlib.suppress(OSError):
            os.close(self.ended)
