"""Continuous batching: many requests over one page pool, each answered as if it were alone.

    engine = Engine(model, pages=64)
    one, two = engine.submit(ids, max_new_tokens=20), engine.submit(other_ids, temperature=0.7, seed=1)
    for request, step in engine: ...        until all are finished; or `for step in engine.stream(one)`

request.py holds what one request is, scheduler.py decides who computes what in a step, engine.py computes it.
handover.py sends a cache to another process; prefill_process.py is one that prefills for an engine that only decodes.
"""

from nanokv.engine.engine import Engine
from nanokv.engine.request import Request
from nanokv.engine.scheduler import Scheduler

__all__ = ["Engine", "Request", "Scheduler"]
