"""Fits text to the terminal: lines break between words or at ` · `, never inside a word.

A table that is wider than the terminal becomes one record per row. In a pipe or a file, help and
tables have 80 columns; status lines, and reports that are searched line by line, have no limit.
Standard library only: help is printed before any import.
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO, overload

NARROWEST = 20  # columns; a narrower terminal is treated as one of this width


@overload
def columns(stream: TextIO, otherwise: int = 80) -> int: ...
@overload
def columns(stream: TextIO, otherwise: None) -> int | None: ...
def columns(stream: TextIO, otherwise: int | None = 80) -> int | None:
    """Width of a stream: $COLUMNS, else the terminal's, else `otherwise` (for a pipe or a file)."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return max(NARROWEST, int(given))
    try:
        # Some terminals report 0.
        return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns or 80)
    except (AttributeError, OSError, ValueError):
        return otherwise


def cells(text: str) -> int:
    """Width of a text in columns: CJK and emoji have 2, combining marks and colours 0."""
    plain = re.sub(r"\x1b\[\d+m", "", text)
    return sum(map(_character_cells, plain))


def _character_cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    if unicodedata.east_asian_width(character) in ("W", "F"):
        return 2
    return 1


def paragraph(text: str, width: int | None, indent: str = "", rest: str | None = None) -> str:
    """One paragraph with lines of at most `width` columns, unless a word is wider.

    `indent` precedes the first line, `rest` (default: `indent`) each later one.
    """
    if width is None or cells(indent + text) <= width:
        return indent + text
    if rest is None:
        rest = indent
    lines = []
    line = indent
    for blank, word in re.findall(r"(\s*)(\S+)", text):
        longer = line + blank + word
        if line.strip() and cells(longer) > width:
            lines.append(line.rstrip())
            longer = rest + word
        line = longer
    return "\n".join([*lines, line])


def wrapped(text: str, width: int | None, rest: str = "") -> str:
    """Each line of a text as a paragraph."""
    return "\n".join(paragraph(line, width, rest=rest) for line in text.split("\n"))


def joined(parts: Iterable[str], width: int | None, indent: str = "", between: str = " · ") -> str:
    """Parts joined by ` · `. A line that is full ends after a part; the separator is left out."""
    lines: list[str] = []
    for part in parts:
        if lines:
            longer = f"{lines[-1]}{between}{part}"
            if width is None or cells(indent + longer) <= width:
                lines[-1] = longer
                continue
        lines.append(part)
    return "\n".join(paragraph(line, width, indent) for line in lines)


def shell(line: str, width: int | None, indent: str = "  ") -> str:
    """A command line that can be copied: broken between words by a backslash, never in quotes."""
    words = re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", line)
    lines = []
    line = indent + words[0]
    for word in words[1:]:
        if width is not None and cells(f"{line} {word}") > width - 2:  # room for the backslash
            lines.append(f"{line} \\")
            line = f"{indent}    {word}"
        else:
            line += f" {word}"
    return "\n".join([*lines, line])


def definitions(
    rows: Iterable[tuple[str, str]],
    width: int | None,
    indent: str = "  ",
    column: int | None = None,
) -> list[str]:
    """(name, text) rows: the texts in a column beside the names, or below them if too narrow.

    `column`: where the texts begin (default: 2 columns after the longest name).
    """
    rows = list(rows)
    column = column or max(cells(name) for name, _ in rows) + len(indent) + 2
    lines = []
    for name, text in rows:
        head = f"{indent}{name}"
        if width is None or cells(head) + 1 < column <= max(16, 0.55 * width):
            head += " " * (column - cells(head))
            lines.append(paragraph(text, width, head, " " * column).rstrip())
            continue
        lines.append(paragraph(head, width, rest=indent * 2))
        if text:
            lines.append(paragraph(text, width, indent * 2))
    return lines


def table(
    head: Iterable[str], rows: Iterable[Iterable[object]], width: int | None, left: tuple = (0,)
) -> list[str]:
    """The lines of a table. The columns in `left` are aligned left, the others right.

    If it is wider than the terminal, headers break into two lines, then columns move closer. If it
    is still too wide: the first header, then for each row its first cell and `header value` pairs.
    """
    head = list(head)
    texts = [[str(cell) for cell in row] for row in rows]
    upper, lower = zip(*map(_halves, head), strict=True)
    broken = [upper, lower] if any(upper) else [lower]
    for heads, gap in (([head], 2), (broken, 2), (broken, 1)):
        lines = [*heads, *texts]
        widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
        if width is None or sum(widths) + gap * (len(widths) - 1) <= width:
            return [_line(line, widths, gap, left) for line in lines]
    return _records(head, texts, width)


def _halves(text: str) -> tuple[str, str]:
    """A header on two lines, the longer one as short as possible. One word is on the lower line."""
    words = text.split(" ")
    breaks = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    return min(breaks, key=lambda pair: max(map(cells, pair)), default=("", text))


def _line(row: Sequence[str], widths: Sequence[int], gap: int, left: tuple) -> str:
    parts = []
    for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
        blank = " " * (width - cells(cell))
        if i in left:
            parts.append(cell + blank)
        else:
            parts.append(blank + cell)
    return (" " * gap).join(parts).rstrip()


def _records(head: list[str], rows: list[list[str]], width: int | None) -> list[str]:
    lines = []
    if head[0]:
        lines.append(paragraph(head[0], width))
    for first, *others in rows:
        pairs = zip(head[1:], others, strict=True)
        values = [f"{name} {cell}".strip() for name, cell in pairs if cell]
        lines.append(paragraph(first, width))
        lines.append(joined(values, width, "    "))
    return lines
