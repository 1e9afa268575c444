"""A page of the site, its frame, and what becomes of links: all that the kinds of pages have in common.

A page says which file of the repository it was made of. A link to such a file becomes a link to the page; a link to a
file that has no page becomes plain text, because a static folder has no repository behind it.
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
MANY = 4  # headings, from which on a page gets a list of them


@dataclass(frozen=True)
class Page:
    """A page: where it lies in the site, what stands in it, and the file or folder of the repository that it shows."""

    path: str  # docs/code.html
    title: str
    body: str
    part: str = ""  # of PARTS
    source: str = ""  # docs/code.md


def markdown(path: str, text: str, part: str, source: str, title: str = "") -> Page:
    """A text of the repository as a page, with the anchors that GitHub gives its headings, and its own title.

    What a model card tells the hub in lines of YAML before its text is left out.
    """
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.DOTALL | re.MULTILINE)
    body = book.anchored(book.markdown(text))
    return Page(
        path,
        title or plain(re.search(r"<h1[^>]*>(.*?)</h1>", body, re.DOTALL)[1]),
        body,
        part,
        source,
    )


def plain(markup: str) -> str:
    """What is read of some HTML."""
    return html.unescape(re.sub(r"<[^>]*>", "", markup)).strip()


def relative(target: str, page: str) -> str:
    """A path in the site as an address on a page."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def write(pages: list[Page], root: Path, out: Path) -> None:
    """All pages, each in the frame and with links that lead somewhere; pictures of the repository are copied."""
    known = {page.path for page in pages} | {
        path.relative_to(out).as_posix() for path in files(out)
    }
    shown = {page.source: page.path for page in pages if page.source}
    folders = {
        posixpath.dirname(file): path for file, path in shown.items() if file.endswith("/README.md")
    }
    places = Places(root, out, known, folders | shown)
    for page in pages:
        path = out / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            framed(page, LINK.sub(partial(places.linked, page), page.body)), encoding="utf-8"
        )


@dataclass(frozen=True)
class Places:
    """What an address can mean: a file of the site, or one of the repository."""

    root: Path
    out: Path
    known: set[str]  # files of the site
    shown: dict[str, str]  # file or folder of the repository → its page

    def linked(self, page: Page, match: re.Match) -> str:
        """A link or the address of a picture, as it stands on the page. What leads nowhere stays, for links.py."""
        picture = match["target"] is None
        address = match["picture"] if picture else match["target"]
        target, _, anchor = html.unescape(address).partition("#")
        if ELSEWHERE.match(address) or joined(page.path, target) in self.known:
            return match[0]
        file = joined(page.source, target)
        if file.startswith(("..", "/")) or not (self.root / file).exists():
            return match[0]
        if picture:
            return relative(self.copied(file), page.path)
        if file in self.shown:
            there = relative(self.shown[file], page.path) + ("#" + anchor if anchor else "")
            return f'<a href="{html.escape(there)}">{match["text"]}</a>'
        return f'<span class="file" title="{html.escape(file)}, in the repository">{match["text"]}</span>'

    def copied(self, file: str) -> str:
        """A picture in the site. A recorded terminal asks for fonts from elsewhere: it does without."""
        name, data = f"files/{file}", (self.root / file).read_bytes()
        (self.out / name).parent.mkdir(parents=True, exist_ok=True)
        data = re.sub(rb"@font-face\s*\{[^}]*\}", b"", data) if name.endswith(".svg") else data
        (self.out / name).write_bytes(data)
        return name


def joined(page: str, address: str) -> str:
    """A path as it is meant on a page or in a file."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), address))


def framed(page: Page, body: str) -> str:
    """The whole page: header with the parts, search and theme, a list of its headings, and the body."""
    root = posixpath.relpath(".", posixpath.dirname(page.path) or ".") + "/"
    current = {page.part: ' aria-current="true"'}
    parts = " ".join(
        f'<a href="{root}{path}"{current.get(name, "")}>{name}</a>' for name, path in PARTS.items()
    )
    headings = contents(body)
    items = "".join(
        f'<li><a href="#{html.escape(id)}">{html.escape(text)}</a></li>' for id, text in headings
    )
    toc = (
        f"<details><summary>On this page</summary><ul>{items}</ul></details>"
        if len(headings) >= MANY
        else ""
    )
    return book.asset("site.html").format(
        title=html.escape(page.title if page.title == "nanokv" else f"{page.title} · nanokv"),
        root=root,
        parts=parts,
        kind=(page.part or "front").lower(),
        body=body,
        version=__version__,
        contents=toc and f'<nav class="contents" aria-label="On this page">{toc}</nav>',
    )


def files(out: Path) -> list[Path]:
    """All files of a folder, in order."""
    return sorted(Path(base, name) for base, _, names in os.walk(out) for name in names)
