"""Record one greedy run tensor by tensor, and show it as an HTML page: the parts of `nanokv trace`.

run = record(model, ids, max_new_tokens=32)     cache, attention, angles and logits of every step
costs = measure(model, run)                     the same run timed, with and without a cache
"""

from nanokv.lab.trace.page import Fault, build, page_bytes
from nanokv.lab.trace.recorder import Costs, Run, Step, measure, record

__all__ = ["Costs", "Fault", "Run", "Step", "build", "measure", "page_bytes", "record"]
