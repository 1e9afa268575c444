"""Files whose code runs with our rights: read only from places that nobody else can write to, and only whole.

The name of a file ends in the SHA-256 of its content, so one rename puts both in place, and a file that a full disk or
a power cut has shortened is noticed before it is mapped: touching the missing part would kill the process (SIGBUS).
What was checked is what is loaded: permissions and content are those of one open file, not of a path looked up twice.
"""

import hashlib
import os
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_folder(folder: Path) -> None:
    """The folder and its missing parents, for this user alone, whatever the umask."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)


def check_folder(folder: Path) -> None:
    """PermissionError if another user could put a file into this folder, or another folder in its place."""
    folder = Path(os.path.realpath(folder))
    for place in (folder, *folder.parents):
        status = place.stat()
        # As /tmp: nobody renames what is not theirs.
        refused = OTHERS
        if place != folder and status.st_mode & stat.S_ISVTX:
            refused = 0
        _check(place, status, refused)


def _check(place: Path, status: os.stat_result, refused: int) -> None:
    if not hasattr(os, "getuid"):  # Windows: the folder is in the user's profile
        return
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(
            f"{place} belongs to another user: set NANOKV_CACHE to a folder of your own"
        )
    if status.st_mode & refused:
        raise PermissionError(
            f"{place} can be written by other users: chmod go-w {place}, or set NANOKV_CACHE"
        )


def named(stem: Path, content: bytes) -> Path:
    """Where this content is kept: STEM-<SHA-256>.so."""
    return stem.with_name(f"{stem.name}-{hashlib.sha256(content).hexdigest()}.so")


def kept(stem: Path) -> list[Path]:
    """All that is kept under a stem, whole or not."""
    return sorted(stem.parent.glob(f"{stem.name}-*.so"))


def open_checked(path: Path) -> str | None:
    """A path to load the file by, None if it is not whole; PermissionError if others may have written it."""
    # A link: OSError; a pipe: opened, and refused.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, os.O_RDONLY | flags)
    status = os.fstat(descriptor)
    _check(path, status, OTHERS)
    stem = path.with_name(path.name.rsplit("-", 1)[0])
    with open(descriptor, "rb", closefd=False) as file:
        whole = stat.S_ISREG(status.st_mode) and named(stem, file.read()) == path
    by_descriptor = f"/proc/self/fd/{descriptor}"
    if whole and os.path.exists(by_descriptor):
        # Stays open: the loader takes a name that it has seen for the same library.
        return by_descriptor
    os.close(descriptor)
    return str(path) if whole else None


def is_whole(path: Path) -> bool | None:
    """Would `open_checked` give a path? None if not."""
    opened = open_checked(path)
    if opened is None:
        return None
    if opened != str(path):
        os.close(int(opened.rsplit("/", 1)[1]))
    return True
