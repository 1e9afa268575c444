"""Copies of token rows between host memory and a GPU, on a CUDA stream beside the compute stream.

Only the streams wait, on events: the copy of the next layer runs while this layer computes. Two
layers are on the GPU at a time, each in a buffer that is reused: the host runs far ahead of the
GPU, so a new buffer per copy would take memory for all layers. Copies run in the order in which
they were queued, so a row is read after it was written.

References: transformers' OffloadedCache (a prefetch stream), torch's notes on CUDA semantics
(streams, record_stream).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def ferry_for(device: torch.device) -> "Ferry | None":
    """A Ferry to a CUDA device; None for a device that computes in host memory."""
    if device.type != "cuda":
        return None
    return Ferry(device)


def host_rows(shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> Tensor:
    """Uninitialised host memory, usable outside inference mode too.

    With `pinned`, a copy to or from a GPU does not block the host.
    """
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, pin_memory=pinned)


class Arriving:
    """Rows (S,2,B,Hk,D) in one of the two buffers, valid once the event `arrived` has happened."""

    def __init__(self, ferry: "Ferry", rows: Tensor, slot: int, arrived: torch.cuda.Event):
        self.ferry = ferry
        self.rows = rows
        self.slot = slot
        self.arrived = arrived

    def result(self) -> "Arriving":
        """Does not block: the copy is already queued. Named as in concurrent.futures.Future."""
        return self

    def use(self) -> Tensor:
        """The rows, for kernels that are queued from now on. Call `done` after queueing them."""
        self.ferry.computing().wait_event(self.arrived)
        return self.rows

    def done(self) -> None:
        """Let the buffer be overwritten once everything queued so far has been computed."""
        computing = self.ferry.computing()
        self.ferry.used[self.slot].record(computing)
        self.rows.record_stream(computing)  # in case a larger buffer replaces this one


class Ferry:
    """The copies of one cache to and from one GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.buffers: list[Tensor | None] = [None, None]
        self.turn = 0  # the buffer that the next copy fills
        # For each buffer, when the last computation with it ends.
        self.used = [torch.cuda.Event(), torch.cuda.Event()]

    def computing(self) -> torch.cuda.Stream:
        """The current stream of the calling thread."""
        return torch.cuda.current_stream(self.device)

    def away(self, rows: Tensor, new: Tensor) -> None:
        """Copy `new`, on the GPU and perhaps not computed yet, into pinned `rows`."""
        self.stream.wait_stream(self.computing())
        with torch.cuda.stream(self.stream):
            copy(rows, new)
        new.record_stream(self.stream)  # keeps its memory until the copy is done

    def near(self, rows: Tensor) -> Arriving:
        """Copy pinned `rows` into the buffer whose turn it is."""
        slot = self.turn
        self.turn = 1 - self.turn
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.used[slot])
            target = self.buffer(slot, rows)
            copy(target, rows)
            return Arriving(self, target, slot, self.stream.record_event())

    def buffer(self, slot: int, rows: Tensor) -> Tensor:
        """The first len(rows) rows of the buffer; a buffer that is too small is replaced."""
        held = self.buffers[slot]
        if held is None or held.shape[1:] != rows.shape[1:] or held.dtype != rows.dtype:
            held = rows[:0]
        if len(held) < len(rows):
            with torch.inference_mode(False):
                size = len(rows) * 5 // 4  # not doubled: GPU memory is short when offloading
                held = torch.empty(size, *rows.shape[1:], dtype=rows.dtype, device=self.device)
            self.buffers[slot] = held
        return held[: len(rows)]

    def wait(self) -> None:
        """Block until every copy is done; needed before the host itself reads or writes rows."""
        self.stream.synchronize()


def copy(target: Tensor, source: Tensor) -> None:
    """Queue a copy on the current stream."""
    target.copy_(source, non_blocking=True)
