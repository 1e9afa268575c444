"""Keeps decode steps fast while other programs use the processor's cores.

    watch(threads)                     once per process; `nanokv.load` calls it
    with fewer_threads(model, rows):   around a decode step

OpenMP's threads spin while they wait for each other, which is fastest on free cores. If a core is
busy with another program, the system soon puts two threads on one core, where each of them wastes
the other's time by spinning: a step of 1 ms takes 5 to 200 ms.

`Watch` reads ten times per second how much processor time other programs take. While they keep a
core busy that our threads would use, two things change. Neither changes any bit of an answer.

    ShortWaits      threads wait only briefly before they sleep, also in torch: in prefill, training
                    and the user's code
    FewerThreads    a decode step of one row uses as many threads as there are free cores

Steps of several rows keep their number of threads, and so does a plain model with odd sizes. In
both cases torch splits products by the number of threads and would round differently.

Nothing changes if the user has set how threads wait (GOMP_SPINCOUNT, OMP_WAIT_POLICY), with one
thread, or on systems other than Linux, which have no /proc/stat with the use of each processor.
This module does not import torch.
"""

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

EVERY = 0.1  # seconds between two readings; /proc/stat counts in steps of 0.01
# In cores taken by other programs: the processor is crowded from BUSY on, until it is below FREE.
BUSY = 0.35
FREE = 0.2
KEYS_TRIED = (37, 41, 50, 63, 95, 129)  # by attends_alike
CHOSEN = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"  # environment variables that set how threads wait


class Usage(NamedTuple):
    """A reading in seconds, each since a fixed start."""

    clock: float
    busy: float  # processor time on our cores, of all programs
    own: float  # processor time of this process


class Crowd:
    """Whether our threads have a core each, and if not, how many cores are free."""

    def __init__(self, cores: int, threads: int, usage: Usage) -> None:
        self.cores = cores
        self.threads = threads
        self.last = usage
        self.free = cores
        self.crowded = False

    def look(self, usage: Usage) -> None:
        """Update from a new reading. A program counts as a whole core from BUSY on.

        A program that computes all the time gets only about half a core next to threads that spin.
        """
        seconds = max(usage.clock - self.last.clock, 1e-9)
        others = (usage.busy - self.last.busy - (usage.own - self.last.own)) / seconds
        self.last = usage
        missing = others - (self.cores - self.threads)  # cores that our threads share with others
        limit = FREE if self.crowded else BUSY
        self.crowded = missing >= limit
        free = self.cores
        if self.crowded:
            free = max(1, self.cores - int(others + 1 - BUSY))
        self.free = free  # in one assignment: another thread reads it


class ShortWaits:
    """While held, OpenMP's threads spin for 100 turns of a loop instead of 300,000, then sleep.

    libgomp does this while it has more threads than the process has cores (its manual, under
    GOMP_SPINCOUNT). Therefore one thread starts a second team of sleeping threads that is large enough. Setting the
    variable GOMP_SPINCOUNT has no effect, because it is read once, when torch is imported.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.over: threading.Event | None = None

    def hold(self, threads: int) -> None:
        """Hold short waits until `release`.

        No effect if libgomp is not loaded: before torch is imported, or with another OpenMP
        runtime.
        """
        if self.over:
            return
        runtime = libgomp()
        if runtime is None:
            return
        over = threading.Event()
        size = max(2, self.cores - threads + 2)  # so that libgomp has more threads than cores
        with contextlib.suppress(RuntimeError):  # no thread can be started: waits stay long
            threading.Thread(target=_keep_team, args=(runtime, size, over), daemon=True).start()
            self.over = over

    def release(self) -> None:
        if self.over:
            self.over.set()
            self.over = None


def _keep_team(runtime: Any, size: int, over: threading.Event) -> None:
    """Start a team of `size` idle threads, and keep it until `over`. It ends with this thread."""
    nothing = ctypes.cast(runtime.omp_get_thread_num, ctypes.c_void_p)
    runtime.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
    over.wait()


class Watch(threading.Thread):
    """Updates the crowd from `read()` until the process ends; holds `waits` while it is crowded."""

    def __init__(self, crowd: Crowd, waits: ShortWaits, read: Callable[[], Usage]) -> None:
        super().__init__(daemon=True, name="nanokv-neighbours")
        self.crowd = crowd
        self.waits = waits
        self.read = read

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # end if /proc/stat becomes unreadable
            while True:
                time.sleep(EVERY)
                self.look()

    def look(self) -> None:
        self.crowd.look(self.read())
        if self.crowd.crowded:
            self.waits.hold(self.crowd.threads)
        else:
            self.waits.release()


class FewerThreads:
    """Inside the block torch and the kernels use `threads` threads; after it, `before`."""

    def __init__(self, threads: int, before: int) -> None:
        self.threads = threads
        self.before = before

    def __enter__(self) -> None:
        sys.modules["torch"].set_num_threads(self.threads)

    def __exit__(self, *error: object) -> None:
        sys.modules["torch"].set_num_threads(self.before)


WATCH: Watch | None = None
AS_IT_IS = contextlib.nullcontext()


def watch(threads: int) -> None:
    """Start watching for this process, which computes with `threads` threads.

    A second call sets the new number.
    """
    global WATCH
    if threads < 2 or any(os.environ.get(name) for name in CHOSEN):
        return
    if WATCH is not None and WATCH.is_alive():
        WATCH.crowd.threads = threads
        return
    # Without /proc/stat, or if no thread can be started, nothing is watched.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        read = ProcessorTimes()
        cores = len(read.cores)
        found = Watch(Crowd(cores, threads, read()), ShortWaits(cores), read)
        found.start()
        WATCH = found


def forget() -> None:
    """Drop the watch in a forked child, which has none of its parent's threads."""
    global WATCH
    WATCH = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


def fewer_threads(model: Any, rows: int) -> contextlib.AbstractContextManager[None]:
    """A context for a decode step of `rows` rows that limits the threads to the free cores.

    The number is the largest that gives the same bits. Nothing changes unless the cores are crowded
    and there is one row.
    """
    if rows != 1 or WATCH is None or not WATCH.crowd.crowded:
        return AS_IT_IS
    threads = sys.modules["torch"].get_num_threads()
    free = WATCH.crowd.free
    if not getattr(model, "any_threads", False):
        free = same_bits(model.config, threads, free)
        if free < threads and not attends_alike(threads, free, heads_of(model.config)):
            return AS_IT_IS
    if free >= threads:
        return AS_IT_IS
    return FewerThreads(free, threads)


def same_bits(config: Any, threads: int, free: int) -> int:
    """The most threads up to `free` that compute one row with the same bits as `threads` threads.

    `threads` if there is no such number. torch gives each thread the same number of matrix rows.
    MKL computes four fp32 rows at once and rounds the remaining rows differently: with 1 to 16
    threads, matrices with a multiple of 4 rows per thread gave the same bits, all others did not.
    Here a multiple of 16 is required, for wider processors.
    """
    if config.experts:
        return threads
    D = config.head_dim
    heads = config.num_attention_heads * D, config.num_key_value_heads * D
    rows = *heads, config.hidden_size, config.intermediate_size, config.vocab_size
    fitting = [n for n in range(1, threads + 1) if all(N % (16 * n) == 0 for N in rows)]
    if threads not in fitting:
        return threads
    return max(n for n in fitting if n <= free)


def heads_of(config: Any) -> tuple[int, int, int]:
    """(H, Hk, D)."""
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim


@functools.cache
def attends_alike(threads: int, free: int, heads: tuple[int, int, int]) -> bool:
    """Whether torch attends to keys with the same bits in both numbers of threads.

    On a Zen 4 it does behind 48 keys and does not behind 41. Tried once, in a few milliseconds, on
    a thread of its own: whoever watches torch's calls in this thread must not see those of a trial.
    """
    found: list[bool] = []
    trial = threading.Thread(target=_try_attention, args=(found, threads, free, heads))
    trial.start()
    trial.join()
    return found == [True]


def _try_attention(found: list[bool], threads: int, free: int, heads: tuple[int, int, int]) -> None:
    """Append whether the bits are equal for all KEYS_TRIED."""
    torch = sys.modules["torch"]
    attend = sys.modules["nanokv.attention"].decode_attention  # that of the plain model
    H, Hk, D = heads
    random = torch.Generator().manual_seed(0)
    alike = True
    try:
        for S in KEYS_TRIED:
            q = torch.randn(1, H, 1, D, generator=random)  # (1,H,1,D)
            k, v = torch.randn(2, 1, Hk, S, D, generator=random)  # (1,Hk,S,D) ×2
            results = []
            for number in (threads, free):
                torch.set_num_threads(number)
                results.append(attend(q, k, v))
            alike = alike and torch.equal(*results)
    finally:
        torch.set_num_threads(threads)
    found.append(alike)


class ProcessorTimes:
    """Reads the lines of /proc/stat for the cores of this process. OSError without this file."""

    def __init__(self) -> None:
        self.file = open("/proc/stat")
        self.cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self.tick = os.sysconf("SC_CLK_TCK")

    def __call__(self) -> Usage:
        self.file.seek(0)
        return Usage(time.perf_counter(), self.busy() / self.tick, time.process_time())

    def busy(self) -> int:
        """Ticks that our cores were busy. Time taken by a hypervisor counts."""
        ticks = 0
        for line in self.file:
            name, *counts = line.split()
            if not name.startswith("cpu"):  # do not parse the next line, a long list of interrupts
                break
            if name in self.cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks


def libgomp() -> Any:
    """The OpenMP runtime that torch has loaded into this process; None if it is not GCC's."""
    runtime = ctypes.CDLL(None)
    return runtime if hasattr(runtime, "GOMP_parallel") else None
