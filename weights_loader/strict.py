"""The loader's error and warning classes, size limits of files, and a strict JSON reader. No torch.

Python's json accepts NaN, repeated keys, UTF-16, any depth and any size. A file with one of these
is broken or hostile, and raises here an error with the file's name. The bytes are counted before
anything is parsed: LIMITS bounds the cost of a file. nanokv reads its own JSON (sessions, batch
lines, caches) with the same functions.
"""

import contextlib
import gc
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MB = 1_000_000
LIMITS = {  # file → most bytes that are read, a few times the size in the largest published model
    "config.json": MB,
    "generation_config.json": MB,
    "modules.json": MB,
    "chat_template.jinja": MB,
    "tokenizer_config.json": 16 * MB,  # Gemma 3: 1.2 MB
    "tokenizer.json": 64 * MB,  # Qwen3: 11 MB, Gemma 3: 33 MB
    "model.safetensors.index.json": 64 * MB,  # DeepSeek-V3: 9 MB
    "safetensors header": 100 * MB,  # the limit of the safetensors package
    "session": 256 * MB,
    "session line": 16 * MB,
    "batch line": 16 * MB,
}
# Levels of nesting. Without a limit, repr() of a parsed value can end in a RecursionError.
DEEPEST = 64
# Digits of one integer. Shapes are multiplied and printed; Python prints at most 4,300 digits.
DIGITS = 40
# For bytes.translate: any digit → 0, any other byte → a space.
ONLY_DIGITS = bytes(48 if 48 <= byte <= 57 else 32 for byte in range(256))
# Lists and objects in one text, about 100 bytes of memory each. Gemma 3's merges: 514,906.
CONTAINERS = 2_000_000


CONTAINER = frozenset((dict, list))
LONGEST_MESSAGE = 2_000  # characters of an error; a message that quoted a file had 2.9 million


def bounded(text: str) -> str:
    """The text, cut in the middle to about LONGEST_MESSAGE characters if it is longer."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


class CheckpointError(ValueError):
    """A model that cannot be found, fetched or trusted.

    `message` names the cause and the numbers; `hint` says what to do.
    """

    def __init__(self, message: str, hint: str = ""):
        message = bounded(message)
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # below the message in a traceback


class UnknownModel(CheckpointError):
    """The name is neither a bundled model, nor a path, nor a possible name on the hub."""


class CheckpointWarning(UserWarning):
    """The checkpoint loads, but contradicts itself or has settings without effect here."""


def quote(value: object) -> str:
    """A value for a message: in double quotes, at most 200 characters, unprintable ones escaped."""
    text = str(value)
    if len(text) > 200:
        text = text[:197] + "..."
    return printable(json.dumps(text, ensure_ascii=False))


def printable(text: str) -> str:
    """The text with its unprintable characters escaped as in JSON."""
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)


def loads(data: bytes | str) -> Any:
    """The JSON value in `data`. ValueError gives the reason; the caller adds the file's name.

    Takes the time of json.loads plus a walk over the containers for their depth: 0.1 s for Qwen3's
    tokenizer.json. The garbage collector is paused: the 150,000 lists of that file would start it
    again and again, which doubles the time and frees nothing.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    whole = None  # json's own function, which is faster
    if has_long_number(text):
        whole = _integer
    count = text.count("[") + text.count("{")
    if count > CONTAINERS:
        raise ValueError(f"{count:,} lists and objects, at most {CONTAINERS:,} are read")
    try:
        with collector_paused():
            value = json.loads(
                text,
                object_pairs_hook=_no_repeats,
                parse_constant=_finite,
                parse_float=_finite,
                parse_int=whole,
            )
            deep = count > DEEPEST and _too_deep([value])
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    return value


def has_long_number(text: str) -> bool:
    """Whether more than DIGITS digits follow each other anywhere, also inside a string."""
    ascii = text.encode("ascii", "replace")
    return b"0" * (DIGITS + 1) in ascii.translate(ONLY_DIGITS)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Inside, objects that refer to each other are not freed, and nobody looks for them."""
    was = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was:
            gc.enable()


def parse_object(data: bytes, where: str, error: type[Exception] = CheckpointError) -> dict:
    """The JSON object in `data`. `where` names its origin in the message of `error`."""
    try:
        value = loads(data)
    except ValueError as reason:
        raise error(f"{where} is not valid JSON ({len(data):,} bytes): {reason}") from reason
    if not isinstance(value, dict):
        raise error(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value


def read_object(path: Path, error: type[Exception] = CheckpointError) -> dict:
    """The JSON object in a file."""
    return parse_object(read_bytes(path, error), str(path), error)


def read_bytes(path: Path, error: type[Exception] = CheckpointError, kind: str = "") -> bytes:
    """All bytes of a regular file of at most LIMITS[kind or the file's name] bytes.

    A pipe or a device is refused, because reading it could block forever.
    """
    limit = LIMITS.get(kind or path.name, LIMITS["config.json"])
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise error(f"{path} {what}")
        with open(path, "rb") as file:
            data = file.read(limit + 1)
            if len(data) > limit:
                size = path.stat().st_size
                raise error(f"{path} has {size:,} bytes; at most {limit:,} are read of such a file")
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason
    return data


def _too_deep(value: Any) -> bool:
    """Whether the value has more than DEEPEST levels.

    Level by level: a recursive function could hit Python's recursion limit.
    """
    level = [value]
    for _ in range(DEEPEST + 1):
        parts = [outer.values() if type(outer) is dict else outer for outer in level]
        if CONTAINER.isdisjoint(map(type, itertools.chain.from_iterable(parts))):
            return False
        level = [inner for part in parts for inner in part if type(inner) in CONTAINER]
    return True


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"key {quote(name)} appears twice")
        seen.add(name)
    raise AssertionError("a dict is smaller than its pairs only if a key repeats")


def _finite(text: str) -> float:
    """NaN and Infinity are not JSON. 1e999 is JSON, but not a finite float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:DIGITS]} is no finite number")
    return value


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"an integer of {len(text):,} digits, at most {DIGITS} are read")
    return int(text)
