"""The course in the formats of others: nbgrader's assignments, Moodle's GIFT. Neither program is needed here: what they
do with a cell or with a line is written down once more, from their documentation.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokv.apps.cli import main
from nanokv.errors import CourseError
from nanokv.school import course
from nanokv.school.course import checking, exam, gift, log, nbgrader, twins

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = {path.stem[:2]: path for path in sorted((NOTEBOOKS / "source").glob("*.py"))}
REGION = re.compile(r"^### BEGIN SOLUTION\n.*?^### END SOLUTION$", re.DOTALL | re.MULTILINE)


def assignment(number):
    return nbgrader.assignment(twins.read(SOURCES[number]))


def tagged(notebook):
    """[(nbgrader's metadata, source)] of the cells that have it."""
    cells = [
        (cell["metadata"].get("nbgrader"), "".join(cell["source"])) for cell in notebook["cells"]
    ]
    return [(meta, text) for meta, text in cells if meta]


def released(notebook):
    """The sources of the code cells after `nbgrader generate_assignment` with our configuration."""
    texts = [
        ("".join(c["source"]), c["metadata"].get("nbgrader", {}))
        for c in notebook["cells"]
        if c["cell_type"] == "code"
    ]
    return [REGION.sub("", text).strip() if meta.get("solution") else text for text, meta in texts]


@pytest.mark.parametrize("number", SOURCES)
def test_an_assignment_has_the_metadata_that_nbgrader_wants(number):
    notebook, module = assignment(number), checking.exercises(number)
    metas = [meta for meta, _ in tagged(notebook)]
    ids = [meta["grade_id"] for meta in metas]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-zA-Z0-9_\-]+", id) for id in ids)
    for meta in metas:
        assert meta["schema_version"] == 3
        assert all(isinstance(meta[flag], bool) for flag in ("grade", "solution", "locked", "task"))
        assert meta["grade"] == ("points" in meta) and not (meta["locked"] and meta["solution"])
        assert meta["locked"] or not meta["grade"], "a student could change the test"
    points = {meta["grade_id"]: meta["points"] for meta in metas if meta["grade"]}
    assert sum(points.values()) == 3 * len(module.CHECKS) + len(module.QUESTIONS)
    assert {points[f"test-{c.id.replace('.', '-')}"] for c in module.CHECKS} == {3}
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert notebook["metadata"]["nanokv"]["notebook"] == number, "nanokv course grade takes it too"


def lines(texts):
    """All that are not empty: a cell with several checks has become several cells."""
    return [line.rstrip(";") for text in texts for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("number", SOURCES)
def test_what_is_released_is_the_students_notebook_and_no_solution(number):
    source = twins.read(SOURCES[number])
    code = released(nbgrader.assignment(source))
    assert not [text for text in code if "SOLUTION" in text]
    bare = [re.sub(r'^assert (course\.\w+\(.*\)), ".*"$', r"\1", text) for text in code]
    student = [
        "".join(cell["source"]) for cell in source.student()["cells"] if cell["cell_type"] == "code"
    ]
    assert lines(bare) == lines(student)
    stubs = {c.text for c in source.cells if c.role == "exercise"}
    kept = {text for meta, text in tagged(nbgrader.assignment(source)) if meta["solution"]}
    assert {REGION.sub("", text).strip() for text in kept} <= stubs and all(
        REGION.search(text) for text in kept
    )


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("right", True),
        ("slip", False),
        (object(), False),
        (..., False),
        (None, False),
        ("x" * 10**5, False),
        (1e400, False),
    ],
)
def test_a_test_cell_raises_unless_the_answer_is_right(answer, passes, capsys):
    check = checking.find("05.1")
    case, known = check.case(), {"right": check.key, "slip": check.mistakes[0].gives}
    answer = known[answer](case) if isinstance(answer, str) and answer in known else answer
    (cell,) = [text for meta, text in tagged(assignment("05")) if meta["grade_id"] == "test-05-1"]
    names = {"course": course, "without_and_with": answer}
    if passes:
        exec(cell, names)
    else:
        with pytest.raises(AssertionError, match=r"05\.1 is not right yet"):
            exec(cell, names)
    assert capsys.readouterr().out.startswith("05.1: "), "the student is told what is wrong"


def test_an_id_that_is_tested_twice_or_never_is_noticed():
    source = twins.read(SOURCES["00"])
    last = next(i for i, cell in enumerate(source.cells) if 'course.check("00.4"' in cell.text)
    for cells in (
        source.cells[:last] + source.cells[last + 1 :],
        (*source.cells, source.cells[last]),
    ):
        with pytest.raises(CourseError, match="tested once each"):
            nbgrader.assignment(twins.Source(source.name, cells))


def test_code_beside_a_check_stays_and_is_not_graded():
    text = 'x = 1\ncourse.check("05.1", a);\nprint(x)\ncourse.answer(\n    "05.q1", b)\n'
    pairs = list(nbgrader._tests(twins.Cell("code", text)))
    assert [cell.text for cell, _ in pairs] == [
        "x = 1",
        'assert course.check("05.1", a), "05.1 is not right yet"',
        "print(x)",
        'assert course.answer(\n    "05.q1", b), "05.q1 is not right yet"',
    ]
    assert [meta.get("points") for _, meta in pairs] == [None, 3, None, 1]


def test_the_folder_is_laid_out_as_nbgrader_wants(tmp_path, capsys):
    (tmp_path / "nbgrader_config.py").write_text("# the teacher's own")
    assert (
        main(["course", "nbgrader", "05", "06", "--folder", str(NOTEBOOKS), "-o", str(tmp_path)])
        == 0
    )
    written = {
        Path(line).relative_to(tmp_path).as_posix() for line in capsys.readouterr().out.split()
    }
    assert written == {
        f"source/{name}/{file}"
        for name in ("05_the_waste", "06_build_the_cache")
        for file in (f"{name}.ipynb", "glossary.md", "claims.md")
    }
    assert (tmp_path / "nbgrader_config.py").read_text() == "# the teacher's own"
    home = tmp_path / "source" / "05_the_waste"
    notebook = json.loads((home / "05_the_waste.ipynb").read_text("utf-8"))
    texts = [
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    ]
    links = {name for text in texts for name in re.findall(r"\]\((?!https?:)([^)#]+)", text)}
    assert "../06_build_the_cache/06_build_the_cache.ipynb" in links
    assert all((home / link).exists() for link in links)


def test_the_configuration_is_python_that_names_what_it_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "_own", None)
    monkeypatch.delenv(log.VARIABLE, raising=False)
    log.keep(tmp_path)  # as the first cell of a notebook does, whoever runs it
    config = SimpleNamespace(
        CourseDirectory=SimpleNamespace(),
        ClearSolutions=SimpleNamespace(),
        ExecutePreprocessor=SimpleNamespace(),
    )
    exec(nbgrader.CONFIG, {"get_config": lambda: config})
    assert (
        config.ClearSolutions.code_stub == {"python": ""}
        and config.ExecutePreprocessor.timeout >= 180
    )
    log.note("check", id="05.1", state="right")
    assert log.folder() is None and not list(tmp_path.iterdir()), (
        "a graded run keeps nothing and takes no part"
    )


# --- Moodle -------------------------------------------------------------------------------------------------------

ESCAPE = re.compile(r"\\(.)")
# A character that stands for an escaped one while the text is cut, with its code after it.
MARK = chr(0xE000)


def read_gift(text):
    """[(category, name, text, kind, [(weight, answer, feedback)], general feedback)], by Moodle's grammar: blank
    lines separate questions, the first { and } that are not escaped hold the answers, `=` and `~` begin one, `#` its
    feedback, `####` the general one.
    """
    found, category = [], ""
    for block in re.split(r"\n\s*\n", text):
        kept = "\n".join(
            line for line in block.split("\n") if not line.strip().startswith("//")
        ).strip()
        masked = ESCAPE.sub(lambda m: f"{MARK}{ord(chr(10) if m[1] == 'n' else m[1]):03}", kept)
        if masked.startswith("$CATEGORY:"):
            category = plain_text(masked.removeprefix("$CATEGORY:"))
        elif masked:
            name, asked, inside = re.fullmatch(
                r"::(.*?)::([^{}]*)\{([^{}]*)\}", masked, re.DOTALL
            ).groups()
            inside, _, general = inside.strip().partition("####")
            kind = (
                "essay"
                if not inside
                else "number"
                if inside[0] == "#"
                else "choice"
                if "~" in inside
                else "short"
            )
            answers = [
                read_answer(part) for part in re.findall(r"[=~][^=~]*", inside.removeprefix("#"))
            ]
            found.append(
                (category, plain_text(name), plain_text(asked), kind, answers, plain_text(general))
            )
    return found


def read_answer(part):
    """(percent, answer, feedback) of `=answer#feedback`, `~%-50%answer`."""
    answer, _, feedback = part[1:].strip().partition("#")
    weight = re.match(r"%(-?\d{1,2}\.?\d*)%", answer)
    percent = float(weight[1]) if weight else 100.0 if part[0] == "=" else 0.0
    return percent, plain_text(answer[weight.end() if weight else 0 :]), plain_text(feedback)


def plain_text(text):
    """Without the name of its format in front, and with the escaped characters back."""
    text = re.sub(r"^\[(?:markdown|plain|html|moodle)\]", "", text.strip())
    return re.sub(rf"{MARK}(\d{{3}})", lambda m: chr(int(m[1])), text).strip()


def exported(*words, number=7):
    entries = [entry for word in words for entry in gift.of_word(NOTEBOOKS, word, number)[0]]
    return read_gift(gift.page(entries, number))


@pytest.mark.parametrize("number", SOURCES)
def test_every_question_of_the_quiz_comes_back_with_its_comments(number):
    read = {name: rest for _, name, *rest in exported(number)}
    for question in checking.exercises(number).QUESTIONS:
        text, kind, answers, _ = read[question.id]
        assert text == question.text and kind == "choice"
        assert [(answer, feedback) for _, answer, feedback in answers] == [
            tuple(o) for o in question.options.values()
        ]
        right = [
            letter
            for letter, (percent, _, _) in zip(question.options, answers, strict=True)
            if percent == 100
        ]
        assert len(right) == 1 and question.judge(right[0]).state == "right"
        assert {percent for percent, _, _ in answers} == {0, 100}


@pytest.mark.parametrize("number", SOURCES)
def test_every_number_comes_back_with_its_tolerance_and_its_mistakes(number):
    """The numbers of all parts together are an answer that the check itself takes; those of a mistake are not."""
    read, tried = exported(number), 0
    for check in checking.exercises(number).CHECKS:
        for sheet, case in (
            exam.draw(check, 7) if check.key and check.parameters and not check.hidden else {}
        ).items():
            parts = [rest for _, name, *rest in read if re.match(rf"{check.id} {sheet}( |$)", name)]
            if not parts or parts[0][1] == "short":
                continue
            numbers = [
                [answer.split(":") for _, answer, _ in answers if answer]
                for _, _, answers, _ in parts
            ]
            first = [float(part[0][0]) for part in numbers]
            expected = exam.plain(check.key(case))
            form = expected if isinstance(expected, list) else [expected]
            assert (
                len(first) == len(form)
                and check.judge(first if len(first) > 1 else first[0], case).state == "right"
            )
            for part, right, (_, _, answers, _) in zip(numbers, first, parts, strict=True):
                tolerance, allowed = (
                    float(part[0][1]),
                    max(check.near[1], check.near[0] * abs(right)),
                )
                exact = tolerance == 0 and check.near == checking.EXACT
                assert exact or tolerance == pytest.approx(allowed, rel=1e-4)
                assert all(abs(float(value) - right) > float(part[0][1]) for value, _ in part[1:])
                told = {mistake.message for mistake in check.mistakes}
                assert {
                    feedback for percent, answer, feedback in answers if answer and percent == 0
                } <= told
                assert answers[-1] == (0, "", check.otherwise) if check.otherwise else True
            tried += 1
    assert tried >= 2 or number in ("03", "04", "06", "07", "15"), "nothing was compared"


def test_shapes_are_short_answers_and_both_sheets_are_in_one_category():
    read = exported("06.1")
    assert {category for category, *_ in read} == {f"nanokv/06/06.1 {i} of 3" for i in (1, 2, 3)}
    assert [name for _, name, *_ in read] == [
        f"06.1 {sheet} {i} of 3" for i in (1, 2, 3) for sheet in "AB"
    ]
    check = checking.find("06.1")
    for sheet, case in exam.draw(check, 7).items():
        for i, shape in enumerate(check.key(case)):
            (found,) = [rest for _, name, *rest in read if name == f"06.1 {sheet} {i + 1} of 3"]
            right = [answer for percent, answer, _ in found[2] if percent == 100]
            inside = str(shape)[1:-1]
            texts = [
                text
                for form in (f"({inside})", f"[{inside}]", inside)
                for text in (form, form.replace(" ", ""))
            ]
            assert right == texts and found[1] == "short"
            assert f"written like `{tuple(range(9, 9 - len(shape), -1))}`" in found[0]


HOSTILE = "~a=b #c {d} e:f \\n \\\\ \\= %50%x -> y // z $CATEGORY: q ::w:: ####\n\n[html] <b>&amp;</b> é\t[plain]"


@settings(max_examples=60, deadline=None)
@given(
    *[
        st.text(st.sampled_from(r"~=#{}:%\[]n&0 ab" + "\n"), min_size=1, max_size=30)
        for _ in range(3)
    ]
)
def test_hostile_characters_come_back_as_they_were(text, option, comment):
    texts = [part.strip() for part in (text, option, comment)]
    question = checking.Question(
        "05.q1",
        texts[0],
        {"a": [HOSTILE, texts[2]], "b": ["%50%" + texts[1], HOSTILE]},
        checking.questions("05")[0].right,
    )
    if gift.PLACEHOLDER.search("|".join(texts)):
        with pytest.raises(CourseError, match="GIFT cannot hold"):
            gift.choice(question)
        return
    ((_, name, asked, kind, answers, _),) = read_gift(gift.page([gift.choice(question)], 0))
    assert (name, asked, kind) == ("05.q1", texts[0], "choice")
    assert answers == [(0, HOSTILE, texts[2]), (100, "%50%" + texts[1], HOSTILE)]
    assert not set("~=#{}:\n\\") & set(ESCAPE.sub("", gift.escaped(text + HOSTILE))), (
        "each of them has its backslash"
    )


def test_of_two_mistakes_with_one_number_the_one_whose_other_parts_are_right_is_told():
    check = checking.find("05.3")
    ((_, _, _, _, answers, _),) = [one for one in exported("05.3") if one[1] == "05.3 A 2 of 2"]
    case = exam.draw(check, 7)["A"]
    wrong = next(mistake for mistake in check.mistakes if mistake.name == "without itself")
    told = {
        answer.partition(":")[0]: feedback for percent, answer, feedback in answers if percent == 0
    }
    assert told[str(wrong.gives(case)[1])] == wrong.message


def test_what_is_named_twice_is_asked_once_and_all_that_is_left_out_is_named(tmp_path, capsys):
    out = tmp_path / "q.gift"
    assert (
        main(["course", "gift", "06", "06.1", "06", "--folder", str(NOTEBOOKS), "-o", str(out)])
        == 0
    )
    names = [name for _, name, *_ in read_gift(out.read_text("utf-8"))]
    assert len(names) == len(set(names)) and "06.1 A 1 of 3" in names
    left, asked = capsys.readouterr().err, {name.partition(" ")[0] for name in names}
    assert [
        c.id for c in checking.exercises("06").CHECKS if c.id not in asked and c.id not in left
    ] == []
    assert (
        main(["course", "exam", "06.1", "06.1", "--folder", str(NOTEBOOKS), "-o", str(tmp_path)])
        == 0
    )
    assert (tmp_path / "A.md").read_text("utf-8").count("(3 points)") == 1


def test_an_open_question_is_an_essay_with_its_full_answer():
    ((category, name, asked, kind, answers, general),) = exported("open.1")
    assert (category, name, kind, answers) == ("nanokv/open/open.1", "open.1", "essay", [])
    assert asked.startswith("Why may a decoder-only model") and "causal mask" in general


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["05.2"], "05.2: its answer is no number"),
        (["04.4"], "04.4 works only at a computer"),
        ([], "which questions?"),
        (["05.99"], "no exercise '05.99'"),
        (["open.99"], "no open.99"),
        (["99"], "no notebook 99"),
        (["~"], "no notebook ~"),
    ],
)
def test_what_gift_cannot_ask_is_said(words, said, tmp_path, capsys):
    out = tmp_path / "q.gift"
    assert main(["course", "gift", *words, "--folder", str(NOTEBOOKS), "-o", str(out)]) == 2
    assert said in capsys.readouterr().err and not out.exists()


def test_a_file_is_the_same_for_the_same_seed_and_tells_what_it_left_out(tmp_path, capsys):
    texts, words = (
        [],
        ["course", "gift", "00", "--folder", str(NOTEBOOKS), "-o", str(tmp_path / "q"), "--force"],
    )
    for seed in ("7", "7", "8"):
        assert (
            main([*words, "--seed", seed]) == 0
            and "left out" in (err := capsys.readouterr().err)
            and "00.3" in err
        )
        texts.append((tmp_path / "q").read_text("utf-8"))
    assert texts[0] == texts[1] != texts[2] and "](glossary" not in texts[0]
