"""Where an offloaded layer keeps its tokens: rows (N,2,B,Hk,D) in host memory or in a file.

`begin` returns an object whose `result()` is the rows; with a ferry the object is an Arriving.
"""

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from nanokv.cache.ferry import host_rows
from nanokv.errors import CacheError

# One thread, because all transfers share one bus.
READER = ThreadPoolExecutor(1, thread_name_prefix="nanokv-offload")


class HostStore:
    """Rows in host memory; with a ferry they are pinned, so a copy to the GPU does not block."""

    def __init__(self):
        self.rows = None  # (N,2,B,Hk,D): tokens first, so growing appends at the end

    def write(self, start: int, new, ferry=None):
        """new (T,2,B,Hk,D) at token `start`; it at least doubles when it is full: fewer than 2N copies for N tokens."""
        kinds = {(x.shape[1:], x.dtype) for x in (self.rows, new) if x is not None}
        if start == 0 and len(kinds) > 1:
            self.rows = None  # another batch size: beams that were multiplied; or another dtype
        held = 0 if self.rows is None else self.rows.shape[0]
        if start + new.shape[0] > held:
            shape = (max(64, 2 * held, start + new.shape[0]), *new.shape[1:])
            grown = host_rows(shape, new.dtype, pinned=ferry is not None)
            if start:
                if ferry:
                    ferry.wait()
                grown[:start] = self.rows[:start]
            self.rows = grown
        rows = self.rows[start : start + new.shape[0]]
        ferry.away(rows, new) if ferry else rows.copy_(new)

    def begin(self, tokens: int, like, ferry=None):
        """(tokens,2,B,Hk,D), to the device that computes."""
        if ferry:
            return ferry.near(self.rows[:tokens])
        return READER.submit(self.rows[:tokens].to, like.device)


class DiskStore:
    """The same rows in an unnamed file, which disappears with the cache.

    The reading and the writing thread pass explicit offsets, so they share no file position.
    """

    def __init__(self, folder=None):
        try:
            self.file = tempfile.TemporaryFile(dir=folder, prefix="nanokv-", buffering=0)
        except OSError as error:
            raise CacheError(
                f"no file can be made in {folder}: {error.strerror}", "pass another folder="
            ) from error

    def write(self, start: int, new, ferry=None):
        """new (T,2,B,Hk,D) at token `start`; waits for them where they are computed."""
        data = new.cpu().contiguous().view(torch.uint8).numpy().data.cast("B")
        place = start * new[0].nbytes
        while data:
            count = write_at(self.file.fileno(), data, place)
            data, place = data[count:], place + count

    def begin(self, tokens: int, like, ferry=None):
        """(tokens,2,B,Hk,D), to the device that computes."""
        return READER.submit(self.read, tokens, like, ferry)

    def read(self, tokens: int, like, ferry=None):
        """Read, not mapped: mapped pages would be waited for one by one when attention touches them."""
        rows = host_rows((tokens, *like.shape[1:]), like.dtype, pinned=ferry is not None)
        target, place = memoryview(rows.view(torch.uint8).numpy()).cast("B"), 0
        while target:
            count = read_at(self.file.fileno(), target, place)
            if not count:
                raise CacheError(f"the file of an offloaded cache is shorter than {tokens} tokens")
            target, place = target[count:], place + count
        return ferry.near(rows) if ferry else rows.to(like.device)


# --- reads and writes at an offset: os.preadv and os.pwrite, or seek under a lock (Windows) ---

POSITION = threading.Lock()


def write_at(file: int, data, place: int) -> int:
    """How many bytes were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, place)
    with POSITION:
        os.lseek(file, place, os.SEEK_SET)
        return os.write(file, data)


def read_at(file: int, target, place: int) -> int:
    """How many bytes were read into `target`; 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [target], place)
    with POSITION:
        os.lseek(file, place, os.SEEK_SET)
        data = os.read(file, len(target))
    target[: len(data)] = data
    return len(data)
