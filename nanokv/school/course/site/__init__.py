"""The project as one static folder: book, glossary, docs, API, live model, recordings, search.

Any web server can serve the folder, under any path, and it can be opened from a file. No page loads
anything from another machine. The site is built in a temporary folder and copied to its place only
after every link has been checked.

mkdocs-material 9.8.2 with mkdocstrings was tried instead. Its search refuses a query that begins
with a hyphen (`--prefill-worker`) and does not know other spellings (`quantised`). `--strict` reads
links of Markdown only, so a frame without its file passes. The theme ends on 2027-05-05.
"""

import html
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
NAMED = {  # texts whose own titles are only "nanokv" and "tiny"
    "README.md": ("docs/readme.html", "README: install and use nanokv"),
    "weights_loader/checkpoints/tiny/README.md": (
        "docs/model-card.html",
        "The bundled model: its card",
    ),
}
PATHS = (
    '<p><a href="paths.html">Paths and ways in</a> names what to take in an hour, a day or a term, '
    "and where the notebooks run.</p>"
)
SHOWN = 5  # broken links in an error


@dataclass(frozen=True)
class Built:
    """The size of a built site."""

    pages: int
    entries: int  # of the search
    size: int  # bytes


def build(
    folder: Path, out: Path, ready: Path | None = None, limit: float = running.TIME_LIMIT
) -> Built:
    """Write the site of the checkout whose notebooks are in `folder`.

    `ready`: the folder of a book that is already written. CourseError if the folder is not
    in a checkout, or if a link of the site leads nowhere.
    """
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
    """Write all pages with the front page, the search and the styles.

    CourseError names the links that lead nowhere.
    """
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
        more = ""
        if len(broken) > SHOWN:
            more = f" and {len(broken) - SHOWN} more"
        raise CourseError(
            f"{len(broken)} broken links: {'; '.join(broken[:SHOWN])}{more}",
            "mend the page's source",
        )
    size = sum(path.stat().st_size for path in files(out))
    return Built(len(pages) + 1, search.entries(script), size)


def outdated(folder: Path, ready: Path | None) -> list[tuple[Path, Path]]:
    """(page, source) of each page of a book that is older than its notebook."""
    if not ready:
        return []
    found = []
    for path in twins.sources(folder):
        page = Path(ready) / f"{path.stem}.html"
        if page.is_file() and page.stat().st_mtime < path.stat().st_mtime:
            found.append((page, path))
    return found


def of_book(folder: Path, ready: Path) -> list[Page]:
    """The pages of a book, without their frames."""
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
        title = html.unescape(_inside("title", text))
        body = _inside("main", text)
        if name == "index":
            body += PATHS
        part = "Glossary" if name == "glossary" else "Course"
        body = recordings.in_place(body)
        pages.append(Page(f"book/{name}.html", title, body, part, source))
    return [*pages, paths(folder)]


def _inside(tag: str, text: str) -> str:
    """The markup between the first <tag> and the last </tag>."""
    start = text.index(">", text.index(f"<{tag}")) + 1
    return text[start : text.rindex(f"</{tag}>")]


def paths(folder: Path) -> Page:
    """The page of the notebooks' README, which is for learners."""
    text = (Path(folder) / "README.md").read_text(encoding="utf-8")
    return markdown("book/paths.html", text, "Course", "notebooks/README.md", "Paths and ways in")


def for_teachers(folder: Path) -> list[Page]:
    """The pages of notebooks/teach; its README is index.html."""
    made = []
    for path in sorted((Path(folder) / "teach").glob("*.md")):
        name = "index" if path.stem == "README" else path.stem
        text = path.read_text(encoding="utf-8")
        source = f"notebooks/teach/{path.name}"
        made.append(markdown(f"teach/{name}.html", text, "Teachers", source))
    return made


def documents(root: Path) -> list[Page]:
    """The pages of docs/*.md and of the other texts, after the list of them."""
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
