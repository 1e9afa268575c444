"""JSON schemas without keywords that have no effect, which llguidance would refuse.

Three things are removed: keywords whose value allows everything, as in `not: false` and
`propertyNames: {"type": "string"}`; formats that llguidance does not know, since JSON Schema
treats a format as an annotation; and `uniqueItems`, which is not enforced, because a grammar
cannot compare items. Other keywords that forbid something stay, so llguidance refuses the
unsupported ones.
"""

import json
from typing import Any

# The formats that llguidance checks.
FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
}
DIALECTS = tuple(
    f"json-schema.org/{name}/schema"
    for name in (
        "draft-03",
        "draft-04",
        "draft-06",
        "draft-07",
        "draft/2019-09",
        "draft/2020-12",
    )
)
ANYTHING: tuple = (True, {})
NOTHING: dict[str, tuple] = {  # keyword → values that allow any JSON
    "not": (False,),
    "propertyNames": (*ANYTHING, {"type": "string"}),
    "unevaluatedProperties": ANYTHING,
    "unevaluatedItems": ANYTHING,
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
NEEDS = {  # keyword → the keywords of which it needs one to have an effect
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
}
OF = {  # keyword → the only type of JSON that it applies to
    "contains": "array",
    "unevaluatedItems": "array",
    "propertyNames": "object",
    "unevaluatedProperties": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
}
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)


def plain(schema: dict) -> dict:
    """An equivalent schema without ineffective keywords. `$id` is one if nothing uses `$ref`."""
    unused: frozenset[str] = frozenset()
    if '"$ref"' not in json.dumps(schema):
        unused = frozenset(["$id"])
    return cleaned(schema, unused)


def cleaned(schema: Any, unused: frozenset[str]) -> Any:
    """A schema and its subschemas without ineffective keywords and those in `unused`."""
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: value
        for name, value in schema.items()
        if name not in unused and says_something(name, value, schema)
    }
    found = {name: inner(name, value, unused) for name, value in kept.items()}
    for bound, name in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if found.get(name) is True and bound in found:  # draft 4 has a boolean here
            found[name] = found.pop(bound)
    return found


def inner(name: str, value: Any, unused: frozenset[str]) -> Any:
    """The value of a keyword, cleaned if it holds schemas."""
    if name in MAPS and isinstance(value, dict):
        return {key: cleaned(one, unused) for key, one in value.items()}
    if name in LISTS and isinstance(value, list):
        return [cleaned(one, unused) for one in value]
    if name in SINGLE:
        return cleaned(value, unused)
    return value


def says_something(name: str, value: Any, schema: dict) -> bool:
    """Whether a keyword has an effect in this schema."""
    if any(json.dumps(value) == json.dumps(one) for one in NOTHING.get(name, ())):
        return False
    if name in OF and not may_be(OF[name], schema.get("type")):
        return False
    if name in NEEDS and not any(other in schema for other in NEEDS[name]):
        return False
    if name == "uniqueItems":
        return False
    if name == "format":
        return isinstance(value, str) and value in FORMATS
    if name == "$schema":
        return isinstance(value, str) and value.partition("://")[2].rstrip("#") in DIALECTS
    if name in ("contains", "minContains") and contains_nothing(schema):
        return False
    if name == "unevaluatedProperties" and "additionalProperties" in schema:
        return False  # additionalProperties evaluates all of them
    if name in ("exclusiveMinimum", "exclusiveMaximum") and value is False:
        return False
    return True


def repeats_allowed(schema: Any) -> bool:
    """Whether a list may repeat an item against the schema's `uniqueItems`."""
    return '"uniqueItems": true' in json.dumps(schema)


def may_be(kind: str, wanted: Any) -> bool:
    """Whether a schema's `type` allows JSON of this kind; None allows all."""
    if isinstance(wanted, str):
        return wanted == kind
    if isinstance(wanted, list):
        return kind in wanted
    return True


def contains_nothing(schema: dict) -> bool:
    """Whether `contains` is satisfied by any list: from 0 matches, without an upper limit."""
    return schema.get("minContains") == 0 and "maxContains" not in schema
