"""Schematic drawings as SVG, all of one width, with one set of colours and one text style.

A drawing has the width of a phone, so its text is legible there; a wide screen enlarges it. It has
a white background, for light and dark pages. Colours are those of Okabe and Ito 2008, and never the
only carrier of information. An SVG needs no other file, and the same call gives the same bytes.
"""

import base64
import html
import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

SCRIPT = files("nanokv.school.course") / "assets" / "drawing.js"
WIDTH = 400  # units of the viewBox; about the pixels of a phone
SHOWN = 520  # pixels on a wide screen
INK = "#1B1B1B"
LINE = "#454B53"
DASHES = ' stroke-dasharray="4 3"'
FILLS = {  # kind of box → (fill, ink)
    "plain": ("#FFFFFF", INK),
    "work": ("#E8E8E8", INK),  # an operation
    "cached": ("#56B4E9", "#000000"),  # read from the cache
    "new": ("#E69F00", "#000000"),  # computed now
    "shared": ("#009E73", "#000000"),
    "wrong": ("#D55E00", "#000000"),
}


@dataclass(frozen=True)
class Drawing:
    """An SVG with its text alternative, which `course.show` prints below it.

    `steps`: the number of parts that a page reveals one after the other, once the drawing is
    visible; 0: all at once.
    """

    name: str
    alt: str
    svg: str
    steps: int = 0

    def _repr_svg_(self) -> str:
        return self.svg

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """The SVG for Jupyter, and an <img> with alt text for web pages → (data, metadata)."""
        data = {
            "image/svg+xml": self.svg,
            "text/html": self._html(),
            "text/plain": f"<figure: {self.alt}>",
        }
        return data, {"image/svg+xml": {"alt": self.alt}}

    def _html(self) -> str:
        """An <img>; with steps also buttons and a script. Without the script all steps are visible."""
        style = "max-width:100%;height:auto"
        image = f'<img alt="{html.escape(self.alt)}" src="{address(self.svg)}" style="{style}">'
        if not self.steps:
            return image
        script = SCRIPT.read_text("utf-8")
        buttons = '<button type="button">Next step</button> <button type="button">Play</button>'
        return (
            f'<div data-name="{self.name}" data-steps="{self.steps}">{image}'
            f"<p hidden>{buttons}</p><script>{script}</script></div>"
        )


def address(svg: str) -> str:
    """The SVG as a data: URL, so that a page needs no other file."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


class Canvas:
    """Collects the shapes of one drawing.

    `step`: the number of the step, from 1, in which a page reveals a shape; 0: always visible.
    """

    def __init__(self, name: str, title: str, height: int):
        self.name = name
        self.title = title
        self.height = height
        self.parts: list[str] = []
        self.steps = 0
        self.text(12, 26, title, size=16, bold=True)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        kind: str = "plain",
        size: float = 13,
        dashed: bool = False,
        step: int = 0,
    ) -> None:
        """A rectangle with centred text, which may have several lines."""
        fill, ink = FILLS[kind]
        dash = DASHES if dashed else ""
        self._add(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" '
            f'stroke="{LINE}"{dash}/>',
            step,
        )
        if not text:
            return
        lines = text.split("\n")
        top = y + height / 2 - (len(lines) - 1) * size * 0.62 + size * 0.35
        for i, line in enumerate(lines):
            self.text(
                x + width / 2, top + i * size * 1.24, line, size, "middle", ink=ink, step=step
            )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        anchor: str = "start",
        bold: bool = False,
        ink: str = INK,
        step: int = 0,
    ) -> None:
        """One line of text; y is its baseline."""
        weight = ' font-weight="bold"' if bold else ""
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._add(
            f'<text {place} fill="{ink}"{weight}>{html.escape(words, quote=False)}</text>', step
        )

    def arrow(
        self, *points: tuple[float, float], step: int = 0, dashed: bool = False, head: bool = True
    ) -> None:
        """A line through (x, y) points, with an arrowhead at the last one."""
        dash = DASHES if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._add(
            f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"{dash}/>',
            step,
        )
        if head:
            (x0, y0), (x, y) = points[-2:]
            angle = math.atan2(y - y0, x - x0)
            sides = [
                (x - 8 * math.cos(angle + turn), y - 8 * math.sin(angle + turn))
                for turn in (0.4, -0.4)
            ]
            tip = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *sides])
            self._add(f'<polygon points="{tip}" fill="{LINE}"/>', step)

    def legend(self, y: float, *entries: tuple[str, str], x: float = 12) -> None:
        """A legend in one row, of (kind, words): the meaning of the colours."""
        for kind, words in entries:
            self.box(x, y - 11, 14, 14, kind=kind)
            self.text(x + 20, y, words, size=12)
            x += 36 + 7 * len(words)

    def drawing(self, alt: str) -> Drawing:
        """The finished drawing, with `alt` as its description."""
        words = f"<title>{html.escape(self.title)}</title><desc>{html.escape(alt)}</desc>"
        ground = f'<rect width="{WIDTH}" height="{self.height}" fill="#FFFFFF"/>'
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{SHOWN}" height="{SHOWN * self.height // WIDTH}" '
            'font-family="system-ui, Helvetica, Arial, sans-serif">'
            f"{words}{ground}{''.join(self.parts)}</svg>"
        )
        return Drawing(self.name, alt, svg, self.steps)

    def _add(self, shape: str, step: int):
        self.steps = max(self.steps, step)
        if step:
            shape = f'<g class="{self.name}-{step}">{shape}</g>'
        self.parts.append(shape)
