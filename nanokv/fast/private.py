"""Safe loading of cached libraries, whose code runs with the rights of this user.

A library is loaded only if no other user can write to the file or its folders, and only if it is
complete. The name of a file ends in the SHA-256 of its content, so one rename puts content and
checksum in place together. A file that was truncated by a full disk or a power cut is detected
before it is mapped; an access to the missing part would kill the process with SIGBUS. Permissions
and content are read from one open file, and that file is loaded: the path is not looked up twice.
"""

import hashlib
import os
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_folder(folder: Path) -> None:
    """Make the folder and its missing parents, accessible to this user only, whatever the umask."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)


def check_folder(folder: Path) -> None:
    """PermissionError if another user could write to this folder or replace it."""
    folder = Path(os.path.realpath(folder))
    for place in (folder, *folder.parents):
        status = place.stat()
        # In a sticky folder such as /tmp only the owner of an entry can rename it.
        refused = OTHERS
        if place != folder and status.st_mode & stat.S_ISVTX:
            refused = 0
        _check(place, status, refused)


def _check(place: Path, status: os.stat_result, refused: int) -> None:
    if not hasattr(os, "getuid"):  # Windows: the folder is in the user's own profile
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
    """The path of this content: STEM-<SHA-256>.so."""
    return stem.with_name(f"{stem.name}-{hashlib.sha256(content).hexdigest()}.so")


def kept(stem: Path) -> list[Path]:
    """All files under a stem, complete or not."""
    return sorted(stem.parent.glob(f"{stem.name}-*.so"))


def open_checked(path: Path) -> str | None:
    """A path to load the file by, or None if it is incomplete.

    PermissionError if another user may have written it, OSError for a symbolic link.
    """
    # O_NONBLOCK: opening a pipe must not wait. It is rejected below, as no regular file.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, os.O_RDONLY | flags)
    status = os.fstat(descriptor)
    _check(path, status, OTHERS)
    stem = path.with_name(path.name.rsplit("-", 1)[0])
    with open(descriptor, "rb", closefd=False) as file:
        whole = stat.S_ISREG(status.st_mode) and named(stem, file.read()) == path
    by_descriptor = f"/proc/self/fd/{descriptor}"
    if whole and os.path.exists(by_descriptor):
        # The descriptor stays open. If its number were reused, the loader would take the same path
        # for the library that it has loaded already.
        return by_descriptor
    os.close(descriptor)
    return str(path) if whole else None


def is_whole(path: Path) -> bool | None:
    """True if `open_checked` returns a path, else None."""
    opened = open_checked(path)
    if opened is None:
        return None
    if opened != str(path):
        os.close(int(opened.rsplit("/", 1)[1]))
    return True
