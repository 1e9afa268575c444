"""The schematic drawings of the course. `course.show(course.drawings.block())` shows one.

Each function takes the text alternative as an argument and returns a Drawing.
"""

from nanokv.school.course.drawings.arriving_token import token_arrives
from nanokv.school.course.drawings.canvas import Drawing, address
from nanokv.school.course.drawings.cut_weights import cuts
from nanokv.school.course.drawings.guesses import speculation
from nanokv.school.course.drawings.page_tables import pages
from nanokv.school.course.drawings.position_ruler import ruler
from nanokv.school.course.drawings.shared_prefixes import prefix_tree
from nanokv.school.course.drawings.transformer_block import block

ALL = (block, token_arrives, ruler, pages, prefix_tree, speculation, cuts)
__all__ = [
    "ALL",
    "Drawing",
    "address",
    "block",
    "cuts",
    "pages",
    "prefix_tree",
    "ruler",
    "speculation",
    "token_arrives",
]
