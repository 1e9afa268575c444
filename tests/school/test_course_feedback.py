"""What a learner is told: the line that raised, an input to try, the form before the content, how exact a number is."""

import linecache
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanokv.apps.cli import main
from nanokv.cache import LayerCache
from nanokv.errors import CourseError
from nanokv.school import course
from nanokv.school.course import checking, exam, log, scores, session, trials, twins
from nanokv.school.course.checking import Mistake, function, judged, result_of, value

pytestmark = pytest.mark.sampled

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def cell(source: str) -> dict:
    """The names of a notebook's cell: its file does not exist, and its text is known to linecache, as in Jupyter."""
    name = f"/tmp/ipykernel_1/{abs(hash(source))}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"__name__": "__main__", "torch": torch}
    exec(compile(source, name, "exec"), names)
    return names


def told(id, answer):
    check = checking.find(id)
    return check.judge(answer, check.case())


# --- nothing returned ---------------------------------------------------------------------------------------------

FORGOTTEN = {
    "01.2": lambda pieces: None,
    "02.2": lambda q, k, v: None,
    "02.4": lambda forward, ids, V: None,
    "04.2": lambda path, name: None,
    "06.4": lambda model, ids, n: None,
    "09.2": lambda start, clock: None,
    "10.5": lambda table, owners, free_pages: None,
    "11.5": lambda guesses, best: None,
    "12.1": lambda prompts: None,
    "13.3": lambda x, bits, dim: None,
    "13.4": ("mqa", lambda model: None),
    "12.4": lambda engine, ids, most: None,
    "06.3": type("C", (), {"append": lambda self, k, v: None}),
}
STUBS = FORGOTTEN | {
    "01.2": lambda pieces: ...,
    "02.2": lambda q, k, v: ...,
    "02.4": lambda forward, ids, V: ...,
    "04.2": lambda path, name: ...,
    "06.4": lambda model, ids, n: ...,
    "09.2": lambda start, clock: (..., ...),
    "10.5": lambda table, owners, free_pages: ...,
    "11.5": lambda guesses, best: ...,
    "12.1": lambda prompts: (1, ...),
    "13.3": lambda x, bits, dim: ...,
    "13.4": ("mqa", lambda model: ...),
    "12.4": lambda engine, ids, most: ...,
    "06.3": type("C", (), {"append": lambda self, k, v: ...}),
}


@pytest.mark.parametrize("id", FORGOTTEN)
def test_a_forgotten_return_is_told_and_a_stub_is_not_answered(id):
    outcome = told(id, FORGOTTEN[id])
    assert (
        outcome.state == "wrong"
        and "your function returned None: is a return missing?" in outcome.message
    )
    assert told(id, STUBS[id]).state == "unanswered"


# --- what raised --------------------------------------------------------------------------------------------------

HELPED = """
def half(x):
    return torch.tensor(x)[7]

def kv_head(h, H, Hk):
    return half([h, H, Hk])

class MyCache:
    length = 0
    def append(self, k, v):
        return self.kept

def loop(model, ids, n):
    return [missing for _ in range(n)]

def test(model):
    assert model.lm_head is None

def scale(*_):
    return half([1])
"""


@pytest.mark.parametrize(
    ("id", "name", "words"),
    [
        (
            "03.4",
            "kv_head",
            "IndexError: index 7 is out of bounds for dimension 0 with size 3\n    line 3 of your "
            "cell, in half: return torch.tensor(x)[7]\n    try       kv_head(h=",
        ),
        (
            "06.3",
            "MyCache",
            "AttributeError: 'MyCache' object has no attribute 'kept'\n    line 11 of your cell, "
            "in append: return self.kept",
        ),
        ("06.4", "loop", "NameError: name 'missing' is not defined\n    line 14 of your cell"),
        ("07.4", "test", "line 17 of your cell, in test: assert model.lm_head is None"),
        ("13.3", "scale", "line 3 of your cell, in half: return torch.tensor(x)[7]"),
    ],
)
def test_what_raises_is_told_with_the_line_that_raised(id, name, words):
    assert words in told(id, cell(HELPED)[name]).message


def test_a_cache_that_fails_in_the_equality_suite_is_told_its_line():
    late = cell("""
class Late:
    def __init__(self):
        self.length, self.parts = 0, []
    def append(self, k, v):
        if self.length > 2:
            raise ValueError("too late")
        self.parts.append((k, v))
        self.length += k.shape[2]
        return tuple(torch.cat(part, dim=2) for part in zip(*self.parts))
""")["Late"]
    assert (
        "ValueError: too late\n    line 7 of your cell, in append: raise ValueError("
        in told("06.3", late).message
    )


def test_the_line_is_the_deepest_one_of_the_learner_and_of_no_library(tmp_path, monkeypatch):
    (tmp_path / "my_own_helpers.py").write_text(
        "import json\n\n\ndef read(text):\n    return json.loads(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = cell("import my_own_helpers\ndef f(n):\n    return my_own_helpers.read('{')\n")
    check = function("x.1", right=lambda n: n, inputs=lambda rng: (rng.randint(1, 9),))
    message = check.judge(names["f"], check.case()).message
    assert (
        "JSONDecodeError: Expecting" in message
        and "line 5 of my_own_helpers.py, in read: return json.l" in message
    )
    # Raised by the call itself: no line of theirs.
    message = check.judge(lambda: 1, check.case()).message
    assert "takes 0 positional arguments but 1 was given\n    compare what your def" in message
    assert "\n    try       your_function(" in message


# --- an input to try ----------------------------------------------------------------------------------------------


def test_inputs_grow_and_those_that_are_short_to_type_come_first():
    tries = trials.drawn(lambda rng: (rng.randint(1, 1000), rng.randint(5, 6)), "x", 50)
    assert max(tries[0]) <= 9 and max(a for a, _ in tries) > 500 and {b for _, b in tries} == {5, 6}
    assert tries == trials.drawn(lambda rng: (rng.randint(1, 1000), rng.randint(5, 6)), "x", 50)
    mixed = trials.drawn(lambda rng: ([rng.randint(1, 9)] * rng.choice((9, 1, 5)),), "x", 50)
    lengths = [len(items) for (items,) in mixed]
    assert lengths == sorted(lengths) and set(lengths) == {1, 5, 9}, (
        "what is short to type comes first"
    )


@pytest.mark.parametrize(
    ("id", "answer", "call"),
    [
        ("05.2", lambda P, N: P * N + (P > 50), r"your_function\(P=\d, N=\d\)"),
        ("03.4", lambda h, H, Hk: h % 7, r"your_function\(h=\d+, H=\d+, Hk=\d\)"),
        (
            "02.2",
            lambda q, k, v: v + 1,
            r"your_function\((\w=torch.tensor\(\[\[-?[012].0, -?[012].0\]\]\)(, )?){3}\)",
        ),
        (
            "03.3",
            lambda x, weight, eps: x + 1,
            r"your_function\(x=torch.tensor\(.+\), weight=.+, eps=1e-06\)",
        ),
        ("01.3", lambda chances, p: {0, 1}, r"your_function\(chances=\[[\d., ]+\], p=[\d.]+\)"),
        (
            "09.4",
            lambda weights, per_token, context, batch, bandwidth: 1.5,
            r"your_function\(weights=\d0+, .+\)",
        ),
    ],
)
def test_the_example_of_a_wrong_function_is_small_and_is_code_that_runs(id, answer, call):
    lines = told(id, answer).message.splitlines()
    shown = {line.split(None, 1)[0]: line.split(None, 1)[1] for line in lines[-3:]}
    assert list(shown) == ["try", "gives", "expected"]
    assert re.fullmatch(call, shown["try"]) and len(shown["try"]) < 250, shown
    names = {"torch": torch, "your_function": answer}
    again, gave, right = (eval(text.split(" (within")[0], names) for text in shown.values())
    assert checking.same(again, gave, 1e-4) and not checking.same(again, right, 1e-4)


def test_a_named_mistake_shows_an_example_too():
    assert "try       your_function(P=" in told("05.2", lambda P, N: P * N).message


def test_nothing_short_is_cut_and_nothing_long_is_written_down():
    check = function("x.1", right=lambda n: list(range(200)), inputs=lambda rng: (1,))
    assert "196, 197, 198, 199]" in check.judge(lambda n: [7], check.case()).message
    check = function("x.1", right=lambda n: torch.ones(100, 100), inputs=lambda rng: (1,))
    assert (
        "expected  a tensor (100, 100) of torch.float32"
        in check.judge(lambda n: torch.zeros(100, 100), 0).message
    )


# --- the form before the content ----------------------------------------------------------------------------------


def right_of(id):
    check = checking.find(id)
    return check.key(check.case())


def flat(value):
    return [x for item in value for x in flat(item)] if isinstance(value, list | tuple) else [value]


@pytest.mark.parametrize(
    ("id", "change", "words"),
    [
        ("00.2", lambda right: "half", "this is a text, wanted is 2 numbers, such as (1.5, 2.5)"),
        (
            "01.1",
            "|".join,
            "this is a text, wanted is a list of texts, written as ['b', 'an', 'an', 'a']",
        ),
        ("01.1", lambda right: 4, "this is a number, wanted is a list of texts, such as ['yz', "),
        (
            "03.1",
            flat,
            "wanted is 3 times 2 numbers, written as ((288, 192), (96, 192), (192, 288))",
        ),
        (
            "05.1",
            lambda right: f"{right[0]} and {right[1]}",
            "this is a text, wanted is 2 numbers, written as (26, 8)",
        ),
        ("05.1", lambda right: right[0], "this is a number, wanted is 2 numbers, such as (1, 2)"),
        ("05.1", lambda right: {"a": 1}, "this is a dict, wanted is 2 numbers, such as (1, 2)"),
        ("08.2", lambda right: tuple(f"{x:.1f} GB" for x in right), "written as (85.9, 80)"),
        ("08.5", lambda right: [right], "wanted is a number, written as 14"),
        (
            "10.1",
            lambda right: f"{right:,} rows",
            "this is a text, wanted is a number, written as 4950",
        ),
        ("10.1", lambda right: "many", "this is a text, wanted is a number, such as 1"),
        ("10.1", lambda right: True, "this is True or False, wanted is a number, such as 1"),
        (
            "02.3",
            lambda right: torch.ones(3),
            "this is a tensor (3,), wanted is a number, such as 1.5",
        ),
        ("05.3", lambda right: {*right}, "this is a set, wanted is 2 numbers, "),
    ],
)
def test_the_form_of_a_value_is_told_before_its_content(id, change, words):
    outcome = told(id, change(right_of(id)))
    assert (outcome.state, outcome.mistake) == ("wrong", "form") and words in outcome.message
    assert checking.find(id).judge(right_of(id), checking.find(id).case()).state == "right"


def test_where_a_pair_is_asked_for_the_right_answer_is_one():
    """Its form is what the hint asks for."""
    pairs = [
        (c, exam.asked(twins.read(path), c, c.case()))
        for path in twins.sources(NOTEBOOKS)
        for c in checking.exercises(path.stem[:2]).CHECKS
        if c.key and not c.hidden
    ]
    pairs = [check for check, text in pairs if "with a pair" in text]
    assert len(pairs) >= 8
    for check in pairs:
        right = check.key(check.case())
        assert isinstance(right, tuple) and len(right) == 2, check.id


def test_an_example_of_a_form_does_not_give_the_answer_away():
    for number in checking.numbers()[1:]:
        for check in checking.exercises(number).CHECKS:
            if check.key and check.parameters and not check.hidden:
                outcome = check.judge(object(), check.case())
                assert outcome.mistake == "form" and "such as" in outcome.message, check.id
                assert not checking.same(
                    eval(outcome.message.split("such as ")[1]), check.key(check.case())
                ), check.id


@pytest.mark.parametrize(
    ("id", "answer", "words"),
    [
        ("01.2", lambda pieces: b"".join(pieces), "this is a bytes, wanted is a text"),
        (
            "11.4",
            lambda cached, new: new[:-1],
            "this is an empty list, wanted is a number, such as 1\n",
        ),
        (
            "11.5",
            lambda guesses, best: 3,
            "this is a number, wanted is a list of numbers, such as [1, 2, 3]",
        ),
        (
            "10.4",
            lambda table, i, page: [table[i // page], [i % page]],
            "wanted is 2 numbers, written as (",
        ),
        (
            "11.1",
            lambda cached, T: torch.ones(T * (cached + T)) > 0,
            "the shape is (4,), and it has to be (2, 2)\n",
        ),
        ("02.2", lambda q, k, v: 7, "this is a number, wanted is a torch.float32 tensor (1, 2)"),
        (
            "13.3",
            lambda x, bits, dim: x.numpy(),
            "a numpy array (4, 3, 64, 8), wanted is a torch.float64 tensor",
        ),
        ("13.3", lambda x, bits, dim: x.tolist(), "torch.tensor(…) makes one"),
        (
            "13.3",
            lambda x, bits, dim: x[0],
            "the shape is (3, 64, 8), and it has to be (4, 3, 64, 8)",
        ),
        ("12.1", lambda prompts: prompts, "wanted is 2 items, such as ([[1"),
        ("09.2", lambda start, clock: 3.0, "this is a number, wanted is 2 items, such as (1.5, "),
        ("03.5", ["a"] * 8, "wanted is a list of numbers"),
        (
            "12.1",
            lambda prompts: ([1], [[1]]),
            "the form of item 0 is another one: this is a list of numbers, wanted",
        ),
        (
            "03.4",
            lambda h, H, Hk: str(h * Hk // H),
            "returns the text '1': return the value itself",
        ),
        ("13.3", lambda x, bits, dim: x.half(), "this is torch.float16"),
    ],
)
def test_the_form_of_what_a_function_returns_is_told_before_its_content(id, answer, words):
    outcome = told(id, answer)
    assert outcome.state == "wrong" and words in outcome.message


def test_a_result_may_be_asked_for_in_a_form():
    check = judged(
        "x.3", lambda answer, case: result_of(answer, 3, like=(1, "a")) and checking.RIGHT
    )
    assert check.judge(lambda n: [n, "b"], None).state == "right"
    assert check.judge(lambda n: (n, n), None).mistake == "form"


def test_a_huge_tensor_is_told_by_its_shape_and_not_read_number_by_number(monkeypatch):
    huge = torch.zeros(1).expand(10**6, 10**6)  # 4 B
    read, tolist = [], torch.Tensor.tolist

    def reading(tensor):
        read.append(tensor.numel())
        return tolist(tensor) if read[-1] < 10**9 else []

    monkeypatch.setattr(torch.Tensor, "tolist", reading)
    for id in ("00.3", "02.3", "07.5"):
        assert told(id, huge).state == "wrong", id
    assert "the shape is (1000000, 1000000)" in told("11.1", lambda cached, T: huge).message
    assert 0 < max(read) < 10**6


@pytest.mark.parametrize("id", ["02.4", "04.2", "06.4", "09.2", "12.1", "13.3", "12.4"])
def test_a_function_that_was_called_already_is_told_so(id):
    assert told(id, torch.zeros(2)).message.startswith(
        "hand in the function itself, without calling it"
    ), id


class Named(LayerCache):
    """A learner's 13.4, which keeps its capacity under another name."""

    def __init__(self, slots):
        self.slots, self.length = slots, 0

    def append(self, k, v):
        from nanokv.errors import CapacityError

        B, Hk, T, D = k.shape
        if self.length + T > self.slots:
            raise CapacityError(f"{self.length + T} tokens, {self.slots} slots")
        if not self.length:
            self.both = k.new_zeros(2, B, Hk, self.slots, D)
        (
            self.both[0, :, :, self.length : self.length + T],
            self.both[1, :, :, self.length : self.length + T],
        ) = k, v
        self.length += T
        return self.both[0, :, :, : self.length], self.both[1, :, :, : self.length]

    def truncate(self, n):
        self.length = n


def test_a_static_layer_may_call_its_capacity_as_it_likes():
    outcome = told("13.4", ("static", Named))
    assert outcome.state == "right", outcome.message


# --- how exact ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("02.1", "within 0.5 %"),
        ("02.3", "within 0.5 %"),
        ("08.3", "within 0.2 %"),
        ("08.4", "within 0.1"),
        ("09.1", "within 0.35 %"),
        ("09.3", "within 1 %"),
        ("13.2", "within 0.5 %"),
    ],
)
def test_a_wrong_number_is_told_how_exact_it_has_to_be(id, words):
    right = right_of(id)
    near = tuple(x * 1.07 for x in right) if isinstance(right, tuple) else right * 1.07
    assert told(id, near).message.endswith(f"Numbers count as right {words}.")


def test_a_number_that_is_counted_needs_no_tolerance():
    assert "within" not in told("05.1", (1, 1)).message
    check = value(
        "x.1", right=lambda c: 1.5, wrong=(Mistake("half", lambda c: 0.5, "half"),), rel=0.01
    )
    assert (
        check.judge(0.5, None).message == "half" and "within 1 %" in check.judge(0.6, None).message
    )
    assert "(within 0.0001 %)" in told("09.4", lambda *a: 1.5).message


# --- mistakes with a name, as people write them --------------------------------------------------------------------


def attention(root=None, mask=None, finish=None):
    """A learner's 02.2 with something else in it."""

    def attend(q, k, v):
        scores = q @ k.T / (root(q) if root else q.shape[-1] ** 0.5)
        future = torch.triu(torch.ones(len(q), len(q)), diagonal=1)
        scores = mask(scores, future) if mask else scores.masked_fill(future == 1, float("-inf"))
        return finish(scores, q, k, v) if finish else torch.softmax(scores, dim=-1) @ v

    return attend


INF = float("inf")


@pytest.mark.parametrize(
    ("answer", "mistake"),
    [
        (attention(), ""),
        (attention(root=lambda q: q.size(1)), "divided by D"),
        (attention(root=lambda q: len(q) ** 0.5), "root of T"),
        (attention(root=lambda q: 1.0), "no division"),
        (attention(root=lambda q: 1 / q.shape[1] ** 0.5), "multiplied by the root"),
        (
            attention(
                root=lambda q: 1, finish=lambda s, q, k, v: s.softmax(-1) / q.shape[1] ** 0.5 @ v
            ),
            "divided after softmax",
        ),
        (attention(mask=lambda s, future: s), "no mask"),
        (attention(mask=lambda s, future: s * (1 - future)), "multiplied"),
        (
            attention(mask=lambda s, future: s.masked_fill(torch.ones_like(s).triu() == 1, -INF)),
            "sees not itself, NaN",
        ),
        (attention(mask=lambda s, future: s.masked_fill(future == 0, -INF)), "inverted"),
        (attention(mask=lambda s, future: s.masked_fill(future.triu(2) == 1, -INF)), "one ahead"),
        (
            attention(mask=lambda s, future: s.masked_fill(torch.ones_like(s).tril(-1) == 1, -INF)),
            "upside down",
        ),
        (attention(mask=lambda s, future: s + future * -INF), "zero times infinity"),
        (attention(mask=lambda s, future: s + (1 - future)), "ones added"),
        (
            attention(mask=lambda s, future: s * (1 - future), finish=lambda s, q, k, v: s @ v),
            "no softmax",
        ),
        (attention(finish=lambda s, q, k, v: s.softmax(-1)), "weights returned"),
        (attention(finish=lambda s, q, k, v: s.softmax(-1) @ k), "keys mixed"),
        (attention(finish=lambda s, q, k, v: s.softmax(0) @ v), "over queries"),
    ],
)
def test_a_typical_attention_is_told_what_is_wrong_with_it(answer, mistake):
    outcome = told("02.2", answer)
    assert (outcome.state, outcome.mistake) == ("wrong" if mistake else "right", mistake)


@pytest.mark.parametrize(
    ("answer", "mistake"),
    [
        (lambda h, H, Hk: h // (H // Hk), ""),
        (lambda h, H, Hk: h * Hk // H, ""),
        (lambda h, H, Hk: h % Hk, "dealt out"),
        (lambda h, H, Hk: h // (H // Hk) + 1, "counted from 1"),
        (lambda h, H, Hk: h / (H / Hk), "not rounded"),
        (lambda h, H, Hk: round(h / (H / Hk)), "to the nearest"),
        (lambda h, H, Hk: math.ceil(h / (H // Hk)), "rounded up"),
        (lambda h, H, Hk: H // Hk, "group size"),
        (lambda h, H, Hk: h // (H // Hk) * (H // Hk), "first of the group"),
        (lambda h, H, Hk: h, "its own"),
        (lambda h, H, Hk: h if h < Hk else Hk - 1, "the last ones shared"),
        (lambda h, H, Hk: h // Hk, "divided by Hk"),
        (lambda h, H, Hk: h % (H // Hk), "within the group"),
    ],
)
def test_a_typical_kv_head_is_told_what_is_wrong_with_it(answer, mistake):
    outcome = told("03.4", answer)
    assert (outcome.state, outcome.mistake) == ("wrong" if mistake else "right", mistake)


def rounding(
    to=torch.round, steps=lambda bits: 2**bits - 1, back=lambda codes, step, low: codes * step + low
):
    """A learner's 13.3 with something else in it."""

    def round_trip(x, bits, dim):
        low, high = x.min(dim, keepdim=True).values, x.max(dim, keepdim=True).values
        step = (high - low) / steps(bits)
        return back(to((x - low) / step), step, low)

    return round_trip


@pytest.mark.parametrize(
    ("answer", "mistake"),
    [
        (rounding(), ""),
        (rounding(to=torch.floor), "floor"),
        (rounding(to=lambda t: t.int()), "floor"),
        (rounding(to=torch.floor, steps=lambda bits: 2**bits), "floor"),
        (rounding(to=torch.ceil), "ceil"),
        (rounding(back=lambda codes, step, low: codes), "codes"),
        (rounding(back=lambda codes, step, low: codes.to(torch.uint8)), "codes"),
        (rounding(to=torch.floor, back=lambda codes, step, low: codes), "codes"),
        (rounding(back=lambda codes, step, low: codes + low), "no step"),
        (rounding(back=lambda codes, step, low: codes * step), "no low"),
        (rounding(steps=lambda bits: 2**bits - 2), "one step too few"),
        (rounding(steps=lambda bits: 2**bits), "levels"),
        (rounding(steps=lambda bits: 2 ** (bits - 1) - 1), "half the levels"),
        (lambda x, bits, dim: x.round(), "fixed step"),
        (lambda x, bits, dim: (x * 2**bits).round() / 2**bits, "levels"),
    ],
)
def test_a_typical_rounding_is_told_what_is_wrong_with_it(answer, mistake):
    outcome = told("13.3", answer)
    assert (outcome.state, outcome.mistake) == ("wrong" if mistake else "right", mistake)


@pytest.mark.parametrize("kind", [list, tuple])
def test_padding_on_the_right_is_told_of_lists_and_of_tuples(kind):
    def rectangle(prompts):
        longest = max(map(len, prompts))
        rows = [kind([*prompt, *[0] * (longest - len(prompt))]) for prompt in prompts]
        return kind(rows), kind(longest - len(prompt) for prompt in prompts)

    assert told("12.1", rectangle).mistake == "right"


@pytest.mark.parametrize(
    ("more", "pad", "mistake"), [(1, 0, "too wide"), (0, 1, "padding id"), (0, 0, "")]
)
def test_a_rectangle_is_as_wide_as_the_longest_prompt_and_padded_with_zeros(more, pad, mistake):
    def rectangle(prompts):
        longest = max(map(len, prompts)) + more
        pads = [longest - len(prompt) for prompt in prompts]
        return [[pad] * n + prompt for n, prompt in zip(pads, prompts, strict=True)], pads

    assert told("12.1", rectangle).mistake == mistake


def test_a_layer_without_the_base_class_is_told_so():
    class MyLayer:
        def __init__(self, capacity):
            self.length = 0

        def append(self, k, v):
            return k, v

    outcome = told("13.4", ("static", MyLayer))
    assert outcome.mistake == "no base" and "nanokv.cache.LayerCache" in outcome.message


def test_what_no_float_can_hold_is_a_number_that_is_too_large():
    for id, answer in (("00.1", 10**400), ("05.1", (10**400, 1))):
        outcome = told(id, answer)
        assert outcome.state == "wrong" and "too large for a float" in outcome.message, id


@pytest.mark.parametrize("attend", [lambda q, k: q, lambda: 0, lambda q, k, v, mask: q])
def test_a_function_that_takes_other_arguments_is_sent_to_its_def(attend):
    assert "compare what your def or class takes" in told("02.2", attend).message


# --- how far a learner is -----------------------------------------------------------------------------------------

EVENTS = [
    {"event": "check", "id": "05.1", "state": "wrong", "mistake": "swapped"},
    {"event": "check", "id": "05.1", "state": "right"},
    {"event": "check", "id": "05.2", "state": "wrong"},
    {"event": "check", "id": "05.3", "state": "unanswered"},
    {"event": "answer", "id": "05.q1", "state": "right"},
    {"event": "check", "id": "06.1", "state": "right"},
]


def test_the_score_of_a_notebook_counts_the_last_answers():
    assert scores.line("05", EVENTS) == (
        "05: 2 of 8 right. Not yet: 05.2. Not answered: 05.3, 05.4, 05.5, 05.q2, 05.q3."
    )
    every = [
        {"event": "check", "id": id, "state": "right"} for id in scores.results("05", [], None)
    ]
    assert scores.line("05", every) == "05: 8 of 8 right."


def test_a_notebook_ends_with_its_score(monkeypatch, capsys):
    monkeypatch.setattr(session, "_STATE", {"notebook": "05", "seed": None, "model": None})
    monkeypatch.setattr(session, "_ANSWERS", [])
    session.check("05.1", (1, 2))
    session.check("05.1", right_of("05.1"))
    session.answer("05.q1", ...)
    course.progress()
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("05: 1 of 8 right. Not answered: 05.2, ") and said[-1].endswith(
        "nanokv course progress"
    )
    session._STATE["notebook"] = None
    with pytest.raises(CourseError, match="no notebook was started"):
        course.progress()


def test_a_learners_own_notebook_keeps_its_answers_and_the_command_shows_them(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(log, "_own", None)
    assert main(["course", "progress", "--folder", str(tmp_path)]) == 2
    assert "progress.jsonl" in capsys.readouterr().err
    assert main(["course", "progress", "99"]) == 2
    assert "no notebook 99" in capsys.readouterr().err
    assert main(["course"]) == 2
    assert "required: ACTION\n" in capsys.readouterr().err
    log.keep(tmp_path)
    for event in EVENTS:
        log.note(**event)
    log.note("figure", id="05.a", value=1)
    assert main(["course", "progress", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[5] == scores.line("05", EVENTS)
        and lines[4] == "04: 0 of 8 right. Not begun."
        and len(lines) == len(checking.numbers()) + 1
    )
    assert (
        lines[-1]
        == f"all: 3 of {sum(len(scores.results(n, [], None)) for n in checking.numbers())} right."
    )
    assert "figure" not in (tmp_path / "progress.jsonl").read_text()
    # Where a learner's notebooks lie, with nothing else of the checkout.
    monkeypatch.chdir(tmp_path)
    assert main(["course", "progress", "05_the_waste"]) == 0
    assert capsys.readouterr().out.splitlines() == [scores.line("05", EVENTS), "all: 2 of 8 right."]


def test_where_nothing_can_be_kept_a_check_still_works(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(log, "_own", tmp_path / "no_such_folder" / "progress.jsonl")
    assert session.check("05.1", right_of("05.1")) and not list(tmp_path.iterdir())
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "log"))
    log.keep(tmp_path)
    session.check("05.1", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["log"], (
        "one who runs the notebook has said where"
    )


def test_only_where_somebody_works_are_answers_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_STATE", {})
    monkeypatch.setattr(log, "_own", None)
    for shell in (None, object()):
        monkeypatch.setitem(
            sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell)
        )
        session.start("05")
        session.check("05.1", 3)
        assert (tmp_path / "progress.jsonl").exists() == bool(shell)


def test_every_notebook_ends_with_its_score():
    for path in twins.sources(NOTEBOOKS):
        assert twins.read(path).cells[-1].text == "course.progress()", path.name


# --- two mistakes at once -----------------------------------------------------------------------------------------


def two_slips(q, k, v):
    return (q @ k.T).softmax(-1) @ v  # no root and no mask


@pytest.mark.parametrize(
    ("id", "answer", "names"),
    [
        ("02.2", two_slips, "no division + no mask"),
        ("14.1", 28 * 1024 * 2 * 3 / 4, "numbers, not bytes + one sum per layer"),
        (
            "06.1",
            ((2, 4, 1, 16), (2, 4, 4, 16), (2, 4, 1, 5)),
            None,
        ),  # no single slip is in it twice
        (
            "06.1",
            ((2, 4, 1, 16), (2, 4, 5, 16), (2, 2, 1, 5)),
            "query heads cached + scores per KV head",
        ),
        ("05.1", (20, 4), "prompt every step, no growth + prompt is free"),
    ],
)
def test_two_mistakes_at_once_are_named(id, answer, names):
    check = checking.find(id)
    outcome = check.judge(answer, check.case())
    assert outcome.state == "wrong" and (outcome.mistake == names or names is None)
    assert names is None or outcome.message.startswith("Two slips at once. ")


@pytest.mark.parametrize(
    "check",
    [c for n in checking.numbers() for c in checking.exercises(n).CHECKS],
    ids=lambda c: c.id,
)
def test_one_mistake_is_never_taken_for_two_and_a_right_answer_for_none(check):
    """Each named mistake keeps its name beside the pairs, and no message of a pair speaks of the whole answer."""
    said = "Right numbers", "Right weights", "is right."
    for mistake in check.mistakes:
        assert mistake.alone or not any(words in mistake.message for words in said), mistake.name


def test_what_two_pairs_explain_has_no_name():
    mistakes = [
        Mistake(name, lambda c, x=x: x, name) for name, x in zip("abcd", (2, 6, 3, 4), strict=True)
    ]
    check = value("x", right=lambda c: 1, wrong=tuple(mistakes), factors=True)
    assert check.judge(12, check.case()).mistake == ""  # 2 · 6 and 3 · 4
    assert check.judge(24, check.case()).mistake == "b + d"


# --- what is told is true -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["26, 8", "26,8", "26 and 8"])
def test_two_numbers_in_one_text_are_told_apart(text):
    check = checking.find("05.1")
    assert "written as (26, 8)" in check.judge(text, check.case()).message


@pytest.mark.parametrize(
    ("id", "answer", "name"),
    [
        ("00.3", {"q2", "k0", "k1", "k2", "v0", "v1", "v2"}, "what is read"),
        ("00.4", 80, "k and v only"),
        ("05.1", (36, 8), "all at the end"),
        ("05.1", (30, 8), "one ahead"),
        ("05.3", (21, 6), "triangle"),
        ("05.3", (11, 6), "only what is new"),
        ("06.1", ((2, 4, 1, 16), (2, 5, 2, 16), (2, 4, 1, 5)), "keys with tokens before heads"),
        ("06.1", ((2, 4, 1, 16), (2, 2, 5, 16), (2, 2, 1, 5)), "scores per KV head"),
        ("06.1", ((2, 4, 1, 16), (2, 2, 5, 16), (2, 4, 5, 5)), "square scores"),
        ("02.3", (6 * 48) ** -0.5, "all heads"),
        ("02.3", 6**-0.5, "number of heads"),
        ("10.3", (2048, 112), "whole sizes"),
        ("13.1", (20, 0), "oldest of all"),
        ("13.1", (20, 4), "after the sinks"),
        ("14.1", 2 * 28 * 1024 * 2 * 3 / 4, "numbers, not bytes"),
        ("14.2", lambda Hk, n, r: list(range(r, Hk, n)), "every n-th"),
        (
            "14.3",
            lambda a, la, b, lb: math.exp(la - max(la, lb)) * a + math.exp(lb - max(la, lb)) * b,
            "not divided",
        ),
    ],
)
def test_likely_mistakes_have_a_name(id, answer, name):
    check = checking.find(id)
    assert check.judge(answer, check.case()).mistake == name


def test_pages_that_are_freed_into_a_new_list_or_while_looping():
    def new_list(table, owners, fp):
        for p in table:
            owners[p] -= 1
        gone = [p for p in table if owners[p] == 0]
        table.clear()
        return fp + gone

    def looping(table, owners, fp):
        for p in table:
            owners[p] -= 1
            if owners[p] == 0:
                fp.append(p)
            table.remove(p)
        return fp

    check = checking.find("10.5")
    assert check.judge(new_list, check.case()).mistake == "another list"
    assert check.judge(looping, check.case()).mistake == "changed while looping"


def test_a_sorted_batch_is_told_that_its_order_is_another():
    def rectangle(prompts):
        prompts = sorted(prompts, key=len)
        widest = max(map(len, prompts))
        return [[0] * (widest - len(p)) + p for p in prompts], [widest - len(p) for p in prompts]

    outcome = told("12.1", rectangle)
    assert outcome.mistake == "order" and "row 0 is not prompt 0, it is prompt 1" in outcome.message


def test_a_slab_that_is_handed_out_whole_is_told_so():
    class Whole(LayerCache):
        def __init__(self, capacity):
            self.capacity, self.length = capacity, 0

        def append(self, k, v):
            from nanokv.errors import CapacityError

            if self.length + k.shape[2] > self.capacity:
                raise CapacityError("full")
            if self.length == 0:
                self.slabs = [k.new_zeros(*k.shape[:2], self.capacity, k.shape[3]) for _ in "kv"]
            for slab, new in zip(self.slabs, (k, v), strict=True):
                slab[:, :, self.length : self.length + k.shape[2]] = new
            self.length += k.shape[2]
            return tuple(self.slabs)

        def truncate(self, n):
            self.length = min(n, self.length)

    assert told("13.4", ("static", Whole)).mistake == "whole slab"
