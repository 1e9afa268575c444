"""Known mistakes, and the search for two of them in an answer that no single one explains.

An answer of several numbers may have a different mistake in each. A product may be off by the
factors of both mistakes. A function may have two of the slips that its `made` can build. If several
pairs explain an answer, none is named: the feedback has to be true.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from numbers import Real
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """A known wrong answer.

    `gives`: case → the wrong value; for a function exercise, the wrong function itself.
    `slip`: the keyword arguments with which `made` of a function exercise builds this mistake.
    `alone`: the message is about the whole answer, so it is never combined with another mistake.
    """

    name: str
    gives: Callable
    message: str
    slip: dict = field(default_factory=dict)
    alone: bool = False


def combined(a: Mistake, b: Mistake) -> tuple[str, str]:
    """(message, name) of two mistakes together."""
    return f"Two slips at once. {a.message} And: {b.message}", f"{a.name} + {b.name}"


def of_value(
    answer: Any,
    right: Any,
    given_by: list[tuple[Mistake, Any]],
    alike: Callable[..., bool],
    factors: bool,
) -> tuple[Mistake, Mistake] | None:
    """The two mistakes that explain a wrong value; None unless exactly one pair does.

    `given_by`: [(mistake, its value)]. `alike`: (answer, value) → do they agree?
    """
    known = [(mistake, value) for mistake, value in given_by if not mistake.alone]
    explains = _factors if factors and isinstance(right, Real) else _parts
    found = [
        (a, b)
        for (a, x), (b, y) in itertools.combinations(known, 2)
        if explains(answer, right, x, y, alike)
    ]
    if len(found) != 1:
        return None
    return found[0]


def _factors(answer, right, x, y, alike) -> bool:
    numbers = isinstance(x, Real) and isinstance(y, Real) and right != 0
    return numbers and alike(answer, x * y / right)


def _parts(answer, right, x, y, alike) -> bool:
    """Is each wrong item that of x or y, and are both needed?"""
    alike_forms = all(isinstance(value, list | tuple) for value in (answer, right, x, y))
    if not alike_forms or len({len(value) for value in (answer, right, x, y)}) > 1:
        return False
    wrong = [
        items for items in zip(answer, x, y, right, strict=True) if not alike(items[0], items[3])
    ]
    of_x = [alike(one, first) for one, first, _, _ in wrong]
    of_y = [alike(one, second) for one, _, second, _ in wrong]
    explained = all(a or b for a, b in zip(of_x, of_y, strict=True))
    return explained and not all(of_x) and not all(of_y)


def functions(mistakes: Iterable[Mistake], made: Callable | None) -> list:
    """The combined mistakes, with their functions, of all pairs with different slip arguments."""
    if made is None:
        return []
    slipped = [mistake for mistake in mistakes if mistake.slip]
    pairs = [
        (a, b) for a, b in itertools.combinations(slipped, 2) if not a.slip.keys() & b.slip.keys()
    ]
    return [_both(a, b, made(**a.slip, **b.slip)) for a, b in pairs]


def _both(a, b, gives):
    message, name = combined(a, b)
    return SimpleNamespace(name=name, gives=gives, message=message)
