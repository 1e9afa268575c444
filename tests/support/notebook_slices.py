"""The cells of a notebook that use a part which a learner has kept, run again with another function in its place."""

import ast
import contextlib
import io
import linecache
from dataclasses import dataclass, field
from pathlib import Path

from nanokv.school.course import twins

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@dataclass(frozen=True)
class Cell:
    """A code cell: its compiled text, and the names that it sets and uses."""

    code: object
    sets: frozenset
    uses: frozenset
    takes: frozenset  # parts, by course.mine
    draws: bool  # folded: it shows what others have computed


@dataclass
class Ran:
    """A notebook that has run once with nanokv's parts: its cells, and the names after each."""

    cells: list[Cell]
    after: list[dict] = field(default_factory=list)


def cell(text: str, name: str, draws: bool) -> Cell:
    tree, file = ast.parse(text), f"/tmp/ipykernel_8/{name}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    kinds = ast.FunctionDef | ast.ClassDef
    sets = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    sets |= {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    sets |= {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    uses = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    takes = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "course.mine"
    }
    code = compile(tree, file, "exec")
    return Cell(code, frozenset(sets), frozenset(uses), frozenset(takes), draws)


def quietly(code, names: dict) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)


def needed(cells: list[Cell]) -> list[Cell]:
    """The cells that take a part, all that use what these set, and what all of them need."""
    found, known = set(), set()
    for i, one in enumerate(cells):  # forwards
        if not one.draws and (one.takes or one.uses & known):
            found.add(i)
            known |= one.sets
        else:
            known -= one.sets
    wanted = set().union(*(cells[i].uses for i in found))
    for i in reversed(range(len(cells))):  # backwards
        if cells[i].sets & wanted:
            found.add(i)
            wanted |= cells[i].uses
    return [cells[i] for i in sorted(found)]


def run(number: str) -> Ran:
    """The solution of a notebook, as far as its parts are concerned, with nanokv's parts."""
    source = twins.read(twins.chosen(NOTEBOOKS, [number])[0])
    texts = [one for one in source.cells if one.kind == "code" and one.role != "exercise"]
    cells = [cell(one.text, f"{number}_{i}", bool(one.fold)) for i, one in enumerate(texts)]
    ran = Ran(needed(cells))
    names = {"__name__": "__main__"}
    for one in ran.cells:
        quietly(one.code, names)
        ran.after.append(dict(names))
    return ran


def run_again(ran: Ran, part: str) -> int:
    """Run all cells that use this part, as `course.mine` gives it now → how many these were."""
    at = next(i for i, one in enumerate(ran.cells) if part in one.takes)
    names, known, count = dict(ran.after[at]), set(), 0
    for one, after in zip(ran.cells[at:], ran.after[at:], strict=True):
        if not one.draws and (part in one.takes or one.uses & known):
            quietly(one.code, names)
            known |= one.sets
            count += 1
        else:  # as it was
            known -= one.sets
            names |= {name: after[name] for name in one.sets if name in after}
    return count
