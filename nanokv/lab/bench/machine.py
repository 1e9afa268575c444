"""Limits of this machine, measured now: read bandwidth, FLOPs of matrix products, and the
processor time that other programs take."""

import functools
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F

from nanokv.costs.free_memory import available_memory

BUFFER = 1 << 29  # bytes of the largest read: far more than a processor's cache holds
GPU_BUFFER = 1 << 32  # the same on a GPU, which reads BUFFER in the time of a few kernel launches
AGAIN = 1 << 26  # bytes per reading: a smaller buffer is read several times, at most 100
SIDE = 1024  # rows and columns of the matrices whose product is timed


class Bandwidth:
    """Bytes per second at which all threads read a buffer.

    The buffer is as large as the data of the step it is compared with, because a model that fits
    into the processor's cache is read from there. Readings are taken between the measurements, and
    the best reading of a run counts: other programs can only slow a reading down, and the limit of
    a step must not exceed its measured time. The reader is torch's fp32 sum, because no decode
    kernel is faster (GB/s of 2 Zen 5 cores at 4, 12, 24 and 64 MB: sum 138, 172, 162, 80; fp32 GEMV
    128, 136, 105, 43; bf16 and int8 GEMV at most 84).
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.buffer = torch.ones(buffer_bytes(device) // 4, device=device)
        self.readings: dict[int, list[float]] = {}  # buffer size in bytes → bytes per second

    def probe(self, size: int | None = None) -> float:
        """Read `size` bytes (default: the whole buffer) → bytes per second."""
        part = self.buffer[: self.bytes(size) // 4]
        seconds = min(timed(part.sum, min(100, max(1, AGAIN // part.nbytes)), part.device))
        self.readings.setdefault(part.nbytes, []).append(part.nbytes / seconds)
        return part.nbytes / seconds

    def best(self, size: int | None = None) -> float:
        """The fastest reading of `size` bytes (default: the whole buffer); 0 before the first."""
        return max(self.readings.get(self.bytes(size), [0.0]))

    @property
    def rates(self) -> list[float]:
        """All readings of the whole buffer, which come from memory."""
        return self.readings.get(self.buffer.nbytes, [])

    def bytes(self, size: int | None) -> int:
        """Bytes actually read for `size`: a multiple of 4, at most the whole buffer. Always the
        whole buffer on a GPU, where launching a kernel takes longer than reading a small one."""
        whole = self.buffer.nbytes
        if size is None or self.buffer.device.type != "cpu":
            return whole
        return min(max(4, size // 4 * 4), whole)


def buffer_bytes(device: str | torch.device) -> int:
    """Size of the whole buffer in bytes: on a GPU at most a quarter of its free memory."""
    if torch.device(device).type != "cuda":
        return BUFFER
    return min(GPU_BUFFER, (available_memory(str(device)) or BUFFER) // 4)


def device_name(device: str | torch.device) -> str | None:
    """The vendor's name of this GPU; None for a CPU."""
    if torch.device(device).type != "cuda":
        return None
    return torch.cuda.get_device_name(device)


def device_code(device: str | torch.device) -> str:
    """Versions of the libraries whose kernels compute on this GPU."""
    versions = [f"torch {torch.__version__}"]
    if torch.version.cuda:
        versions.append(f"CUDA {torch.version.cuda}")
    if importlib.util.find_spec("triton"):
        versions.append(f"triton {importlib.metadata.version('triton')}")
    return ", ".join(versions)


def peak_memory(device: str | torch.device) -> int | None:
    """Peak memory of this process in bytes, on the GPU or in RAM; None if unknown (Windows)."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def gemm_peak(dtype: torch.dtype, device: str | torch.device = "cpu", repeat: int = 5) -> float:
    """FLOPs per second of a square matrix product, best of `repeat`. A CPU is also timed in fp32,
    which is faster on processors without bf16 instructions."""
    a, b = torch.randn(2, SIDE, SIDE, device=device)
    best = 0.0
    dtypes = {dtype}
    if a.device.type == "cpu":
        dtypes.add(torch.float32)
    for each in dtypes:
        run = functools.partial(F.linear, a.to(each), b.to(each))
        best = max(best, 2 * SIDE**3 / min(timed(run, repeat, device)))
    return best


def timed(
    run: Callable[[], object], repeat: int, device: str | torch.device = "cpu"
) -> list[float]:
    """Seconds of each of `repeat` runs, after a warm-up run."""
    times = []
    for _ in range(repeat + 1):
        began = now(device)
        run()
        times.append(now(device) - began)
    return times[1:]


def now(device: str | torch.device) -> float:
    """The clock in seconds, read after the device has finished its queued work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Others:
    """Processor time that other programs take while this process measures. `pids` are child
    processes, whose time counts as this program's."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self.pids = tuple(pids)
        self.began = _busy(self.pids)

    def cores(self) -> float | None:
        """Cores that other programs kept busy since the start, on average; None where the system
        has no /proc/stat."""
        if self.began is None:
            return None
        now = _busy(self.pids)
        if now is None:
            return None
        busy, own, clock = now
        busy0, own0, clock0 = self.began
        others = (busy - busy0) - (own - own0)
        return max(0.0, others / max(clock - clock0, 1e-9))


def _busy(pids: Iterable[int]) -> tuple[float, float, float] | None:
    """(busy seconds of all cores, seconds of this process and its children, clock), or None. Time
    stolen by a hypervisor counts as busy."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4])  # includes children that have ended
    own += sum(map(_ticks, pids)) / ticks
    return (user + nice + system + irq + softirq + steal) / ticks, own, time.perf_counter()


def _ticks(pid: int) -> int:
    """Clock ticks of processor time that a running child has used."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # the child has ended
        return 0
    return int(fields[11]) + int(fields[12])
