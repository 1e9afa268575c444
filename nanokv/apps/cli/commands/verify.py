"""`nanokv verify MODEL`: compares the computation of a checkpoint with a reference.

The reference is transformers, or another checkpoint (--against). Without a reference it checks
published figures, and that cached and uncached results are equal; skipped checks are listed. The
report goes to stdout, progress to stderr. Exit code 1 means "differs" here. The checks are in
nanokv/lab/verify.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.arguments import environment, integer
from nanokv.apps.cli.common.options import (
    DTYPES,
    THREADS,
    CacheOptions,
    ModelOptions,
    OutputOptions,
    dtype_name,
    output_options,
)

if TYPE_CHECKING:
    from nanokv.apps.cli.common.plan import Plan
    from nanokv.lab.study.debug import Step
    from nanokv.lab.verify import Report
    from nanokv.lab.verify.checks import Check

EXAMPLES = (
    "nanokv verify tiny",
    "nanokv verify Qwen/Qwen3-0.6B --json",
    "nanokv verify ./my-checkpoint --against Qwen/Qwen3-0.6B",
)
DESCRIPTION = (
    "Compare a checkpoint with transformers (if installed), operation by operation; or with "
    "another checkpoint (--against). Names the first layer and operation that differ. Exit "
    "code 1 means that they differ."
)
# The memory check counts a cache of this many tokens: all prompts and answers are shorter.
CONTEXT = 512
DIFFERS = "← differs"


def add_arguments(parser: ArgumentParser) -> None:
    """The model, the reference, the form of the report."""
    parser.add_argument(
        "source", metavar="MODEL", nargs="?", help="tiny (bundled), a folder, or a name on the hub"
    )
    parser.add_argument("-m", "--model", metavar="NAME", help="the same as MODEL")
    parser.add_argument(
        "--against", metavar="NAME", help="compare with this checkpoint instead of transformers"
    )
    parser.add_argument(
        "--alone", action="store_true", help="do not use transformers, even if it is installed"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object with every operation of every layer"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub MODEL")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        metavar="TYPE",
        type=dtype_name,
        help="auto, float32, bfloat16 or float16 (default: float32, where equal means 1e-5)",
    )
    parser.add_argument("--threads", metavar="N", type=integer(1, 4096), help=THREADS)
    parser.add_argument("--offline", action="store_true", help="never use the network")


def run(args: Namespace) -> int:
    """Verify and print the report: 0 if all checks that ran are within tolerance, else 1."""
    from nanokv.apps.cli.common.loading import check_address_space, check_memory, plan_model
    from nanokv.costs.free_memory import available_memory
    from nanokv.errors import NanoKVError

    if args.source and args.model:
        raise NanoKVError(
            f"two models: {args.source} and --model {args.model}",
            "--against compares two checkpoints",
        )
    if args.alone and args.against:
        raise NanoKVError("--alone and --against exclude each other", "leave out --alone")
    source = args.source or args.model or environment("NANOKV_MODEL") or "tiny"
    output = output_options(args)
    model = ModelOptions(source, args.revision, args.dtype, "cpu", args.threads, args.offline)
    plan = plan_model(model, CacheOptions(), output)
    plans = [plan]
    other = None
    if args.against:
        other = plan_model(
            replace(model, source=args.against, revision=None), CacheOptions(), output
        )
        plans.append(other)
    for one in plans:  # both in the same dtype: otherwise rounding would differ
        one = replace(one, context=min(one.context, CONTEXT), dtype_name=plan.dtype_name)
        check_memory(one, available_memory("cpu"))
    check_address_space()
    report = measure(plan, other, args.against, args.alone, output)
    if args.json:
        terminal.write_out(as_json(report))
    else:
        style = terminal.Style(sys.stdout, output.color)
        terminal.write_out(as_text(report, style, layout.columns(sys.stdout, None)))
    return 0 if report.equal else 1


def measure(
    plan: "Plan", other: "Plan | None", against: str | None, alone: bool, output: OutputOptions
) -> "Report":
    """Run the checks. `other` is the plan of the checkpoint `against`, if there is one."""
    import torch

    from nanokv.lab.verify import verify

    torch.set_num_threads(plan.threads)
    return verify(
        plan.name,
        plan.folder,
        None if other is None else other.folder,
        against,
        getattr(torch, plan.dtype_name),
        alone,
        say=lambda text: terminal.notice(f"{text} …", output),
    )


# --- the report -----------------------------------------------------------------------------------


def as_json(report: "Report") -> str:
    """The report as one JSON object. Figures that are not finite become null; see `note`."""
    from nanokv.apps.cli.common.text import to_json

    def row(step: "Step | None") -> dict | None:
        if step is None:
            return None
        return asdict(step) | {"ok": step.ok}

    differences = {name: [str(x), str(y)] for name, (x, y) in report.hints.items()}
    found = {
        "model": report.name,
        "reference": report.reference,
        "dtype": report.dtype,
        "verdict": "equal" if report.equal else "differs",
        "first_divergence": row(report.first),
        "first_unequal": row(report.first_unequal),
        "checks": [asdict(check) for check in report.checks],
        "config_differences": differences,
        "operations": [row(step) for step in report.steps],
    }
    return to_json(found) + "\n"


def as_text(report: "Report", style: terminal.Style, width: int | None = None) -> str:
    """Checks, a table by layer, the operations of the first layer that differs, the verdict.

    Text that comes from files is sanitized.
    """
    title = f"{report.name} · {report.dtype} · reference: {report.reference or 'none'}"
    lines = [style.bold(layout.joined(terminal.sanitize_line(title).split(" · "), width)), ""]
    lines += layout.definitions(
        [check_row(check, style) for check in report.checks], width, column=47
    )
    if report.steps:
        lines += ["", *table("by layer", worst_of_layers(report.steps), style, width)]
    first = report.first
    if first is not None and first.layer is not None:
        inside = [(step.operation, step) for step in report.steps if step.layer == first.layer]
        lines += ["", *table(f"in layer {first.layer}", inside, style, width)]
    lines += ["", *(layout.paragraph(line, width) for line in verdict_lines(report, style))]
    return "".join(line + "\n" for line in lines)


def check_row(check: "Check", style: terminal.Style) -> tuple[str, str]:
    """The row of a check: `ok       logits` and `2.1e-06 of 1.0e-05 · detail`."""
    paint = {"ok": style.green, "differs": style.red, "skipped": style.yellow}[check.status]
    details = []
    if check.difference is not None:
        details.append(f"{check.difference:.1e} of {check.tolerance:.1e}")
    if check.detail:
        details.append(terminal.sanitize_line(check.detail))
    return f"{paint(check.status.ljust(8))} {check.name}", style.dim(" · ".join(details))


def worst_of_layers(steps: "Iterable[Step]") -> list:
    """[(`layer 3` or operation, its worst Step)] in the order of the forward pass."""
    from nanokv.lab.verify.checks import excess

    groups: dict[str, list[Step]] = {}
    for step in steps:
        name = step.operation
        if step.layer is not None:
            name = f"layer {step.layer}"
        groups.setdefault(name, []).append(step)
    return [(name, max(group, key=excess)) for name, group in groups.items()]


def table(
    title: str, rows: "list[tuple[str, Step]]", style: terminal.Style, width: int | None
) -> list[str]:
    """Differences with their tolerances, one row per layer or operation."""
    cells = []
    for name, step in rows:
        operation = ""
        if step.operation != name and step.difference != 0:
            operation = step.operation
        if not step.ok:
            operation += f" {DIFFERS}"
        cells.append(
            (
                f"  {name}",
                f"{step.difference:.1e}",
                f"{step.tolerance:.1e}",
                "" if step.position is None else step.position,
                operation.strip(),
            )
        )
    head = (f"  {title}", "max |Δ|", "tolerance", "position", "worst operation")
    lines = layout.table(head, cells, width, left=(0, 4))
    return [style.red(line) if DIFFERS in line else line for line in lines]


def verdict_lines(report: "Report", style: terminal.Style) -> list[str]:
    """The last lines: config fields that differ, the verdict, the first operation that differs."""
    lines = []
    for name, (x, y) in report.hints.items():
        lines.append(terminal.sanitize_line(f"config.json differs: {name} {x} against {y}"))
    if report.equal:
        done = sum(check.status == "ok" for check in report.checks)
        verdict = style.green(f"equal within tolerance ({done} checks)")
        if report.reference is None:
            verdict = style.yellow(
                f"no difference in {done} checks, but nothing to compare with: see skipped"
            )
        return [*lines, verdict]
    failed = [check.name for check in report.checks if check.status == "differs"]
    lines.append(style.red(f"DIFFERS: {', '.join(failed)}"))
    if report.first is not None:
        lines.append(style.bold(f"first at {report.first}"))
        earlier = report.first_unequal
        if earlier != report.first:
            lines.append(f"first operation that is not bit-equal: {earlier}")
    return lines
