"""The wrong answers that the checks know by name, as a table for teachers.

It is read from the checks themselves, so it cannot drift from them. What to do about a mistake in class, and which
public thread it echoes, is written by hand in notebooks/teach/mistakes.md, under the id of its check:

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
    """One wrong answer: of an exercise by name, of a question by its letter. `told`: what the student reads."""

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
    """{id: [(name, message), …]} of `judged(id, judge)`: every wrong(message, name) in the judge and what it calls."""
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
    """A text in the source; what is filled in later is `…`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def comments(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """{(id, name): (where it was met, what to do in class)} of the hand-written file."""
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        id = section.split("\n", 1)[0].strip()
        for name, echo, advice in ENTRY.findall(section):
            found[id, name] = (echo, " ".join(advice.split()))
    return found


def rows(notebooks: list[str], path: Path) -> list[list[str]]:
    """Check, mistake, what the student is told, where it was met in public: each on one line."""
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
