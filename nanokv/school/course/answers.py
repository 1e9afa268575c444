"""Comparison of answers: numbers, text, tuples, sets, dicts and tensors; and which ones are blank.

A `Sealed` answer is stored as a salted hash, so that a learner does not read it by accident. The
hash does not keep short answers secret, because all of them can be tried.
"""

import hashlib
import math
import numbers
import re
from dataclasses import dataclass
from typing import Any

MOST_ITEMS = 100_000  # a larger tensor is not made a list: no right answer has so many numbers
THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?\s*")


@dataclass(frozen=True)
class Sealed:
    """The hash of a right answer, as `nanokv course seal ID ANSWER` prints it."""

    id: str
    digest: str


def seal(id: str, answer: Any) -> str:
    """The salted hash of an answer's canonical text."""
    return hashlib.sha256(f"nanokv course {id} {canonical(answer)}".encode()).hexdigest()[:20]


def canonical(answer: Any) -> str:
    """The same text for every way to write an answer: 8, 8.0, "8" and " 8 "; (1, 2) and [1, 2]."""
    answer = plain(answer)
    if isinstance(answer, list):
        return "(" + ",".join(canonical(item) for item in answer) + ")"
    if isinstance(answer, set):
        return "{" + ",".join(sorted(answer)) + "}"
    if isinstance(answer, str):
        number = as_number(answer)
        if number is None:
            return " ".join(answer.casefold().split())
        return canonical(number)
    if isinstance(answer, numbers.Real) and not isinstance(answer, bool):
        return f"{answer:.6g}"
    return repr(answer)


def is_blank(answer: Any) -> bool:
    """Is this the untouched stub: `...`, None, an empty text, or a tuple that contains one?"""
    if isinstance(answer, list | tuple):
        return any(is_blank(item) for item in answer)
    return answer is None or answer is ... or (isinstance(answer, str) and not answer.strip())


def is_stub(result: Any) -> bool:
    """Did the untouched stub of a function return this: `...`, or a tuple that contains one?"""
    if isinstance(result, list | tuple):
        return any(map(is_stub, result))
    return result is ...


def same(answer: Any, right: Any, rel: float = 1e-6, atol: float = 0.0) -> bool:
    """Does the answer agree with the right one?

    Numbers agree within max(atol, rel·|right|), texts up to case and spacing, the rest item by
    item. A list agrees with a set if it has no repeats and the same items.
    """
    if isinstance(right, Sealed):
        return right.digest in (seal(right.id, answer), seal(right.id, as_set(answer)))
    answer = plain(answer)
    right = plain(right)
    if isinstance(right, bool) or isinstance(answer, bool):
        return answer is right
    if isinstance(right, numbers.Real):
        answer = as_number(answer)
        near = max(atol, rel * abs(right))  # type: ignore[operator]  # numbers.Real is too wide
        return answer is not None and abs(answer - right) <= near
    if isinstance(right, list):
        return (
            isinstance(answer, list)
            and len(answer) == len(right)
            and all(same(a, b, rel, atol) for a, b in zip(answer, right, strict=True))
        )
    if isinstance(right, dict):
        return (
            isinstance(answer, dict)
            and set(answer) == set(right)
            and all(same(answer[key], right[key], rel, atol) for key in right)
        )
    if isinstance(right, set):
        answer = as_set(answer)
        return isinstance(answer, set) and answer == right
    return isinstance(right, str) and canonical(answer) == canonical(right)


def plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists and numbers; sets as sets of text.

    A tensor of more than MOST_ITEMS numbers stays a tensor.
    """
    if hasattr(value, "tolist"):  # a tensor, a numpy array or one of their scalars
        size = math.prod(getattr(value, "shape", ()))
        return value if size > MOST_ITEMS else value.tolist()
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, frozenset | set):
        return {canonical(item) for item in value}
    return value


def as_set(value: Any) -> Any:
    """A list without repeats as the set of its items; any other value as `plain` gives it."""
    items = plain(value)
    if not isinstance(items, list):
        return items
    found = {canonical(item) for item in items}
    if len(found) < len(items):
        return items
    return found


def has_nan(value: Any) -> bool:
    """Is the value NaN, or does it contain NaN?"""
    value = plain(value)
    if isinstance(value, list):
        return any(has_nan(item) for item in value)
    return isinstance(value, float) and math.isnan(value)


def named(value: Any) -> Any:
    """The plain value with each NaN replaced by the text "NaN", so that two NaNs are equal."""
    value = plain(value)
    if isinstance(value, list):
        return [named(item) for item in value]
    if has_nan(value):
        return "NaN"
    return value


def as_number(value: Any) -> float | None:
    """The value as a number, also from text such as "1,024"; None if it is not one.

    NaN and numbers too large for a float are None too.
    """
    if not isinstance(value, str | numbers.Real) or isinstance(value, bool):
        return None
    if isinstance(value, str) and THOUSANDS.fullmatch(value):
        # "0,5" is not accepted: it may mean 5 or a half.
        value = value.replace(",", "")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if math.isnan(number):
        return None
    if isinstance(value, str):
        return number
    return value  # an int stays exact
