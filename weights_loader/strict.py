"""The loader's error type, its warning, the size limits of a model folder, and one JSON reader that guesses nothing.

Python's json takes NaN, repeated keys, UTF-16, any depth and any size; a file with one of those is broken or hostile,
and each ends here as an error that names the file. nanokv reads its own JSON (sessions, batch lines, caches) with the
same functions. Before anything is parsed the bytes are counted: what a file may cost is decided by LIMITS. No torch.
"""

import contextlib
import gc
import json
import math
from pathlib import Path

MB = 1_000_000
LIMITS = {  # file → bytes that are read of it; a few times what the largest published model has
    "config.json": MB,
    "generation_config.json": MB,
    "chat_template.jinja": MB,
    "tokenizer_config.json": 16 * MB,  # Gemma 3: 1.2 MB
    "tokenizer.json": 64 * MB,  # Qwen3: 11 MB, Gemma 3: 33 MB
    "model.safetensors.index.json": 64 * MB,  # DeepSeek-V3: 9 MB
    "safetensors header": 100 * MB,  # the limit of the safetensors package
    "session": 256 * MB,
    "session line": 16 * MB,
    "batch line": 16 * MB,
}
# Levels of nesting; repr() of a value that json can read may otherwise end in a RecursionError.
DEEPEST = 64
# Of one integer: a shape is multiplied and printed, which Python refuses beyond 4,300 digits.
DIGITS = 40
# Lists and objects in one text, about 100 bytes of memory each; Gemma 3's merges: 514,906.
CONTAINERS = 2_000_000


LONGEST_MESSAGE = 2_000  # characters of an error; one that quoted a file had 2.9 million


def bounded(text: str) -> str:
    """A message that can be read: beyond LONGEST_MESSAGE its middle is left out, and how much is said."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    half = LONGEST_MESSAGE // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


class CheckpointError(ValueError):
    """A model that cannot be found, fetched or trusted. `str()` says what, with numbers; `hint` says what to do."""

    def __init__(self, message: str, hint: str = ""):
        message = bounded(message)
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # below the message in a traceback


class UnknownModel(CheckpointError):
    """A name that no model has: it is not bundled, no path, and no name on the hub."""


class CheckpointWarning(UserWarning):
    """The checkpoint loads, but it says two things at once, and the loader had to choose."""


def quote(text) -> str:
    """A name in a message: in double quotes, at most 200 characters, whatever could steer a terminal escaped."""
    text = str(text) if len(str(text)) <= 200 else str(text)[:197] + "..."
    return "".join(
        c if c.isprintable() else json.dumps(c)[1:-1] for c in json.dumps(text, ensure_ascii=False)
    )


def loads(data: bytes | str):
    """The one JSON value in `data`. ValueError says what is wrong; the caller says where.

    Costs what json.loads costs, and a walk over the containers for their depth: 0.1 s for Qwen3's tokenizer.json. Its
    150,000 lists set off Python's garbage collector again and again, which finds nothing and takes as long as the rest.
    """
    text = data if isinstance(data, str) else data.decode("utf-8")
    count = text.count("[") + text.count("{")
    if count > CONTAINERS:
        raise ValueError(f"{count:,} lists and objects, at most {CONTAINERS:,} are read")
    try:
        with _collector_paused():
            value = json.loads(
                text,
                object_pairs_hook=_no_repeats,
                parse_constant=_finite,
                parse_float=_finite,
                parse_int=_integer,
            )
            deep = count > DEEPEST and _too_deep([value])
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    return value


@contextlib.contextmanager
def _collector_paused():
    was = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was:
            gc.enable()


def parse_object(data: bytes, where: str, error: type = CheckpointError) -> dict:
    """JSON object in `data`; `where` names its origin in the error, which is of the caller's type."""
    try:
        value = loads(data)
    except ValueError as reason:
        raise error(f"{where} is not valid JSON ({len(data):,} bytes): {reason}") from reason
    if not isinstance(value, dict):
        raise error(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value


def read_object(path: Path, error: type = CheckpointError) -> dict:
    """The JSON object that the file holds."""
    return parse_object(read_bytes(path, error), str(path), error)


def read_bytes(path: Path, error: type = CheckpointError, kind: str = "") -> bytes:
    """The whole of a regular file (a pipe or a device would block for ever) of at most LIMITS[kind or its name]."""
    limit = LIMITS.get(kind or path.name, LIMITS["config.json"])
    try:
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise error(f"{path} {what}")
        with open(path, "rb") as file:
            data = file.read(limit + 1)
            if len(data) > limit:
                raise error(
                    f"{path} has {path.stat().st_size:,} bytes; at most {limit:,} are read of such a file"
                )
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror or reason}") from reason
    return data


def _too_deep(value) -> bool:
    """More than DEEPEST levels? Level by level, because a function that calls itself has the limit that is tested."""
    inside, level = (dict, list), [value]
    for _ in range(DEEPEST + 1):
        parts = (outer.values() if type(outer) is dict else outer for outer in level)
        level = [inner for part in parts for inner in part if type(inner) in inside]
        if not level:
            return False
    return True


def _no_repeats(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"key {quote(twice)} appears twice")
    return found


def _finite(text: str) -> float:
    """NaN and Infinity are no JSON; 1e999 is, but no float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:DIGITS]} is no finite number")
    return value


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"an integer of {len(text):,} digits, at most {DIGITS} are read")
    return int(text)
