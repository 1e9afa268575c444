"""Read weights in a thread while torch is imported: a few long system calls, no torch.

`import torch` keeps one core busy for a second. Meanwhile this thread reads the matrices that the
model fuses (q, k and v, for example) into adjacent memory, so that fusing them copies nothing. All
other tensors stay in the mapped file, and the system is asked to read the file ahead.

This module only makes loading faster. If anything looks unusual, it reads nothing. shards.py then
maps the file, checks every header and reports the fault.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from .names import INDEX, SINGLE
from .strict import LIMITS, MB, CheckpointError, parse_object

Headers = dict[Path, list[tuple[str, int, int]]]  # file → (name, start, bytes) of each tensor
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
MOST_BUFFERS = 1024  # of one system call (IOV_MAX)
ALIGNMENT = 64  # bytes; a cache line


class Prefetch:
    """Starts reading when constructed. `taken` waits for the end of the reading."""

    def __init__(self, folder: Path, dtype: str, together: tuple[tuple[str, ...], ...]):
        """Read only matrices named in `together`, with those of a group side by side in memory.

        A group is, for example, ("q_proj", "k_proj", "v_proj").
        """
        # (file, start, bytes) → offset in `memory`.
        self.places: dict[tuple[Path, int, int], int] = {}
        self.memory: mmap.mmap | None = None
        self.versions: dict[Path, tuple] = {}  # version of each file when it was read
        self.thread: threading.Thread | None = None
        try:
            files = {path: header(path, DTYPES.get(dtype, "")) for path in weight_files(folder)}
            self._lay_out(files, together)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):
            self.places = {}
        if not hasattr(os, "preadv"):  # Windows
            self.places = {}
        if self.places:
            self.thread = threading.Thread(target=self._read, args=(list(files),), daemon=True)
            self.thread.start()

    def taken(self, path: Path, start: int, nbytes: int) -> int | None:
        """The offset in `memory` of the tensor at this place; None if it was not read."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        # The file has changed since it was read.
        if self.versions.get(path) != version(os.stat(path)):
            return None
        return self.places.get((path, start, nbytes))

    def _lay_out(self, files: Headers, together: tuple[tuple[str, ...], ...]) -> None:
        """Give each matrix a place in memory. A group is stored in its order, without gaps."""
        order = {name: (group, i) for group in together for i, name in enumerate(group)}
        found = []
        for path, tensors in files.items():
            for name, start, nbytes in tensors:
                parent, leaf, kind = ("..", *name.rsplit(".", 2))[-3:]
                if leaf in order and nbytes:
                    group, rank = order[leaf]
                    found.append(((parent, kind, group), rank, path, start, nbytes))
        end = 0
        last = None
        for key, _, path, start, nbytes in sorted(found):
            if key != last:
                end = -(-end // ALIGNMENT) * ALIGNMENT
            self.places[path, start, nbytes] = end
            end += nbytes
            last = key
        if end:
            self.memory = mmap.mmap(-1, end)

    def _read(self, files: list[Path]) -> None:
        assert self.memory is not None
        try:
            with memoryview(self.memory) as memory:
                for path in files:
                    self._read_file(path, memory)
        except (OSError, ValueError):  # shards.py will report the cause
            self.places = {}

    def _read_file(self, path: Path, memory: memoryview) -> None:
        wanted = [(start, n, at) for (file, start, n), at in self.places.items() if file == path]
        with open(path, "rb", buffering=0) as file:
            self.versions[path] = version(os.fstat(file.fileno()))
            # Ask the system to read the rest of the file too.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            for start, places in runs(sorted(wanted)):
                views = [memory[at : at + n] for at, n in places]
                read_all(file.fileno(), views, start)


def version(status: os.stat_result) -> tuple:
    """A value that changes when the file is replaced or written."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def runs(wanted: list[tuple[int, int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Join adjacent reads. (start, nbytes, place) in file order → (start, [(place, nbytes), …])."""
    start = 0
    end = -1
    places: list[tuple[int, int]] = []
    for begin, nbytes, at in wanted:
        if begin != end or len(places) == MOST_BUFFERS:
            if places:
                yield start, places
            start = begin
            places = []
        places.append((at, nbytes))
        end = begin + nbytes
    if places:
        yield start, places


def read_all(descriptor: int, views: list[memoryview], start: int) -> None:
    """Fill the views with the bytes from `start` on. One system call reads at most 2 GiB."""
    while views:
        count = os.preadv(descriptor, views, start)
        if count == 0:
            raise OSError("the file ended")
        start += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def weight_files(folder: Path) -> list[Path]:
    """The files that shards.py will read; ValueError if one is missing or not a regular file."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = parse_object((folder / INDEX).read_bytes(), INDEX)
    names = sorted(set(index["weight_map"].values()))
    files = [folder / name for name in names if Path(name).name == name]
    if not all(map(Path.is_file, files)):  # a pipe would never end
        raise ValueError
    return files


def header(path: Path, dtype: str) -> list[tuple[str, int, int]]:
    """(name, start, bytes) of each tensor, in file order.

    ValueError unless all tensors have this dtype and fill the file without a gap.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, 10 * MB, LIMITS["safetensors header"]):
            raise ValueError
        fields = parse_object(file.read(length), f"header of {path}")
    fields.pop("__metadata__", None)
    if {tensor["dtype"] for tensor in fields.values()} != {dtype}:
        raise ValueError
    tensors = sorted((*tensor["data_offsets"], name) for name, tensor in fields.items())
    end = 0
    for begin, after, _ in tensors:
        if begin != end or after < begin:
            raise ValueError
        end = after
    if 8 + length + end != size:
        raise ValueError
    return [(name, 8 + length + begin, after - begin) for begin, after, name in tensors]
