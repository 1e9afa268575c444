"""Files whose names the user typed: where such a name becomes a path, and the question before something is lost.

Standard library only.
"""

import sys
from pathlib import Path

from nanokv.cli.terminal import sanitize_line, write_err
from nanokv.errors import NanoKVError


def confirm(question: str) -> bool:
    """Ask on the terminal; anything but y, Ctrl-C and the end of input among it, is No."""
    write_err(f"{question} y/N ")
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        write_err("\n")
        return False


def user_path(name) -> Path:
    """The path that a person meant, `~` and `~user` expanded; NanoKVError for a name that no file can have."""
    shown = sanitize_line(str(name)[:200])
    if "\0" in str(name):
        raise NanoKVError(f"{shown}: a file name cannot hold the character NUL")
    try:
        return Path(name).expanduser()
    except RuntimeError:  # the message of pathlib names neither the user nor the path
        user = Path(name).parts[0][1:]
        if not user:
            raise NanoKVError(f"{shown}: the home folder is unknown", "set HOME") from None
        raise NanoKVError(f"{shown}: there is no user {sanitize_line(user)!r} here", f"./{shown}") from None
