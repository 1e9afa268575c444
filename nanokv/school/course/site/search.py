"""What the search of the site finds: each page cut at its headings and names, written as a script.

A script, because a page that was opened from a file may not read other files. It holds rows of address, part, page,
heading and text; assets/search.js looks through them, a megabyte in a few milliseconds.
"""

import json
import re
from html.parser import HTMLParser

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
SKIPPED = ("script", "style", "nav", "svg", "summary")  # nobody looks for what stands in them ...
# ... or under these classes.
HIDDEN = {"output_wrapper", "headerlink", "source", "line", "prompt", "inherited"}


class Sections(HTMLParser):
    """(level, anchor, heading, text) of a page; the members of a module of the API count as headings."""

    def __init__(self):
        super().__init__()
        self.found: list[list] = [[0, "", "", ""]]
        self.heading = False  # inside of one
        # The tag whose end is waited for, and how often it was opened.
        self.skip, self.depth = "", 0

    def handle_starttag(self, tag, attributes):
        values = {name: value or "" for name, value in attributes}
        classes = set(values.get("class", "").split())
        if self.skip:
            self.depth += tag == self.skip
        elif tag in SKIPPED or classes & HIDDEN:
            self.skip, self.depth = tag, 1
        elif tag in HEADINGS and (tag == "h1" or "id" in values):
            self.found.append([int(tag[1]), values.get("id", ""), "", ""])
            self.heading = True
        elif "id" in values and (tag == "section" or "classattr" in classes):
            self.found.append([2 if tag == "section" else 3, values["id"], values["id"], ""])

    def handle_endtag(self, tag):
        if self.skip:
            self.depth -= tag == self.skip
            self.skip = self.skip if self.depth else ""
        elif tag in HEADINGS:
            self.heading = False
        # Words end where lines end.
        if tag not in ("code", "span", "em", "strong", "a", "b", "i", "wbr", "mark"):
            self.handle_data(" ")

    def handle_data(self, data):
        if not self.skip:
            self.found[-1][2 if self.heading else 3] += data


def sections(body: str) -> list[tuple[int, str, str, str]]:
    """The parts of a page, first what stands before any heading."""
    parser = Sections()
    parser.feed(body)
    parser.close()
    return [
        (level, anchor, *(" ".join(text.split()) for text in texts))
        for level, anchor, *texts in parser.found
    ]


def contents(body: str) -> list[tuple[str, str]]:
    """(anchor, heading) of the second level: what a page is about."""
    return [
        (anchor, heading) for level, anchor, heading, _ in sections(body) if level == 2 and anchor
    ]


def index(pages) -> str:
    """The script for all pages."""
    rows = []
    for page in pages:
        for _, anchor, heading, text in sections(page.body):
            if heading or text:
                address = page.path + ("#" + anchor if anchor else "")
                rows.append([address, page.part, page.title, heading or page.title, text])
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f"const INDEX = [\n{lines}\n];\n"


def entries(script: str) -> int:
    """How many rows an index has."""
    return len(re.findall(r"^\[", script, re.MULTILINE))
