"""Fits text to the terminal: lines break between words or at ` · `, never inside a word.

A table that is wider than the terminal becomes one record per row. In a pipe or a file, help and
tables have 80 columns; status lines, and reports that are searched line by line, have no limit.
Standard library only: help is printed before any import.
"""

import os
import re
import unicodedata

NARROWEST = 20  # columns; a narrower terminal is treated as one of this width


def columns(stream, otherwise: int | None = 80) -> int | None:
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
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in plain
    )


def paragraph(text: str, width: int | None, indent: str = "", rest: str | None = None) -> str:
    """One paragraph with lines of at most `width` columns, unless a word is wider.

    `indent` precedes the first line, `rest` (default: `indent`) each later one.
    """
    if width is None or cells(indent + text) <= width:
        return indent + text
    rest = indent if rest is None else rest
    lines, line = [], indent
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


def joined(parts, width: int | None, indent: str = "", between: str = " · ") -> str:
    """Parts joined by ` · `. A line that is full ends after a part; the separator is left out."""
    lines = []
    for part in parts:
        longer = f"{lines[-1]}{between}{part}" if lines else part
        if lines and (width is None or cells(indent + longer) <= width):
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(paragraph(line, width, indent) for line in lines)


def shell(line: str, width: int | None, indent: str = "  ") -> str:
    """A command line that can be copied: broken between words by a backslash, never in quotes."""
    words = re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", line)
    lines, now = [], indent + words[0]
    for word in words[1:]:
        if width is not None and cells(f"{now} {word}") > width - 2:  # room for the backslash
            lines.append(f"{now} \\")
            now = f"{indent}    {word}"
        else:
            now += f" {word}"
    return "\n".join([*lines, now])


def definitions(
    rows, width: int | None, indent: str = "  ", column: int | None = None
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
            first, rest = head + " " * (column - cells(head)), " " * column
            lines.append(paragraph(text, width, first, rest).rstrip())
        else:
            lines += [
                paragraph(head, width, rest=indent * 2),
                *([paragraph(text, width, indent * 2)] if text else []),
            ]
    return lines


def table(head, rows, width: int | None, left: tuple = (0,)) -> list[str]:
    """The lines of a table. The columns in `left` are aligned left, the others right.

    If it is wider than the terminal, headers break into two lines, then columns move closer. If it
    is still too wide: the first header, then for each row its first cell and `header value` pairs.
    """
    head, rows = list(head), [[str(cell) for cell in row] for row in rows]
    one, two = [(h, "") for h in head], [_halves(h) for h in head]
    for heads, gap in ((one, 2), (two, 2), (two, 1)):
        wide = [max(map(cells, (*heads[i], *(row[i] for row in rows)))) for i in range(len(head))]
        if width is None or sum(wide) + gap * (len(wide) - 1) <= width:
            top = [[first for first, _ in heads], [second for _, second in heads]]
            top = top if any(top[1]) else top[:1]
            if len(top) == 2:  # a header of one line goes on the lower line
                top = [
                    list(pair)
                    for pair in zip(*((a, b) if b else ("", a) for a, b in heads), strict=True)
                ]
            return [_line(row, wide, gap, left) for row in [*top, *rows]]
    lines = [paragraph(head[0], width)] if head[0] else []
    for row in rows:
        pairs = [
            f"{name} {cell}".strip() for name, cell in zip(head[1:], row[1:], strict=True) if cell
        ]
        lines += [paragraph(row[0], width), joined(pairs, width, "    ")]
    return lines


def _halves(text: str) -> tuple[str, str]:
    """A header on two lines, broken so that the longer line is as short as possible."""
    words = text.split(" ")
    breaks = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    return min(breaks, key=lambda pair: max(map(cells, pair)), default=(text, ""))


def _line(row, wide, gap: int, left: tuple) -> str:
    parts = []
    for i, (cell, size) in enumerate(zip(row, wide, strict=True)):
        blank = " " * (size - cells(cell))
        parts.append(cell + blank if i in left else blank + cell)
    return (" " * gap).join(parts).rstrip()
