"""A jinja2 sandbox with a budget, because a chat template is a program that comes with somebody else's weights.

jinja2's immutable sandbox forbids attribute walks and writes; it does not bound time or memory ('a' * 10**10, loops in
loops, doubled strings). Here every loop pass, call, filter, operator and output is charged before or as it happens:
`WORK` units (about one character or one list element each) plus 32 for each character of input, and `SECONDS` of CPU.
No single value may be larger than 1/16 of that, because no charge comes in the middle of a function written in C.
No thread, no signal, no second process. Rendering is otherwise what transformers does (chat_template_utils.py).
"""

import re
import time
from collections.abc import Iterator, Mapping

from jinja2 import pass_context
from jinja2.nodes import And, Compare, Concat, Const, Dict, ExprStmt, Filter, Getitem, List, Slice, TemplateData, Tuple
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

WORK = 32_000_000  # units: a full render of a 40k-token chat with Qwen3's template needs about 1 million
SECONDS = 2.0  # CPU time of the calling thread, so that a busy machine does not refuse an honest template
SOURCE = 65_536  # characters of template; Qwen3's has 4,116. Compiling is not charged: this bounds it
PASS = 32  # units charged for one pass through a loop, one call, one filter

# result no larger than the input, whatever the arguments: no deep look at the value is needed
SHALLOW = {"length", "count", "first", "last", "default", "d", "list", "map", "items", "reverse", "random", "attr"}
# result as large as input times argument: the product is checked before the call
GROWING = {"ljust", "rjust", "center", "zfill", "expandtabs", "replace", "join", "format", "format_map", "translate",
           "indent", "batch", "slice", "tojson", "xmlattr", "urlize", "truncate"}  # fmt: skip
# what no prompt needs: random text by the page, and filters whose time is out of proportion to their input
WITHOUT = {"lipsum", "pprint", "wordwrap"}
# methods that lead to `bytes`, which nothing here counts, and to codecs that take quadratic time
UNSAFE = {"encode", "decode", "to_bytes", "from_bytes"}


class Refused(RuntimeError):
    """The template asked for more than its budget. Not a ValueError: jinja2's own filters swallow those."""


class Stream:
    """What a lazy filter yields, already computed and counted: always true, no length, read once, like a generator."""

    def __init__(self, items):
        self.items = items
        self._rest = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._rest)


class Budget:
    """Work and CPU time that one render may use; `charge` and `look` raise Refused when it is gone."""

    def __init__(self, work=WORK, seconds=SECONDS):
        self.work = self.left = work
        self.largest = work // 16  # characters or elements of one value: 2 million, and twice the input
        self.seconds = seconds
        self.deadline = time.thread_time() + seconds
        self._until_clock = 0

    def charge(self, units):
        self.left -= units
        if self.left < 0:
            raise Refused(f"it needs more than {self.work:,} units of work (characters built, loop passes)")
        self._until_clock -= units
        if self._until_clock < 0:
            self._until_clock = 1_000
            if time.thread_time() > self.deadline:
                raise Refused(f"it ran for more than {self.seconds:g} s")

    def look(self, value):
        """Size of `value` once printed, in characters, walked as a tree and charged: nested doublings end here."""
        if isinstance(value, str):
            return len(value)
        characters, stack = 0, [value]
        while stack:
            item = stack.pop()
            self.charge(1)
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset)) or type(item).__name__ in VIEWS:
                stack.extend(item)
            elif isinstance(item, Stream):
                stack.extend(item.items)
            elif isinstance(item, Namespace):
                stack.append(item._Namespace__attrs)
            elif isinstance(item, int):
                characters += 1 + item.bit_length() // 3
            characters += 4  # brackets, quotes, commas
        return characters

    def scan(self, value):
        """Charge an operation that may read all of `value` and leave nothing behind that could be charged."""
        self.charge(PASS + (len(value) // 16 if isinstance(value, str) else self.look(value) // 16))

    def built(self, value):
        """Charge a value that was just made and refuse one that is too large to work with."""
        size = len(value) if hasattr(value, "__len__") and not isinstance(value, Undefined) else 1
        self.check_size(size)
        self.charge(size)
        return value

    def check_size(self, size):
        if size > self.largest:
            raise Refused(f"it builds a value of {size:,} characters or elements, more than {self.largest:,}")

    def allow(self, units, what):
        if units > self.left:
            raise Refused(f"{what} may build {units:,} characters; {self.left:,} of {self.work:,} are left")

    def drain(self, result):
        """A lazy result becomes a counted one."""
        if not isinstance(result, Iterator) or isinstance(result, Stream) or hasattr(result, "index0"):
            return result
        items = []
        for item in result:
            self.charge(PASS)
            items.append(item)
        return Stream(items)


VIEWS = {"dict_keys", "dict_values", "dict_items"}


def growth(budget, value, args):
    """Upper bound of what a growing call builds: size of the input times the largest number or text among the rest."""
    factor, formats = 1, [value] if isinstance(value, str) else []
    for item in args:
        if isinstance(item, int):
            factor = max(factor, abs(item))
        elif not isinstance(item, float):
            factor = max(factor, budget.look(item))
    for text in formats:
        if re.search(r"\{[^{}]*\{", text.replace("{{", "")):  # '{0[0]:>{0[1]}}': it could be any number
            raise Refused("a format computes its own width")
        if "%" in text or "{" in text:  # '%999999999d' and '{:>999999999}': the width stands in the text
            factor = max([factor, *(int(digits[:12]) for digits in re.findall(r"\d+", text))])
    return max(1, budget.look(value)) * factor


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates plus a budget; `budget` is set anew for every render."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options):
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_finalize, **options)
        self.budget = Budget()
        for names in (self.globals, self.filters):
            for name in WITHOUT & names.keys():
                del names[name]

    def guard(self):
        """Put the charges around all filters and tests; to be called after the last of them was added."""
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.tests = {name: _guarded(name, function) for name, function in self.tests.items()}
        self.filters |= {"nanokv.pass": _pass, "nanokv.look": _look, "nanokv.concat": _concat}

    def is_safe_attribute(self, obj, attr, value):
        return attr not in UNSAFE and super().is_safe_attribute(obj, attr, value)

    def compile_bounded(self, source):
        """Template source → jinja2 Template whose loops, comparisons and literals are charged."""
        if len(source) > SOURCE:
            raise Refused(f"its source has {len(source):,} characters, more than {SOURCE:,}")
        tree = _Instrument().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context, operator, left, right):
        self.budget.charge(PASS)
        _check_binop(self.budget, operator, left, right)
        result = self.budget.built(super().call_binop(context, operator, left, right))
        self.budget.look(result)  # a list may hold one value a thousand times
        return result

    def call(__self, __context, __obj, *args, **kwargs):  # jinja2's own trick: kwargs may hold "self"
        budget = __self.budget
        budget.charge(PASS)
        name, owner = getattr(__obj, "__name__", ""), getattr(__obj, "__wrapped__", __obj)
        owner = getattr(owner, "__self__", None)
        if isinstance(owner, (str, list, tuple, Mapping)):
            budget.scan(owner)
            budget.scan(args)
        if owner is not None and name in GROWING:
            budget.allow(growth(budget, owner, [*args, *kwargs.values()]), f"{name}()")
        return budget.built(budget.drain(super().call(__context, __obj, *args, **kwargs)))


def _check_binop(budget, operator, left, right):
    for value, times in ((left, right), (right, left)):
        if operator == "*" and isinstance(value, (str, list, tuple)) and isinstance(times, int):
            budget.check_size(len(value) * max(times, 0))
    if operator == "%" and isinstance(left, str):
        budget.allow(growth(budget, left, [right, *(right if isinstance(right, (tuple, list)) else ())]), "a format")
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        budget.allow(bits if bits > 4096 else 0, "a number") if bits <= 65_536 else budget.allow(10**12, "a number")


@pass_context
def _finalize(context, value):
    """Every {{ expression }}. Taking the context also keeps jinja2 from computing constants while it compiles."""
    context.environment.budget.charge(len(value) if isinstance(value, str) else context.environment.budget.look(value))
    return value


@pass_context
def _pass(context, units):
    context.environment.budget.charge(PASS + abs(units))
    return True


@pass_context
def _look(context, value):
    context.environment.budget.scan(value)
    return value


@pass_context
def _concat(context, values):
    context.environment.budget.charge(context.environment.budget.look(values))
    return context.environment.budget.built("".join(map(str, values)))


def _guarded(name, function):
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def guarded(context, value, *args, **kwargs):
        environment, budget = context.environment, context.environment.budget
        budget.charge(PASS)
        value = budget.drain(value)
        rest = [*args, *kwargs.values()]
        if name in GROWING:
            budget.allow(growth(budget, value, rest), f"|{name}")
        elif name not in SHALLOW:
            budget.charge(budget.look([value, rest]) // 16)
        first = {"context": [context], "eval_context": [context.eval_ctx], "environment": [environment]}.get(wanted, [])
        return budget.built(budget.drain(function(*first, value, *args, **kwargs)))

    return guarded


class _Instrument(NodeTransformer):
    """Puts the charges into the syntax tree where jinja2 offers no hook: loop bodies, comparisons, literals, `~`."""

    def visit_For(self, node):
        self.generic_visit(node)
        node.body.insert(0, ExprStmt(_filter(Const(_constant_text(node)), "nanokv.pass"), lineno=node.lineno))
        if node.test is not None:  # the test of `for x in xs if test` runs outside the body
            node.test = And(_filter(Const(0), "nanokv.pass"), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node):
        self.generic_visit(node)
        node.body.insert(0, ExprStmt(_filter(Const(_constant_text(node)), "nanokv.pass"), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: Concat):
        self.generic_visit(node)
        return _filter(List(node.nodes, lineno=node.lineno), "nanokv.concat")

    def visit_Compare(self, node: Compare):
        self.generic_visit(node)
        node.expr = _looked_at(node.expr)
        for operand in node.ops:
            operand.expr = _looked_at(operand.expr)
        return node

    def visit_Getitem(self, node: Getitem):
        self.generic_visit(node)
        if isinstance(node.arg, Slice):  # compiled to x[1:] without a hook, and copies
            node.node = _looked_at(node.node)
        return node

    def visit_literal(self, node: List | Tuple | Dict):
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _looked_at(node)

    visit_List = visit_Tuple = visit_Dict = visit_literal


def _looked_at(node):
    children = getattr(node, "items", [])
    plain = isinstance(node, Const) or (children and all(isinstance(child, Const) for child in children))
    return node if plain else _filter(node, "nanokv.look")


def _filter(node, name):
    return Filter(node, name, [], [], None, None, lineno=getattr(node, "lineno", None) or 1)


def _constant_text(node):
    return sum(len(data.data) for data in node.find_all(TemplateData))
