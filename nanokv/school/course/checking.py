"""What an exercise is: a right answer computed by nanokv, and the wrong answers that people really give.

    value("05.1", right=lambda case: …, wrong=[Mistake("…", lambda case: …, "You counted … ")])
    function("05.2", right=reference, inputs=lambda rng: (…), wrong=[…])     tried on inputs from small to random
    judged("06.3", judge)                                                    a function answer, case → Outcome

Each notebook has a module nanokv/school/course/checks/nbNN.py with its CHECKS, and its questions in nbNN.toml beside
that. An answer is judged and never raises.
"""

import copy
import importlib
import itertools
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib.resources import files
from types import SimpleNamespace

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

TRIALS = 50  # inputs on which a function is tried
UNFINISHED = (NotImplementedError,)
EXACT = (1e-6, 0.0)  # rel and atol where nothing else is said


class Case(SimpleNamespace):
    """The numbers of one variant of an exercise, and the model it is about. `hidden`: they give the answer away."""

    def __init__(self, values: dict, model=None, hidden: bool = False):
        super().__init__(**values)
        self._model, self._hidden = model, hidden

    def __getattr__(self, name: str):
        """A name that it does not have: in a notebook `case` is often that of another exercise, whose cell ran last."""
        if name.startswith("_"):
            raise AttributeError(name)
        have = ", ".join(known for known in vars(self) if not known.startswith("_"))
        hint = "If they are those of another exercise, run the cell with course.case(…) above yours again"
        raise AttributeError(f"no {name!r} among the numbers of this case ({have}). {hint}")

    def __repr__(self):
        given = [
            f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_")
        ]
        return f"Case({'hidden' if self._hidden else ', '.join(given)})"

    @property
    def model(self):
        """The notebook's model; the bundled one outside of a notebook."""
        if self._model is None:
            from nanokv.loading import load

            self._model = load("tiny", dtype="float32", device="cpu")[0]
        return self._model

    @property
    def config(self):
        return self.model.config


@dataclass(frozen=True)
class Outcome:
    """A judgement: state is right, wrong or unanswered; `mistake` names a known wrong answer."""

    state: str
    message: str = ""
    mistake: str = ""


RIGHT, UNANSWERED = Outcome("right"), Outcome("unanswered")


def wrong(message: str, mistake: str = "") -> Outcome:
    return Outcome("wrong", message, mistake)


@dataclass(frozen=True)
class Mistake:
    """A wrong answer with a name, as a function of the case (of a function exercise: the wrong function itself).

    `slip`: what `made` of a function exercise gets to make it. `alone`: its message speaks of the whole answer, so it
    is not named together with another one.
    """

    name: str
    gives: Callable
    message: str
    slip: dict = field(default_factory=dict)
    alone: bool = False


@dataclass(frozen=True)
class Check:
    """One exercise. `parameters`: what a variant may draw, each (first, others …); the first is the course's own.

    `hidden`: the parameters are what is to be found out (a fault, a place), so they are never shown to a learner.
    `near`: numbers count as right within max(atol, rel·|right|). `otherwise`: the hint for an unknown wrong value.
    """

    id: str
    judge: Callable  # (answer, case) → Outcome
    parameters: dict = field(default_factory=dict)
    # Case → the right answer, for a teacher's key; None: there is no single one.
    key: Callable | None = None
    mistakes: tuple = ()
    hidden: bool = False
    near: tuple = EXACT  # rel, atol
    otherwise: str = ""
    reference: Callable | None = None  # of a function exercise: nanokv's function
    use: Use | None = None  # what later notebooks do with its result
    # Case → {name: number} that paper has to show beside the parameters.
    given: Callable | None = None

    def case(self, seed: int | None = None, model=None) -> Case:
        """The course's own numbers without a seed, a draw of them with one: the same for the same seed."""
        rng = random.Random(f"{self.id} {seed}")
        values = {
            name: rng.choice(s) if seed is not None else s[0] for name, s in self.parameters.items()
        }
        return Case(values, model, self.hidden)


class Told(Exception):
    """Raised inside a judge: this is the judgement."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.message)
        self.outcome = outcome


CALLED = "hand in the function itself, without calling it; this is {!r:.60}"


def guarded(judge):
    """Whatever an answer does when it is looked at or called, from raising to sys.exit: a wrong answer."""

    @wraps(judge)
    def careful(*arguments):
        try:
            return judge(*arguments)
        except Told as told:
            return told.outcome
        except KeyboardInterrupt:  # of the one who waits
            raise
        # SystemExit, and what pytest.fail and pytest.skip raise, are no Exception.
        except BaseException as error:
            kind = type(arguments[0]).__name__
            called = (
                isinstance(error, TypeError) and str(error) == f"{kind!r} object is not callable"
            )
            return wrong(CALLED.format(arguments[0]) if called else stopped(error))

    return careful


def result_of(function, *arguments, like=None):
    """What a learner's function returns. Told: it is the stub's `...`, None, or has not the form of `like`."""
    given = function(*arguments)
    if is_stub(given):
        raise Told(UNANSWERED)
    if given is None:
        raise Told(wrong("your function returned None: is a return missing?", "None"))
    problem = like is not None and misfit(given, like)
    if problem:
        raise Told(wrong(problem, "form"))
    return given


FIELDS = {  # the glossary's letters → fields of a config
    "C": "hidden_size",
    "L": "num_hidden_layers",
    "H": "num_attention_heads",
    "Hk": "num_key_value_heads",
    "D": "head_dim",
    "V": "vocab_size",
    "width of the MLP": "intermediate_size",
}


def sizes(config, letters) -> dict[str, int]:
    """What paper shows of a model."""
    return {letter: getattr(config, FIELDS[letter]) for letter in letters}


def value(
    id: str,
    right,
    wrong=(),
    rel=EXACT[0],
    atol=EXACT[1],
    parameters=None,
    otherwise="",
    names=(),
    hidden=False,
    given=None,
    factors=False,
) -> Check:
    """An exercise whose answer is a value. `right`: case → value, or a Sealed; `otherwise`: for an unknown mistake.

    `names`: the answer is a set of some of these, and is told so if it is none. `given`: what paper shows besides.
    `factors`: it is a product, so two mistakes at once are each off by their own factor.
    """

    @guarded
    def judge(answer, case):
        if is_blank(answer):
            return UNANSWERED
        expected = right if isinstance(right, Sealed) else right(case)
        if same(answer, expected, rel, atol):
            return RIGHT
        known = next((m for m in wrong if same(answer, m.gives(case), rel, atol)), None)
        if known:
            return Outcome("wrong", known.message, known.name)
        if not isinstance(right, Sealed):
            given_by = [(mistake, mistake.gives(case)) for mistake in wrong]
            alike = partial(same, rel=rel, atol=atol)
            both = slips.of_value(answer, expected, given_by, alike, factors)
            if both:
                return Outcome("wrong", *slips.told(*both))
        if names and not _is_set_of(names, answer):
            return Outcome(
                "wrong",
                f"answer with a set of these names, all or some or none: {', '.join(names)}",
            )
        if has_nan(answer):
            return Outcome("wrong", "that is NaN, no number")
        problem = "" if isinstance(expected, Sealed) else misfit(answer, expected)
        if problem:
            return Outcome("wrong", problem, "form")
        near = _tolerance(rel, atol) if (rel, atol) != EXACT else ""
        return Outcome(
            "wrong", f"{otherwise} Numbers count as right {near}.".lstrip() if near else otherwise
        )

    key = None if isinstance(right, Sealed) else right
    return Check(
        id, judge, parameters or {}, key, tuple(wrong), hidden, (rel, atol), otherwise, given=given
    )


def _is_set_of(names, answer) -> bool:
    given = as_set(answer)
    return isinstance(given, set) and given <= as_set(names)


def _tolerance(rel: float, atol: float) -> str:
    """In words; an absolute one beside a relative one is for numbers near zero."""
    return f"within {100 * rel:g} %" if rel else f"within {atol:g}"


def function(
    id: str,
    right,
    inputs,
    wrong=(),
    rel=EXACT[0],
    atol=EXACT[1],
    trials=TRIALS,
    use=None,
    made=None,
) -> Check:
    """An exercise whose answer is a function, tried on `inputs(rng)` → arguments; `right` is the reference.

    `use`: what later notebooks do with its result; right numbers in another form are told so. `made`: (**slip) → the
    function with these slips, for two mistakes at once.

    Each call gets arguments of its own, so what one of them does to a list or a tensor in place reaches no other.
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
        return (
            _misused(answer, tries, given, expected, use) if use and outcome is RIGHT else outcome
        )

    return Check(id, judge, {}, None, tuple(wrong), reference=right, use=use)


def _misused(answer, tries, given, expected, use: Use) -> Outcome:
    """RIGHT, or the first trial whose result is right and has not the form in which it is used."""
    for arguments, result, right in zip(tries, given, expected, strict=True):
        problem = use.misuse(result, arguments)
        if problem:
            return wrong(problem + example(answer, arguments, result, right, ""), "type")
    return RIGHT


def _tried(answer, arguments):
    """The result of one trial; Told with the call that shows it where there is none."""
    try:
        return result_of(answer, *copy.deepcopy(arguments))
    except UNFINISHED as error:
        raise Told(UNANSWERED) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        outcome = error.outcome if isinstance(error, Told) else wrong(stopped(error))
        if outcome.state != "wrong":
            raise
        raise Told(
            wrong(f"{outcome.message}\n    try       {call(answer, arguments)}", outcome.mistake)
        ) from error


def _compared(answer, tries, given, expected, mistakes, rel, atol) -> Outcome:
    """The results of a learner's function beside those of the reference and of the known mistakes."""
    alike = partial(_alike, rel=rel, atol=atol)
    at = next(
        (
            i
            for i, (g, right) in enumerate(zip(given, expected, strict=True))
            if not alike(g, right)
        ),
        None,
    )
    if at is None:
        return RIGHT

    def shown(i):
        within = f" ({_tolerance(rel, atol)})" if _has_floats(expected[i]) else ""
        return example(answer, tries[i], given[i], expected[i], within)

    for mistake in mistakes:
        if all(
            alike(named(g), named(mistake.gives(*copy.deepcopy(a))))
            for g, a in zip(given, tries, strict=True)
        ):
            return wrong(mistake.message + shown(at), mistake.name)
    for i, problem in enumerate(map(misfit, given, expected)):
        if isinstance(given[i], str) and not isinstance(expected[i], str):
            problem = f"your function returns the text {given[i]!r:.60}: return the value itself"
        if problem:
            return wrong(problem + shown(i), "form")
    return wrong(_difference(given[at], expected[at], alike) + shown(at))


def _alike(given, right, rel, atol) -> bool:
    """What a function returns is used by other code: a number written as a text is none there."""
    return isinstance(given, str) <= isinstance(right, str) and same(given, right, rel, atol)


def _has_floats(value) -> bool:
    value = plain(value)
    return any(map(_has_floats, value)) if isinstance(value, list) else isinstance(value, float)


def _difference(given, right, alike) -> str:
    """Of two tensors of one shape, the first place where they differ."""
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


def judged(id: str, judge, parameters=None, key=None, hidden=False) -> Check:
    """An exercise with a judge of its own: (answer, case) → Outcome. The blank stub never reaches it."""

    @guarded
    def careful(answer, case):
        try:
            return UNANSWERED if is_blank(answer) else judge(answer, case)
        except UNFINISHED:
            return UNANSWERED

    return Check(id, careful, parameters or {}, key, (), hidden)


def no_class(answer) -> Outcome | None:
    """An Outcome for a cache that is not handed in as a class."""
    if isinstance(answer, type):
        return None
    return wrong(
        "hand in the class itself, without calling it: there will be one object for each layer"
    )


def failing(report) -> str:
    """What is wrong with a cache according to a nanokv.lab.study.equality report, in a sentence; "" if it passed."""
    if report.passed:
        return ""
    failure = report.first_failure
    if failure is None:
        return "the equality suite could try no case"
    return f"the case “{failure.name}”: {stopped(failure.raised) if failure.raised else failure.detail}"


def shown(value) -> str:
    """A value in a message: short, and a tensor as its shape and type."""
    if isinstance(value, tuple):
        return "(" + ", ".join(shown(item) for item in value) + ")"
    text = (
        f"{tuple(value.shape)} tensor of {value.dtype}"
        if getattr(value, "shape", ())
        else repr(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Question:
    """Multiple choice: options is letter → (text, what to know about it); `right` is the sealed letter."""

    id: str
    text: str
    options: dict
    right: str

    @guarded
    def judge(self, letter) -> Outcome:
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
    """The multiple choice of a notebook, from nanokv/school/course/checks/nbNN.toml."""
    texts = tomllib.loads(
        (files("nanokv.school.course.checks") / f"nb{notebook}.toml").read_text(encoding="utf-8")
    )
    return tuple(Question(f"{notebook}.{number}", **fields) for number, fields in texts.items())


# --- finding them -------------------------------------------------------------------------------------------------


def numbers() -> list[str]:
    """ "00" to "14": the notebooks that have checks."""
    names = (path.name for path in files("nanokv.school.course.checks").iterdir())
    return sorted(name[2:4] for name in names if name.startswith("nb") and name.endswith(".py"))


def exercises(notebook: str):
    """The module of checks of notebook "05"."""
    try:
        return importlib.import_module(f"nanokv.school.course.checks.nb{notebook}")
    except ModuleNotFoundError as error:
        raise CourseError(f"no notebook {notebook!r} has checks", "ids look like 05.2") from error


def find(id: str, kind: str = "CHECKS"):
    """The check, or with kind "QUESTIONS" the question, of this id."""
    known = {item.id: item for item in getattr(exercises(str(id).split(".")[0]), kind)}
    if id not in known:
        raise CourseError(f"no exercise {id!r}", f"known: {', '.join(known)}")
    return known[id]
