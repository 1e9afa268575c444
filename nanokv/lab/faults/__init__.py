"""Real KV-cache bugs that can be switched on for a while, to learn what they look like and what catches them.

    with nanokv.faults.inject("start_pos_off_by_one"):
        ...                                              # models and caches used here have the bug
    print(nanokv.faults.diagnose("not_cleared", model, tokenizer))
    print(nanokv.faults.grade(my_test))                  # how many of the bugs does my test notice?

The model and the caches know nothing of it: a fault is put in from outside, by substitution, and taken out again
whatever happens. FAULTS is the catalogue, by name. Models from nanokv.fast have a forward pass of their own and are
not affected, nor is a layer class that makes its own mask by a fault of masks. All threads see a fault; one may inject.
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
