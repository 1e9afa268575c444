"""The functions that a notebook calls.

A notebook is one process, so its state (model, predictions, answers) is kept in this module.
Everything is printed as plain text, which also suits terminals and screen readers.
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
_ANSWERS: list[dict] = []  # events of checks and questions
_PARTS: dict[str, parts.Found] = {}  # parts of earlier notebooks that this one uses


@dataclass(frozen=True)
class Result:
    """The result of `check` and `answer`: truthy when right.

    It is printed already, so a notebook displays nothing for it.
    """

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
    """Load the model of NANOKV_MODEL (default: the bundled one) → (model, tokenizer).

    `seed` selects a variant of the exercises. `model` overrides NANOKV_MODEL, for notebooks in
    which a large model would be too slow.
    """
    import torch

    from nanokv.loading import load
    from nanokv.school.course import recorded

    wanted = os.environ.get("NANOKV_MODEL") or "tiny"
    source = model or wanted
    recording = recorded.read(notebook) if wanted != "tiny" else None
    try:
        # fp32 on the CPU, as for the figures in the text
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
    log.keep(Path.cwd() if shell else None)  # IPython is running: a learner's notebook
    recorded.follow(shell, recording if source != wanted else None)
    _STATE.update(notebook=notebook, seed=seed, model=model)
    _introduce(source, wanted, recording)
    log.note("start", notebook=notebook, seed=seed, model=source)
    return model, tokenizer


def _instead(notebook: str, recording) -> str:
    """The hint for a model that cannot be loaded."""
    plain = "without NANOKV_MODEL the notebook takes the bundled model"
    if not recording:
        return plain
    return f'{plain}; course.start("{notebook}", model="tiny") also shows what {recording.model} printed'


def _introduce(source: str, wanted: str, recording) -> None:
    """Print the sizes of the model; for another than the bundled one, also what that changes."""
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
    """The value of NANOKV_MODEL.

    A relative path may start in the folder above the notebook's, where Jupyter was started.
    """
    beside = os.path.join(os.pardir, name)
    return (
        beside if name != "tiny" and not os.path.exists(name) and os.path.exists(beside) else name
    )


def sized(full: int, least: int) -> int:
    """A number of repetitions for a slow cell: `full` with the bundled model.

    With a larger model it shrinks in inverse proportion to the number of weights, down to `least`.
    """
    from nanokv.costs import parameters

    return max(least, min(full, full * BUNDLED // parameters(_STATE["model"].config)))


def case(id: str):
    """The numbers of an exercise in the learner's variant: `case("05.1").P`."""
    return checking.find(id).case(_STATE["seed"], _STATE["model"])


def check(id: str, answer, seed: int | None = None) -> Result:
    """Judge an answer, print the judgement and return it. A wrong answer never raises."""
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
    """The learner's part from an earlier notebook if it still passes its check, else nanokv's.

    Prints which of the two it is. nanokv/school/course/parts.py lists the names, with the exercise
    that builds each part.
    """
    _PARTS[name] = found = parts.find(name, log.folder(), _STATE["model"])
    log.note("part", name=name, yours=found.yours)
    _say(found)
    return found.made


def whose() -> None:
    """Print a table of the parts in this notebook: the learner's own, or the reference."""
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
    """Print how many exercises and questions of this notebook are right; for its last cell."""
    if not _STATE["notebook"]:
        raise CourseError("no notebook was started", 'course.start("05") is its first cell')
    _say(scores.line(_STATE["notebook"], _ANSWERS))
    _say("All notebooks: nanokv course progress")


# --- predictions ----------------------------------------------------------------------------------


def predict(id: str, value, unit: str = "", signed: bool = False) -> None:
    """Commit to a number before the experiment.

    `signed`: the number may be negative; counts, shares and factors may not.
    """
    number = None if is_blank(value) else as_number(plain(value))
    endless = number is not None and math.isinf(number)
    impossible = endless or (number is not None and number < 0 and not signed)
    log.note("predict", id=id, value=None if impossible else number)
    _PREDICTIONS.pop(id, None)  # this call replaces an earlier prediction
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
    """The known names among the learner's choice, a name or a collection; None without a choice.

    Prints the names that are not known.
    """
    if is_blank(answer) or not isinstance(answer, Iterable):
        return None
    names = {canonical(name) for name in ([answer] if isinstance(answer, str) else answer)}
    if names - set(known):
        _say(f"not among the names, so left out: {', '.join(sorted(names - set(known)))}")
    return names & set(known)


def reveal(id: str, measured, unit: str = "") -> None:
    """Print the prediction beside the measured number."""
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
    """How far a prediction is off, in words."""
    if guess == measured:
        return "exactly right"
    if guess == 0 or measured == 0:
        return f"too {'high' if guess > measured else 'low'} by {quantity(abs(guess - measured))}"
    if (guess > 0) != (measured > 0):
        return "even the sign differs"
    # Logarithms first: the ratio may be out of the range of floats.
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
    """A number with its unit: "1,024 tokens", "0.0213 s"."""
    whole = float(number).is_integer() or abs(number) >= 1000
    text = f"{number:,.0f}" if whole and abs(number) < 1e15 else f"{number:,.4g}"
    return f"{text} {unit}".rstrip()


# --- figures and claims ---------------------------------------------------------------------------


def figure(id: str, value) -> None:
    """Record a number that the text quotes as <!--fig ID-->…<!--/fig-->."""
    number = as_number(value.item() if hasattr(value, "item") else value)
    if number is None:
        raise CourseError(f"figure {id!r} is not a number: {value!r:.80}")
    log.note("figure", id=id, value=number)


def confirm(id: str, verdict: str, found=None) -> None:
    """`claim` without printing, for claims that the notebook's text leaves to claims.md."""
    from nanokv.school.course.claims import CLAIMS

    if id not in CLAIMS:
        raise CourseError(f"no claim {id!r}", "nanokv course claims lists them")
    CLAIMS[id].confirm(verdict, found)
    log.note("claim", id=id, verdict=verdict)


def claim(id: str, verdict: str, found=None) -> None:
    """Print a claim of an article with its verdict, and the value found here.

    Raises CourseError unless verdict and value agree with the registry.
    """
    from nanokv.school.course.claims import CLAIMS

    confirm(id, verdict, found)
    record = CLAIMS[id]
    _say(f"claim {id}: {record.says}\n    {record.verdict}. {record.truth}")
    if found is not None:
        _say(
            f"    Found here: {found if isinstance(found, str) else quantity(as_number(found), record.unit)}."
        )
