"""Slides from an executed notebook: one HTML file a notebook, which needs no network, no server and no library.

A slide is one sentence and one picture. A prediction is two: the question and nothing else, then what was measured.
They stand in the section that reveals the answer, before anything there gives it away. A picture has the sentence that
the notebook draws from it. Where a section has no picture, a short output takes its place. Claims, exercises and the
quiz follow, without answers, so a deck can be handed out. All other words are in the notes. Code is not shown, unless
its cell is tagged "slide"; a cell tagged "skip" is left out. Without JavaScript, and on paper, the slides stand below
one another.
"""

import base64
import hashlib
import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import book, checking, claims, outline, prose, running, twins
from nanokv.school.course.answers import as_number
from nanokv.school.course.outline import Piece, Section

# Of a slide, all that is read on it. The longest is a question with what leads to it: half a minute read aloud, at some
# 150 words a minute, and letters that the last row reads (slides.css). What is shown by a picture has a sentence only.
WORDS = 80
TASK = 60  # words of an exercise that is shown whole; of a longer one, what it asks
SENTENCE = 35
OUTPUT = 25  # words of an output that takes the place of a picture
LINES = 7  # of it
WIDE = 1.4  # times as wide as high: such a picture stands under its sentence, others beside it
PAGES = 25  # of a deck: an hour, with time to think at each
# How a text counts its predictions; each slide has one.
COUNTED = re.compile(
    r"^(?:Two \w+\. )?(?:First|Second|Third)(?: prediction|, predict a number)?[.:] "
)
AT_THE_TOP = re.compile(r"\bat the top\b")
# So begins the sentence of an exercise that says what is wanted, if it is no question.
WANTED = re.compile(r"(Write|Return|Make|Give|Find|Choose|Compute|Read|Name|Round|Correct|Build) ")
# A sentence that begins so goes on from the one before it.
NEEDS_CONTEXT = re.compile(
    r"(It|Its|They|Their|Both|This|That|These|Those|Each|So|But|And|Then|Here|There) "
)
# What a deck that is too long leaves out first; predictions and what was measured never.
SPARED = ("printed", "task", "claim", "picture", "quiz")


@dataclass
class Slide:
    """One slide: a title as text, what is shown and what is in the notes as HTML.

    kind: title, ask, reveal, picture, printed, code, task, claim or quiz. `id`: of the prediction, exercise or claim.
    """

    title: str
    body: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kind: str = "printed"
    id: str = ""


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
    """The title with the first sentence under it; what else the notebook begins with is in the notes."""
    texts = [piece.text for piece in section.pieces]
    hook = outline.sentences(texts[0])[0] if texts else ""
    return Slide(section.title, [_sentence(hook)], [_markdown(text) for text in texts], "title")


def _fitting(slides: list[Slide]) -> list[Slide]:
    """At most PAGES slides: the last of the kinds that are spared first are left out, and named in the first notes."""
    droppable = [slide for kind in SPARED for slide in reversed(slides) if slide.kind == kind]
    left_out = droppable[: max(0, len(slides) - PAGES)]
    if left_out:
        names = ", ".join(slide.title for slide in slides if slide in left_out)
        slides[0].notes.append(f"<p>Not in this deck: {html.escape(names)}.</p>")
    return [slide for slide in slides if not any(slide is other for other in left_out)]


class _Section:
    """Makes the slides of one section; what is on none of them goes into the notes of the slide before it."""

    def __init__(
        self,
        section: Section,
        asked: dict[str, Piece],
        sizes: Piece | None,
        number: str,
        before: Slide,
    ):
        self.title, self.pieces = section.title, section.pieces
        self.asked, self.sizes, self.number, self.before = asked, sizes, number, before
        self.reveals = {p.id: i for i, p in enumerate(self.pieces) if p.kind == "reveal"}
        self.has_picture = any(piece.kind == "picture" for piece in self.pieces)
        self.taken: set[int] = set()  # the pieces that are on a slide
        self.said: set[str] = set()  # sentences that are on one
        self.evidence = {id: self._evidence(id, at) for id, at in self.reveals.items()}

    def slides(self) -> list[Slide]:
        made: list[Slide] = []
        here = outline.ids(self.pieces, "ask")
        for id in [id for id in self.reveals if id not in here]:
            made += self._prediction(id)
        for i, piece in enumerate(self.pieces):
            if piece.kind == "ask":
                made += self._prediction(piece.id) if piece.id in self.reveals else []
            elif piece.kind != "reveal" and i not in self.taken:
                made += self._of(i, piece, made[-1] if made else self.before)
        return made

    def _of(self, i: int, piece: Piece, before: Slide) -> list[Slide]:
        """The slides of a piece; a text or block has none, and is added to the notes of the one before."""
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
        before.notes.append(
            _output(piece) if piece.kind in ("printed", "sizes") else _markdown(piece.text)
        )
        return []

    def _prediction(self, id: str) -> list[Slide]:
        """The question, and then the figure with what shows it."""
        at, shown = self.reveals[id], self.evidence[id]
        slide = Slide(f"Measured {id}", kind="reveal", id=id)
        slide.body = [f'<p class="measured">{html.escape(self.pieces[at].text)}</p>']
        found = self._telling(at)
        slide.body += [_sentence(found)] if found else []
        if shown is not None:
            slide.body.append(_visible(self.pieces[shown]))
            slide.notes += _words(self.pieces[shown])
        return [of_ask(id, self.asked[id].text, self.sizes), slide]

    def _evidence(self, id: str, at: int) -> int | None:
        """The place of the picture that shows what was measured, or else of what was printed beside it."""
        begin = next((i for i, p in enumerate(self.pieces) if (p.kind, p.id) == ("ask", id)), 0)
        end = next((i for i in self.reveals.values() if i > at), len(self.pieces))
        before, after = range(at, begin, -1), range(at, end)
        for i in [*after, *before]:
            if self.pieces[i].kind == "picture" and i not in self.taken:
                self.taken.add(i)
                return i
        for i in before:
            if self.pieces[i].kind == "printed" and _short(self.pieces[i]):
                self.taken.add(i)
                return i
        return None

    def _shown(self, i: int) -> Slide:
        """A picture, or an output in its place, under the sentence that the notebook draws from it."""
        piece = self.pieces[i]
        words = outline.sentences(piece.text)[0] if piece.kind == "picture" else ""
        sentence = self._drawn_from(i) or self._leading_to(i) or words
        body = [_sentence(sentence), _visible(piece)]
        return Slide(self.title, body, _words(piece), piece.kind)

    def _stands_alone(self, i: int) -> bool:
        """An output that a sentence explains, where no picture does."""
        explained = i + 1 < len(self.pieces) and self.pieces[i + 1].kind == "text"
        return explained and not self.has_picture and _short(self.pieces[i])

    def _printed_by(self, i: int) -> list[str]:
        """What a cell prints that is shown with its code."""
        if i + 1 < len(self.pieces) and self.pieces[i + 1].kind == "printed":
            self.taken.add(i + 1)
            return [_visible(self.pieces[i + 1])]
        return []

    def _drawn_from(self, i: int) -> str:
        """What the text right after a picture says of it."""
        following = next((p for p in self.pieces[i + 1 :] if p.kind != "printed"), None)
        return self._say([following] if following else [], _says_much)

    def _leading_to(self, i: int) -> str:
        """What the text before a picture says."""
        leading = [p for p in reversed(self.pieces[:i]) if p.kind == "text"]
        return self._say(leading[:1], _says_much)

    def _telling(self, at: int) -> str:
        """What the text after a reveal says of the figure that was revealed."""
        end = next((i for i in self.reveals.values() if i > at), len(self.pieces))
        measured = as_number(self.pieces[at].text.split()[0])

        def quotes_it(sentence: str) -> int:
            found = prose.figures(sentence)
            right = measured is not None and any(
                prose.agrees(text, measured, allowed) for _, allowed, text in found
            )
            return 4 * right + _says_much(sentence)

        return self._say(self.pieces[at + 1 : end], quotes_it)

    def _say(self, pieces: Sequence[Piece], worth: Callable[[str], int]) -> str:
        """The short sentence that is worth most, the first of several, of texts that no slide has yet."""
        texts = [outline.sentences(piece.text) for piece in pieces if piece.kind == "text"]
        fitting = [
            sentence
            for text in texts
            if not self.said & set(text)
            for sentence in text
            if len(_plain(sentence)) <= SENTENCE and sentence[-1] not in ":?"
        ]
        best = max(fitting, key=worth, default="")
        self.said.add(best)
        return best


def _says_much(sentence: str) -> int:
    """A sentence with a measured figure says most, one that needs the sentence before it least."""
    return 2 * bool(prose.figures(sentence)) + (not NEEDS_CONTEXT.match(sentence))


def of_ask(id: str, text: str, sizes: Piece | None = None) -> Slide:
    """A prediction: its question, after as much of what leads to it as a slide holds.

    `sizes`: of the model, which are shown where the question speaks of the line at the top.
    """
    *leading, question = [" ".join(line.split()) for line in outline.sentences(text)]
    room = WORDS - len(_plain(question)) - 2
    body = [_output(sizes)] if sizes and AT_THE_TOP.search(text) else []
    while leading and sum(len(_plain(sentence)) for sentence in leading) > room:
        leading.pop(0)
    if leading:
        setting = COUNTED.sub("", " ".join(leading))
        setting = _markdown(setting[:1].upper() + setting[1:])
        body.append(f'<div class="setting">{setting}</div>')
    notes = ["<p>Everyone writes a number down before the next slide.</p>", _markdown(text)]
    return Slide(f"Predict {id}", [*body, _sentence(question)], notes, "ask", id)


def of_task(id: str, text: str) -> Slide:
    """An exercise: all of it where it is short, else what it asks and the sentence before; the notes have all of it."""
    if "\n\n" not in text and len(_plain(text)) <= TASK:
        body = [_sentence(text)]
    else:
        found = outline.sentences(text.split("\n\n")[0])
        asked = [s for s in found if outline.is_question(s) or WANTED.match(s)]
        asked = asked or [s for s in found if s.startswith("Answer ")] or found
        at = found.index(asked[-1])
        shown = " ".join(found[max(0, at - 1) : at + 1])
        shown = shown if len(_plain(shown)) <= TASK else asked[-1]
        body = [_sentence(shown), '<p class="source">The notebook has the whole exercise.</p>']
    return Slide(f"Exercise {id}", body, [_markdown(text)], "task", id)


def of_claim(id: str) -> Slide:
    """What an article says, the verdict, and where the article is."""
    claim, article = claims.CLAIMS[id], claims.ARTICLES[int(id.split(".")[0])]
    title = html.escape(article.title)
    where = f'<a href="{article.address}">{title}</a>' if article.address else title
    body = [
        f"<blockquote>{_markdown(claim.says)}</blockquote>",
        f'<p class="sentence"><strong>{claim.verdict}</strong> {html.escape(claim.truth)}</p>',
        f'<p class="source">{where}</p>',
    ]
    return Slide(f"Claim {id}", body, [], "claim", id)


def of_question(question) -> Slide:
    """A quiz question with its options, and not with its answer."""
    items = "".join(f"<li>{html.escape(text)}</li>" for text, _ in question.options.values())
    body = [_sentence(question.text), f'<ol type="a">{items}</ol>']
    return Slide(f"Quiz {question.id}", body, [], "quiz", question.id)


def _sentence(text: str) -> str:
    return f'<div class="sentence">{_markdown(text)}</div>'


def _visible(piece: Piece) -> str:
    """A picture, upright or wide, or an output."""
    if piece.kind != "picture":
        return _output(piece)
    kind = "wide" if outline.aspect(piece) > WIDE else "upright"
    alt = html.escape(piece.text)
    return f'<figure class="{kind}"><img alt="{alt}" src="{piece.image}"></figure>'


def _output(piece: Piece) -> str:
    return f"<pre>{html.escape(piece.text)}</pre>"


def _words(piece: Piece) -> list[str]:
    """A picture's words, for the notes."""
    return [f"<p>{html.escape(piece.text)}</p>"] if piece.kind == "picture" else []


def _short(piece: Piece) -> bool:
    return len(piece.text.splitlines()) <= LINES and len(piece.text.split()) <= OUTPUT


def _plain(text: str) -> list[str]:
    """The words of Markdown that a reader sees."""
    return html.unescape(re.sub(r"<[^>]*>", "", _markdown(text))).split()


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
    return (
        f'<section class="{slide.kind}" {label}><{level}>{title}</{level}>'
        f'<div class="shown">{"".join(slide.body)}</div>{notes}</section>'
    )
