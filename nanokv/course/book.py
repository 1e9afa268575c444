"""The course as web pages: every solution executed, rendered without scripts, fonts or anything from elsewhere.

Light and dark follow the reader's system. Formulas are Unicode or code, so no mathematics library is needed.
"""

import html
import re
from pathlib import Path

from nanokv.course import claims, running, twins
from nanokv.errors import CourseError

CSS = """
:root { color-scheme: light dark; --text: #1b1b1b; --page: #ffffff; --soft: #f3f4f6; --line: #c9ccd1; --link: #0057a3 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #15171a; --soft: #202429; --line: #454b53; --link: #8cc4ff } }
* { box-sizing: border-box }
body { margin: 0; font: 17px/1.6 system-ui, sans-serif; color: var(--text); background: var(--page) }
main, header, footer { max-width: 52rem; margin: 0 auto; padding: 0 1rem }
header { padding-top: 1rem } footer { padding: 2rem 1rem; border-top: 1px solid var(--line); margin-top: 3rem }
a { color: var(--link) } a.anchor-link { display: none } h1, h2, h3 { line-height: 1.25; margin-top: 2rem }
.skip { position: absolute; left: -999rem } .skip:focus { left: 1rem }
pre { overflow-x: auto; padding: .7rem .9rem; border-radius: .4rem; font: 14px/1.45 ui-monospace, monospace; margin: 0 }
.highlight pre { background: var(--soft); border-left: 3px solid var(--line) }
.output_text pre, .output_subarea pre { white-space: pre-wrap; border-left: 3px solid var(--link) }
.prompt { display: none } .code_cell { margin: 1rem 0 } code { font: .9em ui-monospace, monospace }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: .4rem; margin-top: .5rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9em }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid var(--line) }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
"""
PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="stylesheet" href="style.css"></head>
<body><a class="skip" href="#main">Skip to the text</a>
<header><nav aria-label="Course"><a href="index.html">Contents</a> · <a href="glossary.html">Glossary</a> ·
<a href="claims.html">What the articles say</a></nav></header>
<main id="main">
{body}
</main>
<footer>Every number, plot and answer on this page comes from running the notebook.</footer></body></html>
"""


def build(folder, out, limit: float = running.TIME_LIMIT) -> list[Path]:
    """Execute every solution and write the pages; CourseError names the first notebook that fails."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    sources = [twins.read(path) for path in twins.sources(folder)]
    pages = {}
    for source in sources:
        done = running.run(source.solution(), limit)
        if done.error or done.stderr:
            why = done.error or done.stderr.strip()
            raise CourseError(f"{source.name}: {why}", f"nanokv course run {source.number}")
        pages[source.name] = (source.title, render(done.notebook))
    pages["glossary"] = ("Glossary", markdown((Path(folder) / "glossary.md").read_text(encoding="utf-8")))
    pages["claims"] = ("What the articles say", claims_body())
    pages["index"] = ("nanokv: the course", contents(sources))
    (out / "style.css").write_text(CSS + highlighting(), encoding="utf-8")
    return [write(out / f"{name}.html", title, body) for name, (title, body) in pages.items()]


def file_names(folder) -> list[str]:
    """All that `build` writes."""
    pages = [path.stem for path in twins.sources(folder)] + ["glossary", "claims", "index"]
    return ["style.css", *(f"{name}.html" for name in pages)]


def write(path: Path, title: str, body: str) -> Path:
    """One page, with links to notebooks and texts turned into links to pages."""
    body = re.sub(r'href="(\w[\w./-]*)\.(?:ipynb|md)(#[^"]*)?"', r'href="\1.html\2"', body)
    body = re.sub(r'<(h[1-6]) id="([^"]*)"', lambda m: f'<{m[1]} id="{slug(m[2])}"', body)
    path.write_text(PAGE.format(title=html.escape(title), body=body), encoding="utf-8")
    return path


def slug(heading: str) -> str:
    """The name that a heading has in links: as GitHub makes it."""
    return re.sub(r"[^\w-]", "", html.unescape(heading).lower().replace(" ", "-"))


def render(notebook) -> str:
    """An executed notebook as the inside of a page."""
    from nbconvert import HTMLExporter

    return HTMLExporter(template_name="basic").from_notebook_node(notebook)[0]


def markdown(text: str) -> str:
    from nbconvert.filters import markdown2html

    return markdown2html(text)


def highlighting() -> str:
    """Colours of code, one set for light and one for dark."""
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="xcode").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    plain = ".highlight, .highlight pre { background: var(--soft) !important; color: var(--text) }"
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n{plain}\n"


def contents(sources) -> str:
    items = "\n".join(f'<li><a href="{s.name}.html">{html.escape(s.title)}</a></li>' for s in sources)
    return (
        "<h1>nanokv: the course</h1>\n<p>How a language model runs, and what a KV cache is, on a model that runs here. "
        "These pages show the solved notebooks; to learn, open the others with <code>make notebooks</code>.</p>\n"
        f'<ul>\n{items}\n<li><a href="glossary.html">Glossary</a></li>\n'
        '<li><a href="claims.html">What the articles say, and what is true</a></li>\n</ul>'
    )


def claims_body() -> str:
    """The claim audit as a table an article."""
    parts = ["<h1>What the articles say, and what is true</h1>", "<p>Every claim is executed in a notebook.</p>"]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("No.", "It says", "Verdict", "True is", "Numbers"))
    for number, title in claims.ARTICLES.items():
        rows = [c for c in claims.CLAIMS.values() if c.id.startswith(f"{number}.")]
        cells = "\n".join(_row(c) for c in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{cells}\n</tbody></table>"
        parts.append(f'<h2>{html.escape(title)}</h2>\n<div class="scroll" tabindex="0">{table}</div>')
    return "\n".join(parts)


def _row(claim) -> str:
    texts = (claim.says, claim.verdict, claim.truth, f"{claims.numbers(claim)}notebook {claim.where}")
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
    return f'<tr id="claim-{claim.id}"><th scope="row">{claim.id}</th>{cells}</tr>'
