"""Constrained answers: JSON, JSON of a schema, or a tool call. Other tokens are masked.

    rules = compiled(source(schema, functions, …), words, param)        in a thread of prompts.py
    engine.submit(…, constrain=Constraint(rules))                       one Constraint per answer

llguidance computes which tokens may follow. For Qwen3's vocabulary and a small schema this takes
16 µs per token, and unpacking the bits takes another 50 µs. Whitespace is fixed, so one value has
one spelling: the separators are `", "` and `": "`. Thoughts come before the JSON and are free text.
The vocabulary is built at the first such request, which takes 2 s for Qwen3's.
"""

import json
import re
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanokv.apps.serve.api.calls import CLOSE, OPEN
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.schemas import plain
from nanokv.errors import GenerationError
from nanokv.support import installing
from nanokv.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 100_000  # characters of a grammar
# Limits per answer. llguidance's defaults are ten times as high: 14 ms of fuel per token, and
# 250,000 states of 1 to 2 kB.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
# Seconds per answer for computing masks, which delays the answers of all other requests.
MASKS_S = 2.0
GRAMMAR_LINE = re.compile(r"\n +\d+ \| ")  # llguidance quotes our grammar around an error
PROBED = 4  # positions of an answer, and tokens at each, that are tried in advance
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
THOUGHTS = {  # grammars of an answer's beginning
    "none": "start: body\n",
    "optional": "start: (thought BREAK?)? body\n"
    "BREAK: /\\n{1,2}/\n"
    'thought[suffix="</think>"]: /<think>(.|\\n)*/\n',
    "open": "start: thought BREAK? body\n"
    "BREAK: /\\n{1,2}/\n"
    'thought[suffix="</think>"]: /(.|\\n)*/\n',
}


def thoughts(tokenizer: Tokenizer, ids: Sequence[int], opened: bool) -> str:
    """The key of THOUGHTS for a prompt: a thought is open, may follow, or cannot follow."""
    if opened:
        return "open"
    closed = tokenizer.decode(list(ids[-8:])).rstrip().endswith("</think>")
    if "<think>" in tokenizer.special_tokens and not closed:
        return "optional"
    return "none"


def source(
    schema: dict | None, functions: Sequence[dict], many: bool, forced: bool, thought: str
) -> str:
    """The grammar: JSON of the schema, calls of the functions, or either.

    many: several calls may follow each other. forced: a call is required, so JSON is no choice.
    """
    rules = [THOUGHTS[thought]]
    bodies = []
    if schema is not None and not forced:
        bodies.append("answer")
        rules.append(f"answer: {json_of(schema)}\n")
    if functions:
        bodies.append('call ("\\n" call)*' if many else "call")
        alternatives = (f"call{number}" for number in range(len(functions)))
        rules.append("call: " + " | ".join(alternatives) + "\n")
    for number, function in enumerate(functions):
        begin = f'{OPEN}\n{{"name": "{function["name"]}", "arguments": '
        end = f"}}\n{CLOSE}"
        schema = {"type": "object"} | (function.get("parameters") or {})
        rules.append(f"call{number}: {json.dumps(begin)} {json_of(schema)} {json.dumps(end)}\n")
    return "%llguidance {}\n" + "".join(rules) + "body: " + " | ".join(bodies) + "\n"


def json_of(schema: dict) -> str:
    """A schema as part of a grammar."""
    return "%json " + json.dumps(plain(schema) | {"x-guidance": LAYOUT})


def vocabulary(tokenizer: Tokenizer, rows: int, eos: Sequence[int]) -> "LLTokenizer":
    """The bytes of every token, for llguidance.

    Control tokens never follow, except `eos`, which ends an answer. Tags of thoughts and calls
    count as text even where the tokenizer marks them as control tokens. Raises GenerationError
    if the model has no `eos`.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos:
        raise GenerationError("this model has no token that ends an answer: a grammar needs one")
    words = Words(tokenizer, rows, eos)
    return LLTokenizer(TokenizerWrapper(words), n_vocab=rows, eos_token=list(eos))


class Words:
    """A vocabulary with the attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, rows: int, eos: Sequence[int]):
        self.tokenizer = tokenizer
        self.eos_token_id = eos[0]
        self.tokens = [
            tokenizer.token_bytes(id) if id < tokenizer.rows else b"" for id in range(rows)
        ]
        # An end token inside a string would cut the string off.
        self.special_token_ids = sorted(tokenizer.control_ids | set(eos))

    def __call__(self, text: bytes) -> list[int]:
        return self.tokenizer.encode(text.decode("utf-8", "replace"))


def needs_package(param: str) -> None:
    """Raise ApiError if llguidance is not installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        hint = f"install {installing.requirement('llguidance')} in the environment of the server"
        message = f"{param} needs llguidance, which is not installed"
        raise ApiError(400, message, param, "unsupported", hint=hint) from None


class Compiled(NamedTuple):
    """A compiled grammar, and the request field that it comes from."""

    matcher: "LLMatcher"
    param: str


def compiled(grammar: str, words: "LLTokenizer", param: str) -> Compiled:
    """Compile a grammar; ApiError if it is too large or uses what llguidance does not support."""
    from llguidance import LLMatcher, LLParserLimits

    if len(grammar) > LONGEST:
        raise ApiError(
            400,
            f"{param} makes a grammar of {len(grammar):,} characters, "
            f"at most {LONGEST:,} are taken",
            param,
        )
    matcher = LLMatcher(
        words, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LLParserLimits(**LIMITS)
    )
    if matcher.is_error():
        message = f"{param} cannot be turned into a grammar: {reason(matcher)}"
        raise ApiError(400, message, param, "unsupported")
    if endless(matcher):
        message = f"{param} has a $ref that leads back to itself, so it describes no JSON"
        raise ApiError(400, message, param, "unsupported")
    probe(Compiled(matcher.deep_copy(), param))
    return Compiled(matcher, param)


def probe(grammar: Compiled) -> None:
    """Raise ApiError if the first tokens already exceed the limits.

    At each of the first PROBED positions a few of the allowed tokens are tried, and one of them
    is followed.
    """
    for _ in range(PROBED):
        bits = grammar.matcher.compute_bitmask()
        check_limits(grammar)
        if grammar.matcher.is_stopped():
            return
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        found = np.flatnonzero(allowed)[:PROBED]
        tried = [Compiled(grammar.matcher.deep_copy(), grammar.param) for _ in found]
        for token, one in zip(found.tolist(), tried, strict=True):
            one.matcher.consume_token(token)
            check_limits(one)
        grammar = next((one for one in tried if not one.matcher.is_stopped()), grammar)


def endless(matcher: "LLMatcher") -> bool:
    """Whether the schema is a circle of `$ref` with nothing between, as {"$ref": "#"}."""
    tried = matcher.deep_copy()
    tried.compute_bitmask()
    return "NoExtensionBias" in tried.get_error()


def check_limits(grammar: Compiled) -> None:
    """Raise ApiError if llguidance has given up."""
    if grammar.matcher.is_error():
        raise ApiError(
            400,
            f"{grammar.param}: the schema leads beyond the limits of llguidance: "
            f"{reason(grammar.matcher)}",
            grammar.param,
            "unsupported",
        )


def reason(matcher: "LLMatcher") -> str:
    """The reason for llguidance's refusal, in one line and without the grammar."""
    said = GRAMMAR_LINE.split(matcher.get_error())[0].replace("<non-verbose/>", "")
    line = " ".join(part.strip() for part in said.splitlines() if part.strip(" ^"))
    line = line.partition("failed to compile JSON schema: ")[2] or line.strip()
    if keys := re.fullmatch(r"Unimplemented keys: \[(.*)\]", line):
        return f"{keys[1].replace(chr(34), '')} is not supported"
    if "circular references with sibling keys" in line:
        return "a $ref that leads back to itself is supported only without keywords beside it"
    if away := re.match("Resource '(.*)' is not present in a registry", line):
        return f"$ref {away[1]} is not fetched: put the definition into $defs"
    if pointer := re.match("Pointer '(.*)' does not exist", line):
        return f"$ref #{pointer[1]} names nothing in the schema"
    if "coerce_one_of" in line:
        return "oneOf is supported only if its schemas cannot overlap; use anyOf otherwise"
    return line


class Constraint:
    """Masks the logits of one answer. It may be called repeatedly with the same tokens."""

    def __init__(self, grammar: Compiled):
        self.matcher: Any = grammar.matcher.deep_copy()
        self.param = grammar.param
        self.seen = 0
        self.seconds = 0.0

    def __call__(self, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """(1,V) → (1,V): −∞ for tokens that cannot follow `tokens`."""
        for token in tokens[self.seen :]:
            self.matcher.consume_token(token)
            self.seen += 1
        began = perf_counter()
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self.seconds += perf_counter() - began
        check_limits(Compiled(self.matcher, self.param))
        if self.seconds > MASKS_S:
            raise ApiError(
                400,
                f"{self.param}: the schema is too slow: {len(tokens):,} tokens took "
                f"{self.seconds:.1f} s of masks, {MASKS_S:g} are allowed",
                self.param,
                "unsupported",
            )
        allowed = np.unpackbits(bits, bitorder="little")[: logits.shape[-1]].astype(bool)
        mask = torch.from_numpy(~allowed).to(logits.device)  # (V,)
        return logits.masked_fill(mask, -torch.inf)
