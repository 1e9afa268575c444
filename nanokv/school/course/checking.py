"""Exercises: a right answer computed by nanokv, and the wrong answers that people often give.

    value("05.1", right=lambda case: …, wrong=[Mistake("…", lambda case: …, "You counted … ")])
    function("05.2", right=reference, inputs=lambda rng: (…), wrong=[…])  # inputs: small to random
    judged("06.3", judge)                                         # judge: (answer, case) → Outcome

The checks of notebook NN are CHECKS in nanokv/school/course/checks/nbNN.py; its questions are in
nbNN.toml beside that. Judging an answer never raises, whatever the answer does.
"""

import copy
import importlib
import itertools
import random
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib.resources import files
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from nanokv.errors import CourseError
from nanokv.school.course import slips
from nanokv.school.course import trials as tried
from nanokv.school.course.answers import (
    Sealed,
    as_set,
    has_nan,
    is_blank,
    is_stub,
    named,
    plain,
    same,
)
from nanokv.school.course.feedback import call, example, stopped
from nanokv.school.course.forms import Use, misfit
from nanokv.school.course.slips import Mistake

if TYPE_CHECKING:
    from nanokv.config import Config
    from nanokv.lab.study.equality import Report
    from nanokv.model import Transformer

TRIALS = 50  # inputs on which a function is tried
UNFINISHED = (NotImplementedError,)
EXACT = (1e-6, 0.0)  # default tolerance: rel, atol


class Case(SimpleNamespace):
    """The numbers of one variant of an exercise, and its model.

    `hidden`: the numbers give the answer away, so repr() does not show them.
    """

    def __init__(self, values: dict, model: "Transformer | None" = None, hidden: bool = False):
        super().__init__(**values)
        self._model = model
        self._hidden = hidden

    def __getattr__(self, name: str):
        """Explain a missing name: `case` often belongs to another exercise, whose cell ran last."""
        if name.startswith("_"):
            raise AttributeError(name)
        have = ", ".join(known for known in vars(self) if not known.startswith("_"))
        raise AttributeError(
            f"no {name!r} among the numbers of this case ({have}). If they are those of another "
            "exercise, run the cell with course.case(…) above yours again"
        )

    def __repr__(self):
        if self._hidden:
            return "Case(hidden)"
        given = [
            f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")
        ]
        return f"Case({', '.join(given)})"

    @property
    def model(self) -> "Transformer":
        """The notebook's model; outside a notebook, the bundled one."""
        if self._model is None:
            from nanokv.loading import load

            self._model = load("tiny", dtype="float32", device="cpu")[0]
        return self._model

    @property
    def config(self) -> "Config":
        return self.model.config


@dataclass(frozen=True)
class Outcome:
    """A judgement. `state`: right, wrong or unanswered; `mistake`: the name of a known mistake."""

    state: str
    message: str = ""
    mistake: str = ""


RIGHT = Outcome("right")
UNANSWERED = Outcome("unanswered")


def wrong(message: str, mistake: str = "") -> Outcome:
    return Outcome("wrong", message, mistake)


@dataclass(frozen=True)
class Check:
    """One exercise.

    `parameters`: name → the values that a variant draws from; the notebook itself uses the first.
    `hidden`: the learner has to find the parameters (a fault, a place), so they are never shown.
    `near`: (rel, atol); numbers count as right within max(atol, rel·|right|).
    `otherwise`: the hint for a wrong value that is not a known mistake.
    """

    id: str
    judge: Callable  # (answer, case) → Outcome
    parameters: dict = field(default_factory=dict)
    # case → the right answer, for a teacher's key; None where several answers are right
    key: Callable | None = None
    mistakes: tuple = ()
    hidden: bool = False
    near: tuple = EXACT
    otherwise: str = ""
    reference: Callable | None = None  # for a function exercise: nanokv's function
    use: Use | None = None  # how later notebooks use the result
    # case → {name: number} that a printed exam has to show beside the parameters
    given: Callable | None = None
    names: tuple[str, ...] = ()  # the answer is a set of some of these
    factors: bool = False  # the answer is a product
    # Case → every answer that is worth an outcome, where there are few.
    choices: Callable | None = None

    def case(self, seed: int | None = None, model: "Transformer | None" = None) -> Case:
        """The notebook's own numbers, or with a seed a reproducible draw from `parameters`."""
        if seed is None:
            values = {name: choices[0] for name, choices in self.parameters.items()}
        else:
            rng = random.Random(f"{self.id} {seed}")
            values = {name: rng.choice(choices) for name, choices in self.parameters.items()}
        return Case(values, model, self.hidden)


class Told(Exception):
    """Raised inside a judge to end it with this outcome."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.message)
        self.outcome = outcome


CALLED = "hand in the function itself, without calling it; this is {!r:.60}"


def guarded(judge: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Wrap a judge: an answer that raises, or calls sys.exit, when it is used counts as wrong."""

    @wraps(judge)
    def careful(*arguments):
        try:
            return judge(*arguments)
        except Told as told:
            return told.outcome
        except KeyboardInterrupt:  # the learner interrupted the check
            raise
        # BaseException: SystemExit and the outcomes of pytest.fail and pytest.skip derive from it.
        except BaseException as error:
            answer = arguments[0]
            uncallable = f"{type(answer).__name__!r} object is not callable"
            if isinstance(error, TypeError) and str(error) == uncallable:
                return wrong(CALLED.format(answer))
            return wrong(stopped(error))

    return careful


def result_of(function: Callable, *arguments: Any, like: Any = None) -> Any:
    """The result of a learner's function.

    Raises Told if that is the stub's `...`, None, or not of the form of `like`.
    """
    given = function(*arguments)
    if is_stub(given):
        raise Told(UNANSWERED)
    if given is None:
        raise Told(wrong("your function returned None: is a return missing?", "None"))
    problem = like is not None and misfit(given, like)
    if problem:
        raise Told(wrong(problem, "form"))
    return given


FIELDS = {  # letter of the glossary → field of a config
    "C": "hidden_size",
    "L": "num_hidden_layers",
    "H": "num_attention_heads",
    "Hk": "num_key_value_heads",
    "D": "head_dim",
    "V": "vocab_size",
    "width of the MLP": "intermediate_size",
}


def sizes(config: "Config", letters: Iterable[str]) -> dict[str, int]:
    """{letter: size} of a model, for a printed exam."""
    return {letter: getattr(config, FIELDS[letter]) for letter in letters}


def value(
    id: str,
    right: Callable | Sealed,
    wrong: Sequence[Mistake] = (),
    rel: float = EXACT[0],
    atol: float = EXACT[1],
    parameters: dict[str, tuple] | None = None,
    otherwise: str = "",
    names: Sequence[str] = (),
    hidden: bool = False,
    given: Callable | None = None,
    factors: bool = False,
) -> Check:
    """An exercise whose answer is a value.

    `right`: case → value, or a Sealed. `otherwise`: the hint for an unknown wrong value.
    `names`: the answer has to be a set of some of these names. `given`: as in Check.
    `factors`: the answer is a product, so two mistakes at once multiply the error by both factors.
    """
    near = (rel, atol)
    key = None if isinstance(right, Sealed) else right
    return Check(
        id,
        _judge_of_value(right, wrong, near, otherwise, names, factors),
        parameters or {},
        key,
        tuple(wrong),
        hidden,
        near,
        otherwise,
        given=given,
        names=tuple(names),
        factors=factors,
    )


def _judge_of_value(
    right: Callable | Sealed,
    wrong: Sequence[Mistake],
    near: tuple[float, float],
    otherwise: str,
    names: Sequence[str],
    factors: bool,
) -> Callable:
    """The judge of `value`: (answer, case) → Outcome."""
    rel, atol = near
    alike = partial(same, rel=rel, atol=atol)

    @guarded
    def judge(answer, case):
        if is_blank(answer):
            return UNANSWERED
        expected = right
        if not isinstance(right, Sealed):
            expected = right(case)
        if alike(answer, expected):
            return RIGHT
        return (
            _known_mistake(answer, case, wrong, alike)
            or _two_mistakes(answer, expected, case, wrong, alike, factors)
            or _no_value(answer, expected, names)
            or Outcome("wrong", hint(otherwise, near))
        )

    return judge


def _known_mistake(answer, case, mistakes, alike) -> Outcome | None:
    """The outcome of the first known mistake that gives this answer."""
    for mistake in mistakes:
        if alike(answer, mistake.gives(case)):
            return wrong(mistake.message, mistake.name)
    return None


def _two_mistakes(answer, expected, case, mistakes, alike, factors: bool) -> Outcome | None:
    """The outcome of the two known mistakes that together give this answer."""
    if isinstance(expected, Sealed):
        return None
    given_by = [(mistake, mistake.gives(case)) for mistake in mistakes]
    both = slips.of_value(answer, expected, given_by, alike, factors)
    if both is None:
        return None
    return wrong(*slips.combined(*both))


def _no_value(answer, expected, names) -> Outcome | None:
    """The outcome of an answer whose form shows that it cannot be right."""
    if names and not _is_set_of(names, answer):
        return wrong(wanted_names(names))
    if has_nan(answer):
        return wrong("that is NaN, no number")
    if isinstance(expected, Sealed):
        return None
    problem = misfit(answer, expected)
    if not problem:
        return None
    return wrong(problem, "form")


def wanted_names(names: Sequence[str]) -> str:
    """The message for an answer that is no set of these names."""
    return f"answer with a set of these names, all or some or none: {', '.join(names)}"


def hint(otherwise: str, near: tuple[float, float]) -> str:
    """The message for an unknown wrong value: the exercise's hint, and its tolerance if it has one."""
    if near == EXACT:
        return otherwise
    return f"{otherwise} Numbers count as right {_tolerance(*near)}.".lstrip()


def _is_set_of(names, answer) -> bool:
    given = as_set(answer)
    return isinstance(given, set) and given <= as_set(names)


def _tolerance(rel: float, atol: float) -> str:
    """The tolerance in words. Beside a relative one, the absolute one (for zero) is left out."""
    return f"within {100 * rel:g} %" if rel else f"within {atol:g}"


def function(
    id: str,
    right: Callable,
    inputs: Callable,
    wrong: Sequence[Mistake] = (),
    rel: float = EXACT[0],
    atol: float = EXACT[1],
    trials: int = TRIALS,
    use: Use | None = None,
    made: Callable | None = None,
) -> Check:
    """An exercise whose answer is a function. `right`: the reference; `inputs`: rng → arguments.

    `use`: how later notebooks use the result; right numbers of an unusable type are wrong.
    `made`: (**slip) → the function with these slips, to recognise two mistakes at once.

    Every call gets a copy of the arguments, so a function that changes them affects no other call.
    """

    @guarded
    def judge(answer, case):
        if is_blank(answer):
            return UNANSWERED
        if not callable(answer):
            return Outcome("wrong", CALLED.format(answer))
        tries = tried.drawn(inputs, id, trials)
        expected = [right(*copy.deepcopy(arguments)) for arguments in tries]
        given = [_tried(answer, arguments) for arguments in tries]
        pairs = slips.functions(wrong, made)
        outcome = _compared(answer, tries, given, expected, (*wrong, *pairs), rel, atol)
        if use and outcome is RIGHT:
            return _misused(answer, tries, given, expected, use)
        return outcome

    return Check(id, judge, {}, None, tuple(wrong), reference=right, use=use)


def _misused(answer, tries, given, expected, use: Use) -> Outcome:
    """RIGHT, or the first trial whose right result has a type that later notebooks cannot use."""
    for arguments, result, right in zip(tries, given, expected, strict=True):
        problem = use.misuse(result, arguments)
        if problem:
            return wrong(problem + example(answer, arguments, result, right, ""), "type")
    return RIGHT


def _tried(answer, arguments):
    """The result of one trial. Raises Told, with the call to try, where there is none."""
    try:
        return result_of(answer, *copy.deepcopy(arguments))
    except UNFINISHED as error:
        raise Told(UNANSWERED) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, Told):
            outcome = error.outcome
        else:
            outcome = wrong(stopped(error))
        if outcome.state != "wrong":
            raise
        raise Told(
            wrong(f"{outcome.message}\n    try       {call(answer, arguments)}", outcome.mistake)
        ) from error


def _compared(answer, tries, given, expected, mistakes, rel, atol) -> Outcome:
    """Compare the learner's results with the reference's and with those of the known mistakes."""
    alike = partial(_alike, rel=rel, atol=atol)
    pairs = zip(given, expected, strict=True)
    differing = [i for i, (result, right) in enumerate(pairs) if not alike(result, right)]
    if not differing:
        return RIGHT
    at = differing[0]

    def shown(i):
        within = f" ({_tolerance(rel, atol)})" if _has_floats(expected[i]) else ""
        return example(answer, tries[i], given[i], expected[i], within)

    for mistake in mistakes:
        if _explains(mistake, given, tries, alike):
            return wrong(mistake.message + shown(at), mistake.name)
    for i, problem in enumerate(map(misfit, given, expected)):
        if isinstance(given[i], str) and not isinstance(expected[i], str):
            problem = f"your function returns the text {given[i]!r:.60}: return the value itself"
        if problem:
            return wrong(problem + shown(i), "form")
    return wrong(_difference(given[at], expected[at], alike) + shown(at))


def _explains(mistake, given, tries, alike) -> bool:
    """Does a known mistake give the same result in every trial? NaN counts as equal to NaN."""
    return all(
        alike(named(result), named(mistake.gives(*copy.deepcopy(arguments))))
        for result, arguments in zip(given, tries, strict=True)
    )


def _alike(given, right, rel, atol) -> bool:
    """As `same`, but a number written as text is not a number: other code uses the result."""
    return isinstance(given, str) <= isinstance(right, str) and same(given, right, rel, atol)


def _has_floats(value) -> bool:
    value = plain(value)
    if isinstance(value, list):
        return any(map(_has_floats, value))
    return isinstance(value, float)


def _difference(given, right, alike) -> str:
    """How two results differ: the first place, if both are tensors of one shape."""
    shape = getattr(right, "shape", ())
    if shape and getattr(given, "shape", ()) == shape:
        if given.dtype != right.dtype and alike(given.to(right.dtype), right):
            return (
                f"yours gives the right numbers as {given.dtype}, but they have to be {right.dtype}"
            )
        at = next(
            place
            for place in itertools.product(*map(range, shape))
            if not alike(given[place], right[place])
        )
        g, r = (f"{x[at].item():.6g} ({x.dtype})" for x in (given, right))
        return f"yours gives {g.replace('nan', 'NaN')} at {list(at)}, but it is {r}"
    return "not for this input:"


def judged(
    id: str,
    judge: Callable[..., Outcome],
    parameters: dict[str, tuple] | None = None,
    key: Callable | None = None,
    hidden: bool = False,
    choices: Callable | None = None,
) -> Check:
    """An exercise with a hand-written judge: (answer, case) → Outcome.

    A blank answer is UNANSWERED and does not reach the judge. `choices`: case → every answer with
    an outcome, where there are few.
    """

    @guarded
    def careful(answer, case):
        if is_blank(answer):
            return UNANSWERED
        try:
            return judge(answer, case)
        except UNFINISHED:
            return UNANSWERED

    return Check(id, careful, parameters or {}, key, (), hidden, choices=choices)


def no_class(answer: object) -> Outcome | None:
    """The Outcome for a cache that was not handed in as a class; None if it was."""
    if isinstance(answer, type):
        return None
    return wrong(
        "hand in the class itself, without calling it: there will be one object for each layer"
    )


def failing(report: "Report") -> str:
    """The first failure of a nanokv.lab.study.equality report in a sentence; "" if it passed."""
    if report.passed:
        return ""
    failure = report.first_failure
    if failure is None:
        return "the equality suite could try no case"
    said = stopped(failure.raised) if failure.raised else failure.detail
    return f"the case “{failure.name}”: {said}"


def shown(value: Any) -> str:
    """A value for a message: at most 60 characters, a tensor as its shape and dtype."""
    if isinstance(value, tuple):
        return "(" + ", ".join(shown(item) for item in value) + ")"
    text = repr(value)
    if getattr(value, "shape", ()):
        text = f"{tuple(value.shape)} tensor of {value.dtype}"
    if len(text) > 60:
        return text[:57] + "..."
    return text


@dataclass(frozen=True)
class Question:
    """Multiple choice. `options`: letter → (text, comment); `right`: the right letter, sealed."""

    id: str
    text: str
    options: dict
    right: str

    @guarded
    def judge(self, letter: object) -> Outcome:
        if is_blank(letter):
            return UNANSWERED
        letter = str(letter).strip().casefold()
        if letter not in self.options:
            return wrong(f"answer with one of the letters {', '.join(self.options)}")
        comment = self.options[letter][1]
        if same(letter, Sealed(self.id, self.right)):
            return Outcome("right", comment)
        return Outcome("wrong", comment, letter)


def questions(notebook: str) -> tuple[Question, ...]:
    """The multiple-choice questions of a notebook, from nanokv/school/course/checks/nbNN.toml."""
    texts = tomllib.loads(
        (files("nanokv.school.course.checks") / f"nb{notebook}.toml").read_text(encoding="utf-8")
    )
    return tuple(Question(f"{notebook}.{number}", **fields) for number, fields in texts.items())


# --- finding exercises ----------------------------------------------------------------------------


def numbers() -> list[str]:
    """ "00" to "14": the notebooks that have checks."""
    names = (path.name for path in files("nanokv.school.course.checks").iterdir())
    return sorted(name[2:4] for name in names if name.startswith("nb") and name.endswith(".py"))


def exercises(notebook: str) -> ModuleType:
    """The module of checks of notebook "05"."""
    try:
        return importlib.import_module(f"nanokv.school.course.checks.nb{notebook}")
    except ModuleNotFoundError as error:
        raise CourseError(f"no notebook {notebook!r} has checks", "ids look like 05.2") from error


def find(id: str, kind: str = "CHECKS") -> Any:
    """The check with this id; with kind "QUESTIONS", the question."""
    known = {item.id: item for item in getattr(exercises(str(id).split(".")[0]), kind)}
    if id not in known:
        raise CourseError(f"no exercise {id!r}", f"known: {', '.join(known)}")
    return known[id]
