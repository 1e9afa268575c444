"""Every notebook executed, as a student gets it and as it is solved, without a network; submissions graded; pages made.

The budget is processor time, so that a busy machine does not fail a notebook.
"""

import copy
import csv
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from nanokv.school.course import book, checking, containing, grading, prose, running, twins
from solved_notebooks import WALL, solved

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))
NUMBERS = [path.stem[:2] for path in SOURCES]
# Of one core, at most: the slowest takes 40 s alone, and several times that beside a test that streams gigabytes
# through the processor's cache.
SECONDS, MEMORY = 360, 4 * 2**30
SLEEP = 10**5 + os.getpid()  # seconds that no other process of this machine sleeps

pytestmark = pytest.mark.slow


def source(path: Path, *marks):
    """A parameter; the kernels of notebook 16 need Triton, which has a wheel for Linux only."""
    here = path.stem[:2] != "16" or find_spec("triton") is not None
    skips = [] if here else [pytest.mark.skip(reason="Triton has no wheel for this system")]
    return pytest.param(path, id=path.stem[:2], marks=[*marks, *skips])


each_source = pytest.mark.parametrize("path", [source(path) for path in SOURCES])


def ids(number: str, kind: str) -> list[str]:
    return [item.id for item in getattr(checking.exercises(number), kind)]


@each_source
def test_the_solution_runs_offline_within_its_budget(path):
    done = solved(path)
    assert done.error == "" and done.stderr == ""
    assert 0 < done.processor < SECONDS and 0 < done.peak < MEMORY


@each_source
def test_every_solution_is_right_and_checked_once(path):
    number, done = path.stem[:2], solved(path)
    assert done.states("check") == {id: ["right"] for id in ids(number, "CHECKS")}
    assert done.states("answer") == {id: ["right"] for id in ids(number, "QUESTIONS")}


# Twenty to fifty seconds each; their solutions run by day.
LONG = {"07", "09", "13", "14"}


@pytest.mark.parametrize(
    "path",
    [source(path, *[pytest.mark.night] * (path.stem[:2] in LONG)) for path in SOURCES],
)
def test_every_stub_is_unanswered_and_the_notebook_still_runs_to_its_end(path):
    number = path.stem[:2]
    done = running.run(twins.read(path).student(), WALL)
    assert done.error == "" and done.stderr == ""
    assert done.states("check") == {id: ["unanswered"] for id in ids(number, "CHECKS")}
    assert done.states("answer") == {id: ["unanswered"] for id in ids(number, "QUESTIONS")}


NO_TRITON = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "triton" else find(name, *more)
"""


def test_without_triton_notebook_16_says_so_and_runs_to_its_end():
    made = twins.read(SOURCES[NUMBERS.index("16")]).solution()
    first = next(c for c in made["cells"] if c["cell_type"] == "code")
    made["cells"].insert(0, first | {"id": "hidden", "source": [NO_TRITON]})
    done = running.run(made, WALL)
    assert done.error == "" and done.stderr == ""
    with_values = {"16.2": ["right"], "16.6": ["right"]}
    kernels = {id: ["unanswered"] for id in ids("16", "CHECKS")}
    assert done.states("check") == kernels | with_values
    assert "Triton is not here" in json.dumps(done.notebook["cells"][2]["outputs"])


@each_source
def test_every_figure_in_the_text_is_what_was_measured(path):
    recorded = solved(path).figures()
    wrong = [
        f"{id}: the text says {quoted}, measured {recorded.get(id)}"
        for id, allowed, quoted in prose.figures(twins.read(path).prose())
        if id not in recorded or not prose.agrees(quoted, recorded[id], allowed)
    ]
    assert wrong == []


@each_source
def test_every_picture_has_words(path):
    """Nothing is drawn but by course.show, and at least once."""
    done = solved(path)
    shown = [event["alt"] for event in done.events if event["event"] == "show"]
    outputs = [o for cell in done.notebook["cells"] for o in cell.get("outputs", [])]
    kinds = {"image/png", "image/svg+xml"}
    alts = [
        o["metadata"][kind]["alt"] for o in outputs for kind in o.get("data", {}).keys() & kinds
    ]
    assert shown and alts == shown
    assert not [
        o for o in outputs if "text/html" in o.get("data", {}) and "image/svg+xml" not in o["data"]
    ]


# --- what runs somebody else's notebook ---------------------------------------------------------------------------


def notebook(*cells: str, number: str = "05") -> dict:
    """A small notebook of code cells."""
    base = twins.read(SOURCES[NUMBERS.index(number)]).student()
    code = next(c for c in base["cells"] if c["cell_type"] == "code")
    return base | {
        "cells": [
            copy.deepcopy(code) | {"id": f"c{i}", "source": [text]} for i, text in enumerate(cells)
        ]
    }


REACH = """
import socket, urllib.request
for call in (lambda: socket.create_connection(("192.0.2.1", 80), 2), lambda: socket.getaddrinfo("example.com", 80),
             lambda: urllib.request.urlopen("http://example.com", timeout=2)):
    try:
        call()
        print("reached")
    except Exception as error:
        print(type(error).__name__, "no network" in str(error))
local = socket.create_server(("127.0.0.1", 0))
print(socket.create_connection(local.getsockname(), 2) is not None)
"""


def test_a_notebook_reaches_this_machine_and_no_other():
    done = running.run(notebook(REACH), WALL)
    text = "".join(o.get("text", "") for cell in done.notebook["cells"] for o in cell["outputs"])
    assert done.error == "" and text.split("\n")[:-1] == ["ConnectionRefusedError True"] * 3 + [
        "True"
    ]


def test_an_endless_notebook_is_stopped_with_all_that_it_started():
    start = f"import subprocess\nchild = subprocess.Popen(['sleep', '{SLEEP}'])\nprint(child.pid, flush=True)"
    done = running.run(notebook(start, "while True: pass"), limit=10)
    assert done.error == "stopped after 10 s" and done.seconds < 40
    assert sleepers() == []


def sleepers() -> list:
    import psutil

    return [
        p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", str(SLEEP)]
    ]


LOOSE = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{SLEEP}"])
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PR_SET_CHILD_SUBREAPER")
@pytest.mark.parametrize("then", ["pass", "while True: pass"])
def test_what_has_cut_itself_loose_is_ended_too(then):
    done = running.run(notebook(LOOSE, then), limit=20 if then == "pass" else 10)
    assert done.error == ("" if then == "pass" else "stopped after 10 s") and sleepers() == []


@pytest.fixture(params=["namespace", "no namespace"])
def contained(request, monkeypatch):
    """Where the system lets us make a PID namespace, and where it does not."""
    if request.param == "no namespace":
        monkeypatch.setattr(containing, "namespace", lambda: ())
    elif not containing.namespace():
        pytest.skip("unshare is not allowed here")
    return request.param


ORPHAN = f"""
import os, signal, time, warnings
warnings.warn("nothing to do with it")
runner = os.getppid()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{SLEEP}"])
    time.sleep(0.5)
    os.kill(runner, 9)
    os._exit(0)
time.sleep(2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PR_SET_CHILD_SUBREAPER")
def test_what_leaves_its_session_and_kills_its_parent_is_ended_and_told(tmp_path, contained):
    """It forks, calls setsid and kills the process that runs the notebook. The table says what happened, and does not
    blame the last warning on stderr."""
    begin = "from nanokv import course\ncourse.start('05')"
    made = notebook(begin, ORPHAN)
    (tmp_path / "a.ipynb").write_text(json.dumps(made))
    (row,) = grading.grade(tmp_path, limit=60)
    assert sleepers() == []
    assert "warn" not in row["error"] and "os.kill" in row["error"] and "setsid" in row["error"]
    if contained == "no namespace":
        assert "was killed (SIGKILL)" in row["error"] and "processes running" in row["error"]


FORGED = """
import json, os
path = os.environ["NANOKV_COURSE_LOG"]
with open(path, "a") as file:
    for id in ("05.1", "05.2"):
        file.write(json.dumps({"event": "check", "id": id, "state": "right"}) + chr(10))
"""


@pytest.mark.parametrize(
    "begin", ["pass", "from nanokv import course\ncourse.start('05')\ncourse.check('05.1', 3)"]
)
def test_lines_added_to_the_log_count_nothing_and_are_told(tmp_path, begin):
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook(begin, FORGED)))
    (row,) = grading.grade(tmp_path, limit=60)
    assert row["score"] == 0 and row["05.2"] == "missing"
    assert (
        "2 lines of its log were forged" in row["error"]
        and "its code names NANOKV_COURSE_LOG" in row["error"]
    )
    assert ("course.start" in row["error"]) == (begin == "pass")


def test_what_prints_without_end_fails_and_the_answers_after_it_count():
    begin, right = 'from nanokv import course\ncourse.start("05")', 'course.check("05.1", (26, 8))'
    ours = b"x" * 2**30  # the memory of the process that starts it is not counted
    done = running.run(
        notebook(begin, right, "while True: print('x' * 10**6)", right), WALL, keep_going=True
    )
    assert done.error.startswith("OSError: more than 5,000,000 characters")
    assert 10**8 < done.peak < len(ours)
    assert done.states("check") == {"05.1": ["right", "right"]}
    assert "05.1: right." in done.notebook["cells"][-1]["outputs"][0]["text"]


PIPE = "os.mkfifo(p)"


@pytest.mark.parametrize("trick", [PIPE, "os.symlink('/dev/zero', p)"])
@pytest.mark.parametrize("name", ["events.jsonl", "out.ipynb"])
def test_a_submission_cannot_make_its_reader_wait(tmp_path, trick, name):
    """By putting something else where the run leaves what the grader reads."""
    begin = "import os\nfrom nanokv import course\ncourse.start('05')"
    there = f"p = os.path.join(os.path.dirname(os.environ['NANOKV_COURSE_LOG']), '{name}')"
    made = notebook(
        begin, f"{there}\nos.path.exists(p) and os.remove(p)\n{trick}\nos.kill(os.getppid(), 9)"
    )
    (tmp_path / "a.ipynb").write_text(json.dumps(made))
    # Who writes into a pipe waits for a reader, until the time is over.
    (row,) = grading.grade(tmp_path, limit=15 if (name, trick) == ("out.ipynb", PIPE) else 60)
    assert (
        "events.jsonl: not a regular file" in row["error"]
        if name == "events.jsonl"
        else row["error"]
    )


def test_submissions_are_graded_each_for_itself(tmp_path):
    """One right, one that fails in the middle, one that hangs, one that kills its process, one that is no notebook."""
    begin, right = 'from nanokv import course\ncourse.start("05")', 'course.check("05.1", (26, 8))'
    submissions = {
        "good": notebook(begin, right, 'course.answer("05.q1", "a")'),
        "crash": notebook(begin, "1 / 0", right),
        "hang": notebook(begin, right, "while True: pass", 'course.check("05.3", (36, 11))'),
        "kill": notebook(begin, right, "import os\nos._exit(1)"),
    }
    for name, made in submissions.items():
        (tmp_path / f"{name}.ipynb").write_text(json.dumps(made))
    (tmp_path / "=broken.ipynb").write_text("{not json")
    # A cell that hangs has a quarter of it.
    grading.write(grading.grade(tmp_path, limit=32), tmp_path / "out.csv")
    with open(tmp_path / "out.csv", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"good", "crash", "hang", "kill", "'=broken"}
    assert (
        rows["good"]["score"] == "1"
        and rows["good"]["error"] == ""
        and rows["good"]["05.q1"] == "wrong: a"
    )
    assert rows["good"]["of"] == str(len(ids("05", "CHECKS")) + len(ids("05", "QUESTIONS")))
    assert rows["crash"]["score"] == "1" and rows["crash"]["error"].startswith("ZeroDivisionError")
    assert rows["hang"]["05.1"] == "right" and rows["hang"]["05.3"] == "wrong: row and column"
    assert rows["kill"]["05.1"] == "right" and rows["kill"]["error"]
    assert rows["'=broken"]["error"].startswith("not a notebook of this course")


@pytest.mark.parametrize("width", [390, 1000])
def test_a_page_of_the_book_never_scrolls_sideways(driver, tmp_path, width):
    """A long line of code, printed columns and a wide table each scroll in their own box."""
    import nbformat.v4 as form

    printed = form.new_output("stream", name="stdout", text="   ".join(["column"] * 40))
    notebook = form.new_notebook(
        cells=[
            form.new_code_cell("total = " + " + ".join(["something"] * 30), outputs=[printed]),
            form.new_markdown_cell(
                "|" + " a_wide_column |" * 30 + "\n|" + "---|" * 30 + "\n|" + " 1 |" * 30
            ),
        ]
    )
    (tmp_path / "style.css").write_text(
        book.asset("book.css") + book.highlighting(), encoding="utf-8"
    )
    path = book.write(tmp_path / "page.html", "A page", book.render(notebook))
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(path.as_uri())
    assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    boxes = "return [...document.querySelectorAll('pre, .scroll')].map(e => e.scrollWidth > e.clientWidth)"
    assert driver.execute_script(boxes) == [True, True, True]


def test_the_book_has_a_page_for_everything_and_needs_nothing_from_elsewhere(tmp_path, monkeypatch):
    def ready(made, limit):
        return solved(SOURCES[NUMBERS.index(made["metadata"]["nanokv"]["notebook"])])

    monkeypatch.setattr(running, "run", ready)
    pages = book.build(NOTEBOOKS, tmp_path)
    assert {p.stem for p in pages} == {"index", "claims", "glossary", *(p.stem for p in SOURCES)}
    anchors = {page.name: set(re.findall(r'id="([^"]+)"', page.read_text())) for page in pages}
    for page in pages:
        text = page.read_text()
        for name, anchor in re.findall(r'href="([\w.-]+\.html)(?:#([^"]*))?"', text):
            # The next notebook may not be written yet.
            assert name in anchors or re.match(r"\d\d_", name), name
            assert not anchor or anchor in anchors[name], (name, anchor)
        assert (
            "<title>" in text
            and "<script src" not in text
            and 'src="http' not in text
            and 'css" href="http' not in text
        )
        assert (
            text.count("<img") == text.count("alt=")
            and "No description has been provided" not in text
        )
        assert ".ipynb" not in text.replace("notebooks/", "")
    assert 'id="kv-cache"' in (tmp_path / "glossary.html").read_text()
    assert "prefers-color-scheme: dark" in (tmp_path / "style.css").read_text()
