"""How a learner gets in: the paths with their minutes, the lines for other systems, Binder, the cell for Colab."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from nanokv.school.course import checking, twins

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
TEXT = (NOTEBOOKS / "README.md").read_text("utf-8")
PARTS = dict(part.split("\n", 1) for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:])
PATHS = dict(
    re.findall(
        r"^\*\*(One hour|One day|A term)\*\*(.+?)(?=^\*\*|\Z)",
        PARTS["One hour, one day, a term"],
        re.DOTALL | re.MULTILINE,
    )
)


def rows(path):
    """[(part or notebook, minutes)] of a path."""
    found = re.findall(r"^\| (.+?) \| (\d+) \|$", PATHS[path], re.MULTILINE)
    return [(name, int(minutes)) for name, minutes in found]


def lengths(number):
    """The minutes for which a lesson is planned: the head of its plan's table."""
    text = (NOTEBOOKS / "teach" / f"{number}_plan.md").read_text("utf-8")
    return [
        int(n)
        for n in re.search(r"^\| activity \| (\d+) \| (\d+) \|$", text, re.MULTILINE).groups()
    ]


def test_the_hour_is_an_hour_of_parts_that_exist():
    found = rows("One hour")
    assert sum(minutes for _, minutes in found) == 60
    for name, _ in found:
        number, _, part = name.partition(", ")
        source = twins.read(twins.chosen(NOTEBOOKS, [number])[0])
        exercise = re.match(r"exercise (\d\d\.\d)", part)
        if exercise:
            assert checking.find(exercise[1]).id.startswith(number)
        else:
            assert part in re.findall(r"^## (.+)$", source.prose(), re.MULTILINE), part


@pytest.mark.parametrize(("path", "said"), [("One day", "five and a half hours"), ("A term", "")])
def test_the_minutes_of_whole_notebooks_are_those_of_the_plans(path, said):
    found = rows(path)
    assert all(minutes in lengths(number) for number, minutes in found) and said in PATHS[path]
    assert not said or sum(minutes for _, minutes in found) == 330
    if path == "A term":
        assert [number for number, _ in found] == [
            path.stem[:2] for path in twins.sources(NOTEBOOKS)
        ]


def test_the_day_says_which_parts_need_notebooks_that_it_leaves_out():
    """02 and 03 are left out; 05.4, 05.5 and Experiment 2 of 06 explain their words by the glossary."""
    said = " ".join(PATHS["One day"].split())
    assert {"02", "03"}.isdisjoint(number for number, _ in rows("One day"))
    assert "leaves out notebooks 02 and 03" in said
    assert "Exercises 05.4 and 05.5 and Experiment 2 of notebook 06" in said
    for number, begin, terms in (
        ("05", r"\*\*05.4\*\*", ("layer", "mlp", "hidden-state")),
        ("05", r"\*\*05.5\*\*", ("query", "key", "value", "rope")),
        ("06", "## Experiment 2", ("embedding", "rmsnorm", "projection", "kv-head", "rope")),
    ):
        cells = twins.read(twins.chosen(NOTEBOOKS, [number])[0]).cells
        (text,) = [cell.text for cell in cells if re.match(begin, cell.text)]
        assert [term for term in terms if f"(glossary.md#{term})" not in text] == []


def test_minutes_are_marked_as_estimated_and_seconds_as_measured():
    text = PARTS["One hour, one day, a term"]
    assert "**estimated**" in text.split("**One hour**")[0]
    measured = re.search(r"\*\*Measured\*\*.+?: ((?:\d\d: \d+(?:, |\.))+)", text, re.DOTALL)[1]
    times = {number: int(seconds) for number, seconds in re.findall(r"(\d\d): (\d+)", measured)}
    assert times and all(0 < seconds <= 180 for seconds in times.values()), (
        "the budget of a notebook"
    )


def test_each_way_in_says_whether_it_was_tried():
    ways = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", PARTS["Where to run them"], re.MULTILINE)[
        1:
    ]
    assert len(ways) >= 6 and all(re.match("(un)?tried", tried) for _, _, tried in ways)
    assert not re.search(r"https?://", TEXT), (
        "an address may not exist; those of the project do not yet"
    )


def test_binder_gets_what_the_project_pins():
    lines = (ROOT / ".binder" / "requirements.txt").read_text().splitlines()
    constraints = [line.split()[1] for line in lines if line.startswith("-c ")]
    assert [(ROOT / ".binder" / name).resolve() for name in constraints] == [
        ROOT / "constraints.txt"
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (extras,) = [
        re.fullmatch(r"\.\[(.+)\]", line)[1].split(",")
        for line in lines
        if not line.startswith("-")
    ]
    assert set(extras) <= project["optional-dependencies"].keys()
    python = (ROOT / ".binder" / "runtime.txt").read_text().strip().removeprefix("python-")
    matrix = (ROOT / ".github" / "workflows").glob("*.yml")
    assert any(f'"{python}"' in path.read_text() for path in matrix), "the Python that is tested"


def colab():
    """The cell as Python: the magic becomes a call."""
    (cell,) = [
        code for code in re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL) if "%pip" in code
    ]
    return re.sub(r"^%pip install --quiet \{(.+)\}$", r"install(\1)", cell, flags=re.MULTILINE)


def test_the_cell_for_colab_installs_the_newest_wheel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "nanokv-0.1.0-py3-none-any.whl",
        "nanokv-0.2.0-py3-none-any.whl",
        "other-9-py3-none-any.whl",
    ):
        (tmp_path / name).write_text("")
    installed = []
    exec(colab(), {"install": installed.append})
    assert [path.name for path in installed] == ["nanokv-0.2.0-py3-none-any.whl"]


@pytest.mark.parametrize("there", [[], ["nanokv.ipynb", "nanokv-0.1.0.tar.gz"]])
def test_the_cell_for_colab_says_what_is_missing(there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in there:
        (tmp_path / name).write_text("")
    with pytest.raises(AssertionError, match="upload the wheel first"):
        exec(colab(), {"install": sys.exit})
