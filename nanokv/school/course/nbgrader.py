"""Exports the notebooks in nbgrader's source format, so that nbgrader can grade them.

    FOLDER/nbgrader_config.py                        run nbgrader in FOLDER
    FOLDER/source/05_the_waste/05_the_waste.ipynb    with solutions: for the teacher
                               glossary.md claims.md     the pages that the notebook links to

A stub and its solution become one cell, from which `nbgrader generate_assignment` cuts the
solution. Each check and each quiz question becomes a locked test cell with its points, which
raises while the answer is not right. Predictions have no points and stay unchanged. The export
does not need nbgrader.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import twins
from nanokv.school.course.exam import POINTS

SCHEMA = 3  # of the cell metadata, since nbgrader 0.6
BEGIN = "### BEGIN SOLUTION"
END = "### END SOLUTION"
BESIDE = ("glossary.md", "claims.md")  # pages that notebooks link to
JUDGES = {"check": "exercise", "answer": "question"}  # course.NAME → key of POINTS
CONFIG = '''"""nbgrader's configuration for the notebooks of nanokv.

Run `nbgrader generate_assignment 05_the_waste` in this folder.
"""

import os

# A graded run keeps no answers, and takes no parts from a submission.
os.environ.update(NANOKV_COURSE_LOG=os.devnull)

c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "nanokv"
c.ClearSolutions.code_stub = {"python": ""}  # each solution follows its stub with `...` already
c.ExecutePreprocessor.timeout = 180  # seconds per cell; nbgrader's default of 30 is too short
'''


def write(folder: Path, sources: list[Path], out: Path) -> list[Path]:
    """Write one assignment per source, and a configuration. Returns the paths written."""
    made = files(folder, sources, out)
    for path, text in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(made)


def files(folder: Path, sources: list[Path], out: Path) -> dict[Path, str]:
    """{path: text} of everything that `write` writes. An existing configuration is not replaced."""
    config = out / "nbgrader_config.py"
    made = {}
    if not config.exists():
        made[config] = CONFIG
    beside = {name: (Path(folder) / name).read_text(encoding="utf-8") for name in BESIDE}
    for path in sources:
        source = twins.read(path)
        home = out / "source" / source.name
        made[home / f"{source.name}.ipynb"] = twins.to_text(assignment(source))
        made |= {home / name: text for name, text in beside.items()}
    return made


def assignment(source: twins.Source) -> dict:
    """The notebook with nbgrader's metadata; CourseError if an id is tested twice or not at all."""
    from nanokv.school.course import checking

    pairs = list(_cells(source))
    module = checking.exercises(source.number)
    tested = sorted(meta["grade_id"] for _, meta in pairs if meta.get("grade"))
    if tested != sorted(f"test-{_plain(item.id)}" for item in (*module.CHECKS, *module.QUESTIONS)):
        raise CourseError(
            f"{source.name}: its checks are not tested once each", f"found: {', '.join(tested)}"
        )
    notebook = source.notebook([cell for cell, _ in pairs])
    for cell, (_, meta) in zip(notebook["cells"], pairs, strict=True):
        if meta:
            cell["metadata"]["nbgrader"] = meta
        if cell["cell_type"] == "markdown":
            cell["source"] = [_linked(line) for line in cell["source"]]
    return notebook


def _cells(source):
    """Yield (cell, nbgrader's metadata or {}) in order. Each check of a cell becomes one cell."""
    cells = source.cells
    for i, cell in enumerate(cells):
        found = _judged_after(cells, i)
        if cell.role == "exercise" and found:
            text = f"{cell.text}\n{BEGIN}\n{cells[i + 1].text}\n{END}"
            yield replace(cell, text=text), _metadata(f"answer-{_plain(min(found))}", solution=True)
        elif cell.role == "solution":
            continue
        elif cell.kind == "code" and cell.role == "both" and judged(cell):
            yield from _tests(cell)
        elif "course.start(" in cell.text and cell.kind == "code":
            yield cell, _metadata("start", locked=True)
        else:
            yield cell, {}


def _judged_after(cells, i: int) -> dict:
    """`judged` of the next code cell after cell i that is in both twins; {} if there is none."""
    for cell in cells[i + 1 :]:
        if cell.kind == "code" and cell.role == "both":
            return judged(cell)
    return {}


def _tests(cell):
    """Split a cell into one test cell per check, and further cells for the code between them."""
    lines = cell.text.splitlines()
    done = 0
    for id, (name, node) in judged(cell).items():
        if before := "\n".join(lines[done : node.lineno - 1]).strip():
            yield replace(cell, text=before), {}
        call = "\n".join(lines[node.lineno - 1 : node.end_lineno]).rstrip("; ")
        meta = _metadata(f"test-{_plain(id)}", locked=True, grade=True, points=POINTS[JUDGES[name]])
        yield replace(cell, text=f'assert {call}, "{id} is not right yet"'), meta
        done = node.end_lineno
    if after := "\n".join(lines[done:]).strip():
        yield replace(cell, text=after), {}


def judged(cell: twins.Cell) -> dict:
    """{id: ("check" or "answer", statement)} of the calls course.check("05.1", …) in a cell."""
    found = {}
    for node in ast.parse(cell.text).body:
        call = getattr(node, "value", None)
        name = getattr(getattr(call, "func", None), "attr", "")
        if isinstance(node, ast.Expr) and isinstance(call, ast.Call) and name in JUDGES:
            found[ast.literal_eval(call.args[0])] = (name, node)
    return found


def _metadata(id: str, **more) -> dict:
    return {
        "schema_version": SCHEMA,
        "grade_id": id,
        "grade": False,
        "solution": False,
        "locked": False,
        "task": False,
        **more,
    }


def _plain(id: str) -> str:
    """05.q1 → 05-q1: nbgrader allows letters, digits, - and _."""
    return id.replace(".", "-")


def _linked(line: str) -> str:
    """Adjust links to other notebooks: each is in a folder with its own name."""
    return re.sub(r"\]\((\d\d_\w+)\.ipynb", r"](../\1/\1.ipynb", line)
