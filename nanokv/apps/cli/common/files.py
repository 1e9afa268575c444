"""Files that the user names: from a name to a path, and the question before data is lost.

Standard library only.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common.terminal import is_tty, sanitize_line, write_err, writing
from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _ActionsContainer, _ArgumentGroup


def confirm(question: str) -> bool:
    """Ask on the terminal. Only y or yes is a yes; Ctrl-C and the end of input are a no."""
    write_err(f"{question} y/N ")
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer.endswith("\n"):  # Ctrl-C and Ctrl-D leave the cursor on the line
        write_err("\n")
    return answer.strip().lower() in ("y", "yes")


def add_force(parser: "_ActionsContainer") -> None:
    """--force: answer the question with yes."""
    parser.add_argument(
        "--force", action="store_true", help="replace existing files (default: ask on a terminal)"
    )


def add_page(parser: "ArgumentParser", usual: str) -> "_ArgumentGroup":
    """--out, --force and --open, as a group, which is returned. `usual`: the default file name."""
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


def ask_to_replace(force: bool, *paths: str | Path) -> None:
    """Replace a file only with --force, or after y on a terminal; otherwise NanoKVError.

    Call it before any work is done. Only regular files count, and links to them: writing to a
    device or a pipe loses nothing.
    """
    taken = [path for path in map(Path, paths) if path.is_file() or is_broken_link(path)]
    if not taken:
        return
    names = sanitize_line(str(taken[0]))
    if len(taken) > 1:
        names += f" and {len(taken) - 1:,} more"
    ask_to_lose(force, f"{names} would be replaced", "another name")


def is_broken_link(path: Path) -> bool:
    """A symbolic link whose target does not exist."""
    return path.is_symlink() and not path.exists()


def ask_to_lose(force: bool, loss: str, instead: str) -> None:
    """The same question for any loss. `loss` describes the loss, `instead` how to avoid it."""
    if force or (is_tty(sys.stdin) and is_tty(sys.stderr) and confirm(f"{loss}. Go on?")):
        return
    raise NanoKVError(f"{loss}; nothing was written", f"--force, or {instead}")


def check_place(path: Path, usual: str) -> None:
    """NanoKVError if no page can be written to `path`; call it before minutes of work.

    `usual`: the default file name, for the hint.
    """
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
    """Write a temporary file in the same folder, then rename it: no reader sees a partial page."""
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


def user_path(name: str | Path) -> Path:
    """The path, with `~` and `~user` expanded; NanoKVError for a name that no file can have."""
    shown = sanitize_line(str(name)[:200])
    if "\0" in str(name):
        raise NanoKVError(f"{shown}: a file name cannot hold the character NUL")
    try:
        return Path(name).expanduser()
    except RuntimeError:  # pathlib's message names neither the user nor the path
        user = Path(name).parts[0][1:]
        if not user:
            raise NanoKVError(f"{shown}: the home folder is unknown", "set HOME") from None
        raise NanoKVError(
            f"{shown}: there is no user {sanitize_line(user)!r} here", f"./{shown}"
        ) from None
