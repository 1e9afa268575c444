"""The two roles of a rank: rank 0 leads, and the other ranks follow its messages.

    rank 0       lead(group, work)                              sends ["end", code] when it is done
    other ranks  follow(group, Follower(group, model, answers).run)

A message of rank 0 is a list, such as ["answer", …] (generation.py) or ["step", …] (engine.py).
This module does not import torch, because the command line calls `rank()` before anything else.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanokv.errors import NanoKVError, ParallelError
from nanokv.parallel.group import LAUNCHED, Group
from weights_loader import CheckpointError

if TYPE_CHECKING:
    from nanokv.checkpoint import Model
    from nanokv.ranks.engine import FollowingEngine
    from nanokv.ranks.generation import Following


def rank_count() -> int:
    """The number of ranks, as set by torchrun or launch.py; 1 if neither started this process."""
    if not all(os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
        return 1
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal():
        return 1
    return int(text)


def rank() -> int:
    """The rank of this process; 0 if it is the only one."""
    if rank_count() <= 1:
        return 0
    return int(os.environ.get("RANK") or 0)


def lead(group: Group, work: Callable[[], int | None]) -> int:
    """Run the work of rank 0 → its exit code, which is sent to the other ranks.

    If the work fails, no message is sent: the other ranks fail when this process ends.
    """
    try:
        code = work() or 0
    except KeyboardInterrupt:
        group.stopped()
        raise
    group.hear(["end", code])
    return code


def follow(group: Group, work: Callable[[], int]) -> int:
    """Run the work of another rank → the exit code of rank 0.

    If it fails, the reason is published to the other ranks.
    """
    try:
        return work()
    except ParallelError:
        raise
    except Exception as error:
        text = str(error)
        if not isinstance(error, NanoKVError | CheckpointError):
            text = f"{type(error).__name__}: {error}"
        group.last_words(text)
        raise


class Follower:
    """Another rank than 0: follows the messages, with its part of the model and its answers."""

    def __init__(self, group: Group, model: "Model", answers: "Following"):
        self.group = group
        self.model = model
        self.answers = answers
        self.engine: FollowingEngine | None = None

    def run(self) -> int:
        """Handle the messages of rank 0 until the end → the exit code of rank 0."""
        while True:
            kind, *values = self.heard()
            if kind == "end":
                return values[0]
            if kind in ("answer", "save", "load"):
                getattr(self.answers, kind)(values[0])
            elif kind == "engine":
                from nanokv.ranks.engine import FollowingEngine

                self.engine = FollowingEngine(self.model, *values[0])
            elif kind == "step" and self.engine is not None:
                self.engine.follow(*values)

    def heard(self) -> list:
        """The next message of rank 0, which the last answer may have received already."""
        message = self.answers.unheard
        if message:
            self.answers.unheard = None
            return message
        return self.group.hear()


def leave_interrupts() -> None:
    """Leave the handling of Ctrl-C to rank 0.

    A rank that launch.py started passes SIGINT to the launcher, which passes it to rank 0. A thread
    does that, because the main thread may be waiting in gloo. Under torchrun SIGINT is ignored,
    because torchrun would end all ranks at once.
    """
    if not os.environ.get(LAUNCHED):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the threads of torch
    parent = os.getppid()

    def pass_on() -> None:
        while signal.sigwait({signal.SIGINT}) and os.getppid() == parent:
            os.kill(parent, signal.SIGINT)

    threading.Thread(target=pass_on, name="nanokv-interrupts", daemon=True).start()
