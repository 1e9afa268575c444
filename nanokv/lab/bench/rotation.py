"""All runners in turn, round after round: a slow minute of the machine hits them all alike. One computes at a time."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from nanokv.lab.bench.machine import Bandwidth
from nanokv.lab.bench.remote import LEAST, PeerError

STEPS = 16  # decode steps a measurement, unless asked otherwise


@dataclass
class Row:
    """One runner at one context: seconds of each round for the prefill and for a decode step."""

    runner: object
    context: int
    steps: int
    bandwidth: float = 0.0  # the best reading of as many bytes as a step reads, bytes per second
    prefills: list[float] = field(default_factory=list)
    decodes: list[float] = field(default_factory=list)
    error: str = ""  # why a peer has no more rounds, or none

    @property
    def prefill_s(self) -> float:
        """Median."""
        return statistics.median(self.prefills)

    @property
    def decode_s(self) -> float:
        """Median of one step."""
        return statistics.median(self.decodes)

    @property
    def spread(self) -> float | None:
        """(slowest − fastest) / median of the decode steps; of one round nothing is known."""
        if len(self.decodes) < 2:
            return None
        return (max(self.decodes) - min(self.decodes)) / self.decode_s

    @property
    def bytes(self) -> int:
        """Read by the middle one of the measured steps."""
        return self.runner.step_bytes(self.context + (self.steps + 1) // 2)

    @property
    def share(self) -> float:
        """Of the bandwidth limit: 1 would be a step that only waits for memory."""
        return self.bytes / self.bandwidth / self.decode_s

    def figures(self) -> dict:
        """What the table shows, raw: seconds, bytes, tokens per second over all rows of a batch."""
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
        """What the table says of a peer that failed."""
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
    """`rows` fill up while `run` is iterated; stop at any time and keep what is finished."""

    def __init__(
        self, runners, contexts, vocab_size: int, device="cpu", repeat: int = 5, steps: int = STEPS
    ):
        self.runners = list(runners)
        self.contexts = list(contexts)
        self.repeat = repeat
        self.steps = steps
        self.vocab_size = vocab_size
        self.device = device
        self.bandwidth = Bandwidth(device)
        self.rows = {(id(r), c): Row(r, c, steps) for c in self.contexts for r in self.runners}
        self.slowest = dict.fromkeys(self.contexts, 0.0)  # seconds of a whole measurement

    @property
    def total(self) -> int:
        """Measurements, the warm-up round included."""
        return (self.repeat + 1) * len(self.runners) * len(self.contexts)

    def run(self) -> Iterator[Row]:
        """Yield after every measurement. Round 0 warms up; every other round begins one runner later than the last."""
        for turn in range(self.repeat + 1):
            for context in self.contexts:
                self.bandwidth.probe()
                shift = turn % len(self.runners)
                for runner in self.runners[shift:] + self.runners[:shift]:
                    row = self.rows[id(runner), context]
                    if not row.error:
                        self.measure(row, turn)
                    yield row

    def measure(self, row, turn: int):
        """One round of a row. A peer that fails has had its last one at this context; the finished ones stay."""
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
        """Of memory, the best reading, bytes per second; 0 before the first."""
        return self.bandwidth.best()

    def finished(self) -> list[Row]:
        """Rows with at least one round behind the warm-up, by context and runner."""
        rows = [row for row in self.rows.values() if row.decodes]
        for row in rows:
            row.bandwidth = self.bandwidth.best(row.bytes)
        return rows

    def failed(self) -> list[Row]:
        """Rows of peers that did not come to the end, by context and runner; some of them have finished rounds."""
        return [row for row in self.rows.values() if row.error]
