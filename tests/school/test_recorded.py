"""What another model printed: how it is recorded, that it fits the notebooks, and where a reader sees it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat.v4 as form
import pytest
from IPython.core.events import EventManager, available_events

import nanokv.loading
from nanokv.errors import CourseError
from nanokv.school.course import book, recorded, running, session, twins

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = {path.stem[:2]: path for path in twins.sources(NOTEBOOKS)}
FILES = sorted(recorded.FOLDER.glob("recorded-*.json"))
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
ONE = recorded.Recording(
    "big.gguf", "2026-11-23", "nanokv course record 05", {recorded.key("print(size)"): "7 < 9\n"}
)


def source(*cells: twins.Cell) -> twins.Source:
    return twins.Source("05_a", cells)


def code(text: str, role: str = "both") -> twins.Cell:
    return twins.Cell("code", text, role)


def stream(text: str) -> dict:
    return form.new_output("stream", name="stdout", text=text)


# --- recording ----------------------------------------------------------------------------------------------------


def test_what_differs_is_kept_but_for_answers_and_what_is_the_readers_own(monkeypatch, tmp_path):
    made = source(
        twins.Cell("markdown", "# 05"),
        code("where"),
        code("same"),
        code("stub", "exercise"),
        code("own", "solution"),
        code("value"),
        code("picture"),
        code("wrong"),
    )
    model = str(tmp_path / "big.gguf")

    def run(notebook, limit, env):
        name = env["NANOKV_MODEL"]
        value = form.new_output("execute_result", data={"text/plain": f"value of {name}"})
        picture = form.new_output("display_data", data={"text/plain": f"<figure of {name}>"})
        outputs = {
            "where": [
                stream(
                    f"{name}: 30 layers\ncache: the reference (none)\n05.a: you predicted 3.\nToo slow?\n"
                )
            ],
            "same": [stream("2\n")],
            "own": [stream(name)],
            "value": [value],
            "picture": [picture],
            "wrong": [stream(f"05.1: right. {name}")],
        }
        cells = [
            form.new_code_cell(text, outputs=outputs[text])
            for text in (
                "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
            )
        ]
        return running.Run({"cells": [form.new_markdown_cell("# 05"), *cells]})

    monkeypatch.setattr(running, "run", run)
    found = recorded.record(made, model, 9)
    assert found.cells == {
        recorded.key("where"): "big.gguf: 30 layers\n",
        recorded.key("value"): "value of big.gguf\n",
    }
    assert (found.model, found.command) == (
        "big.gguf",
        "NANOKV_MODEL=big.gguf nanokv course record 05",
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    path = recorded.path_of("05", tmp_path)
    recorded.write(found, path)
    monkeypatch.setattr(recorded, "path_of", lambda number: tmp_path / f"recorded-{number}.json")
    assert recorded.read("05") == found and recorded.read("06") is None


def test_a_run_that_fails_records_nothing(monkeypatch):
    monkeypatch.setattr(
        running, "run", lambda *given, env: running.Run(None, error="stopped after 9 s")
    )
    with pytest.raises(CourseError, match=r"05_a on big\.gguf: stopped after 9 s"):
        recorded.record(source(code("x")), "big.gguf", 9)


def test_the_bundled_model_is_not_recorded(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "record", None)
    for name in ("", "tiny"):
        monkeypatch.setattr(
            "nanokv.apps.cli.commands.course.environment", lambda _, name=name: name
        )
        status, out, err = cli("course", "record", "05", "--folder", NOTEBOOKS, "-o", tmp_path)
        assert (
            status == 2
            and "a model other than the bundled one" in err
            and "NANOKV_MODEL=" in err
            and out == ""
        )


# --- what is committed --------------------------------------------------------------------------------------------


def test_there_are_recordings_and_they_are_small():
    assert FILES and sum(path.stat().st_size for path in FILES) < 300_000
    said = re.search(
        r"Recorded\s+so\s+far:\s+([\d,\s]+)\.", (NOTEBOOKS / "README.md").read_text("utf-8")
    )[1]
    assert re.split(r",\s+", said) == [path.stem.removeprefix("recorded-") for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_recording_fits_its_notebook(path):
    """Where it fails, a cell was changed after the recording: record the notebook again."""
    number = path.stem.removeprefix("recorded-")
    found, cells = recorded.read(number), twins.read(SOURCES[number]).cells
    there = {
        recorded.key(cell.text) for cell in cells if cell.kind == "code" and cell.role == "both"
    }
    again = f"NANOKV_MODEL={MODEL} nanokv course record {number} --force"
    assert found.cells and set(found.cells) <= there, again
    assert found.model == MODEL and f"{found.command} --force" == again
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(?:root|home|tmp)/", text) and not re.search(rf'"{number}\.\w+: ', text)


# --- what a reader sees -------------------------------------------------------------------------------------------


@pytest.fixture
def shell(monkeypatch):
    """An IPython without a kernel: run(code) ends a cell and returns what was shown below it."""
    shown = []
    monkeypatch.setattr(
        recorded.figures, "display", lambda data, metadata: shown.append(data["text/plain"])
    )
    events = EventManager(None, available_events)

    def run(code):
        shown.clear()
        events.trigger("post_run_cell", SimpleNamespace(info=SimpleNamespace(raw_cell=code)))
        return list(shown)

    yield SimpleNamespace(events=events, run=run)
    recorded.follow(None, None)


def test_the_recording_stands_below_the_cell_until_another_start(shell):
    recorded.follow(shell, ONE)
    recorded.follow(shell, ONE)
    assert shell.run("print(size)\n") == [
        "Recorded with big, 2026-11-23\n$ nanokv course record 05\n7 < 9\n"
    ], "once, with or without the newline at its end"
    assert shell.run("print(size + 1)") == [], "a cell that was changed has none"
    recorded.follow(shell, None)
    assert shell.run("print(size)") == []


def test_a_model_that_cannot_be_loaded_leads_to_the_recording(shell, monkeypatch, capsys):
    import IPython

    monkeypatch.setattr(recorded, "read", lambda number: ONE if number == "05" else None)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(session.log, "keep", lambda folder: None)
    monkeypatch.setenv("NANOKV_MODEL", "./nope.gguf")
    with pytest.raises(CourseError) as told:
        session.start("05")
    assert 'course.start("05", model="tiny") also shows what big.gguf printed' in told.value.hint
    with pytest.raises(CourseError) as told:
        session.start("06")
    assert "tiny" not in told.value.hint, "there is no recording"
    session.start("05", model="tiny")
    said = capsys.readouterr().out
    assert (
        said.startswith("tiny: 6 layers")
        and "you see what big.gguf printed" in said
        and shell.run("print(size)")
    )
    monkeypatch.delenv("NANOKV_MODEL")
    session.start("05")
    assert "big.gguf" not in capsys.readouterr().out
    assert shell.run("print(size)") == [], "nobody asked for another model"


def test_a_model_that_runs_has_its_own_outputs(shell, monkeypatch, capsys):
    tiny = nanokv.loading.load("tiny")
    monkeypatch.setattr(nanokv.loading, "load", lambda name, **_: tiny)
    monkeypatch.setattr(recorded, "read", lambda number: ONE)
    monkeypatch.setenv("NANOKV_MODEL", "a/large-one")
    recorded.follow(shell, ONE)
    session.start("05")
    said = capsys.readouterr().out
    assert 'model="tiny")' in said and "shows below its outputs what big.gguf printed" in said
    assert shell.run("print(size)") == []


def test_the_book_shows_it_folded_and_the_run_stays_as_it_was():
    cells = [form.new_code_cell("print(size)", outputs=[stream("3\n")]), form.new_code_cell("1")]
    notebook = form.new_notebook(cells=cells)
    page = book.render(recorded.beneath(notebook, ONE))
    assert (
        page.count('<details class="recorded"><summary>Recorded with big, 2026-11-23</summary>')
        == 1
    )
    assert "<pre>$ nanokv course record 05\n7 &lt; 9\n</pre>" in page
    assert page.index("3\n") < page.index("7 &lt; 9") and len(notebook["cells"][0]["outputs"]) == 1
    assert "recorded" not in book.render(recorded.beneath(notebook, None))


def test_a_cell_is_known_in_the_source_and_in_the_students_notebook():
    for number, path in SOURCES.items():
        keys = {recorded.key(cell.text) for cell in twins.read(path).cells if cell.kind == "code"}
        made = json.loads(next(NOTEBOOKS.glob(f"{number}_*.ipynb")).read_text(encoding="utf-8"))
        cells = [
            recorded.key("".join(cell["source"]))
            for cell in made["cells"]
            if cell["cell_type"] == "code"
        ]
        assert set(cells) <= keys and len(cells) > 5
