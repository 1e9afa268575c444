"""Verify a checkpoint: compare our model with transformers', with another checkpoint, with
published figures and with itself (cached against uncached), and name the first layer and
operation that differ.

    report = nanokv.lab.verify.verify("tiny", Path(folder))
    report.equal, report.checks, report.first

The command is in nanokv/apps/cli/commands/verify.py. Only oracle.py imports transformers, and
only if it is installed.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanokv.config import Config
from nanokv.lab.study.debug import Step
from nanokv.lab.verify import checks as make
from nanokv.lab.verify import evidence, figures, oracle
from nanokv.lab.verify.checks import Check
from nanokv.loading import load, unfinite
from nanokv.model import Transformer
from nanokv.support import installing
from weights_loader import check_hashes

ALONE = "--alone was given"
NOT_FROM_HUB = "not in the hub's cache: no hashes to compare with"
ALONE_TOO = ("cached = uncached, logits", "cached = uncached, keys and values")
NEEDS_REFERENCE = (
    "config",
    "rope",
    "hidden states",
    "keys and values",
    "keys and values, in steps",
    "logits",
    "greedy tokens",
    "tokenizer encode",
    "tokenizer decode",
    "chat template",
)


@dataclass
class Report:
    """The results of all checks; `steps` is empty if there was no reference to compare with."""

    name: str
    reference: str | None
    dtype: str
    checks: list[Check] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    # Config fields that differ: {name: (ours, reference's)}
    hints: dict = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """No check failed. A skipped check is no failure."""
        return all(check.status != "differs" for check in self.checks)

    @property
    def first(self) -> Step | None:
        """The first operation beyond tolerance, in the order of the forward pass."""
        return next((step for step in self.steps if not step.ok), None)

    @property
    def first_unequal(self) -> Step | None:
        """The first operation that is not bit-equal: rounding, or the start of a growing error."""
        return next((step for step in self.steps if step.difference != 0), None)


def verify(
    source: str,
    folder: Path,
    against: Path | None = None,
    against_name: str | None = None,
    dtype: torch.dtype = torch.float32,
    alone: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> Report:
    """Run every check that is possible here, on the CPU.

    source: the name given by the user; folder: its files.
    against: folder of another checkpoint, read by nanokv, as the reference. Default: transformers.
    alone: compare with no reference.
    say: called with a line of text before each long step.

    Raises the errors of loading.
    """
    vocabulary, context = smallest_sizes(folder, against)
    report = Report(str(source), None, str(dtype).removeprefix("torch."))
    report.checks.append(hash_check(folder))
    say(f"loading {source}")
    model, tokenizer = load(folder, dtype=dtype, device="cpu")
    report.checks += [files_check(model), finite_check(model)]
    if not report.equal:  # results of weights with NaN or infinity prove nothing
        report.checks += skipped(ALONE_TOO + NEEDS_REFERENCE, "the weights are not finite")
        return report
    questions = evidence.ask(tokenizer, vocabulary, context)
    ours = evidence.answers_of_ours(str(source), model, tokenizer, questions)
    report.checks.append(make.check_cached_logits(ours))
    report.checks.append(make.check_cached(ALONE_TOO[1], ours, ours.records, "likewise"))
    report.checks += figures.published_checks(str(source), folder, model, tokenizer)
    del model
    gc.collect()  # only one model is in memory at a time
    name = against_name or str(against)
    theirs = reference_answers(against, name, folder, questions, dtype, alone, say)
    if theirs is None:
        why = f"transformers is not installed: {installing.hint(['transformers'])}"
        report.checks += skipped(NEEDS_REFERENCE, ALONE if alone else why)
        return report
    report.reference = theirs.name
    report.steps = make.layer_steps(ours, theirs)
    report.checks += make.compare_evidence(ours, theirs, questions, report.steps)
    if against:
        report.hints = make.config_differences(ours, theirs)
    return report


def smallest_sizes(folder: Path, against: Path | None) -> tuple[int, int]:
    """(vocabulary, context) that fit both checkpoints, in tokens."""
    configs = [Config.from_folder(path) for path in (folder, against) if path is not None]
    vocabulary = min(config.vocab_size for config in configs)
    context = min(config.max_position_embeddings for config in configs)
    return vocabulary, context


def skipped(names: tuple[str, ...], why: str) -> list[Check]:
    return [Check(name, "skipped", why) for name in names]


def reference_answers(
    against: Path | None,
    name: str,
    folder: Path,
    questions: evidence.Questions,
    dtype: torch.dtype,
    alone: bool,
    say: Callable[[str], object],
) -> evidence.Evidence | None:
    """The answers of the other checkpoint or of transformers; None if there is neither."""
    if against is not None:
        say(f"loading {name}")
        return evidence.load_and_answer(name, against, questions, dtype)
    if alone or oracle.version() is None:
        return None
    say(f"asking transformers {oracle.version()}")
    return oracle.answers(folder, questions, dtype)


def hash_check(folder: Path) -> Check:
    """Compare every file with the hash that the hub published. A damaged file is removed from the
    hub's cache, and the error of weights_loader is raised."""
    names = check_hashes(folder)
    if not names:
        return Check("hashes", "skipped", NOT_FROM_HUB)
    return make.verdict("hashes", True, f"{len(names)} files, sha256 or git's sha1")


def finite_check(model: Transformer) -> Check:
    """NaN in a projection can give finite but wrong logits, because softmax may hide it."""
    bad = unfinite(model)
    shown = bad[:3]
    if len(bad) > 3:
        shown.append(f"{len(bad) - 3} more tensors")
    return make.verdict("finite weights", not bad, "; ".join(shown) or "no NaN and no infinity")


def files_check(model: Transformer) -> Check:
    """Loading has already checked every tensor's name, shape and dtype against config.json; this
    only counts them."""
    sizes = [p.numel() for p in model.parameters()]
    return make.verdict("files", True, f"{len(sizes)} tensors, {sum(sizes):,} parameters")
