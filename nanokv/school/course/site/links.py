"""Every address on every page of a folder: does it lead somewhere, and does the page ask another machine for anything?

Nothing is fetched. A link to another site is allowed and not tried; a style sheet, script, font or picture from there
is not allowed. A path must not be absolute, so that the folder works under any address and from a file.
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
# 0; url=where.
REFRESH = re.compile(r"""[\s\d.]*[;,\s]\s*(?:url\s*=\s*)?['"]?([^'"]*)""", re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(\s*['"]?|@import\s+['"])([^'")\s]+)""")


class Addresses(HTMLParser):
    """What a page points to, as (address, is it fetched with the page), and the anchors that it has."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, bool]] = []
        self.anchors = {"", "top"}
        self.style = False

    def handle_starttag(self, tag, attributes):
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

    def handle_endtag(self, tag):
        self.style = False

    def handle_data(self, data):
        if self.style:
            self.handle_style(data)

    def handle_refresh(self, content):
        """The page that the browser goes to by itself; without an address it loads the same one again."""
        if (match := REFRESH.match(content)) and match[1]:
            self.found.append((match[1].strip(), True))

    def handle_style(self, text):
        self.found += [(address, True) for address in IN_STYLE.findall(text)]


def problems(folder) -> list[str]:
    """One line for each address that is wrong, with its page and the reason."""
    pages = {
        posixpath.join(*p.relative_to(folder).parts): p
        for p in Path(folder).rglob("*")
        if p.is_file()
    }
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


def pages_of(folder) -> list[Path]:
    """All pages of a folder."""
    return sorted(Path(folder).rglob("*.html"))


def addresses(path: Path) -> tuple[list[tuple[str, bool]], set[str]]:
    """Of one file, with its anchors."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        # Its user's parts.
        return [(address, True) for address in IN_STYLE.findall(text) if address[0] != "#"], set()
    parser = Addresses()
    parser.feed(text)
    parser.close()
    return parser.found, parser.anchors


def complaint(page: str, address: str, fetched: bool, pages: dict, read: dict) -> str:
    """Why an address is wrong, or nothing."""
    try:
        parts = urlsplit(address)
    except ValueError as error:
        return f"no address: {error}"
    if parts.scheme == "data":
        return "" if fetched else "a link to data"
    if parts.scheme or parts.netloc:
        return (
            "asks another machine"
            if fetched or parts.scheme not in ("http", "https", "mailto")
            else ""
        )
    if parts.path.startswith("/"):
        return "an absolute path"
    target = (
        posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(parts.path)))
        if parts.path
        else page
    )
    if target not in pages:
        return "there is no such file"
    if parts.fragment and unquote(parts.fragment) not in read.get(target, ((), ()))[1]:
        return f"there is no such place in {target}"
    return ""
