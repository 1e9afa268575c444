"""Exam questions for Moodle, as a GIFT file: quiz, numeric exercises, open questions.

    nanokv course gift 05 06.2 open.1 --seed 7 -o questions.gift

Exercises have the numbers of sheets A and B of `nanokv course exam` with the same seed. Each
question is a category with both variants, so that a Moodle quiz can draw one of them. Moodle takes
one number per question, so an answer of two numbers becomes two questions. Known mistakes become
wrong answers with their feedback.
"""

import math
import re
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from nanokv.errors import CourseError
from nanokv.school.course import checking, exam, twins
from nanokv.school.course.answers import plain
from nanokv.school.course.checking import EXACT

RESERVED = str.maketrans({c: f"\\{c}" for c in "\\~=#{}:"} | {"\n": "\\n", "\r": ""})
# Moodle's importer replaces escaped characters by these.
PLACEHOLDER = re.compile(r"&&0\d\d")
# A relative link: its page does not exist in Moodle.
RELATIVE = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
DIGITS = 10  # significant digits of a number; the checks allow an error of a millionth


@dataclass(frozen=True)
class Entry:
    """One question. `answers`: the lines between the braces."""

    category: str
    name: str
    text: str
    answers: tuple[str, ...]

    def __str__(self):
        inside = "".join(f"\n  {line}" for line in self.answers)
        if len(self.answers) == 1:
            inside = inside.lstrip()
        return f"::{escaped(self.name)}::{self.text} {{{inside}\n}}"


def write(folder: Path, words: list[str], number: int, out: Path) -> list[str]:
    """Write the file. Returns the ids that GIFT cannot ask, in notebooks named as a whole."""
    found: dict[str, Entry] = {}  # by name: a question that two words name appears once
    left: list[str] = []
    for word in words:
        entries, unasked = of_word(Path(folder), word, number)
        found |= {entry.name: entry for entry in entries}
        left += unasked
    if not found:
        raise CourseError(
            "which questions?", "nanokv course gift 05 06.2 open.1 --seed 7 -o questions.gift"
        )
    out.write_text(page(list(found.values()), number), encoding="utf-8")
    return left


def page(entries: list[Entry], number: int) -> str:
    """The text of the file. GIFT separates questions by blank lines, so none occur elsewhere."""
    blocks = [f"// nanokv, seed {number}. Import: GIFT, get category from file."]
    category = None
    for entry in entries:
        if entry.category != category:
            category = entry.category
            blocks.append(f"$CATEGORY: {category}")
        blocks.append(str(entry))
    return "\n\n".join(blocks) + "\n"


def of_word(folder: Path, word: str, number: int) -> tuple[list[Entry], list[str]]:
    """(entries, ids that GIFT cannot ask). CourseError if `word` is itself such an id."""
    if word.startswith("open."):
        text, full, _ = exam.open_question(folder / "teach" / "open_questions.md", word)
        return [essay(word, text, full)], []
    source, checks, questions = exam.named(folder, word)
    found = {check.id: exercise(source, check, number) for check in checks}
    if word in (source.number, source.name):
        checks = checking.exercises(source.number).CHECKS
    left = [check.id for check in checks if not found.get(check.id)]
    if word in left:
        raise CourseError(
            f"{word}: its answer is no number and no list of numbers", "nanokv course exam takes it"
        )
    exercises = [entry for entries in found.values() for entry in entries]
    return exercises + [choice(question) for question in questions], left


def choice(question: checking.Question) -> Entry:
    """A multiple-choice question. Each option has the comment that the notebook shows for it."""
    right = exam.right_letter(question)
    lines = []
    for letter, (text, comment) in question.options.items():
        mark = "=" if letter == right else "~"
        lines.append(f"{mark}{formatted(text, 'plain')}#{formatted(comment, 'plain')}")
    return Entry(
        category(question.id), question.id, formatted(question.text, "plain"), tuple(lines)
    )


def essay(id: str, text: str, full: str) -> Entry:
    """An open question, marked by hand. The full answer is its general feedback."""
    return Entry(f"nanokv/open/{id}", id, formatted(text), (f"####{formatted(full)}",))


def exercise(source: twins.Source, check: checking.Check, number: int) -> list[Entry]:
    """One entry per variant and part of the answer; none if the answer is not made of numbers."""
    if not check.key:
        return []
    cases = list(exam.draw(check, number).items())
    if not check.parameters:  # both sheets are the same: one variant
        cases = cases[:1]
    found = []
    for sheet, case in cases:
        right = parts(check.key(case))
        task = exam.asked(source, check, case)
        slips = [(parts(mistake.gives(case)), mistake.message) for mistake in check.mistakes]
        for i, part in enumerate(right):
            known = [(values[i], message) for values, message in _likeliest(slips, right, i)]
            which = f" {i + 1} of {len(right)}" if len(right) > 1 else ""
            if isinstance(part, list):
                lines = _shapes(part, known)
            else:
                lines = _numbers(part, known, check)
            entry = Entry(
                category=category(check.id) + which,
                name=f"{check.id} {sheet}{which}",
                text=formatted(f"{task}\n\n{_asks(part, which)}"),
                answers=tuple(lines),
            )
            found.append(entry)
    return sorted(found, key=lambda entry: entry.category)


def _likeliest(slips, right, i) -> list:
    """The mistakes with as many parts as the right answer, likeliest first.

    The question asks only for part i, so a mistake that gets more of the other parts right is
    likelier.
    """
    fitting = [slip for slip in slips if len(slip[0]) == len(right)]
    return sorted(
        fitting, key=lambda slip: -sum(slip[0][j] == right[j] for j in range(len(right)) if j != i)
    )


def category(id: str) -> str:
    return f"nanokv/{id[:2]}/{id}"


def parts(answer: Any) -> list:
    """The numbers of an answer, or its lists of whole numbers (shapes); [] for anything else."""
    answer = plain(answer)
    items = list(map(plain, answer)) if isinstance(answer, list) else [answer]
    if all(map(_is_shape, items)) or all(map(_is_number, items)):
        return items
    return []


def _is_shape(value) -> bool:
    return isinstance(value, list) and all(type(n) is int for n in value)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _asks(part, which: str) -> str:
    if isinstance(part, list):
        example = tuple(range(9, 9 - len(part), -1))
        return f"Enter tuple{which or ' only'} of the answer, written like `{example}`."
    if which:
        return f"Enter number{which} of the answer."
    return "Enter one number."


def _numbers(right, known, check) -> list[str]:
    """Lines "=value:tolerance". Moodle takes the first that fits, so the right one comes first."""
    wrong: dict[str, str] = {}
    for value, message in known:
        if _is_number(value) and abs(value - right) > _tolerance(right, check):
            wrong.setdefault(_number(value, check), message)
    lines = ["#", f"={_number(right, check)}"]
    lines += [f"=%0%{value}#{formatted(message, 'plain')}" for value, message in wrong.items()]
    if check.otherwise:
        lines.append(f"~#{formatted(check.otherwise, 'plain')}")
    return lines


def _number(value, check) -> str:
    shown = value if type(value) is int else f"{value:.{DIGITS}g}"
    return f"{shown}:{_tolerance(value, check):.6g}"


def _tolerance(value, check) -> float:
    rel, atol = check.near
    if type(value) is int and check.near == EXACT:
        return 0
    return max(atol, rel * abs(value))


def _shapes(right, known) -> list[str]:
    """Lines of a short answer: a shape with and without spaces, in either bracket or none."""
    wrong: dict[str, str] = {}
    for shape, message in known:
        if shape != right:
            wrong.setdefault(str(tuple(shape)), message)
    lines = [f"={escaped(text)}" for text in _spellings(str(tuple(right)))]
    for shape, message in wrong.items():
        comment = formatted(message, "plain")
        lines += [f"=%0%{escaped(text)}#{comment}" for text in _spellings(shape)]
    return lines


def _spellings(shape: str) -> tuple[str, ...]:
    inside = shape.removeprefix("(").removesuffix(")").removesuffix(",")
    forms = (shape, f"({inside})", f"[{inside}]", inside)
    return tuple(dict.fromkeys(text for form in forms for text in (form, form.replace(" ", ""))))


def formatted(text: str, form: str = "markdown") -> str:
    """A text, escaped, after its format. CourseError if Moodle would misread the text."""
    if found := PLACEHOLDER.search(text):
        raise CourseError(
            f"GIFT cannot hold the text {found[0]}", "Moodle would read it as an escaped character"
        )
    if form == "markdown":
        text = RELATIVE.sub(r"\1", COMMENT.sub("", text))
    return f"[{form}]{escaped(text.strip())}"


def escaped(text: str) -> str:
    return text.translate(RESERVED)
