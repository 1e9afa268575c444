"""Feedback about a learner's own code: the line that raised, and a call that they can try."""

import inspect
import linecache
import os
import re
import sysconfig
import textwrap
import traceback
from dataclasses import fields, is_dataclass
from pathlib import Path

LONGEST = 1000  # characters of a value; a longer one is described
COLUMNS = 84  # of a printed line: JupyterLab breaks a longer one in the middle of a word
# Lines of code, which a learner may copy, are not wrapped.
CODE = re.compile(r" {4}(?:try|gives|expected|line) ")
LIBRARIES = (
    str(Path(__file__).parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
PACKAGES = ("site-packages", "dist-packages")


def line(error: BaseException) -> str:
    """The learner's line that led to an error: "line 2 of your cell, in half: return n / 0".

    It is the line of the deepest frame that has source text and belongs to no library; "" if there
    is no such frame.
    """
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        text = linecache.getline(file, number, frame.f_globals).strip()
        if text and not of_a_library(file):
            # The code of a cell names a file that does not exist.
            home = Path(file).name if os.path.exists(file) else "your cell"
            return (
                f"line {number} of {home}{'' if name.startswith('<') else f', in {name}'}: {text}"
            )
    return ""


def of_a_library(file: str) -> bool:
    return file.startswith((*LIBRARIES, "<frozen")) or any(
        part in PACKAGES for part in Path(file).parts
    )


def stopped(error: BaseException) -> str:
    """The exception's type, its message, and the learner's line that led to it."""
    try:
        said = f": {error}".rstrip(": ")
    except Exception:  # __str__ may be the learner's code too
        said = ""
    where = line(error)
    # A wrong number of arguments: the call failed before any line of the function ran.
    if not where and isinstance(error, TypeError) and "argument" in said:
        where = "compare what your def or class takes with the text of the exercise"
    return f"it stopped with {type(error).__name__}{said}" + (f"\n    {where}" if where else "")


def wrapped(text: str) -> str:
    """A text wrapped to COLUMNS between words; continuation lines are indented by four columns."""
    return "\n".join(map(_wrapped_line, text.split("\n")))


def _wrapped_line(line: str) -> str:
    if len(line) <= COLUMNS or CODE.match(line):
        return line
    indent = line[: len(line) - len(line.lstrip())] or "    "
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def typed(value) -> str:
    """A value as code that makes it again. Floats of a tensor have seven significant digits."""
    if getattr(value, "shape", None) is not None and hasattr(value, "dtype"):
        return _array(value)
    if isinstance(value, list | tuple | set) and type(value) in (list, tuple, set) and value:
        inside = ", ".join(map(typed, sorted(value, key=repr) if isinstance(value, set) else value))
        left, right = {list: "[]", tuple: ("(", ",)" if len(value) == 1 else ")"), set: "{}"}[
            type(value)
        ]
        return f"{left}{inside}{right}"
    if is_dataclass(value) and not isinstance(value, type):
        changed = [f.name for f in fields(value) if f.init and getattr(value, f.name) != f.default]
        inside = ", ".join(f"{name}={typed(getattr(value, name))}" for name in changed)
        return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}({inside})"
    return repr(value)


def _array(value) -> str:
    """A tensor or numpy array as code."""
    module, kind = type(value).__module__.split(".")[0], str(value.dtype).removeprefix("torch.")
    digits = value.detach().cpu().tolist() if hasattr(value, "detach") else value.tolist()
    kind = "" if kind in ("float32", "int64", "bool") else f", dtype={module}.{kind}"
    return f"{module}.{'tensor' if module == 'torch' else 'array'}({_rounded(digits)}{kind})"


def _rounded(digits) -> str:
    if isinstance(digits, list):
        return "[" + ", ".join(map(_rounded, digits)) + "]"
    return repr(float(f"{digits:.7g}")) if isinstance(digits, float) else repr(digits)


def shown(value, longest: int = LONGEST) -> str:
    """A value as code. Above `longest` characters, a tensor is described, other values are cut."""
    size = getattr(value, "shape", ())
    if hasattr(value, "numel") and value.numel() > longest:  # too long, so typed() is not called
        return f"a tensor {tuple(size)} of {value.dtype}"
    text = typed(value)
    if len(text) <= longest:
        return text
    return f"a tensor {tuple(size)} of {value.dtype}" if size else text[: longest - 1] + "…"


def call(function, arguments: tuple) -> str:
    """The line that calls a learner's function, with keyword arguments where there are several."""
    name = getattr(function, "__name__", "<?>")
    texts = [shown(argument) for argument in arguments]
    try:
        names = list(inspect.signature(function).bind(*arguments).arguments)
    except (TypeError, ValueError):  # other parameters, or no signature
        names = []
    if len(names) == len(texts) > 1:
        texts = [f"{name}={text}" for name, text in zip(names, texts, strict=True)]
    return f"{name if name.isidentifier() else 'your_function'}({', '.join(texts)})"


def example(function, arguments: tuple, given, right, within: str) -> str:
    """Three lines: the call to try, its result, and the expected result."""
    lines = {
        "try": call(function, arguments),
        "gives": shown(given),
        "expected": shown(right) + within,
    }
    return "".join(f"\n    {name:<9} {text}" for name, text in lines.items())
