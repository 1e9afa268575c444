"""Exercises, questions and predictions as data for assets/judge.js, which judges them in a page.

Values, messages and tolerances are those of the checks. An exercise has data only if its answer is
a value. `encoded` keeps the answers from being read at a glance; a reader can decode them.
"""

import base64
import itertools
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanokv.school.course import forms
from nanokv.school.course.answers import plain
from nanokv.school.course.checking import Case, Check, Question, hint, wanted_names

if TYPE_CHECKING:
    from nanokv.model import Transformer

TIMES = ("times", "x", "×")
PERCENT = ("percent", "%")
TOKENS = ("tokens", "token")
BYTES = ("bytes", "B")
# The units that an answer may name, each in the ways to write it: one per number, or one for all.
UNITS: dict[str, tuple[tuple[str, ...], ...]] = {
    "00.4": (("multiplications",),),
    "01.4": (TIMES,),
    "05.1": (("token-forwards", *TOKENS),),
    "05.3": (("scores", "cells"),),
    "06.2": (TOKENS,),
    "08.2": (("GB",), ("GiB",)),
    "08.3": (("KiB", "KiB per token"),),
    "08.4": (PERCENT,),
    "08.5": (("sequences",),),
    "09.1": (("tokens per second", "tokens/s", "tok/s"),),
    "09.3": (TOKENS,),
    "09.5": (TIMES,),
    "10.1": (("rows",),),
    "10.2": (TOKENS,),
    "10.3": (("slots",),),
    "11.2": (TOKENS,),
    "11.3": (TOKENS,),
    "12.2": (PERCENT,),
    "12.3": (BYTES,),
    "13.2": (TIMES,),
    "14.1": (BYTES,),
    "14.4": (("seconds", "s"),),
}


def encoded(data: dict) -> str:
    """JSON in UTF-8 as Base64."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(text.encode()).decode()


def exercise(check: Check, model: "Transformer | None" = None) -> dict | None:
    """The data of an exercise with the course's own numbers; None if its answer is no single value.

    `rows` are the known answers, the right one first, each {value, state, message, alone}.
    """
    case = check.case(None, model)
    if check.choices is not None:
        return _of_choices(check, case, check.choices(case))
    right = _right(check, case)
    if right is None:
        return None
    rows = [_row(right, "right", "", alone=True)]
    for mistake in check.mistakes:
        rows.append(_row(mistake.gives(case), "wrong", mistake.message, mistake.alone))
    names = [name.casefold() for name in check.names]
    form = _form(check, right)
    misfit = f"the form is another one: wanted is {form}"
    if names:
        misfit = wanted_names(check.names)
    return {
        "id": check.id,
        "rows": rows,
        "near": check.near,
        "factors": check.factors,
        "open": isinstance(right, list),
        "names": names,
        "form": form,
        "misfit": misfit,
        "otherwise": hint(check.otherwise, check.near),
        "units": UNITS.get(check.id, ()),
        "answer": written(right),
    }


def question(one: Question) -> dict:
    """The data of a question: its letters, each with its comment."""
    rows = []
    for letter in one.options:
        outcome = one.judge(letter)
        rows.append(_row(letter, outcome.state, outcome.message, alone=True))
    return {"id": one.id, "rows": rows}


def written(value: Any) -> str:
    """A right answer as a learner could type it, floats to six digits."""
    if not isinstance(value, tuple | set):
        value = plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, set):
        return "{" + ", ".join(map(written, sorted(value))) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(written, value)) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return repr(value)


def _of_choices(check: Check, case: Case, choices: Iterable) -> dict:
    """The data of an exercise that judges few answers, each by itself."""
    rows: list[dict] = []
    right = None
    for choice in choices:
        outcome = check.judge(choice, case)
        row = _row(choice, outcome.state, outcome.message, alone=True)
        if outcome.state == "right":
            right = choice
            rows.insert(0, row)
        else:
            rows.append(row)
    misfit = check.judge("?", case).message
    return {
        "id": check.id,
        "rows": rows,
        "near": check.near,
        "factors": False,
        "open": False,
        "names": [],
        "form": misfit,
        "misfit": misfit,
        "otherwise": check.judge(_unlike(right), case).message,
        "units": (),
        "answer": written(right),
    }


def _unlike(right: Any) -> Any:
    """A wrong answer of the same form: no choice, text or number is like it."""
    if not isinstance(right, tuple):
        return "?"
    return tuple(part if isinstance(part, str) else 10**6 for part in right)


def _right(check: Check, case: Case) -> Any:
    """The right value, also of a sealed set of names; None if there is none."""
    if check.key is not None:
        return check.key(case)
    for size in range(len(check.names) + 1):
        for some in itertools.combinations(check.names, size):
            if check.judge(set(some), case).state == "right":
                return set(some)
    return None


def _row(value: Any, state: str, message: str, alone: bool) -> dict:
    return {"value": _value(value), "state": state, "message": message, "alone": alone}


def _value(value: Any) -> Any:
    """In JSON: a set is {"set": [its items as canonical texts]}."""
    value = plain(value)
    if isinstance(value, set):
        return {"set": sorted(value)}
    if isinstance(value, list):
        return [_value(item) for item in value]
    return value


def _form(check: Check, right: Any) -> str:
    """What to type: "2 numbers, such as (1.5, 2.5), in GB and GiB"."""
    if check.names:
        return "a set of names, such as {" + ", ".join(check.names[:2]) + "}"
    units = " and ".join(ways[0] for ways in UNITS.get(check.id, ()))
    wanted = forms.wanted(right)
    if units:
        wanted += f", in {units}"
    return wanted
