"""The report of an evaluation: a row per task, the spread over seeds, groups, and broken caches."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.text import to_json

if TYPE_CHECKING:
    from nanokv.model import Transformer
    from nanokv.school.training.evaluate import Result
    from nanokv.school.training.trainer import Recipe

TASK_COLUMN = 32  # beside 28 columns of figures: the table fits 60 columns


@dataclass(frozen=True)
class EvaluationOptions:
    """The size of an evaluation, and how it is shown."""

    cases: int  # per task
    json: bool = False
    quiet: bool = False


def evaluate(given: EvaluationOptions, name: str, seeds: list[int]) -> dict:
    """Print the tables of tasks and broken caches, or one JSON object; return its data."""
    import nanokv
    from nanokv.apps.cli.train.log import EvaluationProgress
    from nanokv.school.training.evaluate import (
        TARGETS,
        TASKS,
        WRITTEN,
        broken_recall,
        evaluate,
        examples,
    )

    model, tokenizer = nanokv.load(name, dtype="float32", device="cpu")
    total = (len(TASKS) + len(WRITTEN)) * given.cases * len(seeds) + given.cases
    progress = EvaluationProgress(given.quiet, total)
    width = layout.columns(sys.stdout, None)

    def write(text: str) -> None:
        progress.clear()
        if not given.json:
            terminal.write_out(text)

    write(heading(given, name, seeds, width))
    results = []
    for result in evaluate(as_in_chat(model), tokenizer, given.cases, seeds, progress):
        write(result_rows(result, TARGETS.get(result.task), width))
        results.append(result)
    faults = broken_recall(model, tokenizer, given.cases, seeds[0], progress)
    said = examples(model, tokenizer)
    missed = [result.task for result in results if not result.reached]
    write(fault_table(faults, width))
    write(example_text(said, width))
    if missed:
        write(layout.wrapped(f"\nmissed: {', '.join(missed)}\n", width))
    report = {"model": name, "cases": given.cases, "seeds": seeds, **as_json(results)}
    report |= {"faults": faults, "said": said, "missed": missed}
    if given.json:
        terminal.write_out(to_json(report) + "\n")
    return report


def as_in_chat(model: "Transformer") -> "Transformer":
    """The model over fast kernels where these are built, which is what `nanokv chat` runs.

    The answers take 0.42 of the processor time. Only rounding differs.
    """
    from nanokv.fast import native, optimize

    if native.built():
        return optimize(model)
    return model


def heading(given: EvaluationOptions, name: str, seeds: list[int], width: int | None) -> str:
    """The model and the conditions of the evaluation, and the head of the table of tasks."""
    about = [
        f"{given.cases} cases per task",
        seeds_text(seeds),
        "greedy chat, names and list words never trained on",
    ]
    lowest = "lowest" if len(seeds) > 1 else ""
    head = layout.joined([terminal.sanitize_line(name), *about], width)
    return head + "\n\n" + task_row("task", "right", lowest, "target", width)


def example_text(said: Iterable[tuple[str, str]], width: int | None) -> str:
    """Questions and the model's answers."""
    lines = [f"> {question}\n{terminal.sanitize(answer)}\n" for question, answer in said]
    return layout.wrapped("".join(lines), width)


def seeds_text(seeds: list[int]) -> str:
    """seed 0, or seeds 0 to 4."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {seeds[0]} to {seeds[-1]}"


def as_json(results: list["Result"]) -> dict:
    """Shares per seed, groups, and wrong answers, per task."""
    return {
        "tasks": {result.task: result.shares for result in results},
        "groups": {result.task: result.groups for result in results if result.groups},
        "wrong": {
            result.task: [
                {"turns": case.turns, "expected": case.expected, "answer": answer}
                for case, answer in result.wrong
            ]
            for result in results
        },
    }


def result_rows(result: "Result", target: float | None, width: int | None) -> str:
    """The mean over the seeds, the lowest seed, and the target; then a line per group."""
    lowest = f"{min(result.shares):.1%}" if len(result.shares) > 1 else ""
    aim = "none" if target is None else f"{target:.0%}"
    text = task_row(result.task, f"{result.mean:.1%}", lowest, aim, width)
    for group, (right, count) in sorted(result.groups.items()):
        text += task_row(f"  {group}", f"{right / count:.1%}", "", f"{right} of {count}", width)
    return text


def task_row(task: str, right: str, lowest: str, target: str, width: int | None) -> str:
    """One row of the table of tasks. Rows are printed one by one: a task may take minutes."""
    figures = f"{right:>7}{lowest:>9}{target:>12}"
    return "\n".join(layout.definitions([(task, figures)], width, "", TASK_COLUMN)) + "\n"


def fault_table(faults: list[dict], width: int | None) -> str:
    """How faults in the cache affect recall, a row per fault."""
    head = ("recall when the last turn meets", "recalled", "same answer", "max |Δlogit|")
    rows = [
        (
            row["fault"],
            f"{row['recalled']:.1%}",
            f"{row['same answer']:.1%}",
            f"{row['max |Δlogit|']:.2f}",
        )
        for row in faults
    ]
    return "\n".join(["", *layout.table(head, rows, width), "", ""])


def write_card(folder: Path, recipe: "Recipe", report: dict) -> None:
    """Write README.md of the finished model."""
    from nanokv.config import Config
    from nanokv.school.training.card import card

    (folder / "README.md").write_text(
        card(Config.from_folder(folder), recipe, report), encoding="utf-8"
    )
