"""A transformer block from top to bottom: the operations, and the shapes of the tensors between."""

from nanokv.school.course.drawings.canvas import Canvas, Drawing

ALT = (
    "A block from top to bottom. The hidden state x of shape (B,T,C) goes down along a line at the "
    "left, the residual stream. A normed copy becomes q of shape (B,H,T,D) and k and v of shape "
    "(B,Hk,T,D). RMSNorm and RoPE work on q and k. The cache appends k and v and gives all S of "
    "them back, (B,Hk,S,D). Attention mixes the values, o_proj brings (B,T,C) back, and the result "
    "is added to the line. Then a second normed copy goes through the MLP and is added."
)
COLUMNS = ((84, "q", "H"), (188, "k", "Hk"), (292, "v", "Hk"))  # left edge, letter, heads
WIDE = 100
STREAM = 36


def block(alt: str = ALT) -> Drawing:
    """One block with the tensors and shapes of nanokv/model.py."""
    canvas = Canvas("block", "One transformer block", 574)
    canvas.arrow((STREAM, 56), (STREAM, 540))
    canvas.text(12, 48, "x (B,T,C): the residual stream", bold=True)
    _to_part(canvas, 68, "RMSNorm", "input_layernorm")
    canvas.arrow((134, 96), (134, 122))
    canvas.arrow((134, 108), (342, 108), (342, 122))
    canvas.arrow((238, 108), (238, 122))
    for x, letter, heads in COLUMNS:
        canvas.box(x, 122, WIDE, 28, f"{letter}_proj", "work")
        canvas.text(x + WIDE / 2, 168, f"{letter} (B,{heads},T,D)", 12, "middle")
        if letter != "v":
            canvas.box(x, 178, WIDE, 28, "norm, RoPE", "work")
    for x, top in ((238, 206), (342, 176)):
        canvas.arrow((x, top), (x, 226))
    canvas.box(188, 226, 204, 40, "cache: append k and v,\ngive all of them back", "cached")
    for x, letter in ((238, "k"), (342, "v")):
        canvas.text(x, 284, f"{letter} (B,Hk,S,D)", 12, "middle")
        canvas.arrow((x, 290), (x, 306))
    canvas.arrow((134, 206), (134, 306))
    canvas.box(84, 306, 308, 40, "attention: scores q·k, softmax,\nmix of the v", "work")
    canvas.arrow((134, 346), (134, 370))
    canvas.text(146, 364, "(B,T,H·D)", 12)
    _back(canvas, 370, "o_proj")
    _to_part(canvas, 424, "RMSNorm", "post_attention_layernorm")
    canvas.arrow((134, 452), (134, 476))
    _back(canvas, 476, "MLP")
    canvas.text(12, 558, "x (B,T,C), to the next block", bold=True)
    return canvas.drawing(alt)


def _to_part(canvas, y, text, name):
    """A copy of the residual stream goes to a norm."""
    canvas.arrow((STREAM, y + 14), (84, y + 14))
    canvas.box(84, y, WIDE, 28, text, "work")
    canvas.text(194, y + 19, name, 12)


def _back(canvas, y, text):
    """The result of a part is added to the residual stream."""
    canvas.box(84, y, WIDE, 28, text, "work")
    canvas.text(194, y + 19, "(B,T,C), added to x", 12)
    canvas.arrow((84, y + 14), (STREAM + 10, y + 14))
    canvas.box(STREAM - 10, y + 4, 20, 20, "+", size=16)
