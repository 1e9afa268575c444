"""How a model is divided between two ranks, and where they have to communicate."""

from nanokv.school.course.drawings.canvas import Canvas, Drawing

ALT = (
    "A table of the parts of a model, top to bottom, each cut in two for two ranks. Embedding: "
    "half of the vocabulary each, then a sum. Queries, keys and values: half of the heads each, "
    "nothing is sent. The cache: the KV heads of each rank, nothing is sent. The output "
    "projection: the columns of its heads, then a sum. Gate and up: half of the hidden width "
    "each, nothing is sent. Down: the columns of its half, then a sum. Head: half of the "
    "vocabulary each, then the logits are gathered. Below it the other method: only the cache is "
    "cut, by positions, in pages that are assigned to the ranks in turn; results are gathered and "
    "merged."
)
PARTS = (  # name, unit of the division, communication
    ("embedding", "words", "sum"),
    ("q, k, v", "heads", ""),
    ("KV cache", "KV heads", ""),
    ("o", "columns", "sum"),
    ("gate, up", "width", ""),
    ("down", "columns", "sum"),
    ("head", "words", "gather"),
)
LEFT = 98
WIDE = 104


def cuts(alt: str = ALT) -> Drawing:
    """Tensor parallelism above, context parallelism below; rank 0 in blue, rank 1 in orange."""
    canvas = Canvas("cuts", "One model, two ranks", 420)
    canvas.text(LEFT + WIDE + 2, 52, "cut by heads and words", 12, "middle", bold=True)
    canvas.text(348, 52, "sent", 12, "middle", bold=True)
    for i, (name, part, sent) in enumerate(PARTS):
        y = 62 + 34 * i
        canvas.text(12, y + 18, name)
        canvas.box(LEFT, y, WIDE, 26, part, "cached", size=12)
        canvas.box(LEFT + WIDE + 4, y, WIDE, 26, part, "new", size=12)
        if sent:
            canvas.box(318, y, 62, 26, sent, "work", size=12)
    canvas.text(LEFT + WIDE + 2, 326, "cut by positions", 12, "middle", bold=True)
    canvas.text(12, 354, "KV cache")
    for page in range(6):
        canvas.box(LEFT + 36 * page, 336, 32, 26, str(page), ("cached", "new")[page % 2], size=12)
    canvas.box(318, 336, 62, 26, "merge", "work", size=12)
    canvas.text(LEFT, 380, "pages of the sequence", 12)
    canvas.legend(406, ("cached", "rank 0"), ("new", "rank 1"))
    return canvas.drawing(alt)
