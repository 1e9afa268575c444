"""When is an answer given, and when do two answers say the same? Numbers, text, tuples, sets, dicts, tensors.

A `Sealed` answer is known by its salted hash only: nobody reads it by accident. It is no secret (the hash of a short
answer can be searched); a course needs no more.
"""

import hashlib
import math
import numbers
import re
from dataclasses import dataclass

MOST_ITEMS = 100_000  # of a tensor that is read number by number: no right answer has as many
THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?\s*")


@dataclass(frozen=True)
class Sealed:
    """A right answer as a hash, made by `nanokv course seal ID ANSWER`."""

    id: str
    digest: str


def seal(id: str, answer) -> str:
    """The salted hash of an answer's canonical text."""
    return hashlib.sha256(f"nanokv course {id} {canonical(answer)}".encode()).hexdigest()[:20]


def canonical(answer) -> str:
    """One text for all ways to write an answer: 8, 8.0, "8" and " 8 " are one; (1, 2) and [1, 2] too."""
    answer = plain(answer)
    if isinstance(answer, list):
        return "(" + ",".join(canonical(item) for item in answer) + ")"
    if isinstance(answer, set):
        return "{" + ",".join(sorted(answer)) + "}"
    if isinstance(answer, str):
        number = as_number(answer)
        return " ".join(answer.casefold().split()) if number is None else canonical(number)
    return (
        f"{answer:.6g}"
        if isinstance(answer, numbers.Real) and not isinstance(answer, bool)
        else repr(answer)
    )


def is_blank(answer) -> bool:
    """The untouched stub: `...`, None, an empty text, or a tuple that still holds one."""
    if isinstance(answer, list | tuple):
        return any(is_blank(item) for item in answer)
    return answer is None or answer is ... or (isinstance(answer, str) and not answer.strip())


def is_stub(result) -> bool:
    """What the untouched stub of a function returns: `...`, or a tuple that still holds one."""
    return any(map(is_stub, result)) if isinstance(result, list | tuple) else result is ...


def same(answer, right, rel: float = 1e-6, atol: float = 0.0) -> bool:
    """Do they agree? Numbers within max(atol, rel·|right|), text without case and spacing, the rest item by item.

    A list says the same as a set if it holds nothing twice.
    """
    if isinstance(right, Sealed):
        return right.digest in (seal(right.id, answer), seal(right.id, as_set(answer)))
    answer, right = plain(answer), plain(right)
    if isinstance(right, bool) or isinstance(answer, bool):
        return answer is right
    if isinstance(right, numbers.Real):
        answer = as_number(answer)
        return answer is not None and abs(answer - right) <= max(atol, rel * abs(right))
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


def plain(value):
    """Tensors, arrays, tuples, torch.Size and dtypes as lists, numbers and text. A huge tensor stays one."""
    if hasattr(value, "tolist"):  # a tensor, a numpy array or one of their scalars
        return value if math.prod(getattr(value, "shape", ())) > MOST_ITEMS else value.tolist()
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, frozenset | set):
        return {canonical(item) for item in value}
    return value


def as_set(value):
    """A list without repeats as the set of its items; anything else as it is."""
    items = plain(value)
    if not isinstance(items, list):
        return items
    found = {canonical(item) for item in items}
    return found if len(found) == len(items) else items


def has_nan(value) -> bool:
    """Is it NaN, or is an item of it?"""
    value = plain(value)
    if isinstance(value, list):
        return any(has_nan(item) for item in value)
    return isinstance(value, float) and math.isnan(value)


def named(value):
    """The same with NaN as a text, so that two of them are alike."""
    value = plain(value)
    return (
        [named(item) for item in value]
        if isinstance(value, list)
        else "NaN"
        if has_nan(value)
        else value
    )


def as_number(value) -> float | None:
    """A number, also one written as "1,024"; None if it is none. NaN and what no float can hold are none."""
    if isinstance(value, str):
        # "0,5" is no number: 5 or a half?
        value = value.replace(",", "") if THOUSANDS.fullmatch(value) else value
    elif not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if math.isnan(number) else number if isinstance(value, str) else value
