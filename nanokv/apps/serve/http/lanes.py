"""Threads for JSON, templates and tokenizers, in two lanes by the size of a body."""

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LARGE = 64_000  # bytes of a body that waits for the lane of large ones
TRIM_S = 0.3  # after a large body, when nothing refers to its parts any more


class Lanes:
    """Two threads: a small body never waits for the work on a large one."""

    def __init__(self, name: str):
        self.small = ThreadPoolExecutor(1, f"nanokv-{name}")
        self.large = ThreadPoolExecutor(1, f"nanokv-{name}-large")
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, function: Callable, body: bytes, *args: Any) -> Any:
        """function(body, *args) in the thread for bodies of this size."""
        loop = asyncio.get_running_loop()
        if len(body) <= LARGE:
            return await loop.run_in_executor(self.small, function, body, *args)
        try:
            return await loop.run_in_executor(self.large, function, body, *args)
        finally:
            if self._trim is None:
                self._trim = loop.call_later(TRIM_S, self._start_trim)

    def _start_trim(self) -> None:
        self._trim = None
        self.large.submit(trim)


def trim() -> None:
    """Return freed memory to the system.

    glibc keeps it: after it has freed a few buffers of megabytes, it takes the next ones from the
    heap of the thread, which shrinks only from its end. Other allocators lack this function.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
