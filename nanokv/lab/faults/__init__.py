"""Real KV-cache bugs that can be injected for the length of a `with` block, to learn what they
change and which tests catch them.

    with nanokv.faults.inject("start_pos_off_by_one"):
        ...                                              # models and caches used here have the bug
    print(nanokv.faults.diagnose("not_cleared", model, tokenizer))
    print(nanokv.faults.grade(my_test))                  # how many of the bugs does my test catch?

The model and the caches have no code for faults. A fault replaces functions from outside and is
always undone when the block ends. FAULTS is the catalogue, by name. Faults do not affect models
from nanokv.fast, which have their own forward pass. Faults of masks do not affect a layer class
that makes its own mask. A fault affects all threads; only one thread at a time may inject.
"""

from nanokv.lab.faults.catalogue import FAULTS, Fault
from nanokv.lab.faults.diagnosis import Diagnosis, diagnose
from nanokv.lab.faults.grading import Grade, grade
from nanokv.lab.faults.injection import inject
from nanokv.lab.faults.scenarios import SCENARIOS, Outcome
from nanokv.lab.faults.smallest import smallest_test

__all__ = [
    "FAULTS",
    "SCENARIOS",
    "Diagnosis",
    "Fault",
    "Grade",
    "Outcome",
    "diagnose",
    "grade",
    "inject",
    "smallest_test",
]
