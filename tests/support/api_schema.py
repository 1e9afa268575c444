"""An object against OpenAI's own description of its API (the fixture `api` of conftest.py)."""

import jsonschema


def schema_errors(api: dict, name: str, value) -> list[str]:
    """What jsonschema has to say against it as a `name`; `api` is the document as with_null gives it."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": api["components"]}
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]


def with_null(part):
    """The document says `nullable`, which JSON Schema has no more: the value may be null too."""
    if isinstance(part, list):
        return [with_null(one) for one in part]
    if not isinstance(part, dict):
        return part
    found = {name: with_null(one) for name, one in part.items()}
    if found.get("nullable") is True:
        del found["nullable"]
        return {"anyOf": [found, {"type": "null"}]}
    return found
