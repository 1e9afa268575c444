"""Slides from an executed notebook: one HTML file a notebook, which needs no network, no server and no library.

A text cell, a heading and a numbered exercise each begin a slide, and a text that is too long for one goes on on the
next. A plot is a slide with its words under it; what a cell prints goes under the text before it. Long words of a plot
and long output go into the notes. Code is not shown, unless its cell is tagged "slide"; a cell tagged "skip" is left
out. Answers are in no slide and in no note, so a deck can be handed out. Without JavaScript, and on paper, the slides
stand below one another.
"""

import base64
import hashlib
import html
import re
from dataclasses import dataclass, field
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import book, checking, drawings, running, twins

WORDS = 80  # of text on a slide; room for some lines of output is left
REST = 25  # words that are not worth a slide of their own
CAPTION = 40  # words under a plot
LINES = 12  # of output
# Said to one learner, with the indented lines on which it goes on.
UNSHOWN = re.compile(
    r"^(?:In words: |\d\d\.\w+: (?:you predicted|it is) |\w+: the reference \().*\n?(?: {4}.*\n?)*",
    re.MULTILINE,
)
# Cells that print a judgement of the solution's answers.
SILENT = re.compile(r"course\.(check|answer|predict)\(")
HEADING = re.compile(
    r"^(?:#{1,3} (?P<heading>.+)|(?=\*\*(?P<exercise>\d\d\.\d+)\*\*))", re.MULTILINE
)
BLOCK = re.compile(r"```.*?```|(?:(?!\n\s*\n).)+", re.DOTALL)


@dataclass
class Slide:
    """One slide: a title as text, what is shown and what is in the notes as HTML."""

    title: str
    body: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build(sources: list[Path], out, limit: float = running.TIME_LIMIT) -> list[Path]:
    """Execute the solutions and write out/NN_name.html; CourseError names the first that fails."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sources:
        source = twins.read(path)
        done = running.run(source.solution(), limit)
        if done.error:
            raise CourseError(f"{source.name}: {done.error}", f"nanokv course run {source.number}")
        written.append(out / f"{source.name}.html")
        written[-1].write_text(page(source.title, deck(source, done.notebook)), encoding="utf-8")
    return written


def deck(source: twins.Source, executed: dict) -> list[Slide]:
    """The slides of a source and its executed solution, cell by cell."""
    slides: list[Slide] = []
    cells = [cell for cell in source.cells if cell.role != "exercise"]
    for cell, done in zip(cells, executed["cells"], strict=True):
        title = slides[-1].title if slides else source.title
        if cell.slide == "skip":
            continue
        if cell.kind == "markdown":
            slides += of_text(cell.text, title, whole=cell.slide == "slide")
        elif "course.quiz(" in cell.text:
            slides += [
                of_question(question) for question in checking.exercises(source.number).QUESTIONS
            ]
        elif cell.slide == "slide":
            slides.append(Slide(title, [_code(cell.text)]))
            _add_outputs(slides, done["outputs"])
        elif cell.role == "both" and not SILENT.search(cell.text):
            _add_outputs(slides, done["outputs"])
    return [slide for i, slide in enumerate(slides) if slide.body or i == 0]


def of_text(text: str, title: str, whole: bool = False) -> list[Slide]:
    """A markdown cell: a slide for what stands before its first heading, and one for each heading and exercise."""
    starts = list(HEADING.finditer(text))
    made = [Slide(title)] if not starts or text[: starts[0].start()].strip() else []
    ends = [match.start() for match in starts] + [len(text)]
    parts = [(slide, text[: ends[0]]) for slide in made]
    for match, end in zip(starts, ends[1:], strict=True):
        name = match["heading"] or f"Exercise {match['exercise']}"
        begin = match.end() + len(f"**{match['exercise']}**") * bool(match["exercise"])
        parts.append((Slide(re.sub(r"[`*]", "", name)), text[begin:end]))
    filled = (
        _filled(slide, part, whole or slide.title.startswith("Exercise ")) for slide, part in parts
    )
    return [slide for slides in filled for slide in slides]


def of_question(question) -> Slide:
    """A quiz question with its options, and not with its answer."""
    items = "".join(f"<li>{html.escape(text)}</li>" for text, _ in question.options.values())
    return Slide(
        f"Quiz {question.id}", [f'<p>{html.escape(question.text)}</p><ol type="a">{items}</ol>']
    )


def sentences(paragraph: str) -> list[str]:
    """A paragraph in sentences; none is cut inside `code`, **emphasis** or a `[link](…)`."""
    found = [""]
    for piece in re.split(r"(?:(?<=[.?!])|(?<=[.?!]\*\*))\s+(?=[A-Z0-9`*<\[])", paragraph.strip()):
        last = found[-1]
        torn = last.count("`") % 2 or last.count("**") % 2 or last.count("[") != last.count("]")
        found[-1:] = [f"{last} {piece}".strip()] if torn or not last else [last, piece]
    return found


def _filled(slide: Slide, text: str, whole: bool) -> list[Slide]:
    """The slide with as much of the text as fits, and further ones of the same title with what follows."""
    pieces, slides, words = [], [slide], 0
    for block in BLOCK.findall(text):
        plain = not re.match(r"\s*([-*+|>#]\s|\d+\. |```|\|)", block)
        pieces += sentences(block) if plain and block.strip() else [block] * bool(block.strip())
    left = sum(len(piece.split()) for piece in pieces)
    for piece in pieces:
        length = len(piece.split())
        if slides[-1].body and words + length > WORDS and left > REST and not whole:
            slides.append(Slide(slide.title))
            words = 0
        slides[-1].body.append(_markdown(piece))
        words, left = words + length, left - length
    return slides


def _markdown(text: str) -> str:
    """HTML without the marks of figures; a link that leads to another file of the course is text."""
    made = book.markdown(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    return re.sub(r'<a href="(?!https://)[^"]*"[^>]*>(.*?)</a>', r"\1", made, flags=re.DOTALL)


def _code(text: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return highlight(
        text, PythonLexer(), HtmlFormatter(style="xcode", noclasses=True, nobackground=True)
    )


def _add_outputs(slides: list[Slide], outputs: list) -> None:
    """Text under the last slide, or into its notes; each picture on a slide of its own."""
    for output in outputs:
        data = output.get("data", {})
        for kind in data.keys() & {"image/png", "image/svg+xml"}:
            alt = html.escape(output["metadata"][kind]["alt"])
            image = f'<img alt="{alt}" src="{_source(kind, data[kind])}">'
            long = len(alt.split()) > CAPTION
            caption = "" if long else f"<figcaption>{alt}</figcaption>"
            notes = [f"<p>{alt}</p>"] if long else []
            slides.append(Slide(slides[-1].title, [f"<figure>{image}{caption}</figure>"], notes))
        lines = UNSHOWN.sub("", output.get("text", "")).splitlines()
        if any(line.strip() for line in lines):
            short = len(lines) <= LINES
            if short and _stands_alone(slides[-1]):
                slides.append(Slide(slides[-1].title))
            (slides[-1].body if short else slides[-1].notes).append(
                f"<pre>{html.escape(chr(10).join(lines))}</pre>"
            )


def _stands_alone(slide: Slide) -> bool:
    """A plot, and a question whose answer is printed next."""
    shown = "".join(slide.body)
    return shown.startswith("<figure>") or ("predict" in shown.lower() and "<pre>" not in shown)


def _source(kind: str, picture: str) -> str:
    """A picture of an output as an address: a PNG is base64 already, a drawing is text."""
    return (
        drawings.address(picture)
        if kind == "image/svg+xml"
        else f"data:{kind};base64,{''.join(picture.split())}"
    )


def page(title: str, slides: list[Slide]) -> str:
    """The whole deck as one file."""
    parts = [_section(slide, i, len(slides)) for i, slide in enumerate(slides)]
    css, script, template = (book.asset(f"slides.{kind}") for kind in ("css", "js", "html"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.format(
        title=html.escape(title), css=css, script=script, hash=digest, slides="\n".join(parts)
    )


def _section(slide: Slide, i: int, of: int) -> str:
    title, level = html.escape(slide.title), "h2" if i else "h1"
    notes = f"<aside>{''.join(slide.notes)}</aside>" if slide.notes else ""
    label = f'tabindex="-1" role="group" aria-roledescription="slide" aria-label="{i + 1} of {of}: {title}"'
    kind = "" if i else ' class="first"'
    return (
        f"<section{kind} {label}><{level}>{title}</{level}>{''.join(slide.body)}{notes}</section>"
    )
