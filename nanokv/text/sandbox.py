"""A jinja2 sandbox with a budget, because a chat template is a program that comes with somebody else's weights.

jinja2's immutable sandbox forbids attribute walks and writes; it does not bound time or memory ('a' * 10**10, loops in
loops, doubled strings). Here a template may use the filters, tests, methods and operators that chat templates use, and
nothing else. Each is charged before it runs by what it reads and builds (template_costs.py): `WORK` units (about one
character each) plus 40 for each character of input, and `SECONDS` of CPU. A single call in C takes no more than
`STEPS` comparisons, a quarter of a second, and Ctrl-C is heard after it.
No thread, no signal, no second process. Rendering is otherwise what transformers does (chat_template_utils.py).
"""

import itertools
import time
from collections.abc import Iterator, Mapping

from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.nodes import And, Compare, Concat, Const, Dict, ExprStmt, Filter, Getitem, List, Slice, TemplateData, Tuple
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from nanokv.text import template_costs
from nanokv.text.template_costs import ELEMENT, ESCAPED, PASS, VIEWS, Stream

WORK = 32_000_000  # units: a full render of a 40k-token chat with Qwen3's template needs about 6 million
SECONDS = 2.0  # CPU time of the calling thread, so that a busy machine does not refuse an honest template
SOURCE = 65_536  # characters of template; Qwen3's has 4,116
NODES = 10_000  # of its syntax tree; compiling takes about 0.1 ms each and cannot be interrupted
STEPS = 2**28  # comparisons in one call; the slowest, strip() of many letters, takes 0.7 ns for each
DEPTH = 100  # containers within containers: deeper ones overflow the stack of the interpreter
BITS = 4_096  # of an integer: its arithmetic takes no time worth charging
OF_JINJA = ("_loop_vars", "_block_vars")  # what its compiler adds to the arguments of a call
CALLABLE = (Macro, LoopContext, BlockReference, Cycler, Joiner, Undefined)  # charged by what they run, or constant
CONTAINERS = (list, tuple, set, frozenset, *VIEWS)


class Refused(RuntimeError):
    """The template asked for more than its budget. Not a ValueError: jinja2's own filters swallow those."""


class Measure:
    """What a value holds, seen as a tree."""

    def __init__(self):
        self.items = self.depth = 0
        self.chars = 0  # of all texts
        self.printed = 0  # at most so many characters by str(), repr() or JSON


class Budget:
    """Work and CPU time that one render may use; all methods raise Refused when it is gone."""

    def __init__(self, work=WORK, seconds=SECONDS):
        self.work = self.left = work
        self.largest = work // 16  # characters or elements of one value: 2 million, and twice the input
        self.seconds = seconds
        self.deadline = time.thread_time() + seconds
        self._until_clock = 0

    def refuse(self, why):
        raise Refused(why)

    def charge(self, units):
        self.left -= units
        if self.left < 0:
            raise Refused(f"it needs more than {self.work:,} units of work (characters built, loop passes)")
        self._until_clock -= units
        if self._until_clock < 0:
            self._until_clock = 1_000
            if time.thread_time() > self.deadline:
                raise Refused(f"it ran for more than {self.seconds:g} s")

    def steps(self, count):
        """Charge so many comparisons of characters within one call."""
        if count > STEPS:
            raise Refused(f"a single call takes {count:,} steps, more than {STEPS:,}")
        self.charge(count // 16)

    def promise(self, characters, elements=0):
        """Refuse a result that may be larger than what is left; the result itself is charged by `built`."""
        if characters + ELEMENT * elements > self.left:
            raise Refused(f"a single call may build {characters:,} characters and {elements:,} elements; "
                          f"{self.left:,} of {self.work:,} units are left")  # fmt: skip

    def measure(self, value) -> Measure:
        """Walk a value as a tree, charged by the item: nested doublings end here, and what nests too deeply."""
        found, path = Measure(), [iter((value,))]
        while path:
            for item in path[-1]:
                found.items += 1
                self.charge(PASS)  # walked by Python: two million items a second
                inside = self._weigh(item, found)
                if inside is not None:
                    path.append(inside)
                    break
            else:
                path.pop()
            found.depth = max(found.depth, len(path))
            if len(path) > DEPTH:
                raise Refused(f"it nests lists or dicts more than {DEPTH} deep")
        return found

    def _weigh(self, item, found):
        """Count one item; an iterator over what is in it, if it is a container."""
        found.printed += 4  # brackets, quotes, commas
        if isinstance(item, str):
            found.chars += len(item)
            found.printed += len(item) * (ESCAPED // 2 if item.isascii() else ESCAPED)  # \\u0000, \\ud83d\\ude00
        elif isinstance(item, int):
            self.check_number(item)
            found.printed += 2 + item.bit_length() // 3
        elif isinstance(item, range):  # `'a' in range(…)` compares with every number
            self.charge(PASS * len(item))
            found.printed += 60
        elif isinstance(item, Mapping):
            return itertools.chain(item.keys(), item.values())
        elif isinstance(item, CONTAINERS):
            return iter(item)
        elif isinstance(item, Stream):
            return iter(item.elements)
        elif isinstance(item, Namespace):
            return iter((item._Namespace__attrs,))
        else:
            found.printed += 60  # a float, or an object by its type and address
        return None

    def read(self, value):
        """Charge an operation that may read all of `value` and leave nothing behind that could be charged."""
        self.charge(PASS + (len(value) if isinstance(value, str) else self.measure(value).chars) // 16)

    def built(self, value):
        """Charge a value that was just made and refuse one that is too large to work with."""
        self.check_number(value)
        size = template_costs.size(value)
        if size > self.largest:
            raise Refused(f"it builds a value of {size:,} characters or elements, more than {self.largest:,}")
        self.charge(size if isinstance(value, (str, range, *VIEWS)) else ELEMENT * size)
        return value

    def check_number(self, value):
        if isinstance(value, int) and value.bit_length() > BITS:
            raise Refused(f"a number of {value.bit_length():,} bits, more than {BITS:,}")

    def drain(self, result):
        """A lazy result becomes a counted one."""
        if not isinstance(result, Iterator) or isinstance(result, (Stream, LoopContext)):
            return result
        items = []
        for item in result:
            self.charge(PASS)
            items.append(item)
        return Stream(items)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates plus a budget; `budget` is set anew for every render."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options):
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_finalize, **options)
        self.budget = Budget()
        del self.globals["lipsum"]  # random text by the page

    def guard(self):
        """Put the prices before all filters and tests; to be called after the last of them was added."""
        self.filters = {name: _guarded(name, f, template_costs.FILTERS, "filter") for name, f in self.filters.items()}
        self.tests = {name: _guarded(name, f, template_costs.TESTS, "test") for name, f in self.tests.items()}
        self.filters |= {"nanokv.pass": _pass, "nanokv.look": _look, "nanokv.concat": _concat, "nanokv.copy": _copy}

    def compile_bounded(self, source):
        """Template source → jinja2 Template whose loops, comparisons and literals are charged."""
        if len(source) > SOURCE:
            raise Refused(f"its source has {len(source):,} characters, more than {SOURCE:,}")
        tree = self.parse(source)
        if (count := sum(1 for _ in tree.find_all(nodes.Node))) > NODES:
            raise Refused(f"its syntax tree has {count:,} nodes, more than {NODES:,}")
        tree = _Instrument().visit(tree)
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context, operator, left, right):
        self.budget.charge(PASS)
        _check_binop(self.budget, operator, left, right)
        result = self.budget.built(super().call_binop(context, operator, left, right))
        if not isinstance(result, (str, int, float)):
            self.budget.measure(result)  # a list may hold one value a thousand times
        return result

    def call(__self, __context, __obj, *args, **kwargs):  # jinja2's own trick: kwargs may hold "self"
        budget = __self.budget
        budget.charge(PASS)
        if not isinstance(__obj, Macro) or __obj.catch_varargs or __obj.catch_kwargs:  # else it is charged by its body
            budget.measure([args, kwargs])
        price, owner = __self._price(__obj)
        price(budget, owner, *args, **{name: kwargs[name] for name in kwargs if name not in OF_JINJA})
        return budget.built(budget.drain(super().call(__context, __obj, *args, **kwargs)))

    def _price(self, called):
        """(price, owner) of what a template may call; Refused for anything else."""
        inner = getattr(called, "__wrapped__", called)  # the sandbox wraps str.format
        owner, name = getattr(inner, "__self__", None), getattr(inner, "__name__", "")
        for kind, prices in template_costs.METHODS.items():
            if isinstance(owner, kind) and name in prices:
                return prices[name], owner
        if isinstance(called, CALLABLE) or isinstance(owner, Extension):
            return (template_costs.free, None)
        if any(known is called or known is owner for known in self.globals.values()):
            return (template_costs.free, None)
        kind = type(owner if owner is not None else called).__name__
        raise Refused(f"it calls {name or kind} of a {kind}, which is none of the methods that a chat template may use")


def _check_binop(budget, operator, left, right):
    """Promise what an operator builds. Numbers are small, so that their arithmetic costs nothing."""
    budget.check_number(left)
    budget.check_number(right)
    texts = isinstance(left, str) or isinstance(right, str)
    if operator == "%" and isinstance(left, str):
        template_costs.percent(budget, left, right)
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            count = template_costs.size(value) * max(template_costs.number(times), 0)
            budget.promise(count, 0 if texts else count)
    elif operator == "+":
        count = sum(template_costs.size(value) * template_costs.growth(value) for value in (left, right)) * \
            max(map(template_costs.growth, (left, right)))
        budget.promise(count, 0 if texts else count)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
        if left.bit_length() * max(right, 0) > 2 * BITS:
            raise Refused(f"a power of {left.bit_length()} bits to the {right:,}")


@pass_context
def _finalize(context, value):
    """Every {{ expression }}. Taking the context also keeps jinja2 from computing constants while it compiles."""
    budget = context.environment.budget
    budget.charge(ELEMENT + template_costs.text_size(budget, value))
    return value


@pass_context
def _pass(context, units):
    context.environment.budget.charge(PASS + abs(units))
    return True


@pass_context
def _look(context, value):
    context.environment.budget.read(value)
    return value


@pass_context
def _copy(context, value):
    """Before a slice is taken."""
    template_costs.listed(context.environment.budget, value)
    context.environment.budget.charge(template_costs.size(value))
    return value


@pass_context
def _concat(context, values):
    budget = context.environment.budget
    budget.promise(sum(template_costs.text_size(budget, value) for value in values))
    return budget.built("".join(map(str, values)))


def _guarded(name, function, prices, kind):
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    price = prices.get(name)

    @pass_context
    def guarded(context, value=None, *args, **kwargs):
        environment, budget = context.environment, context.environment.budget
        if price is None:
            raise Refused(f"it uses the {kind} {name!r}, which is none of those that a chat template may use")
        budget.charge(PASS)
        value = budget.drain(value)
        price(budget, value, *args, **kwargs)
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
            node.node = _filter(node.node, "nanokv.copy")
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
