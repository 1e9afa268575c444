"""A table of the named wrong answers of all checks, for teachers.

The table is read from the checks themselves, so it is always current. notebooks/teach/mistakes.md
is written by hand: under the id of a check it has, for each mistake, what to do about it in class
and a public thread in which it was made:

    ## 05.1
    - **last token fed** (owner/repo#12): …
"""

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanokv.school.course import checking

ENTRY = re.compile(r"^- \*\*(.+?)\*\*(?: \(([^)]*)\))?: (.+(?:\n  .+)*)", re.MULTILINE)
HEAD = ("check", "mistake", "message to the student", "seen in")


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
    definitions = _definitions(tree)
    found = {}
    for call in _calls(tree, "judged"):
        id, *judge = call.args
        found[_text(id)] = list(_mistakes(judge, definitions).items())
    return found


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """{name: statement} of the functions, classes and tables of a module."""
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
    return found


def _mistakes(parts: Sequence[ast.AST], definitions: dict[str, ast.stmt]) -> dict[str, str]:
    """{name: message} of all calls wrong(message, name) in these parts and what they use."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    todo = list(parts)
    while todo:
        part = todo.pop(0)
        for call in _calls(part, "wrong"):
            if len(call.args) == 2:
                message, name = call.args
                found[_text(name)] = _text(message)
        names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
        used = names & definitions.keys() - seen
        seen |= used
        todo += [definitions[name] for name in sorted(used)]
    return found


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", "") == name]


def _text(node) -> str:
    """A string of the source; values that are filled in at run time appear as `…`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "…"


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
    written = {}
    if path.exists():
        written = comments(path.read_text(encoding="utf-8"))
    known = [one for notebook in notebooks for one in registered(notebook)]
    cells = [
        (one.id, one.name, one.told, written.get((one.id, one.name), [""])[0]) for one in known
    ]
    return [[" ".join(text.split()) for text in row] for row in cells]


def table(notebooks: list[str], path: Path) -> str:
    """The rows as Markdown."""
    cells = [[text.replace("|", "\\|") for text in row] for row in rows(notebooks, path)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (HEAD, ["---"] * len(HEAD), *cells))
