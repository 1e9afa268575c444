"""`nanokv train`: trains the bundled model from scratch, or evaluates a model.

This file has the flags and the handling of Ctrl-C. Training itself is in nanokv/school/training/,
progress bar and plot are in ../train/log.py, the evaluation's table is in ../train/report.py.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.arguments import integer, real
from nanokv.apps.cli.common.loading import check_address_space
from nanokv.apps.cli.common.options import OutputOptions, output_options
from nanokv.apps.cli.train.report import EvaluationOptions, evaluate, write_card
from nanokv.errors import NanoKVError
from nanokv.support.neighbours import watch

if TYPE_CHECKING:
    from nanokv.apps.cli.train.log import Progress
    from nanokv.school.training.trainer import Recipe, Trainer

EXAMPLES = (
    "nanokv train --out runs/tiny",
    "nanokv train --out runs/tiny --resume",
    "nanokv train --evaluate",
)
DESCRIPTION = (
    "Train the bundled model from a seeded synthetic corpus (GPU if there is one, else CPU), then "
    "evaluate it. With --evaluate alone: measure a model on held-out words, through the greedy "
    "chat path; exit code 1 when it misses a target."
)
# A field of Recipe → its flag.
RECIPE_FLAGS = {"steps": "--steps", "tokens_per_batch": "--batch-tokens", "seed": "--seed"}

CASES = 100  # cases per task of the evaluation after a full run
FEWEST = 5  # the same after the shortest run
SEEDS = 5  # seeds of the evaluation after a full run


@dataclass(frozen=True)
class TrainOptions:
    """The options of a training run."""

    steps: int | None
    minutes: float | None
    batch_tokens: int | None
    seed: int | None
    checkpoint_every: int
    resume: bool
    force: bool
    evaluate: bool
    device: str
    output: OutputOptions

    def recipe(self) -> dict:
        """The fields of Recipe that were given."""
        fields = {"steps": self.steps, "tokens_per_batch": self.batch_tokens, "seed": self.seed}
        return {name: value for name, value in fields.items() if value is not None}


def add_arguments(parser: ArgumentParser) -> None:
    """--out starts or continues a run; --evaluate without --out measures --model."""
    _add_run(parser)
    _add_evaluation(parser)
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto"
    )
    parser.add_argument("--threads", type=integer(1), help="CPU threads (default: all)")
    parser.add_argument(
        "--json", action="store_true", help="the evaluation as one JSON object on stdout"
    )


def _add_run(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder of the run: checkpoints, metrics.jsonl, loss.png, model/",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=integer(1), help="optimizer steps (default: 16,000, three stages)"
    )
    length.add_argument(
        "--minutes", type=real(0, above=True), help="as many steps as fit, measured at the start"
    )
    parser.add_argument("--batch-tokens", type=integer(64), help="tokens per step (default: 4,096)")
    parser.add_argument(
        "--checkpoint-every",
        type=integer(1),
        default=100,
        metavar="N",
        help="steps between checkpoints, each with a validation loss and a sample answer "
        "(default: %(default)s)",
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --out"
    )
    again.add_argument(
        "--force", action="store_true", help="delete the run that --out holds, and start anew"
    )


def _add_evaluation(parser: ArgumentParser) -> None:
    evaluation = parser.add_mutually_exclusive_group()
    evaluation.add_argument(
        "--evaluate",
        action="store_true",
        help="no training: evaluate the model of --out, or --model",
    )
    evaluation.add_argument(
        "--no-evaluate", action="store_true", help="train only: no evaluation, no model card"
    )
    parser.add_argument(
        "-m", "--model", default="tiny", help="the model for --evaluate (default: %(default)s)"
    )
    parser.add_argument(
        "--cases",
        type=integer(1),
        help=f"cases per task of the evaluation (default: {CASES}, after a shorter run fewer, at "
        f"least {FEWEST})",
    )
    parser.add_argument(
        "--seed", type=integer(0), help="of the run and of the first cases (default: 0)"
    )
    parser.add_argument(
        "--seeds",
        type=integer(1),
        metavar="N",
        help="evaluate on N seeds and show the lowest result (default: 1; "
        f"{SEEDS} after a whole run)",
    )


def command_options(args: Namespace) -> TrainOptions:
    """The options of the flags of add_arguments."""
    return TrainOptions(
        args.steps,
        args.minutes,
        args.batch_tokens,
        args.seed,
        args.checkpoint_every,
        args.resume,
        args.force,
        args.evaluate,
        args.device,
        output_options(args),
    )


def run(args: Namespace) -> int:
    """Train and evaluate: 0, or 130 if stopped. --evaluate: 1 if the model misses a target."""
    if not args.out and not args.evaluate:
        raise NanoKVError(
            "--out is missing: a run needs a folder",
            hint="nanokv train --out runs/tiny, or nanokv train --evaluate",
        )
    given = command_options(args)
    out = None
    if args.out:
        out = Path(args.out)
        check_folder(out, given)
    check_address_space()
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    watch(torch.get_num_threads())
    measuring = partial(EvaluationOptions, json=args.json, quiet=given.output.quiet)
    if given.evaluate or out is None:  # only --evaluate works without --out
        source = args.model
        if out is not None:
            source = str(out / "model")
        first = args.seed or 0
        seeds = range(first, first + (args.seeds or 1))
        found = evaluate(measuring(args.cases or CASES), source, list(seeds))
        return int(bool(found["missed"]))
    recipe = train(given, out)
    if recipe is None:
        return 130
    if args.no_evaluate:
        notice = f"{out / 'model'} is finished · nanokv train --out {out} --evaluate measures it"
        terminal.notice(notice, given.output)
        return 0
    cases = args.cases or cases_after(recipe.steps)
    usual = SEEDS if cases >= CASES else 1
    seeds = range(recipe.seed, recipe.seed + (args.seeds or usual))
    found = evaluate(measuring(cases), str(out / "model"), list(seeds))
    write_card(out / "model", recipe, found)
    return 0


def cases_after(steps: int) -> int:
    """Cases per task after a run of `steps`: fewer in proportion for a shorter run."""
    from nanokv.school.training.trainer import Recipe

    return min(CASES, max(FEWEST, CASES * steps // Recipe().steps))


def check_folder(out: Path, given: TrainOptions) -> None:
    """NanoKVError if --out does not suit the flags, before torch is imported.

    A run is never overwritten without --force.
    """
    from nanokv.school.training.run_folder import checkpoints, refuse_foreign

    if out.exists() and not out.is_dir():
        raise NanoKVError(f"{out} is a file, not a folder", hint="another --out")
    if given.evaluate:
        if not (out / "model").is_dir():
            way = "--resume finishes it" if checkpoints(out) else "makes one"
            raise NanoKVError(
                f"{out} holds no finished model", hint=f"nanokv train --out {out} {way}"
            )
    elif given.resume:
        if not checkpoints(out):
            raise NanoKVError(
                f"{out} holds no checkpoint to resume from", hint="start without --resume"
            )
    elif out.is_dir() and any(out.iterdir()):
        refuse_foreign(out)
        if given.force:
            return
        raise NanoKVError(
            f"{out} is not empty", hint="--resume continues that run, --force throws it away"
        )


# --- training -------------------------------------------------------------------------------------


def make_trainer(given: TrainOptions, out: Path) -> "Trainer":
    """A Trainer at step 0; with --resume, at the newest checkpoint and with its stored recipe."""
    from nanokv.school.training import trainer as training

    device = choose_device(given.device)
    if given.resume:
        newest = training.newest_checkpoint(out)
        recipe = training.stored_recipe(newest)
        refuse_another_recipe(given, newest, recipe)
        trainer = training.Trainer(recipe, device, training.TINY)
        trainer.resume(out)
        return trainer
    fields = given.recipe()
    steps = fields.pop("steps", None)
    recipe = training.Recipe(**fields)
    if steps:
        recipe = recipe.scaled(steps)
    trainer = training.Trainer(recipe, device, training.TINY)
    if not given.minutes:
        return trainer
    terminal.notice("measuring the speed of this machine ...", given.output)
    steps = int(training.estimate_speed(trainer) * given.minutes * 60 / recipe.tokens_per_batch)
    return training.Trainer(recipe.scaled(max(1, steps)), device, training.TINY, trainer.tokenizer)


def choose_device(wanted: str) -> str:
    """The device of --device; auto means the GPU if there is one."""
    import torch

    if wanted == "cuda" and not torch.cuda.is_available():
        raise NanoKVError("--device cuda: torch sees no GPU here", hint="--device cpu")
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def refuse_another_recipe(given: TrainOptions, newest: Path, recipe: "Recipe") -> None:
    """NanoKVError if a flag contradicts the stored recipe of a resumed run."""
    if given.minutes:
        raise NanoKVError(
            f"{newest} belongs to a run of {recipe.steps:,} steps", hint="leave out --minutes"
        )
    for field, wanted in given.recipe().items():
        flag = RECIPE_FLAGS[field]
        stored = getattr(recipe, field)
        if wanted != stored:
            raise NanoKVError(
                f"{newest} belongs to a run with {flag} {stored}, not {wanted}",
                hint=f"leave out {flag}",
            )


def train(given: TrainOptions, out: Path) -> "Recipe | None":
    """Train to the last step and return the recipe; None if Ctrl-C stopped it, after saving."""
    from nanokv.apps.cli.train.log import Progress, plot
    from nanokv.school.training import run_folder
    from nanokv.school.training.trainer import COMPILED_FROM

    trainer = make_trainer(given, out)
    recipe = trainer.recipe
    metrics = out / "metrics.jsonl"
    if given.force and out.is_dir():
        run_folder.clear(out)
    out.mkdir(parents=True, exist_ok=True)
    run_folder.keep_until(metrics, trainer.step)
    count = sum(p.numel() for p in trainer.model.parameters())
    size = f"{recipe.steps:,} steps of {recipe.tokens_per_batch:,} tokens"
    start = f"from step {trainer.step:,}"
    device = trainer.device
    if recipe.steps >= COMPILED_FROM and trainer.compile():
        device = f"{device}, compiled"
    terminal.notice(f"{count:,} parameters · {size} · {device} · {start} · {out}", given.output)
    shown = Progress(given.output, given.checkpoint_every, trainer)
    with terminal.Interrupt() as stop, shown as progress, open(metrics, "a") as file:
        while trainer.step < recipe.steps and not stop.requested:
            take_step(trainer, given.checkpoint_every, out, file, progress)
    if stop.requested and trainer.step < recipe.steps:
        terminal.warning("saving ... (again = leave without; the last checkpoint stays)")
        trainer.save(out)
        plot(out, given.output)
        done = f"stopped at step {trainer.step:,} of {recipe.steps:,}"
        terminal.notice(f"{done} · nanokv train --out {out} --resume", given.output)
        stop.finish()
        return None
    plot(out, given.output)
    trainer.export(out / "model")
    return recipe


def take_step(
    trainer: "Trainer", every: int, out: Path, metrics: TextIO, progress: "Progress"
) -> None:
    """One step and its line of metrics.

    Every `every` steps, and at the last one, also a validation loss and a checkpoint.
    """
    record = {"loss": round(trainer.train_step(), 4)}
    milestone = trainer.step % every == 0 or trainer.step == trainer.recipe.steps
    if milestone:
        record["validation"] = round(trainer.validate(), 4)
    record |= {"step": trainer.step, "tokens": trainer.step * trainer.recipe.tokens_per_batch}
    metrics.write(json.dumps(record) + "\n")
    # Before the checkpoint: if the run is killed in between, --resume repeats the step and drops
    # this line.
    metrics.flush()
    if milestone:
        trainer.save(out)
    progress.show(record)
