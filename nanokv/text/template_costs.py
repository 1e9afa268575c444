"""What a chat template may call, and what each call costs: the price list of nanokv.text.sandbox.

A function written in C cannot be interrupted, so its price is known before it runs. An entry takes (budget, value,
*arguments) as the operation does. It promises the size of the result and charges the steps: length times argument
length where CPython takes that many (rfind, strip). What has no entry is refused by name.
"""

import re
import string
from collections.abc import Iterable, Mapping

from jinja2.runtime import LoopContext, Markup
from jinja2.utils import Cycler

KEYS = 5_000  # elements of a dict or set: their hashes may all collide, and then it takes the square of this
WIDTH = 9_999  # largest width or precision in a format
INDENT = 32  # deepest indentation by tojson, in characters
ATTRIBUTE = 256  # characters of an attribute path, 'a.b.c'
NUMERAL = 4_096  # characters of a text that |int and |float may read
PASS = 100  # units charged for one pass through a loop, one call, one filter, one element that Python code looks at
ELEMENT = 16  # units charged for one element of a list: it takes as much memory as a text of 16 or more characters
ESCAPED = 12  # characters that JSON or repr may need for one; half as many for ASCII
CONVERSION = re.compile(r"%(?:\([^()]*\))?[#0 +-]*([0-9]*)(?:\.([0-9]*))?[hlL]?[diouxXeEfFgGcrsa%]")


# --- prices: what is read, what is built ----------------------------------------------------------------------------


def free(budget, value, *args, **kwargs):
    """No more than a constant number of steps."""


def read(budget, value, *args, **kwargs):
    """Reads everything once."""
    budget.read([value, args, kwargs])


def recased(budget, value, *args):
    """Another text, which may be three times as long: 'ΐ'.upper()."""
    budget.promise(3 * text_size(budget, value))


def listed(budget, value, *args, **kwargs):
    """A list, text or dict of the same elements."""
    budget.promise(size(value), size(value))


def grouped(budget, value, *args, **kwargs):
    """A sorted list: every comparison may read a whole text, and texts are copied to lower case."""
    count = size(value)
    budget.charge(2 * PASS * count)
    chars = count if isinstance(value, str) else budget.measure(value).chars
    budget.promise(chars, count)
    budget.steps(chars * max(1, count.bit_length()))


def searched(budget, value, what="", *args):
    """Backwards, CPython compares the whole argument at every place."""
    budget.read([value, what])
    budget.steps(size(value) * size(what))


# --- methods of texts -----------------------------------------------------------------------------------------------


def stripped(budget, value, chars=None, *args):
    searched(budget, value, chars)
    budget.promise(size(value))


def split(budget, value, sep=None, maxsplit=-1):
    budget.read([value, sep])
    pieces = value.count(sep) + 1 if isinstance(sep, str) and sep else size(value) // 2 + 1
    budget.promise(size(value), pieces)


def split_backwards(budget, value, sep=None, maxsplit=-1):
    searched(budget, value, sep)
    split(budget, value, sep)


def splitlines(budget, value, keepends=False):
    budget.promise(size(value), size(value))


def padded(budget, value, width=0, fill=" "):
    budget.promise(max(size(value), number(width)))


def expanded(budget, value, tabsize=8):
    budget.promise(size(value) + value.count("\t") * max(0, number(tabsize)))


def replaced(budget, value, old="", new="", count=None):
    budget.read([value, old, new])
    original, value, old = value, str(value), str(old)
    places = value.count(old)
    budget.promise(len(value) + places * text_size(budget, new) * growth(original))


def joined(budget, value, items=()):
    """The method: 'sep'.join(items)."""
    join(budget, items, value)


def formatted(budget, value, *args, **kwargs):
    """'{} {:>4}'.format(…): each field may print any argument."""
    fields, widest = 0, 0
    for _, name, spec, _ in string.Formatter().parse(value):
        if name is not None:
            if "{" in spec:
                budget.refuse("a format computes its own width")
            fields += 1
            widest = max([widest, *(bounded_width(budget, digits) for digits in re.findall(r"\d+", spec))])
    _printed_often(budget, value, fields, widest, [args, kwargs])


def formatted_map(budget, value, mapping):
    formatted(budget, value, mapping)


def percent(budget, value, *args, **kwargs):
    """'%s %04d' % (…): each conversion may print any argument."""
    fields, widest, at = 0, 0, value.find("%")
    while at >= 0:
        found = CONVERSION.match(value, at)
        if found is None:
            budget.refuse("a format computes its own width, or its conversion is unknown")
        fields += 1
        widest = max([widest, *(bounded_width(budget, digits) for digits in found.groups() if digits)])
        at = value.find("%", found.end())
    _printed_often(budget, value, fields, widest, [args, kwargs])


def _printed_often(budget, value, fields, widest, arguments):
    budget.charge(fields)
    budget.promise((size(value) + fields * (widest + budget.measure(arguments).printed)) * growth(value))


def bounded_width(budget, digits) -> int:
    if len(digits) > len(str(WIDTH)):
        budget.refuse(f"a format asks for a width of {digits[:12]}, more than {WIDTH:,}")
    return int(digits)


# --- filters --------------------------------------------------------------------------------------------------------


def join(budget, value, d="", attribute=None):
    mapped(budget, value, attribute=attribute)
    budget.charge(size(value))
    characters = len(value) if isinstance(value, str) else sum(text_size(budget, item) for item in elements(value))
    budget.promise((characters + size(value) * text_size(budget, d)) * growth(d))


def mapped(budget, value, *args, attribute=None, **kwargs):
    """An attribute path, as a text or as one index, is walked for every element."""
    for path in (attribute, *args[:1]):
        if isinstance(path, str) and len(path) > ATTRIBUTE:
            budget.refuse(f"an attribute path of {len(path):,} characters, more than {ATTRIBUTE}")
        parts = path.count(".") + path.count(",") if isinstance(path, str) else 0
        budget.charge(0 if path is None else PASS * size(value) * (1 + parts))


def sort(budget, value, reverse=False, case_sensitive=False, attribute=None):
    mapped(budget, value, attribute=attribute)
    grouped(budget, value)


def extreme(budget, value, case_sensitive=False, attribute=None):
    sort(budget, value, attribute=attribute)


def unique(budget, value, case_sensitive=False, attribute=None):
    if size(value) > KEYS:
        budget.refuse(f"|unique of {size(value):,} elements, more than {KEYS:,}")
    sort(budget, value, attribute=attribute)


def summed(budget, value, attribute=None, start=0):
    budget.charge(PASS * size(value))
    mapped(budget, value, attribute=attribute)


def numeral(budget, value, *args, **kwargs):
    if isinstance(value, str) and len(value) > NUMERAL:
        budget.refuse(f"a numeral of {len(value):,} digits, more than {NUMERAL:,}")


def indented(budget, value, width=4, first=False, blank=False):
    lines = str(value).count("\n") + 2 if isinstance(value, str) else text_size(budget, value)
    budget.promise(text_size(budget, value) + lines * (size(width) or number(width)), 3 * lines)


def escaped(budget, value):
    budget.promise(5 * text_size(budget, value))  # " → &#34;


def titled(budget, value):
    budget.promise(3 * text_size(budget, value), text_size(budget, value))  # split at every word boundary


def to_json(budget, value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    step = size(indent) or number(indent)
    if step > INDENT:
        budget.refuse(f"|tojson indents by {step:,}, more than {INDENT}")
    found = budget.measure(value)
    between = text_size(budget, separators) if separators else 2
    budget.promise(found.printed + found.items * (step * (found.depth + 1) + between), 4 * found.items)
    if sort_keys:
        budget.steps(found.chars * max(1, found.items.bit_length()))


# --- tests ----------------------------------------------------------------------------------------------------------


def arithmetic(budget, value, *args):
    """`x is even` computes x % 2, which for a text is a format."""
    for item in (value, *args):
        if not isinstance(item, (int, float)):
            raise TypeError(f"a number is needed, not {type(item).__name__}")
        budget.check_number(item)


# --- sizes ----------------------------------------------------------------------------------------------------------


class Stream:
    """What a lazy filter yields, already computed and counted: always true, no length, read once, like a generator."""

    def __init__(self, items):
        self.elements = items
        self._rest = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._rest)


VIEWS = type({}.keys()), type({}.values()), type({}.items())


def elements(value):
    """What iterating over a value gives, without using a Stream up."""
    return value.elements if isinstance(value, Stream) else value if isinstance(value, Iterable) else ()


def size(value) -> int:
    """Characters or elements; 0 for what has none."""
    value = value.elements if isinstance(value, Stream) else value
    return len(value) if isinstance(value, (str, list, tuple, Mapping, range, *VIEWS)) else 0


def number(value) -> int:
    return value if isinstance(value, int) else 0


def text_size(budget, value) -> int:
    """Characters of str(value)."""
    return len(value) if isinstance(value, str) else budget.measure(value).printed


def growth(value) -> int:
    """A Markup (|safe, |escape) escapes what is joined to it or put into it."""
    return 5 if isinstance(value, Markup) else 1


# --- the lists ------------------------------------------------------------------------------------------------------


def priced(**prices) -> dict:
    """{name: price} of {price: "name name …"}, with the price given by its name in this module."""
    return {name: globals()[price] for price, names in prices.items() for name in names.split()}


METHODS = {
    str: priced(
        read="count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric "
             "isprintable isspace istitle isupper partition removeprefix removesuffix startswith",
        recased="capitalize casefold lower swapcase title upper", searched="rfind rindex rpartition",
        stripped="strip lstrip rstrip", split="split", split_backwards="rsplit", splitlines="splitlines",
        padded="center ljust rjust zfill", expanded="expandtabs", replaced="replace", joined="join",
        formatted="format", formatted_map="format_map",
    ),
    list: priced(read="count index", listed="copy"),
    tuple: priced(read="count index"),
    dict: priced(read="get", free="items keys values", listed="copy"),
    float: priced(free="is_integer"),
    LoopContext: priced(read="cycle changed"),
    Cycler: priced(free="next reset"),
}  # fmt: skip
FILTERS = priced(
    free="abs count d default first items last length round", recased="capitalize lower string upper",
    escaped="e escape safe", numeral="float int", percent="format", indented="indent", join="join",
    listed="list reverse", titled="title", mapped="map reject rejectattr select selectattr", extreme="max min",
    replaced="replace", sort="sort", grouped="dictsort", summed="sum", to_json="tojson", stripped="trim",
    unique="unique",
)  # fmt: skip
TESTS = priced(
    free="boolean callable defined escaped false filter float integer iterable mapping none number sameas sequence "
         "string test true undefined",
    read="eq equalto ge greaterthan gt in le lessthan lower lt ne upper == != < <= > >=",
    arithmetic="divisibleby even odd",
)  # fmt: skip
