"""The place of one answer, from its request's arrival to its last token: data and a queue.

admission.py issues it, engine_client.py puts the engine's messages about it into the queue, and
response.py reads them.
"""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter

from nanokv.apps.serve.run.messages import Ended, Failed, Pieces, Usage


@dataclass(eq=False)
class Ticket:
    """Used in the event loop only. The answers of one request share one queue."""

    number: int
    index: int  # of the answer within its request
    tab: str
    key: str  # the salt of the request's API key
    events: asyncio.Queue[Pieces | Ended | Failed]
    opened: float = field(default_factory=perf_counter)
    submitted: bool = False
    usage: Usage = field(default_factory=Usage)
    end: Ended | Failed | None = None  # the last message to its reader
