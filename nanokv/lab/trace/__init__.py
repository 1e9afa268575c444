"""One greedy run, recorded tensor by tensor, and the page that shows it: what `nanokv trace` is made of.

run = record(model, ids, max_new_tokens=32)     every step's cache, attention, angles and logits
costs = measure(model, ids, run.tokens)         the same run timed with nothing watching, with and without a cache
"""

from nanokv.lab.trace.page import Fault, build, page_bytes
from nanokv.lab.trace.recorder import Costs, Run, Step, measure, record

__all__ = ["Costs", "Fault", "Run", "Step", "build", "measure", "page_bytes", "record"]
