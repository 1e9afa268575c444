"""The log of a notebook's events, one JSON object per line, for tests, the book and the grader.

NANOKV_COURSE_LOG names the file. Without it, a learner's own notebook logs only its answers, to
progress.jsonl beside it, for `nanokv course progress`; parts.py keeps the functions they built.

With a key, every line carries its number and an HMAC, so that added, changed and missing lines are
noticed. The learner's code runs in the process that holds the key and could read it, so the log
of a submission is evidence, not proof.
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanokv.errors import CourseError

VARIABLE = "NANOKV_COURSE_LOG"
KEY_FILE = "NANOKV_COURSE_KEY"  # names the file of the key, which exists until the first cell runs
PROGRESS = "progress.jsonl"
LARGEST = 20_000_000  # bytes of a log


def _plain(line: str) -> str:
    return line


_sealed: Callable[[str], str] = _plain
_own: Path | None = None  # the file of a learner's own answers


def keep(folder: Path | None) -> None:
    """From now on, keep the answers of this notebook in a folder; None: do not keep them."""
    global _own
    _own = folder and Path(folder) / PROGRESS


def folder() -> Path | None:
    """The folder that keeps a learner's answers and parts.

    None outside a learner's notebook, and where a test, the book or the grader runs it.
    """
    if os.environ.get(VARIABLE) or _own is None:
        return None
    return _own.parent


def note(event: str, **fields: Any) -> None:
    """Append one event."""
    path = os.environ.get(VARIABLE)
    if path:
        _append(path, _sealed(json.dumps({"event": event, **fields})))
    elif _own and event in ("check", "answer"):
        with contextlib.suppress(OSError):  # the folder may be read-only; a check works anyway
            _append(_own, json.dumps({"event": event, **fields}))


def _append(path, line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def take_key() -> None:
    """From now on, number and seal every line. Removes the key's file before any cell runs."""
    global _sealed
    path = os.environ.pop(KEY_FILE, "")
    if path and os.path.exists(path):
        key = Path(path).read_bytes()
        numbers = itertools.count()
        os.remove(path)

        def _sealed(line: str) -> str:
            number = next(numbers)
            return f"{number} {seal(key, number, line)} {line}"


def seal(key: bytes, number: int, line: str) -> str:
    return hmac.new(key, f"{number} {line}".encode(), hashlib.sha256).hexdigest()


def read(path: str | Path) -> list[dict]:
    """The events of a finished run; [] without a log. Lines that are not events are skipped."""
    return [event for line in _lines(path) if (event := _event(line))]


def read_sealed(path: str | Path, key: bytes) -> tuple[list[dict], int]:
    """(the events with a valid seal, how many lines were added, changed or removed)."""
    events: list[dict] = []
    strange = 0
    expected = 0
    for line in _lines(path):
        number, text = _unsealed(line, key)
        if number is None or number < expected:  # not sealed with the key, or a repeated line
            strange += 1
            continue
        strange += number - expected
        expected = number + 1
        if event := _event(text):
            events.append(event)
    return events, strange


def _unsealed(line: str, key: bytes) -> tuple[int | None, str]:
    """(number, text) of a line; the number is None if the seal is not valid."""
    number, tag, text = (*line.split(" ", 2), "", "")[:3]
    if not number.isdecimal() or len(number) >= 12 or not tag.isascii():
        return None, text
    if not hmac.compare_digest(tag, seal(key, int(number), text)):
        return None, text
    return int(number), text


def _lines(path) -> list[str]:
    try:
        return contents(path, LARGEST).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []


def _event(line: str) -> dict | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return event


def contents(path: str | Path, largest: int) -> bytes:
    """The bytes of a file that untrusted code may have written.

    Raises FileNotFoundError, and CourseError for a link (it could lead to any file), for a pipe or
    device (reading may never end), and for more than `largest` bytes.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise CourseError(f"{os.path.basename(path)}: not a regular file")
    # The file may have been replaced since lstat: do not follow a link, do not wait for a pipe.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags), "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise CourseError(f"{os.path.basename(path)}: larger than {largest:,} bytes")
    return data
