"""The reference of the Python API: pdoc reads the modules, the site frames what it writes.

Each module has one page with its docstrings and its whole source once, and each name leads to its line there. The
commands are left out, --help describes them; so are the answers of the exercises.
"""

import builtins
import html
import importlib
import inspect
import posixpath
import re
import warnings
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from nanokv.school.course import book
from nanokv.school.course.site.pages import Page

ROOT = Path(__file__).resolve().parents[4]
GUESS = re.compile(r'<a href="([^"#]*)#([^"]*)">(.*?)</a>', re.DOTALL)
BUILTINS = {inspect.getdoc(kind) for kind in vars(builtins).values() if isinstance(kind, type)}
LEFT_OUT = re.compile(r"nanokv\.(__main__|apps\.cli|school\.course\.checks)\b")


def modules() -> list[str]:
    """All modules of the two packages; pdoc's own walk leaves out what `__all__` does not name."""
    paths = [
        path
        for package in ("nanokv", "weights_loader")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in paths
    ]
    return sorted(name for name in names if not LEFT_OUT.match(name))


def pages(names=None) -> list[Page]:
    """A page for each module, and their list."""
    import pdoc.doc
    import pdoc.render
    import pdoc.render_helpers
    from pygments.formatters import HtmlFormatter

    pdoc.render_helpers.formatter = HtmlFormatter(cssclass="highlight")
    templates = Path(str(files("nanokv.school.course") / "assets"))
    pdoc.render.configure(docformat="markdown", search=False, template_directory=templates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of annotations that only a type checker can resolve
        found = {name: pdoc.doc.Module(loaded(name)) for name in names or modules()}
        for module in found.values():
            forget_builtins(module)
        made = [
            page(name, pdoc.render.html_module(module, found), found)
            for name, module in found.items()
        ]
    return [Page("api/index.html", "The Python API", listing(found), "API"), *resolved(made)]


def forget_builtins(part) -> None:
    """A member without words of its own has those of its type in pdoc: what Python says about int is no help here."""
    for member in part.members.values():
        if member.docstring in BUILTINS:
            member.docstring = ""
        if member.kind == "class":
            forget_builtins(member)


def loaded(name: str):
    """A module with its lazy names in it."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)
    return module


def page(name: str, rendered: str, found: dict) -> Page:
    """The inside of pdoc's page. Addresses in docstrings are examples, no links; no path of this machine is shown."""
    inside = re.search(r'<main class="pdoc">(.*)</main>', rendered, re.DOTALL)[1]
    inside = re.sub(r'<a href="https?://[^"]*">(.*?)</a>', r"\1", inside)
    inside = inside.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    path = name.replace(".", "/")
    here, below = (
        path.rpartition("/")[2],
        [child for child in found if child.rpartition(".")[0] == name],
    )
    items = [
        f'<li><a href="{here}/{child.rpartition(".")[2]}.html">{child}</a></li>' for child in below
    ]
    inside = inside.replace("<!-- modules -->", f"<ul>{''.join(items)}</ul>" if items else "")
    source = path if (ROOT / path).is_dir() else f"{path}.py"  # what a link in the docs would name
    return Page(
        f"api/{path}.html", name, f'<div class="pdoc">{book.wide(inside)}</div>', "API", source
    )


def resolved(made: list[Page]) -> list[Page]:
    """Without pdoc's guesses: a word in a docstring that happens to name a member which no page shows."""
    places = {
        (page.path, name) for page in made for name in re.findall(r' id="([^"]*)"', page.body)
    }

    def real(match, path):
        target = (
            posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
            if match[1]
            else path
        )
        return match[0] if (target, match[2]) in places else match[3]

    return [
        replace(page, body=GUESS.sub(lambda match, path=page.path: real(match, path), page.body))
        for page in made
    ]


def listing(found: dict) -> str:
    """All modules by name, each with the first sentence of its docstring."""
    rows = []
    for name, module in found.items():
        first = html.escape(re.split(r"(?<=\.)\s|\n\n", module.docstring.strip())[0].rstrip(":."))
        said = re.sub(r"`([^`]*)`", r"<code>\1</code>", first)
        rows.append(f'<dt><a href="{name.replace(".", "/")}.html">{name}</a></dt><dd>{said}</dd>')
    return (
        "<h1>The Python API</h1>\n<p>What <code>import nanokv</code> offers stands on the page of "
        '<a href="nanokv.html">nanokv</a>. The other pages are its modules, each with its source.</p>\n'
        f"<dl>{''.join(rows)}</dl>"
    )
