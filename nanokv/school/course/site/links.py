"""Checks that every address on every page of a folder has its file and anchor.

Nothing is fetched. A link to another site is allowed and not tried. A style sheet, script, font or
picture from another site is an error. An absolute path is an error too, because the folder has to
work under any address and from a file.
"""

import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ADDRESSES = {
    "href",
    "src",
    "action",
    "poster",
    "data",
    "srcset",
    "formaction",
    "background",
    "xlink:href",
}
# The content of a refresh: "0; url=where".
REFRESH = re.compile(r"""[\s\d.]*[;,\s]\s*(?:url\s*=\s*)?['"]?([^'"]*)""", re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])([^'")\s]+)""")


class Addresses(HTMLParser):
    """Collects a page's anchors, and its addresses as (address, fetched with the page or not)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self.anchors = {"", "top"}
        self.style = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.style = tag == "style"
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name == "style":
                self.handle_style(value or "")
            elif name in ADDRESSES:
                self.found.append((value or "", not (tag == "a" and name.endswith("href"))))
        values = {name: value or "" for name, value in attributes}
        if tag == "meta" and values.get("http-equiv", "").lower() == "refresh":
            self.handle_refresh(values.get("content", ""))

    def handle_endtag(self, tag: str) -> None:
        self.style = False

    def handle_data(self, data: str) -> None:
        if self.style:
            self.handle_style(data)

    def handle_refresh(self, content: str) -> None:
        """Record the page that the browser loads next. Without an address it reloads this page."""
        if (match := REFRESH.match(content)) and match[1]:
            self.found.append((match[1].strip(), True))

    def handle_style(self, text: str) -> None:
        self.found += [(address, True) for address in IN_STYLE.findall(text)]


def problems(folder: Path) -> list[str]:
    """One line for each address that is wrong, with its page and the reason."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    pages = {path.relative_to(folder).as_posix(): path for path in paths}
    read = {
        name: addresses(path)
        for name, path in sorted(pages.items())
        if path.suffix in (".html", ".css", ".svg")
    }
    found = []
    for name, (wanted, _) in read.items():
        for address, fetched in dict.fromkeys(wanted):
            if why := complaint(name, address, fetched, pages, read):
                found.append(f"{name}: {address[:200]}: {why}")
    return found


def pages_of(folder: Path) -> list[Path]:
    """All pages of a folder."""
    return sorted(Path(folder).rglob("*.html"))


def addresses(path: Path) -> tuple[list[tuple[str, bool]], set[str]]:
    """([(address, is it fetched with the page), …], the anchors) of one file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        # An address that begins with # names a part of the page that uses the style sheet.
        return [(address, True) for address in IN_STYLE.findall(text) if address[0] != "#"], set()
    parser = Addresses()
    parser.feed(text)
    parser.close()
    return parser.found, parser.anchors


def complaint(page: str, address: str, fetched: bool, pages: dict, read: dict) -> str:
    """The reason why an address is wrong, or ""."""
    try:
        parts = urlsplit(address)
    except ValueError as error:
        return f"not a valid address: {error}"
    if parts.scheme == "data":
        return "" if fetched else "a link to a data: address"
    if parts.scheme or parts.netloc:
        if fetched:
            return "is on another site"
        if parts.scheme not in ("http", "https", "mailto"):
            return "is not a link with http, https or mailto"
        return ""
    if parts.path.startswith("/"):
        return "an absolute path"
    target = page
    if parts.path:
        target = posixpath.join(posixpath.dirname(page), unquote(parts.path))
        target = posixpath.normpath(target)
    if target not in pages:
        return "there is no such file"
    if parts.fragment and unquote(parts.fragment) not in read.get(target, ((), ()))[1]:
        return f"{target} has no such anchor"
    return ""
