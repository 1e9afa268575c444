"""The loader's one error type, its warning, and a JSON reader that guesses nothing.

Python's json takes NaN, repeated keys and any depth; a checkpoint file with one of those is broken or hostile,
and each ends here as an error that names the file. No torch in this file.
"""

import json
from pathlib import Path


class CheckpointError(ValueError):
    """A model that cannot be found, fetched or trusted. `str()` says what, with numbers; `hint` says what to do."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointWarning(UserWarning):
    """The checkpoint loads, but it says two things at once, and the loader had to choose."""


def quote(text) -> str:
    """A name in a message: in double quotes, at most 200 characters, whatever could steer a terminal escaped."""
    text = str(text) if len(str(text)) <= 200 else str(text)[:197] + "..."
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in json.dumps(text, ensure_ascii=False))


def parse_object(data: bytes, where: str) -> dict:
    """JSON object in `data`; `where` names its origin in the error."""
    try:
        value = json.loads(data, object_pairs_hook=_no_repeats, parse_constant=_no_nan)
    except RecursionError as error:
        raise CheckpointError(f"{where} is not usable: JSON nested too deep") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON ({len(data):,} bytes): {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value


def read_object(path: Path) -> dict:
    """The JSON object that the file holds."""
    return parse_object(read_bytes(path), str(path))


def read_bytes(path: Path) -> bytes:
    """The whole of a small regular file (a pipe or a device would block for ever)."""
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise CheckpointError(f"{path} {what}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _no_repeats(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {quote(twice)} appears twice")
    return found


def _no_nan(word):
    raise ValueError(f"{word} is not a JSON number")
