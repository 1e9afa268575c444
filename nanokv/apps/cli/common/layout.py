"""Text that fits the terminal: breaks stand between words or at ` · `, never inside a word.

A table that is wider than the terminal becomes a record per row. Help and tables that go into a pipe or a file are
made for 80 columns; a status line, and a report that is searched line by line, have no limit there. Standard library
only: help is printed before any import.
"""

import os
import re
import unicodedata

NARROWEST = 20  # columns; below that nothing is readable anyway


def columns(stream, otherwise: int | None = 80) -> int | None:
    """Width of the terminal behind a stream: COLUMNS, else what the system says, else `otherwise` (a pipe, a file)."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return max(NARROWEST, int(given))
    try:
        # 0: a terminal that does not say.
        return max(NARROWEST, os.get_terminal_size(stream.fileno()).columns or 80)
    except (AttributeError, OSError, ValueError):
        return otherwise


def cells(text: str) -> int:
    """Columns that a text takes: two for a CJK character or an emoji, none for a combining mark or a colour."""
    plain = re.sub(r"\x1b\[\d+m", "", text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in plain
    )


def paragraph(text: str, width: int | None, indent: str = "", rest: str | None = None) -> str:
    """One paragraph, its lines at most `width` wide unless a word is wider; `rest` indents its later lines."""
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
    """Every line of a text as a paragraph."""
    return "\n".join(paragraph(line, width, rest=rest) for line in text.split("\n"))


def joined(parts, width: int | None, indent: str = "", between: str = " · ") -> str:
    """Parts with ` · ` between them; where a line is full, the next one begins between two parts, without the dot."""
    lines = []
    for part in parts:
        longer = f"{lines[-1]}{between}{part}" if lines else part
        if lines and (width is None or cells(indent + longer) <= width):
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(paragraph(line, width, indent) for line in lines)


def shell(line: str, width: int | None, indent: str = "  ") -> str:
    """A command line that can still be copied: broken between words with a backslash, never inside quotes."""
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
    """(name, text) rows: texts in one column beside the names, or below them where that column would be too narrow."""
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
    """Columns as wide as they must be, those in `left` flush left; headers on two lines where one is too wide.

    Too wide for the terminal all the same: the first header, then per row its first cell and `header value` pairs.
    """
    head, rows = list(head), [[str(cell) for cell in row] for row in rows]
    one, two = [(h, "") for h in head], [_halves(h) for h in head]
    for heads, gap in ((one, 2), (two, 2), (two, 1)):
        wide = [max(map(cells, (*heads[i], *(row[i] for row in rows)))) for i in range(len(head))]
        if width is None or sum(wide) + gap * (len(wide) - 1) <= width:
            top = [[first for first, _ in heads], [second for _, second in heads]]
            top = top if any(top[1]) else top[:1]
            if len(top) == 2:  # a header of one line stands on the lower one
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
    """A header on two lines, broken where the longer one is shortest."""
    words = text.split(" ")
    breaks = [(" ".join(words[:i]), " ".join(words[i:])) for i in range(1, len(words))]
    return min(breaks, key=lambda pair: max(map(cells, pair)), default=(text, ""))


def _line(row, wide, gap: int, left: tuple) -> str:
    parts = []
    for i, (cell, size) in enumerate(zip(row, wide, strict=True)):
        blank = " " * (size - cells(cell))
        parts.append(cell + blank if i in left else blank + cell)
    return (" " * gap).join(parts).rstrip()
