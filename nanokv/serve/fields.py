"""Fields of a request's JSON: of the type that was expected, or a refusal that names the field and its value.

`shown` is the field's place where its name alone does not say it: "messages[2].content".
"""

from typing import Any

from nanokv.serve.errors import ApiError


def kind(fields: dict, name: str, wanted: type | tuple, default: Any, shown: str | None = None) -> Any:
    """A field of the type wanted, or the default where it is absent."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, wanted):
        names = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
        words = " or ".join(names[one] for one in (wanted if isinstance(wanted, tuple) else (wanted,)))
        raise ApiError(400, f"{shown or name} is {say(value)}: {words} was expected", shown or name)
    return value


def needed(fields: dict, name: str, wanted: type | tuple, shown: str | None = None) -> Any:
    """The same of a field that must be there."""
    if fields.get(name) is None:
        raise ApiError(400, f"{shown or name} is missing", shown or name)
    return kind(fields, name, wanted, None, shown)


def say(value: Any) -> str:
    """A value in a message, short."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def integer(fields: dict, name: str, low: int, high: int) -> int | None:
    """A field from low to high, or None where it is absent."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise ApiError(400, f"{name} is {say(value)}: an integer from {low} to {high} was expected", name)
    return value


def equal(one: Any, other: Any) -> bool:
    """To JSON, 0 is not false."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def whole_numbers(found: list, name: str) -> list[int]:
    """A list of ids: no lists within it."""
    if wrong := [one for one in found if type(one) is not int]:
        raise ApiError(400, f"{name} holds {say(wrong[0])}: whole numbers were expected", name)
    return found
