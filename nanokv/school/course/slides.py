"""Slides from an executed notebook: one HTML file per notebook, without network, server or library.

A slide is one sentence and one picture. A prediction takes two slides: the question alone, then the
measured figure. Both are in the section that reveals the answer, before anything else there could
give it away. The sentence of a picture is the notebook's conclusion from it. In a section without a
picture, a short output takes its place. Claims, exercises and the quiz follow without answers, so a
deck can be handed out. All other text is in the notes. Code is shown only from a cell tagged
"slide". A cell tagged "skip" is left out. Without JavaScript, and on paper, the slides follow one
another down the page.

nbconvert's SlidesExporter, with reveal.js inside the file, was tried and not taken. It would save
45 lines here and add 200 KB of scripts and styles. Its deck is a single page on paper and without
JavaScript, it needs several scripts where our policy admits one, and its cells show up to 158
words. Tags on text cells cannot replace the choice of a sentence: 92 of 95 sentences stand inside a
paragraph, which the tag would cut in two in the student's notebook.
"""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment

from nanokv.errors import CourseError
from nanokv.school.course import book, checking, claims, outline, prose, running, twins
from nanokv.school.course.answers import as_number
from nanokv.school.course.outline import Piece, Section

# Words on a slide. The longest are exercises, and questions with the sentences before them: half a
# minute read aloud, at some 150 words per minute, in letters that can be read from the last row
# (slides.css).
WORDS = 80
SENTENCE = 35  # words of the sentence beside a picture
OUTPUT = 25  # words of an output that takes the place of a picture
LINES = 7  # of such an output
WIDE = 1.4  # width over height: a wider picture goes below its sentence, others go beside it
PAGES = 25  # of a deck: an hour, with time to think at each
# The number of a prediction in a text that has several; a slide has only one.
COUNTED = re.compile(
    r"^(?:Two \w+\. )?(?:First|Second|Third)(?: prediction|, predict a number)?[.:] "
)
AT_THE_TOP = re.compile(r"\bat the top\b")
# The kinds of slides that a deck that is too long leaves out, in this order. Predictions and their
# measurements are always kept.
SPARED = ("printed", "task", "claim", "picture", "quiz")


@dataclass
class Slide:
    """One slide: its title as text, its content and its notes as HTML.

    kind: title, ask, reveal, picture, printed, code, task, claim or quiz.
    id: of the prediction, exercise or claim.
    """

    title: str
    body: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = "printed"
    id: str = ""


def build(sources: list[Path], out: Path, limit: float = running.TIME_LIMIT) -> list[Path]:
    """Execute the solutions and write out/NN_name.html; CourseError names the first that fails."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sources:
        source = twins.read(path)
        done = running.run(source.solution(), limit)
        if done.error or done.notebook is None:
            raise CourseError(f"{source.name}: {done.error}", f"nanokv course run {source.number}")
        written.append(out / f"{source.name}.html")
        written[-1].write_text(page(source.title, deck(source, done.notebook)), encoding="utf-8")
    return written


def deck(source: twins.Source, executed: dict) -> list[Slide]:
    """The slides of a source and its executed solution, at most PAGES."""
    first, *sections = outline.outline(source, executed)
    slides = [_opening(first)]
    pieces = [piece for section in sections for piece in section.pieces]
    asked = {piece.id: piece for piece in pieces if piece.kind == "ask"}
    sizes = next((piece for piece in pieces if piece.kind == "sizes"), None)
    for section in sections:
        slides += _Section(section, asked, sizes, source.number, slides[-1]).slides()
    return _fitting(slides)


def _opening(section: Section) -> Slide:
    """The title and the first sentence; the notes have the whole text before the first section."""
    texts = [piece.text for piece in section.pieces]
    hook = ""
    if texts:
        hook = outline.sentences(texts[0])[0]
    return Slide(section.title, [_sentence(hook)], [_markdown(text) for text in texts], "title")


def _fitting(slides: list[Slide]) -> list[Slide]:
    """At most PAGES slides: surplus ones are left out, in the order of SPARED and from the end.

    The notes of the first slide name them.
    """
    droppable = [slide for kind in SPARED for slide in reversed(slides) if slide.kind == kind]
    left_out = droppable[: max(0, len(slides) - PAGES)]
    if left_out:
        names = ", ".join(slide.title for slide in slides if slide in left_out)
        slides[0].notes.append(f"<p>Not in this deck: {html.escape(names)}.</p>")
    return [slide for slide in slides if not any(slide is other for other in left_out)]


class _Section:
    """Makes the slides of one section; other text goes into the notes of the slide before it."""

    def __init__(
        self,
        section: Section,
        asked: dict[str, Piece],
        sizes: Piece | None,
        number: str,
        before: Slide,
    ) -> None:
        self.title = section.title
        self.pieces = section.pieces
        self.asked = asked
        self.sizes = sizes
        self.number = number
        self.before = before
        self.reveals = {p.id: i for i, p in enumerate(self.pieces) if p.kind == "reveal"}
        self.has_picture = any(piece.kind == "picture" for piece in self.pieces)
        self.taken: set[int] = set()  # indices of the pieces that are on a slide
        self.said: set[str] = set()  # the sentences that are on a slide
        self.evidence = {id: self._evidence(id, at) for id, at in self.reveals.items()}

    def slides(self) -> list[Slide]:
        made: list[Slide] = []
        here = outline.ids(self.pieces, "ask")
        for id in [id for id in self.reveals if id not in here]:
            made += self._prediction(id)
        for i, piece in enumerate(self.pieces):
            if piece.kind == "ask" and piece.id in self.reveals:
                made += self._prediction(piece.id)
            if piece.kind in ("ask", "reveal") or i in self.taken:
                continue
            made += self._of(i, piece, [self.before, *made][-1])
        return made

    def _of(self, i: int, piece: Piece, before: Slide) -> list[Slide]:
        """The slides of a piece; a text or block has none and goes into the notes of `before`."""
        if piece.kind == "picture":
            return [self._shown(i)]
        if piece.kind == "printed" and self._stands_alone(i):
            return [self._shown(i)]
        if piece.kind == "claim":
            return [of_claim(piece.id)]
        if piece.kind == "task":
            return [of_task(piece.id, piece.text)]
        if piece.kind == "quiz":
            return [of_question(q) for q in checking.exercises(self.number).QUESTIONS]
        if piece.kind == "code":
            return [Slide(self.title, [_code(piece.text), *self._printed_by(i)], kind="code")]
        if piece.kind in ("printed", "sizes"):
            before.notes.append(_output(piece))
        else:
            before.notes.append(_markdown(piece.text))
        return []

    def _prediction(self, id: str) -> list[Slide]:
        """The slide of the question, and the slide of the measured figure with its evidence."""
        at = self.reveals[id]
        shown = self.evidence[id]
        slide = Slide(f"Measured {id}", kind="reveal", id=id)
        slide.body = [f'<p class="measured">{html.escape(self.pieces[at].text)}</p>']
        found = self._telling(at)
        if found:
            slide.body.append(_sentence(found))
        if shown is not None:
            slide.body.append(_visible(self.pieces[shown]))
            slide.notes += _words(self.pieces[shown])
        return [of_ask(id, self.asked[id].text, self.sizes), slide]

    def _evidence(self, id: str, at: int) -> int | None:
        """The index of the picture of a measurement, or else of the output printed beside it."""
        begin = next((i for i, p in enumerate(self.pieces) if (p.kind, p.id) == ("ask", id)), 0)
        end = next((i for i in self.reveals.values() if i > at), len(self.pieces))
        before = range(at, begin, -1)
        for i in [*range(at, end), *before]:
            if self.pieces[i].kind == "picture" and i not in self.taken:
                self.taken.add(i)
                return i
        for i in before:
            if self.pieces[i].kind == "printed" and _short(self.pieces[i]):
                self.taken.add(i)
                return i
        return None

    def _shown(self, i: int) -> Slide:
        """A picture, or an output in its place, with the notebook's conclusion from it."""
        piece = self.pieces[i]
        following = [p for p in self.pieces[i + 1 :] if p.kind != "printed"]
        leading = [p for p in reversed(self.pieces[:i]) if p.kind == "text"]
        sentence = self._say(following[:1]) or self._say(leading[:1])
        if not sentence and piece.kind == "picture":
            sentence = outline.sentences(piece.text)[0]
        body = [_sentence(sentence), _visible(piece)]
        return Slide(self.title, body, _words(piece), piece.kind)

    def _stands_alone(self, i: int) -> bool:
        """Does a sentence explain this output, in a section without a picture?"""
        explained = i + 1 < len(self.pieces) and self.pieces[i + 1].kind == "text"
        return explained and not self.has_picture and _short(self.pieces[i])

    def _printed_by(self, i: int) -> list[str]:
        """The output of a cell whose code is shown."""
        if i + 1 < len(self.pieces) and self.pieces[i + 1].kind == "printed":
            self.taken.add(i + 1)
            return [_visible(self.pieces[i + 1])]
        return []

    def _telling(self, at: int) -> str:
        """The sentence of the text after a reveal: one that quotes the measured figure."""
        end = next((i for i in self.reveals.values() if i > at), len(self.pieces))
        measured = as_number(self.pieces[at].text.split()[0])
        return self._say(self.pieces[at + 1 : end], measured)

    def _say(self, pieces: Sequence[Piece], measured: float | None = None) -> str:
        """A short sentence, from texts of which no sentence is on a slide yet; "" if there is none.

        It is the first that quotes `measured`, or else the first with a figure, or else the first.
        """
        fitting: list[str] = []
        for piece in pieces:
            if piece.kind == "text":
                text = outline.sentences(piece.text)
                if not self.said & set(text):
                    fitting += filter(_is_short_statement, text)
        best = max(fitting, key=lambda sentence: _quotes(sentence, measured), default="")
        self.said.add(best)
        return best


def _is_short_statement(sentence: str) -> bool:
    return len(_plain(sentence)) <= SENTENCE and sentence[-1] not in ":?"


def _quotes(sentence: str, measured: float | None) -> int:
    """2 for a sentence that quotes the measured figure, 1 for one with another figure, else 0."""
    found = prose.figures(sentence)
    if measured is not None:
        if any(prose.agrees(text, measured, allowed) for _, allowed, text in found):
            return 2
    return bool(found)


def of_ask(id: str, text: str, sizes: Piece | None = None) -> Slide:
    """The question of a prediction, after as many of the sentences before it as a slide holds.

    sizes: the model's, which are shown if the question mentions the line at the top.
    """
    *leading, question = [" ".join(line.split()) for line in outline.sentences(text)]
    leading = _last(leading, WORDS - len(_plain(question)) - 2)
    body = []
    if sizes and AT_THE_TOP.search(text):
        body.append(_output(sizes))
    if leading:
        setting = COUNTED.sub("", " ".join(leading))
        setting = _markdown(setting[:1].upper() + setting[1:])
        body.append(f'<div class="setting">{setting}</div>')
    notes = ["<p>Everyone writes a number down before the next slide.</p>", _markdown(text)]
    return Slide(f"Predict {id}", [*body, _sentence(question)], notes, "ask", id)


def of_task(id: str, text: str) -> Slide:
    """An exercise, whole if a slide holds it, else the last sentences of its first paragraph.

    The notes have the whole exercise.
    """
    title = f"Exercise {id}"
    first, *more = text.split("\n\n")
    room = WORDS - len(title.split())
    if not more and len(_plain(text)) <= room:
        body = [_sentence(text)]
    else:
        source = "The notebook has the whole exercise."
        *leading, last = outline.sentences(first)
        leading = _last(leading, room - len(_plain(last)) - len(source.split()))
        body = [_sentence(" ".join([*leading, last])), f'<p class="source">{source}</p>']
    return Slide(title, body, [_markdown(text)], "task", id)


def _last(sentences: list[str], room: int) -> list[str]:
    """As many of the last sentences as have at most `room` words."""
    while sentences and sum(len(_plain(sentence)) for sentence in sentences) > room:
        sentences = sentences[1:]
    return sentences


def of_claim(id: str) -> Slide:
    """The claim of an article, the verdict, and a link to the article."""
    claim = claims.CLAIMS[id]
    article = claims.SOURCES[int(id.split(".")[0])]
    where = html.escape(article.title)
    if article.address:
        where = f'<a href="{article.address}">{where}</a>'
    body = [
        f"<blockquote>{_markdown(claim.says)}</blockquote>",
        f'<p class="sentence"><strong>{claim.verdict}</strong> {html.escape(claim.truth)}</p>',
        f'<p class="source">{where}</p>',
    ]
    return Slide(f"Claim {id}", body, [], "claim", id)


def of_question(question: checking.Question) -> Slide:
    """A quiz question with its options, without its answer."""
    items = "".join(f"<li>{html.escape(text)}</li>" for text, _ in question.options.values())
    body = [_sentence(question.text), f'<ol type="a">{items}</ol>']
    return Slide(f"Quiz {question.id}", body, [], "quiz", question.id)


def _sentence(text: str) -> str:
    return f'<div class="sentence">{_markdown(text)}</div>'


def _visible(piece: Piece) -> str:
    """A picture, marked as upright or wide, or an output."""
    if piece.kind != "picture":
        return _output(piece)
    kind = "wide" if outline.aspect(piece) > WIDE else "upright"
    alt = html.escape(piece.text)
    return f'<figure class="{kind}"><img alt="{alt}" src="{piece.image}"></figure>'


def _output(piece: Piece) -> str:
    return f"<pre>{html.escape(piece.text)}</pre>"


def _words(piece: Piece) -> list[str]:
    """The description of a picture, for the notes."""
    if piece.kind != "picture":
        return []
    return [f"<p>{html.escape(piece.text)}</p>"]


def _short(piece: Piece) -> bool:
    return len(piece.text.splitlines()) <= LINES and len(piece.text.split()) <= OUTPUT


def _plain(text: str) -> list[str]:
    """The words of Markdown, without its markup."""
    return html.unescape(re.sub(r"<[^>]*>", "", _markdown(text))).split()


def _markdown(text: str) -> str:
    """HTML without the marks of figures; a link to another file of the course becomes text."""
    made = book.markdown(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    return re.sub(r'<a href="(?!https://)[^"]*"[^>]*>(.*?)</a>', r"\1", made, flags=re.DOTALL)


def _code(text: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return highlight(
        text, PythonLexer(), HtmlFormatter(style="xcode", noclasses=True, nobackground=True)
    )


def page(title: str, slides: list[Slide]) -> str:
    """The whole deck as one file."""
    script = book.asset("slides.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = Environment(autoescape=True).from_string(book.asset("slides.html.j2"))
    return template.render(
        title=title, css=book.asset("slides.css"), script=script, hash=digest, slides=slides
    )
