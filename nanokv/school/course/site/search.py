"""The index of the site's search: each page cut at its headings and names, written as a script.

It is a script, because a page opened from a file may not read other files. It holds rows of
address, part, page, heading and text. assets/search.js scans all of them: a megabyte in a few
milliseconds.
"""

import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
# Text that the index leaves out: of these elements, and of elements with one of these classes.
SKIPPED = ("script", "style", "nav", "svg", "summary")
HIDDEN = {"output_wrapper", "headerlink", "source", "line", "prompt", "inherited"}


class Sections(HTMLParser):
    """(level, anchor, heading, text) of each part of a page; names of an API page are headings."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list] = [[0, "", "", ""]]
        self.heading = False  # inside a heading
        self.skip = ""  # the tag of the element that is being left out
        self.depth = 0  # how many elements with that tag are open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        classes = set(values.get("class", "").split())
        if self.skip:
            self.depth += tag == self.skip
        elif tag in SKIPPED or classes & HIDDEN:
            self.skip = tag
            self.depth = 1
        elif tag in HEADINGS and (tag == "h1" or "id" in values):
            self.found.append([int(tag[1]), values.get("id", ""), "", ""])
            self.heading = True
        elif "id" in values and (tag == "section" or "classattr" in classes):
            level = {"section": 2}.get(tag, 3)
            self.found.append([level, values["id"], values["id"], ""])

    def handle_endtag(self, tag: str) -> None:
        if self.skip:
            self.depth -= tag == self.skip
            if not self.depth:
                self.skip = ""
        elif tag in HEADINGS:
            self.heading = False
        # A tag ends a word, unless it is one of those used within words.
        if tag not in ("code", "span", "em", "strong", "a", "b", "i", "wbr", "mark"):
            self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.found[-1][2 if self.heading else 3] += data


def sections(body: str) -> list[tuple[int, str, str, str]]:
    """(level, anchor, heading, text) of each part of a page, first the text before any heading."""
    parser = Sections()
    parser.feed(body)
    parser.close()
    return [
        (level, anchor, " ".join(heading.split()), " ".join(text.split()))
        for level, anchor, heading, text in parser.found
    ]


def contents(body: str) -> list[tuple[str, str]]:
    """(anchor, heading) of the second-level headings of a page."""
    return [
        (anchor, heading) for level, anchor, heading, _ in sections(body) if level == 2 and anchor
    ]


def index(pages: Iterable[Any]) -> str:
    """The script for all pages (`pages.Page`, which imports this file)."""
    rows = []
    for page in pages:
        for _, anchor, heading, text in sections(page.body):
            if heading or text:
                address = f"{page.path}#{anchor}".rstrip("#")
                rows.append([address, page.part, page.title, heading or page.title, text])
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f"const INDEX = [\n{lines}\n];\n"


def entries(script: str) -> int:
    """How many rows an index has."""
    return len(re.findall(r"^\[", script, re.MULTILINE))
