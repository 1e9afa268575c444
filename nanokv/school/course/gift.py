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

from nanokv.errors import CourseError
from nanokv.school.course import checking, exam
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
        return f"::{escaped(self.name)}::{self.text} {{{inside.lstrip() if len(self.answers) == 1 else inside}\n}}"


def write(folder: Path, words: list[str], number: int, out: Path) -> list[str]:
    """Write the file. Returns the ids that GIFT cannot ask, in notebooks named as a whole."""
    found, left = [], []
    for word in words:
        entries, unasked = of_word(Path(folder), word, number)
        found += entries
        left += unasked
    found = list({entry.name: entry for entry in found}.values())  # named twice, asked once
    if not found:
        raise CourseError(
            "which questions?", "nanokv course gift 05 06.2 open.1 --seed 7 -o questions.gift"
        )
    out.write_text(page(found, number), encoding="utf-8")
    return left


def page(entries: list[Entry], number: int) -> str:
    """The text of the file. GIFT separates questions by blank lines, so none occur elsewhere."""
    blocks, category = [f"// nanokv, seed {number}. Import: GIFT, get category from file."], None
    for entry in entries:
        if entry.category != category:
            category = entry.category
            blocks.append(f"$CATEGORY: {category}")
        blocks.append(str(entry))
    return "\n\n".join(blocks) + "\n"


def of_word(folder: Path, word: str, number: int) -> tuple[list[Entry], list[str]]:
    """(entries, ids that GIFT cannot ask). CourseError if `word` is itself such an id."""
    if word.startswith("open."):
        return [
            essay(word, *exam.open_question(folder / "teach" / "open_questions.md", word)[:2])
        ], []
    source, checks, questions = exam.named(folder, word)
    found = {check.id: exercise(source, check, number) for check in checks}
    of_all = (
        checking.exercises(source.number).CHECKS if word in (source.number, source.name) else checks
    )
    left = [check.id for check in of_all if not found.get(check.id)]
    if word in left:
        raise CourseError(
            f"{word}: its answer is no number and no list of numbers", "nanokv course exam takes it"
        )
    return [e for entries in found.values() for e in entries] + [
        choice(question) for question in questions
    ], left


def choice(question) -> Entry:
    """A multiple-choice question. Each option has the comment that the notebook shows for it."""
    right = exam.right_letter(question)
    lines = (
        f"{'=' if letter == right else '~'}{formatted(text, 'plain')}#{formatted(comment, 'plain')}"
        for letter, (text, comment) in question.options.items()
    )
    return Entry(
        category(question.id), question.id, formatted(question.text, "plain"), tuple(lines)
    )


def essay(id: str, text: str, full: str) -> Entry:
    """An open question, marked by hand. The full answer is its general feedback."""
    return Entry(f"nanokv/open/{id}", id, formatted(text), (f"####{formatted(full)}",))


def exercise(source, check, number: int) -> list[Entry]:
    """One entry per variant and part of the answer; none if the answer is not made of numbers."""
    cases = exam.draw(check, number) if check.key else {}
    # Without parameters both sheets are the same: one variant.
    cases = dict(list(cases.items())[:1]) if not check.parameters else cases
    found = []
    for sheet, case in cases.items():
        right, task = parts(check.key(case)), exam.asked(source, check, case)
        slips = [(parts(mistake.gives(case)), mistake.message) for mistake in check.mistakes]
        for i, part in enumerate(right):
            known = [(values[i], message) for values, message in _likeliest(slips, right, i)]
            which = f" {i + 1} of {len(right)}" if len(right) > 1 else ""
            text = f"{task}\n\n{_asks(part, which)}"
            lines = _shapes(part, known) if isinstance(part, list) else _numbers(part, known, check)
            found.append(
                Entry(
                    category(check.id) + which,
                    f"{check.id} {sheet}{which}",
                    formatted(text),
                    tuple(lines),
                )
            )
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


def parts(answer) -> list:
    """The numbers of an answer, or its lists of whole numbers (shapes); [] for anything else."""
    answer = plain(answer)
    items = [plain(item) for item in (answer if isinstance(answer, list) else [answer])]
    shapes = all(isinstance(item, list) and all(type(n) is int for n in item) for item in items)
    return items if shapes or all(map(_is_number, items)) else []


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _asks(part, which: str) -> str:
    if isinstance(part, list):
        return f"Enter tuple{which or ' only'} of the answer, written like `{tuple(range(9, 9 - len(part), -1))}`."
    return f"Enter number{which} of the answer." if which else "Enter one number."


def _numbers(right, known, check) -> list[str]:
    """Lines "=value:tolerance". Moodle takes the first that fits, so the right one comes first."""
    wrong = {}
    for value, message in known:
        if _is_number(value) and abs(value - right) > _tolerance(right, check):
            wrong.setdefault(_number(value, check), message)
    lines = ["#", f"={_number(right, check)}"]
    lines += [f"=%0%{value}#{formatted(message, 'plain')}" for value, message in wrong.items()]
    return lines + ([f"~#{formatted(check.otherwise, 'plain')}"] if check.otherwise else [])


def _number(value, check) -> str:
    shown = value if type(value) is int else f"{value:.{DIGITS}g}"
    return f"{shown}:{_tolerance(value, check):.6g}"


def _tolerance(value, check) -> float:
    rel, atol = check.near
    return 0 if type(value) is int and check.near == EXACT else max(atol, rel * abs(value))


def _shapes(right, known) -> list[str]:
    """Lines of a short answer: a shape with and without spaces, in either bracket or none."""
    wrong = {}
    for shape, message in known:
        if shape != right:
            wrong.setdefault(str(tuple(shape)), message)
    lines = [f"={escaped(text)}" for text in _spellings(str(tuple(right)))]
    return lines + [
        f"=%0%{escaped(text)}#{formatted(wrong[shape], 'plain')}"
        for shape in wrong
        for text in _spellings(shape)
    ]


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
    clean = RELATIVE.sub(r"\1", COMMENT.sub("", text)) if form == "markdown" else text
    return f"[{form}]{escaped(clean.strip())}"


def escaped(text: str) -> str:
    return text.translate(RESERVED)
