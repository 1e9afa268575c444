"""The teacher pack: plans, rubric, sample answers and mistakes against the notebooks; slides, exams and grades.

Fast tests execute no notebook. The slow ones compare the figures of the plans with a run, and use a deck in a browser.
"""

import csv
import functools
import json
import os
import re
from pathlib import Path

import pytest

from nanokv.apps.cli import main
from nanokv.apps.cli.commands.course import ACTIONS
from nanokv.errors import CourseError
from nanokv.lab.faults import FAULTS
from nanokv.school.course import (
    checking,
    exam,
    grading,
    log,
    mistakes,
    parts,
    prose,
    running,
    slides,
    twins,
    variants,
)
from nanokv.school.course.book import slug
from nanokv.school.course.claims import CLAIMS
from solved_notebooks import solved

pytestmark = pytest.mark.sampled

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
TEACH = NOTEBOOKS / "teach"
SOURCES = {path.stem[:2]: path for path in sorted((NOTEBOOKS / "source").glob("*.py"))}
PLANS = sorted(TEACH.glob("*_plan.md"))
CORE = ["05", "06", "07", "08"]
TEXTS = sorted(TEACH.glob("*.md"))
ID = re.compile(r"`((\d\d)\.(?:q?\d+|[a-z]))`")


def ids(number: str) -> set[str]:
    """Exercises, questions and predictions of a notebook."""
    module, code = checking.exercises(number), twins.read(SOURCES[number]).code()
    named = {item.id for item in (*module.CHECKS, *module.QUESTIONS)}
    return named | set(re.findall(r'course\.predict\("([\w.]+)"', code))


def each_text(test):
    return pytest.mark.parametrize("path", TEXTS, ids=[path.stem for path in TEXTS])(test)


def each_plan(test):
    return pytest.mark.parametrize("path", PLANS, ids=[path.stem for path in PLANS])(test)


# --- what is written by hand --------------------------------------------------------------------------------------


def test_there_is_a_plan_for_every_lesson():
    assert [path.stem for path in PLANS] == [f"{number}_plan" for number in SOURCES]


@each_plan
def test_the_minutes_of_a_plan_add_up(path):
    text = path.read_text("utf-8")
    rows = [
        [int(n) for n in pair]
        for pair in re.findall(r"^\|.*\| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    ]
    lengths = [30, 45] if path.stem == "00_plan" else [60, 90]
    assert len(rows) >= 6 and rows[0] == lengths  # the head of the table
    assert [sum(column) for column in zip(*rows[1:], strict=True)] == lengths
    assert "Goal: " in text and "## Watch" in text and "If time is short" in text and "```" in text


@each_plan
def test_the_experiments_of_a_plan_are_called_as_in_the_notebook(path):
    headings = re.findall(r"^## (.+)$", twins.read(SOURCES[path.stem[:2]]).prose(), re.MULTILINE)
    rows = [row for row in minutes(path) if re.search(r"Experiment \d: ", row)]
    named = [name.strip() for row in rows for name in re.findall(r"Experiment \d: [^(,;]+", row)]
    assert [
        name for name in named if not any(heading.startswith(name) for heading in headings)
    ] == []


def test_the_table_of_lessons_says_what_the_plans_and_the_notebooks_say():
    """Title, minutes, before and needed are the plans'; each part kept in `my` stands in its notebook's row."""
    text = (TEACH / "README.md").read_text("utf-8")
    row = r"^\| \[(\d\d)\]\((\S+)\) (.+?) \| (\d+) or (\d+) \| (.+?) \| (.+?) \| (.+?) \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert [row[0] for row in rows] == list(SOURCES)
    for number, name, title, short, long, before, needed, produced in rows:
        plan = (TEACH / name).read_text("utf-8")
        goal = " ".join(plan.split("\n\n")[1].split())
        assert (
            plan.startswith(f"# Lesson {number}: {title}\n")
            and f"| activity | {short} | {long} |" in plan
        )
        assert f"Before: {before}. Needed: notebook {number}, {needed}." in goal
        assert re.findall("`(.+?)`", produced) == [
            part for id, part in parts.NAMES.items() if id.startswith(number)
        ]


def minutes(path):
    """{activity: the numbers in its row of the first table}."""
    rows = re.findall(r"^\| ([^|]+?) \|((?: \d+ \|)+)$", path.read_text("utf-8"), re.MULTILINE)
    return {activity: [int(n) for n in re.findall(r"\d+", numbers)] for activity, numbers in rows}


def test_the_pilot_is_an_hour_around_the_plan_of_lesson_00():
    pilot, plan = minutes(TEACH / "pilot.md"), minutes(TEACH / "00_plan.md")
    lesson = {activity: numbers[-1] for activity, numbers in plan.items() if activity != "activity"}
    assert {activity: pilot[activity][0] for activity in lesson} == lesson
    assert sum(sum(numbers) for numbers in pilot.values()) == 60


def test_each_question_of_the_pilot_has_an_answer():
    text = (TEACH / "pilot.md").read_text("utf-8")
    parts = dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:])
    asked = [
        f"{when} {n}"
        for when in ("before", "after")
        for n in re.findall(r"^(\d)\. ", parts[f"Questions {when}"], re.MULTILINE)
    ]
    assert re.findall(r"^\| ((?:before|after) \d) \| \S", parts["Answers"], re.MULTILINE) == asked
    assert len(asked) == 10


@each_text
def test_what_a_text_names_exists(path):
    text = path.read_text("utf-8")
    for id, number in ID.findall(text):
        assert number not in SOURCES or id in ids(number), id
    assert set(re.findall(r"nanokv course (\w+)", text)) <= ACTIONS.keys()
    for action in re.findall(r"nanokv course exam ([^…\n]+?)(?: --|`|$)", text, re.MULTILINE):
        assert all(exam.chosen(NOTEBOOKS, word, 1) for word in action.split())
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)\)", text):
        headings = re.findall(r"^#+ (.+)$", (TEACH / name).read_text("utf-8"), re.MULTILINE)
        assert not anchor or anchor in {slug(heading) for heading in headings}, name
    assert set(re.findall(r"open\.\d+", text)) <= set(OPEN)


@pytest.mark.parametrize(
    "path", [p for p in PLANS if p.stem[:2] in SOURCES], ids=lambda path: path.stem
)
def test_a_plan_leaves_no_prediction_exercise_or_question_out(path):
    named = {id for id, _ in ID.findall(path.read_text("utf-8"))} | set(in_mistakes(path.stem[:2]))
    assert ids(path.stem[:2]) <= named


def in_mistakes(number: str) -> list[str]:
    return [id for id, _ in COMMENTS if id.startswith(number)]


def test_a_plan_of_the_bug_hunt_names_real_faults():
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", (TEACH / "07_plan.md").read_text("utf-8")))
    assert len(named) == 6 and named <= FAULTS.keys()
    assert {FAULTS[name].seen_by for name in named} == {"words", "logits", "bytes", "error"}


@functools.cache
def recorded_figures() -> set[str]:
    codes = (twins.read(source).code() for source in SOURCES.values())
    return {id for code in codes for id in re.findall(r'course\.figure\(\s*f?"([\w.{}]+)"', code)}


@each_text
def test_every_figure_is_recorded_in_a_notebook_and_every_number_marked(path):
    text = path.read_text("utf-8")
    missing = {id for id, _, _ in prose.figures(text)} - recorded_figures()
    assert {id for id in missing if f"{id[:2]}.{{name}}" not in recorded_figures()} == set()
    if path.stem.endswith("_plan"):
        assert prose.unmarked(re.sub(r"\([^()]*?\)", "", text)) == []


QUESTIONS_TEXT = (TEACH / "open_questions.md").read_text("utf-8")
OPEN = {
    part.split("\n", 1)[0]: part
    for part in re.split(r"^## ", QUESTIONS_TEXT, flags=re.MULTILINE)[1:]
}


@pytest.mark.parametrize("id", OPEN)
def test_an_open_question_has_a_weak_a_middling_and_a_strong_answer(id):
    part = OPEN[id]
    assert "**A full answer**" in part and "**Common wrong answer**" in part
    marks = re.findall(r"(?:^> .+\n)+\n\*\*([0-3])\.\*\*", part, re.MULTILINE)
    assert marks in (["0", "2", "3"], ["1", "2", "3"])
    assert part.count("\n> ") >= 3 and part.split("\n")[2].strip()


def test_the_rubric_has_four_levels_for_each_type():
    text = (TEACH / "rubric.md").read_text("utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    levels = {
        s.split("\n")[0]: re.findall(r"^- \*\*(\d)\*\* \S", s, re.MULTILINE) for s in sections
    }
    assert len([found for found in levels.values() if found == ["3", "2", "1", "0"]]) >= 5
    assert all(
        found in (["3", "2", "1", "0"], []) or "open" in name for name, found in levels.items()
    )


# --- mistakes -----------------------------------------------------------------------------------------------------

COMMENTS = mistakes.comments((TEACH / "mistakes.md").read_text("utf-8"))


@pytest.mark.parametrize("number", sorted({id[:2] for id, _ in COMMENTS} & SOURCES.keys()))
def test_every_registered_mistake_has_a_word_for_the_class_and_no_other(number):
    known = {(mistake.id, mistake.name) for mistake in mistakes.registered(number)}
    assert known == {key for key in COMMENTS if key[0].startswith(number)}


def test_a_mistake_was_met_in_a_thread_or_in_a_claim():
    assert set(CORE) <= {id[:2] for id, _ in COMMENTS}
    for id, (echo, advice) in COMMENTS.items():
        assert advice.endswith((".", "?")), id
        claim = re.fullmatch(r"claim (\d\.\d+)", echo)
        assert (
            not echo or (claim and claim[1] in CLAIMS) or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", echo)
        ), (id, echo)


def test_the_table_of_mistakes_shows_each_once():
    table = mistakes.table(["05", "06"], TEACH / "mistakes.md").splitlines()
    assert len(table) == 2 + len(mistakes.registered("05")) + len(mistakes.registered("06"))
    assert any(
        line.startswith("| 05.3 | row and column |") and line.endswith("#3118 |") for line in table
    )
    assert any(line.startswith("| 06.3 | axis |") for line in table), "from a judge"
    assert any(
        line.startswith("| 05.q2 | a |") for line in table
    ) and "| 05.q2 | c |" not in "\n".join(table)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in table)


def test_the_mistakes_of_a_judge_are_read_from_what_it_calls():
    source = """
def helper(x):
    return wrong(f"got {x} | no", "deep")
def other():
    return wrong("not mine", "other")
def judge(answer, case):
    return wrong("unnamed") if answer else (wrong("flat", "flat") and helper(answer))
CHECKS = (judged("x.1", judge), judged("x.2", lambda a, c: other()), judged("x.3", print))
"""
    found = mistakes.judged(source)
    assert found == {
        "x.1": [("flat", "flat"), ("deep", "got … | no")],
        "x.2": [("other", "not mine")],
        "x.3": [],
    }


# --- the exam -----------------------------------------------------------------------------------------------------


def test_an_exam_has_two_sheets_with_other_numbers_and_a_key(tmp_path):
    words = ["05", "06.1", "06.3", "06.q2", "open.1"]
    paths = exam.write(NOTEBOOKS, words, 7, tmp_path)
    a, b, key = (path.read_text("utf-8") for path in paths)
    assert [path.name for path in paths] == ["A.md", "B.md", "key.md"]
    tasks = [re.split(r"^\*\*\d+\.\*\* ", text, flags=re.MULTILINE)[1:] for text in (a, b)]
    items = [item for word in words for item in exam.chosen(NOTEBOOKS, word, 7)]
    assert len(tasks[0]) == len(tasks[1]) == len(items)
    for item, *pair in zip(items, *tasks, strict=True):
        fixed = item.kind == "open" or item.id == "06.3"
        assert (pair[0] == pair[1]) == fixed and (item.answer["A"] == item.answer["B"]) == fixed, (
            item.id
        )
    full, common = exam.open_question(TEACH / "open_questions.md", "open.1")[1:]
    assert full in key and common in key and full not in a and "open_questions.md" in key
    assert (
        "self.key" not in a
        and "self.key" in key
        and "last token fed" in key
        and "last token fed" not in a
    )
    assert "Points: ______ of 16" not in a and f"of {3 * 5 + 1 * 4}" in a
    exam.write(NOTEBOOKS, words, 7, tmp_path / "again")
    assert (tmp_path / "again" / "A.md").read_text("utf-8") == a
    exam.write(NOTEBOOKS, words, 8, tmp_path / "again")
    assert (tmp_path / "again" / "A.md").read_text("utf-8") != a


@pytest.mark.parametrize("number", sorted(SOURCES))
def test_no_sheet_holds_the_answer(number):
    """Neither the right answer as the key shows it, nor a word of it among the numbers that were drawn."""
    for check in checking.exercises(number).CHECKS:
        if check.hidden:
            continue
        item = exam.chosen(NOTEBOOKS, check.id, 7)[0]
        for name, case in exam.draw(check, 7).items():
            if check.key and check.parameters:
                right = exam._shown(check.key(case))
                assert not re.search(rf"(?<![\w.]){re.escape(right)}(?![\w.])", item.text[name]), (
                    check.id,
                    right,
                )
                drawn = {str(getattr(case, parameter)) for parameter in check.parameters}
                assert not drawn & set(map(str, [right, *texts_in(check.key(case))])), check.id


@pytest.mark.parametrize("number", sorted(SOURCES))
def test_a_sheet_needs_no_screen(number, tmp_path):
    """What is asked with numbers brings them: nothing is printed by a cell, or at the top of the notebook."""
    exam.write(NOTEBOOKS, [number], 7, tmp_path)
    for name in exam.SHEETS:
        text = (tmp_path / f"{name}.md").read_text("utf-8")
        assert re.findall(r".*(?:\bprint|\bcells?\b below|at the top).*", text) == []


@pytest.mark.parametrize(
    ("id", "numbers"),
    [
        ("02.3", ["C = 192", "H = 6", "Hk = 2", "D = 48"]),
        ("08.5", ["parameters = ", "C = ", "L = ", "H = ", "Hk = 8", "D = 128"]),
        ("09.3", ["C = ", "L = ", "H = ", "Hk = 8", "D = 128", "width of the MLP = ", "V = "]),
    ],
)
def test_a_sheet_brings_the_sizes_of_a_model(id, numbers):
    item = exam.chosen(NOTEBOOKS, id, 7)[0]
    assert all(f"`{number}" in item.text[name] for number in numbers for name in exam.SHEETS)


def texts_in(answer) -> list:
    """The texts in an answer."""
    if isinstance(answer, list | tuple | set):
        return [text for item in answer for text in texts_in(item)]
    return [answer] if isinstance(answer, str) else []


@pytest.mark.parametrize("id", ["04.4", "07.2"])
def test_what_a_trace_hides_is_not_printed(id, tmp_path):
    with pytest.raises(CourseError, match="only at a computer"):
        exam.write(NOTEBOOKS, ["05", id], 3, tmp_path)
    assert not list(tmp_path.iterdir())
    exam.write(NOTEBOOKS, [id[:2]], 3, tmp_path)
    sheet = (tmp_path / "A.md").read_text("utf-8")
    assert "cause = " not in sheet and "fault = " not in sheet and sheet.count("**1.**") == 1


@pytest.mark.parametrize("number", sorted(SOURCES))
@pytest.mark.parametrize("seed", [1, 2])
def test_the_answers_of_both_sheets_are_right_and_differ(number, seed):
    for check in checking.exercises(number).CHECKS:
        cases = exam.draw(check, seed)
        if check.key and check.parameters:
            right = {name: check.key(case) for name, case in cases.items()}
            assert all(
                check.judge(right[name], cases[name]).state == "right" for name in exam.SHEETS
            )
            assert check.judge(right["A"], cases["B"]).state == "wrong"
    for question in checking.exercises(number).QUESTIONS:
        item = exam.chosen(NOTEBOOKS, question.id, seed)[0]
        for name in exam.SHEETS:
            shown = dict(re.findall(r"^- \*\*(\w)\)\*\* (.+)$", item.text[name], re.MULTILINE))
            chosen = shown[item.answer[name].strip("*")]
            letter = next(
                letter for letter, (text, _) in question.options.items() if text == chosen
            )
            assert question.judge(letter).state == "right"


@pytest.mark.parametrize("word", ["99", "05.99", "open.99"])
def test_an_exam_of_what_does_not_exist_is_refused(word):
    with pytest.raises(CourseError):
        exam.chosen(NOTEBOOKS, word, 7)


def test_names_become_safe_and_are_not_lost(tmp_path):
    assert [
        variants.file_name(name)
        for name in ("-rf /", "=1+1", "Ada L.", "../x", "日本", "\ufeffBo", "?")
    ] == [
        "rf",
        "1_1",
        "Ada_L",
        "x",
        "日本",
        "Bo",
        "student",
    ]
    with pytest.raises(CourseError, match="not all different"):
        variants.write([SOURCES["05"]], ["ada", "Ada"], 7, tmp_path)


@pytest.mark.parametrize("name", ["CON", "nul", "Com1", "lpt9", "aux.1", "PRN "])
def test_no_student_is_called_like_a_device_of_windows(name):
    made = variants.file_name(name)
    assert made.endswith("_") and made.casefold().startswith(name.strip().casefold())
    assert variants.file_name("Conny") == "Conny" and variants.file_name("Con_Air") == "Con_Air"


# --- grading ------------------------------------------------------------------------------------------------------


START = {"event": "start"}


def small(*cells: str) -> str:
    base = twins.read(SOURCES["05"]).student()
    code = [
        {
            "cell_type": "code",
            "id": f"c{i}",
            "metadata": {},
            "outputs": [],
            "execution_count": None,
            "source": text,
        }
        for i, text in enumerate(cells)
    ]
    return json.dumps(base | {"cells": code})


def test_whatever_is_in_the_folder_costs_one_row_at_most(tmp_path, monkeypatch):
    folder = tmp_path / "in"
    (folder / "Ada_1").mkdir(parents=True)
    (folder / ".ipynb_checkpoints").mkdir()
    for name in (
        "good.ipynb",
        "=1+1.ipynb",
        "--help.ipynb",
        "a\nb.ipynb",
        "breaks.ipynb",
        "silent.ipynb",
        "Ada_1/05.ipynb",
        ".ipynb_checkpoints/good-checkpoint.ipynb",
        "._good.ipynb",
        "UPPER.IPYNB",
    ):
        (folder / name).write_text(small(name))
    with open(os.fsencode(folder) + b"/bad\xff.ipynb", "w") as file:
        file.write(small("bad"))
    (folder / "dir.ipynb").mkdir()
    (folder / "dangling.ipynb").symlink_to("/nowhere")
    (folder / "link.ipynb").symlink_to(folder / "good.ipynb")
    os.mkfifo(folder / "pipe.ipynb")
    (folder / "deep.ipynb").write_text("[" * 200_000)
    right = {"event": "check", "id": "05.1", "state": "right", "seed": 3}

    def run(notebook, limit, keep_going):
        if "breaks" in notebook["cells"][0]["source"]:
            raise IsADirectoryError("log")
        odd = [{"event": "check", "id": ["05.1"], "state": {}}, {"event": "answer", "id": "05.q1"}]
        return running.Run(
            notebook, [] if "silent" in notebook["cells"][0]["source"] else [START, *odd, right]
        )

    monkeypatch.setattr(running, "run", run)
    grading.write(grading.grade(folder), tmp_path / "t.csv")
    rows = {
        row["file"]: row
        for row in csv.DictReader(open(tmp_path / "t.csv", newline="", encoding="utf-8"))
    }
    assert {name for name, row in rows.items() if row["score"] == "1"} == {
        "good.ipynb",
        "'=1+1.ipynb",
        "'--help.ipynb",
        "a b.ipynb",
        "Ada_1/05.ipynb",
        "UPPER.IPYNB",
        "bad\\udcff.ipynb",
    }
    for name in ("dir", "dangling", "link", "pipe"):
        assert rows[f"{name}.ipynb"]["error"] == f"{name}.ipynb: not a regular file"
    assert (
        "RecursionError" in rows["deep.ipynb"]["error"]
        and "IsADirectoryError" in rows["breaks.ipynb"]["error"]
    )
    assert "course.start" in rows["silent.ipynb"]["error"] and len(rows) == 14


def test_a_submission_that_the_key_does_not_know_is_reported(tmp_path, monkeypatch):
    (tmp_path / "Bo.ipynb").write_text(small("x"))
    right = {"event": "check", "id": "05.1", "state": "right", "seed": 3}
    monkeypatch.setattr(running, "run", lambda *args, **more: running.Run({}, [START, right]))
    assert "not in the key" in grading.row(tmp_path / "Bo.ipynb", 1, {})["error"]
    known = grading.row(tmp_path / "Bo.ipynb", 1, {("Bo", "05"): 3})
    assert known["error"] == "" and known["score"] == 1
    assert grading.row(tmp_path / "Bo.ipynb", 1, {("Bo", "05"): 4})["05.1"] == "other variant"


def test_a_log_that_was_tampered_with_says_so(tmp_path, monkeypatch):
    key, path = b"k" * 32, tmp_path / "log"
    (tmp_path / "key").write_bytes(key)
    for name, value in ((log.VARIABLE, path), (log.KEY_FILE, tmp_path / "key")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(log, "_sealed", log._plain)
    log.take_key()
    assert not (tmp_path / "key").exists() and log.KEY_FILE not in os.environ
    for number in range(3):
        log.note("check", id=f"05.{number}", state="wrong")
    lines = path.read_text().splitlines()
    whole = [{"event": "check", "id": f"05.{number}", "state": "wrong"} for number in range(3)]
    forged = json.dumps({"event": "check", "id": "05.1", "state": "right"})
    for changed, events, strange in (
        (lines, whole, 0),
        ([*lines, forged], whole, 1),
        ([*lines, "3 " + "0" * 64 + " " + forged], whole, 1),
        ([*lines, lines[0]], whole, 1),
        (lines[1:], whole[1:], 1),
        ([lines[0], lines[2]], [whole[0], whole[2]], 1),
        ([lines[0].replace("wrong", "right"), *lines[1:]], whole[1:], 2),
        (["", "x y", "9" * 99 + " a b"], [], 3),
    ):
        path.write_text("\n".join(changed))
        assert log.read_sealed(path, key) == (events, strange)


def test_a_killed_process_is_not_blamed_on_what_it_said_last():
    assert running._ended(-9, "UserWarning: x").startswith(
        "the process that runs it was killed (SIGKILL)"
    )
    assert running._ended(1, "OSError: no kernel") == "OSError: no kernel"
    assert running._ended(3, "UserWarning: x") == "the process that runs it ended with code 3"


@pytest.mark.parametrize(
    "code",
    [
        "from nanokv.school.course import log",
        "from nanokv.school.course import checking as c",
        "from nanokv.course import log",
        "course.session._tell('check')",
        "os.environ['NANOKV_COURSE_LOG']",
    ],
)
def test_code_that_names_the_judgement_is_pointed_out(tmp_path, monkeypatch, code):
    monkeypatch.setattr(running, "run", lambda *args, **more: running.Run({}, [START]))
    for name, text, told in (("a", code, True), ("b", "course.check('05.1', (26, 8))", False)):
        (tmp_path / f"{name}.ipynb").write_text(small(text))
        assert ("look at it" in grading.row(tmp_path / f"{name}.ipynb", 1, None)["error"]) == told


@pytest.mark.parametrize(
    "saved",
    [
        b"student,notebook,seed,05.1\nBo,05,3,x\n",
        b"\xef\xbb\xbfstudent,notebook,seed\r\nBo,05,3\r\n",
        b'\xef\xbb\xbfstudent;notebook;seed;05.1\r\nBo;5;3;"1,2"\r\n',
        b"student\tnotebook\tseed\nBo\t5\t3\n",
    ],
)
def test_a_key_that_a_spreadsheet_has_saved_is_read(tmp_path, saved):
    (tmp_path / "key.csv").write_bytes(saved)
    assert grading.read_seeds(tmp_path / "key.csv") == {("Bo", "05"): 3}


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (b"name,notebook,seed\nBo,05,3\n", "key.csv: no column student"),
        (b"", "no column notebook, seed, student"),
        (b"student,notebook,seed\nBo,05,1E+09\n", "line 2, column seed: '1E+09'"),
        (b"student,notebook,seed\nBo,05\n", "line 2, column seed: None"),
        (b"student,notebook,seed\nJ\xf6,05,3\n", "key.csv: not UTF-8 at byte 23"),
    ],
)
def test_a_key_that_is_none_is_the_teachers_error(tmp_path, saved, words, capsys):
    (tmp_path / "key.csv").write_bytes(saved)
    (tmp_path / "Bo.ipynb").write_text(small("x"))
    out = tmp_path / "r.csv"
    assert (
        main(["course", "grade", str(tmp_path), "--key", str(tmp_path / "key.csv"), "-o", str(out)])
        == 2
    )
    assert words in capsys.readouterr().err and not out.exists()


def test_names_in_another_encoding_are_the_teachers_error(tmp_path, capsys):
    (tmp_path / "names.txt").write_bytes("Jörg".encode("latin-1"))
    assert (
        main(
            [
                "course",
                "variants",
                "05",
                "--students",
                str(tmp_path / "names.txt"),
                "-o",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "names.txt: not UTF-8 at byte 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["build", "99"], ["claims", "99"], ["book", "99"], ["slides", "5"], ["exam", "5"]]
)
def test_what_does_not_exist_is_not_passed_over(words, capsys):
    assert (
        main(["course", *words, "--folder", str(NOTEBOOKS)]) == 2
        and words[1] in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "words", [["-o", "X", "05", "06"], ["05", "-o", "X", "06"], ["05", "06", "-o", "X"]]
)
def test_flags_may_stand_anywhere(words, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(
        slides, "build", lambda paths, out, limit: made.append((paths, str(out))) or []
    )
    assert main(["course", "slides", *words, "--folder", str(NOTEBOOKS)]) == 0
    assert made == [([SOURCES["05"], SOURCES["06"]], "X")]
    for bad in (["--ot", "X"], []):
        assert main(["course", *bad, "slide", *words]) == 2 and capsys.readouterr().err


def test_a_notebook_is_named_by_its_number_or_whole():
    assert (
        twins.chosen(NOTEBOOKS, ["05_the_waste"])
        == twins.chosen(NOTEBOOKS, ["05"])
        == [SOURCES["05"]]
    )
    assert twins.chosen(NOTEBOOKS) == list(SOURCES.values())
    assert exam.chosen(NOTEBOOKS, "05_the_waste", 7) == exam.chosen(NOTEBOOKS, "05", 7)


def test_a_grade_is_kept_as_soon_as_it_is_there(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.ipynb").write_text(small("x"))
    out, seen = tmp_path / "r.csv", []

    def run(*args, **more):
        seen.append(out.read_text().splitlines() if out.exists() else None)
        return running.Run({}, [{"event": "check", "id": "05.1", "state": "right"}])

    monkeypatch.setattr(running, "run", run)
    words = ["course", "grade", str(tmp_path), "-o"]
    assert (
        main([*words, str(tmp_path / "nowhere" / "r.csv")]) == 2
        and main([*words, str(tmp_path)]) == 2
    )
    assert seen == [] and "nowhere" in capsys.readouterr().err, "said before anything is run"
    assert main([*words, str(out)]) == 0
    assert [len(lines) for lines in seen] == [1, 2] and seen[1][1].startswith("a,a.ipynb,05,1,")
    assert len(out.read_text().splitlines()) == 3


def test_a_submission_is_called_like_its_file_or_like_its_folder(tmp_path, monkeypatch):
    for name in (
        "Ada/05_the_waste",
        "Bo_1/05_the_waste-Copy1",
        "05_the_waste",
        "group/Cy",
        "Di/answer",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.ipynb").write_text(small("x"))
    monkeypatch.setattr(running, "run", lambda *args, **more: running.Run({}, [{"event": "start"}]))
    rows = {row["file"]: row for row in grading.grade(tmp_path)}
    assert {file: row["student"] for file, row in rows.items()} == {
        "05_the_waste.ipynb": "05_the_waste",
        "Ada/05_the_waste.ipynb": "Ada",
        "Bo_1/05_the_waste-Copy1.ipynb": "Bo_1",
        "Di/answer.ipynb": "answer",
        "group/Cy.ipynb": "Cy",
    }
    (tmp_path / "key.csv").write_text(
        "student,notebook,seed\nAda,05,1\nCy,05,2\nDi,05,3\nBo,05,4\n"
    )
    rows = {
        row["file"].split("/")[0]: row for row in grading.grade(tmp_path, key=tmp_path / "key.csv")
    }
    assert {name: (row["student"], row["error"] == "") for name, row in rows.items()} == {
        "Ada": ("Ada", True),
        "group": ("Cy", True),
        "Di": ("Di", True),
        "Bo_1": ("Bo_1", False),
        "05_the_waste.ipynb": ("05_the_waste", False),
    }


def test_the_class_is_counted():
    rows = [
        {"student": "a", "05.1": "right"},
        {"student": "b", "05.1": "right"},
        {"student": "c", "05.1": "wrong: x"},
    ]
    assert grading.tally([*rows, {"student": "d", "error": "?"}]) == "05.1    2 right, 1 wrong: x\n"


# --- with a run ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_plan
def test_the_figures_of_a_plan_are_what_was_measured(path):
    quoted = prose.figures(path.read_text("utf-8"))
    recorded = {}
    for number in {id[:2] for id, _, _ in quoted}:
        recorded |= solved(SOURCES[number]).figures()
    wrong = [
        f"{id}: {text}, {recorded[id]}"
        for id, allowed, text in quoted
        if not prose.agrees(text, recorded[id], allowed)
    ]
    assert wrong == []


@pytest.mark.slow
def test_a_cell_that_never_ends_is_named_by_its_time():
    done = running.run(json.loads(small("while True: pass", "print(5)")), 24, keep_going=True)
    assert done.error == "a cell took longer than 6 s"
    assert "5" in done.notebook["cells"][1]["outputs"][0]["text"]


@pytest.mark.slow
def test_a_notebook_that_fills_the_memory_is_stopped(monkeypatch):
    monkeypatch.setattr(running, "MEMORY_LIMIT", 2**30)
    done = running.run(
        json.loads(small("x = []\nwhile True: x.append(b'1' * 10**7)")), 300, keep_going=True
    )
    assert done.error == "stopped at 1 GiB of memory"
