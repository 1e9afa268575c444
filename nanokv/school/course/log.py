"""What happened in a notebook, one JSON object per line, for those who run it: tests, the book, the grader.

Without NANOKV_COURSE_LOG a learner's own notebook keeps its answers, and nothing else, in progress.jsonl beside it, for
`nanokv course progress`; parts.py keeps what they built. With a key every line carries its number and an HMAC, so that
lines which were added, changed or taken away are noticed. A learner's own code runs in the process that holds the key:
who looks for it there finds it. So the log of a submission is evidence and not proof.
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import stat
from pathlib import Path

from nanokv.errors import CourseError

VARIABLE = "NANOKV_COURSE_LOG"
KEY_FILE = "NANOKV_COURSE_KEY"  # where the key lies until the first cell runs
PROGRESS = "progress.jsonl"
LARGEST = 20_000_000  # bytes of a log


def _plain(line: str) -> str:
    return line


_sealed, _own = _plain, None


def keep(folder: Path | None) -> None:
    """From now on the answers of this notebook are kept in this folder; None: they are not."""
    global _own
    _own = folder and Path(folder) / PROGRESS


def folder() -> Path | None:
    """Where a learner's own notebook keeps things; None where nobody works in it, or somebody else runs it."""
    return None if os.environ.get(VARIABLE) else _own and _own.parent


def note(event: str, **fields) -> None:
    """Append one event."""
    path = os.environ.get(VARIABLE)
    if path:
        _append(path, _sealed(json.dumps({"event": event, **fields})))
    elif _own and event in ("check", "answer"):
        with contextlib.suppress(OSError):  # the folder may be read-only: a check works without
            _append(_own, json.dumps({"event": event, **fields}))


def _append(path, line: str) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def take_key() -> None:
    """From now on lines are numbered and sealed. The file with the key is removed, before anybody's code runs."""
    global _sealed
    path = os.environ.pop(KEY_FILE, "")
    if path and os.path.exists(path):
        key, numbers = Path(path).read_bytes(), itertools.count()
        os.remove(path)

        def _sealed(line: str) -> str:
            number = next(numbers)
            return f"{number} {seal(key, number, line)} {line}"


def seal(key: bytes, number: int, line: str) -> str:
    return hmac.new(key, f"{number} {line}".encode(), hashlib.sha256).hexdigest()


def read(path) -> list[dict]:
    """The events of a finished run; none if it never got as far. A line that is no event is left out."""
    return [event for line in _lines(path) if (event := _event(line))]


def read_sealed(path, key: bytes) -> tuple[list[dict], int]:
    """(the events that the course itself has written, how many lines were added, changed or taken away)."""
    events, strange, expected = [], 0, 0
    for line in _lines(path):
        number, tag, text = (*line.split(" ", 2), "", "")[:3]
        right = (
            number.isdecimal()
            and len(number) < 12
            and tag.isascii()
            and hmac.compare_digest(tag, seal(key, int(number), text))
        )
        if not right or int(number) < expected:  # not ours, or ours a second time
            strange += 1
            continue
        strange += int(number) - expected
        expected = int(number) + 1
        events += filter(None, [_event(text)])
    return events, strange


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
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def contents(path, largest: int) -> bytes:
    """A file that others wrote. CourseError for a link (it leads anywhere), a pipe or device (it may never end), and
    for more than `largest` bytes; FileNotFoundError."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise CourseError(f"{os.path.basename(path)}: not a file of its own")
    # It may have changed meanwhile.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags), "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise CourseError(f"{os.path.basename(path)}: larger than {largest:,} bytes")
    return data
