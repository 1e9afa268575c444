"""The course without running a notebook: sources and twins, figures' marks, checks and their misconceptions, grading.

test_notebooks.py executes the notebooks.
"""

import importlib
import itertools
import json
import math
import os
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nanokv
from nanokv import costs
from nanokv.costs.memory import FAMILY
from nanokv.errors import CourseError
from nanokv.model import Qwen3
from nanokv.school.course import (
    book,
    checking,
    feedback,
    grading,
    log,
    prose,
    running,
    session,
    twins,
    variants,
)
from nanokv.school.course.answers import Sealed, is_blank, same, seal
from nanokv.school.course.book import slug
from nanokv.school.course.checking import Mistake, Question, function, judged, value

pytestmark = pytest.mark.sampled

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))
NUMBERS = [path.stem[:2] for path in SOURCES]
EXERCISES = [(n, c) for n in NUMBERS for c in checking.exercises(n).CHECKS]
SEEDS = (None, 0, 1, 2, 3)


def each_source(test):
    return pytest.mark.parametrize("path", SOURCES, ids=NUMBERS)(test)


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (8, 8),
        (8.0, 8),
        ("8", 8),
        ("6,112", 6112),
        (torch.tensor(8), 8),
        ((1, 2), [1, 2]),
        ([1, (2, 3)], (1, [2, 3])),
        (torch.Size([1, 2]), (1, 2)),
        (torch.ones(2, 2), [[1, 1], [1, 1]]),
        ("  Axis  0", "axis 0"),
        ({"k", "V"}, {"K", "v"}),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        (True, True),
        (1 / 3, 0.33333333),
        ("b", Sealed("x", seal("x", "B "))),
        ({"K", "Q"}, Sealed("x", seal("x", {"q", "k"}))),
        (["K", "q"], Sealed("x", seal("x", {"q", "k"}))),
        (["V", "k"], {"K", "v"}),
        ([2, 0], {0, 2}),
        ((), set()),
        ("-1,024.5", -1024.5),
        ("1_024", 1024),
    ],
)
def test_two_ways_to_say_the_same(answer, right):
    assert same(answer, right)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (8, 9),
        ("eight", 8),
        (True, 1),
        (1, True),
        ((1, 2), (2, 1)),
        ((1,), (1, 2)),
        (8, (8,)),
        (float("nan"), float("nan")),
        (torch.ones(2), [1, 1, 1]),
        ("axis 1", "axis 0"),
        ({"K"}, {"K", "V"}),
        ({"a": 1}, {"b": 1}),
        (None, 0),
        (lambda: 8, 8),
        ("0,5", 5),
        ("1,5", 15),
        ("0,500", 500),
        ("10,00", 1000),
        (10**400, 8),
        ("1e999", 8),
        (["K", "K"], {"K"}),
        ("K", {"K"}),
        (type("Yes", (), {"__eq__": lambda *a: True, "__hash__": None})(), {"K"}),
        ("c", Sealed("x", seal("x", "b"))),
        ("b", Sealed("y", seal("x", "b"))),
        (8.0001, 8),
        (float("inf"), 8),
    ],
)
def test_two_different_answers(answer, right):
    assert not same(answer, right)


def test_tolerance_is_relative_or_absolute():
    assert same(8.05, 8, rel=0.01) and not same(8.2, 8, rel=0.01)
    assert same(0.1, 0, atol=0.2) and not same(0.3, 0, atol=0.2)


@pytest.mark.parametrize(
    ("answer", "blank"),
    [
        (..., True),
        (None, True),
        ((1, ...), True),
        (" ", True),
        (0, False),
        ((), False),
        (False, False),
        ("0", False),
    ],
)
def test_an_untouched_stub_is_no_answer(answer, blank):
    assert is_blank(answer) == blank


# --- judging ------------------------------------------------------------------------------------------------------

EXAMPLE = value(
    "x.1",
    right=lambda c: c.n + 1,
    parameters={"n": (5, 6, 7)},
    otherwise="count again",
    wrong=(Mistake("off by one", lambda c: c.n, "you forgot the new one"),),
)


def test_a_value_is_right_wrong_known_or_blank():
    case = EXAMPLE.case()
    assert EXAMPLE.judge(6, case).state == "right"
    assert EXAMPLE.judge(5, case) == checking.Outcome(
        "wrong", "you forgot the new one", "off by one"
    )
    assert EXAMPLE.judge(99, case) == checking.Outcome("wrong", "count again")
    assert EXAMPLE.judge(..., case).state == "unanswered"


def test_a_variant_is_the_same_for_the_same_seed():
    drawn = [EXAMPLE.case(seed).n for seed in range(20)]
    assert (
        EXAMPLE.case().n == 5
        and set(drawn) == {5, 6, 7}
        and drawn == [EXAMPLE.case(seed).n for seed in range(20)]
    )


SQUARE = function(
    "x.2",
    right=lambda n: n * n,
    inputs=lambda rng: (rng.randint(3, 9),),
    wrong=(Mistake("doubled", lambda n: 2 * n, "that is twice"),),
)


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (lambda n: n**2, "right", ""),
        (lambda n: n + n, "wrong", "that is twice"),
        (lambda n: ..., "unanswered", ""),
        (lambda n: n // 0, "wrong", "stopped with ZeroDivisionError"),
        (lambda: 1, "wrong", "stopped with TypeError"),
        (lambda n: n * n if n < 9 else 0, "wrong", "(9)\n    gives     0\n    expected  81"),
        (49, "wrong", "itself"),
        (..., "unanswered", ""),
        (lambda n: "x", "wrong", "(3)\n    gives     'x'"),
    ],
)
def test_a_function_is_tried_on_random_inputs(answer, state, words):
    outcome = SQUARE.judge(answer, SQUARE.case())
    assert outcome.state == state and words in outcome.message


def test_an_unfinished_function_is_no_answer():
    def stub(n):
        raise NotImplementedError

    assert SQUARE.judge(stub, SQUARE.case()).state == "unanswered"


def test_a_judge_that_raises_means_a_wrong_answer():
    check = judged("x.3", lambda answer, case: 1 / answer and checking.RIGHT)
    assert check.judge(2, check.case()).state == "right"
    assert "ZeroDivisionError" in check.judge(0, check.case()).message
    assert check.judge(None, check.case()).state == "unanswered"


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x.mul_(cos).add_(turned.mul_(sin))


def normed(x, weight, eps):
    return x.mul_((x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()).mul_(weight)


def attended(q, k, v):
    q /= q.shape[-1] ** 0.5
    return (q @ k.T).masked_fill_(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf).softmax(
        -1
    ) @ v


def decoded(pieces):
    data = b""
    while pieces:
        data += pieces.pop(0)
    return data.decode("utf-8", "replace")


def until(stream, stop):
    del stream[next(i for i, token in enumerate(stream) if token in stop) :]
    return stream


def accepted(guesses, best):
    kept = []
    while guesses and guesses.pop(0) == best[0]:
        kept.append(best.pop(0))
    return [*kept, best[0]]


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("03.2", rotated),
        ("03.3", normed),
        ("02.2", attended),
        ("01.2", decoded),
        ("01.5", until),
        ("11.5", accepted),
    ],
)
def test_a_right_function_may_change_what_it_is_given(id, answer):
    check = checking.find(id)
    assert check.judge(answer, check.case()).state == "right"


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("03.2", lambda x, cos, sin: x.zero_()),
        ("03.3", lambda x, weight, eps: x.zero_()),
        ("02.2", lambda q, k, v: v.zero_()),
        ("01.3", lambda chances, p: chances.clear() or set()),
        ("11.4", lambda cached, new: cached.clear() or new.__setitem__(slice(None), [1]) or 0),
        ("11.5", lambda g, b: g.clear() or b.__setitem__(slice(None), [7]) or [7]),
    ],
)
def test_a_wrong_function_cannot_make_itself_right_by_changing_its_input(id, answer):
    check = checking.find(id)
    assert check.judge(answer, check.case()).state == "wrong"


class Odd:
    """An object of which nothing can be learned."""

    def refuse(self, *_):
        raise ValueError("no")

    __eq__ = __repr__ = __str__ = __hash__ = __len__ = __iter__ = refuse


RECURSIVE = [1]
RECURSIVE.append(RECURSIVE)


@pytest.mark.parametrize(
    "id", ["05.1", "05.2", "05.5", "04.5", "08.2", "01.3", "03.5", "13.4", "05.q1"]
)
@pytest.mark.parametrize(
    "odd",
    [
        Odd(),
        (Odd(), Odd()),
        lambda *_: Odd(),
        (10**400, 1),
        RECURSIVE,
        torch.ones(2, device="meta"),
        pytest.fail,
        lambda *_: pytest.skip("x"),
        lambda *_: exit(3),
        lambda *_: RECURSIVE,
        lambda *_: torch.ones(2, device="meta"),
        lambda *_: (_ for _ in ()).throw(KeyError(Odd())),
    ],
)
def test_no_answer_is_so_odd_that_check_raises(id, odd, capsys):
    result = session.answer(id, odd) if "q" in id else session.check(id, odd)
    assert result.state == "wrong" and capsys.readouterr().out.startswith(f"{id}: not yet.")


def test_only_the_reader_interrupts_a_check():
    def interrupted(P, N):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.check("05.2", interrupted)


def test_two_tensors_of_one_shape_are_told_apart_in_words():
    check = checking.find("11.1")

    def right(n, T):
        return torch.ones(T, n + T, dtype=torch.bool).tril(n)

    floats = check.judge(lambda n, T: right(n, T).float(), check.case()).message
    assert (
        "the right numbers as torch.float32" in floats and "they have to be torch.bool\n" in floats
    )
    one = check.judge(lambda n, T: right(n, T) if T > 1 else None, check.case())
    assert one.state == "wrong" and "returned None" in one.message and "(n=0, T=1)" in one.message
    check = checking.find("03.2")
    message = check.judge(
        lambda x, cos, sin: rotated(x, cos, sin) + torch.tensor([0.0, 1] * (x.shape[-1] // 2)),
        check.case(),
    ).message
    assert re.search(
        r"yours gives (\S+) \(torch.float32\) at \[0, 0, 0, 1\], but it is (?!\1)", message
    )


def test_a_case_shows_its_numbers_unless_they_are_the_answer():
    assert repr(checking.find("05.1").case()) == "Case(P=5, N=4)"
    hidden = [check for _, check in EXERCISES if check.hidden]
    assert [check.id for check in hidden] == ["04.4", "07.2"]
    assert all(repr(check.case()) == "Case(hidden)" == str(check.case(3)) for check in hidden)


@pytest.mark.parametrize(
    "check", [c for _, c in EXERCISES if c.parameters and c.mistakes], ids=lambda check: check.id
)
def test_no_draw_makes_two_mistakes_one(check):
    for values in itertools.product(*check.parameters.values()):
        case = checking.Case(dict(zip(check.parameters, values, strict=True)))
        names = [check.judge(mistake.gives(case), case).mistake for mistake in check.mistakes]
        assert names == [mistake.name for mistake in check.mistakes], case


def rounded(x, bits, dim, most=8):
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2 ** min(bits, most) - 1)
    return ((x - low) / step).round() * step + low


def symmetric(x, bits, dim):
    """One scale for both signs, no zero point."""
    step = x.abs().amax(dim, keepdim=True) / max(1, 2 ** (bits - 1) - 1)
    return (x / step).round() * step


def floored(x, bits, dim):
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return ((x - low) / step + 1e-9).floor() * step + low


@pytest.mark.parametrize(
    ("answer", "mistake"),
    [
        (rounded, ""),
        (lambda x, bits, dim: x if bits > 2 else rounded(x, bits, dim), "levels"),
        (lambda x, bits, dim: x if bits > 4 else rounded(x, bits, dim), "levels"),
        (lambda x, bits, dim: rounded(x, 8 if bits > 2 else 2, dim), "levels"),
        (lambda x, bits, dim: rounded(x, bits, dim, most=4), "error"),
        (lambda x, bits, dim: symmetric(x, bits, dim), "ends"),
        (lambda x, bits, dim: floored(x, bits, dim), "floor"),
        (lambda x, bits, dim: rounded(x, bits, (dim + 1) % 4), "dimension"),
        (lambda x, bits, dim: rounded(x, bits, (0, 1, 2, 3)), "one scale"),
        (lambda x, bits, dim: x / 0 * 0, ""),
    ],
)
def test_rounding_is_tried_with_more_values_than_levels(answer, mistake):
    check = checking.find("13.3")
    outcome = check.judge(answer, check.case())
    assert (outcome.state, outcome.mistake) == ("right" if answer is rounded else "wrong", mistake)
    assert mistake or answer is rounded or "NaN" in outcome.message
    assert mistake != "levels" or "= 2**bits" in outcome.message


def one_kv_head(model, change=None):
    config = replace(model.config, num_key_value_heads=1)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = (
                weights[name].view(model.config.num_key_value_heads, config.head_dim, -1).mean(0)
            )
        elif change and change in name:
            weights[name] = torch.randn(
                weights[name].shape, generator=torch.Generator().manual_seed(0)
            )
    made = Qwen3(config).requires_grad_(False).eval()
    made.load_state_dict(weights)
    return made


class Store:
    """A store of caches by their tokens; `touched`: which calls count as a use."""

    touched = ("get", "put")

    def __init__(self, config, entries):
        self.config, self.entries, self.kept = config, entries, {}

    def get(self, tokens):
        def shared(other):
            return next(
                (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b),
                min(len(tokens), len(other)),
            )

        best = max(self.kept, key=shared, default=())
        n = min(shared(best), len(tokens) - 1)
        if not n:
            return nanokv.make_cache("dict", self.config), 0
        if "get" in self.touched:
            self.kept[best] = self.kept.pop(best)
        cache = self.kept[best].fork()
        cache.truncate(n)
        return cache, n

    def put(self, tokens, cache):
        if "put" in self.touched:
            self.kept.pop(tuple(tokens), None)
        self.kept[tuple(tokens)] = cache.fork()
        while len(self.kept) > self.entries:
            del self.kept[next(iter(self.kept))]


@pytest.mark.parametrize(
    ("touched", "mistake"), [(("get", "put"), ""), (("put",), "get no use"), ((), "order")]
)
def test_a_store_forgets_what_was_used_least_recently(touched, mistake):
    check, store = checking.find("13.4"), type("Mine", (Store,), {"touched": touched})
    assert check.judge(("prefix", store), check.case()).mistake == mistake
    assert check.judge(("prefix", store), check.case()).state == ("wrong" if mistake else "right")


@pytest.mark.parametrize(
    "change", [None, "embed_tokens", "o_proj", "q_norm", "1.input_layernorm", "down_proj"]
)
def test_a_converted_model_keeps_every_other_weight(change):
    check = checking.find("13.4")
    outcome = check.judge(("mqa", lambda model: one_kv_head(model, change)), check.case())
    assert (outcome.state, outcome.mistake) == (("wrong", "others") if change else ("right", ""))


@pytest.mark.parametrize(
    ("weights", "state"),
    [
        ([1, 2, 3, 4] * 2, "right"),
        ([1e6, 2, 3, 4] * 2, "right"),
        ([1e-3, 2e-3, 1e-3, 3e-3] * 2, "right"),
        ([1e6, 1, 2, 3, 1e6, 5, 6, 7], "wrong"),
        ([1] * 7 + [1.0001], "wrong"),
    ],
)
def test_weights_that_commute_with_the_rotation_are_told_whatever_their_size(weights, state):
    check = checking.find("03.5")
    assert check.judge(weights, check.case()).state == state


def test_a_profile_of_one_token_has_no_time_between_tokens():
    def profile(start, clock):
        list(start())
        times = [clock(), *(clock() for _ in start())]
        steps = sorted(b - a for a, b in itertools.pairwise(times[1:]))
        return times[1] - times[0], steps[len(steps) // 2] if steps else None

    check = checking.find("09.2")
    assert check.judge(profile, check.case()).state == "right"
    assert check.judge(lambda start, clock: ..., check.case()).state == "unanswered"


def test_a_leak_test_has_to_look_at_every_position():
    def leaks(forward, ids, V, places=range(1, 8)):
        before = forward(ids)
        for place in places:
            changed = ids.clone()
            changed[0, place] = (changed[0, place] + 1) % V
            if not torch.allclose(forward(changed)[:, :place], before[:, :place], atol=1e-4):
                return True
        return False

    check = checking.find("02.4")
    assert check.judge(leaks, check.case()).state == "right"
    early = check.judge(lambda forward, ids, V: leaks(forward, ids, V, [1]), check.case())
    assert (early.state, early.mistake) == ("wrong", "late row missed")


def test_a_quiz_question_explains_the_letter_that_was_chosen():
    question = Question(
        "x.q1", "why?", {"a": ("…", "no, because"), "b": ("…", "yes, because")}, seal("x.q1", "b")
    )
    assert question.judge(" B ") == checking.Outcome("right", "yes, because")
    assert question.judge("a") == checking.Outcome("wrong", "no, because", "a")
    assert question.judge("z").state == "wrong" and question.judge(...).state == "unanswered"


@pytest.mark.parametrize("seed", SEEDS[1:])
@pytest.mark.parametrize(("number", "check"), EXERCISES, ids=lambda v: getattr(v, "id", v))
def test_every_registered_mistake_is_recognised(number, check, seed):
    """In the course's numbers and in variants: the right answer is right, each mistake is wrong and has its name."""
    assert check.id.startswith(number)
    for case in (check.case(None), check.case(seed)):
        if check.key:
            assert check.judge(check.key(case), case).state == "right"
        for mistake in check.mistakes:
            answer = (
                mistake.gives
                if check.judge(1, case).message.startswith("hand in")
                else mistake.gives(case)
            )
            outcome = check.judge(answer, case)
            assert (outcome.state, outcome.mistake) == ("wrong", mistake.name), (seed, answer)


def to_digits(answer, digits):
    if isinstance(answer, list | tuple):
        return [to_digits(item, digits) for item in answer]
    return float(f"{answer:.{digits}g}")


@pytest.mark.parametrize("id", ["02.1", "02.3", "08.2", "09.1", "09.3", "09.5", "13.2"])
def test_three_digits_are_enough_and_a_mistake_stays_one(id):
    check = checking.find(id)
    for values in itertools.product(*check.parameters.values()):
        case = checking.Case(dict(zip(check.parameters, values, strict=True)))
        assert check.judge(to_digits(check.key(case), 3), case).state == "right", case
        for mistake in check.mistakes:
            assert check.judge(to_digits(mistake.gives(case), 4), case).mistake == mistake.name, (
                case,
                mistake,
            )


def test_a_layer_that_is_right_is_said_to_be_right_whatever_the_cause():
    check = checking.find("04.4")
    for seed in SEEDS:
        case = check.case(seed)
        layer, cause = check.key(case)
        last = case.config.num_hidden_layers - 1
        for letter in "abcdef":
            layers = torch.tensor(layer), last, layer + 1, layer - 1
            found = [check.judge((at, letter.upper()), case) for at in layers]
            right = ("right", "") if letter == cause else ("wrong", "other cause")
            assert (found[0].state, found[0].mistake) == right
            assert [one.mistake for one in found[1:]] == ["last layer", "counted from 1", ""]
        assert cause not in check.judge((layer, "f"), case).message.split()
    assert (
        "a pair" in check.judge((2, "x"), check.case()).message
        and "a pair" in check.judge(2, check.case()).message
    )


@pytest.mark.parametrize("number", [1e-3, "0.001", torch.tensor(1e-3), torch.tensor(1e-3).numpy()])
def test_a_tolerance_is_a_number_of_any_kind(number):
    check = checking.find("04.3")
    assert check.judge(number, check.case()).state == "right"


@pytest.mark.parametrize(
    ("id", "sets", "names"),
    [
        ("04.5", [{"theta"}, {"head"}, ["eps", "head"]], "theta, eps, head"),
        ("05.5", [{"K"}, {"q", "v"}, []], "Q, K, V"),
    ],
)
def test_only_what_is_no_set_of_the_names_is_told_the_form(id, sets, names):
    check = checking.find(id)
    for answer in sets:
        outcome = check.judge(answer, check.case())
        assert outcome.state == "wrong" and "Experiment" in outcome.message, answer
    for answer in ("head", 3, {"thetta"}, {"K", 3}, {"Q": 1}, ["K", "K"]):
        assert check.judge(answer, check.case()).message.endswith(
            f"all or some or none: {names}"
        ), answer


def test_what_is_not_a_number_is_called_so():
    nan = float("nan")
    check = checking.find("08.2")
    assert (
        check.judge((nan, 1), check.case()).message
        == check.judge(torch.tensor([1, nan]), check.case()).message
    )
    assert "NaN" in check.judge((nan, 1), check.case()).message
    check = checking.find("02.2")
    half = check.judge(lambda q, k, v: torch.cat((q[:1] * nan, v[1:])), check.case()).message
    assert "yours gives NaN (torch.float32) at [0, 0]" in half


@pytest.mark.parametrize(
    ("id", "answer", "words"),
    [
        ("02.2", lambda q, k, v: scores(q, k).softmax(0) @ v, "down the columns"),
        ("02.2", lambda q, k, v: scores(k, q).softmax(-1) @ v, "exchanged"),
        ("03.2", lambda x, cos, sin: rotated(x, sin, cos), "exchanged"),
        ("03.3", lambda x, weight, eps: normed(x, weight, 0), "eps is missing"),
        (
            "03.3",
            lambda x, weight, eps: weight * x / (x.square().mean(1, keepdim=True) + eps),
            "root is missing",
        ),
    ],
)
def test_a_slip_in_a_formula_is_named(id, answer, words):
    check = checking.find(id)
    assert words in check.judge(answer, check.case()).message


def scores(q, k):
    hidden = torch.ones(len(q), len(k)).triu(1).bool()
    return (q @ k.T / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_question_has_one_right_letter_and_words_for_all(number):
    questions = checking.exercises(number).QUESTIONS
    assert len(questions) >= 3
    for question in questions:
        assert question.id.startswith(f"{number}.q") and len(question.options) >= 3
        assert [question.judge(letter).state for letter in question.options].count("right") == 1
        assert all(text and comment for text, comment in question.options.values())


# --- what a notebook prints ---------------------------------------------------------------------------------------


def test_check_prints_and_returns_and_never_raises(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "log"))
    assert not session.check("05.1", ...)
    wrong = session.check("05.1", (5 * 4, 8))
    assert not wrong and wrong.mistake == "prompt every step, no growth" and "grows" in str(wrong)
    assert session.check("05.1", (5 + 6 + 7 + 8, 8))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 84  # JupyterLab would cut a longer line in a word
    said = f"05.1: not answered yet. {wrong} 05.1: right."
    assert printed.split() == said.split() and "\n05.1: right." in printed
    assert [event["state"] for event in log.read(tmp_path / "log")] == [
        "unanswered",
        "wrong",
        "right",
    ]


def test_what_is_typed_in_again_stays_on_its_line():
    code = "    try       f(" + ", ".join(f"tokens_{i}={i}" for i in range(20)) + ")"
    lines = feedback.wrapped(f"{'a long sentence ' * 8}\n{code}").split("\n")
    assert lines[-1] == code and len(lines) == 3 and lines[1].startswith("    ")


def test_a_cell_that_is_wider_than_jupyterlab_is_an_error(tmp_path):
    text = SOURCES[0].read_text("utf-8")
    wide = text.replace("\n# %%\n", f"\n# %%\nx = '{'-' * 84}'\n", 1)
    (tmp_path / SOURCES[0].name).write_text(wide, "utf-8")
    with pytest.raises(CourseError, match="more than 88 columns of code: x = '"):
        twins.read(tmp_path / SOURCES[0].name)


def test_an_id_that_does_not_exist_is_the_authors_error():
    with pytest.raises(CourseError, match=r"no exercise '05.99'"):
        session.check("05.99", 1)
    with pytest.raises(CourseError, match="no notebook '77'"):
        session.check("77.1", 1)


def test_a_slow_cell_takes_less_of_a_larger_model(monkeypatch):
    model = nanokv.load("tiny")[0]
    monkeypatch.setitem(session._STATE, "model", model)
    assert session.sized(1024, 256) == 1024 and costs.parameters(model.config) == session.BUNDLED
    deeper = replace(model.config, num_hidden_layers=2 * model.config.num_hidden_layers)
    monkeypatch.setitem(session._STATE, "model", SimpleNamespace(config=deeper))
    assert session.sized(1024, 256) == 1024 * session.BUNDLED // costs.parameters(deeper) > 512
    monkeypatch.setitem(session._STATE, "model", SimpleNamespace(config=FAMILY["Qwen/Qwen3-0.6B"]))
    assert session.sized(1024, 256) == 256
    monkeypatch.setitem(
        session._STATE, "model", SimpleNamespace(config=replace(deeper, num_hidden_layers=1))
    )
    assert session.sized(1024, 256) == 1024


def test_a_notebook_may_take_the_bundled_model_always(monkeypatch, capsys):
    monkeypatch.setattr(session, "_STATE", {})
    monkeypatch.setenv("NANOKV_MODEL", "a/large-one")
    model, _ = session.start("07", model="tiny")
    assert model.config.num_hidden_layers == 6
    assert "This notebook takes tiny, not a/large-one" in capsys.readouterr().out
    monkeypatch.delenv("NANOKV_MODEL")
    session.start("07", model="tiny")
    assert "This notebook" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["my.gguf", "models/own", "./my.gguf"])
def test_a_model_is_found_from_where_jupyter_was_started_too(name, tmp_path, monkeypatch):
    """`NANOKV_MODEL=my.gguf make notebooks`: the kernel runs in the folder below."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert session.located(name) == name, "there is none: the loader says so"
    (tmp_path / name).write_text("")
    assert (tmp_path / name).samefile(session.located(name))
    assert (
        session.located("tiny") == "tiny"
        and session.located("a/name-on-the-hub") == "a/name-on-the-hub"
    )
    (tmp_path / "notebooks" / "models").mkdir()
    (tmp_path / "notebooks" / name).write_text("")
    assert session.located(name) == name, "the one beside the notebook comes first"


def test_a_run_elsewhere_gets_the_whole_path_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # a folder of that name is not the bundled model
    for name, expected in (("my.gguf", "my.gguf"), ("", ""), ("a/b", "a/b"), ("tiny", "tiny")):
        monkeypatch.setenv("NANOKV_MODEL", name)
        assert running._environment(tmp_path, {})["NANOKV_MODEL"] == expected
    (tmp_path / "my.gguf").write_text("")
    monkeypatch.setenv("NANOKV_MODEL", "my.gguf")
    assert running._environment(tmp_path, {})["NANOKV_MODEL"] == str(tmp_path / "my.gguf")
    assert running._environment(tmp_path, {"NANOKV_MODEL": "b"})["NANOKV_MODEL"] == "b"


@pytest.mark.parametrize("name", ["nope", "./my.gguf", "\x00", "\N{SNOWMAN}" * 5000])
def test_a_model_that_does_not_exist_is_told_with_the_way_back(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session.os, "environ", {"NANOKV_MODEL": name})
    with pytest.raises(CourseError) as told:
        session.start("05")
    assert (
        name[:9] in str(told.value)
        and len(str(told.value)) < 3000
        and "without NANOKV_MODEL" in told.value.hint
    )


def test_another_model_is_told_what_to_do_when_a_cell_is_slow(monkeypatch, capsys):
    import nanokv.loading

    tiny = nanokv.loading.load("tiny")
    monkeypatch.setattr(nanokv.loading, "load", lambda name, **_: tiny)
    monkeypatch.setenv("NANOKV_MODEL", "a/large-one")
    session.start("05")
    said = capsys.readouterr().out
    assert (
        'course.start("05", model="tiny")' in said
        and "make book" in said
        and "of the bundled model" in said
    )
    monkeypatch.delenv("NANOKV_MODEL")
    session.start("05")
    assert "Too slow?" not in capsys.readouterr().out


def test_the_numbers_of_another_exercise_are_told_apart():
    """All cells were run, so `case` is that of the last exercise; then somebody answers the first."""
    case = checking.find("00.4").case()
    with pytest.raises(
        AttributeError, match=r"no 'a' among the numbers of this case \(n, C, D\).*course\.case"
    ):
        case.a  # noqa: B018
    assert case.n == 5 and not hasattr(case, "_repr_html_")


def test_a_prediction_stands_beside_the_measurement(capsys):
    session._PREDICTIONS.clear()
    session.reveal("x.a", 48.0, unit="times")
    session.predict("x.a", ...)
    session.predict("x.a", "2", unit="times")
    session.reveal("x.a", torch.tensor(48.0))
    said = capsys.readouterr().out.splitlines()
    assert "You made no prediction" in said[0] and "no prediction yet" in said[1]
    assert said[3] == "x.a: you predicted 2 times, it is 48 times: 24 times too low."


def test_a_prediction_that_is_taken_back_is_gone(capsys):
    session._PREDICTIONS.clear()
    session.predict("x.a", 5)
    session.predict("x.a", ...)
    session.reveal("x.a", 48)
    assert capsys.readouterr().out.splitlines()[-1] == "x.a: it is 48. You made no prediction."


def test_a_negative_prediction_is_refused_where_it_makes_no_sense(capsys):
    session._PREDICTIONS.clear()
    session.predict("x.a", 7, unit="lists")
    session.predict("x.a", "-5", unit="lists")
    assert not session._PREDICTIONS, "the earlier one is taken back too"
    assert capsys.readouterr().out.endswith(
        "x.a: no prediction yet. -5 lists is impossible: the number is 0 or more.\n"
    )
    session.predict("x.a", 0)
    session.predict("x.b", -5, unit="percent", signed=True)
    assert session._PREDICTIONS == {"x.a": (0, ""), "x.b": (-5, "percent")}


@pytest.mark.parametrize("kind", [set, list, tuple, frozenset, dict.fromkeys, iter])
def test_a_bet_may_be_collected_in_anything_and_loses_no_name_silently(kind, capsys):
    names = {"start_pos_restarts": 1, "cached_queries": 2}
    assert session.chosen(kind(["cached_queries", "Start_pos_restarts "]), names) == set(names)
    assert capsys.readouterr().out == ""
    assert session.chosen(kind(["cached_querys", "cached_queries"]), names) == {"cached_queries"}
    assert capsys.readouterr().out == "not among the names, so left out: cached_querys\n"
    assert (
        session.chosen("cached_queries", names) == {"cached_queries"}
        and session.chosen([], names) == set()
    )
    assert [session.chosen(blank, names) for blank in (..., None, 3, ["cached_queries", ...])] == [
        None
    ] * 4


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (10920.6, "10,921"),
        (1.092e4, "10,920"),
        (123456.7, "123,457"),
        (48.128, "48.13"),
        (1234.5, "1,234"),
        (5, "5"),
        (0.0213, "0.0213"),
        (2.4e-5, "2.4e-05"),
        (1e20, "1e+20"),
        (math.inf, "inf"),
    ],
)
def test_a_quantity_is_written_as_people_do(number, words):
    assert session.quantity(number, "times") == f"{words} times"


def test_a_comma_is_no_decimal_point(capsys):
    session._PREDICTIONS.clear()
    session.predict("x.a", "0,5")
    session.predict("x.a", 10**400)
    assert capsys.readouterr().out.count("no prediction yet") == 2 and not session._PREDICTIONS


@pytest.mark.parametrize(
    ("guess", "measured", "words"),
    [
        (5, 5, "exactly right"),
        (5.2, 5, "within a tenth"),
        (6, 5, "the right size, 1.2 times too high"),
        (1, 100, "100 times too low"),
        (0, 3, "too low by 3"),
        (8, 0, "too high by 8"),
        (-1, 1, "sign"),
        (1e9, 1, "too high by 10^9"),
        (1e-320, 5, "too low by 10^321"),
        (5, math.inf, "too low"),
        (1e300, 1e-300, "too high by 10^600"),
        (-2e-300, -1e-300, "the right size, 2 times too high"),
    ],
)
def test_the_comment_on_a_prediction(guess, measured, words):
    assert words in session.comment(guess, measured)


def test_a_picture_needs_words():
    from nanokv.school.course import show, subplots

    fig, _ = subplots()
    with pytest.raises(CourseError, match="text alternative is too short"):
        show(fig, alt="a plot")


# --- the twins ----------------------------------------------------------------------------------------------------


@each_source
def test_the_committed_student_notebook_is_what_its_source_gives(path):
    """`nanokv course build` writes it."""
    committed = NOTEBOOKS / f"{path.stem}.ipynb"
    assert committed.read_text("utf-8") == twins.to_text(twins.read(path).student())


def test_no_notebook_is_left_without_a_source():
    assert {p.stem for p in NOTEBOOKS.glob("*.ipynb")} == {p.stem for p in SOURCES} and SOURCES


@each_source
def test_a_student_notebook_holds_nothing_that_it_should_not(path):
    source = twins.read(path)
    notebook = source.student()
    text = "".join("".join(cell["source"]) + "\n" for cell in notebook["cells"])
    stubs = {
        line.strip() for c in source.cells if c.role != "solution" for line in c.text.splitlines()
    }
    shown = {line.strip() for line in text.splitlines()}
    for cell in source.cells:
        if cell.role == "solution":
            lines = {line.strip() for line in cell.text.splitlines()} - stubs
            assert [line for line in lines if len(line) > 8 and line in shown] == []
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    everything = "".join("".join(cell["source"]) + "\n" for cell in code)
    assert not re.search(r"\bpip\b|^\s*[!%]|==\s*\d+\.\d+", everything, re.MULTILINE)
    assert not re.search(r"(?<![\w/.])/(home|work|tmp|Users|root|usr|content)\b|[A-Z]:\\", text)
    assert "".join(notebook["cells"][0]["source"]).startswith(f"# {source.number} · ")
    assert "github.com/nanokv" not in text  # a repository that nobody has
    assert 3 <= len(set(re.findall(r'course\.check\("(\d\d\.\d+)"', everything))) <= 7


@each_source
def test_every_exercise_is_used_once(path):
    source = twins.read(path)
    code, module = source.code(), checking.exercises(source.number)
    used = re.findall(r'course\.(?:check|answer)\(\s*"([\w.]+)"', code)
    assert sorted(used) == sorted(item.id for item in (*module.CHECKS, *module.QUESTIONS))
    assert f'course.quiz("{source.number}")' in code
    predicted, revealed = (
        re.findall(rf'course\.{f}\(\s*"([\w.]+)"', code) for f in ("predict", "reveal")
    )
    assert predicted and predicted == revealed and len(set(predicted)) == len(predicted)


@each_source
def test_every_figure_in_the_text_is_recorded_and_every_number_marked(path):
    source = twins.read(path)
    recorded = set(re.findall(r'course\.figure\(\s*f?"([\w.-]+)"', source.code()))
    quoted = {id for id, _, _ in prose.figures(source.prose())}
    assert quoted <= recorded, "quoted, but no cell records it"
    assert all(id.startswith(f"{source.number}.") for id in recorded)
    assert prose.unmarked(source.prose()) == []
    assert "$" not in prose.FREE.sub("", source.prose()), "formulas are Unicode or code"


@pytest.mark.parametrize(
    "path", [*twins.sources(NOTEBOOKS), *sorted(NOTEBOOKS.rglob("*.md"))], ids=lambda p: p.name
)
def test_no_line_of_the_text_begins_with_a_mark(path):
    """To Markdown such a line is HTML: it tears its paragraph, and `code` in it is shown with its backticks."""
    text = twins.read(path).prose() if path.suffix == ".py" else path.read_text("utf-8")
    text = re.sub("```.*?```", "", text, flags=re.DOTALL)
    assert [line for line in text.splitlines() if line.lstrip().startswith("<!--")] == []


@each_source
def test_a_command_to_be_typed_is_that_of_the_environment_and_parses(path):
    """The lines of a bash block: `.venv/bin/nanokv`, as in the README."""
    from nanokv.apps import cli

    for block in re.findall(
        r"^```bash\n(.*?)^```", twins.read(path).prose(), re.MULTILINE | re.DOTALL
    ):
        for line in block.splitlines():
            program, name, *words = shlex.split(line, comments=True)
            assert program == ".venv/bin/nanokv", line
            cli.make_parser(name, importlib.import_module(cli.COMMANDS[name][0])).parse(words)


@each_source
def test_links_to_other_pages_lead_somewhere(path):
    text = twins.read(path).prose()
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", text)
    assert any(link.startswith("glossary.md#") for link in links)
    for link in links:
        name, _, anchor = link.partition("#")
        if not name.endswith(".ipynb"):  # the next notebook may not be written yet
            headings = re.findall(r"^#+ (.+)$", (NOTEBOOKS / name).read_text("utf-8"), re.MULTILINE)
            assert not anchor or anchor in {slug(heading) for heading in headings}, link


def test_the_glossary_has_each_term_once_and_in_order():
    terms = re.findall(r"^## (.+)$", (NOTEBOOKS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    assert len(terms) >= 15 and terms == sorted(set(terms), key=str.casefold)


PLAIN = """# %% [markdown]
# # 05 · T
# ## What you will be able to do
# ## Predict
# ## What the articles say
# ## Exercises
# ## Quiz
# ## Further reading
# ## Next

# %%
course.start("05")

# %% tags=["exercise"]
x = ...

# %% tags=["solution"]
x = 42 + 42
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# # 05 · T", "# # 06 · T", "first cell"),
        ("# ## Quiz\n", "", "sections"),
        ('start("05")', 'start("06")', "start"),
        ('# %% tags=["solution"]\nx = 42 + 42\n', "", "its solution right after"),
        ('# %% tags=["exercise"]\nx = ...\n', "", "right after its exercise"),
        (
            "\ncourse.start",
            '\ncourse.figure("05.a", 1)\ncourse.start',
            "course.show, figure or confirm",
        ),
        (
            "# %%\ncourse.start",
            '# %% tags=["hide-input"]\ncourse.start',
            "course.show, figure or confirm",
        ),
        (
            "# %%\ncourse.start",
            '# %% tags=["hide-input"]\ncourse.figure(course.reveal())\ncourse.start',
            "learner",
        ),
        ('"exercise"]', '"exercise", "hide-input"]', "tags"),
    ],
)
def test_a_malformed_source_is_refused(tmp_path, old, new, words):
    path = tmp_path / "05_t.py"
    path.write_text(PLAIN)
    source = twins.read(path)
    assert "42 + 42" in json.dumps(source.solution()) and "42 + 42" not in json.dumps(
        source.student()
    )
    path.write_text(PLAIN.replace(old, new))
    with pytest.raises(CourseError, match=words):
        twins.read(path)


FOLDED = '# %% tags=["hide-input"]\ncourse.figure("05.a", 48)\n\n# %% tags=["exercise"]'


def test_what_draws_or_keeps_books_is_folded_in_both_twins(tmp_path):
    path = tmp_path / "05_t.py"
    path.write_text(PLAIN.replace('# %% tags=["exercise"]', FOLDED))
    source = twins.read(path)
    for twin in (source.student(), source.solution()):
        folded = [
            cell
            for cell in twin["cells"]
            if cell["metadata"].get("jupyter") == {"source_hidden": True}
        ]
        assert [(cell["metadata"]["tags"], cell["source"]) for cell in folded] == [
            (["hide-input"], ['course.figure("05.a", 48)'])
        ]


def test_a_book_of_one_chapter_lists_what_is_there(tmp_path, monkeypatch, capsys):
    """The chapters of an earlier run stay, and only what is written again is asked for; a wrong name is told."""
    from nanokv.apps.cli import main

    ran = []

    def run(notebook, limit):
        ran.append(notebook)
        return SimpleNamespace(error="", stderr="", notebook=notebook)

    monkeypatch.setattr(book.running, "run", run)
    monkeypatch.setattr(book, "page", lambda source, done, model: "<h1>A page</h1>")
    command = ["course", "book", "--folder", str(NOTEBOOKS), "-o", str(tmp_path)]

    def listed():
        page = (tmp_path / "index.html").read_text("utf-8")
        return re.findall(r'<li><a href="(\d\d)_', page)

    assert main([*command, "06"]) == 0 and len(ran) == 1 and listed() == ["06"]
    written = set(capsys.readouterr().out.split())
    names = set(book.file_names(NOTEBOOKS, ["06"])) - {"style.css"}
    assert written == {str(tmp_path / name) for name in names}
    assert main([*command, "05", "--force"]) == 0 and len(ran) == 2 and listed() == ["05", "06"]
    assert main([*command, "77"]) == 2 and "no notebook 77" in capsys.readouterr().err


def test_a_page_of_the_book_folds_code_on_demand_and_scrolls_tables_in_their_box():
    import nbformat.v4 as form

    folded = form.new_code_cell(
        "course.show(fig)",
        metadata={"tags": ["hide-input"]},
        outputs=[form.new_output("stream", name="stdout", text="In words")],
    )
    page = book.render(
        form.new_notebook(
            cells=[
                form.new_code_cell("decode()"),
                folded,
                form.new_markdown_cell("| a |\n|---|\n| 1 |"),
            ]
        )
    )
    hidden = re.search(r"<details.*?</details>", page, re.DOTALL)
    assert "Code of the figure</summary>" in hidden[0] and "show" in hidden[0]
    assert "decode" in page[: hidden.start()] and "In words" in page[hidden.end() :]
    assert re.search(r'<div class="scroll" tabindex="0"><table>.*</table></div>', page, re.DOTALL)


@pytest.mark.parametrize(
    ("printed", "scrolls"),
    [
        ("S   without   with\n16      136     16", True),
        ("claim 2.9: it is 64\n    wrong. It is 128.", False),
    ],
)
def test_printed_columns_scroll_and_printed_sentences_wrap(printed, scrolls):
    import nbformat.v4 as form

    cell = form.new_code_cell("x", outputs=[form.new_output("stream", name="stdout", text=printed)])
    page = book.render(form.new_notebook(cells=[cell]))
    assert ('output_text columns"' in page) == scrolls and printed.splitlines()[-1] in page


def test_what_is_printed_between_two_pictures_is_one_box():
    def output(kind, text=""):
        return {"output_type": kind, "text": text, "name": "stdout"}

    sent = [
        output("stream", "a"),
        output("stream", "b"),
        output("display_data"),
        output("stream", "c"),
    ]
    joined = running.joined([*sent, output("stream", "d") | {"name": "stderr"}])
    assert [o["text"] for o in joined] == ["ab", "", "c", "d"]


@pytest.mark.parametrize(
    ("quoted", "recorded", "allowed", "fits"),
    [
        ("48", 48.13, "", True),
        ("48.1", 48.13, "", True),
        ("48.2", 48.13, "", False),
        ("6,112", 6112, "", True),
        ("6,113", 6112, "", False),
        ("2e-5", 2.4e-5, "", True),
        ("2e-5", 2.6e-5, "", False),
        ("−3", -3.2, "", True),
        ("12", 30, "x3", True),
        ("12", 40, "x3", False),
        ("12", -12, "x3", False),
        ("4", 5.0, "above", True),
        ("4", 3.9, "above", False),
        ("4", 3.9, "below", True),
        ("4", 5.0, "below", False),
        ("about 5", 5, "", False),
        ("1", math.inf, "", False),
    ],
)
def test_a_quoted_figure_agrees_to_the_digits_written(quoted, recorded, allowed, fits):
    assert prose.agrees(quoted, recorded, allowed) == fits


def test_unmarked_numbers_are_found():
    text = "takes 48 times, <!--fig 05.a-->7<!--/fig--> times, `64 tokens`, <!--def-->112<!--/def--> KiB, 3.5 ms, §3.2"
    assert prose.unmarked(text) == ["48 times", "3.5 ms"]
    assert prose.figures("<!--fig 05.a x3-->7<!--/fig-->") == [("05.a", "x3", "7")]


# --- variants and grades ------------------------------------------------------------------------------------------


def test_variants_differ_and_the_key_holds_their_answers(tmp_path):
    key = variants.write(
        [p for p in SOURCES if p.stem[:2] == "05"], ["Ada L.", "", "Bo/b"], 7, tmp_path
    )
    lines = key.read_text().splitlines()
    assert len(lines) == 3 and lines[1].startswith("Ada_L,05,") and lines[2].startswith("Bo_b,05,")
    seeds = grading.read_seeds(key)
    notebook = json.loads((tmp_path / "05_the_waste" / "Ada_L.ipynb").read_text())
    assert f'course.start("05", seed={seeds["Ada_L", "05"]})' in json.dumps(notebook).replace(
        '\\"', '"'
    )
    assert (
        len(set(seeds.values())) == 2 and variants.seed_of(7, "05", "Ada_L") == seeds["Ada_L", "05"]
    )
    case = checking.find("05.1").case(seeds["Ada_L", "05"])
    assert f"P = {case.P}, N = {case.N} → [" in lines[1]


def test_two_students_of_one_name_are_refused(tmp_path):
    with pytest.raises(CourseError, match="not all different"):
        variants.write(SOURCES[:1], ["A b", "A/b"], 7, tmp_path)


def test_the_last_answer_counts_and_another_variant_does_not():
    events = [
        {"event": "check", "id": "05.1", "state": "right", "seed": 3},
        {"event": "check", "id": "05.2", "state": "right", "seed": 4},
        {"event": "check", "id": "05.3", "state": "wrong", "mistake": "old square", "seed": 3},
        {"event": "answer", "id": "05.q1", "state": "wrong", "mistake": "a"},
        {"event": "answer", "id": "05.q1", "state": "right"},
        {"event": "check", "id": "99.9", "state": "right"},
        {"event": "check"},
    ]
    found = grading.results("05", events, seed=3)
    assert (
        found["05.1"] == "right"
        and found["05.2"] == "other variant"
        and found["05.3"] == "wrong: old square"
    )
    assert found["05.q1"] == "right" and found["05.4"] == "missing" and "99.9" not in found


def test_the_table_is_safe_to_open_in_a_spreadsheet(tmp_path):
    grading.write(
        [{"student": "=HYPERLINK()", "error": "a\nb"}, {"student": "b", "05.1": "right"}],
        tmp_path / "t.csv",
    )
    assert (tmp_path / "t.csv").read_text().splitlines() == [
        "student,error,05.1",
        "'=HYPERLINK(),a b,",
        "b,,right",
    ]


def test_a_log_with_rubbish_is_read(tmp_path):
    (tmp_path / "log").write_text('{"event": "check"}\nnot json\n[1]\n{"event": 3}\n')
    assert log.read(tmp_path / "log") == [{"event": "check"}] and log.read(tmp_path / "none") == []


def test_a_log_that_never_ends_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "deep").write_text(
        '{"event": "check"}\n' + "[" * 100_000 + '\n{"event": "answer"}\n'
    )
    assert [event["event"] for event in log.read(tmp_path / "deep")] == ["check", "answer"]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    for name in ("pipe", "zero", "link"):
        with pytest.raises(CourseError, match="not a regular file"):
            log.read(tmp_path / name)
    monkeypatch.setattr(log, "LARGEST", 1000)
    with pytest.raises(CourseError, match="larger than 1,000 bytes"):
        log.read(tmp_path / "deep")


def test_a_function_check_is_tried_on_the_same_inputs_every_time():
    seen = []
    check = function("x.4", right=lambda n: n, inputs=lambda rng: (rng.random(),))
    for _ in range(2):
        tries = []
        check.judge(lambda n, tries=tries: tries.append(n) or n, check.case())
        seen.append(tries)
    assert (
        seen[0] == seen[1]
        and len(set(seen[0])) == checking.TRIALS
        and random.random() != seen[0][0]
    )
