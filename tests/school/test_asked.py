"""What a page of the course asks: every answer is judged as in the notebook, and the page shows what it should.

The script of the page is run by node, and its judgements are compared with those of the checks.
"""

import base64
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nanokv.school.course import asked, book, checking, compiled, running, session, twins
from nanokv.school.course.answers import plain

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
JOBS = ROOT / "tests" / "support" / "judge_page.mjs"
SCRIPT = ROOT / "nanokv" / "school" / "course" / "assets" / "judge.js"
SOURCES = {path.stem[:2]: path for path in twins.sources(NOTEBOOKS)}
ONLY_PYTHON = {"03.5", "04.3"}  # more than one value is right


@pytest.fixture(scope="module")
def node():
    """node([function, …arguments], …) → what the functions of judge.js returned."""
    if shutil.which("node") is None:
        pytest.skip("needs node 18 or newer: apt-get install nodejs")

    def run(*jobs):
        done = subprocess.run(
            ["node", JOBS, SCRIPT], input=json.dumps(jobs), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="module")
def live():
    """{id: (check, its case, its data)} of all exercises that a page judges.

    What 04.5 measures with the model is measured once.
    """
    from nanokv.school.course.checks import nb04

    measured = nb04._distances(checking.find("04.5").case())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nb04, "_distances", lambda case: measured)
        yield _live()


def _live() -> dict:
    found = {}
    for number in checking.numbers():
        for check in checking.exercises(number).CHECKS:
            data = compiled.exercise(check)
            if data is not None:
                found[check.id] = check, check.case(), data
    return found


def right(data):
    """The right value of an exercise, as JSON has it."""
    return data["rows"][0]["value"]


def typed(value) -> str:
    """A value as Python writes it, every digit of it."""
    if isinstance(value, dict):
        return "{" + ", ".join(map(repr, value["set"])) + "}" if value["set"] else "set()"
    value = plain(value) if not isinstance(value, tuple | set) else value
    if isinstance(value, set):
        return repr(value)
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(typed, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def as_python(value):
    """The value that a learner's cell would hold."""
    if isinstance(value, dict):
        return set(value["set"])
    if isinstance(value, list):
        return tuple(map(as_python, value))
    return value


def same_judgement(node, live, answers) -> None:
    """answers: [(id, value)]; the page says of each what the check says."""
    jobs = [("judge", live[id][2], typed(value)) for id, value in answers]
    for (id, value), given in zip(answers, node(*jobs), strict=True):
        check, case, _ = live[id]
        wanted = check.judge(value, case)
        if wanted.mistake == "form":
            assert given["state"] == "wrong", (id, value, given)
            continue
        assert (given["state"], given["message"]) == (wanted.state, wanted.message), (id, value)


# --- as the checks judge ------------------------------------------------------------------------------------------


def test_every_exercise_with_a_value_is_live(live):
    for number in checking.numbers():
        for check in checking.exercises(number).CHECKS:
            assert (check.id in live) == (check.key is not None or bool(check.names)), check.id
    assert len(live) > 35 and not ONLY_PYTHON & live.keys()
    assert set(compiled.UNITS) <= set(live)


def test_the_right_answer_is_right_and_each_known_mistake_is_told_what_the_notebook_tells(
    node, live
):
    answers = []
    for id, (check, case, data) in live.items():
        answers += [(id, as_python(row["value"])) for row in data["rows"]]
        answers += [(id, mistake.gives(case)) for mistake in check.mistakes]
        assert check.judge(as_python(right(data)), case).state == "right", id
    assert len(answers) > 350
    same_judgement(node, live, answers)


def numbers_of(value) -> list:
    if isinstance(value, list):
        return [number for item in value for number in numbers_of(item)]
    return [value] if isinstance(value, int | float) else []


def changed(value, at: int, change):
    """A nested list with its number `at` changed."""
    count = iter(range(10**6))

    def made(part):
        if isinstance(part, list):
            return tuple(map(made, part))
        return change(part) if next(count) == at else part

    return made(value)


def test_a_wrong_number_is_not_accepted_and_the_tolerance_is_the_checks(node, live):
    answers = []
    for id, (check, _, data) in live.items():
        value = right(data)
        rel, atol = check.near
        for at, number in enumerate(numbers_of(value)):
            room = max(atol, rel * abs(number))
            for off in (0.9 * room, 1.2 * room, -0.9 * room, -1.2 * room, 1, 0.1 * number, -number):
                answers.append((id, changed(value, at, lambda x, off=off: x + off)))
    assert len(answers) > 300
    same_judgement(node, live, answers)


def test_two_mistakes_at_once_are_told_as_in_the_notebook(node, live):
    answers = []
    rng = random.Random(0)
    for id, (check, case, data) in live.items():
        rows = [plain(mistake.gives(case)) for mistake in check.mistakes]
        value = right(data)
        if isinstance(value, list):
            alike = [row for row in rows if isinstance(row, list) and len(row) == len(value)]
            for _ in range(15 if alike else 0):
                items = zip(value, *alike, strict=True)
                answers.append((id, tuple(as_python(rng.choice(item)) for item in items)))
        elif check.factors:
            answers += [(id, x * y / value) for x in rows for y in rows if x != y]
    assert len(answers) > 200
    told = [check.judge(v, case).message for id, v in answers for check, case, _ in [live[id]]]
    assert sum(text.startswith("Two slips at once.") for text in told) > 20
    same_judgement(node, live, answers)


def test_every_set_of_the_names_is_judged_as_in_the_notebook(node, live):
    import itertools

    answers = []
    for id, (check, _, _) in live.items():
        for size in range(3 if check.names else 0):
            answers += [(id, set(some)) for some in itertools.combinations(check.names, size)]
        if check.names:
            answers.append((id, {"nonsense"}))
    assert len(answers) > 100
    same_judgement(node, live, answers)


def test_each_option_of_a_question_is_judged_as_in_the_notebook(node):
    questions = [one for n in checking.numbers() for one in checking.exercises(n).QUESTIONS]
    jobs = [
        ("judge", compiled.question(one), letter) for one in questions for letter in one.options
    ]
    wanted = [one.judge(letter) for one in questions for letter in one.options]
    given = node(*jobs)
    assert [(g["state"], g["message"]) for g in given] == [(w.state, w.message) for w in wanted]
    assert sum(w.state == "right" for w in wanted) == len(questions) > 40


# --- the forms of an answer ---------------------------------------------------------------------------------------

ACCEPTED = {
    "00.1": ["11", " 11.0 ", "+11", "1.1e1", "22/2", "2*4+3*1", "(11)", "1_1", "11.", "2×4 + 3·1"],
    "00.2": ["0.119, 0.881", "1/(1+e**2), e^2/(1+exp(2))", ".119 .881", "[0.119; 0.881]"],
    "00.3": ["q2 k2 v2", "{'q2', \"k2\", 'v2'}", "K2, V2, Q2", "[q2, k2, v2]", "q2 and k2 and v2"],
    "00.4": ["120", "120 multiplications", "3*5*4*2"],
    "01.1": ["b, an, an, a", '["b", "an", "an", "a"]', "b an an a", "b|an|an|a", "('b','an','an','a')"],
    "01.4": ["403.4", "e**6", "exp(6)", "math.exp(3/0.5)", "403 times", "403x"],
    "02.3": ["1/sqrt(48)", "48**-0.5", "0.144", "1/√48"],
    "03.1": ["(288, 192), (96, 192), (192, 288)", "288x192, 96x192, 192x288", "288×192; 96×192; 192×288",
             "[[288,192],[96,192],[192,288]]", "((288, 192), (96, 192), (192, 288))",
             "torch.Size([288, 192]), torch.Size([96, 192]), torch.Size([192, 288])"],
    "04.4": ["2, c", '(2, "c")', "2 C", "[2, 'c']"],
    "05.1": ["26, 8", "(26, 8)", "[26, 8]", "26 8", "26,8", "26 and 8", "26; 8", "26 tokens, 8 tokens",
             "5+6+7+8, 5+3", "26 token-forwards, 8 token-forwards", "((26, 8))", "26.0, 8"],
    "05.5": ["QKV".replace("", " ").strip(), "{'Q', 'K', 'V'}", "k, q, v", '"V" "K" "Q"'],
    "06.1": ["(2, 4, 1, 16), (2, 2, 5, 16), (2, 4, 1, 5)", "2x4x1x16, 2x2x5x16, 2x4x1x5"],
    "07.2": ["no_mask_on_chunk", '"no_mask_on_chunk"', " NO_MASK_ON_CHUNK "],
    "08.2": ["85.9, 80", "85.9 GB, 80 GiB", "85.9GB and 80GiB"],
    "08.4": ["93.3 82.2 98.2", "93.3 %, 82.2 %, 98.2 %", "93.3%, 82.2%, 98.2 percent"],
    "09.1": ["13.45, 40", "40/2.975, 1/0.025", "13.45 tokens/s, 40 tok/s"],
    "09.3": ["13,639", "13639 tokens"],
    "10.1": ["4,950", "4950", "100*99/2", "100*99//2", "4_950", "4950 rows"],
    "10.3": ["1,948, 12", "1948, 12", "1948,12", "1,948 slots, 12 slots", "(1,948, 12)"],
    "12.2": ["33.3", "33.3 %", "100/3", "33.3 percent"],
    "12.3": ["189,188,000", "1.89e8", "189188000 bytes"],
}  # fmt: skip
REFUSED = {
    "00.1": ["11 apples", "eleven", "(11, 11)", "1 1", "11)", "(11", "1,1", "nan", "11;", "x11"],
    "00.3": ["q2 k2", "q2 k2 k2", "q2 k2 v2 v3", "qkv"],
    "00.4": ["120 tokens", "1,20", "0,120"],
    "01.4": ["403 %"],
    "03.1": ["288, 192, 96, 192, 192, 288", "(288, 192), (96, 192)", "192x288, 192x96, 288x192"],
    "05.1": ["26", "26, 8, 1", "8, 26", "26 GB, 8", "26/8", "(26, 8", "26 or 8"],
    "08.2": ["80, 85.9", "80 GiB, 85.9 GB", "85.9 GiB, 80 GB", "85.9 MB, 80 MiB", "85.9"],
    "09.3": ["13.639", "13,63"],
    "10.1": ["4,95", "49,50", "4.950"],
    "12.2": ["0.333", "1/3", "33,3"],
}


@pytest.mark.parametrize(("table", "wanted"), [(ACCEPTED, True), (REFUSED, False)])
def test_an_answer_may_be_typed_in_many_forms_and_not_in_others(node, live, table, wanted):
    answers = [(id, text) for id, texts in table.items() for text in texts]
    judged = node(*(("judge", live[id][2], text) for id, text in answers))
    states = {(id, text): one["state"] for (id, text), one in zip(answers, judged, strict=True)}
    state = "right" if wanted else "wrong"
    assert [answer for answer, given in states.items() if given != state] == []


def test_nothing_typed_is_no_answer(node, live):
    texts = ["", "  ", "...", "(..., ...)", "…, …"]
    said = node(*(("judge", live["05.1"][2], text) for text in texts))
    assert {one["state"] for one in said} == {"unanswered"}


def test_another_form_is_named_with_an_example(node, live):
    said = node(("judge", live["08.2"][2], "80"), ("judge", live["05.5"][2], "1, 2"))
    assert said[0]["message"] == (
        "the form is another one: wanted is 2 numbers, such as (1.5, 2.5), in GB and GiB"
    )
    check, case, _ = live["05.5"]
    assert said[1]["message"] == check.judge({1, 2}, case).message


def test_arithmetic_is_pythons(node):
    import math

    rng = random.Random(1)
    texts = ["-2**2", "2**3**2", "7//2*2", "-7//2", "1e3/4", "2--3", "sqrt(16)*e", "(1+2)*(3+4)/5"]
    for _ in range(200):
        parts = [str(rng.choice([2, 3, 0.5, 7, 10])) for _ in range(4)]
        operators = [rng.choice(["+", "-", "*", "/", " - ", " * "]) for _ in range(3)] + [""]
        text = "".join(a + b for a, b in zip(parts, operators, strict=True))
        texts.append(text if rng.random() < 0.5 else f"({text}) * 2")
    names = {"sqrt": math.sqrt, "e": math.e}
    wanted = [eval(text, {"__builtins__": {}}, names) for text in texts]
    assert node(*(("calculate", text) for text in texts)) == pytest.approx(wanted)


# --- predictions --------------------------------------------------------------------------------------------------


def test_a_prediction_beside_its_measurement_is_put_as_in_the_notebook(node, capsys, monkeypatch):
    monkeypatch.setattr(session.feedback, "wrapped", str)
    rng = random.Random(2)
    pairs = [(2, 48.125984), (48, 48), (0, 5), (5, 0), (-3, 4), (1e9, 3), (50, 48), (999.96, 7)]
    for _ in range(300):
        guess, measured = (rng.choice([1, 10, 1e4]) * rng.random() for _ in range(2))
        pairs.append((round(guess, rng.choice([0, 1, 5])), round(measured, rng.choice([0, 2, 7]))))
    jobs = []
    for guess, measured in pairs:
        data = {"id": "05.a", "unit": "times", "units": ["times"], "signed": True}
        jobs.append(("predicted", data, repr(guess)))
        jobs.append(("compared", {"id": "05.a", "measured": measured, "unit": ""}, guess, "times"))
        session.predict("05.a", guess, unit="times", signed=True)
        session.reveal("05.a", measured)
    given = [one if isinstance(one, str) else one["message"] for one in node(*jobs)]
    assert given == capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3", 3),
        ("1,024", 1024),
        ("50 %", 50),
        ("50 percent", 50),
        ("1/4", 0.25),
        ("-3", None),
        ("many", None),
        ("", None),
        ("1/0", None),
        ("0,5", None),
    ],
)
def test_a_prediction_is_a_number_that_can_be(node, text, number):
    data = {"id": "05.a", "unit": "percent", "units": ["percent", "%"], "signed": False}
    signed = data | {"signed": True}
    first, second = node(("predicted", data, text), ("predicted", signed, text))
    assert first.get("number") == number
    assert ("no prediction yet" in first["message"]) == (number is None)
    assert second.get("number") == (-3 if text == "-3" else number)


# --- the page -----------------------------------------------------------------------------------------------------


PRINTED = """naive 6,112
05.a: you predicted 2 times as many, it is 48.13 times as
    many: 24 times too low.
after
"""
MEASURED = {"05.a": 48.125984, "05.b": 5}


@pytest.fixture(scope="module")
def waste() -> str:
    """The page of notebook 05, of whose cells only the one that reveals 05.a has printed something."""
    import nbformat

    source = twins.read(SOURCES["05"])
    notebook = nbformat.reads(twins.to_text(source.solution()), as_version=4)
    (cell,) = (cell for cell in notebook.cells if 'course.reveal("05.a"' in cell.source)
    cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=PRINTED)]
    events = [{"event": "reveal", "id": id, "value": value} for id, value in MEASURED.items()]
    return book.page(source, running.Run(notebook, events))


def forms_of(page: str) -> list[tuple[str, dict]]:
    """(kind, data) of each form."""
    found = re.findall(r'<form class="asked" data-kind="(\w+)" data-asked="([^"]+)"', page)
    return [(kind, json.loads(base64.b64decode(data))) for kind, data in found]


@pytest.mark.parametrize("number", sorted(SOURCES))
def test_a_page_asks_for_every_prediction_value_and_question(number, live):
    source = twins.read(SOURCES[number])
    made = asked.forms(source, source.solution(), {})
    marks = [
        cell["metadata"].get(place, "") for cell in made["cells"] for place in ("before", "after")
    ]
    page = "".join(marks)
    module = checking.exercises(number)
    asked_for = {}
    for kind, data in forms_of(page):
        asked_for.setdefault(kind, []).append(data["id"])
    calls = [
        call for cell in source.cells if cell.kind == "code" for call in asked.calls(cell.text)
    ]
    predicted = [call.id for call in calls if call.name == "predict"]
    assert asked_for.get("predict", []) == predicted
    assert asked_for.get("value", []) == [c.id for c in module.CHECKS if c.id in live]
    assert asked_for["choice"] == [question.id for question in module.QUESTIONS]
    pointed = re.findall(r'<p class="pointer">(\d\d\.\d) ', page)
    assert pointed == [check.id for check in module.CHECKS if check.id not in live]
    assert page.count("<details") == page.count("</details>")


def test_what_holds_an_answer_is_folded_and_cannot_be_read_at_a_glance(live, waste):
    page = waste
    outside = re.sub(r"<details.*?</details>|<script>.*?</script>", "", page, flags=re.DOTALL)
    for answer in (
        "guess = ",
        "q1, q2",
        "without_and_with = ",
        "def token_forwards",
        "unchanged =",
    ):
        assert answer not in re.sub("<[^>]*>", "", outside), answer
    for id, (check, _, data) in live.items():
        if id.startswith("05"):
            assert data["answer"] not in outside
            assert all(mistake.message not in page for mistake in check.mistakes)
    for question in checking.exercises("05").QUESTIONS:
        assert all(text in page and said not in page for text, said in question.options.values())


def test_a_measurement_without_scripts_says_what_it_is(waste):
    assert "you predicted 2" not in waste
    assert "naive 6,112\nafter" in waste
    line = '<p class="reveal" id="measured-05.a">05.a: it is 48.13 times as many.</p>'
    assert waste.count(line) == 1 and waste.count('class="measured"') == 2


@pytest.fixture
def opened(driver, tmp_path, waste):
    """open(width, dark) → a browser at the page of notebook 05, its state kept since the last time."""
    from browser import look

    (tmp_path / "style.css").write_text(book.asset("book.css") + book.highlighting(), "utf-8")
    path = book.write(tmp_path / "05_the_waste.html", "05", waste)

    def open_page(width=1000, dark=False):
        look(driver, width, dark)
        driver.get(path.as_uri())
        return driver

    open_page().execute_script("localStorage.clear()")
    driver.get_log("browser")
    yield open_page
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_the_keyboard_answers_and_the_page_keeps_it(opened):
    from browser import find, press, tab_to

    driver = opened()
    reveal = "#measured-05\\.a"
    box = f".measured:has({reveal}) .output_wrapper"
    fold = '[data-for="05.1"]'
    assert not find(driver, box).is_displayed() and "Predict it first" in find(driver, reveal).text
    assert not find(driver, fold).is_displayed()
    tab_to(driver, "#typed-05\\.a", 60)
    press(driver, "-3", "ENTER")
    assert "no prediction yet" in find(driver, "#said-05\\.a").text
    assert not find(driver, box).is_displayed()
    press(driver, "BACKSPACE", "BACKSPACE", "3", "ENTER")
    assert find(driver, "#said-05\\.a").text.startswith("05.a: you predict 3 times as many.")
    said = "05.a: you predicted 3 times as many, it is 48.13 times as many: 16 times too low."
    assert find(driver, reveal).text == said and find(driver, box).is_displayed()
    tab_to(driver, "#typed-05\\.1", 60)
    press(driver, "26, 9", "ENTER")
    check = checking.find("05.1")
    wanted = check.judge((26, 9), check.case()).message
    assert find(driver, "#said-05\\.1").text == f"Not yet. {wanted}"
    assert find(driver, fold).is_displayed()
    tab_to(driver, f"{fold} summary")
    press(driver, "ENTER")
    assert "05.1: (26, 8)" in find(driver, fold).text
    driver = opened()
    assert find(driver, "#typed-05\\.1").get_attribute("value") == "26, 9"
    assert find(driver, "#said-05\\.1").text == f"Not yet. {wanted}"
    assert find(driver, reveal).text == said


@pytest.mark.slow
def test_the_quiz_uncovers_its_cells_when_all_is_tried(opened):
    from browser import find

    driver = opened()
    fold = '[data-for="05.q1 05.q2 05.q3"]'
    for question in checking.exercises("05").QUESTIONS:
        assert not find(driver, fold).is_displayed()
        find(driver, f'[name="{question.id}"][value="a"]').click()
        said = find(driver, f'form:has([name="{question.id}"]) [role=status]').text
        assert said.endswith(question.options["a"][1])
    assert find(driver, fold).is_displayed()


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_has_names_and_does_not_scroll_sideways(opened, dark):
    driver = opened(390, dark)
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    fields = driver.find_elements("css selector", "form.asked input:not([type=radio])")
    names = [field.accessible_name for field in fields]
    assert names == [
        "Your prediction 05.a",
        "Your prediction 05.b",
        *(f"Your answer to 05.{n}" for n in (1, 3, 5)),
    ]
    ratio = """
      const light = (text) => {
        const parts = text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
          .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05;
      };
      const style = getComputedStyle(arguments[0]);
      const [a, b] = [light(style.color), light(style.backgroundColor)];
      return Math.max(a, b) / Math.min(a, b);"""
    buttons = driver.find_elements("css selector", "form.asked button, .reveal button")
    assert all(driver.execute_script(ratio, one) > 4.5 for one in (*fields, *buttons))


@pytest.mark.slow
def test_without_scripts_everything_is_there(opened):
    driver = opened()
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver = opened()
        shown = [fold.is_displayed() for fold in driver.find_elements("css selector", "details")]
        assert shown and all(shown)
        outputs = driver.find_elements("css selector", ".measured .output_wrapper")
        assert outputs and all(output.is_displayed() for output in outputs)
        fields = driver.find_elements("css selector", "form.asked input:not([type=radio])")
        assert not any(field.is_displayed() for field in fields)
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
