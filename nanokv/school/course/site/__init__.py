"""The project as one static folder: book, glossary, docs, API, the model live, recordings, texts for teachers, search.

Any web server can serve the folder, under any path, and it can be opened from a file. No page asks another machine for
anything. All is built in a temporary folder, every link is checked, and only a whole site takes its place.
"""

import html
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nanokv.errors import CourseError
from nanokv.school.course import book, running, twins
from nanokv.school.course.site import api, links, recordings, search
from nanokv.school.course.site.pages import Page, files, markdown, write

SCRIPTS = ("site.js", "search.js")
TEXTS = {  # of the repository, beside docs/*.md: file → page
    "CONTRIBUTING.md": "docs/contributing.html",
    "notebooks/AUTHORING.md": "docs/authoring.html",
    "CHANGELOG.md": "docs/changelog.html",
}
NAMED = {  # those that call themselves nanokv and tiny
    "README.md": ("docs/readme.html", "README: install and use nanokv"),
    "weights_loader/checkpoints/tiny/README.md": (
        "docs/model-card.html",
        "The bundled model: its card",
    ),
}
PATHS = (
    '<p><a href="paths.html">Paths and ways in</a> names what to take in an hour, a day or a term, and where the '
    "notebooks run.</p>"
)
SHOWN = 5  # broken links in an error


@dataclass(frozen=True)
class Built:
    """How much there is."""

    pages: int
    entries: int  # of the search
    size: int  # bytes


def build(folder, out, ready=None, limit: float = running.TIME_LIMIT) -> Built:
    """Write the site of a checkout, whose notebooks are in `folder`; `ready` is a book that is already written."""
    root = Path(folder).resolve().parent
    if not (root / "README.md").is_file() or not (root / "docs").is_dir():
        raise CourseError(
            f"{root} has no README.md and docs",
            "run it in the checkout, or pass --folder notebooks",
        )
    with tempfile.TemporaryDirectory(prefix="nanokv-site-") as name:
        made = Path(name, "site")
        made.mkdir()
        if ready is None:
            ready = Path(name, "book")
            book.build(folder, ready, limit)
        texts = [*documents(root), *for_teachers(folder)]
        shown = [recordings.live_page(made), *recordings.pages(made)]
        pages = [*of_book(folder, Path(ready)), *texts, *api.pages(), *shown]
        built = assemble(pages, root, made)
        shutil.copytree(made, out, dirs_exist_ok=True)
    return built


def assemble(pages: list[Page], root: Path, out: Path) -> Built:
    """All pages with the front page, the search and the styles; CourseError names links that lead nowhere."""
    front = markdown("index.html", book.asset("front.md"), "", "")
    pages = [front, *pages]
    script = search.index(pages)
    write([*pages, Page("search.html", "Search", book.asset("search.html"))], root, out)
    (out / "search-index.js").write_text(script, encoding="utf-8")
    (out / "style.css").write_text(
        book.asset("book.css") + book.highlighting() + book.asset("site.css"), "utf-8"
    )
    for name in SCRIPTS:
        (out / name).write_text(book.asset(name), encoding="utf-8")
    if broken := links.problems(out):
        more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        raise CourseError(
            f"{len(broken)} broken links: {'; '.join(broken[:SHOWN])}{more}",
            "mend the page's source",
        )
    return Built(
        len(pages) + 1, search.entries(script), sum(path.stat().st_size for path in files(out))
    )


def outdated(folder, ready) -> list[tuple[Path, Path]]:
    """(page, source) of a book whose notebooks have changed since it was written."""
    pairs = (
        [(Path(ready) / f"{path.stem}.html", path) for path in twins.sources(folder)]
        if ready
        else []
    )
    return [
        (page, path)
        for page, path in pairs
        if page.is_file() and page.stat().st_mtime < path.stat().st_mtime
    ]


def of_book(folder, ready: Path) -> list[Page]:
    """The pages of a book, taken out of their frame."""
    sources = {path.stem: f"notebooks/{path.stem}.ipynb" for path in twins.sources(folder)}
    sources |= {
        "glossary": "notebooks/glossary.md",
        "claims": "notebooks/claims.md",
        "index": "notebooks",
    }
    pages = []
    for name, source in sources.items():
        path = ready / f"{name}.html"
        if not path.is_file():
            raise CourseError(f"{ready} has no {path.name}", f"nanokv course book -o {ready}")
        text = path.read_text(encoding="utf-8")
        title, body = (
            re.search(p, text, re.DOTALL)[1]
            for p in (r"<title>(.*?)</title>", r"<main[^>]*>(.*)</main>")
        )
        part = "Glossary" if name == "glossary" else "Course"
        body += PATHS if name == "index" else ""
        body = recordings.in_place(body)
        pages.append(Page(f"book/{name}.html", html.unescape(title), body, part, source))
    return [*pages, paths(folder)]


def paths(folder) -> Page:
    """What the notebooks' README says to a learner."""
    text = (Path(folder) / "README.md").read_text(encoding="utf-8")
    return markdown("book/paths.html", text, "Course", "notebooks/README.md", "Paths and ways in")


def for_teachers(folder) -> list[Page]:
    """notebooks/teach: its README is the first page, the others stand beside it."""
    found = sorted((Path(folder) / "teach").glob("*.md"))
    names = {path: "index" if path.stem == "README" else path.stem for path in found}
    return [
        markdown(
            f"teach/{name}.html",
            path.read_text(encoding="utf-8"),
            "Teachers",
            f"notebooks/teach/{path.name}",
        )
        for path, name in names.items()
    ]


def documents(root: Path) -> list[Page]:
    """docs/*.md and the other texts, and their list."""
    docs = {
        f"docs/{path.name}": f"docs/{path.stem}.html"
        for path in sorted((root / "docs").glob("*.md"))
    }
    texts = {source: (path, "") for source, path in (docs | TEXTS).items()}
    pages = [
        markdown(path, (root / source).read_text(encoding="utf-8"), "Docs", source, title)
        for source, (path, title) in (NAMED | texts).items()
    ]
    items = "".join(
        f'<li><a href="{Path(page.path).name}">{html.escape(page.title)}</a></li>' for page in pages
    )
    return [
        Page("docs/index.html", "Docs", f"<h1>Docs</h1>\n<ul>{items}</ul>", "Docs", "docs"),
        *pages,
    ]
