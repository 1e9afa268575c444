"""Measure all runners in turn, round after round, so that a slow minute of the machine affects
all of them alike. One runner computes at a time."""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from nanokv.lab.bench.machine import Bandwidth
from nanokv.lab.bench.remote import LEAST, PeerError
from nanokv.lab.bench.runners import Runner

STEPS = 16  # decode steps per measurement, by default


@dataclass
class Row:
    """One runner at one context: seconds of each round for the prefill and for a decode step."""

    runner: Runner
    context: int
    steps: int
    bandwidth: float = 0.0  # bytes per second: the best reading of as many bytes as a step reads
    prefills: list[float] = field(default_factory=list)
    decodes: list[float] = field(default_factory=list)
    error: str = ""  # why a peer stopped; "" while it runs

    @property
    def prefill_s(self) -> float:
        """Median seconds of a prefill."""
        return statistics.median(self.prefills)

    @property
    def decode_s(self) -> float:
        """Median seconds of a decode step."""
        return statistics.median(self.decodes)

    @property
    def spread(self) -> float | None:
        """(slowest − fastest) / median of the decode steps; None with fewer than two rounds."""
        if len(self.decodes) < 2:
            return None
        return (max(self.decodes) - min(self.decodes)) / self.decode_s

    @property
    def bytes(self) -> int:
        """Bytes read by the middle one of the measured steps."""
        return self.runner.step_bytes(self.context + (self.steps + 1) // 2)

    @property
    def share(self) -> float:
        """Share of the bandwidth limit: 1 is a step that only waits for memory."""
        return self.bytes / self.bandwidth / self.decode_s

    def figures(self) -> dict:
        """The row's figures as JSON values: seconds, bytes, tokens per second of the whole
        batch."""
        batch = self.runner.batch
        return {
            "engine": self.runner.engine,
            "weights": self.runner.weights,
            "cache": self.runner.cache,
            "batch": batch,
            "context": self.context,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "spread": self.spread,
            "prefill_tok_s": batch * self.context / self.prefill_s,
            "decode_tok_s": batch / self.decode_s,
            "step_bytes": self.bytes,
            "gigabytes_per_second": self.bytes / self.decode_s / 1e9,
            "share": self.share,
            "bandwidth": self.bandwidth,
            "rounds": len(self.decodes),
        }

    def failure(self) -> dict:
        """The row of a peer that failed, as JSON values."""
        runner = self.runner
        return {
            "engine": runner.engine,
            "weights": runner.weights,
            "cache": runner.cache,
            "batch": runner.batch,
            "context": self.context,
            "rounds": len(self.decodes),
            "error": self.error,
        }


class Rotation:
    """Iterating over `run` measures and fills `rows`; the caller may stop at any time and keep the
    finished rows."""

    def __init__(
        self,
        runners: Iterable[Runner],
        contexts: Iterable[int],
        vocab_size: int,
        device: str | torch.device = "cpu",
        repeat: int = 5,
        steps: int = STEPS,
    ) -> None:
        self.runners = list(runners)
        self.contexts = list(contexts)
        self.repeat = repeat
        self.steps = steps
        self.vocab_size = vocab_size
        self.device = device
        self.bandwidth = Bandwidth(device)
        self.rows = {(id(r), c): Row(r, c, steps) for c in self.contexts for r in self.runners}
        self.slowest = dict.fromkeys(self.contexts, 0.0)  # context → seconds of a measurement

    @property
    def total(self) -> int:
        """Number of measurements, including the warm-up round."""
        return (self.repeat + 1) * len(self.runners) * len(self.contexts)

    def run(self) -> Iterator[Row]:
        """Yield after every measurement. Round 0 is the warm-up; each round starts one runner later
        than the round before."""
        for turn in range(self.repeat + 1):
            for context in self.contexts:
                self.bandwidth.probe()
                shift = turn % len(self.runners)
                for runner in self.runners[shift:] + self.runners[:shift]:
                    row = self.rows[id(runner), context]
                    if not row.error:
                        self.measure(row, turn)
                    yield row

    def measure(self, row: Row, turn: int) -> None:
        """Measure one round of a row. A peer that fails is not measured again at this context; its
        finished rounds are kept."""
        self.bandwidth.probe(row.bytes)
        row.runner.patience = max(LEAST, 20 * self.slowest[row.context])
        began = time.perf_counter()
        try:
            prefill, decode = row.runner.measure(
                self.vocab_size, row.context, self.steps, seed=turn
            )
        except PeerError as error:
            row.error = str(error)
            return
        self.slowest[row.context] = max(self.slowest[row.context], time.perf_counter() - began)
        if turn:
            row.prefills.append(prefill)
            row.decodes.append(decode)

    @property
    def rate(self) -> float:
        """The best reading of memory bandwidth in bytes per second; 0 before the first."""
        return self.bandwidth.best()

    def finished(self) -> list[Row]:
        """Rows with at least one round after the warm-up, by context and runner."""
        rows = [row for row in self.rows.values() if row.decodes]
        for row in rows:
            row.bandwidth = self.bandwidth.best(row.bytes)
        return rows

    def failed(self) -> list[Row]:
        """Rows of peers that failed, by context and runner; some of them have finished rounds."""
        return [row for row in self.rows.values() if row.error]
