"""grade(test): a test is as good as the bugs that it notices.

The test is a function of a model that uses nanokv's public names and raises when something is wrong. It runs on right
code, where raising is a false alarm, under every fault, where raising (or taking too long) is a kill, and on right code
once more: a test that fails now has failed because of what ran before, and its kills say nothing.
"""

import copy
import random
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from nanokv.errors import NanoKVError
from nanokv.lab.faults.catalogue import FAULTS, Fault
from nanokv.lab.faults.injection import find, substituted
from nanokv.lab.faults.restoring import globals_restored
from nanokv.lab.study.equality import small_model

# Put in like the others.
NOTHING = Fault("nothing", "no fault", "Right code.", "", "nothing", "solo", swaps=list)


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
        kills = len(self.kills)
        lines = [f"{kills} of {kills + len(self.survivors)} faults killed ({self.score:.0%})"]
        if self.false_alarm:
            lines = [f"false alarm: fails on right code, so it is not graded: {self.false_alarm}"]
        for name in self.survivors:
            fault = FAULTS[name]
            lines.append(f"  survived: {name}: {fault.title} (shows in: {fault.scenario})")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


class Overtime(BaseException):
    """The test took too long. No Exception, so that a test which catches those does not catch this."""


def grade(test, model=None, faults=None, seconds: float = 60.0) -> Grade:
    """Run test(model) on right code, under every fault (or those named), and on right code again.

    model: None takes a small random one, so that a run costs milliseconds; each run gets a copy, the same random
    numbers (random, numpy, torch), and the globals of torch and nanokv as they were. seconds: the longest a run may
    take; NanoKVError unless it is above 0. The test runs in this process: nothing stops one that means harm, what it
    starts is not ended, and a loop that catches everything, also KeyboardInterrupt, goes on. Somebody else's tests
    belong into a container; a notebook with them, into `nanokv course grade`.
    """
    if not 0 < seconds < float("inf"):
        raise NanoKVError(f"seconds is {seconds!r}: the time of one run must be above 0")
    if faults is None:
        faults = FAULTS
    names = [find(name).name for name in faults]
    if model is None:
        model = small_model()
    error, passes = attempt(test, model, seconds, NOTHING)
    if error:
        return Grade({}, (), false_alarm=error)
    errors = {name: attempt(test, model, seconds, FAULTS[name])[0] for name in names}
    error, _ = attempt(test, model, seconds, NOTHING)
    if error:
        return Grade(
            {}, (), false_alarm=f"only in a later run, so it depends on what ran before: {error}"
        )
    kills = {name: error for name, error in errors.items() if error}
    note = ""
    if not passes:
        note = "The test never ran the model: it would pass whatever the code does."
    elif not kills:
        note = (
            "The test passes vacuously: it ran the model, but no fault made it fail. "
            "Compare with nanokv.score."
        )
    return Grade(kills, tuple(name for name in names if name not in kills), note=note)


def attempt(test, model, seconds: float, fault: Fault) -> tuple[str, int]:
    """(what the test raised or "", forward passes of its model) of one run on a copy of the model, under a fault."""
    model = copy.deepcopy(model)
    passes = []
    error = ""
    began = perf_counter()
    with globals_restored(), same_random_numbers(), substituted(fault, alone=True):
        try:
            with time_limit(model, seconds):
                model.register_forward_pre_hook(lambda module, args: passes.append(1))
                test(model)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # pytest.fail and sys.exit are no Exceptions
            if type(raised).__name__ != "Skipped":  # pytest.skip says nothing
                text = f"{type(raised).__name__}: {raised}"
                error = text.strip().splitlines()[0].removesuffix(":")
    if perf_counter() - began >= seconds:  # also where the test caught what ended it
        error = f"Overtime: the test took longer than {seconds:g} s"
    return error, len(passes)


@contextmanager
def same_random_numbers():
    """Every run draws the same ones; afterwards the generators go on where they were."""
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def time_limit(model, seconds: float):
    """Overtime after so long: by an alarm in the main thread where there are alarms, else at the next forward."""
    end = perf_counter() + seconds

    def late(*_):
        if perf_counter() >= end:
            raise Overtime

    model.register_forward_pre_hook(late)
    with alarm(seconds, late):
        yield


@contextmanager
def alarm(seconds: float, late):
    """late() after so long, in the main thread where there are alarms; nothing elsewhere.

    The alarm comes again every 0.1 s, for code that catches what the first raised.
    """
    if (
        not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
