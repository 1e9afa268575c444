"""Files whose names the user typed: the one place where such a name becomes a path.

Standard library only.
"""

from pathlib import Path

from nanokv.cli.terminal import sanitize_line
from nanokv.errors import NanoKVError


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
