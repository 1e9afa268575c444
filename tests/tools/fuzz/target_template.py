"""Fuzz target: a chat template as text, and templates that are put together from everything which it may call.

Every second input is grammar: random expressions over the names that a template has, which random letters would take
for ever to find.
"""

import random

import common
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS

from nanokv.errors import TemplateError
from nanokv.text.template import ChatTemplate

INSTRUMENT = ["nanokv.text.template", "nanokv.text.render_process"]
ALLOWED = (TemplateError,)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "naïve <b> " * 20},
    {"role": "assistant", "content": "<think>hm</think>Sunny."},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
VALUES = (
    "messages",
    "tools",
    "messages[0].content",
    "n.x",
    "x",
    "y",
    "loop",
    "1",
    "-1",
    "9999",
    "2.5",
    "'a'",
    "'%s'",
    "'{0}{0}'",
    "' '",
    "[]",
    "[1, 'a']",
    "{}",
    "{'a': [1]}",
    "(1, 2)",
    "none",
    "true",
    "'a' * 90000",
    "range(9999)|list",
    "missing",
    "'%9999d'",
    "2 ** 4000",
    "'ab,' * 30000",
)
METHODS = sorted(
    name
    for kind in (str, list, tuple, dict, int)
    for name in vars(kind)
    if not name.startswith("_")
)
FILTERS = sorted({*DEFAULT_FILTERS, "tojson"})
TESTS = sorted(name for name in DEFAULT_TESTS if name.isidentifier() and name != "in")
OPERATORS = ("+", "-", "*", "//", "/", "%", "**", "~", "==", "<", ">=", "in", "not in", "and", "or")

STATEMENTS = (
    "{{ EXPR }}",
    "{% set x = EXPR %}",
    "{% set y = EXPR %}",
    "{% set n = namespace(x=EXPR) %}",
    "{% set n.x = EXPR %}",
    "{% for x in EXPR %}BODY{% endfor %}",
    "{% if EXPR %}BODY{% endif %}",
    "{% set x %}BODY{% endset %}",
    "{% macro f(x, y=1) %}BODY{% endmacro %}{{ f(EXPR) }}",
    "{% generation %}BODY{% endgeneration %}",
)


def seeds() -> dict[str, bytes]:
    from chat_templates import FAMILIES

    config = common.json_of(common.TINY / "tokenizer_config.json")
    own = config.get("chat_template") or (common.TINY / "chat_template.jinja").read_text()
    return {name: text.encode() for name, text in (FAMILIES | {"tiny": own}).items()}


def mutate(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return "".join(statement(rng, 3) for _ in range(rng.randint(1, 6))).encode()
    return common.byte_mutator(data, rng)


def statement(rng, depth) -> str:
    inside = statement(rng, depth - 1) if depth else "{{ x }}"
    parts = rng.choice(STATEMENTS).replace("BODY", inside).split("EXPR")
    return parts[0] + "".join(expression(rng, depth) + part for part in parts[1:])


def expression(rng, depth) -> str:
    if depth <= 0 or rng.random() < 0.2:
        return rng.choice(VALUES)
    one, two, three = (lambda: expression(rng, depth - 1) for _ in range(3))
    kind = rng.randrange(8)
    if kind == 0:
        return f"({one()} {rng.choice(OPERATORS)} {two()})"
    if kind in (1, 2):
        given = rng.choice(("", two(), f"{two()}, {three()}"))
        return f"({one()}).{rng.choice(METHODS)}({given})"
    if kind in (3, 4):
        return f"({one()})|{rng.choice(FILTERS)}({rng.choice(('', two(), f'{two()}, {three()}'))})"
    if kind == 5:
        return f"({one()}) is {rng.choice(TESTS)}"
    if kind == 6:
        return rng.choice(
            (f"({one()})[{two()}]", f"({one()})[::-1]", f"[{one()}, {two()}]", f"{{'a': {one()}}}")
        )
    return rng.choice(
        (
            f"dict(a={one()})",
            f"range({one()})",
            f"cycler({one()}, {two()}).next()",
            f"namespace(x={one()})",
            f"strftime_now({one()})",
            f"loop.cycle({one()})",
        )
    )


def run(data: bytes) -> None:
    template = ChatTemplate(
        data.decode("utf-8", "replace"), {"eos_token": "<|im_end|>"}, seconds=0.2
    )
    assert isinstance(template.render(MESSAGES, TOOLS), str)
