"""One source, two notebooks: the student's, with stubs and without outputs, and the solution.

notebooks/source/NN_name.py is in jupytext's percent format. A code cell tagged "exercise" goes into
the student's notebook; the cell after it, tagged "solution", replaces it in the solution. All other
cells go into both, so an answer cannot leak into a student's notebook. A cell tagged "hide-input",
which draws or records figures, is folded.
"""

import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanokv.errors import CourseError
from nanokv.school.course import claims

# Second-level headings of every notebook, in this order; others may come between them.
SECTIONS = (
    "What you will be able to do",
    "Predict",
    "What the articles say",
    "Exercises",
    "Quiz",
    "Further reading",
    "Next",
)
TAGS = {"exercise", "solution"}
SLIDE_TAGS = {"slide", "skip"}  # in the slides: shown with its code, or left out
# Columns of a line of code: JupyterLab shows no more in a window of 1,000 pixels.
WIDEST = 88
# Jupyter Book's tag for a cell whose code is hidden until a reader asks for it.
FOLDED = "hide-input"
# Calls that a learner need not read.
BOOKKEEPING = re.compile(r"^\s*course\.(show|figure|confirm)\(", re.MULTILINE)
# Calls whose printed text a learner has to read.
FOR_LEARNERS = re.compile(r"course\.(predict|reveal|check|answer|claim)\(")


@dataclass(frozen=True)
class Cell:
    """A cell of the source. `kind`: code or markdown; `role`: both, exercise or solution."""

    kind: str
    text: str
    role: str = "both"
    slide: str = ""  # "slide", "skip", or "": the rule of nanokv/school/course/slides.py
    fold: str = ""  # "hide-input" or ""


@dataclass(frozen=True)
class Source:
    """A parsed notebook source."""

    name: str  # 05_the_waste
    cells: tuple[Cell, ...]

    @property
    def number(self) -> str:
        return self.name[:2]

    @property
    def title(self) -> str:
        return self.cells[0].text.splitlines()[0].removeprefix("# ")

    def student(self) -> dict:
        return self.notebook([c for c in self.cells if c.role != "solution"])

    def solution(self) -> dict:
        return self.notebook([c for c in self.cells if c.role != "exercise"])

    def prose(self) -> str:
        """All markdown of the notebook."""
        return "\n\n".join(c.text for c in self.cells if c.kind == "markdown")

    def code(self) -> str:
        """All code except the stubs."""
        return "\n\n".join(c.text for c in self.cells if c.kind == "code" and c.role != "exercise")

    def notebook(self, cells: Iterable[Cell]) -> dict:
        """Cells in nbformat 4.5. Ids depend only on the position, so a rebuild is identical."""
        made = []
        for i, cell in enumerate(cells):
            body: dict[str, Any] = {
                "cell_type": cell.kind,
                "id": f"{self.number}-{i:03}",
                "metadata": {},
            }
            if cell.kind == "code":
                body |= {"execution_count": None, "outputs": []}
            if cell.fold:
                body["metadata"] = {"jupyter": {"source_hidden": True}, "tags": [FOLDED]}
            made.append(body | {"source": cell.text.splitlines(keepends=True)})
        kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
        metadata = {
            "kernelspec": kernel,
            "language_info": {"name": "python"},
            "nanokv": {"notebook": self.number},
        }
        return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def read(path: str | Path) -> Source:
    """Parse a source file and check its form. CourseError names the file, the cell, the fault."""
    path = Path(path)
    return parsed(path.name, path.read_text(encoding="utf-8"))


# Cached: parsing takes 20 ms, and an exam reads the same sources many times.
@functools.lru_cache(maxsize=64)
def parsed(file: str, text: str) -> Source:
    """Parse the text of a source; `file` is its name, for the errors and the notebook's name."""
    import jupytext  # type: ignore[import-untyped]  # jupytext has no types

    notebook = jupytext.reads(text, fmt="py:percent")
    cells = []
    for i, cell in enumerate(notebook.cells):
        tags = set(cell.metadata.get("tags", []))
        if len(tags) > 1 or tags - TAGS - SLIDE_TAGS - {FOLDED} or cell.cell_type == "raw":
            raise CourseError(
                f"{file}, cell {i}: {cell.cell_type}, tags {sorted(tags)}",
                "one tag, code or text",
            )
        role, slide, fold = ("".join(tags & kind) for kind in (TAGS, SLIDE_TAGS, {FOLDED}))
        cells.append(Cell(cell.cell_type, cell.source.strip("\n"), role or "both", slide, fold))
    source = Source(Path(file).stem, tuple(cells))
    for complaint in complaints(source):
        raise CourseError(f"{file}: {complaint}", "notebooks/AUTHORING.md describes the form")
    return source


def complaints(source: Source) -> list[str]:
    """The faults in the form of a source, each as a sentence."""
    found = []
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", source.name):
        found.append("the file name is not NN_words.py")
    first = source.cells[0] if source.cells else Cell("markdown", "")
    if first.kind != "markdown" or not first.text.startswith(f"# {source.number} · "):
        found.append(f"the first cell does not begin with `# {source.number} · Title`")
    for i, cell in enumerate(source.cells):
        found += [f"cell {i}: {complaint}" for complaint in _cell_complaints(source.cells, i, cell)]
    headings = re.findall(r"^## (.+)$", source.prose(), re.MULTILINE)
    if [h for h in headings if h in SECTIONS] != list(SECTIONS):
        found.append(f"the sections are not {', '.join(SECTIONS)} in this order, each once")
    if f'course.start("{source.number}"' not in source.code():
        found.append(f'no cell calls course.start("{source.number}")')
    return found


def _cell_complaints(cells: Sequence[Cell], i: int, cell: Cell) -> Iterator[str]:
    """The faults in the form of cell i."""
    before = cells[i - 1].role if i else ""
    after = cells[i + 1].role if i + 1 < len(cells) else ""
    if cell.role == "exercise" and (cell.kind != "code" or after != "solution"):
        yield "an exercise is a code cell with its solution right after it"
    if cell.role == "solution" and cell.kind == "code" and before != "exercise":
        yield "a solution comes right after its exercise"
    if cell.kind == "code" and bool(cell.fold) != bool(BOOKKEEPING.search(cell.text)):
        yield f'tag cells that call course.show, figure or confirm with "{FOLDED}", and no others'
    wide = [line for line in cell.text.splitlines() if len(line) > WIDEST]
    if cell.kind == "code" and wide:
        yield f"more than {WIDEST} columns of code: {wide[0].strip():.60}"
    if cell.fold and FOR_LEARNERS.search(cell.text):
        yield "a cell that prints something for the learner is not folded"


def to_text(notebook: dict) -> str:
    """The text of a notebook file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def sources(folder: str | Path) -> list[Path]:
    """The source files of a notebooks folder, in order."""
    found = sorted((Path(folder) / "source").glob("*.py"))
    if not found:
        hint = "run it in the folder of the clone, or pass --folder CLONE/notebooks"
        raise CourseError(f"{folder} has no source/*.py", hint)
    return found


def chosen(folder: str | Path, words: Collection[str] = ()) -> list[Path]:
    """The sources named by number (05) or name (05_the_waste), in order; all if none is named."""
    found = sources(folder)
    unknown = set(words) - {name for path in found for name in (path.stem, path.stem[:2])}
    if unknown:
        raise CourseError(
            f"no notebook {', '.join(sorted(unknown))}", ", ".join(path.stem for path in found)
        )
    return [path for path in found if not words or {path.stem, path.stem[:2]} & set(words)]


def outdated(folder: str | Path, words: Collection[str] = ()) -> dict[Path, str]:
    """{file: its new text} of the generated files that differ or are missing.

    They are the student notebooks (with `words`, only those named) and claims.md, to which the
    notebooks link.
    """
    found = {
        Path(folder) / f"{path.stem}.ipynb": to_text(read(path).student())
        for path in chosen(folder, words)
    }
    found[Path(folder) / "claims.md"] = claims.page()
    return {
        path: text
        for path, text in found.items()
        if not path.exists() or path.read_text("utf-8", "replace") != text
    }
