"""The course as web pages: every solution executed, its questions live, nothing loaded from elsewhere.

The answers are typed in the page, by the forms of asked.py. A page has its scripts inside, and is
readable without them. Light and dark follow the reader's system. Formulas are Unicode or code, so
no mathematics library is needed.
"""

import html
import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from nanokv.errors import CourseError
from nanokv.school.course import asked, claims, recorded, running, session, twins

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from nanokv.model import Transformer

SCRIPTS = ("judge.js", "asked.js")  # of a page with forms, in this order
# The boxes with coloured code: in notebooks and texts, and in the API.
CODE = (".highlight", ".pdoc-code")
SENTENCE = 60  # characters: a longer cell of a table holds a sentence


def asset(name: str) -> str:
    """A style sheet, a script or the frame of a page, from nanokv/school/course/assets."""
    return (files("nanokv.school.course") / "assets" / name).read_text(encoding="utf-8")


def build(
    folder: Path, out: Path, limit: float = running.TIME_LIMIT, words: Sequence[str] = ()
) -> list[Path]:
    """Execute the solutions that `words` name, or all, and write their pages.

    The contents list every notebook that has a page in `out` afterwards. CourseError names the
    first notebook that fails.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    pages = {}
    model = _model()
    for source in map(twins.read, twins.chosen(folder, words)):
        done = running.run(source.solution(), limit)
        if done.error or done.stderr:
            why = done.error or done.stderr.strip()
            raise CourseError(f"{source.name}: {why}", f"nanokv course run {source.number}")
        pages[source.name] = source.title, page(source, done, model)
    glossary = (Path(folder) / "glossary.md").read_text(encoding="utf-8")
    pages["glossary"] = "Glossary", markdown(glossary)
    pages["claims"] = ("What the articles say", markdown(claims.page()))
    there = [
        s
        for s in map(twins.read, twins.sources(folder))
        if s.name in pages or (out / f"{s.name}.html").exists()
    ]
    pages["index"] = ("nanokv: the course", contents(there))
    (out / "style.css").write_text(asset("book.css") + highlighting(), encoding="utf-8")
    return [write(out / f"{name}.html", title, body) for name, (title, body) in pages.items()]


def page(source: twins.Source, done: running.Run, model: "Transformer | None" = None) -> str:
    """The inside of the page of an executed solution, with its forms and their scripts.

    model: the model of the run, if it is not the bundled one.
    """
    if done.notebook is None:
        raise CourseError(f"{source.name}: {done.error}", f"nanokv course run {source.number}")
    notebook = asked.forms(source, done.notebook, done.measured(), model)
    body = render(recorded.beneath(notebook, recorded.read(source.number)))
    scripts = "".join(map(asset, SCRIPTS))
    return f"{body}\n<script>\n{scripts}</script>\n"


def _model() -> "Transformer | None":
    """The model of NANOKV_MODEL, whose sizes are in some answers; None for the bundled one."""
    name = os.environ.get("NANOKV_MODEL") or "tiny"
    if name == "tiny":
        return None
    from nanokv.loading import load

    return load(session.located(name), dtype="float32", device="cpu")[0]


def file_names(folder: Path, words: Sequence[str] = ()) -> list[str]:
    """The names of the files that `build` writes."""
    pages = [path.stem for path in twins.chosen(folder, words)] + ["glossary", "claims", "index"]
    return ["style.css", *(f"{name}.html" for name in pages)]


def write(path: Path, title: str, body: str) -> Path:
    """Write one page, with links to notebooks and texts turned into links to their pages."""
    body = re.sub(r'href="(\w[\w./-]*)\.(?:ipynb|md)(#[^"]*)?"', r'href="\1.html\2"', body)
    text = asset("book.html").format(title=html.escape(title), body=anchored(body))
    path.write_text(text, encoding="utf-8")
    return path


def anchored(body: str) -> str:
    """The body with an anchor on each heading (name, name-1, …) and without links to itself."""
    seen: Counter = Counter()

    def place(match: re.Match) -> str:
        name = slug(unquote(match[2]))
        anchor = name
        if seen[name]:
            anchor += f"-{seen[name]}"
        seen[name] += 1
        return f'<{match[1]} id="{anchor}"'

    body = re.sub(r'<a class="anchor-link"[^>]*>[^<]*</a>', "", body)
    return re.sub(r'<(h[1-6]) id="([^"]*)"', place, body)


def slug(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w-]", "", html.unescape(heading).lower().replace(" ", "-"))


def render(notebook: "NotebookNode") -> str:
    """An executed notebook as the inside of a page."""
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    loader = DictLoader({"cells.html.j2": asset("cells.html.j2")})
    exporter = HTMLExporter(
        template_name="basic", template_file="cells.html.j2", extra_loaders=[loader]
    )
    return wide(exporter.from_notebook_node(notebook)[0])


def markdown(text: str) -> str:
    """Markdown as HTML. Tables inside lists are read, as on GitHub; nbconvert alone ignores them."""
    from mistune.plugins.table import table_in_list
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    reader = MarkdownWithMath(renderer=IPythonRenderer(escape=False))
    reader.use(table_in_list)
    return wide(reader.render(text))


def wide(text: str) -> str:
    """The text with each table in a box: a narrow screen scrolls the table, and not the page.

    A table with sentences is shown row by row there: each of its cells names its column.
    """
    return re.sub(r"<table>.*?</table>", _boxed, text, flags=re.DOTALL)


def _boxed(match: re.Match) -> str:
    table = match[0]
    heads = _texts("th", table)
    sentences = any(len(text) > SENTENCE for text in _texts("td", table))
    if len(heads) <= 2 or not sentences:
        return f'<div class="scroll" tabindex="0">{table}</div>'
    names = itertools.cycle(html.escape(html.unescape(head)) for head in heads)
    table = re.sub("<td", lambda _: f'<td data-head="{next(names)}"', table)
    return f'<div class="scroll rows" tabindex="0">{table}</div>'


def _texts(tag: str, table: str) -> list[str]:
    """The text of each element with this tag."""
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", table, re.DOTALL)
    return [re.sub("<[^>]*>", "", inside) for inside in found]


def highlighting() -> str:
    """The colours of code, light and dark. The system's setting decides, or the choice on the site."""
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="xcode").get_style_defs(list(CODE))
    dark = HtmlFormatter(style="github-dark")
    system = dark.get_style_defs([f":root:not([data-theme=light]) {box}" for box in CODE])
    chosen = dark.get_style_defs([f":root[data-theme=dark] {box}" for box in CODE])
    return (
        f"{light}\n@media (prefers-color-scheme: dark) {{\n{system}\n}}\n{chosen}\n"
        ".highlight, .highlight pre, .pdoc-code "
        "{ background: var(--soft) !important; color: var(--text) }\n"
    )


def contents(sources: list[twins.Source]) -> str:
    items = "\n".join(
        f'<li><a href="{s.name}.html">{html.escape(s.title)}</a></li>' for s in sources
    )
    return (
        "<h1>nanokv: the course</h1>\n<p>How a language model runs, and what a KV cache is, on a "
        "model that runs here. These pages show the solved notebooks. Predictions, numbers and the "
        "quiz are answered in the page; functions are written in the notebooks, which "
        "<code>make notebooks</code> opens.</p>\n"
        f'<ul>\n{items}\n<li><a href="glossary.html">Glossary</a></li>\n'
        '<li><a href="claims.html">What the articles say, and what is true</a></li>\n</ul>'
    )
