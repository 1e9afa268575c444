"""grade(test): rate a test by the faults that it catches.

The test is a function of a model that uses nanokv's public names and raises if something is
wrong. It runs on correct code first, where an exception is a false alarm. Then it runs under
every fault, where an exception or a timeout is a kill. Then it runs on correct code again: if it
fails only now, its result depends on earlier runs, so its kills do not count.
"""

import copy
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
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
from nanokv.model import Transformer

# Injected like any other fault, so that runs on correct code take the same path.
NOTHING = Fault("nothing", "no fault", "Right code.", "", "nothing", "solo", swaps=list)


@dataclass(frozen=True)
class Grade:
    """The result of a test. kills: fault → the error raised; survivors: faults that it missed;
    false_alarm: the error raised on correct code, or ""."""

    kills: dict[str, str]
    survivors: tuple[str, ...]
    false_alarm: str = ""
    note: str = ""  # why the test proves little: it compares nothing, or never ran the model

    @property
    def score(self) -> float:
        """Share of the faults that were killed, 0 to 1; 0 for a test that fails on correct code."""
        return len(self.kills) / max(1, len(self.kills) + len(self.survivors))

    def __str__(self) -> str:
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
    """The test took too long. Derives from BaseException, so that a test that catches Exception
    does not catch it."""


def grade(
    test: Callable[[Transformer], object],
    model: Transformer | None = None,
    faults: Iterable[str] | None = None,
    seconds: float = 60.0,
) -> Grade:
    """Run test(model) on correct code, under every fault (or each of `faults`), and on correct code
    again.

    model: by default a small random one, so that a run takes milliseconds. Every run gets a copy of
        it, the same random numbers (random, numpy, torch), and the original globals of torch and
        nanokv.
    seconds: time limit of one run. NanoKVError unless it is finite and above 0.

    The test runs in this process without a sandbox. Threads and processes that it starts are not
    ended, and a loop that catches every exception cannot be interrupted. Run tests that you do not
    trust in a container, and notebooks that contain them with `nanokv course grade`.
    """
    if not 0 < seconds < float("inf"):
        raise NanoKVError(
            f"seconds is {seconds!r}: the time limit of a run must be finite and above 0"
        )
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
    survivors = tuple(name for name in names if name not in kills)
    return Grade(kills, survivors, note=weakness(passes, len(kills)))


def weakness(passes: int, kills: int) -> str:
    """Why a test with these counts of forward passes and kills proves little; "" if it does not."""
    if not passes:
        return "The test never ran the model: it would pass whatever the code does."
    if not kills:
        return (
            "The test passes vacuously: it ran the model, but no fault made it fail. "
            "Compare with nanokv.score."
        )
    return ""


def attempt(
    test: Callable[[Transformer], object], model: Transformer, seconds: float, fault: Fault
) -> tuple[str, int]:
    """Run the test once on a copy of the model under a fault → (its error or "", forward
    passes)."""
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
        except BaseException as raised:  # pytest.fail and sys.exit do not derive from Exception
            if type(raised).__name__ != "Skipped":  # pytest.skip is no failure
                text = f"{type(raised).__name__}: {raised}"
                error = text.strip().splitlines()[0].removesuffix(":")
    if perf_counter() - began >= seconds:  # also if the test caught Overtime
        error = f"Overtime: the test took longer than {seconds:g} s"
    return error, len(passes)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Seed all generators with 0 inside the block, and restore their states afterwards."""
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
def time_limit(model: Transformer, seconds: float) -> Iterator[None]:
    """Raise Overtime after `seconds`: by an alarm in the main thread, elsewhere (and on Windows) at
    the next forward pass of the model."""
    end = perf_counter() + seconds

    def late(*_):
        if perf_counter() >= end:
            raise Overtime

    model.register_forward_pre_hook(late)
    with alarm(seconds, late):
        yield


@contextmanager
def alarm(seconds: float, late: Callable) -> Iterator[None]:
    """Call late() after `seconds` in the main thread; no alarm in other threads and on Windows.

    The alarm repeats every 0.1 s, in case the code catches the exception of the first one.
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
