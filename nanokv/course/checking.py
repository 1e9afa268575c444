"""What an exercise is: a right answer computed by nanokv, and the wrong answers that people really give.

    value("05.1", right=lambda case: …, wrong=[Mistake("…", lambda case: …, "You counted … ")])
    function("05.2", right=reference, inputs=lambda rng: (…), wrong=[…])     tried on random inputs
    judged("06.3", judge)                                                    a function answer, case → Outcome
    Question("05.q1", text, {"a": (option, comment), …}, right="<seal>")

Each notebook has a module nanokv/course/checks/nbNN.py with CHECKS and QUESTIONS. An answer is judged and never raises.
"""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from nanokv.course.answers import Sealed, is_blank, same
from nanokv.errors import CourseError

TRIALS = 50  # random inputs on which a function is tried
UNFINISHED = (NotImplementedError,)


class Case(SimpleNamespace):
    """The numbers of one variant of an exercise, and the model it is about."""

    def __init__(self, values: dict, model=None):
        super().__init__(**values)
        self._model = model

    @property
    def model(self):
        """The notebook's model; the bundled one outside of a notebook."""
        if self._model is None:
            from nanokv.loading import load

            self._model = load("tiny")[0]
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
    """A wrong answer with a name, as a function of the case (of a function exercise: the wrong function itself)."""

    name: str
    gives: Callable
    message: str


@dataclass(frozen=True)
class Check:
    """One exercise. `parameters`: what a variant may draw, each (first, others …); the first is the course's own."""

    id: str
    judge: Callable  # (answer, case) → Outcome
    parameters: dict = field(default_factory=dict)
    key: Callable | None = None  # case → the right answer, for a teacher's key; None: there is no single one
    mistakes: tuple = ()

    def case(self, seed: int | None = None, model=None) -> Case:
        """The course's own numbers without a seed, a draw of them with one: the same for the same seed."""
        rng = random.Random(f"{self.id} {seed}")
        values = {name: rng.choice(s) if seed is not None else s[0] for name, s in self.parameters.items()}
        return Case(values, model)


def value(id: str, right, wrong=(), rel: float = 1e-6, atol: float = 0.0, parameters=None, otherwise="") -> Check:
    """An exercise whose answer is a value. `right`: case → value, or a Sealed; `otherwise`: for an unknown mistake."""

    def judge(answer, case):
        if is_blank(answer):
            return UNANSWERED
        if same(answer, right if isinstance(right, Sealed) else right(case), rel, atol):
            return RIGHT
        known = next((m for m in wrong if same(answer, m.gives(case), rel, atol)), None)
        return Outcome("wrong", known.message, known.name) if known else Outcome("wrong", otherwise)

    return Check(id, judge, parameters or {}, None if isinstance(right, Sealed) else right, tuple(wrong))


def function(id: str, right, inputs, wrong=(), rel=1e-6, atol=0.0, trials=TRIALS) -> Check:
    """An exercise whose answer is a function, tried on `inputs(rng)` → arguments; `right` is the reference."""

    def judge(answer, case):
        if is_blank(answer):
            return UNANSWERED
        if not callable(answer):
            return Outcome("wrong", f"hand in the function itself, without calling it; this is {answer!r:.60}")
        rng = random.Random(id)
        tries = [inputs(rng) for _ in range(trials)]
        given = []
        for arguments in tries:
            outcome = _call(answer, arguments, given)
            if outcome:
                return outcome
        if all(same(g, right(*a), rel, atol) for g, a in zip(given, tries, strict=True)):
            return RIGHT
        for mistake in wrong:
            if all(same(g, mistake.gives(*a), rel, atol) for g, a in zip(given, tries, strict=True)):
                return Outcome("wrong", mistake.message, mistake.name)
        a, g = next((a, g) for a, g in zip(tries, given, strict=True) if not same(g, right(*a), rel, atol))
        return Outcome("wrong", f"for the input {_shown(a)} yours gives {_shown(g)}, but it is {_shown(right(*a))}")

    return Check(id, judge, {}, None, tuple(wrong))


def judged(id: str, judge, parameters=None, key=None) -> Check:
    """An exercise with a judge of its own: (answer, case) → Outcome. The blank stub never reaches it."""

    def careful(answer, case):
        if is_blank(answer):
            return UNANSWERED
        try:
            return judge(answer, case)
        except UNFINISHED:
            return UNANSWERED
        except Exception as error:
            return wrong(f"it stopped with {type(error).__name__}: {error}")

    return Check(id, careful, parameters or {}, key)


def _call(answer, arguments, given) -> Outcome | None:
    """Append the result to `given`; an Outcome only where there is none."""
    try:
        result = answer(*arguments)
    except UNFINISHED:
        return UNANSWERED
    except Exception as error:
        return Outcome("wrong", f"for the input {_shown(arguments)} it stopped with {type(error).__name__}: {error}")
    if is_blank(result):
        return UNANSWERED
    given.append(result)
    return None


def _shown(value) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_shown(item) for item in value) + ")"
    text = str(tuple(value.shape)) + " tensor" if hasattr(value, "shape") and value.shape else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Question:
    """Multiple choice: options is letter → (text, what to know about it); `right` is the sealed letter."""

    id: str
    text: str
    options: dict
    right: str

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


# --- finding them -------------------------------------------------------------------------------------------------


def exercises(notebook: str):
    """The module of checks of notebook "05"."""
    try:
        return importlib.import_module(f"nanokv.course.checks.nb{notebook}")
    except ModuleNotFoundError as error:
        raise CourseError(f"no notebook {notebook!r} has checks", "ids look like 05.2") from error


def find(id: str, kind: str = "CHECKS"):
    """The check, or with kind "QUESTIONS" the question, of this id."""
    known = {item.id: item for item in getattr(exercises(str(id).split(".")[0]), kind)}
    if id not in known:
        raise CourseError(f"no exercise {id!r}", f"known: {', '.join(known)}")
    return known[id]
