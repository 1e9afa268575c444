"""Ctrl-C at every line: runs a call, notes each line of nanokv that it executes, and runs it again for every one of
them with an exception raised there, at the first and at the last execution of that line.

    scenario    fresh() → state; call(state), which is interrupted; go_on(state), what its user does afterwards → answer
    lines       {(file, line): how often it ran}
    replay      one run, interrupted at one point → the answer, which must be the undisturbed one

The exception comes out of sys.settrace, before the line runs. One that is raised inside `__del__` is swallowed by
Python and only reported (`sys.unraisablehook`): the call goes on as if nothing had been, and must leave nothing behind.
"""

import gc
import random
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import nanokv
from nanokv.support import neighbours

FOLDER = str(Path(nanokv.__file__).parent)
OUTSIDE: list = []  # modes that are never left: to free one would bring the mode before it back


@contextmanager
def tracing(on_line, folder=FOLDER):
    """Call on_line(file, line) before every line of this folder or file that runs in this thread; what it raises is
    raised there. The fewer files, the faster."""

    def local(frame, event, _):
        if event == "line":
            on_line(frame.f_code.co_filename, frame.f_lineno)
        return local

    # Python 3.11 can crash where it is collected while a frame is made for the trace function.
    gc.disable()
    before, hook = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(folder) else None)
    try:
        yield
    finally:
        sys.settrace(before)
        sys.unraisablehook = hook
        gc.enable()


def leave_inference_mode():
    """Python takes a signal at the beginning of a function too, so at that of `torch.inference_mode.__exit__`: then the
    thread stays in it, and weights that a later test loads cannot be trained or viewed."""
    gc.collect()  # what is left of a mode that was not ended changes the mode when it is freed
    if torch.is_inference_mode_enabled():
        mode = torch.inference_mode(False)
        mode.__enter__()
        OUTSIDE.append(mode)


def lines(scenario) -> tuple[dict, object]:
    """({(file, line): how often}, the answer) of an undisturbed run."""
    seen = {}

    def count(*point):
        seen[point] = seen.get(point, 0) + 1

    # What is imported or compiled at the first call is not part of it.
    scenario.call(scenario.fresh())
    state = scenario.fresh()
    with tracing(count):
        scenario.call(state)
    return seen, scenario.go_on(state)


def replay(scenario, point, hit: int, error=KeyboardInterrupt):
    """(the answer, whether the point was reached) of a run in which `error` is raised at the hit-th run of a line."""
    left = [hit]

    def strike(*at):
        if at == point:
            left[0] -= 1
            if not left[0]:
                raise error

    state = scenario.fresh()
    try:
        with tracing(strike, point[0]):
            scenario.call(state)
    except error:
        pass
    return scenario.go_on(state), left[0] <= 0


def first_and_last(seen: dict) -> list:
    """(point, hit) for the first and the last execution of every line."""
    return [(point, hit) for point in sorted(seen) for hit in sorted({1, seen[point]})]


def last(seen: dict) -> list:
    """(point, hit) for the last execution of every line."""
    return sorted(seen.items())


def some(count: int, seed: int = 0):
    """So many of `first_and_last`, drawn by lot."""
    return lambda seen: random.Random(seed).sample(
        every := first_and_last(seen), min(count, len(every))
    )


def survives(scenario, choose=first_and_last, error=KeyboardInterrupt):
    """Raise at all points that `choose` takes; all failures are named together.

    On one thread: the models are tiny, and waiting for a second one takes longer than the work. Without the watch that
    another test may have started: which lines run would depend on how busy the machine is.
    """
    threads, watch = torch.get_num_threads(), neighbours.WATCH
    torch.set_num_threads(1)
    neighbours.forget()
    try:
        strike_all(scenario, choose, error)
    finally:
        torch.set_num_threads(threads)
        neighbours.WATCH = watch
        leave_inference_mode()


def strike_all(scenario, choose, error):
    """The work of `survives`."""
    seen, expected = lines(scenario)
    assert len(seen) > 2, f"only {len(seen)} lines of nanokv were traced"
    chosen, failures = choose(seen), []
    for point, hit in chosen:
        where = f"{point[0].removeprefix(FOLDER)}:{point[1]} (run {hit} of {seen[point]})"
        try:
            answer, reached = replay(scenario, point, hit, error)
        except Exception as failure:
            failures.append(f"{where}: {type(failure).__name__}: {failure}")
            continue
        if not reached:
            failures.append(f"{where}: was not reached again")
        elif answer != expected:
            failures.append(f"{where}: {answer} instead of {expected}")
    assert not failures, f"{len(failures)} of {len(chosen)}:\n" + "\n".join(failures[:30])[:4000]
