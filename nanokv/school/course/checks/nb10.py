"""Notebook 10, where the bytes are: copies, slabs, pages, and freeing pages."""

import random
from dataclasses import dataclass

from nanokv.school.course import forms
from nanokv.school.course.checking import (
    RIGHT,
    Mistake,
    function,
    judged,
    questions,
    result_of,
    value,
    wrong,
)
from nanokv.school.course.work import copied_by_cat


def _wasted(c):
    """(unused slots of a slab, unused slots of pages)"""
    pages = len(range(0, c.used, c.page))  # one begins at every multiple of the page size
    return c.capacity - c.used, pages * c.page - c.used


def _table(rng):
    page = rng.choice((4, 8, 16))
    table = rng.sample(range(40), rng.randint(2, 8))
    return table, rng.randrange(len(table) * page), page


# --- 10.5: freeing pages --------------------------------------------------------------------------


def _judge_free(answer, case):
    """Free random tables over a small pool in turn; some share pages."""
    rng = random.Random("10.5")
    for _ in range(20):
        pages = rng.sample(range(12), 12)
        shared = pages[: rng.randint(1, 3)]  # a common beginning
        tables = [shared + pages[3:6], shared + pages[6:8], pages[8:10]]
        owners = [sum(p in table for table in tables) for p in range(12)]
        free = [p for p in range(12) if not owners[p]]
        for table in rng.sample(tables, 3):
            outcome = _one_free(answer, table, owners, free)
            if outcome is not None:
                return outcome
    return RIGHT


@dataclass(frozen=True)
class _Lists:
    """The table, the owners and the free list before a call."""

    table: list[int]
    owners: list[int]
    free: list[int]

    def right_owners(self) -> list[int]:
        return [n - self.table.count(page) for page, n in enumerate(self.owners)]

    def right_free(self) -> list[int]:
        owners = self.right_owners()
        return sorted(self.free + [page for page in self.table if owners[page] == 0])


def _one_free(answer, table, owners, free):
    """An Outcome if this call does not do what it should."""
    before = _Lists(list(table), list(owners), list(free))
    returned = result_of(answer, table, owners, free)
    return _pages_outcome(before, owners, free, returned) or _lists_outcome(
        before, table, owners, free, returned
    )


def _pages_outcome(before, owners, free, returned):
    """An Outcome if the wrong pages were freed, or none."""
    right_free = before.right_free()
    if sorted(free) == sorted(before.free + before.table) and sorted(free) != right_free:
        return wrong(
            "a page that another table holds is free now: the next request would write over it",
            "shared",
        )
    if len(free) != len(set(free)):
        return wrong("a page is in the free list twice: two requests would get it", "twice")
    if owners == before.owners:
        return wrong(
            "owners does not change: count down for every page of the table", "not counted"
        )
    if sorted(free) == sorted(before.free) != right_free:
        if isinstance(returned, list) and sorted(returned) == right_free:
            return wrong(
                "what you return is right, but it is a new list: change free_pages in place, the "
                "pool goes on using it",
                "another list",
            )
        return wrong(
            "no page came back to free_pages. Soon the pool is empty, though no request uses it.",
            "not returned",
        )
    return None


def _lists_outcome(before, table, owners, free, returned):
    """An Outcome if one of the lists is not what it should be after the call."""
    right_owners = before.right_owners()
    right_free = before.right_free()
    if len(before.table) > 1 and table == before.table[1::2]:
        return wrong(
            "the table changes while you go through it, so every second page is left out: go "
            "through it first, then empty it",
            "changed while looping",
        )
    if owners != right_owners:
        return wrong(f"owners is {owners}, but should be {right_owners}", "owners")
    if sorted(free) != right_free:
        return wrong(f"free_pages is {sorted(free)}, but should be {right_free}", "free list")
    if table:
        return wrong(
            "the table still lists its pages: used again, it would write into pages of others",
            "table",
        )
    if returned is not free:
        return wrong(
            "change free_pages in place and return it: the pool goes on using that very list",
            "another list",
        )
    return None


CHECKS = (
    value(
        "10.1",
        right=lambda case: copied_by_cat(case.N),
        parameters={"N": (100, 64, 200, 500)},
        wrong=(
            Mistake(
                "all rows",
                lambda c: c.N * (c.N + 1) // 2,
                "You counted the new rows too. Each of these N is written once, not copied.",
            ),
            Mistake(
                "square",
                lambda c: c.N**2,
                "The cache is not that long all the time: it grows from 1.",
            ),
            Mistake(
                "once each",
                lambda c: c.N,
                "Every step copies everything that is there, not only the newest row.",
            ),
            Mistake(
                "half the square",
                lambda c: c.N**2 // 2,
                "Nearly. The last row is never old, and the first append "
                "copies nothing: sum 1 + 2 + … + (N − 1).",
            ),
        ),
        otherwise="Step 2 copies 1 row, step 3 copies 2. Add them up.",
    ),
    value(
        "10.2",
        right=lambda case: (case.P + case.n, case.P + case.n - 1),
        parameters={"P": (4, 7, 20), "n": (10, 5, 8)},
        wrong=(
            Mistake(
                "prompt forgotten",
                lambda c: (c.n + 1, c.n),
                "That is the article's diagram, and it forgets the prompt from the first step on.",
            ),
            Mistake(
                "new row copied",
                lambda c: (c.P + c.n, c.P + c.n),
                "The new token is written too, but it is not an old one.",
            ),
            Mistake(
                "one ahead",
                lambda c: (c.P + c.n + 1, c.P + c.n),
                "The first decode is step 1: before it there are P tokens, after it P + 1.",
            ),
            Mistake(
                "one behind",
                lambda c: (c.P + c.n - 1, c.P + c.n - 2),
                "The prefill wrote all P, so the first decode makes P + 1.",
            ),
        ),
        otherwise="Write down the lengths before and after step 1.",
    ),
    value(
        "10.3",
        right=_wasted,
        parameters={"used": (100, 77, 999), "capacity": (2048, 4096), "page": (16, 32)},
        wrong=(
            Mistake(
                "pages waste nothing",
                lambda c: (c.capacity - c.used, 0),
                "The last page is taken whole, however little of it is used.",
            ),
            Mistake(
                "whole sizes",
                lambda c: (c.capacity, sum(_wasted(c)[1:]) + c.used),
                "Those are the whole sizes. Take away what is used.",
            ),
            Mistake(
                "filled part",
                lambda c: (c.capacity - c.used, c.used % c.page),
                "That is the part of the last page that is used.",
            ),
            Mistake(
                "swapped",
                lambda c: tuple(reversed(_wasted(c))),
                "Right numbers, wrong order: the slab first.",
                alone=True,
            ),
        ),
        otherwise="How many pages does it take? How many tokens can they hold together?",
    ),
    function(
        "10.4",
        right=lambda table, i, page: (table[i // page], i % page),
        inputs=_table,
        use=forms.PLACE,
        wrong=(
            Mistake(
                "no table",
                lambda table, i, page: (i // page, i % page),
                "That is the place in the table. The table has the number of the page in the pool "
                "at that place.",
            ),
            Mistake(
                "place instead of slot",
                lambda table, i, page: (table[i // page], i),
                "The slot counts from the beginning of the page.",
            ),
            Mistake(
                "swapped",
                lambda table, i, page: (i % page, table[i // page]),
                "First the page, then the slot.",
            ),
            Mistake(
                "table by remainder",
                lambda table, i, page: (table[i % len(table)], i // len(table)),
                "Tokens fill one page after another. They are not distributed in turn.",
            ),
        ),
    ),
    judged("10.5", _judge_free),
)

QUESTIONS = questions("10")
