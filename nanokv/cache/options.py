"""The kinds of cache and the options of each, with their legal values.

make_cache and the command line share this table; the command line checks `--cache` before torch is
imported. registry.py makes the caches and explains the options.
"""

import difflib
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from nanokv.errors import CacheError


class Rule(NamedTuple):
    """Which values an option accepts, and the text that describes them in an error."""

    accepts: Callable[[object], bool]
    legal: str


def at_least(low: int) -> Rule:
    """Whole numbers of at least `low`; True is not a number."""
    return Rule(
        lambda value: type(value) is int and value >= low, f"a whole number ≥ {low} was expected"
    )


def one_of(*values: object) -> Rule:
    """Exactly these values, types included: 1.0 and True are not accepted for 1."""

    def accepts(value: object) -> bool:
        return any(type(value) is type(x) and value == x for x in values)

    return Rule(accepts, f"{', '.join(map(str, values))} are implemented")


TEXT = Rule(lambda value: isinstance(value, str), "a string was expected")
FOLDER = Rule(
    lambda value: value is None or isinstance(value, str | os.PathLike),
    "the path of a folder was expected",
)
OBJECT = None  # in place of a rule: only a Python caller can pass the value, and no check applies
PAGES: dict[str, Rule | None] = {"page": at_least(1), "pages": at_least(0), "pool": OBJECT}
# Ways to round keys or values (cache/schemes.py) → bits per number; lloyd and qjl draw a rotation.
SCHEMES: dict[str, tuple[int, ...]] = {
    "channel": (2, 4, 8),
    "token": (2, 4, 8),
    "lloyd": (1, 2, 3, 4),
    "qjl": (2, 3, 4),
    "exact": (1, 2, 3, 4, 8),  # which it ignores
}
DRAWN = ("lloyd", "qjl")
BITS = SCHEMES["exact"]
# Policies of an evicting cache (cache/policies.py) → the options that each has beside the budget.
POLICIES: dict[str, tuple[str, ...]] = {
    "window": ("sinks",),
    "h2o": ("sinks", "recent"),
    "snapkv": ("sinks", "recent"),
    "norms": ("sinks", "recent"),
    "matching": ("sinks", "recent"),
    "quest": ("page",),
}
SPARE = 64  # positions of a full window that truncate can take back
SNAPSHOTS = 8  # that a recurrent layer keeps, unless it is told another number
QUEST_PAGE = 16
RECENT = 32  # the newest entries that stay, unless the budget is less than twice as much
# Of models with recurrent layers (cache/state.py).
STATES: dict[str, Rule | None] = {"snapshots": at_least(0), "every": at_least(0)}
KINDS: dict[str, dict[str, Rule | None]] = {  # cache → option → rule
    "dict": STATES,
    "static": STATES,
    "growing": STATES,
    "paged": PAGES,
    "prefix": PAGES | {"salt": TEXT, "index": one_of("hash", "radix")},
    "sliding": {"window": at_least(0), "sinks": at_least(0)},
    "quantized": {
        "bits": one_of(*BITS),
        "k_bits": one_of(0, *BITS),
        "v_bits": one_of(0, *BITS),
        "group": at_least(1),
        "residual": at_least(0),
        "rotate": one_of("none", "hadamard"),
        "keys": one_of(*SCHEMES),
        "values": one_of(*SCHEMES),
        "v_rotate": one_of("none", "hadamard"),
        "outliers": at_least(0),
        "first": at_least(0),
        "seed": at_least(0),
        **STATES,
    },
    "evicting": {
        "policy": one_of(*POLICIES),
        "budget": at_least(0),
        "sinks": at_least(0),
        "recent": at_least(0),
        "page": at_least(1),
    },
    "offloaded": {"to": one_of("disk", "host"), "folder": FOLDER},
    "batch": {"of": TEXT},  # and the options of its rows
}

_QUANTIZED = "quantized:bits=8 or quantized:bits=4 stores keys and values in fewer bits"
ELSEWHERE = {  # names in other programs, in lower case and without "cache" → a hint
    "dynamic": "transformers' DynamicCache is 'dict' here; 'growing' stores the same and copies less",
    "default": "'dict' is the simplest cache; the chat uses 'growing'",
    "sink": "'sliding:window=N:sinks=4' keeps the first tokens",
    "offloadedstatic": "did you mean 'offloaded'?",
    "slidingwindow": "did you mean 'sliding'?",
    "pagedattention": "did you mean 'paged'?",
    "radix": "'prefix:index=radix' finds pages in a radix tree",
    "quanto": _QUANTIZED,
    "hqq": _QUANTIZED,
    "q80": _QUANTIZED,
    "q40": _QUANTIZED,
    "fp8": _QUANTIZED,
    "streamingllm": "'sliding:window=N:sinks=4' moves the sinks, 'evicting:budget=N:sinks=4' does not",
    "h2o": "'evicting:policy=h2o:budget=N'",
    "snapkv": "'evicting:policy=snapkv:budget=N'",
    "knorm": "'evicting:policy=norms:budget=N'",
    "quest": "'evicting:policy=quest:budget=N'",
    "kivi": "'quantized:bits=2' has KIVI's scales",
    "turboquant": "'quantized:bits=4:keys=lloyd:values=lloyd' is its first stage; qjl adds the second",
}


def read_kind(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME[:option=value…]` → (name, options); numbers, true, false and none as Python values.

    Raises CacheError if the text has another form; check_options checks names and options.
    """
    name, *rest = text.split(":")
    options = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not key.isidentifier() or not equals or not value:
            raise CacheError(f"{text!r} is not NAME or NAME:option=value")
        options[key] = _literal(value)
    if not name:
        raise CacheError("the name of a cache is missing")
    return name, options


def kind_text(name: str, options: dict[str, Any]) -> str:
    """The inverse of `read_kind`: quantized:bits=4."""
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])


def _literal(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def check_options(name: str, options: dict[str, Any], objects: bool = False) -> None:
    """CacheError if no cache has this name, or if the cache has no such option or value.

    `objects`: the caller is a program, which may also pass objects (a page pool).
    """
    if name not in KINDS:
        raise _unknown(name)
    known = dict(KINDS[name])
    if name == "batch":
        of = options.get("of", "dict")
        if type(of) is not str or of not in KINDS or of == "batch":
            kinds = [kind for kind in KINDS if kind != "batch"]
            raise CacheError(f"of is {of!r}: the caches are {', '.join(kinds)}")
        known |= KINDS[of]
    if not objects:
        known = {key: rule for key, rule in known.items() if rule is not OBJECT}
    if unknown := sorted(set(options) - set(known)):
        listed = "it has none"
        if known:
            listed = f"its options are {', '.join(known)}"
        raise CacheError(f"cache {name!r} has no option {', '.join(unknown)}: {listed}")
    for key, value in options.items():
        rule = known[key]
        if rule is not OBJECT and not rule.accepts(value):
            raise CacheError(f"{key} is {value!r}: {rule.legal}")
    if options.get("every") and options.get("snapshots") == 0:
        raise CacheError("every means nothing to snapshots=0", "leave one of them out")
    if "quantized" in (name, options.get("of")):
        check_schemes(options)
    if "evicting" in (name, options.get("of")):
        check_policy(options)


class Half(NamedTuple):
    """The scheme of the keys, or of the values."""

    option: str  # "keys" or "values"
    scheme: str
    bits_option: str  # the option that gives the bits
    bits: int


def halves(options: dict[str, Any]) -> tuple[Half, Half]:
    """Keys and values of a quantized cache with these options."""
    found = []
    for option, usual, own in (("keys", "channel", "k_bits"), ("values", "token", "v_bits")):
        bits = options.get(own) or options.get("bits", 8)
        given_by = own if options.get(own) else "bits"
        found.append(Half(option, options.get(option, usual), given_by, bits))
    keys, values = found
    return keys, values


def draws(name: str, options: dict[str, Any]) -> bool:
    """Does a cache with these options draw a random rotation?"""
    quantized = "quantized" in (name, options.get("of"))
    return quantized and any(half.scheme in DRAWN for half in halves(options))


def other_bits(half: Half) -> str:
    """A hint: bits that every scheme has, and the schemes that have the given ones."""
    found = [
        f"{half.option}={scheme}"
        for scheme, legal in SCHEMES.items()
        if half.bits in legal and scheme != "exact"
    ]
    usual = f"{half.bits_option}=4"
    return (
        f"{usual}, or with {half.bits_option}={half.bits} {' or '.join(found)}" if found else usual
    )


def check_schemes(options: dict[str, Any]) -> None:
    """CacheError for options of a quantized cache that contradict each other or mean nothing."""
    keys, values = halves(options)
    for half in (keys, values):
        legal = SCHEMES[half.scheme]
        if half.bits not in legal:
            raise CacheError(
                f"{half.bits_option} is {half.bits}: {', '.join(map(str, legal))} are implemented "
                f"for {half.option}={half.scheme}",
                other_bits(half),
            )
    for option, half in (("rotate", keys), ("v_rotate", values)):
        if options.get(option, "none") != "none" and half.scheme in (*DRAWN, "exact"):
            raise CacheError(
                f"{option} means nothing to {half.option}={half.scheme}",
                f"leave {option} out: channel and token have no rotation of their own",
            )
    if options.get("outliers") and keys.scheme == "exact":
        raise CacheError("outliers means nothing to keys=exact", "leave outliers out")
    if options.get("seed") and not {keys.scheme, values.scheme} & set(DRAWN):
        raise CacheError(
            f"seed means nothing to keys={keys.scheme} and values={values.scheme}",
            f"leave seed out: {' and '.join(DRAWN)} draw a rotation",
        )


def check_policy(options: dict[str, Any]) -> None:
    """CacheError for options of an evicting cache that mean nothing to its policy, or for a budget
    that the entries which always stay fill."""
    policy = options.get("policy", "window")
    known = POLICIES[policy]
    for option in ("sinks", "recent", "page"):
        if option in options and option not in known:
            raise CacheError(
                f"{option} means nothing to policy={policy}",
                f"leave {option} out: it has {', '.join(known)}",
            )
    if not (budget := options.get("budget", 0)):  # decided later
        return
    page = options.get("page", QUEST_PAGE)
    if policy == "quest" and budget < 2 * page:
        raise CacheError(
            f"budget={budget} is less than two pages of {page}: a query reads its own and another",
            f"budget={2 * page}, or a smaller page",
        )
    always = options.get("sinks", 0)
    enough = always + 1
    if "recent" in known:
        always += options.get("recent", newest(budget))
        enough += options.get("recent", newest(2 * enough))  # newest(n) is n/2 at most
    if always >= budget:
        raise CacheError(
            f"budget={budget} leaves no entry to choose: {always} always stay",
            f"budget={enough}, or smaller sinks or recent",
        )


def newest(budget: int) -> int:
    """`recent` of an evicting cache that is not told: 32, at most half of the budget."""
    return min(RECENT, budget // 2)


def _unknown(name: str) -> CacheError:
    """The error for a name that no cache has, with the nearest name as a hint."""
    plain = re.sub("[^a-z0-9]|cache$", "", str(name).lower())
    near = difflib.get_close_matches(plain, KINDS, n=1)
    hint = ELSEWHERE.get(plain, "")
    if not hint and near:
        hint = f"did you mean {near[0]!r}?"
    return CacheError(f"no cache is called {name!r}: the caches are {', '.join(KINDS)}", hint)


def growing_slots(tokens: int, expected: int | None = None) -> int:
    """Slots per row that the growing cache takes for this many tokens.

    The next power of two, at least 16; or `expected`, if this needs at most one more doubling.
    """
    if not tokens:
        slots = 0
    else:
        slots = max(16, 1 << (tokens - 1).bit_length())
    if expected is not None and tokens <= expected < 2 * slots:
        return expected
    return slots
