"""inject(name): one fault for the length of a `with` block.

Injected faults form one stack per process, because all users share the code that a fault replaces. Each fault wraps
the code that it finds. To remove one, the faults above it are removed too, and then injected again.
"""

import difflib
import threading
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from nanokv.errors import NanoKVError
from nanokv.lab.faults.catalogue import FAULTS, Fault

_LOCK = threading.Lock()
_stack: list["_Injected"] = []  # oldest first, all by one thread


class _Injected:
    """A fault that is in. `alone`: nothing may be put in on top of it."""

    def __init__(self, fault: Fault, alone: bool):
        self.fault = fault
        self.alone = alone
        self.thread = threading.current_thread()
        self.undo = ExitStack()

    def put_in(self):
        with ExitStack() as swapped:  # if one of the swaps fails, those before it go out again
            for owner, attribute, stand_in in self.fault.swaps():
                swapped.enter_context(patch.object(owner, attribute, stand_in))
            self.undo = swapped.pop_all()


def find(name: str) -> Fault:
    """The fault of this name, or an error that lists what there is."""
    if name not in FAULTS:
        hint = ""
        for near in difflib.get_close_matches(str(name), FAULTS, n=1):
            hint = f"did you mean {near!r}?"
        raise NanoKVError(f"no fault is called {name!r}: there are {', '.join(FAULTS)}", hint)
    return FAULTS[name]


def inject(name: str):
    """Every model and cache used inside has the fault; afterwards everything is as before, also after an exception.

    As far as they run the code that it replaces: static_overflow needs a static cache, a layer class with a `mask` of
    its own keeps it, and models of nanokv.fast have another forward. Gives the Fault. Different faults may be nested,
    in any order of leaving; one that stays while an older one leaves forgets what it had seen. What a cache was filled
    with inside stays in it, so make a new one for what comes after.

    NanoKVError: no such fault, it is injected already, another thread has faults injected, or this is a test that is
    being graded.
    """
    return substituted(find(name))


@contextmanager
def substituted(fault: Fault, alone: bool = False):
    """`inject` for a Fault, which need not be one of the catalogue; `alone` refuses all others inside."""
    entry = _Injected(fault, alone)
    with _LOCK:
        _refuse(entry)
        entry.put_in()
        _stack.append(entry)
    try:
        yield fault
    finally:
        with _LOCK:
            _take_out(entry)


def _refuse(entry: _Injected):
    """NanoKVError if it cannot go on top of what is there."""
    name = entry.fault.name
    if _stack and _stack[0].thread is not entry.thread:
        raise NanoKVError(
            f"{name} cannot be injected here: the thread {_stack[0].thread.name!r} "
            f"has injected {_stack[0].fault.name}",
            hint="faults change code that all threads share: inject from one thread at a time",
        )
    if any(one.alone for one in _stack):
        raise NanoKVError(
            f"{name} cannot be injected by a test that is being graded",
            hint="grade(test) does that",
        )
    if any(one.fault.name == name for one in _stack):
        raise NanoKVError(
            f"{name} is injected already", hint="a fault twice would be another fault"
        )


def _take_out(entry: _Injected):
    """Take it out from wherever it stands in the stack."""
    later = _stack[_stack.index(entry) + 1 :]
    for one in reversed([entry, *later]):
        one.undo.close()
    _stack.remove(entry)
    for one in later:
        one.put_in()
