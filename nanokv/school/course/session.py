"""The functions that a notebook calls. One notebook is one process, so what it has predicted is kept in this module.

Everything is printed as plain text: it reads the same on a screen, in a terminal and aloud.
"""

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import checking, feedback, log, parts, scores
from nanokv.school.course.answers import as_number, canonical, is_blank, plain

BUNDLED = 3_050_496  # weights of the bundled model
_STATE = {"notebook": None, "seed": None, "model": None}
_PREDICTIONS: dict[str, tuple[float, str]] = {}
_ANSWERS: list[dict] = []  # of checks and questions, as events
_PARTS: dict[str, parts.Found] = {}  # what this notebook took of earlier ones


@dataclass(frozen=True)
class Result:
    """What `check` and `answer` return: truthy when right. It has been printed already, so it displays as nothing."""

    id: str
    state: str  # right, wrong, unanswered
    message: str = ""
    mistake: str = ""

    def __bool__(self):
        return self.state == "right"

    def __str__(self):
        lead = {"right": "right.", "wrong": "not yet.", "unanswered": "not answered yet."}[
            self.state
        ]
        return f"{self.id}: {lead} {self.message}".rstrip()

    def _ipython_display_(self):
        pass


def _say(text) -> None:
    print(feedback.wrapped(str(text)))


def start(notebook: str, seed: int | None = None, model: str = ""):
    """Load the model of NANOKV_MODEL (default: the bundled one) → (model, tokenizer). `seed` picks a variant.

    model: what a notebook takes instead, that asks too much of a large one.
    """
    import torch

    from nanokv.loading import load
    from nanokv.school.course import recorded

    wanted = os.environ.get("NANOKV_MODEL") or "tiny"
    source = model or wanted
    recording = recorded.read(notebook) if wanted != "tiny" else None
    try:
        # The figures of the text.
        model, tokenizer = load(model or located(wanted), dtype="float32", device="cpu")
    except (ValueError, OSError) as error:  # CheckpointError is no NanoKVError
        if source == "tiny":
            raise
        raise CourseError(f"{source}: {error}", _instead(notebook, recording)) from error
    torch.manual_seed(0)
    _PREDICTIONS.clear()
    _ANSWERS.clear()
    _PARTS.clear()
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    log.keep(Path.cwd() if shell else None)  # somebody works in it
    recorded.follow(shell, recording if source != wanted else None)
    _STATE.update(notebook=notebook, seed=seed, model=model)
    _introduce(source, wanted, recording)
    log.note("start", notebook=notebook, seed=seed, model=source)
    return model, tokenizer


def _instead(notebook: str, recording) -> str:
    """What to do where a model cannot be loaded."""
    plain = "without NANOKV_MODEL the notebook takes the bundled model"
    if not recording:
        return plain
    return f'{plain}; course.start("{notebook}", model="tiny") also shows what {recording.model} printed'


def _introduce(source: str, wanted: str, recording) -> None:
    """Print the sizes of the model, and what another one than the bundled changes."""
    c, notebook = _STATE["model"].config, _STATE["notebook"]
    _say(
        f"{source}: {c.num_hidden_layers} layers, hidden size C = {c.hidden_size}, vocabulary {c.vocab_size:,},"
    )
    _say(
        f"{c.num_attention_heads} query heads and {c.num_key_value_heads} KV heads of size D = {c.head_dim}."
    )
    if source != wanted:
        _say(f"This notebook takes {source}, not {wanted}: its first cell says so.")
        if recording:
            _say(
                f"Below a cell whose output depends on the model stands what {recording.model} printed when it was"
            )
            _say("recorded, on another machine.")
    elif source != "tiny":
        _say(
            "The figures in the text are those of the bundled model; yours stand in the output of the cells."
        )
        _say(
            f'Too slow? Stop the cell, write course.start("{notebook}", model="tiny") here, and run all cells again.'
        )
        if recording:
            _say(
                f"It takes the bundled model then, and shows below its outputs what {recording.model} printed."
            )
        _say("Or read on without running: `make book` records the outputs with the bundled model.")


def located(name: str) -> str:
    """The model of NANOKV_MODEL: a relative path may begin where Jupyter was started, above the notebook's folder."""
    beside = os.path.join(os.pardir, name)
    return (
        beside if name != "tiny" and not os.path.exists(name) and os.path.exists(beside) else name
    )


def sized(full: int, least: int) -> int:
    """How many of something a slow cell takes: `full` with the bundled model, with a larger one fewer, in inverse
    proportion to its weights, but `least` at least."""
    from nanokv.costs import parameters

    return max(least, min(full, full * BUNDLED // parameters(_STATE["model"].config)))


def case(id: str):
    """The numbers of this exercise in your variant: `case("05.1").P`."""
    return checking.find(id).case(_STATE["seed"], _STATE["model"])


def check(id: str, answer, seed: int | None = None) -> Result:
    """Judge an answer, print the judgement, return it; a wrong answer never raises."""
    exercise = checking.find(id)
    seed = _STATE["seed"] if seed is None else seed
    result = _tell(
        "check", id, exercise.judge(answer, exercise.case(seed, _STATE["model"])), seed=seed
    )
    if (
        result
        and (folder := log.folder())
        and (told := parts.keep(id, answer, folder, _STATE["model"]))
    ):
        _say(told)
    return result


def mine(name: str):
    """What the learner built in an earlier notebook, if it still passes its check, else nanokv's; prints whose it is.

    nanokv/school/course/parts.py has the names, and which exercise makes each.
    """
    _PARTS[name] = found = parts.find(name, log.folder(), _STATE["model"])
    log.note("part", name=name, yours=found.yours)
    _say(found)
    return found.made


def whose() -> None:
    """Print a table of the parts that this notebook has taken: yours, or the reference."""
    print(f"{'part':<10} exercise  whose")
    for name, found in _PARTS.items():
        print(f"{name:<10} {parts.PARTS[name].id:<9} {'yours' if found.yours else 'reference'}")


def quiz(notebook: str) -> None:
    """Print the questions of a notebook."""
    for question in checking.exercises(notebook).QUESTIONS:
        _say(f"{question.id}  {question.text}")
        for letter, (text, _) in question.options.items():
            _say(f"    {letter}) {text}")
        print()


def answer(id: str, letter) -> Result:
    """Judge the answer to a quiz question and explain it."""
    return _tell("answer", id, checking.find(id, "QUESTIONS").judge(letter))


def _tell(event: str, id: str, outcome, **more) -> Result:
    result = Result(id, outcome.state, outcome.message, outcome.mistake)
    fields = {"id": id, "state": result.state, "mistake": result.mistake, **more}
    log.note(event, **fields)
    _ANSWERS.append({"event": event, **fields})
    _say(result)
    return result


def progress() -> None:
    """Print how many exercises and questions of this notebook are right: its last cell."""
    if not _STATE["notebook"]:
        raise CourseError("no notebook was started", 'course.start("05") is its first cell')
    _say(scores.line(_STATE["notebook"], _ANSWERS))
    _say("All notebooks: nanokv course progress")


# --- predictions --------------------------------------------------------------------------------------------------


def predict(id: str, value, unit: str = "", signed: bool = False) -> None:
    """Commit to a number before the experiment. signed: it may be negative; a count, a share or a factor may not."""
    number = None if is_blank(value) else as_number(plain(value))
    endless = number is not None and math.isinf(number)
    impossible = endless or (number is not None and number < 0 and not signed)
    log.note("predict", id=id, value=None if impossible else number)
    _PREDICTIONS.pop(id, None)  # an earlier one is taken back
    if impossible:
        why = "the number is finite" if endless else "the number is 0 or more"
        _say(
            f"{id}: no prediction yet. {number if endless else quantity(number, unit)} cannot be: {why}."
        )
        return
    if number is None:
        shown = checking.shown(value)
        said = (
            ""
            if is_blank(value)
            else f" {shown} is no number (a half is 0.5, a thousand 1000 or 1,000)."
        )
        _say(
            f"{id}: no prediction yet. Write a number first: a wrong guess teaches more than none.{said}"
        )
        return
    _PREDICTIONS[id] = (number, unit)
    _say(f"{id}: you predict {quantity(number, unit)}.")


def chosen(answer, known) -> set | None:
    """The known names that a bet holds, in any collection; None without a bet. Names that nobody knows are printed."""
    if is_blank(answer) or not isinstance(answer, Iterable):
        return None
    names = {canonical(name) for name in ([answer] if isinstance(answer, str) else answer)}
    if names - set(known):
        _say(f"not among the names, so left out: {', '.join(sorted(names - set(known)))}")
    return names & set(known)


def reveal(id: str, measured, unit: str = "") -> None:
    """Show the prediction beside what was measured."""
    measured = as_number(measured.item() if hasattr(measured, "item") else measured)
    if measured is None:
        raise CourseError(f"{id}: what was measured is not a number")
    log.note("reveal", id=id, value=measured)
    if id not in _PREDICTIONS:
        _say(f"{id}: it is {quantity(measured, unit)}. You made no prediction.")
        return
    guess, said = _PREDICTIONS[id]
    unit = unit or said
    _say(
        f"{id}: you predicted {quantity(guess, unit)}, it is {quantity(measured, unit)}: {comment(guess, measured)}."
    )


def comment(guess: float, measured: float) -> str:
    """How far off, in words."""
    if guess == measured:
        return "exactly right"
    if guess == 0 or measured == 0:
        return f"too {'high' if guess > measured else 'low'} by {quantity(abs(guess - measured))}"
    if (guess > 0) != (measured > 0):
        return "even the sign differs"
    # A ratio may leave the range of floats.
    decades = math.log10(abs(guess)) - math.log10(abs(measured))
    side = "high" if decades > 0 else "low"
    if abs(decades) >= 6:
        return f"too {side} by 10^{abs(decades):.0f}"
    factor = max(guess / measured, measured / guess)
    if factor <= 1.1:
        return "within a tenth"
    return (
        f"the right size, {factor:.2g} times too {side}"
        if factor <= 2
        else f"{factor:,.0f} times too {side}"
    )


def quantity(number: float, unit: str = "") -> str:
    """1,024 tokens; 0.0213 s."""
    whole = float(number).is_integer() or abs(number) >= 1000
    text = f"{number:,.0f}" if whole and abs(number) < 1e15 else f"{number:,.4g}"
    return f"{text} {unit}".rstrip()


# --- figures and claims -------------------------------------------------------------------------------------------


def figure(id: str, value) -> None:
    """Record a number that the text quotes as <!--fig ID-->…<!--/fig-->."""
    number = as_number(value.item() if hasattr(value, "item") else value)
    if number is None:
        raise CourseError(f"figure {id!r} is not a number: {value!r:.80}")
    log.note("figure", id=id, value=number)


def confirm(id: str, verdict: str, found=None) -> None:
    """`claim` without printing: for the claims that a page leaves to claims.md."""
    from nanokv.school.course.claims import CLAIMS

    if id not in CLAIMS:
        raise CourseError(f"no claim {id!r}", "nanokv course claims lists them")
    CLAIMS[id].confirm(verdict, found)
    log.note("claim", id=id, verdict=verdict)


def claim(id: str, verdict: str, found=None) -> None:
    """Put a claim of an article beside what was found here. The verdict and the value must be the registry's."""
    from nanokv.school.course.claims import CLAIMS

    confirm(id, verdict, found)
    record = CLAIMS[id]
    _say(f"claim {id}: {record.says}\n    {record.verdict}. {record.truth}")
    if found is not None:
        _say(
            f"    Found here: {found if isinstance(found, str) else quantity(as_number(found), record.unit)}."
        )
