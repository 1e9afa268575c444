"""What the notebooks call: predictions, checked exercises, quizzes, quoted figures, pictures with words.

    from nanokv import course
    model, tokenizer = course.start("05")
    course.check("05.2", my_function)

The notebooks themselves are made by `nanokv course build`; notebooks/AUTHORING.md says how to write one.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers
    from nanokv.course.figures import COLORS, show, subplots
    from nanokv.course.session import answer, case, check, chosen, claim, figure, predict, quiz, reveal, start

_HOME = {
    "COLORS": "nanokv.course.figures",
    "answer": "nanokv.course.session",
    "case": "nanokv.course.session",
    "check": "nanokv.course.session",
    "chosen": "nanokv.course.session",
    "claim": "nanokv.course.session",
    "figure": "nanokv.course.session",
    "predict": "nanokv.course.session",
    "quiz": "nanokv.course.session",
    "reveal": "nanokv.course.session",
    "show": "nanokv.course.figures",
    "start": "nanokv.course.session",
    "subplots": "nanokv.course.figures",
}
__all__ = [
    "COLORS", "answer", "case", "check", "chosen", "claim", "figure", "predict", "quiz", "reveal", "show", "start",
    "subplots",
]  # fmt: skip

if not TYPE_CHECKING:  # it would hide a name that is mistyped

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module 'nanokv.course' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)
