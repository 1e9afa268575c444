"""Continuous batching: many requests over one page pool, each answered as if it were alone.

    engine = Engine(model, pages=64)
    one = engine.submit(ids, max_new_tokens=20)
    two = engine.submit(other_ids, temperature=0.7, seed=1)
    for request, step in engine: ...     until all are finished
    for step in engine.stream(one): ...  until this one is finished

request.py defines a request, scheduler.py plans each step, turns.py decides whose request is
admitted next, budget.py how many prompt tokens share a step with decodes, engine.py computes the
step. prefilled.py takes over prompts that another process has prefilled (nanokv/remote).
"""

from nanokv.engine.engine import Engine
from nanokv.engine.request import Request
from nanokv.engine.scheduler import Scheduler

__all__ = ["Engine", "Request", "Scheduler"]
