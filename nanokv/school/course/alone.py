"""The source of a function or class from a notebook's cells, together with all that it uses: a text that runs alone.

Imports, helper functions and plain numbers of other cells are taken along. What only the notebook has (a tensor, the
model, an open file) cannot be written down: NotAlone names it.
"""

import ast
import builtins
import inspect
import linecache
import math
import symtable
import sys
from types import FunctionType, ModuleType

from nanokv.school.course import feedback

# Where functions stand that do not say where they stand.
MODULES = ("torch", "math", "torch.nn.functional", "nanokv")
PLAIN = (int, float, complex, str, bytes, bool, type(None))


class NotAlone(Exception):
    """Why something does not run without its notebook, as the end of a sentence."""


def source(answer) -> tuple[str, str]:
    """(a text that runs alone, the name of `answer` in it). NotAlone."""
    parts = _Parts()
    name = parts.define(answer)
    imports = "".join(f"{line}\n" for line in sorted(parts.imports))
    blocks = [imports, "".join(parts.constants), *parts.definitions]
    return "\n\n".join(block.rstrip("\n") + "\n" for block in blocks if block), name


class _Parts:
    """What has been found so far: imports, plain values, and definitions in an order in which they can stand."""

    def __init__(self):
        self.imports, self.constants, self.definitions, self._known = set(), [], [], {}

    def define(self, value) -> str:
        """Take the statement that made a learner's function or class, and before it what that uses → its name."""
        name, text, names = _statement(value)
        if self._is_known(name, value):
            return name
        self._known[name] = value
        for used in sorted(_used(text)):
            if (
                used in names
                and not _is_builtin(used, names[used])
                and not self._is_known(used, names[used])
            ):
                self._take(used, names[used])
        self.definitions.append(text)
        return name

    def _is_known(self, name: str, value) -> bool:
        """Is it here already? NotAlone if the name is, for something else: a kept part has names of its own."""
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
    """(name, text, names of the notebook) of the statement at the left margin that made this. NotAlone."""
    for function in _functions(value):
        code = function.__code__
        if feedback.of_a_library(code.co_filename):
            raise NotAlone("it is not written in a cell")
        lines = linecache.getlines(code.co_filename)
        for node in ast.parse("".join(lines)).body:
            decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", ())]
            first = min([node.lineno, *decorators])
            if first <= code.co_firstlineno <= node.end_lineno and (name := _named(node, value)):
                return name, _text(lines, first, node), function.__globals__
    name = f"`{value.__name__}`" if isinstance(value, type) else "it"
    raise NotAlone(
        f"{name} is not made by a `def`, or a `class` with methods, at the left margin of a cell"
    )


def _text(lines: list[str], first: int, node) -> str:
    """All lines of a `def` or `class`; of a lambda the assignment, and no other statement in its line."""
    if isinstance(node, ast.Assign):
        return ast.get_source_segment("".join(lines), node) + "\n"
    return "".join(lines[first - 1 : node.end_lineno])


def _of_kernel(value):
    """The function of a kernel of Triton; anything else as it is."""
    return value.fn if isinstance(getattr(value, "fn", None), FunctionType) else value


def _functions(value) -> list[FunctionType]:
    """The function itself, or those of a class: they know their cell."""
    value = _of_kernel(value)
    if isinstance(value, type):
        made = (
            getattr(one, "fget", None) or getattr(one, "__func__", one)
            for one in vars(value).values()
        )
        return [one for one in map(inspect.unwrap, made) if isinstance(one, FunctionType)]
    one = inspect.unwrap(value)
    return [one] if isinstance(one, FunctionType) else []


def _named(node, value) -> str:
    """The name that a statement gives to this value; "" if it makes something else."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name if node.name == getattr(_of_kernel(value), "__qualname__", "") else ""
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Lambda)
        and isinstance(node.targets[0], ast.Name)
    ):
        return node.targets[0].id
    return ""


def _used(text: str) -> set[str]:
    """The names that a statement takes from outside of itself."""
    found, tables = set(), [symtable.symtable(text, "a part", "exec")]
    while tables:
        table = tables.pop()
        outside = (s for s in table.get_symbols() if s.is_global() or table.get_type() == "module")
        # `global n; n += 1`.
        found |= {s.get_name() for s in outside if s.is_referenced() or s.is_declared_global()}
        tables += table.get_children()
    return found


def _is_builtin(name: str, value) -> bool:
    """Python's own, and not what a cell calls so; IPython brings an `open` and an `exit`."""
    theirs = str(getattr(value, "__module__", "")).startswith(("IPython", "_io", "io"))
    return name in dir(builtins) and (
        name.startswith("__") or theirs or value is getattr(builtins, name)
    )


def _import(name: str, value) -> str:
    """The line that imports this value under this name; "" if no module has it."""
    if isinstance(value, ModuleType):
        if value.__name__ == "__main__":
            return ""
        return f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
    own = str(getattr(value, "__name__", name))
    for module in (getattr(value, "__module__", None), *MODULES):
        if (
            module not in (None, "__main__")
            and getattr(sys.modules.get(module), own, None) is value
        ):
            return f"from {module} import {own}" + (f" as {name}" if own != name else "")
    return ""


def _is_plain(value) -> bool:
    # Not a named tuple: its class would be missing.
    if type(value) in (list, tuple, set, frozenset):
        return len(value) <= 100 and all(
            _is_plain(x) and repr(x) not in ("inf", "-inf", "nan") for x in value
        )
    if type(value) is dict:
        return _is_plain(list(value)) and _is_plain(list(value.values()))
    return type(value) in PLAIN and len(repr(value)) <= 1000


def _written(value) -> str:
    """A plain value as code; inf and nan have no literal of their own."""
    return (
        f'float("{value}")'
        if isinstance(value, float) and not math.isfinite(value)
        else repr(value)
    )
