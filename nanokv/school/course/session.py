"""The functions that a notebook calls.

A notebook is one process, so its state (model, predictions, answers) is kept in this module.
Everything is printed as plain text, which also suits terminals and screen readers.
"""

import math
import os
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanokv.errors import CourseError
from nanokv.school.course import checking, feedback, log, parts, scores
from nanokv.school.course.answers import as_number, canonical, is_blank, plain

if TYPE_CHECKING:
    from nanokv.model import Transformer
    from nanokv.text.tokenizer import Tokenizer

BUNDLED = 3_050_496  # weights of the bundled model
LEADS = {"right": "right.", "wrong": "not yet.", "unanswered": "not answered yet."}  # by state
_STATE: dict[str, Any] = {"notebook": None, "seed": None, "model": None}
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
        return f"{self.id}: {LEADS[self.state]} {self.message}".rstrip()

    def _ipython_display_(self):
        pass


def _say(text) -> None:
    print(feedback.wrapped(str(text)))


def start(
    notebook: str, seed: int | None = None, model: str = ""
) -> "tuple[Transformer, Tokenizer]":
    """Load the model of NANOKV_MODEL (default: the bundled one) → (model, tokenizer).

    `seed` selects a variant of the exercises. `model` overrides NANOKV_MODEL, for notebooks in
    which a large model would be too slow.
    """
    import torch

    from nanokv.loading import load
    from nanokv.school.course import recorded

    wanted = os.environ.get("NANOKV_MODEL") or "tiny"
    source = model or wanted
    recording = None
    if wanted != "tiny":
        recording = recorded.read(notebook)
    try:
        # fp32 on the CPU, as for the figures in the text
        loaded, tokenizer = load(model or located(wanted), dtype="float32", device="cpu")
    except (ValueError, OSError) as error:  # CheckpointError is not a NanoKVError
        if source == "tiny":
            raise
        raise CourseError(f"{source}: {error}", _instead(notebook, recording)) from error
    torch.manual_seed(0)
    _PREDICTIONS.clear()
    _ANSWERS.clear()
    _PARTS.clear()
    shell = None
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
    log.keep(Path.cwd() if shell else None)  # IPython is running: a learner's notebook
    recorded.follow(shell, recording if source != wanted else None)
    _STATE.update(notebook=notebook, seed=seed, model=loaded)
    _introduce(source, wanted, recording)
    log.note("start", notebook=notebook, seed=seed, model=source)
    return loaded, tokenizer


def _instead(notebook: str, recording) -> str:
    """The hint for a model that cannot be loaded."""
    plain = "without NANOKV_MODEL the notebook takes the bundled model"
    if not recording:
        return plain
    call = f'course.start("{notebook}", model="tiny")'
    return f"{plain}; {call} also shows what {recording.model} printed"


def _introduce(source: str, wanted: str, recording) -> None:
    """Print the sizes of the model; for another than the bundled one, also what that changes."""
    c = _STATE["model"].config
    call = f'course.start("{_STATE["notebook"]}", model="tiny")'
    layers = f"{c.num_hidden_layers} layers"
    _say(f"{source}: {layers}, hidden size C = {c.hidden_size}, vocabulary {c.vocab_size:,},")
    heads = f"{c.num_attention_heads} query heads and {c.num_key_value_heads} KV heads"
    _say(f"{heads} of size D = {c.head_dim}.")
    if source != wanted:
        _say(f"This notebook takes {source}, not {wanted}: its first cell says so.")
        if recording:
            _say(
                "Below a cell whose output depends on the model, you see what "
                f"{recording.model} printed on another machine."
            )
    elif source != "tiny":
        _say(
            "The figures in the text are those of the bundled model; yours are in the outputs of "
            "the cells."
        )
        _say(f"Too slow? Stop the cell, write {call} here, and run all cells again.")
        if recording:
            _say(
                "It takes the bundled model then, and shows below its outputs what "
                f"{recording.model} printed."
            )
        _say("Or read on without running: `make book` records the outputs with the bundled model.")


def located(name: str) -> str:
    """The value of NANOKV_MODEL.

    A relative path may start in the folder above the notebook's, where Jupyter was started.
    """
    if name == "tiny" or os.path.exists(name):
        return name
    above = os.path.join(os.pardir, name)
    if os.path.exists(above):
        return above
    return name


def sized(full: int, least: int) -> int:
    """A number of repetitions for a slow cell: `full` with the bundled model.

    With a larger model it shrinks in inverse proportion to the number of weights, down to `least`.
    """
    from nanokv.costs import parameters

    return max(least, min(full, full * BUNDLED // parameters(_STATE["model"].config)))


def case(id: str) -> checking.Case:
    """The numbers of an exercise in the learner's variant: `case("05.1").P`."""
    return checking.find(id).case(_STATE["seed"], _STATE["model"])


def check(id: str, answer: Any, seed: int | None = None) -> Result:
    """Judge an answer, print the judgement and return it. A wrong answer never raises."""
    exercise = checking.find(id)
    if seed is None:
        seed = _STATE["seed"]
    outcome = exercise.judge(answer, exercise.case(seed, _STATE["model"]))
    result = _tell("check", id, outcome, seed=seed)
    folder = log.folder()
    if result and folder:
        message = parts.keep(id, answer, folder, _STATE["model"])
        if message:
            _say(message)
    return result


def mine(name: str) -> Any:
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
        whose = "yours" if found.yours else "reference"
        print(f"{name:<10} {parts.PARTS[name].id:<9} {whose}")


def quiz(notebook: str) -> None:
    """Print the questions of a notebook."""
    for question in checking.exercises(notebook).QUESTIONS:
        _say(f"{question.id}  {question.text}")
        for letter, (text, _) in question.options.items():
            _say(f"    {letter}) {text}")
        print()


def answer(id: str, letter: object) -> Result:
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


def predict(id: str, value: Any, unit: str = "", signed: bool = False) -> None:
    """Commit to a number before the experiment.

    `signed`: the number may be negative; counts, shares and factors may not.
    """
    number = None
    if not is_blank(value):
        number = as_number(plain(value))
    problem = _no_prediction(value, number, unit, signed)
    log.note("predict", id=id, value=None if problem else number)
    _PREDICTIONS.pop(id, None)  # this call replaces an earlier prediction
    if number is None or problem:
        _say(f"{id}: no prediction yet. {problem}")
        return
    _PREDICTIONS[id] = (number, unit)
    _say(f"{id}: you predict {quantity(number, unit)}.")


def _no_prediction(value, number: float | None, unit: str, signed: bool) -> str:
    """Why a value, read as this number, is not a prediction; "" if it is one."""
    if number is None:
        first = "Write a number first: a wrong guess teaches more than none."
        if is_blank(value):
            return first
        shown = checking.shown(value)
        return f"{first} {shown} is no number (a half is 0.5, a thousand 1000 or 1,000)."
    if math.isinf(number):
        return f"{number} is impossible: the number is finite."
    if number < 0 and not signed:
        return f"{quantity(number, unit)} is impossible: the number is 0 or more."
    return ""


def chosen(answer: Any, known: Collection[str]) -> set | None:
    """The known names among the learner's choice, a name or a collection; None without a choice.

    Prints the names that are not known.
    """
    if is_blank(answer) or not isinstance(answer, Iterable):
        return None
    if isinstance(answer, str):
        answer = [answer]
    names = {canonical(name) for name in answer}
    unknown = names - set(known)
    if unknown:
        _say(f"not among the names, so left out: {', '.join(sorted(unknown))}")
    return names & set(known)


def reveal(id: str, measured: Any, unit: str = "") -> None:
    """Print the prediction beside the measured number."""
    measured = _number(measured)
    if measured is None:
        raise CourseError(f"{id}: the measured value is not a number")
    log.note("reveal", id=id, value=measured)
    if id not in _PREDICTIONS:
        _say(f"{id}: it is {quantity(measured, unit)}. You made no prediction.")
        return
    guess, said = _PREDICTIONS[id]
    unit = unit or said
    text = f"you predicted {quantity(guess, unit)}, it is {quantity(measured, unit)}"
    _say(f"{id}: {text}: {comment(guess, measured)}.")


def _number(value) -> float | None:
    """A number, also from a tensor or array with one item; None for anything else."""
    if hasattr(value, "item"):
        value = value.item()
    return as_number(value)


def comment(guess: float, measured: float) -> str:
    """How far a prediction is off, in words."""
    if guess == measured:
        return "exactly right"
    if guess == 0 or measured == 0:
        side = "high" if guess > measured else "low"
        return f"too {side} by {quantity(abs(guess - measured))}"
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
    if factor <= 2:
        return f"the right size, {factor:.2g} times too {side}"
    return f"{factor:,.0f} times too {side}"


def quantity(number: float, unit: str = "") -> str:
    """A number with its unit: "1,024 tokens", "0.0213 s"."""
    text = f"{number:,.4g}"
    whole = float(number).is_integer() or abs(number) >= 1000
    if whole and abs(number) < 1e15:
        text = f"{number:,.0f}"
    return f"{text} {unit}".rstrip()


# --- figures and claims ---------------------------------------------------------------------------


def figure(id: str, value: Any) -> None:
    """Record a number that the text quotes as <!--fig ID-->…<!--/fig-->."""
    number = _number(value)
    if number is None:
        raise CourseError(f"figure {id!r} is not a number: {value!r:.80}")
    log.note("figure", id=id, value=number)


def confirm(id: str, verdict: str, found: Any = None) -> None:
    """`claim` without printing, for claims that the notebook's text leaves to claims.md."""
    from nanokv.school.course.claims import CLAIMS

    if id not in CLAIMS:
        raise CourseError(f"no claim {id!r}", "nanokv course claims lists them")
    CLAIMS[id].confirm(verdict, found)
    log.note("claim", id=id, verdict=verdict)


def claim(id: str, verdict: str, found: Any = None) -> None:
    """Print a claim of an article with its verdict, and the value found here.

    Raises CourseError unless verdict and value agree with the registry.
    """
    from nanokv.school.course.claims import CLAIMS

    confirm(id, verdict, found)
    record = CLAIMS[id]
    _say(f"claim {id}: {record.says}\n    {record.verdict}. {record.truth}")
    if found is None:
        return
    number = None if isinstance(found, str) else as_number(found)
    shown = found if number is None else quantity(number, record.unit)
    _say(f"    Found here: {shown}.")
