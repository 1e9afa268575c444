"""Feedback about a learner's own code: the line that raised, and a call that they can try."""

import inspect
import linecache
import os
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any

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
        code = frame.f_code
        text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
        if text and not of_a_library(code.co_filename):
            return f"line {number} of {_place(code)}: {text}"
    return ""


def _place(code: CodeType) -> str:
    """The file, or "your cell", and the function of some code, if it is in one."""
    place = "your cell"  # the code of a cell names a file that does not exist
    if os.path.exists(code.co_filename):
        place = Path(code.co_filename).name
    if not code.co_name.startswith("<"):
        place += f", in {code.co_name}"
    return place


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
    text = f"it stopped with {type(error).__name__}{said}"
    if where:
        text += f"\n    {where}"
    return text


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


def typed(value: Any) -> str:
    """A value as code that makes it again. Floats of a tensor have seven significant digits."""
    if getattr(value, "shape", None) is not None and hasattr(value, "dtype"):
        return _array(value)
    if type(value) in (list, tuple, set) and value:
        return _collection(value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = [f.name for f in fields(value) if f.init and getattr(value, f.name) != f.default]
        inside = ", ".join(f"{name}={typed(getattr(value, name))}" for name in changed)
        return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}({inside})"
    return repr(value)


def _collection(value) -> str:
    """A list, tuple or set as code, a set in a fixed order."""
    items = value
    if type(value) is set:
        items = sorted(value, key=repr)
    inside = ", ".join(map(typed, items))
    if type(value) is list:
        return f"[{inside}]"
    if type(value) is set:
        return f"{{{inside}}}"
    if len(value) == 1:
        return f"({inside},)"
    return f"({inside})"


def _array(value) -> str:
    """A tensor or numpy array as code."""
    module = type(value).__module__.split(".")[0]
    maker = "tensor" if module == "torch" else "array"
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    text = _rounded(value.tolist())
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in ("float32", "int64", "bool"):  # the types that the code gives without dtype
        text += f", dtype={module}.{dtype}"
    return f"{module}.{maker}({text})"


def _rounded(digits) -> str:
    if isinstance(digits, list):
        return "[" + ", ".join(map(_rounded, digits)) + "]"
    if isinstance(digits, float):
        return repr(float(f"{digits:.7g}"))
    return repr(digits)


def shown(value: Any, longest: int = LONGEST) -> str:
    """A value as code. Above `longest` characters, a tensor is described, other values are cut."""
    size = getattr(value, "shape", ())
    if hasattr(value, "numel") and value.numel() > longest:  # too long, so typed() is not called
        return f"a tensor {tuple(size)} of {value.dtype}"
    text = typed(value)
    if len(text) <= longest:
        return text
    if size:
        return f"a tensor {tuple(size)} of {value.dtype}"
    return text[: longest - 1] + "…"


def call(function: Callable, arguments: tuple) -> str:
    """The line that calls a learner's function, with keyword arguments where there are several."""
    name = getattr(function, "__name__", "<?>")
    texts = [shown(argument) for argument in arguments]
    try:
        names = list(inspect.signature(function).bind(*arguments).arguments)
    except (TypeError, ValueError):  # other parameters, or no signature
        names = []
    if len(names) == len(texts) > 1:
        pairs = zip(names, texts, strict=True)
        texts = [f"{parameter}={text}" for parameter, text in pairs]
    if not name.isidentifier():  # a lambda
        name = "your_function"
    return f"{name}({', '.join(texts)})"


def example(function: Callable, arguments: tuple, given: Any, right: Any, within: str) -> str:
    """Three lines: the call to try, its result, and the expected result."""
    lines = {
        "try": call(function, arguments),
        "gives": shown(given),
        "expected": shown(right) + within,
    }
    return "".join(f"\n    {name:<9} {text}" for name, text in lines.items())
