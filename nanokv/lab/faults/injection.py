"""inject(name): one fault for the length of a `with` block.

The injected faults form one stack per process, because all callers share the code that a fault
replaces. Each fault wraps the code below it in the stack. To remove a fault, the faults above it
are removed first and injected again afterwards.
"""

import difflib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from unittest.mock import patch

from nanokv.errors import NanoKVError
from nanokv.lab.faults.catalogue import FAULTS, Fault

_LOCK = threading.Lock()
_stack: list["_Injected"] = []  # oldest first, all by one thread


class _Injected:
    """A fault on the stack. If `alone` is set, no other fault may be injected on top of it."""

    def __init__(self, fault: Fault, alone: bool) -> None:
        self.fault = fault
        self.alone = alone
        self.thread = threading.current_thread()
        self.undo = ExitStack()

    def put_in(self) -> None:
        with ExitStack() as swapped:  # if a swap fails, the earlier ones are undone
            for owner, attribute, stand_in in self.fault.swaps():
                swapped.enter_context(patch.object(owner, attribute, stand_in))
            self.undo = swapped.pop_all()


def find(name: str) -> Fault:
    """The fault of this name. NanoKVError with the list of names if there is none."""
    if name not in FAULTS:
        hint = ""
        for near in difflib.get_close_matches(str(name), FAULTS, n=1):
            hint = f"did you mean {near!r}?"
        raise NanoKVError(f"no fault is called {name!r}: there are {', '.join(FAULTS)}", hint)
    return FAULTS[name]


def inject(name: str) -> AbstractContextManager[Fault]:
    """Inject a fault into every model and cache for the length of a `with` block; yields the Fault.

    A fault affects only code that it replaces: static_overflow needs a static cache, a layer
    class that overrides `mask` keeps its mask, and models of nanokv.fast have another forward
    pass. The block's end removes the fault, also after an exception, but a cache keeps the keys
    and values it got inside: make a new cache afterwards. Different faults may be nested and may
    end in any order; when an older fault ends, the newer ones are injected again and lose their
    state.

    NanoKVError: there is no such fault, it is already injected, another thread has injected a
    fault, or the caller is a test that is being graded.
    """
    return substituted(find(name))


@contextmanager
def substituted(fault: Fault, alone: bool = False) -> Iterator[Fault]:
    """`inject` for any Fault, also one outside the catalogue. `alone` refuses other faults
    inside."""
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


def _refuse(entry: _Injected) -> None:
    """NanoKVError if the entry cannot be pushed on the stack."""
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
            hint="grade(test) injects the faults itself",
        )
    if any(one.fault.name == name for one in _stack):
        raise NanoKVError(
            f"{name} is injected already", hint="two of the same fault would make another fault"
        )


def _take_out(entry: _Injected) -> None:
    """Remove the entry from any place in the stack."""
    later = _stack[_stack.index(entry) + 1 :]
    for one in reversed([entry, *later]):
        one.undo.close()
    _stack.remove(entry)
    for one in later:
        one.put_in()
