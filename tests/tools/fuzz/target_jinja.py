"""Fuzz target: the same templates in a process with limits on memory and CPU time, where a crash or a hang inside of
jinja2 or of Python's own C code costs that process only.
"""

from target_template import ALLOWED, mutate, run, seeds

IN_PROCESS = False
INSTRUMENT = []
__all__ = ["ALLOWED", "INSTRUMENT", "IN_PROCESS", "mutate", "run", "seeds"]
