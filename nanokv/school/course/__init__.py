"""What the notebooks call: predictions, checked exercises, quizzes, quoted figures, pictures with words.

    from nanokv import course
    model, tokenizer = course.start("05")
    course.check("05.2", my_function)

The notebooks themselves are made by `nanokv course build`; notebooks/AUTHORING.md says how to write one.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers
    from nanokv.school.course import drawings
    from nanokv.school.course.figures import COLORS, show, subplots
    from nanokv.school.course.session import (
        answer,
        case,
        check,
        chosen,
        claim,
        confirm,
        figure,
        mine,
        predict,
        progress,
        quiz,
        reveal,
        sized,
        start,
        whose,
    )

_FIGURES = ("COLORS", "show", "subplots")  # the other names are in session.py
__all__ = [
    "COLORS",
    "answer",
    "case",
    "check",
    "chosen",
    "claim",
    "confirm",
    "drawings",
    "figure",
    "mine",
    "predict",
    "progress",
    "quiz",
    "reveal",
    "show",
    "sized",
    "start",
    "subplots",
    "whose",
]

if not TYPE_CHECKING:  # it would hide a name that is mistyped

    def __getattr__(name: str):
        if name not in __all__:
            raise AttributeError(f"module 'nanokv.school.course' has no attribute {name!r}")
        if name == "drawings":
            return importlib.import_module("nanokv.school.course.drawings")
        home = "figures" if name in _FIGURES else "session"
        return getattr(importlib.import_module(f"nanokv.school.course.{home}"), name)
