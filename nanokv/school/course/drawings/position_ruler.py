"""A ruler of positions: the cached tokens, and a new chunk with a right and two wrong start_pos."""

from nanokv.school.course.drawings.canvas import Canvas, Drawing

ALT = (
    "A ruler of the positions 0 to 9. The cache holds 6 tokens, at the positions 0 to 5. A chunk "
    "of 3 new tokens is fed. Right: start_pos = 6, the number of cached tokens, so the chunk gets "
    "the positions 6, 7 and 8. Wrong: start_pos = 0, so the positions 0, 1 and 2 are given twice. "
    "Wrong: start_pos = 7, so no token has position 6."
)
CACHED = 6
NEW = 3
LAST = 10


def ruler(alt: str = ALT) -> Drawing:
    """Six cached tokens, and a chunk of three at one right and two wrong positions."""
    canvas = Canvas("ruler", "Where does the chunk begin?", 372)
    canvas.text(12, 52, f"The cache holds {CACHED} tokens: positions 0 … {CACHED - 1}")
    for position in range(LAST):
        kind = "cached" if position < CACHED else "plain"
        _cell(canvas, position, 62, kind, dashed=position >= CACHED)
    _row(canvas, 118, "✓", f"start_pos = {CACHED}, the number of cached tokens", CACHED, "new")
    _row(canvas, 196, "✗", "start_pos = 0: positions 0, 1, 2 given twice", 0, "wrong")
    _row(
        canvas,
        274,
        "✗",
        f"start_pos = {CACHED + 1}: position {CACHED} is left out",
        CACHED + 1,
        "wrong",
    )
    _cell(canvas, CACHED, 284, "plain", "?", dashed=True)
    canvas.legend(
        354, ("cached", "cached"), ("new", "the new chunk"), ("wrong", "in a wrong place")
    )
    return canvas.drawing(alt)


def _row(canvas, y, sign, words, start, kind):
    """The chunk at position `start`."""
    canvas.text(12, y, sign, 16, bold=True)
    canvas.text(32, y, words)
    for i in range(NEW):
        _cell(canvas, start + i, y + 10, kind)


def _cell(canvas, position, y, kind, text="", dashed=False):
    canvas.box(12 + 38 * position, y, 35, 32, text or str(position), kind, dashed=dashed)
