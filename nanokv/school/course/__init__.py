"""The functions that notebooks call: predictions, checked exercises, quizzes, figures, pictures.

    from nanokv import course
    model, tokenizer = course.start("05")
    course.check("05.2", my_function)

`nanokv course build` makes the notebooks; notebooks/AUTHORING.md says how to write one.
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

_FIGURES = ("COLORS", "show", "subplots")  # the other names come from session.py
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

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts mistyped names

    def __getattr__(name: str):
        if name not in __all__:
            raise AttributeError(f"module 'nanokv.school.course' has no attribute {name!r}")
        if name == "drawings":
            return importlib.import_module("nanokv.school.course.drawings")
        home = "figures" if name in _FIGURES else "session"
        return getattr(importlib.import_module(f"nanokv.school.course.{home}"), name)
