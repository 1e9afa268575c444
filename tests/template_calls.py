"""Every call that a chat template can make, with the worst arguments that fit into its budget.

    python tests/template_calls.py 10         runs every tenth and prints the slowest one and the memory that they took

The values are handed to the template ready made, and its budget is that of a template with no input at all.
"""

import functools
import itertools
import json
import resource
import sys
import time

from nanokv.errors import TemplateError
from nanokv.text import template_costs
from nanokv.text.sandbox import WORK, Stream
from nanokv.text.template import ChatTemplate

TEXTS = {
    "long": "a" * 1_900_000,
    "half": "a" * 900_000 + "b",
    "needle": "a" * 60 + "b" + "a" * 60,
    "wide": "\u4e61" * 1_500_000,
    "letters": "\u4d61" * 170,
    "spaces": " " * 1_900_000,
    "words": "a\t" * 900_000,
    "lines": "\n" * 1_900_000,
    "commas": "ab," * 600_000,
    "smiles": "\U0001f600" * 1_900_000,
    "digits": "9" * 4096,
    "hexadecimal": "0x" + "f" * 1_900_000,
    "percents": "%s" * 500_000,
    "braces": "{0}" * 50_000,
    "percent width": "%9999s" * 3_000,
    "brace width": "{0:9999}" * 3_000,
    "dots": "a." * 900_000,
    "quotes": "<\"" * 900_000,
}
LISTS = {
    "numbers": list(range(99_999)),
    "texts": ["ab"] * 90_000,
    "one text often": ["a" * 1_900_000] * 90_000,
    "long texts": ["a" * 90_000 for _ in range(20)],
    "pairs": [[1, 2] for _ in range(90_000)],
    "tuple": ("a", 1) * 90_000,
    "dicts": [{"a": {"a": "b"}} for _ in range(50_000)],
    "dict": dict.fromkeys(map(str, range(4999)), "a" * 300),
    "colliding": range(0, 4999 * (2**61 - 1), 2**61 - 1),
    "deep": functools.reduce(lambda inside, _: [inside, inside], range(60), "a"),
    "lazy": map(str, range(99_999)),
}
SMALL = {
    "1": 1, "-1": -1, "1.5": 1.5, "huge": 2**4000, "many": 1_900_000, "a": "a", "none": None, "true": True,
    "format": "%.9999f {0:.9999f}", "letter": "\u4e61",
}  # fmt: skip
VALUES = TEXTS | LISTS | SMALL
ARGUMENTS = ("long", "needle", "letters", "dots", "percents", "texts", "colliding", "many", "huge", "1", "a")
OWNERS = {str: TEXTS, list: ("numbers", "one text often", "long texts", "pairs", "deep"), tuple: ("tuple",),
          dict: ("dict",), float: ("1.5",)}  # fmt: skip
NAMED = {  # arguments that reach the code which one position does not
    "sort": ("attribute=y", "case_sensitive=true", "reverse=y"), "unique": ("attribute=y",), "min": ("attribute=y",),
    "map": ("attribute=y", "'upper'", "'default', y", "'trim', y"), "max": ("attribute=y",), "dictsort": ("true", "y"),
    "join": ("y, attribute='a'", "y, attribute=y"), "sum": ("attribute=y", "start=y"), "round": ("400, 'ceil'",),
    "tojson": ("indent=y", "separators=(y, y)", "indent=32", "ensure_ascii=true", "sort_keys=true"),
    "selectattr": ("y, 'in', x", "'a', 'eq', y"), "rejectattr": ("y, 'in', x",), "select": ("'in', x", "'even'", "y"),
    "indent": ("y, true, true", "1, true, true"), "format": ("a=y",), "int": ("0, 16", "0, 36", "0, y"),
    "default": ("y, true",), "replace": ("'a', y", "y, y, 1", "'', y"), "title": ("",), "string": ("",),
    "list": ("",), "escape": ("",),
}  # fmt: skip
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or")


FORMS = (
    "-x", "+x", "not x", "x[::-1]", "x[1:]", "x[0]", "x.a", "x ~ x ~ x", "[x] * 99", "(x, x)", "{x: x}", "{'a': x}",
    "dict(a=x)", "namespace(a=x)", "cycler(x, x).next()", "joiner(x)()", "strftime_now(x)", "raise_exception(x)",
    "range(x)", "dict(x)", "dict.fromkeys(x)", "{}[x]", "x is in [x, y]", "(x|safe) + x", "(x|safe).join([x, x])",
    "(x|safe) % x", "(x|safe).format(x)", "(x|safe).replace('a', x)", "(x|safe).split('a')", "{{ x }}{{ x }}",
    "{% for i in x %}{{ i }}{{ loop.changed(x) }}{% endfor %}", "{% set z %}{{ x }}{{ x }}{% endset %}{{ z|length }}",
    "{% for i in x %}{{ i }}{{ loop.length }}{% endfor %}", "{% for a, b in x|items %}{{ a }}{% endfor %}",
    "{% for i in x if i == x %}{{ i }}{% endfor %}", "{% for i in x|sort %}{{ i in x }}{% endfor %}",
)


def calls():
    """(expression, name of x, name of y, statements) of every call: x is the value, y the argument."""
    for kind, names in template_costs.METHODS.items():
        for name, owner in itertools.product(names, OWNERS.get(kind, ())):
            yield f"x.{name}()", owner, "1"
            for y, form in itertools.product(ARGUMENTS, ("y", "y, y", "'a', y")):
                yield f"x.{name}({form})", owner, y
    for name, owner in itertools.product(template_costs.FILTERS, VALUES):
        yield f"x|{name}", owner, "1"
        for y, form in itertools.product(ARGUMENTS, NAMED.get(name, ("y",))):
            yield f"x|{name}({form})", owner, y
    for name, owner in itertools.product(template_costs.TESTS, VALUES):
        if name.isidentifier() and name != "in":
            yield f"x is {name}", owner, "1"
            for y in ARGUMENTS:
                yield f"x is {name}(y)", owner, y
    for operator, x, y in itertools.product(OPERATORS, VALUES, ARGUMENTS):
        yield f"x {operator} y", x, y
    for form, x in itertools.product(FORMS, VALUES):
        yield form, x, "1"


@functools.cache
def template(expression):
    return ChatTemplate(expression if "{" in expression[:2] else f"{{% set z = {expression} %}}")


def render(expression, x, y):
    """One call on a budget of its own."""
    ours = template(expression)
    values = {name: Stream(LISTS["numbers"]) if key == "lazy" else VALUES[key] for name, key in (("x", x), ("y", y))}
    ours._bounded(ours._template.render, values | {"missing": None}, WORK)


def run(share: int = 1) -> dict:
    """Every `share`-th call: how many, the slowest, the peak of memory above what was there before, and every exception
    that is no TemplateError."""
    todo = list(calls())[::share]
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, strange, refused = (0.0, ""), [], 0
    for call in todo:
        template(call[0])
        began = time.thread_time()
        try:
            render(*call)
        except TemplateError:
            refused += 1
        except BaseException as error:
            strange.append(f"{call}: {type(error).__name__}: {error}"[:200])
        slowest = max(slowest, (time.thread_time() - began, str(call)))
    unit = 1 if sys.platform == "darwin" else 1024
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) * unit
    return {"calls": len(todo), "refused": refused, "seconds": slowest[0], "slowest": slowest[1], "peak": peak,
            "strange": strange}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]) if len(sys.argv) > 1 else 1), ensure_ascii=False))
