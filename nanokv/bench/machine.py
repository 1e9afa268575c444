"""What this machine can do, measured now: read bandwidth, matrix products, and how much of it others take."""

import os
import time

import torch

BUFFER = 1 << 29  # bytes read by the bandwidth probe: far more than a cache of the processor holds
SIDE = 1024  # rows and columns of the matrices whose product is timed


class Bandwidth:
    """Bytes per second that a sum over a large buffer streams from memory; probed once per round, the median counts."""

    def __init__(self, device="cpu"):
        self.buffer, self.rates = torch.ones(BUFFER // 4, device=device), []
        self.probe()  # the first pass meets pages that nobody has touched
        self.rates.clear()

    def probe(self) -> float:
        """One pass over the buffer."""
        began = now(self.buffer.device)
        self.buffer.sum()
        self.rates.append(BUFFER / (now(self.buffer.device) - began))
        return self.rates[-1]


def gemm_peak(dtype, device="cpu", repeat: int = 5) -> float:
    """FLOPs per second of a square product, best of `repeat`."""
    a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in "ab")
    return 2 * SIDE**3 / min(timed(lambda: a @ b, repeat, device))


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
        (busy, own, clock), (busy0, own0, clock0) = _busy(self.pids), self.began
        return max(0.0, (busy - busy0 - (own - own0)) / max(clock - clock0, 1e-9))


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
