"""Figures in the text: every quoted number is marked, and is the one that a cell recorded.

    <!--fig 05.ratio-->48.1<!--/fig-->       equal to course.figure("05.ratio", …), to the digits that are written
    <!--fig 05.speed x3-->12<!--/fig-->      within a factor of 3: what depends on the machine
    <!--def-->114,688<!--/def-->             exact by definition or by citation; nobody measures it

The marks are comments, so no reader sees them. Numbers in `code` are inputs and need none.
"""

import math
import re

FIGURE = re.compile(r"<!--fig ([\w.-]+)(?: x([\d.]+))?-->(.*?)<!--/fig-->", re.DOTALL)
EXACT = re.compile(r"<!--def-->.*?<!--/def-->", re.DOTALL)
FREE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+|<!--.*?-->|^#.*$", re.DOTALL | re.MULTILINE)
UNITS = (
    r"%|×|x\b|times\b|tokens?\b|token-forwards?\b|forwards?\b|bytes?\b|B\b|[kMGT]i?B\b|KiB\b|"
    r"ms\b|µs\b|s\b|seconds?\b|layers?\b|FLOPs?\b|percent\b"
)
MEASURED = re.compile(rf"(?<![\w.§-])(\d[\d,]*(?:\.\d+)?)\s?(?:{UNITS})", re.MULTILINE)


def figures(text: str) -> list[tuple[str, float | None, str]]:
    """(id, allowed factor or None, what is written) of every marked figure."""
    return [(id, float(x) if x else None, quoted) for id, x, quoted in FIGURE.findall(text)]


def agrees(quoted: str, recorded: float, factor: float | None = None) -> bool:
    """Is the recorded number what is written, to half a unit of its last digit, or within a factor?"""
    clean = quoted.replace(",", "").replace("−", "-").strip()
    found = re.fullmatch(r"(-?\d+(?:\.(\d+))?)(?:e([+-]?\d+))?", clean)
    if not found:
        return False
    number, decimals, exponent = float(clean), len(found[2] or ""), int(found[3] or 0)
    if factor is not None:
        return number * recorded > 0 and max(number / recorded, recorded / number) <= factor
    half = 0.5 * 10.0 ** (exponent - decimals)
    return math.isfinite(recorded) and abs(number - recorded) <= half * (1 + 1e-9)


def unmarked(text: str) -> list[str]:
    """Numbers with a unit that nobody vouches for."""
    bare = FREE.sub(" ", EXACT.sub(" ", FIGURE.sub(" ", text)))
    return [found[0] for found in MEASURED.finditer(bare)]
