"""The outline of a lesson: its texts, pictures, outputs and exercises, section by section.

It is read from a source and its executed solution. A prediction is found by its call of
`course.predict`; its question is the last one of the text before the call, and its answer is the
figure that `course.reveal` printed. Pictures, claims, exercises and the quiz are found by their
calls too, so a new notebook needs no marks for them.
"""

import base64
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nanokv.errors import CourseError
from nanokv.school.course import drawings, twins

PREDICT = re.compile(r'course\.predict\(\s*"([\w.]+)"')
REVEAL = re.compile(r'course\.reveal\(\s*"([\w.]+)"')
CLAIM = re.compile(r'course\.claim\(\s*"([\w.]+)"')
QUIZ = re.compile(r"course\.quiz\(")
START = re.compile(r"course\.start\(")
SIZES = re.compile(r"\w+: .+?D = [\d,]+\.", re.DOTALL)
# Cells whose output is left out: a judgement of the solution's answers, or a text shown elsewhere.
SILENT = re.compile(r"course\.(check|answer|predict|claim|quiz|case)\(")
# Output meant for one learner, with its indented continuation lines.
UNSHOWN = re.compile(
    r"^(?:In words: |\d\d\.\w+: (?:you predicted|it is) |\w+: the reference \().*\n?(?: {4}.*\n?)*",
    re.MULTILINE,
)
HEADING = re.compile(r"^#{1,2} +(.+)$", re.MULTILINE)
TASK = re.compile(r"\*\*(\d\d\.\d+)\*\*\s*")
BLOCK = re.compile(r"```.*?```|(?:(?!\n\s*\n).)+", re.DOTALL)
SENTENCE_END = re.compile(r"(?:(?<=[.?!])|(?<=[.?!]\*\*))\s+(?=[A-Z0-9`*<\[(])")
LISTED = re.compile(r"\s*([-*+|>#]\s|\d+\. |```|\|)")


@dataclass(frozen=True)
class Piece:
    """One item of a lesson.

    kind: heading, text (a paragraph), block (a list, table or fence), sizes (of the model), ask,
    reveal, picture, printed, code, task, claim or quiz.
    text: Markdown of a text, the description of a picture, or an output. image: its address.
    """

    kind: str
    text: str = ""
    id: str = ""
    image: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    pieces: tuple[Piece, ...]


def outline(source: twins.Source, executed: dict) -> list[Section]:
    """The sections of a source; the first has the text before the first second-level heading.

    CourseError: a prediction has no question before it, or no reveal after it.
    """
    pieces: list[Piece] = []
    cells = [cell for cell in source.cells if cell.role != "exercise"]
    for cell, done in zip(cells, executed["cells"], strict=True):
        if cell.slide == "skip":
            continue
        if cell.kind == "markdown":
            pieces += _written(cell.text)
        elif cell.role == "both":
            asked = PREDICT.findall(cell.text)
            if asked:
                pieces = _asking(pieces, asked)
            pieces += _ran(cell, done["outputs"])
    lost = ids(pieces, "ask") - ids(pieces, "reveal")
    if lost:
        raise CourseError(
            f"{source.name}: no reveal of the prediction {', '.join(sorted(lost))}",
            'course.reveal("05.a", measured) belongs in the cell that measures it',
        )
    return _sections(pieces)


def ids(pieces: Iterable[Piece], kind: str) -> set[str]:
    return {piece.id for piece in pieces if piece.kind == kind}


def sentences(paragraph: str) -> list[str]:
    """A paragraph in sentences; none is cut inside `code`, **emphasis** or a `[link](…)`."""
    found: list[str] = []
    for piece in SENTENCE_END.split(paragraph.strip()):
        if found and _is_torn(found[-1]):
            found[-1] += f" {piece}"
        else:
            found.append(piece)
    return found


def _is_torn(text: str) -> bool:
    """Does the text end inside `code`, **emphasis** or the text of a link?"""
    return bool(text.count("`") % 2 or text.count("**") % 2 or text.count("[") != text.count("]"))


def is_question(sentence: str) -> bool:
    return sentence.rstrip("*) ").endswith("?")


def _sections(pieces: list[Piece]) -> list[Section]:
    starts = [i for i, piece in enumerate(pieces) if piece.kind == "heading"]
    ends = [*starts[1:], len(pieces)]
    return [
        Section(pieces[start].text, tuple(pieces[start + 1 : end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def _written(text: str) -> list[Piece]:
    """The headings, paragraphs, blocks and tasks of a text cell.

    A task extends to the next task or heading.
    """
    pieces: list[Piece] = []
    for block in BLOCK.findall(text):
        block = block.strip()
        heading = HEADING.match(block)
        task = TASK.match(block)
        if heading:
            pieces.append(Piece("heading", re.sub(r"[`*]", "", heading[1])))
            block = block[heading.end() :].strip()
        if task:
            pieces.append(Piece("task", block[task.end() :], task[1]))
        elif block and pieces and pieces[-1].kind == "task":
            pieces[-1] = replace(pieces[-1], text=f"{pieces[-1].text}\n\n{block}")
        elif block:
            kind = "block" if LISTED.match(block) else "text"
            pieces.append(Piece(kind, block))
    return pieces


def _asking(pieces: list[Piece], asked: list[str]) -> list[Piece]:
    """The pieces, in which the last questions since the last prediction became predictions.

    asked: their ids, one per question.
    """
    since = max((i + 1 for i, piece in enumerate(pieces) if piece.kind == "ask"), default=0)
    found: list[tuple[int, str]] = []
    for i, piece in enumerate(pieces):
        if i >= since and piece.kind == "text":
            found += [(i, question) for question in _questions(piece.text)]
    if len(found) < len(asked):
        raise CourseError(
            f"prediction {asked[0]}: the text before it has no question",
            "the slide of the prediction shows the last question of that text",
        )
    made: dict[int, list[Piece]] = {}
    for id, (i, question) in zip(asked, found[-len(asked) :], strict=True):
        made.setdefault(i, []).append(Piece("ask", question, id))
    return [piece for i, old in enumerate(pieces) for piece in made.get(i, [old])]


def _questions(paragraph: str) -> list[str]:
    """Each question of a paragraph, after the sentences that lead to it."""
    found: list[str] = []
    leading: list[str] = []
    for sentence in sentences(paragraph):
        leading.append(sentence)
        if is_question(sentence):
            found.append("\n".join(leading))
            leading = []
    return found


def _ran(cell: twins.Cell, outputs: list) -> list[Piece]:
    """The pieces of a code cell: its code if it is tagged "slide", its outputs and its pictures."""
    pieces: list[Piece] = []
    if cell.slide == "slide":
        pieces.append(Piece("code", cell.text))
    pieces += [Piece("claim", id=id) for id in CLAIM.findall(cell.text)]
    if QUIZ.search(cell.text):
        pieces.append(Piece("quiz"))
    printed = "".join(output.get("text", "") for output in outputs)
    if not SILENT.search(cell.text):
        pieces += _printed(cell, printed)
    pieces += [Piece("reveal", _measured(id, printed), id) for id in REVEAL.findall(cell.text)]
    pieces += [picture for output in outputs for picture in _pictures(output)]
    return pieces


def _printed(cell: twins.Cell, printed: str) -> list[Piece]:
    """The output of a cell, or the sizes of the model from the cell that starts the lesson."""
    shown = UNSHOWN.sub("", printed).strip("\n")
    if START.search(cell.text):
        sizes = SIZES.match(shown)
        if sizes:
            return [Piece("sizes", sizes[0])]
    if not shown.strip():
        return []
    return [Piece("printed", shown)]


def _measured(id: str, printed: str) -> str:
    """The figure in the output of course.reveal: "48 times as many"."""
    line = re.sub(r"\n {4}", " ", printed)
    found = re.search(
        rf"^{re.escape(id)}: (?:you predicted .+?, it is (?P<seen>.+): [^:\n]+\.$"
        r"|it is (?P<alone>.+)\. You made no prediction\.$)",
        line,
        re.MULTILINE,
    )
    if not found:
        raise CourseError(f"{id}: nothing was revealed", f'course.reveal("{id}", measured)')
    return found["seen"] or found["alone"]


def _pictures(output: dict) -> list[Piece]:
    """The pictures of an output: a PNG, which is Base64 already, or a drawing as text."""
    data = output.get("data", {})
    found = []
    for kind in sorted(data.keys() & {"image/png", "image/svg+xml"}):
        if kind == "image/svg+xml":
            image = drawings.address(data[kind])
        else:
            image = f"data:{kind};base64,{''.join(data[kind].split())}"
        found.append(Piece("picture", output["metadata"][kind]["alt"], image=image))
    return found


def aspect(picture: Piece) -> float:
    """Width over height, from the header of a PNG or the viewBox of a drawing."""
    data = base64.b64decode(picture.image.partition(",")[2])
    box = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', data[:1000])
    if box:
        width, height = map(float, box.groups())
    else:
        width, height = struct.unpack(">II", data[16:24])
    return width / height
