"""What happened in a notebook, one JSON object a line, for those who run it: tests, the book, the grader.

Without NANOKV_COURSE_LOG nothing is written. A learner's own code runs in the same process, so the log of a
submission is evidence and not proof.
"""

import json
import os
import stat

from nanokv.errors import CourseError

VARIABLE = "NANOKV_COURSE_LOG"
LARGEST = 20_000_000  # bytes of a log


def note(event: str, **fields) -> None:
    """Append one event."""
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")


def read(path) -> list[dict]:
    """The events of a finished run; none if it never got as far. A line that is no event is left out."""
    try:
        text = contents(path, LARGEST).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    events = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
    return events


def contents(path, largest: int) -> bytes:
    """A file that others wrote. CourseError for a link (it leads anywhere), a pipe or device (it may never end), and
    for more than `largest` bytes; FileNotFoundError."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise CourseError(f"{os.path.basename(path)}: not a file of its own")
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # it may have changed meanwhile
    with open(os.open(path, flags), "rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise CourseError(f"{os.path.basename(path)}: larger than {largest:,} bytes")
    return data
