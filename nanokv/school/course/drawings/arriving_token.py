"""One token arrives, in four steps: which tensors are computed, and which the cache provides."""

from collections.abc import Sequence

from nanokv.school.course.drawings.canvas import Canvas, Drawing

ALT = (
    "Four columns, one per token; the fourth token arrives. Step 1: q3, k3 and v3 are computed, "
    "for this token only. Step 2: k3 and v3 are appended to the cache, beside k0, k1, k2 and v0, "
    "v1, v2, which are only read. Step 3: q3 is compared with all four keys, which gives four scores; "
    "softmax turns them into four weights. Step 4: the four values are mixed with these weights."
)
LOW = "₀₁₂₃"
LEFT = 92
PITCH = 75
WIDE = 70


def token_arrives(
    tokens: Sequence[str] = ("The", "fox", "asked", "the"), alt: str = ALT
) -> Drawing:
    """Four tokens, of which the last is new. The four steps appear one after the other."""
    canvas = Canvas("arrives", "A token arrives", 448)
    columns = [LEFT + PITCH * i for i in range(4)]
    canvas.text(12, 68, "token", 12)
    for x, token in zip(columns, tokens, strict=True):
        canvas.box(x, 48, WIDE, 30, token, "new" if x == columns[-1] else "plain")
    _compute(canvas, columns)
    _append(canvas, columns)
    _scores(canvas, columns)
    canvas.text(12, 392, "4 mix", 12, bold=True, step=4)
    mix = " + ".join(f"w{low}v{low}" for low in LOW)
    canvas.box(LEFT, 372, 295, 32, f"y₃ = {mix}", "new", step=4)
    canvas.legend(434, ("new", "computed now"), ("cached", "read from the cache"))
    return canvas.drawing(alt)


def _compute(canvas, columns):
    canvas.text(12, 118, "1 compute", 12, bold=True, step=1)
    canvas.box(
        columns[0],
        98,
        columns[3] - columns[0] - 5,
        32,
        "nothing: done when they came",
        dashed=True,
        step=1,
    )
    for i, letter in enumerate("qkv"):
        canvas.box(columns[3] + 24 * i, 98, 22, 32, f"{letter}₃", "new", step=1)


def _append(canvas, columns):
    canvas.text(12, 182, "2 append", 12, bold=True, step=2)
    canvas.text(12, 198, "to cache", 12, step=2)
    canvas.arrow((columns[3] + 47, 130), (columns[3] + 47, 156), step=2)
    for row, letter in enumerate("kv"):
        y = 156 + 38 * row
        for low, x in zip(LOW[:3], columns[:3], strict=True):
            canvas.box(x, y, WIDE, 32, f"{letter}{low}", "cached")
        canvas.box(columns[3], y, WIDE, 32, f"{letter}{LOW[3]}", "new", step=2)


def _scores(canvas, columns):
    canvas.text(12, 264, "3 scores", 12, bold=True, step=3)
    canvas.text(12, 334, "softmax", 12, step=3)
    for i, x in enumerate(columns):
        canvas.box(x, 246, WIDE, 32, f"q₃·k{LOW[i]}", "new", step=3)
        canvas.arrow((x + WIDE / 2, 278), (x + WIDE / 2, 312), step=3)
        canvas.box(x, 312, WIDE, 32, f"w{LOW[i]}", "new", step=3)
        canvas.arrow((x + WIDE / 2, 344), (x + WIDE / 2, 372), step=4)
