"""Conversations on disk: JSON Lines files with mode 0600 in $XDG_STATE_HOME/nanokv/sessions.

Line 1 is a header (model, fingerprint, date). Each later line is one whole turn, or a "history"
line that replaces everything before it, as after /undo, /drop and /load. A line is written whole
and fsynced, or removed again, so a full disk costs no earlier turn. A last line that a crash has
torn is dropped on load, with a notice. Whole files (`/save FILE`) are written to a temporary file
in the same folder and moved by os.replace. This module does not import torch.
"""

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nanokv.apps.cli.common.arguments import SETTINGS, parse_setting
from nanokv.apps.cli.common.files import user_path
from nanokv.apps.cli.common.terminal import bytes_text
from nanokv.errors import NanoKVError, SessionError
from weights_loader.strict import LIMITS, loads, read_bytes

FORMAT = "nanokv-session-1"
CUT = "cut the file before that line"


def state_folder() -> Path:
    """$XDG_STATE_HOME/nanokv; %LOCALAPPDATA% on Windows; otherwise ~/.local/state/nanokv."""
    base = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    if base:
        return Path(base) / "nanokv"
    return user_path("~/.local/state/nanokv")


def turns_text(messages: list[dict]) -> str:
    """The number of turns, as in 1 turn, 3 turns."""
    turns = len(messages) // 2
    return f"{turns:,} turn{'s' * (turns != 1)}"


def new_id() -> str:
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def header(model: str, fingerprint: str, **more: Any) -> dict:
    return {
        "format": FORMAT,
        "model": model,
        "fingerprint": fingerprint,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **more,
    }


class Transcript:
    """Appends lines to one session file, which the first turn creates.

    Lines that could not be written are tried again with the next one.
    """

    def __init__(self, path: str | Path, head: dict | None):
        self.path = Path(path)
        self.pending: list[dict] = []
        if head is not None:
            self.pending.append(head)
        self.saved = False  # whether a turn of this run is on disk

    @classmethod
    def reopen(cls, path: str | Path) -> "Transcript":
        """Append to the file of a session that was loaded."""
        return cls(path, None)

    def append(self, line: dict) -> None:
        """Write this line and pending ones; SessionError with the size keeps them for a retry."""
        self.pending.append(line)
        self.flush()

    def flush(self) -> None:
        """Write the pending lines."""
        lines = (json.dumps(entry, ensure_ascii=True) + "\n" for entry in self.pending)
        data = "".join(lines).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_at_end(self.path, data)
        except OSError as error:
            raise _not_saved(
                error, len(data), self.path, "the chat goes on; the next turn tries again"
            ) from error
        self.pending = []
        self.saved = True


def write_at_end(path: Path, data: bytes) -> None:
    """Append all bytes and fsync; on OSError the file gets its old length back."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            try:
                os.fsync(descriptor)
            except OSError as error:
                # Pipes and devices have no fsync. A full disk may be reported only here.
                if error.errno != errno.EINVAL:
                    raise
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def write_whole(path: str | Path, lines: Iterable[dict]) -> int:
    """Replace a file in one step; returns its bytes. On an error the old file stays.

    The data goes to a temporary file in the same folder, which is fsynced and renamed.
    """
    path = Path(path)
    data = "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines).encode()
    try:
        # A pipe or a device such as /dev/stdout must not be replaced by a file.
        if path.exists() and not path.is_file():
            write_at_end(path, data)
            return len(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            write_at_end(temporary, data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _not_saved(error, len(data), path, "choose another file; the chat goes on") from error
    return len(data)


def _not_saved(error: OSError, size: int, path: Path, hint: str) -> SessionError:
    reason = f"{error.strerror or error} ({path})"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        free = "0 B"
        if path.parent.is_dir():
            free = bytes_text(shutil.disk_usage(path.parent).free)
        reason = f"no space (need {bytes_text(size)}) in {path.parent} ({free} free)"
    return SessionError(f"session not saved: {reason}", hint)


def read(path: str | Path, repair: bool = False) -> tuple[dict, list[dict], list[dict], list[str]]:
    """(header, messages, turns, notices) of a file. `repair` removes a torn last line from it."""
    path = Path(path)
    data = read_bytes(path, SessionError, "session")
    entries, good, notices = _entries(data, path)
    if not entries or entries[0].get("format") != FORMAT:
        raise SessionError(
            f"{path} is not a nanokv session (its first line has no format {FORMAT!r})"
        )
    if good < len(data) and repair:
        os.truncate(path, good)
    messages: list[dict] = []
    turns: list[dict] = []
    for number, entry in enumerate(entries, 1):
        _check_fields(entry, f"{path}, line {number}")
        if number == 1:
            continue
        if not _valid(entry):
            raise SessionError(f"{path}, line {number}: neither a turn nor a history", hint=CUT)
        if "history" in entry:
            messages = [dict(m) for m in entry["history"]]
        elif "user" in entry:
            turns.append(entry)
            messages += turn_messages(entry)
    return entries[0] | _latest(entries, "system", "settings"), messages, turns, notices


def turn_messages(entry: dict) -> list[dict]:
    """The user's message and the answer of a turn; an interrupted answer is marked."""
    answer: dict = {"role": "assistant", "content": entry["answer"]}
    if entry.get("finish_reason") == "interrupted":
        answer["interrupted"] = True
    return [{"role": "user", "content": entry["user"]}, answer]


def _valid(entry: dict) -> bool:
    """Whether a line is a turn with two texts, or a history of messages with two texts each."""
    history = entry.get("history", [])
    fields = []
    if "history" not in entry:
        fields = [entry.get("user"), entry.get("answer")]
    if not isinstance(history, list) or not all(isinstance(m, dict) for m in history):
        return False
    fields += [m.get(key) for m in history for key in ("role", "content")]
    return all(isinstance(field, str) for field in fields)


def _check_fields(entry: dict, place: str) -> None:
    """Check the types of all fields besides messages, in the header or any other line."""
    for name, (kinds, wanted) in FIELDS.items():
        if not isinstance(entry.get(name), (*kinds, type(None))):
            raise SessionError(f"{place}: {name} is {_shown(entry[name])}, not {wanted}", hint=CUT)
    kv = entry.get("kv")
    if kv is not None and (kv in ("", ".", "..") or set(kv) & set("/\\\0")):
        raise SessionError(
            f"{place}: kv is {_shown(kv)}, not the name of a file in the same folder", hint=CUT
        )
    for name, value in (entry.get("settings") or {}).items():
        _check_setting(name, value, place)


FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    # field of any line → (types, in words); a field may be absent or null
    "model": ((str,), "a text"),
    "fingerprint": ((str,), "a text"),
    "system": ((str,), "a text"),
    "kv": ((str,), "a file name"),
    "ranks": ((int,), "a number"),
    "settings": ((dict,), "an object"),
}


def _check_setting(name: str, value: Any, place: str) -> None:
    """Check a setting against the ranges of the flags. Unknown names are ignored here and later."""
    if name == "stop":
        texts = [] if value is None else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise SessionError(
                f"{place}: settings.stop is {_shown(value)}, not a list of texts", hint=CUT
            )
    elif name in SETTINGS and value is not None:
        try:
            if type(value) not in (int, float):
                raise NanoKVError(f"{name}: {_shown(value)} is not a number")
            parse_setting(name, str(value))
        except NanoKVError as error:
            raise SessionError(f"{place}: settings.{error}", hint=CUT) from None


def _shown(value: Any) -> str:
    """A value of the file for an error message, at most its first 60 characters."""
    text = json.dumps(value)
    if len(text) > 60:
        return f"{text[:60]}…"
    return text


def _latest(entries: list[dict], *keys: str) -> dict:
    """The newest values of these keys, which may change during a session."""
    return {key: value for entry in entries for key, value in entry.items() if key in keys}


def _entries(data: bytes, path: Path) -> tuple[list[dict], int, list[str]]:
    """(parsed lines, bytes of the file that they take, notices about what was left out)."""
    entries: list[dict] = []
    good = 0
    notices: list[str] = []
    lines = data.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        entry = None
        if line.endswith(b"\n") and len(line) <= LIMITS["session line"]:
            with contextlib.suppress(ValueError):
                entry = loads(line)
        if isinstance(entry, dict):
            entries.append(entry)
            good += len(line)
        elif number == len(lines):
            notices.append(f"{path.name}: the last line was torn, {len(line):,} bytes dropped")
        else:
            hint = CUT if entries else "/save FILE and nanokv chat write such files"
            raise SessionError(f"{path}, line {number}: not a line of a session", hint=hint)
    return entries, good, notices


class Listed(NamedTuple):
    """A saved session in the list of sessions."""

    id: str
    modified: float  # seconds since the epoch
    turns: int
    model: str
    first: str  # the user's first message, or ""


def listing(folder: str | Path) -> list[Listed]:
    """All readable sessions of a folder, newest first."""
    rows = []
    for path in newest_first(folder):
        with contextlib.suppress(SessionError):
            head, messages, _, _ = read(path)
            users = [m["content"] for m in messages if m["role"] == "user"]
            modified = path.stat().st_mtime
            first = users[0] if users else ""
            rows.append(Listed(path.stem, modified, len(users), head.get("model", "?"), first))
    return rows


def newest_first(folder: str | Path) -> list[Path]:
    """The session files of a folder."""
    return sorted(Path(folder).glob("*.jsonl"), key=lambda p: p.stat().st_mtime, reverse=True)


def find(folder: str | Path, wanted: str) -> Path:
    """The session whose id begins with `wanted`; "" finds the newest one that was not cleared."""
    paths = newest_first(folder)
    if not paths:
        raise SessionError(f"no saved session in {folder}", hint="nanokv chat starts a new one")
    matches = [p for p in paths if p.stem.startswith(wanted)]
    if not wanted:
        return next((path for path in paths if not _cleared(path)), paths[0])
    if len(matches) != 1:
        found = len(matches) or "no"
        raise SessionError(
            f"{found} sessions begin with {wanted!r}", hint="nanokv chat --list shows them"
        )
    return matches[0]


def _cleared(path: Path) -> bool:
    """Whether a session has no messages. An unreadable file counts as one that has some."""
    try:
        return not read(path)[1]
    except SessionError:
        return False
