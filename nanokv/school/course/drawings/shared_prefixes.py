"""The prefix tree: texts with a common prefix share its pages; a new request computes the rest."""

from nanokv.school.course.drawings.canvas import Canvas, Drawing

ALT = (
    "A tree of cached text. Its root is the system prompt. Two branches leave it: a question "
    "about a fox and a question about a sum; the first continues with two answers. A new request "
    "begins with the system prompt and the question about the fox. These two nodes are read from "
    "the cache. The rest of the request is new, and only this rest is computed."
)


def prefix_tree(alt: str = ALT) -> Drawing:
    """A tree of cached texts, and a request that shares two of its nodes."""
    canvas = Canvas("prefix", "A tree of prefixes", 412)
    canvas.box(110, 46, 180, 40, "system prompt\npages 0, 1", "shared")
    canvas.box(12, 126, 180, 40, "Tell me of the fox.\npage 2", "shared")
    canvas.box(212, 126, 176, 40, "What is 12 + 30?\npage 5", "cached")
    for x in (102, 300):
        canvas.arrow((200, 86), (x, 126))
    leaves = ((12, "It was red.\npage 3", "cached"), (140, "It was old.\npage 4", "cached"))
    for x, words, kind in leaves:
        canvas.box(x, 206, 116, 40, words, kind)
        canvas.arrow((102, 166), (x + 58, 206))
    canvas.text(12, 282, "A new request:", bold=True)
    request = (
        ("system prompt", 110, "shared"),
        ("Tell me of the fox.", 144, "shared"),
        ("Is it tame?", 106, "new"),
    )
    x = 12
    for words, width, kind in request:
        canvas.box(x, 292, width, 34, words, kind, size=12)
        x += width + 8
    canvas.text(12, 348, "The first two are found in the tree.", 12)
    canvas.text(12, 366, "The prefill begins at the first token that differs.", 12)
    canvas.legend(396, ("shared", "found"), ("new", "computed now"), ("cached", "cached, not used"))
    return canvas.drawing(alt)
