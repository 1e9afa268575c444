"""Where an offloaded layer keeps its tokens: rows (N,2,B,Hk,D) in host memory or in a file.

`begin` returns an object whose `result()` is the rows; with a ferry the object is an Arriving.
"""

import os
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from nanokv.cache.ferry import Arriving, Ferry, host_rows
from nanokv.errors import CacheError

# One thread, because all transfers share one bus.
READER = ThreadPoolExecutor(1, thread_name_prefix="nanokv-offload")


class HostStore:
    """Rows in host memory; with a ferry they are pinned, so a copy to the GPU does not block."""

    rows: Tensor | None = None  # (N,2,B,Hk,D): tokens first, so that rows grow at the end

    def write(self, start: int, new: Tensor, ferry: Ferry | None = None) -> None:
        """Write `new` (T,2,B,Hk,D) at token `start`."""
        end = start + new.shape[0]
        rows = self.room(start, end, new, ferry)[start:end]
        if ferry:
            ferry.away(rows, new)
        else:
            rows.copy_(new)

    def room(self, start: int, end: int, new: Tensor, ferry: Ferry | None) -> Tensor:
        """At least `end` rows like `new`, the first `start` kept.

        They at least double when full: fewer than 2N copies for N tokens.
        """
        if start == 0 and self.rows is not None:
            if self.rows.shape[1:] != new.shape[1:] or self.rows.dtype != new.dtype:
                self.rows = None  # another dtype, or another batch size after beams were multiplied
        rows = self.rows
        held = 0 if rows is None else rows.shape[0]
        if rows is not None and end <= held:
            return rows
        shape = (max(64, 2 * held, end), *new.shape[1:])
        grown = host_rows(shape, new.dtype, pinned=ferry is not None)
        if rows is not None and start:
            if ferry:
                ferry.wait()
            grown[:start] = rows[:start]
        self.rows = grown
        return grown

    def begin(
        self, tokens: int, like: Tensor, ferry: Ferry | None = None
    ) -> "Future[Tensor] | Arriving":
        """Begin to bring the first rows (tokens,2,B,Hk,D) to the device of `like`."""
        rows = self.rows[:tokens]  # type: ignore[index]  # written before
        if ferry:
            return ferry.near(rows)
        return READER.submit(rows.to, like.device)


class DiskStore:
    """The same rows in an unnamed file, which disappears with the cache.

    The reading and the writing thread pass explicit offsets, so they share no file position.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        try:
            self.file = tempfile.TemporaryFile(dir=folder, prefix="nanokv-", buffering=0)
        except OSError as error:
            raise CacheError(
                f"no file can be made in {folder}: {error.strerror}", "pass another folder="
            ) from error

    def write(self, start: int, new: Tensor, ferry: Ferry | None = None) -> None:
        """Write `new` (T,2,B,Hk,D) at token `start`; blocks until the device has computed it."""
        data = new.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
        offset = start * new[0].nbytes
        while data:
            count = write_at(self.file.fileno(), data, offset)
            data = data[count:]
            offset += count

    def begin(
        self, tokens: int, like: Tensor, ferry: Ferry | None = None
    ) -> "Future[Tensor | Arriving]":
        """Begin to bring the first rows (tokens,2,B,Hk,D) to the device of `like`."""
        return READER.submit(self.read, tokens, like, ferry)

    def read(self, tokens: int, like: Tensor, ferry: Ferry | None = None) -> Tensor | Arriving:
        """Read the first rows. They are not mapped: attention would wait for page after page."""
        rows = host_rows((tokens, *like.shape[1:]), like.dtype, pinned=ferry is not None)
        target = rows.view(torch.uint8).numpy().data.cast("B")
        offset = 0
        while target:
            count = read_at(self.file.fileno(), target, offset)
            if not count:
                raise CacheError(f"the file of an offloaded cache is shorter than {tokens} tokens")
            target = target[count:]
            offset += count
        if ferry:
            return ferry.near(rows)
        return rows.to(like.device)


# --- reads and writes at an offset: os.preadv and os.pwrite, or seek under a lock (Windows) ---

POSITION = threading.Lock()


def write_at(file: int, data: memoryview, offset: int) -> int:
    """Write `data` at byte `offset`; returns how many bytes were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, offset)
    with POSITION:
        os.lseek(file, offset, os.SEEK_SET)
        return os.write(file, data)


def read_at(file: int, target: memoryview, offset: int) -> int:
    """Read into `target` from byte `offset`; returns how many bytes were read, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [target], offset)
    with POSITION:
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, len(target))
    target[: len(data)] = data
    return len(data)
