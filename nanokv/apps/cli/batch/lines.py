"""The input of `nanokv batch`: bytes to numbered lines to checked fields.

Names and types are checked here. Values, such as a temperature below 0, are checked by the engine
when the line is submitted.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanokv.apps.cli.common.arguments import nearest
from nanokv.apps.cli.common.text import stdin
from nanokv.errors import NanoKVError
from weights_loader.strict import LIMITS, loads

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
ALIASES = ("max_tokens", "max_completion_tokens")  # OpenAI's names for max_new_tokens
KNOWN = ("prompt", "messages", "max_new_tokens", "stop", "id", *SAMPLING)


def read_lines(source: str) -> list[tuple[int, bytes]]:
    """(line number from 1, bytes) of every non-blank line, without byte order mark and \\r."""
    data = stdin().read() if source == "-" else Path(source).read_bytes()
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def digest(value: Any) -> str:
    """32 hex digits that identify a request's content."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def parse_line(data: bytes) -> dict:
    """The fields of a request, unchecked, so that an error in them can name the line's id."""
    if len(data) > LIMITS["batch line"]:
        raise NanoKVError(f"{len(data):,} bytes; a line may have {LIMITS['batch line']:,}")
    try:
        fields = loads(data)
    except UnicodeDecodeError as error:
        raise NanoKVError(
            f"not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}"
        ) from None
    except ValueError as error:
        raise NanoKVError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise NanoKVError(
            f"a JSON object was expected, not {type(fields).__name__}", '{"prompt": "…"}'
        )
    for name in ALIASES:
        if name in fields and "max_new_tokens" not in fields:
            fields["max_new_tokens"] = fields.pop(name)
    return fields


def check_fields(fields: dict) -> None:
    """Check names and types; `stop` becomes a list."""
    if unknown := [name for name in fields if name not in KNOWN]:
        close = nearest(unknown[0], KNOWN)
        hint = f"known: {', '.join(KNOWN)}"
        if close:
            hint = f"did you mean {close}?"
        raise NanoKVError(f"no setting {unknown[0]!r}", hint)
    check_source(fields)
    if "prompt" in fields and not (isinstance(fields["prompt"], str) and fields["prompt"]):
        raise NanoKVError(f"prompt is {fields['prompt']!r}: a non-empty text was expected")
    stop = fields.get("stop") or []
    strings = stop
    if isinstance(stop, str):
        strings = [stop]
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise NanoKVError(f"stop is {stop!r}: a non-empty text or a list of them was expected")
    fields["stop"] = strings


def check_source(fields: dict) -> None:
    """NanoKVError unless there is a prompt or there are messages."""
    if ("prompt" in fields) == ("messages" in fields):
        raise NanoKVError("exactly one of prompt and messages is needed", '{"prompt": "…"}')


def texts(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included, because a template may print any of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)
