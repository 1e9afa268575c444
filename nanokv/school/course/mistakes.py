"""A table of the named wrong answers of all checks, for teachers.

The table is read from the checks themselves, so it is always current. notebooks/teach/mistakes.md
is written by hand: under the id of a check it says what to do about each mistake in class, and in
which public thread people made it:

    ## 05.1
    - **last token fed** (owner/repo#12): …
"""

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from nanokv.school.course import checking

ENTRY = re.compile(r"^- \*\*(.+?)\*\*(?: \(([^)]*)\))?: (.+(?:\n  .+)*)", re.MULTILINE)
HEAD = ("check", "mistake", "the student is told", "met in")


@dataclass(frozen=True)
class Known:
    """A wrong answer, with the message that a student reads (`told`).

    `name`: the mistake's name; for a quiz question, the letter.
    """

    id: str
    name: str
    told: str


def registered(notebook: str) -> list[Known]:
    """Every wrong answer that the checks and questions of a notebook recognise."""
    module = checking.exercises(notebook)
    in_judges = judged(inspect.getsource(module))
    found = []
    for check in module.CHECKS:
        found += [Known(check.id, mistake.name, mistake.message) for mistake in check.mistakes]
        found += [Known(check.id, name, told) for name, told in in_judges.get(check.id, ())]
    for question in module.QUESTIONS:
        wrong = [letter for letter in question.options if question.judge(letter).state == "wrong"]
        found += [
            Known(question.id, letter, " → ".join(question.options[letter])) for letter in wrong
        ]
    return found


def judged(source: str) -> dict[str, list[tuple[str, str]]]:
    """{id: [(name, message), …]} of the exercises made with `judged(id, judge)` in a source.

    The mistakes are all calls wrong(message, name) in the judge and the functions that it uses.
    """
    tree = ast.parse(source)
    functions = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    tables = (
        node
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    )
    functions |= {node.targets[0].id: node for node in tables}
    found = {}
    for call in _calls(tree, "judged"):
        seen, todo, names = set(), list(call.args[1:]), {}
        while todo:
            part = todo.pop(0)
            names |= {
                _text(w.args[1]): _text(w.args[0])
                for w in _calls(part, "wrong")
                if len(w.args) == 2
            }
            used = {
                node.id for node in ast.walk(part) if isinstance(node, ast.Name)
            } & functions.keys() - seen
            seen |= used
            todo += [functions[name] for name in sorted(used)]
        found[_text(call.args[0])] = list(names.items())
    return found


def _calls(tree, name: str) -> list[ast.Call]:
    return [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == name
    ]


def _text(node) -> str:
    """A string of the source; values that are filled in at run time appear as `…`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def comments(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """{(id, name): (public thread, what to do in class)} from the hand-written file."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        id = section.split("\n", 1)[0].strip()
        for name, echo, advice in ENTRY.findall(section):
            found[id, name] = (echo, " ".join(advice.split()))
    return found


def rows(notebooks: list[str], path: Path) -> list[list[str]]:
    """Rows of check, mistake, message to the student, public thread; no cell has a line break."""
    written = comments(path.read_text(encoding="utf-8")) if path.exists() else {}
    known = [one for notebook in notebooks for one in registered(notebook)]
    cells = [
        (one.id, one.name, one.told, written.get((one.id, one.name), [""])[0]) for one in known
    ]
    return [[" ".join(text.split()) for text in row] for row in cells]


def table(notebooks: list[str], path: Path) -> str:
    """The rows as Markdown."""
    cells = [[text.replace("|", "\\|") for text in row] for row in rows(notebooks, path)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (HEAD, ["---"] * len(HEAD), *cells))
