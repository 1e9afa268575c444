"""The form of an answer: its type, length and shape, judged before its content.

The right answer defines the form. A tuple fixes the number and the kinds of the items, a list only
the kind of its items, a tensor its shape. None allows anything.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from nanokv.school.course.answers import as_number, as_set, has_nan, plain

NUMBER = re.compile(r"[+-]?\d+(?:[,_]\d{3})*(?!\d)(?:\.\d+)?(?:[eE][+-]?\d+)?")
TOO_LARGE = "a number that is too large for a float"
WORDS = ("x", "yz", "w")
PLURALS = {"a number": "numbers", "a text": "texts"}
TENSORS = {"ndarray": "torch.from_numpy(…)", "list": "torch.tensor(…)", "tuple": "torch.tensor(…)"}


def misfit(answer: Any, right: Any) -> str:
    """How the form of an answer differs from the right one, with an example; "" if it fits."""
    if _is_tensor(right):
        return _tensor_misfit(answer, right)
    if fits(answer, right):
        return ""
    own = _refilled(answer, right)
    example = f"such as {_example(right)!r}" if own is None else f"written as {own!r}"
    where = "the form"
    this = _described(answer)
    wanted = "a list" if right == [] else _described(right)
    # The outer forms agree: name the first item that differs.
    if this == wanted and isinstance(right, tuple) and isinstance(answer, list | tuple):
        at = next(i for i, pair in enumerate(zip(answer, right, strict=True)) if not fits(*pair))
        where = f"the form of item {at}"
        this = _described(answer[at])
        wanted = _described(right[at])
    return f"{where} is another one: this is {this}, wanted is {wanted}, {example}"


def wanted(right: Any) -> str:
    """The form of a right answer, with an example that has other content."""
    return f"{_described(right)}, such as {_example(right)!r}"


def fits(answer: Any, right: Any) -> bool:
    """Does the answer have the form of the right one?"""
    answer = plain(answer)
    if right is None:
        return True
    if isinstance(right, bool | str):
        return isinstance(answer, type(right))
    if isinstance(right, Real):
        return as_number(answer) is not None or (has_nan(answer) and not isinstance(answer, list))
    if isinstance(right, set | frozenset):
        return isinstance(as_set(answer), set)
    if isinstance(right, tuple):
        return (
            isinstance(answer, list) and len(answer) == len(right) and all(map(fits, answer, right))
        )
    if isinstance(right, list):
        kind = right[0] if right else None
        return isinstance(answer, list) and all(fits(item, kind) for item in answer)
    return True


def _is_tensor(value) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "numel")


def _tensor_misfit(answer, right) -> str:
    shape = tuple(right.shape)
    if not _is_tensor(answer):
        kind = type(answer).__name__
        how = f": {TENSORS[kind]} makes one" if kind in TENSORS else ""
        wanted = f"a {right.dtype} tensor {shape}{how}"
        return f"the form is another one: this is {_described(answer)}, wanted is {wanted}"
    if tuple(answer.shape) != shape:
        return f"the shape is {tuple(answer.shape)}, and it has to be {shape}"
    return ""


def _described(value) -> str:
    """The form of a value in words."""
    if _is_tensor(value) and value.ndim:
        return f"a tensor {tuple(value.shape)}"
    kind = type(value).__name__
    if kind == "ndarray":
        return f"a numpy array {value.shape}"
    if isinstance(value, bool):
        return "True or False"
    if (as_number(value) is not None and not isinstance(value, str)) or kind == "float":
        return "a number"
    if isinstance(value, set | frozenset):
        return "a set"
    if isinstance(value, list | tuple):
        return _described_items(value)
    if isinstance(value, int):
        return TOO_LARGE
    if isinstance(value, str):
        return "a text"
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return f"{article} {kind}"


def _described_items(value: list | tuple) -> str:
    kind = type(value).__name__
    if not value:
        return f"an empty {kind}"
    kinds = {_described(item) for item in value}
    if TOO_LARGE in kinds:
        return f"a {kind} with {TOO_LARGE}"
    if len(kinds) > 1:
        return f"{len(value)} items"
    (item,) = kinds
    plural = PLURALS.get(item)
    if isinstance(value, list):
        return f"a list of {plural}" if plural else f"a list, each item {item}"
    if plural is None:
        return f"{len(value)} times {item}"
    if len(value) == 1:
        return f"a tuple of 1 {plural[:-1]}"
    return f"{len(value)} {plural}"


def _example(right):
    """An example of the same form that gives nothing of the right answer away."""
    counter = iter(range(1, 1000))

    def made(part):
        if isinstance(part, bool):
            return True
        if isinstance(part, tuple):
            return tuple(map(made, part))
        if isinstance(part, list):
            return [made(part[0] if part else 0) for _ in range(3)]
        if isinstance(part, str):
            return WORDS[next(counter) % len(WORDS)]
        if isinstance(part, set):
            return {1, 2}
        if isinstance(part, int):
            return next(counter)
        return next(counter) + 0.5

    return made(right)


def _refilled(answer, right):
    """The answer's numbers or texts put into the right form; None if their count does not match."""
    texts = any(isinstance(leaf, str) for leaf in _leaves(right))
    parts = [part for leaf in _leaves(plain(answer)) for part in _parts(leaf, texts)]
    if isinstance(right, list):
        flat = not any(isinstance(item, list | tuple) for item in right)
        return parts if flat and len(parts) > 1 else None
    if not isinstance(right, tuple | Real) or len(parts) != len(list(_leaves(right))):
        return None
    return _filled(right, parts)


def _filled(right, parts: list):
    if isinstance(right, tuple):
        return tuple(_filled(item, parts) for item in right)
    return parts.pop(0)


def _leaves(value):
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _parts(leaf, texts: bool) -> Iterable:
    """The words (`texts`) or the numbers in one leaf."""
    if isinstance(leaf, str) and texts:
        return re.findall(r"\w+", leaf)
    if isinstance(leaf, str):
        return [_whole(as_number(number)) for number in NUMBER.findall(leaf)]
    if texts or as_number(leaf) is None:
        return []
    return [leaf]


def _whole(number: float | None) -> float | None:
    """A float as an int, where its value is one."""
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number


# --- the types that later notebooks need ----------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """What later code needs of a function's result.

    `fits`: (result, arguments) → can that code use the result unchanged?
    `wanted`: what to return, and why, as the end of a sentence.
    """

    fits: Callable
    wanted: str

    def misuse(self, given: Any, arguments: tuple) -> str:
        """What to return instead; "" if the result may be used."""
        if self.fits(given, arguments):
            return ""
        return f"right numbers; return {self.wanted}. This is {_kind(given)}"


def _kind(value) -> str:
    """The type of a value in words, with the types of a collection's items or a tensor's dtype."""
    if _is_tensor(value):
        return f"a tensor of {value.dtype}"
    if hasattr(value, "dtype"):
        return f"a numpy {type(value).__name__} of {value.dtype}"
    if isinstance(value, list | tuple | set | frozenset):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {' and '.join(kinds)}"
    return f"a {type(value).__name__}"


def _is_int(value, _=None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(value, kinds) -> bool:
    return isinstance(value, kinds) and all(map(_is_int, value))


def _is_like_the_first(value, arguments) -> bool:
    import torch

    x = next(argument for argument in arguments if isinstance(argument, torch.Tensor))
    alike = isinstance(value, torch.Tensor) and (value.dtype, value.device) == (x.dtype, x.device)
    return alike and not value.requires_grad


COUNT = Use(_is_int, "an int: it is where a list is cut")
TIMES = Use(_is_int, "an int: it says how often something is done")
COUNTS = Use(lambda some, _: _are_ints(some, tuple | list), "a list of ints: lists are cut there")
INDEX = Use(_is_int, "an int: it will index a tensor")
PLACE = Use(lambda pair, _: _are_ints(pair, tuple | list), "two ints: they will index a tensor")
IDS = Use(lambda ids, _: _are_ints(ids, tuple | list), "a list of ints: the tokenizer reads them")
INDICES = Use(
    lambda some, _: _are_ints(some, tuple | list | set | frozenset),
    "a set of ints: they will index a tensor",
)
COMPUTED = Use(
    _is_like_the_first, "a tensor with the dtype and the device of the input: it is computed with"
)
