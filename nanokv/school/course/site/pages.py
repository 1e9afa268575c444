"""A page of the site, its frame and its links: everything that the kinds of pages have in common.

A page names the file of the repository that it shows. A link to such a file becomes a link to the
page. A link to a file without a page becomes plain text, because the site has no repository behind
it.
"""

import html
import os
import posixpath
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanokv import __version__
from nanokv.school.course import book
from nanokv.school.course.site.search import contents

PARTS = {  # of the header, each with its first page
    "Live": "live/index.html",
    "Course": "book/index.html",
    "Glossary": "book/glossary.html",
    "Recordings": "traces/index.html",
    "Teachers": "teach/index.html",
    "Docs": "docs/index.html",
    "API": "api/index.html",
}
LINK = re.compile(
    r'<a href="(?P<target>[^"]*)"[^>]*>(?P<text>.*?)</a>|(?<= src=")(?P<picture>[^"]*)', re.DOTALL
)
ELSEWHERE = re.compile(r"[a-z]+:|//|#|$", re.IGNORECASE)
MANY = 4  # headings: a page with at least as many gets a list of them


@dataclass(frozen=True)
class Page:
    """A page: its path in the site, its content, and the file or folder that it shows."""

    path: str  # docs/code.html
    title: str
    body: str
    part: str = ""  # of PARTS
    source: str = ""  # docs/code.md


def markdown(path: str, text: str, part: str, source: str, title: str = "") -> Page:
    """A text of the repository as a page, with the anchors that GitHub gives to its headings.

    title: the text's first heading, if it is not given. The YAML front matter of a model card is
    left out.
    """
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.DOTALL | re.MULTILINE)
    body = book.anchored(book.markdown(text))
    return Page(path, title or _first_heading(body), body, part, source)


def _first_heading(body: str) -> str:
    """The text of the first h1; ValueError if the page has none."""
    heading = re.search(r"<h1[^>]*>(.*?)</h1>", body, re.DOTALL)
    if heading is None:
        raise ValueError(f"no first-level heading in {body[:60]!r}")
    return plain(heading[1])


def plain(markup: str) -> str:
    """The text of some HTML, without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", markup)).strip()


def relative(target: str, page: str) -> str:
    """A path in the site, as an address relative to a page."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def write(pages: list[Page], root: Path, out: Path) -> None:
    """Write all pages in their frame, with their links resolved; copy the repository's pictures."""
    known = {page.path for page in pages}
    known |= {path.relative_to(out).as_posix() for path in files(out)}
    shown = {page.source: page.path for page in pages if page.source}
    folders = {
        posixpath.dirname(file): path for file, path in shown.items() if file.endswith("/README.md")
    }
    places = Places(root, out, known, folders | shown)
    for page in pages:
        path = out / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        body = LINK.sub(partial(places.linked, page), page.body)
        path.write_text(framed(page, body), encoding="utf-8")


@dataclass(frozen=True)
class Places:
    """The files that an address can name: those of the site and those of the repository."""

    root: Path
    out: Path
    known: set[str]  # files of the site
    shown: dict[str, str]  # file or folder of the repository → its page

    def linked(self, page: Page, match: re.Match) -> str:
        """The link or picture address of a match, resolved for a page of the site.

        An address that names no file is kept: links.py reports it.
        """
        picture = match["target"] is None
        address = match["target"] or match["picture"] or ""
        target, _, anchor = html.unescape(address).partition("#")
        if ELSEWHERE.match(address) or joined(page.path, target) in self.known:
            return match[0]
        file = joined(page.source, target)
        if file.startswith(("..", "/")) or not (self.root / file).exists():
            return match[0]
        if picture:
            return relative(self.copied(file), page.path)
        if file in self.shown:
            there = relative(self.shown[file], page.path)
            if anchor:
                there += f"#{anchor}"
            return f'<a href="{html.escape(there)}">{match["text"]}</a>'
        place = f"{html.escape(file)}, in the repository"
        return f'<span class="file" title="{place}">{match["text"]}</span>'

    def copied(self, file: str) -> str:
        """Copy a picture into the site and return its path there.

        A recorded terminal (SVG) loads fonts from the network: the copy has none.
        """
        name = f"files/{file}"
        data = (self.root / file).read_bytes()
        if name.endswith(".svg"):
            data = re.sub(rb"@font-face\s*\{[^}]*\}", b"", data)
        (self.out / name).parent.mkdir(parents=True, exist_ok=True)
        (self.out / name).write_bytes(data)
        return name


def joined(page: str, address: str) -> str:
    """The path that a relative address on a page, or in a file, means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), address))


def framed(page: Page, body: str) -> str:
    """The whole page: a header with the parts, search and theme; a list of headings; the body."""
    root = posixpath.relpath(".", posixpath.dirname(page.path) or ".") + "/"
    current = {page.part: ' aria-current="true"'}
    parts = " ".join(
        f'<a href="{root}{path}"{current.get(name, "")}>{name}</a>' for name, path in PARTS.items()
    )
    title = page.title
    if title != "nanokv":
        title += " · nanokv"
    return book.asset("site.html").format(
        title=html.escape(title),
        root=root,
        parts=parts,
        kind=(page.part or "front").lower(),
        body=body,
        version=__version__,
        contents=_contents(body),
    )


def _contents(body: str) -> str:
    """A folded list of the headings of a page; "" if there are fewer than MANY."""
    headings = contents(body)
    if len(headings) < MANY:
        return ""
    items = "".join(
        f'<li><a href="#{html.escape(id)}">{html.escape(text)}</a></li>' for id, text in headings
    )
    return (
        '<nav class="contents" aria-label="On this page">'
        f"<details><summary>On this page</summary><ul>{items}</ul></details></nav>"
    )


def files(out: Path) -> list[Path]:
    """All files of a folder, in order."""
    return sorted(Path(base, name) for base, _, names in os.walk(out) for name in names)
