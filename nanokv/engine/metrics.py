"""Counters of the whole engine: tokens, forwards, preemptions, and how well the pages were used.

Waste is the share of slots in used pages that hold no token: the tail of each last page, and pages
taken for a chunk that is not computed yet. A page that requests share counts once.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanokv.cache import PagePool
    from nanokv.engine.request import Request


@dataclass
class Metrics:
    """Counts since the engine was made; means are over steps.

    An interrupted step may be missing from some counts.
    """

    steps: int = 0
    forwards: int = 0
    prefill_tokens: int = 0  # computed; preempted requests count again
    decode_tokens: int = 0
    reused_tokens: int = 0  # found in the index instead of computed; preempted requests count again
    finished: int = 0
    preemptions: int = 0
    pages: int = 0  # size of the pool
    peak_pages: int = 0  # the most that requests have used at once
    used_page_steps: int = 0  # sums over all steps
    used_slot_steps: int = 0
    wasted_slot_steps: int = 0

    def note_step(self, pool: "PagePool", requests: "Sequence[Request]") -> None:
        """Count the pages of the running requests, after the forwards of a step."""
        used, wasted = page_use(pool, requests)
        self.steps += 1
        self.pages = len(pool.references)
        self.peak_pages = max(self.peak_pages, used)
        self.used_page_steps += used
        self.used_slot_steps += used * pool.page_size
        self.wasted_slot_steps += wasted

    @property
    def page_use(self) -> float:
        """Mean share of the pool's pages that requests use."""
        if not self.steps:
            return 0.0
        return self.used_page_steps / (self.steps * self.pages)

    @property
    def waste(self) -> float:
        """Share of the slots of used pages that hold no token."""
        if not self.used_slot_steps:
            return 0.0
        return self.wasted_slot_steps / self.used_slot_steps

    def as_dict(self) -> dict[str, int | float]:
        """The counts and the two shares, for JSON."""
        hidden = ("used_page_steps", "used_slot_steps", "wasted_slot_steps")
        counts = {name: value for name, value in asdict(self).items() if name not in hidden}
        return counts | {"page_use": self.page_use, "waste": self.waste}


def page_use(pool: "PagePool", requests: "Sequence[Request]") -> tuple[int, int]:
    """(pages that these requests hold, slots in those pages without a token).

    Slots are summed per request: shared pages are always full, so no empty slot counts twice.
    """
    tables = [(request.cache.tables[0], request.fed) for request in requests]
    used: set[int] = set().union(*(table for table, _ in tables))
    empty = sum(len(table) * pool.page_size - length for table, length in tables)
    return len(used), empty
