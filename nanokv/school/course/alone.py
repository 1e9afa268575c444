"""Turns a function or class of a notebook into source text that runs without the notebook.

The text includes the imports, helper functions and plain values that it uses from other cells. A
tensor, the model or an open file cannot be written as source: NotAlone names it.
"""

import ast
import builtins
import inspect
import linecache
import math
import symtable
import sys
from types import FunctionType, ModuleType
from typing import Any

from nanokv.school.course import feedback

# Modules to search for a function whose __module__ does not lead to it.
MODULES = ("torch", "math", "torch.nn.functional", "nanokv")
PLAIN = (int, float, complex, str, bytes, bool, type(None))


class NotAlone(Exception):
    """Why something does not run without its notebook, as the end of a sentence."""


def source(answer: Any) -> tuple[str, str]:
    """(source text that runs alone, the name of `answer` in that text). Raises NotAlone."""
    parts = _Parts()
    name = parts.define(answer)
    imports = "".join(f"{line}\n" for line in sorted(parts.imports))
    blocks = [imports, "".join(parts.constants), *parts.definitions]
    return "\n\n".join(block.rstrip("\n") + "\n" for block in blocks if block), name


class _Parts:
    """The pieces found so far: imports, plain values, and definitions, each after those it uses."""

    def __init__(self):
        self.imports: set[str] = set()
        self.constants: list[str] = []
        self.definitions: list[str] = []
        self._known: dict[str, object] = {}  # name → value, of everything above

    def define(self, value: Any) -> str:
        """Add a learner's function or class, after everything that it uses. Returns its name."""
        name, text, names = _statement(value)
        if self._is_known(name, value):
            return name
        self._known[name] = value
        for used in sorted(_used(text) & names.keys()):
            if _is_builtin(used, names[used]) or self._is_known(used, names[used]):
                continue
            self._take(used, names[used])
        self.definitions.append(text)
        return name

    def _is_known(self, name: str, value) -> bool:
        """Has this value been added? Raises NotAlone if the name belongs to a different value.

        A notebook may use one name for two things in turn; the source text cannot.
        """
        known = self._known.get(name, value)
        if known is not value and not (_is_plain(value) and repr(known) == repr(value)):
            raise NotAlone(
                f"it uses two different things named `{name}`: give one of them another name"
            )
        return name in self._known

    def _take(self, name: str, value) -> None:
        if _is_plain(value):
            self.constants.append(f"{name} = {_written(value)}\n")
        elif line := _import(name, value):
            self.imports.add(line)
        elif isinstance(_of_kernel(value), FunctionType | type):
            own = self.define(value)
            if own != name:
                self.definitions.append(f"{name} = {own}")
        else:
            raise NotAlone(
                f"it uses `{name}` of another cell, which is of type {type(value).__name__}"
            )
        self._known.setdefault(name, value)


def _statement(value) -> tuple[str, str, dict]:
    """(name, text, the notebook's globals) of the top-level statement that made this value.

    Raises NotAlone.
    """
    for function in _functions(value):
        code = function.__code__
        if feedback.of_a_library(code.co_filename):
            raise NotAlone("it is not written in a cell")
        lines = linecache.getlines(code.co_filename)
        for node in ast.parse("".join(lines)).body:
            decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", ())]
            first = min([node.lineno, *decorators])
            last = node.end_lineno or node.lineno
            if first <= code.co_firstlineno <= last and (name := _named(node, value)):
                return name, _text(lines, first, node), function.__globals__
    name = "it"
    if isinstance(value, type):
        name = f"`{value.__name__}`"
    raise NotAlone(
        f"{name} is not made by a `def`, or a `class` with methods, at the left margin of a cell"
    )


def _text(lines: list[str], first: int, node) -> str:
    """All lines of a `def` or `class`; for a lambda, only the assignment and not its whole line."""
    if isinstance(node, ast.Assign):
        return f"{ast.get_source_segment(''.join(lines), node)}\n"
    return "".join(lines[first - 1 : node.end_lineno])


def _of_kernel(value):
    """The Python function inside a Triton kernel; any other value unchanged."""
    if isinstance(getattr(value, "fn", None), FunctionType):
        return value.fn
    return value


def _functions(value) -> list[FunctionType]:
    """The function itself, or the methods of a class: their code objects name the cell."""
    value = _of_kernel(value)
    made = [value]
    if isinstance(value, type):
        made = [  # the functions of properties, class methods and static methods too
            getattr(one, "fget", None) or getattr(one, "__func__", one)
            for one in vars(value).values()
        ]
    return [one for one in map(inspect.unwrap, made) if isinstance(one, FunctionType)]


def _named(node, value) -> str:
    """The name that a statement gives to this value; "" if it defines something else."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        same = node.name == getattr(_of_kernel(value), "__qualname__", "")
        return node.name if same else ""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Lambda)
        and isinstance(node.targets[0], ast.Name)
    ):
        return node.targets[0].id
    return ""


def _used(text: str) -> set[str]:
    """The global names that a statement reads or declares."""
    found: set[str] = set()
    tables = [symtable.symtable(text, "a part", "exec")]
    while tables:
        table = tables.pop()
        outside = (s for s in table.get_symbols() if s.is_global() or table.get_type() == "module")
        # A name in `global n; n += 1` counts as used too.
        found |= {s.get_name() for s in outside if s.is_referenced() or s.is_declared_global()}
        tables += table.get_children()
    return found


def _is_builtin(name: str, value) -> bool:
    """Is this Python's builtin, and not a value of the same name that a cell defined?

    IPython replaces `open` and `exit`; its versions count as builtins.
    """
    theirs = str(getattr(value, "__module__", "")).startswith(("IPython", "_io", "io"))
    return name in dir(builtins) and (
        name.startswith("__") or theirs or value is getattr(builtins, name)
    )


def _import(name: str, value) -> str:
    """The line that imports this value under this name; "" if no module exports it."""
    if isinstance(value, ModuleType):
        if value.__name__ == "__main__":
            return ""
        return _renamed(f"import {value.__name__}", value.__name__, name)
    own = str(getattr(value, "__name__", name))
    for module in (getattr(value, "__module__", None), *MODULES):
        if module in (None, "__main__"):
            continue
        if getattr(sys.modules.get(module), own, None) is value:
            return _renamed(f"from {module} import {own}", own, name)
    return ""


def _renamed(line: str, own: str, name: str) -> str:
    """An import line of `own` that binds it to `name`."""
    return line if own == name else f"{line} as {name}"


def _is_plain(value) -> bool:
    # type(), not isinstance(): a named tuple needs its class, which would be missing.
    if type(value) in (list, tuple, set, frozenset):
        return len(value) <= 100 and all(
            _is_plain(x) and repr(x) not in ("inf", "-inf", "nan") for x in value
        )
    if type(value) is dict:
        return _is_plain(list(value)) and _is_plain(list(value.values()))
    return type(value) in PLAIN and len(repr(value)) <= 1000


def _written(value) -> str:
    """A plain value as code; Python has no literal for inf and nan."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
