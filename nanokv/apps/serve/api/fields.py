"""Types of request fields for requests.py and messages.py, and pydantic's errors in our own words.

    class Chat(Fields):
        n: Annotated[int | None, Between(1, 16)] = None      one range for errors and /openapi.json
        top_p: Annotated[float | None, Ranged("top_p")] = None
        mirostat: Annotated[Any, Nothing(0)] = None          unsupported; only 0 or null is valid

    read(Chat, {"n": 17})           ApiError: n is 17: an integer from 1 to 16 was expected

No value is converted: "5" is not 5, and true is not 1. null means absent.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError, WrapValidator

from nanokv.apps.serve.api.errors import ApiError
from nanokv.decoding.ranges import RANGES
from weights_loader.strict import printable


class Fields(BaseModel):
    """An object in a request. Unknown fields are ignored, as OpenAI's clients expect."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", use_attribute_docstrings=True
    )


Model = TypeVar("Model", bound=Fields)


def read(model: type[Model], fields: dict) -> Model:
    """The request as a model; ApiError that names the first wrong field."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise refusal(error) from None


class Wrong(ValueError):
    """An error from one of our own checks, for pydantic.

    kind: "expected" (`words` describe the valid values), "invalid" (`words` are the whole
    message), or "unsupported" (`words` are a hint).
    """

    def __init__(self, kind: str, words: str):
        super().__init__(words)
        self.kind = kind


def expected(words: str) -> Wrong:
    """An error whose message is: FIELD is VALUE: `words` was expected."""
    return Wrong("expected", words)


def invalid(message: str) -> Wrong:
    """An error whose message is `message`."""
    return Wrong("invalid", message)


def not_done(hint: str = "") -> Wrong:
    """An error for a feature that this server lacks. `hint` names the alternative."""
    return Wrong("unsupported", hint)


def refusal(error: ValidationError) -> ApiError:
    """The first of pydantic's errors, with the field's path, its value, and what was expected."""
    first = error.errors(include_url=False)[0]
    name = place(first["loc"])
    kind = first["type"]
    facts = first.get("ctx", {})
    if kind == "missing":
        return ApiError(400, f"{name} is missing", name)
    wrong = Wrong(kind, first["msg"])  # raised by a Discriminator, or by pydantic itself
    if kind == "value_error":
        wrong = facts["error"]
    if wrong.kind == "invalid":
        return ApiError(400, str(wrong), name)
    if wrong.kind == "unsupported":
        return unsupported(name, first["input"], str(wrong))
    words = str(wrong)
    if kind in EXPECTED:
        words = EXPECTED[kind].format(**facts)
    return ApiError(400, f"{name} is {say(first['input'])}: {words} was expected", name)


EXPECTED = {  # pydantic's type of error → what was expected
    "string_type": "a text",
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "too_short": "a list of at least {min_length:,}",
    "too_long": "a list of at most {max_length:,}",
}


def unsupported(name: str, value: Any, hint: str = "") -> ApiError:
    """The refusal of a field that would change the answer and is not supported."""
    words = f"{name} is {say(value)}: this server does not do that"
    return ApiError(400, words, name, "unsupported", hint)


def place(steps: tuple) -> str:
    """("messages", 2, "content") → messages[2].content"""
    path = ""
    for step in steps:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):  # <…> is a Tag, which is no part of the path
            path += f".{step}"
    return path.removeprefix(".")


JSON = json.JSONEncoder(ensure_ascii=False, default=str)


def say(value: Any) -> str:
    """A value for an error message, as JSON of at most 60 characters."""
    shown = ""
    for part in JSON.iterencode(value):  # no more of a large value than is shown
        shown += part
        if len(shown) > 60:
            shown = f"{shown[:57]}..."
            break
    return printable(shown)


# --- types ----------------------------------------------------------------------------------------


class Expected:
    """Reports any error inside this field as one error, which describes the valid values."""

    wrong: Callable[[str], Wrong] = staticmethod(expected)

    def __init__(self, words: str):
        self.words = words

    def check(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise self.wrong(self.words) from None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return WrapValidator(self.check).__get_pydantic_core_schema__(source, handler)


class NotDone(Expected):
    """Reports any other value of this field as unsupported; `words` say what is supported."""

    wrong = staticmethod(not_done)


class Checked:
    """A field that a function checks, and its JSON schema. null is valid unless it is `needed`."""

    def __init__(self, check: Callable[[Any], Any], schema: dict, needed: bool = False):
        self.check = check
        self.needed = needed
        self.schema = schema
        if not needed:
            self.schema = {"anyOf": [schema, {"type": "null"}]}

    def checked(self, value: Any) -> Any:
        if value is None and not self.needed:
            return None
        return self.check(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return PlainValidator(self.checked).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict:
        return self.schema


class Between(Checked):
    """An integer from `low` to `high`; the values in `more` are valid too."""

    def __init__(self, low: int, high: int, *more: Any):
        span: dict = {"type": "integer", "minimum": low, "maximum": high}
        super().__init__(self.holds, either(span, more))
        self.low = low
        self.high = high
        self.more = more

    def holds(self, value: Any) -> Any:
        if type(value) is int and self.low <= value <= self.high:
            return value
        if any(equal(value, one) for one in self.more):
            return value
        raise expected(f"an integer from {self.low} to {self.high}")


class Ranged(Checked):
    """A sampling setting in the range that nanokv defines; the values in `more` are valid too."""

    def __init__(self, name: str, *more: int):
        self.range = RANGES[name]
        self.more = more
        also: list[Any] = list(more)
        if self.range.also is not None:
            also.insert(0, self.range.also)
        span = {
            "type": "integer" if self.range.kind is int else "number",
            "minimum": self.range.low,
            "maximum": self.range.high,
            "description": self.range.words,
        }
        super().__init__(self.holds, either(span, also))

    def holds(self, value: Any) -> Any:
        if self.range.holds(value) or any(equal(value, one) for one in self.more):
            return value
        raise expected(self.range.words)


class Nothing(Checked):
    """An unsupported field. Only null and `values`, which leave it off, are valid.

    hint: the nearest alternative.
    """

    def __init__(self, *values: Any, hint: str = ""):
        off: dict = {"type": "null"}
        if values:
            off = {"enum": list(values)}
        super().__init__(self.holds, off)
        self.values = values
        self.hint = hint

    def holds(self, value: Any) -> Any:
        if any(equal(value, one) for one in self.values):
            return value
        raise not_done(self.hint)


def either(span: dict, more: Sequence[Any]) -> dict:
    """The JSON schema of a span, or of one of the values in `more`."""
    if not more:
        return span
    return {"anyOf": [span, {"enum": list(more)}]}


def equal(one: Any, other: Any) -> bool:
    """Equality as in JSON, where 0 is not false."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


Text = Annotated[str | None, Expected("a text")]
YesNo = Annotated[bool | None, Expected("true or false")]
Object = Annotated[dict[str, Any] | None, Expected("an object")]
