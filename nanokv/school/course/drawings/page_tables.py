"""Page tables: two sequences in one pool of pages, with a page that both of them use."""

from nanokv.school.course.drawings.canvas import Canvas, Drawing

ALT = (
    "A pool of six pages with 4 slots each. The table of sequence A, 10 tokens, names the pages 1, "
    "3 and 0 in this order; that of sequence B, 7 tokens, names the pages 1 and 4. Page 1 is in "
    "both tables: it holds the positions 0 to 3, which both share. In page 0 two slots "
    "are empty, in page 4 one. The pages 2 and 5 are free."
)
TABLES = {"A": (1, 3, 0), "B": (1, 4)}
TOKENS = {"A": 10, "B": 7}
KINDS = {"A": "cached", "B": "new"}
SLOTS = 4
PITCH = 63
WIDE = 59


def pages(alt: str = ALT) -> Drawing:
    """Sequence A above the pool, sequence B below it."""
    canvas = Canvas("pages", "Two page tables, one pool", 428)
    _table(canvas, "A", 44, 78, 152)
    _table(canvas, "B", 358, 352, 284)
    owners: dict[int, list[str]] = {}
    for name, table in TABLES.items():
        for page in table:
            owners.setdefault(page, []).append(name)
    for page in range(6):
        _page(canvas, page, owners.get(page, []))
    canvas.legend(
        414, ("shared", "of A and B"), ("cached", "of A"), ("new", "of B"), ("plain", "empty")
    )
    return canvas.drawing(alt)


def _place(page):
    return 12 + PITCH * page


def _table(canvas, name, y, start, end):
    """The table of a sequence, and an arrow from each entry to its page.

    On a shared page, the arrows of the two sequences end a little apart.
    """
    canvas.text(12, y + 20, f"{name}: {TOKENS[name]} tokens, pages")
    apart = 8 if name == "A" else -8
    for i, page in enumerate(TABLES[name]):
        x = 176 + 46 * i
        canvas.box(x, y, 40, 30, str(page), "shared" if page == 1 else KINDS[name])
        edge = y + 30 if name == "A" else y
        canvas.arrow((x + 20, edge), (_place(page) + WIDE / 2 + apart, end))


def _page(canvas, page, names):
    """A page of the pool with its slots. A used slot shows the position of its token."""
    x = _place(page)
    canvas.box(x, 152, WIDE, 132)
    canvas.text(x + WIDE / 2, 170, f"page {page}", 12, "middle", bold=True)
    positions = _positions(page, names)
    for slot in range(SLOTS):
        top = 178 + 25 * slot
        if slot >= len(positions):
            canvas.box(x + 8, top, WIDE - 16, 22, size=12, dashed=True)
            continue
        kind = "shared" if len(names) > 1 else KINDS[names[0]]
        canvas.box(x + 8, top, WIDE - 16, 22, str(positions[slot]), kind, size=12)


def _positions(page, names):
    """The positions of the tokens in a page, from the table of the first sequence that uses it."""
    if not names:
        return range(0)
    first = SLOTS * TABLES[names[0]].index(page)
    return range(first, min(first + SLOTS, TOKENS[names[0]]))
