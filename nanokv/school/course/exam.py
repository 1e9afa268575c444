"""A printed exam on two sheets, A and B, with a key: the notebooks' exercises with other numbers.

Neighbours get the same questions with different numbers and different letters, drawn from the
teacher's seed. An exercise without parameters is the same on both sheets. Where an exercise has no
single right answer, the key shows the notebook's solution.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import checking, twins
from nanokv.school.course.answers import plain
from nanokv.school.course.variants import seed_of

SHEETS = ("A", "B")
FILES = ("A.md", "B.md", "key.md")
POINTS = {"exercise": 3, "question": 1, "open": 3}  # levels 0 to 3 of notebooks/teach/rubric.md
TRIES = 100


@dataclass(frozen=True)
class Item:
    """One question of the exam. `text` and `answer`: {sheet: Markdown}."""

    id: str
    kind: str
    text: dict
    answer: dict


def write(folder: Path, words: list[str], number: int, out: Path) -> list[Path]:
    """Write A.md, B.md and key.md into `out`, and return their paths.

    `words` name the contents: notebooks (05), exercises (05.1), questions (05.q2, open.1).
    """
    found: dict[str, Item] = {}  # an item that two words name appears once
    for word in words:
        found |= {item.id: item for item in chosen(Path(folder), word, number)}
    items = list(found.values())
    if not items:
        raise CourseError(
            "the exam has no questions", "nanokv course exam 05 06.1 open.1 --seed 7 -o exam"
        )
    out.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.md": sheet(name, items) for name in SHEETS} | {"key.md": key(items, number)}
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def chosen(folder: Path, word: str, number: int) -> list[Item]:
    """The items that a word names; a notebook names its exercises with parameters and its quiz."""
    if word.startswith("open."):
        return [_open(folder / "teach" / "open_questions.md", word)]
    source, checks, questions = named(folder, word)
    return [_exercise(source, c, number) for c in checks] + [
        _question(q, number) for q in questions
    ]


def named(folder: Path, word: str) -> tuple:
    """(source, checks, questions) of a notebook's name or an id; CourseError if there are none."""
    notebook = word if word[2:3] == "_" else word[:2]  # 05_the_waste, or the 05 of 05.1
    source = twins.read(twins.chosen(folder, [notebook])[0])
    module = checking.exercises(source.number)
    if word in (source.number, source.name):
        checks = [c for c in module.CHECKS if c.parameters and c.key and not c.hidden]
        questions = module.QUESTIONS
    else:
        checks = [c for c in module.CHECKS if c.id == word]
        questions = [q for q in module.QUESTIONS if q.id == word]
    if not (*checks, *questions):
        raise CourseError(
            f"no exercise {word!r}", ", ".join(x.id for x in (*module.CHECKS, *module.QUESTIONS))
        )
    return source, checks, questions


def _exercise(source, check, number: int) -> Item:
    cases = draw(check, number)
    text = {name: asked(source, check, case) for name, case in cases.items()}
    if check.key:
        answer = {name: _right(check, case) for name, case in cases.items()}
    else:
        answer = dict.fromkeys(cases, f"```python\n{solution(source, check.id)}\n```")
    return Item(check.id, "exercise", text, answer)


def asked(source: twins.Source, check: checking.Check, case: checking.Case) -> str:
    """The text of an exercise with the numbers of this case."""
    if check.hidden:  # the parameters are the answer, so a printed sheet must not show them
        raise CourseError(
            f"{check.id} works only at a computer",
            "nanokv course variants gives everyone their own",
        )
    task = re.search(
        rf"^\*\*{re.escape(check.id)}\*\*\s*(.+?)(?=^\*\*\d\d\.|^#|\Z)", source.prose(), re.S | re.M
    )
    if task is None:
        raise CourseError(
            f"{source.name} has no text **{check.id}**", "each exercise begins with its id in bold"
        )
    numbers = {name: getattr(case, name) for name in check.parameters}
    if check.given:
        numbers |= check.given(case)
    text = task[1].strip()
    if not numbers:
        return text
    given = ", ".join(f"`{name} = {number}`" for name, number in numbers.items())
    return f"{text}\n\n{given}"


def draw(check: checking.Check, number: int) -> dict:
    """{sheet: case}. If the exercise has parameters and a key, the two right answers differ."""
    notebook = check.id[:2]
    first = check.case(seed_of(number, notebook, SHEETS[0]))
    others = (check.case(seed_of(number, notebook, f"{SHEETS[1]}{i}")) for i in range(TRIES))
    if not (check.parameters and check.key):
        return dict.fromkeys(SHEETS, check.case())
    second = next(
        (case for case in others if plain(check.key(case)) != plain(check.key(first))), None
    )
    if second is None:
        raise CourseError(
            f"{check.id}: its numbers do not give two different answers", "choose another exercise"
        )
    return {SHEETS[0]: first, SHEETS[1]: second}


def _right(check, case) -> str:
    """The right answer, and the answers of the known mistakes for the same numbers."""
    slips = [f"{m.name}: `{_shown(m.gives(case))}`" for m in check.mistakes]
    return f"`{_shown(check.key(case))}`" + "".join(f"\n    - {slip}" for slip in slips)


def _shown(answer) -> str:
    answer = plain(answer)
    if isinstance(answer, list):
        answer = tuple(answer)
    return str(answer)


def solution(source: twins.Source, id: str) -> str:
    """The code of the last solution cell before course.check(id, …)."""
    cells = source.cells
    at = next(i for i, cell in enumerate(cells) if f'course.check("{id}"' in cell.text)
    return next(cell.text for cell in reversed(cells[:at]) if cell.role == "solution").strip()


def _question(question, number: int) -> Item:
    """A quiz question. Each sheet has its options in another order, so under other letters."""
    right = right_letter(question)
    rng = random.Random(f"{number} {question.id}")
    first = rng.sample(list(question.options), len(question.options))
    # Rotated by one: no option keeps its letter.
    orders = {SHEETS[0]: first, SHEETS[1]: first[1:] + first[:1]}
    text = {
        name: f"{question.text}\n\n"
        + "\n".join(
            f"- **{chr(97 + i)})** {question.options[letter][0]}" for i, letter in enumerate(order)
        )
        for name, order in orders.items()
    }
    answer = {name: f"**{chr(97 + order.index(right))}**" for name, order in orders.items()}
    return Item(question.id, "question", text, answer)


def right_letter(question: checking.Question) -> str:
    return next(letter for letter in question.options if question.judge(letter).state == "right")


def _open(path: Path, id: str) -> Item:
    text, full, common = open_question(path, id)
    answer = f"{full}\n\n{common}\n\nMarked samples: {id} in {path.name}."
    return Item(id, "open", dict.fromkeys(SHEETS, text), dict.fromkeys(SHEETS, answer))


def open_question(path: Path, id: str) -> tuple[str, str, str]:
    """(the question, what a full answer says, the common wrong answer)."""
    full, common = (
        rf"(\*\*{name}\*\*.+?)\n\n" for name in ("A full answer", "Common wrong answer")
    )
    pattern = rf"^## {re.escape(id)}\n+(.+?)\n\n{full}{common}"
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.S | re.M)
    if not found:
        raise CourseError(f"no {id} in {path.name}", "its headings look like ## open.1")
    return found[1], found[2], found[3]


def sheet(name: str, items: list[Item]) -> str:
    """The text that students get."""
    total = sum(POINTS[item.kind] for item in items)
    parts = [
        f"# Exam, sheet {name}\n\nName: ______________________________    Points: ______ of {total}"
    ]
    for i, item in enumerate(items, 1):
        points = POINTS[item.kind]
        parts.append(f"**{i}.** ({points} point{'s' * (points > 1)})\n\n{item.text[name]}")
    return "\n\n".join(parts) + "\n"


def key(items: list[Item], number: int) -> str:
    """The text for the teacher: every answer, for both sheets."""
    points = "Points as in rubric.md: exercises and open questions 0 to 3, quiz 0 or 1."
    parts = [f"# Key of the exam, seed {number}\n\n{points}"]
    for i, item in enumerate(items, 1):
        answers = "\n".join(f"- {name}: {item.answer[name]}" for name in SHEETS)
        if item.answer[SHEETS[0]] == item.answer[SHEETS[1]]:
            answers = f"Both sheets:\n\n{item.answer[SHEETS[0]]}"
        parts.append(f"**{i}.** {item.id}\n\n{answers}")
    return "\n\n".join(parts) + "\n"
