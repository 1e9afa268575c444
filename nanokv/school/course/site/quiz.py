"""The quiz of a notebook as questions that the reader of its page answers: what is said about each option is the
notebook's own. The cells with the answers are folded below.

The script is assets/quiz.js. Which option was chosen stays in the reader's browser.
"""

import html
import itertools
import re

from nanokv.school.course import checking
from nanokv.school.course.answers import Sealed, same

CELL = re.compile(r'(?=<div class="cell border-box-sizing )')  # where one begins
HEADING, CODE = '<h2 id="quiz"', "code_cell"
CELLS = "The cells of the notebook, with the answers"


def live(body: str, notebook: str) -> str:
    """The page of a notebook: below its heading Quiz a form for each question, and the cells of code that follow it
    folded. Other pages stay as they are."""
    cells = CELL.split(body)
    places = [n for n, cell in enumerate(cells) if HEADING in cell]
    if not places:
        return body
    first = places[0] + 1
    rest = cells[first:]
    quiz = list(itertools.takewhile(lambda cell: CODE in cell[: cell.index(">")], rest))
    forms = "".join(map(form, checking.exercises(notebook).QUESTIONS))
    folded = f'<details class="code"><summary>{CELLS}</summary>{"".join(quiz)}</details>'
    script = '<script src="../quiz.js" defer></script>'
    return "".join([*cells[:first], forms, script, folded, *rest[len(quiz) :]])


def form(question) -> str:
    """One question: radio buttons that know what is to be said about them."""
    right = Sealed(question.id, question.right)
    options = "".join(
        f'<label><input type="radio" name="{question.id}" value="{letter}" '
        f'data-comment="{html.escape(comment)}"{" data-right" * same(letter, right)}> '
        f"{html.escape(text)}</label>"
        for letter, (text, comment) in question.options.items()
    )
    return (
        f'<form class="quiz"><fieldset><legend>{html.escape(question.text)}</legend>{options}'
        '<p role="status"></p></fieldset></form>'
    )
