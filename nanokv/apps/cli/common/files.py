"""Files whose names the user typed: where such a name becomes a path, and the question before something is lost.

Standard library only.
"""

import os
import sys
from pathlib import Path

from nanokv.apps.cli.common.terminal import is_tty, sanitize_line, write_err, writing
from nanokv.errors import NanoKVError


def confirm(question: str) -> bool:
    """Ask on the terminal; anything but y, Ctrl-C and the end of input among it, is No."""
    write_err(f"{question} y/N ")
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):  # Ctrl-C, Ctrl-D: nobody has ended the line
        write_err("\n")
    return answer.strip().lower() in ("y", "yes")


def add_force(parser) -> None:
    """The flag that answers the question beforehand."""
    parser.add_argument(
        "--force", action="store_true", help="replace what is there; without it a terminal is asked"
    )


def add_page(parser, usual: str):
    """Where a page goes, and whether the browser shows it: the group of these flags. `usual`: the default name."""
    group = parser.add_argument_group("page")
    group.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        type=Path,
        default=Path(usual),
        help=f"default: {usual}",
    )
    add_force(group)
    group.add_argument("--open", action="store_true", help="show it in the browser")
    return group


def ask_to_replace(force: bool, *paths) -> None:
    """Nothing is replaced unasked: --force, or y on a terminal, or NanoKVError. Asked before any work is done.

    Only files count, also those that a link leads to: writing to a device or a pipe loses nothing.
    """
    taken = [
        path
        for path in map(Path, paths)
        if path.is_file() or (path.is_symlink() and not path.exists())
    ]
    if taken:
        more = f" and {len(taken) - 1:,} more" if len(taken) > 1 else ""
        ask_to_lose(
            force, f"{sanitize_line(str(taken[0]))}{more} would be replaced", "another name"
        )


def ask_to_lose(force: bool, loss: str, instead: str) -> None:
    """The same for a loss that is no whole file; `loss` says which, `instead` how to avoid it."""
    if force or (is_tty(sys.stdin) and is_tty(sys.stderr) and confirm(f"{loss}. Go on?")):
        return
    raise NanoKVError(f"{loss}; nothing was written", f"--force, or {instead}")


def check_place(path: Path, usual: str) -> None:
    """A page can be written there: asked before minutes of work. `usual`: the name it has by default."""
    if not path.parent.is_dir():
        raise NanoKVError(
            f"--out {path}: there is no folder {path.parent}", f"mkdir -p {path.parent}"
        )
    if path.exists() and not path.is_file():
        raise NanoKVError(f"--out {path} is not a file", f"--out {usual}")
    if not os.access(path.parent, os.W_OK):
        raise NanoKVError(
            f"--out {path}: the folder {path.parent} cannot be written to", f"--out /tmp/{usual}"
        )


def replace(path: Path, text: str) -> None:
    """Write all of it beside, then take the place: whoever has the old page open keeps a whole one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with (
            writing(path, len(text)),
            open(temporary, "x", encoding="utf-8", newline="\n") as file,
        ):
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
        raise NanoKVError(
            f"{shown}: there is no user {sanitize_line(user)!r} here", f"./{shown}"
        ) from None
