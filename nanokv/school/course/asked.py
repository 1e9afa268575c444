"""A solved notebook as a page in which the reader answers: predictions, values and the quiz.

`forms` puts fields before the cells that hold the answers, and folds these cells. Without scripts a
page shows the cells folded and everything else as it is. The scripts are assets/judge.js and
assets/asked.js. A reader's answers are kept in their browser.
"""

import ast
import copy
import html
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanokv.school.course import checking, compiled
from nanokv.school.course.session import quantity
from nanokv.school.course.twins import Cell, Source

if TYPE_CHECKING:
    from nanokv.model import Transformer

# Of the metadata of a cell: the HTML before it and behind it, for assets/cells.html.j2.
BEFORE = "before"
AFTER = "after"
GUESS = "A guess, and how the notebook takes it"
ANSWER = "Show the answer, and how the notebook finds it"
SOLUTION = "A solution"
QUIZ = "The cells of the notebook, with the answers"
FILL = "What is filled in here"
KINDS = {f"course.{name}" for name in ("predict", "reveal", "check", "quiz", "answer")}


@dataclass(frozen=True)
class Call:
    """A call of nanokv.course in a cell: `course.predict("05.a", guess, unit="times")`."""

    name: str
    id: str
    unit: str = ""
    signed: bool = False


def calls(code: str) -> list[Call]:
    """The calls of course.predict, reveal, check, quiz and answer in the code of a cell, by id."""
    found = []
    for node in ast.walk(ast.parse(_without_magics(code))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in KINDS:
            found.append(_call(node))
    return sorted(found, key=lambda call: call.id)


def _call(node: ast.Call) -> Call:
    name = ast.unparse(node.func).removeprefix("course.")
    constants = {
        keyword.arg: keyword.value.value
        for keyword in node.keywords
        if isinstance(keyword.value, ast.Constant)
    }
    id = ast.literal_eval(node.args[0])
    return Call(name, id, str(constants.get("unit", "")), bool(constants.get("signed", False)))


def _without_magics(code: str) -> str:
    return re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE)


def forms(
    source: Source, notebook: dict, measured: dict[str, float], model: "Transformer | None" = None
) -> dict:
    """A copy of an executed solution with its forms. measured: {id of a prediction: its result}.

    model: the model of the run, if it is not the bundled one.
    """
    notebook = copy.deepcopy(notebook)
    kept = [cell for cell in source.cells if cell.role != "exercise"]
    cells = list(zip(kept, notebook["cells"], strict=True))
    units: dict[str, str] = {}
    at = 0
    while at < len(cells):
        group = _group(cells[at:])
        if group:
            asked = calls("\n".join(cell.text for cell, _ in group))
            units |= {call.id: call.unit for call in asked if call.name == "predict"}
            before, summary = _asking(source, asked, model)
            ids = [call.id for call in asked if call.name != "quiz"]
            _fold([made for _, made in group], before, summary, ids)
        elif cells[at][0].kind == "code":
            _measuring(*cells[at], measured, units)
        at += max(1, len(group))
    return notebook


def _group(cells: list[tuple[Cell, dict]]) -> list[tuple[Cell, dict]]:
    """The cells from the first one on that hold one answer: a solution and the cell that takes it,
    or the quiz; [] if the first cell holds none."""
    first, _ = cells[0]
    if first.kind != "code":
        return []
    quiz = any(call.name == "quiz" for call in calls(first.text))
    if first.role != "solution" and not quiz:
        return []
    taking = {"answer"} if quiz else {"predict", "check"}
    for n, (cell, _) in enumerate(cells):
        if cell.kind != "code":
            break
        if taking & {call.name for call in calls(cell.text)}:
            return cells[: n + 1]
    return cells[:1]


def _asking(source: Source, asked: list[Call], model: "Transformer | None") -> tuple[str, str]:
    """(the forms for these calls, the summary of their folded cells)."""
    made = ""
    summary = FILL
    for call in asked:
        if call.name == "predict":
            made += _prediction(call)
            summary = GUESS
        elif call.name == "check":
            data = compiled.exercise(checking.find(call.id), model)
            if data:
                made += _value(data)
                summary = ANSWER
            else:
                made += _pointer(source, call.id)
                summary = SOLUTION
        elif call.name == "answer":
            made += _choice(checking.find(call.id, "QUESTIONS"))
            summary = QUIZ
    return made, summary


def _prediction(call: Call) -> str:
    unit = call.unit
    ways = [unit, *unit.split()[:1]]
    if unit == "percent":
        ways.append("%")
    data = {"id": call.id, "unit": unit, "units": ways, "signed": call.signed}
    return _typed(data, "predict", f"Your prediction {call.id}", unit, "Predict")


def _value(data: dict) -> str:
    return _typed(data, "value", f"Your answer to {data['id']}", data["form"], "Check")


def _typed(data: dict, kind: str, label: str, form: str, button: str) -> str:
    """A field for what is typed; shown by the script only."""
    id = data["id"]
    return (
        f'<form class="asked" data-kind="{kind}" data-asked="{compiled.encoded(data)}" hidden>'
        f'<label for="typed-{id}">{label}</label> '
        f'<span class="form" id="form-{id}">{html.escape(form)}</span>'
        f'<span class="typed"><input id="typed-{id}" aria-describedby="form-{id} said-{id}" '
        'autocomplete="off" autocapitalize="off" spellcheck="false">'
        f'<button aria-label="{button} {id}">{button}</button></span>'
        f'<p id="said-{id}" role="status"></p></form>'
    )


def _choice(question: checking.Question) -> str:
    """Radio buttons for the options of a question."""
    options = ""
    for letter, (text, _) in question.options.items():
        options += (
            f'<label><input type="radio" name="{question.id}" value="{letter}"> '
            f"{html.escape(text)}</label>"
        )
    data = compiled.encoded(compiled.question(question))
    return (
        f'<form class="asked" data-kind="choice" data-asked="{data}"><fieldset>'
        f"<legend>{html.escape(question.text)}</legend>{options}"
        '<p role="status"></p></fieldset></form>'
    )


def _pointer(source: Source, id: str) -> str:
    """For an exercise that only Python can judge."""
    return (
        f'<p class="pointer">{id} is checked in the notebook, <code>{source.name}</code>: '
        "<code>make notebooks</code> opens it.</p>"
    )


def _fold(cells: list[dict], before: str, summary: str, ids: list[str]) -> None:
    """Fold cells, below the forms whose answers they hold."""
    _mark(
        cells[0],
        BEFORE,
        f'{before}<details class="code" data-for="{" ".join(ids)}"><summary>{summary}</summary>',
    )
    _mark(cells[-1], AFTER, "</details>")


def _measuring(cell: Cell, made: dict, measured: dict[str, float], units: dict[str, str]) -> None:
    """Let the output of a cell that reveals a prediction wait for that prediction."""
    for call in calls(cell.text):
        if call.name != "reveal" or call.id not in measured:
            continue
        value = measured[call.id]
        unit = call.unit or units.get(call.id, "")
        data = {"id": call.id, "measured": value, "unit": unit}
        _drop_line(made, call.id)
        _mark(made, BEFORE, f'<div class="measured" data-asked="{compiled.encoded(data)}">')
        text = html.escape(f"{call.id}: it is {quantity(value, unit)}.")
        _mark(made, AFTER, f'<p class="reveal" id="measured-{call.id}">{text}</p></div>')


def _drop_line(made: dict, id: str) -> None:
    """Take the line that compares the solution's own guess out of the output of a cell."""
    line = re.compile(rf"^{re.escape(id)}: (?:you predicted|it is) .*\n?(?: {{4}}.*\n?)*", re.M)
    outputs = []
    for output in made["outputs"]:
        if output["output_type"] == "stream":
            output["text"] = line.sub("", output["text"])
            if not output["text"]:
                continue
        outputs.append(output)
    made["outputs"] = outputs


def _mark(made: dict, place: str, markup: str) -> None:
    made["metadata"][place] = made["metadata"].get(place, "") + markup
