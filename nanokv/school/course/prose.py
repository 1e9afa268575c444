"""Figures in a notebook's text: every quoted number is marked and compared with a recorded one.

    <!--fig 05.ratio-->48.1<!--/fig-->       equals course.figure("05.ratio", …) to the digits shown
    <!--fig 04.noise x4-->1e-5<!--/fig-->    within a factor of 4: depends on the order of additions
    <!--fig 09.ratio above-->4<!--/fig-->    a bound (above or below): for times, which vary most
    <!--def-->114,688<!--/def-->             exact by definition or citation; not measured

The marks are comments, which readers do not see. Numbers in `code` are inputs and need no mark.
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
    """(id, tolerance, quoted number) of every marked figure.

    The tolerance is "", "above", "below", or a factor such as "x3".
    """
    return FIGURE.findall(text)


def agrees(quoted: str, recorded: float, allowed: str = "") -> bool:
    """Does a recorded number agree with the quoted one?

    `allowed` is the tolerance of the mark; "" means half a unit of the last digit quoted.
    """
    clean = quoted.replace(",", "").replace("−", "-").strip()
    found = re.fullmatch(r"(-?\d+(?:\.(\d+))?)(?:e([+-]?\d+))?", clean)
    if not found:
        return False
    number = float(clean)
    decimals = len(found[2] or "")
    exponent = int(found[3] or 0)
    if allowed == "above":
        return recorded > number
    if allowed == "below":
        return recorded < number
    if allowed and number * recorded <= 0:
        return False
    if allowed:
        factor = max(number / recorded, recorded / number)
        return factor <= float(allowed.removeprefix("x"))
    half = 0.5 * 10.0 ** (exponent - decimals)
    return math.isfinite(recorded) and abs(number - recorded) <= half * (1 + 1e-9)


def unmarked(text: str) -> list[str]:
    """The numbers with a unit that have no mark."""
    bare = FREE.sub(" ", EXACT.sub(" ", FIGURE.sub(" ", text)))
    return [found[0] for found in MEASURED.finditer(bare)]
