"""inject(name): one fault for the length of a `with` block."""

import difflib
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from nanokv.errors import NanoKVError
from nanokv.faults.catalogue import FAULTS, Fault

_active: list[str] = []


def find(name: str) -> Fault:
    """The fault of this name, or an error that lists what there is."""
    if name not in FAULTS:
        near = difflib.get_close_matches(str(name), FAULTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise NanoKVError(f"no fault is called {name!r}: there are {', '.join(FAULTS)}", hint)
    return FAULTS[name]


@contextmanager
def inject(name: str):
    """Every model and cache used inside has the fault; afterwards everything is as before, also after an exception.

    Gives the Fault. Different faults may be nested. What a cache was filled with inside stays in it, so make a new one
    for what comes after. NanoKVError: no such fault, or it is injected already.
    """
    fault = find(name)
    if name in _active:
        raise NanoKVError(f"{name} is injected already", hint="a fault twice would be another fault")
    with ExitStack() as stack:
        for owner, attribute, stand_in in fault.swaps():
            stack.enter_context(patch.object(owner, attribute, stand_in))
        _active.append(name)
        stack.callback(_active.remove, name)
        yield fault
