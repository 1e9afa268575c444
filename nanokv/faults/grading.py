"""grade(test): a test is as good as the bugs that it notices.

The test is a function of a model that uses nanokv's public names and raises when something is wrong. It runs once on
right code, where raising is a false alarm, and once under every fault, where raising (or taking too long) is a kill.
"""

import copy
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from nanokv.equality import small_model
from nanokv.faults.catalogue import FAULTS
from nanokv.faults.injection import find, inject


@dataclass(frozen=True)
class Grade:
    """What a test noticed. kills: fault → what was raised; false_alarm: what it raised on right code, or ""."""

    kills: dict[str, str]
    survivors: tuple[str, ...]
    false_alarm: str = ""
    note: str = ""  # why the test says little: it compares nothing, or never ran the model

    @property
    def score(self) -> float:
        """Share of the faults that were killed, 0 … 1; a test that fails on right code kills nothing."""
        return len(self.kills) / max(1, len(self.kills) + len(self.survivors))

    def __str__(self):
        lines = [f"{len(self.kills)} of {len(self.kills) + len(self.survivors)} faults killed ({self.score:.0%})"]
        if self.false_alarm:
            lines = [f"false alarm: fails on right code, so it is not graded: {self.false_alarm}"]
        survivors = (FAULTS[name] for name in self.survivors)
        lines += [f"  survived: {fault.name}: {fault.title} (shows in: {fault.scenario})" for fault in survivors]
        return "\n".join([*lines, *([self.note] if self.note else [])])


def grade(test, model=None, faults=None, seconds: float = 60.0) -> Grade:
    """Run test(model) on right code and under every fault (or those named).

    model: None takes a small random one, so that a run costs milliseconds; each run gets a copy, and the same random
    numbers. seconds: the longest a run may take.
    """
    names = [find(name).name for name in (FAULTS if faults is None else faults)]
    model = small_model() if model is None else model
    error, passes = attempt(test, model, seconds)
    if error:
        return Grade({}, (), false_alarm=error)
    kills = {}
    for name in names:
        with inject(name):
            error, _ = attempt(test, model, seconds)
        if error:
            kills[name] = error
    survivors = tuple(name for name in names if name not in kills)
    note = ""
    if not passes:
        note = "The test never ran the model: it would pass whatever the code does."
    elif not kills:
        note = "The test passes vacuously: it ran the model, but no fault made it fail. Compare with nanokv.score."
    return Grade(kills, survivors, note=note)


def attempt(test, model, seconds: float) -> tuple[str, int]:
    """(what the test raised or "", forward passes of its model) of one run on a copy of the model."""
    model, count, error = copy.deepcopy(model), [], ""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with time_limit(model, seconds):
                model.register_forward_pre_hook(lambda module, args: count.append(1))
                test(model)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # pytest.fail and sys.exit are no Exceptions
            if type(raised).__name__ != "Skipped":  # pytest.skip says nothing
                error = f"{type(raised).__name__}: {raised}".strip().splitlines()[0].removesuffix(":")
    return error, len(count)


@contextmanager
def time_limit(model, seconds: float):
    """TimeoutError after so long: by an alarm in the main thread where there are alarms, else at the next forward."""
    end = perf_counter() + seconds

    def late(*_):
        if perf_counter() >= end:
            raise TimeoutError(f"the test took longer than {seconds:g} s")

    model.register_forward_pre_hook(late)
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
