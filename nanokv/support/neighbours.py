"""Programs beside this one: while they keep cores busy, threads wait asleep, and a decode step
takes the free cores alone.

    watch(threads)                     once per process: `nanokv.load` calls it
    with fewer_threads(model, rows):   around a decode step

OpenMP's threads spin while they wait for each other. On free cores nothing is faster. Beside a busy
core the system soon puts two of them on one core, where each spins away the time that the other
needs: a step of 1 ms takes 5 to 200 ms.

`Watch` looks ten times a second at the processor time that other programs take. While they keep a
core busy that our threads would use, two things change. Neither changes a bit of an answer.

    ShortWaits      every wait is short, in torch as well: prefill, training, the user's own code
    FewerThreads    a decode step of one row has as many threads as there are free cores

Several rows keep their number of threads, and so does a plain model of odd sizes: torch divides
products by that number, and would round differently.

Nothing happens where the user has chosen how threads wait (GOMP_SPINCOUNT, OMP_WAIT_POLICY), with
one thread, and where the system does not say who uses its processors: only Linux does, in
/proc/stat. This module imports no torch.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

EVERY = 0.1  # seconds from look to look; /proc/stat counts in steps of 0.01
# Cores that others take: crowded from BUSY on, until it is less than FREE.
BUSY = 0.35
FREE = 0.2
CHOSEN = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"  # of the environment: how threads wait


class Usage(NamedTuple):
    """Seconds since some start: of the clock, of work on our cores, and how much of it was ours."""

    clock: float
    busy: float
    own: float


class Crowd:
    """From one `Usage` to the next: have our `threads` threads a core each, and if not, how many
    cores are free?"""

    def __init__(self, cores: int, threads: int, usage: Usage) -> None:
        self.cores = cores
        self.threads = threads
        self.last = usage
        self.free = cores
        self.crowded = False

    def look(self, usage: Usage) -> None:
        """A core is taken from BUSY on: beside threads that spin, a program that always computes
        gets about half of one."""
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
    """While they are held, OpenMP's threads wait for 100 turns of a loop, not 300,000, then sleep.

    libgomp does that while it has more threads than the process has cores (its manual, under
    GOMP_SPINCOUNT). So one thread gets a team of its own, large enough and asleep. The variable
    itself is read once, when torch is imported.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.over: threading.Event | None = None

    def hold(self, threads: int) -> None:
        """Until `release`. Nothing where libgomp is not loaded: before torch, or beside another
        OpenMP."""
        if self.over:
            return
        runtime = libgomp()
        if runtime is None:
            return
        over = threading.Event()
        size = max(2, self.cores - threads + 2)  # with our threads one more than there are cores
        with contextlib.suppress(RuntimeError):  # no thread can be started: waits stay long
            threading.Thread(target=_keep_team, args=(runtime, size, over), daemon=True).start()
            self.over = over

    def release(self) -> None:
        if self.over:
            self.over.set()
            self.over = None


def _keep_team(runtime: Any, size: int, over: threading.Event) -> None:
    """A team of `size` threads that have nothing to do. It ends with the thread that made it."""
    nothing = ctypes.cast(runtime.omp_get_thread_num, ctypes.c_void_p)
    runtime.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
    over.wait()


class Watch(threading.Thread):
    """Looks at `read()` until the process ends, and holds `waits` while it is crowded."""

    def __init__(self, crowd: Crowd, waits: ShortWaits, read: Callable[[], Usage]) -> None:
        super().__init__(daemon=True, name="nanokv-neighbours")
        self.crowd = crowd
        self.waits = waits
        self.read = read

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # /proc/stat cannot be read any more
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
    """For one step: torch, and kernels in its threads, compute in `threads`, then in `before`."""

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
    """Begin to watch for this process, which computes in so many threads. Called again, it takes
    the new number."""
    global WATCH
    if threads < 2 or any(os.environ.get(name) for name in CHOSEN):
        return
    if WATCH is not None and WATCH.is_alive():
        WATCH.crowd.threads = threads
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # no /proc/stat, or no new thread
        read = ProcessorTimes()
        cores = len(read.cores)
        found = Watch(Crowd(cores, threads, read()), ShortWaits(cores), read)
        found.start()
        WATCH = found


def forget() -> None:
    """A forked child has none of its parent's threads."""
    global WATCH
    WATCH = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


def fewer_threads(model: Any, rows: int) -> contextlib.AbstractContextManager[None]:
    """Around a decode step of so many rows: as many threads as there are free cores, or the most
    below that which give the same bits."""
    if rows != 1 or WATCH is None or not WATCH.crowd.crowded:
        return AS_IT_IS
    threads = sys.modules["torch"].get_num_threads()
    free = WATCH.crowd.free
    if not getattr(model, "any_threads", False):
        free = same_bits(model.config, threads, free)
    if free >= threads:
        return AS_IT_IS
    return FewerThreads(free, threads)


def same_bits(config: Any, threads: int, free: int) -> int:
    """At most `free` threads whose products of one row have the bits of `threads`, or `threads`.

    torch gives each thread as many rows of a matrix. MKL computes four of them at once in fp32, and
    rounds what is left over differently: with 1 to 16 threads, matrices whose rows are a multiple
    of 4 per thread gave the same bits, all others did not. Here it is 16, for wider processors.
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


class ProcessorTimes:
    """Reads /proc/stat: the lines of the cores that this process may use. OSError without it."""

    def __init__(self) -> None:
        self.file = open("/proc/stat")
        self.cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self.tick = os.sysconf("SC_CLK_TCK")

    def __call__(self) -> Usage:
        self.file.seek(0)
        return Usage(time.perf_counter(), self.busy() / self.tick, time.process_time())

    def busy(self) -> int:
        """Ticks. What a hypervisor took from us counts."""
        ticks = 0
        for line in self.file:
            name, *counts = line.split()
            if not name.startswith("cpu"):  # the next line counts thousands of interrupts
                break
            if name in self.cores:
                user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                ticks += user + nice + system + irq + softirq + steal
        return ticks


def libgomp() -> Any:
    """The OpenMP runtime that torch brought into this process; None if it is not GCC's."""
    runtime = ctypes.CDLL(None)
    return runtime if hasattr(runtime, "GOMP_parallel") else None
