"""The course as web pages: every solution executed, its questions live, nothing from elsewhere.

The answers are typed in the page, by the forms of asked.py. A page has its scripts inside, and is
readable without them. Light and dark follow the reader's system. Formulas are Unicode or code, so
no mathematics library is needed.
"""

import html
import itertools
import os
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote

from nanokv.errors import CourseError
from nanokv.school.course import asked, claims, recorded, running, session, twins

SCRIPTS = ("judge.js", "asked.js")  # of a page with forms, in this order
# Boxes in which code is coloured: of notebooks and texts, of the API.
CODE = (".highlight", ".pdoc-code")
SENTENCE = 60  # characters: a cell with more has sentences


def asset(name: str) -> str:
    """A style sheet, a script or the frame of a page, from nanokv/school/course/assets."""
    return (files("nanokv.school.course") / "assets" / name).read_text(encoding="utf-8")


def build(folder, out, limit: float = running.TIME_LIMIT, words=()) -> list[Path]:
    """Execute the solutions that `words` name, or all, and write their pages; CourseError names the first that fails.

    The contents list every notebook whose page is in `out` then.
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
    pages["glossary"] = (
        "Glossary",
        markdown((Path(folder) / "glossary.md").read_text(encoding="utf-8")),
    )
    pages["claims"] = ("What the articles say", markdown(claims.page()))
    there = [
        s
        for s in map(twins.read, twins.sources(folder))
        if s.name in pages or (out / f"{s.name}.html").exists()
    ]
    pages["index"] = ("nanokv: the course", contents(there))
    (out / "style.css").write_text(asset("book.css") + highlighting(), encoding="utf-8")
    return [write(out / f"{name}.html", title, body) for name, (title, body) in pages.items()]


def page(source: twins.Source, done: running.Run, model=None) -> str:
    """The inside of the page of an executed solution, with its forms and their scripts.

    model: the model of the run, if it is not the bundled one.
    """
    notebook = asked.forms(source, done.notebook, done.measured(), model)
    body = render(recorded.beneath(notebook, recorded.read(source.number)))
    scripts = "".join(map(asset, SCRIPTS))
    return f"{body}\n<script>\n{scripts}</script>\n"


def _model():
    """The model of NANOKV_MODEL, whose sizes are in some answers; None for the bundled one."""
    name = os.environ.get("NANOKV_MODEL") or "tiny"
    if name == "tiny":
        return None
    from nanokv.loading import load

    return load(session.located(name), dtype="float32", device="cpu")[0]


def file_names(folder, words=()) -> list[str]:
    """All that `build` writes."""
    pages = [path.stem for path in twins.chosen(folder, words)] + ["glossary", "claims", "index"]
    return ["style.css", *(f"{name}.html" for name in pages)]


def write(path: Path, title: str, body: str) -> Path:
    """One page, with links to notebooks and texts turned into links to pages."""
    body = re.sub(r'href="(\w[\w./-]*)\.(?:ipynb|md)(#[^"]*)?"', r'href="\1.html\2"', body)
    path.write_text(
        asset("book.html").format(title=html.escape(title), body=anchored(body)), encoding="utf-8"
    )
    return path


def anchored(body: str) -> str:
    """Headings with the names that links use for them, the second as name-1, and no links to themselves."""
    seen: Counter = Counter()

    def place(match):
        name = slug(unquote(match[2]))
        seen[name] += 1
        return (
            f'<{match[1]} id="{name}"'
            if seen[name] == 1
            else f'<{match[1]} id="{name}-{seen[name] - 1}"'
        )

    body = re.sub(r'<a class="anchor-link"[^>]*>[^<]*</a>', "", body)
    return re.sub(r'<(h[1-6]) id="([^"]*)"', place, body)


def slug(heading: str) -> str:
    """The name that a heading has in links: as GitHub makes it."""
    return re.sub(r"[^\w-]", "", html.unescape(heading).lower().replace(" ", "-"))


def render(notebook) -> str:
    """An executed notebook as the inside of a page."""
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    loader = DictLoader({"cells.html.j2": asset("cells.html.j2")})
    exporter = HTMLExporter(
        template_name="basic", template_file="cells.html.j2", extra_loaders=[loader]
    )
    return wide(exporter.from_notebook_node(notebook)[0])


def markdown(text: str) -> str:
    from nbconvert.filters import markdown2html

    return wide(markdown2html(text))


def wide(text: str) -> str:
    """Tables in boxes of their own, so that a narrow screen scrolls the table and not the page.

    One with sentences in it is shown there row by row: each cell knows the head of its column.
    """
    return re.sub(r"<table>.*?</table>", _boxed, text, flags=re.DOTALL)


def _boxed(match) -> str:
    table, kind = match[0], "scroll"
    heads = re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)
    cells = re.findall(r"<td\b[^>]*>(.*?)</td>", table, re.DOTALL)
    if len(heads) > 2 and any(len(re.sub("<[^>]*>", "", cell)) > SENTENCE for cell in cells):
        names = itertools.cycle(
            html.escape(html.unescape(re.sub("<[^>]*>", "", head))) for head in heads
        )
        table, kind = (
            re.sub("<td", lambda _: f'<td data-head="{next(names)}"', table),
            "scroll rows",
        )
    return f'<div class="{kind}" tabindex="0">{table}</div>'


def highlighting() -> str:
    """Colours of code, one set for light and one for dark: the system's choice, or the reader's on the site."""
    from pygments.formatters import HtmlFormatter

    light, dark = HtmlFormatter(style="xcode"), HtmlFormatter(style="github-dark")
    system, chosen = (
        dark.get_style_defs([f":root{theme} {box}" for box in CODE])
        for theme in (":not([data-theme=light])", "[data-theme=dark]")
    )
    plain = ".highlight, .highlight pre, .pdoc-code { background: var(--soft) !important; color: var(--text) }"
    dark = f"@media (prefers-color-scheme: dark) {{\n{system}\n}}"
    return "\n".join([light.get_style_defs(list(CODE)), dark, chosen, plain]) + "\n"


def contents(sources) -> str:
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
