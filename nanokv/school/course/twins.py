"""One source, two notebooks: the student's (stubs, no answers, no outputs) and the solution's.

notebooks/source/NN_name.py is text in jupytext's percent format. A code cell tagged "exercise" is for the student, and
the cell after it, tagged "solution", takes its place in the other twin; everything else is in both. So an answer
cannot leak into a student's notebook. A cell tagged "hide-input" is folded: what draws or records figures.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import claims

# Second-level headings that every notebook has, in this order; others may stand between them.
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
SLIDE_TAGS = {"slide", "skip"}  # of the deck: with its code, or not at all
# Columns of a line of code: a cell of JupyterLab shows no more in a window of 1,000 pixels.
WIDEST = 88
# The name that Jupyter Book gave it: its outputs are shown, its code on demand.
FOLDED = "hide-input"
# What a learner need not read.
BOOKKEEPING = re.compile(r"^\s*course\.(show|figure|confirm)\(", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A cell of the source: kind is code or markdown, role is both, exercise or solution."""

    kind: str
    text: str
    role: str = "both"
    slide: str = ""  # slide, skip or, for the rule of nanokv/school/course/slides.py, nothing
    fold: str = ""  # hide-input or nothing


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
        """All markdown, as the solution's reader sees it."""
        return "\n\n".join(c.text for c in self.cells if c.kind == "markdown")

    def code(self) -> str:
        """All code but the stubs."""
        return "\n\n".join(c.text for c in self.cells if c.kind == "code" and c.role != "exercise")

    def notebook(self, cells) -> dict:
        """nbformat 4.5 with ids that depend on nothing but the place, so that a rebuild changes nothing."""
        made = []
        for i, cell in enumerate(cells):
            body = {"cell_type": cell.kind, "id": f"{self.number}-{i:03}", "metadata": {}}
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


def read(path) -> Source:
    """Parse a source file and check its form; CourseError names the file, the cell and what is wrong."""
    path = Path(path)
    return parsed(path.name, path.read_text(encoding="utf-8"))


# An exam asks for the same sources again and again, and one takes 20 ms.
@functools.lru_cache(maxsize=64)
def parsed(file: str, text: str) -> Source:
    """The source that this text is, in a file of this name."""
    import jupytext

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
    """What is wrong with the form of a source."""
    cells, found = source.cells, []
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", source.name):
        found.append("the file name is not NN_words.py")
    if (
        not cells
        or cells[0].kind != "markdown"
        or not cells[0].text.startswith(f"# {source.number} · ")
    ):
        found.append(f"the first cell does not begin with `# {source.number} · Title`")
    for i, cell in enumerate(cells):
        if cell.role == "exercise" and (
            cell.kind != "code" or i + 1 == len(cells) or cells[i + 1].role != "solution"
        ):
            found.append(f"cell {i}: an exercise is a code cell with its solution right after it")
        if cell.role == "solution" and cell.kind == "code" and cells[i - 1].role != "exercise":
            found.append(f"cell {i}: a solution stands right after its exercise")
        if cell.kind == "code" and bool(cell.fold) != bool(BOOKKEEPING.search(cell.text)):
            found.append(
                f'cell {i}: tagged "{FOLDED}" is what calls course.show, figure or confirm, and nothing else'
            )
        wide = [line for line in cell.text.splitlines() if len(line) > WIDEST]
        if cell.kind == "code" and wide:
            found.append(f"cell {i}: more than {WIDEST} columns of code: {wide[0].strip():.60}")
        if cell.fold and re.search(r"course\.(predict|reveal|check|answer|claim)\(", cell.text):
            found.append(f"cell {i}: what speaks to the learner is not folded")
    headings = re.findall(r"^## (.+)$", source.prose(), re.MULTILINE)
    if [h for h in headings if h in SECTIONS] != list(SECTIONS):
        found.append(f"the sections are not {', '.join(SECTIONS)} in this order, each once")
    if f'course.start("{source.number}"' not in source.code():
        found.append(f'no cell calls course.start("{source.number}")')
    return found


def to_text(notebook: dict) -> str:
    """A notebook as it is written to disk."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def sources(folder) -> list[Path]:
    """The source files of a notebooks folder, in order."""
    found = sorted((Path(folder) / "source").glob("*.py"))
    if not found:
        hint = "run it in the folder of the clone, or pass --folder CLONE/notebooks"
        raise CourseError(f"{folder} has no source/*.py", hint)
    return found


def chosen(folder, words=()) -> list[Path]:
    """The sources that are named, by number (05) or whole (05_the_waste), in order; all without a name."""
    found = sources(folder)
    unknown = set(words) - {name for path in found for name in (path.stem, path.stem[:2])}
    if unknown:
        raise CourseError(
            f"no notebook {', '.join(sorted(unknown))}", ", ".join(path.stem for path in found)
        )
    return [path for path in found if not words or {path.stem, path.stem[:2]} & set(words)]


def outdated(folder, words=()) -> dict[Path, str]:
    """{file: its new text} of a notebooks folder, or of those named, where it is another or missing: the student twins,
    and claims.md, to which they link."""
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
