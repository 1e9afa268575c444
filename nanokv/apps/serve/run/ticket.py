"""The place of one answer, from the arrival of its request to its last token: data and a queue.

admission.py gives it out, engine_client.py puts into the queue what the engine's thread says of it,
and response.py reads that.
"""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter

from nanokv.apps.serve.run.messages import Ended, Failed, Pieces, Usage


@dataclass(eq=False)
class Ticket:
    """Belongs to the event loop. The answers of one request have one queue together."""

    number: int
    index: int  # of the answer within its request
    tab: str
    events: asyncio.Queue[Pieces | Ended | Failed]
    opened: float = field(default_factory=perf_counter)
    submitted: bool = False
    usage: Usage = field(default_factory=Usage)
    end: Ended | Failed | None = None  # the last that its reader is told
