"""All runners in turn, round after round, in one process: a slow minute of the machine hits them all alike."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from nanokv.bench.machine import Bandwidth, now

STEPS = 16  # decode steps a measurement, unless asked otherwise


@dataclass
class Row:
    """One runner at one context: seconds of each round for the prefill and for a decode step."""

    runner: object
    context: int
    steps: int
    bandwidth: float = 0.0  # median of the run, bytes per second
    prefills: list[float] = field(default_factory=list)
    decodes: list[float] = field(default_factory=list)

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
        return None if len(self.decodes) < 2 else (max(self.decodes) - min(self.decodes)) / self.decode_s

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
            "engine": self.runner.engine, "weights": self.runner.weights, "cache": self.runner.cache, "batch": batch,
            "context": self.context, "prefill_s": self.prefill_s, "decode_s": self.decode_s, "spread": self.spread,
            "prefill_tok_s": batch * self.context / self.prefill_s, "decode_tok_s": batch / self.decode_s,
            "step_bytes": self.bytes, "gigabytes_per_second": self.bytes / self.decode_s / 1e9, "share": self.share,
            "rounds": len(self.decodes),
        }  # fmt: skip


class Rotation:
    """`rows` fill up while `run` is iterated; stop at any time and keep what is finished."""

    def __init__(self, runners, contexts, vocab_size: int, device="cpu", repeat: int = 5, steps: int = STEPS):
        self.runners, self.contexts, self.repeat, self.steps = list(runners), list(contexts), repeat, steps
        self.vocab_size, self.device, self.bandwidth = vocab_size, device, Bandwidth(device)
        self.rows = {(id(r), c): Row(r, c, steps) for c in self.contexts for r in self.runners}

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
                    prefill, decode = self.measure(runner, context, turn)
                    if turn:
                        row.prefills.append(prefill)
                        row.decodes.append(decode)
                    yield row

    def measure(self, runner, context: int, seed: int) -> tuple[float, float]:
        """(seconds of a prefill, seconds of a decode step)."""
        ids = torch.randint(self.vocab_size, (runner.batch, context), generator=torch.Generator().manual_seed(seed))
        ids = ids.to(self.device)
        began = now(self.device)
        runner.start(ids, self.steps)
        prefilled = now(self.device)
        for _ in range(self.steps):
            runner.step()
        return prefilled - began, (now(self.device) - prefilled) / self.steps

    @property
    def rate(self) -> float:
        """Median of the probed bandwidths, bytes per second; 0 before the first."""
        return statistics.median(self.bandwidth.rates) if self.bandwidth.rates else 0.0

    def finished(self) -> list[Row]:
        """Rows with at least one round behind the warm-up, by context and runner."""
        rows = [row for row in self.rows.values() if row.decodes]
        for row in rows:
            row.bandwidth = self.rate
        return rows
