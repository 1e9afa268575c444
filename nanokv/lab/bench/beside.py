"""Decode speed next to another busy program: alone, beside a process that keeps one core busy, and
beside that process with one thread.

The three situations take turns, so that other load on the machine affects all of them alike. The
model decodes for SETTLE seconds before each reading, because nanokv/support/neighbours.py needs two
tenths of a second to notice that a busy process has started or ended.
"""

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from nanokv.lab.bench.runners import Ours

SETTLE = 0.4  # seconds of decoding before a reading
READ = 0.5  # seconds of a reading, at least


class Beside:
    """Tokens per second of each round, one list per situation."""

    def __init__(self, runner: Ours, context: int, steps: int) -> None:
        self.runner = runner
        self.context = context
        self.steps = steps
        self.alone: list[float] = []
        self.beside: list[float] = []
        self.one_thread: list[float] = []

    def measure(self, vocab_size: int, turn: int) -> None:
        """One round; round 0 warms up."""
        found = [self.speed(vocab_size, turn)]
        with busy_core():
            found.append(self.speed(vocab_size, turn))
            with one_thread():
                found.append(self.speed(vocab_size, turn))
        for speeds, speed in zip((self.alone, self.beside, self.one_thread), found, strict=True):
            if turn:
                speeds.append(speed)

    def speed(self, vocab_size: int, seed: int) -> float:
        """Tokens per second: the median over READ seconds, after SETTLE seconds of warm-up."""
        seconds: list[float] = []
        began = time.perf_counter()
        while time.perf_counter() - began < SETTLE + READ or not seconds:
            settled = time.perf_counter() - began >= SETTLE
            step = self.runner.measure(vocab_size, self.context, self.steps, seed)[1]
            if settled:
                seconds.append(step)
        return self.runner.batch / statistics.median(seconds)

    def figures(self) -> dict:
        """Medians over the rounds. `ratio` is the median of beside / one thread per round."""
        ratios = [beside / one for beside, one in zip(self.beside, self.one_thread, strict=True)]
        runner = self.runner
        return {
            "label": runner.label,
            "weights": runner.weights,
            "cache": runner.cache,
            "batch": runner.batch,
            "context": self.context,
            "rounds": len(ratios),
            "alone_tok_s": statistics.median(self.alone),
            "beside_tok_s": statistics.median(self.beside),
            "one_thread_tok_s": statistics.median(self.one_thread),
            "ratio": statistics.median(ratios),
        }


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A child process that keeps one core busy while the block runs."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch, and the kernels that run in torch's threads, to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
