"""Starts the ranks of one machine: the same command for each rank, with rank 0 at the terminal.

torchrun does this too, also for several machines, and its ranks run the same code. But its agent
starts every rank in a new session, so the Ctrl-C and the size of the terminal would not reach the
rank that a person chats with. Here rank 0 has the terminal, and its exit code is the exit code of
the command. This module does not import torch, which saves the memory of torch in the launcher.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from nanokv.errors import ParallelError
from nanokv.parallel.group import LAUNCHED, STORE_FD, environment

POLL_S = 0.05
GRACE_S = 3.0  # for a rank to end by itself and report why, once another rank has ended
AGAIN = "start it again"


def launch(command: Sequence[str], size: int, keep_errors: bool = False) -> int:
    """Run `command` on `size` ranks → the exit code of rank 0; ParallelError if a signal ended it.

    Rank 0 has stdin, stdout and stderr; with `keep_errors` the other ranks write to stderr too. No
    rank is left running, whatever happens.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        ranks = Processes()
        try:
            with ranks.signals():
                ranks.start(command, size, listener, keep_errors)
                return ranks.wait()
        finally:
            ranks.end()


class Processes:
    """The processes of the ranks."""

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen] = []

    def start(
        self, command: Sequence[str], size: int, listener: socket.socket, keep_errors: bool
    ) -> None:
        """Start the ranks. Rank 0 inherits the terminal and the socket on which the others join."""
        port = listener.getsockname()[1]
        fd = listener.fileno()
        own = os.environ | environment(0, size, port) | {LAUNCHED: "1", STORE_FD: str(fd)}
        self.ranks.append(subprocess.Popen(command, env=own, pass_fds=[fd]))
        for rank in range(1, size):
            own = os.environ | environment(rank, size, port) | {LAUNCHED: "1"}
            process = subprocess.Popen(
                command,
                env=own,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if keep_errors else subprocess.DEVNULL,
            )
            self.ranks.append(process)

    def wait(self) -> int:
        """Wait for rank 0 → its exit code.

        ParallelError if a signal ended rank 0, or if another rank failed and rank 0, which may be
        waiting at a prompt, did not end.
        """
        first = self.ranks[0]
        gone = None
        while first.poll() is None and gone is None:
            # Exit code 0 is no failure: the rank has received the "end" message of rank 0, which is
            # about to end too.
            gone = next((rank for rank, process in enumerate(self.ranks) if process.poll()), None)
            time.sleep(POLL_S)
        if gone and not self.ended(first):
            first.terminate()
            self.ended(first)
            raise ParallelError(
                f"rank {gone} {how(self.ranks[gone].returncode)}, and the command with it", AGAIN
            )
        code = first.returncode
        if code < 0:  # rank 0 could not stop the others
            for rank in self.ranks:
                rank.kill()
        if code in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGPIPE):
            return 128 - code  # the exit code that a shell reports
        if code < 0:
            raise ParallelError(f"rank 0 {how(code)}, and the other ranks with it", AGAIN)
        return code

    def end(self) -> None:
        """Give the remaining ranks GRACE_S to end by themselves, then kill them."""
        self.ended(*self.ranks)
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()

    def ended(self, *ranks: subprocess.Popen) -> bool:
        """Wait up to GRACE_S → whether all these ranks have ended."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
            time.sleep(POLL_S)
        return all(rank.poll() is not None for rank in ranks)

    def signals(self) -> "Passing":
        return Passing(self)


class Passing:
    """Passes signals to this process on to rank 0.

    A terminal sends Ctrl-C to both processes. Rank 0 treats two within half a second as one.
    """

    def __init__(self, processes: Processes):
        self.processes = processes
        self.before: dict[int, object] = {}

    def __enter__(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self.before[number] = signal.signal(number, self.pass_on)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal returned it

    def pass_on(self, number: int, frame: object) -> None:
        for first in self.processes.ranks[:1]:
            if first.poll() is None:
                first.send_signal(number)


def how(code: int) -> str:
    """How a process ended, in words. code: its return code, negative for a signal."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def this_program(words: Sequence[str]) -> list[str]:
    """The command that runs `nanokv WORDS…` in another process."""
    return [sys.executable, "-m", "nanokv", *words]
