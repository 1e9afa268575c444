"""Who leads and who follows: rank 0 does the work, the others do what it tells them.

    rank 0      lead(group, work)                              and says at the end that it is over
    the others  follow(group, Follower(group, model, answers).run)

What rank 0 says is a list, ["answer", …] (generation.py) or ["step", …] (engine.py). No torch before
it is needed: `rank()` is asked before anything else.
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
    """As torchrun, or launch.py, says; 1 where neither has started this process."""
    if not all(os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")):
        return 1
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal():
        return 1
    return int(text)


def rank() -> int:
    """Of this process."""
    if rank_count() <= 1:
        return 0
    return int(os.environ.get("RANK") or 0)


def lead(group: Group, work: Callable[[], int | None]) -> int:
    """The work itself → its exit code. When it is done the others are told; should it fail, they find it gone."""
    try:
        code = work() or 0
    except KeyboardInterrupt:
        group.stopped()
        raise
    group.hear(["end", code])
    return code


def follow(group: Group, work: Callable[[], int]) -> int:
    """Another rank's part → the exit code that rank 0 had. If it fails, the others are told why."""
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
    """A rank that is told what to do, with its part of the model and its side of the answers."""

    def __init__(self, group: Group, model: "Model", answers: "Following"):
        self.group = group
        self.model = model
        self.answers = answers
        self.engine: FollowingEngine | None = None

    def run(self) -> int:
        """What rank 0 says, one thing after the other → the exit code that it had."""
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
                self.engine.follow(values[0])

    def heard(self) -> list:
        """The next word of rank 0, which may have ended an answer."""
        word = self.answers.unheard
        if word:
            self.answers.unheard = None
            return word
        return self.group.hear()


def leave_interrupts() -> None:
    """Rank 0 decides what Ctrl-C means. What another rank gets goes on to it, through the program that started both;
    torchrun is told nothing, it would end all ranks at once. In a thread of its own: this one may wait in gloo."""
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
