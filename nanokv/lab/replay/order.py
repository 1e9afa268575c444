"""Which of the waiting requests is computed next.

Times of arrival are not used: a window of N means that the next N requests of the trace wait all
the time.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from nanokv.lab.replay.indexes import Flat
from nanokv.lab.replay.traces import Request


def arrival(requests: Sequence[Request], index: Flat, window: int) -> Iterator[Request]:
    """As they came."""
    yield from requests


def longest_prefix(requests: Sequence[Request], index: Flat, window: int) -> Iterator[Request]:
    """The one with the longest cached prefix of `window` waiting ones; of equal ones the oldest.

    SGLang's order (Zheng et al. 2024, arXiv:2312.07104, section 3). Nothing bounds how long a
    request without a cached prefix waits.
    """
    coming = iter(requests)
    waiting = deque(islice(coming, window))
    while waiting:
        found = [index.match(request.keys[: request.sought]) for request in waiting]
        best = found.index(max(found))
        yield waiting[best]
        del waiting[best]
        waiting.extend(islice(coming, 1))
