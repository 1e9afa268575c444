"""Figures in the text: every quoted number is marked, and is the one that a cell recorded.

    <!--fig 05.ratio-->48.1<!--/fig-->       equal to course.figure("05.ratio", …), to the digits that are written
    <!--fig 04.noise x4-->1e-5<!--/fig-->    within a factor of 4: what depends on the order of additions
    <!--fig 09.ratio above-->4<!--/fig-->    a bound, or below: what a clock says, which no two machines agree on
    <!--def-->114,688<!--/def-->             exact by definition or by citation; nobody measures it

The marks are comments, so no reader sees them. Numbers in `code` are inputs and need none.
"""

import math
import re

FIGURE = re.compile(r"<!--fig ([\w.-]+)(?: (x[\d.]+|above|below))?-->(.*?)<!--/fig-->", re.DOTALL)
EXACT = re.compile(r"<!--def-->.*?<!--/def-->", re.DOTALL)
FREE = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|https?://\S+|<!--.*?-->|^#.*$", re.DOTALL | re.MULTILINE
)
UNITS = (
    r"%|×|x\b|times\b|tokens?\b|token-forwards?\b|forwards?\b|bytes?\b|B\b|[kMGT]i?B\b|KiB\b|"
    r"ms\b|µs\b|s\b|seconds?\b|layers?\b|FLOPs?\b|percent\b"
)
MEASURED = re.compile(rf"(?<![\w.§-])(\d[\d,]*(?:\.\d+)?)\s?(?:{UNITS})", re.MULTILINE)


def figures(text: str) -> list[tuple[str, str, str]]:
    """(id, what is allowed: "", "x3", "above" or "below", what is written) of every marked figure."""
    return FIGURE.findall(text)


def agrees(quoted: str, recorded: float, allowed: str = "") -> bool:
    """Is the recorded number what is written, to half a unit of its last digit, or what the mark allows?"""
    clean = quoted.replace(",", "").replace("−", "-").strip()
    found = re.fullmatch(r"(-?\d+(?:\.(\d+))?)(?:e([+-]?\d+))?", clean)
    if not found:
        return False
    number, decimals, exponent = float(clean), len(found[2] or ""), int(found[3] or 0)
    if allowed == "above":
        return recorded > number
    if allowed == "below":
        return recorded < number
    if allowed:
        return number * recorded > 0 and max(number / recorded, recorded / number) <= float(
            allowed.removeprefix("x")
        )
    half = 0.5 * 10.0 ** (exponent - decimals)
    return math.isfinite(recorded) and abs(number - recorded) <= half * (1 + 1e-9)


def unmarked(text: str) -> list[str]:
    """Numbers with a unit that nobody vouches for."""
    bare = FREE.sub(" ", EXACT.sub(" ", FIGURE.sub(" ", text)))
    return [found[0] for found in MEASURED.finditer(bare)]
