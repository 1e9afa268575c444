"""The display of a training run: a bar on a terminal, occasional lines elsewhere, and loss.png.

This code does not affect training: `nanokv train -q` computes the same weights without it.
"""

import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.cli.common.progress import ProgressLine
from nanokv.school.training.run_folder import records

if TYPE_CHECKING:
    from nanokv.school.training.trainer import Trainer

EVERY_S = 10  # seconds between two lines if stderr is no terminal
# Steps over which the speed is averaged, so that the slow first steps, which compile, drop out.
LATEST = 50


class Progress:
    """A bar on a terminal; elsewhere a line per evaluation, or at most one every ten seconds."""

    def __init__(self, output: OutputOptions, every: int, trainer: "Trainer"):
        """`every`: steps between two sample answers."""
        self.output = output
        self.every = every
        self.trainer = trainer
        self.first = trainer.step
        self.times = deque([time.perf_counter()], LATEST + 1)  # when the latest steps ended
        self.validation: float | None = None  # until the first evaluation
        self.printed = -math.inf
        self.bar: Any = None  # a rich.progress.Progress on a terminal

    def __enter__(self) -> "Progress":
        if terminal.is_tty(sys.stderr) and not self.output.quiet:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            color: Literal["auto"] | None = (
                "auto" if terminal.use_color(sys.stderr, self.output.color) else None
            )
            columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("ETA")
            self.bar = Progress(
                *columns, TimeRemainingColumn(), console=Console(stderr=True, color_system=color)
            )
            self.bar.start()
            self.task = self.bar.add_task("", total=self.trainer.recipe.steps, completed=self.first)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, record: dict) -> None:
        """`step 1,200/8,000 · loss 1.83 · val 1.91 · 14.2k tok/s`, with the time left."""
        self.validation = record.get("validation", self.validation)
        self.times.append(time.perf_counter())
        seconds = self.times[-1] - self.times[0]
        recipe = self.trainer.recipe
        speed = (len(self.times) - 1) * recipe.tokens_per_batch / seconds
        steps = recipe.steps
        losses = f"loss {record['loss']:.3f}"
        if self.validation is not None:
            losses += f" · val {self.validation:.3f}"
        line = f"step {record['step']:,}/{steps:,} · {losses} · {speed / 1e3:.1f}k tok/s"
        if self.bar:
            self.bar.update(self.task, completed=record["step"], description=line)
        elif "validation" in record or time.monotonic() - self.printed > EVERY_S:
            self.printed = time.monotonic()
            left = (steps - record["step"]) * recipe.tokens_per_batch / speed
            terminal.notice(f"{line} · ETA {left / 60:.0f} min", self.output)
        if "validation" in record:
            self.sample(record["step"])

    def sample(self, step: int) -> None:
        """The model's present answer to one question, which changes between samples."""
        if self.output.quiet:
            return
        from nanokv.school.training.probe import QUESTIONS, reply

        question = QUESTIONS[step // self.every % len(QUESTIONS)]
        line = terminal.sanitize_line(f"  {question} → {reply(self.trainer, question)}")
        if self.bar:  # printed by the bar, above it: the bar would overwrite other output
            self.bar.console.print(line, style="dim", markup=False, highlight=False)
        else:
            terminal.notice(line, self.output)


class EvaluationProgress:
    """Counts finished cases and shows the time left."""

    def __init__(self, quiet: bool, total: int):
        self.total = total
        self.done = 0
        self.line = ProgressLine(quiet)

    def __call__(self) -> None:
        """Count one more case."""
        self.done += 1
        if not self.line.due():
            return
        left = self.line.seconds / self.done * (self.total - self.done)
        parts = ["evaluating", f"{self.done:,}/{self.total:,} conversations", f"{left:,.0f} s left"]
        # Only one line can be overwritten.
        self.line.show(layout.joined(parts, layout.columns(sys.stderr, None)).split("\n")[0])

    def clear(self) -> None:
        """Remove the line before a row of the table is printed."""
        self.line.clear()


def plot(out: Path, output: OutputOptions) -> None:
    """Draw loss.png from metrics.jsonl, if matplotlib is installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        terminal.notice("no loss.png: matplotlib is not installed", output)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = records(out / "metrics.jsonl")
    if not steps:
        return
    validated = [record for record in steps if "validation" in record]
    curves = (
        (steps, "loss", "training (user messages count a tenth)", {"linewidth": 0.6}),
        (validated, "validation", "answers on held-out words", {"marker": "o", "markersize": 3}),
    )
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for rows, key, label, style in curves:
        axes.plot([row["tokens"] for row in rows], [row[key] for row in rows], label=label, **style)
    axes.set(xlabel="tokens", ylabel="loss, nats per token", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=120)
    pyplot.close(figure)
