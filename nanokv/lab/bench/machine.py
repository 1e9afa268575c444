"""What this machine can do, measured now: read bandwidth, matrix products, and how much of it others take."""

import functools
import importlib.metadata
import importlib.util
import os
import sys
import time

import torch
import torch.nn.functional as F

from nanokv.costs.free_memory import available_memory

BUFFER = 1 << 29  # bytes of the largest read: far more than a cache of the processor holds
GPU_BUFFER = 1 << 32  # of a GPU, which would read the other one in the time of a few launches
AGAIN = 1 << 26  # bytes that a reading streams: what is smaller is read several times, at most 100
SIDE = 1024  # rows and columns of the matrices whose product is timed


class Bandwidth:
    """Bytes per second at which all threads read a buffer, as large as what they are to be compared with: a model that
    fits into a cache of the processor is read from there.

    Readings are taken between the measurements, and the best one of a run counts: others can only make them slower, and
    the least time of a step must not lie above what a step took. torch's fp32 sum is the reader, because the kernels of
    decode are no faster (GB/s of 2 Zen 5 cores at 4, 12, 24 and 64 MB: sum 138, 172, 162, 80; fp32 GEMV 128, 136, 105,
    43; bf16 and int8 GEMV at most 84).
    """

    def __init__(self, device="cpu"):
        self.buffer = torch.ones(buffer_bytes(device) // 4, device=device)
        self.readings: dict[int, list[float]] = {}  # bytes → bytes per second of each

    def probe(self, size: int | None = None) -> float:
        """One reading of so many bytes (default: the buffer)."""
        part = self.buffer[: self.bytes(size) // 4]
        seconds = min(timed(part.sum, min(100, max(1, AGAIN // part.nbytes)), part.device))
        self.readings.setdefault(part.nbytes, []).append(part.nbytes / seconds)
        return part.nbytes / seconds

    def best(self, size: int | None = None) -> float:
        """The fastest reading of so many bytes (default: the buffer); 0 before the first."""
        return max(self.readings.get(self.bytes(size), [0.0]))

    @property
    def rates(self) -> list[float]:
        """All readings of memory."""
        return self.readings.get(self.buffer.nbytes, [])

    def bytes(self, size: int | None) -> int:
        """What is read for `size`: at most the buffer, whole values; on a GPU always the buffer, because a launch takes
        longer than the read of what its caches hold."""
        whole = self.buffer.nbytes
        if size is None or self.buffer.device.type != "cpu":
            return whole
        return min(max(4, size // 4 * 4), whole)


def buffer_bytes(device) -> int:
    """Of the largest read: on a GPU at most a quarter of what is free there."""
    if torch.device(device).type != "cuda":
        return BUFFER
    return min(GPU_BUFFER, (available_memory(str(device)) or BUFFER) // 4)


def device_name(device) -> str | None:
    """What the maker calls this GPU; None for a CPU."""
    if torch.device(device).type != "cuda":
        return None
    return torch.cuda.get_device_name(device)


def device_code(device) -> str:
    """Whose kernels compute on this GPU, with their versions."""
    versions = [f"torch {torch.__version__}"]
    if torch.version.cuda:
        versions.append(f"CUDA {torch.version.cuda}")
    if importlib.util.find_spec("triton"):
        versions.append(f"triton {importlib.metadata.version('triton')}")
    return ", ".join(versions)


def peak_memory(device) -> int | None:
    """The most bytes that this process has held: of a GPU's memory, or of this computer's."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gemm_peak(dtype, device="cpu", repeat: int = 5) -> float:
    """FLOPs per second of a square product, best of `repeat`. On a CPU one in fp32 counts too: it is the faster one
    where the processor does not multiply bf16."""
    a, b = torch.randn(2, SIDE, SIDE, device=device)
    best = 0.0
    dtypes = {dtype}
    if a.device.type == "cpu":
        dtypes.add(torch.float32)
    for each in dtypes:
        run = functools.partial(F.linear, a.to(each), b.to(each))
        best = max(best, 2 * SIDE**3 / min(timed(run, repeat, device)))
    return best


def timed(run, repeat: int, device="cpu") -> list[float]:
    """Seconds of each of `repeat` runs, after one that warms up."""
    times = []
    for _ in range(repeat + 1):
        began = now(device)
        run()
        times.append(now(device) - began)
    return times[1:]


def now(device) -> float:
    """Seconds, once all that was asked of the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Others:
    """Processor time that other processes take while this one measures; `pids`: children, which work for this one."""

    def __init__(self, pids=()):
        self.pids = tuple(pids)
        self.began = _busy(self.pids)

    def cores(self) -> float | None:
        """Cores that others kept busy since the start, on average; None where the system does not say."""
        if self.began is None:
            return None
        busy, own, clock = _busy(self.pids)
        busy0, own0, clock0 = self.began
        others = (busy - busy0) - (own - own0)
        return max(0.0, others / max(clock - clock0, 1e-9))


def _busy(pids):
    """(seconds all cores were busy, seconds of this process and its children, clock); time stolen by a hypervisor
    counts as busy."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4])  # children that have ended are in it
    own += sum(map(_ticks, pids)) / ticks
    return (user + nice + system + irq + softirq + steal) / ticks, own, time.perf_counter()


def _ticks(pid: int) -> int:
    """Of processor time that a running child has taken."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0
    return int(fields[11]) + int(fields[12])
