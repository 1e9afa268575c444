"""The reference of the Python API: pdoc reads the modules, and the site frames pdoc's pages.

Each module has one page with its docstrings and its source, and each name links to its line there.
The commands are left out, because --help describes them. So are the answers of the exercises.
"""

import builtins
import html
import importlib
import inspect
import posixpath
import re
import warnings
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

from nanokv.school.course import book
from nanokv.school.course.site.pages import Page

ROOT = Path(__file__).resolve().parents[4]
GUESS = re.compile(r'<a href="([^"#]*)#([^"]*)">(.*?)</a>', re.DOTALL)
BUILTINS = {inspect.getdoc(kind) for kind in vars(builtins).values() if isinstance(kind, type)}
LEFT_OUT = re.compile(r"nanokv\.(__main__|apps\.cli|school\.course\.checks)\b")


def modules() -> list[str]:
    """All modules of the two packages; pdoc's own walk skips names outside of `__all__`."""
    names = []
    for package in ("nanokv", "weights_loader"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts).removesuffix(".__init__"))
    return sorted(name for name in names if not LEFT_OUT.match(name))


def pages(names: list[str] | None = None) -> list[Page]:
    """A page for each module, and their list."""
    import pdoc.doc
    import pdoc.render
    import pdoc.render_helpers
    from pygments.formatters import HtmlFormatter

    pdoc.render_helpers.formatter = HtmlFormatter(cssclass="highlight")
    templates = Path(str(files("nanokv.school.course") / "assets"))
    pdoc.render.configure(docformat="markdown", search=False, template_directory=templates)
    # pdoc looks at the bases of a generic class first, and takes its methods for inherited ones.
    pdoc.doc.Class._bases = property(lambda part: part.obj.__mro__)  # type: ignore[assignment, method-assign]
    with warnings.catch_warnings():
        # Some annotations can be resolved by a type checker only.
        warnings.simplefilter("ignore")
        found = {name: pdoc.doc.Module(loaded(name)) for name in names or modules()}
        for module in found.values():
            forget_builtins(module)
        made = [
            page(name, pdoc.render.html_module(module, found), found)
            for name, module in found.items()
        ]
    return [Page("api/index.html", "The Python API", listing(found), "API"), *resolved(made)]


def forget_builtins(part: Any) -> None:
    """Drop inherited docstrings of built-in types: pdoc shows int's for a constant without one."""
    for member in part.members.values():
        if member.docstring in BUILTINS:
            member.docstring = ""
        if member.kind == "class":
            forget_builtins(member)


def loaded(name: str) -> ModuleType:
    """A module, after its lazy public names were imported."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)
    return module


def page(name: str, rendered: str, found: dict) -> Page:
    """The page of a module, from pdoc's page.

    Addresses in docstrings are examples, so they are no links. Paths of this machine are removed.
    """
    _, _, inside = rendered.partition('<main class="pdoc">')
    inside, _, _ = inside.rpartition("</main>")
    inside = re.sub(r'<a href="https?://[^"]*">(.*?)</a>', r"\1", inside)
    inside = inside.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    path = name.replace(".", "/")
    inside = inside.replace("<!-- modules -->", _submodules(name, found))
    # The file or folder to which the docs link.
    source = path
    if not (ROOT / path).is_dir():
        source += ".py"
    body = f'<div class="pdoc">{book.wide(inside)}</div>'
    return Page(f"api/{path}.html", name, body, "API", source)


def _submodules(name: str, found: dict) -> str:
    """Links to the modules of a package; "" for a module without any."""
    here = name.rpartition(".")[2]
    items = ""
    for child in found:
        package, _, last = child.rpartition(".")
        if package == name:
            items += f'<li><a href="{here}/{last}.html">{child}</a></li>'
    return f"<ul>{items}</ul>" if items else ""


def resolved(made: list[Page]) -> list[Page]:
    """The pages without pdoc's wrong guesses: links from a docstring's word to a missing anchor."""
    places = {
        (page.path, name) for page in made for name in re.findall(r' id="([^"]*)"', page.body)
    }

    def real(path: str, match: re.Match) -> str:
        target = path
        if match[1]:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        if (target, match[2]) in places:
            return match[0]
        return match[3]

    return [replace(page, body=GUESS.sub(partial(real, page.path), page.body)) for page in made]


def listing(found: dict) -> str:
    """All modules by name, each with the first sentence of its docstring."""
    rows = []
    for name, module in found.items():
        first = html.escape(re.split(r"(?<=\.)\s|\n\n", module.docstring.strip())[0].rstrip(":."))
        said = re.sub(r"`([^`]*)`", r"<code>\1</code>", first)
        rows.append(f'<dt><a href="{name.replace(".", "/")}.html">{name}</a></dt><dd>{said}</dd>')
    return (
        "<h1>The Python API</h1>\n<p>The names of <code>import nanokv</code> are on the page of "
        '<a href="nanokv.html">nanokv</a>. The other pages are its modules, each with its source.'
        "</p>\n"
        f"<dl>{''.join(rows)}</dl>"
    )
