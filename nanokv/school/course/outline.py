"""What a lesson shows, read from a source and its executed solution: pieces in their order, section by section.

A prediction is found where `course.predict` is called: its words are the last question of the text before the call. Its
answer is what `course.reveal` printed. Pictures, claims, exercises and the quiz are found by their calls too, so a new
notebook needs no mark for them.
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
# Cells that print a judgement of the solution's answers, or what has a slide of its own.
SILENT = re.compile(r"course\.(check|answer|predict|claim|quiz|case)\(")
# Said to one learner, with the indented lines on which it goes on.
UNSHOWN = re.compile(
    r"^(?:In words: |\d\d\.\w+: (?:you predicted|it is) |\w+: the reference \().*\n?(?: {4}.*\n?)*",
    re.MULTILINE,
)
HEADING = re.compile(r"^#{1,2} +(.+)$", re.MULTILINE)
TASK = re.compile(r"\*\*(\d\d\.\d+)\*\*\s*")
BLOCK = re.compile(r"```.*?```|(?:(?!\n\s*\n).)+", re.DOTALL)
LISTED = re.compile(r"\s*([-*+|>#]\s|\d+\. |```|\|)")


@dataclass(frozen=True)
class Piece:
    """One thing that a lesson shows.

    kind: heading, text (a paragraph), block (a list, table or fence), sizes (of the model), ask, reveal, picture,
    printed, code, task, claim or quiz. `text` is Markdown of what is written, the words of a picture, or what was
    printed; `image` is an address.
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
    """The sections of a source, the first with what stands before the first second-level heading.

    CourseError: a prediction without a question before it, or without a reveal after it.
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
            'course.reveal("05.a", measured) stands in the cell that measures it',
        )
    return _sections(pieces)


def ids(pieces: Iterable[Piece], kind: str) -> set[str]:
    return {piece.id for piece in pieces if piece.kind == kind}


def sentences(paragraph: str) -> list[str]:
    """A paragraph in sentences; none is cut inside `code`, **emphasis** or a `[link](…)`."""
    found = [""]
    for piece in re.split(r"(?:(?<=[.?!])|(?<=[.?!]\*\*))\s+(?=[A-Z0-9`*<\[(])", paragraph.strip()):
        last = found[-1]
        torn = last.count("`") % 2 or last.count("**") % 2 or last.count("[") != last.count("]")
        found[-1:] = [f"{last} {piece}".strip()] if torn or not last else [last, piece]
    return found


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
    """Headings, paragraphs, blocks and tasks of a text cell. A task goes on to the next one, or to a heading."""
    pieces: list[Piece] = []
    for block in BLOCK.findall(text):
        block = block.strip()
        heading, task = HEADING.match(block), TASK.match(block)
        if heading:
            pieces.append(Piece("heading", re.sub(r"[`*]", "", heading[1])))
            block = block[heading.end() :].strip()
        if task:
            pieces.append(Piece("task", block[task.end() :], task[1]))
        elif block and pieces and pieces[-1].kind == "task":
            pieces[-1] = replace(pieces[-1], text=f"{pieces[-1].text}\n\n{block}")
        elif block:
            pieces.append(Piece("block" if LISTED.match(block) else "text", block))
    return pieces


def _asking(pieces: list[Piece], asked: list[str]) -> list[Piece]:
    """The pieces with the last questions since the last prediction as what is asked, one for each id."""
    since = max((i + 1 for i, piece in enumerate(pieces) if piece.kind == "ask"), default=0)
    found = [
        (i, question)
        for i, piece in enumerate(pieces)
        if i >= since and piece.kind == "text"
        for question in _questions(piece.text)
    ]
    if len(found) < len(asked):
        raise CourseError(
            f"prediction {asked[0]}: no question stands in the text before it",
            "its last question is what the slide of the prediction shows",
        )
    made: dict[int, list[Piece]] = {}
    for id, (i, question) in zip(asked, found[-len(asked) :], strict=True):
        made.setdefault(i, []).append(Piece("ask", question, id))
    return [piece for i, old in enumerate(pieces) for piece in made.get(i, [old])]


def _questions(paragraph: str) -> list[str]:
    """Each question of a paragraph, after the sentences that lead to it."""
    found, leading = [], []
    for sentence in sentences(paragraph):
        leading.append(sentence)
        if is_question(sentence):
            found.append("\n".join(leading))
            leading = []
    return found


def _ran(cell: twins.Cell, outputs: list) -> list[Piece]:
    """What a code cell shows: its code if it is tagged so, what it prints, reveals and draws."""
    pieces = [Piece("code", cell.text)] if cell.slide == "slide" else []
    pieces += [Piece("claim", id=id) for id in CLAIM.findall(cell.text)]
    pieces += [Piece("quiz")] if QUIZ.search(cell.text) else []
    printed = "".join(output.get("text", "") for output in outputs)
    if not SILENT.search(cell.text):
        shown = UNSHOWN.sub("", printed).strip("\n")
        sizes = SIZES.match(shown) if START.search(cell.text) else None
        pieces += [Piece("sizes", sizes[0])] if sizes else []
        pieces += [Piece("printed", shown)] if shown.strip() and not sizes else []
    pieces += [Piece("reveal", _measured(id, printed), id) for id in REVEAL.findall(cell.text)]
    pieces += [picture for output in outputs for picture in _pictures(output)]
    return pieces


def _measured(id: str, printed: str) -> str:
    """What course.reveal says that it is: "48 times as many"."""
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
    """The picture of an output; a PNG is base64 already, a drawing is text and stands still."""
    data = output.get("data", {})
    return [
        Piece(
            "picture",
            output["metadata"][kind]["alt"],
            image=drawings.address(data[kind])
            if kind == "image/svg+xml"
            else f"data:{kind};base64,{''.join(data[kind].split())}",
        )
        for kind in sorted(data.keys() & {"image/png", "image/svg+xml"})
    ]


def aspect(picture: Piece) -> float:
    """Width over height, from the header of a PNG or the viewBox of a drawing."""
    data = base64.b64decode(picture.image.partition(",")[2])
    box = re.search(rb'viewBox="0 0 ([\d.]+) ([\d.]+)"', data[:1000])
    width, height = map(float, box.groups()) if box else struct.unpack(">II", data[16:24])
    return width / height
