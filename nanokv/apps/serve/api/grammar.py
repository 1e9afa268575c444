"""What an answer must look like: JSON, JSON of a schema, or a tool call. Tokens that cannot follow are masked.

    matcher = compiled(source(schema, functions, …), words, param)      in a thread of prompts.py; ApiError
    engine.submit(…, constrain=Constraint(matcher))                     one per answer; before each token is drawn

llguidance computes which tokens may follow: 16 µs a token for Qwen3's vocabulary and a small schema, and 50 µs to
unpack its bits. The same bytes always mean the same JSON: `", "` and `": "` separate, without other blanks. Thoughts
come first and are free. The vocabulary is read at the first such request, 2 s for Qwen3's.
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
# Of one answer. llguidance's own limits are ten times as high: 14 ms of fuel for a token, 250,000 states of 1 to 2 kB.
LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
# Seconds of masks that an answer may take: they are computed between two steps of everybody's
# answers.
MASKS_S = 2.0
PROBED = 4  # places of an answer, and tokens at each, that are tried before its first token
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
THOUGHTS = {  # how an answer may begin
    "none": "start: body\n",
    "optional": 'start: (thought BREAK?)? body\nBREAK: /\\n{1,2}/\nthought[suffix="</think>"]: /<think>(.|\\n)*/\n',
    "open": 'start: thought BREAK? body\nBREAK: /\\n{1,2}/\nthought[suffix="</think>"]: /(.|\\n)*/\n',
}


def thoughts(tokenizer: Tokenizer, ids: Sequence[int], opened: bool) -> str:
    """Which of THOUGHTS: has the prompt begun one, or closed one; does the model know the tag?"""
    if opened:
        return "open"
    closed = tokenizer.decode(list(ids[-8:])).rstrip().endswith("</think>")
    return "optional" if "<think>" in tokenizer.special_tokens and not closed else "none"


def source(
    schema: dict | None, functions: Sequence[dict], many: bool, forced: bool, thought: str
) -> str:
    """The grammar: JSON of the schema, or calls of these functions, or either. `many` calls may follow each other;
    where one is `forced`, JSON alone is not enough."""
    rules, bodies = [THOUGHTS[thought]], []
    if schema is not None and not forced:
        bodies.append("answer")
        rules.append(f"answer: {json_of(schema)}\n")
    if functions:
        bodies.append('call ("\\n" call)*' if many else "call")
        rules.append(
            "call: " + " | ".join(f"call{number}" for number in range(len(functions))) + "\n"
        )
    for number, function in enumerate(functions):
        begin, end = f'{OPEN}\n{{"name": "{function["name"]}", "arguments": ', f"}}\n{CLOSE}"
        schema = {"type": "object"} | (function.get("parameters") or {})
        rules.append(f"call{number}: {json.dumps(begin)} {json_of(schema)} {json.dumps(end)}\n")
    return "%llguidance {}\n" + "".join(rules) + "body: " + " | ".join(bodies) + "\n"


def json_of(schema: dict) -> str:
    """A schema inside of a grammar."""
    return "%json " + json.dumps(plain(schema) | {"x-guidance": LAYOUT})


def vocabulary(tokenizer: Tokenizer, rows: int, eos: Sequence[int]) -> "LLTokenizer":
    """Every token's bytes, for llguidance. Control tokens but for `eos`, which ends an answer, never follow. Tags of
    thoughts and calls are text, whatever the tokenizer's file marks them."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not eos:
        raise GenerationError("this model has no token that ends an answer: a grammar needs one")
    words = Words(tokenizer, rows, eos)
    return LLTokenizer(TokenizerWrapper(words), n_vocab=rows, eos_token=list(eos))


class Words:
    """A vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, rows: int, eos: Sequence[int]):
        self.tokenizer, self.eos_token_id = tokenizer, eos[0]
        self.tokens = [
            tokenizer.token_bytes(id) if id < tokenizer.rows else b"" for id in range(rows)
        ]
        # An end inside of a string would cut it.
        self.special_token_ids = sorted(tokenizer.control_ids | set(eos))

    def __call__(self, text: bytes) -> list[int]:
        return self.tokenizer.encode(text.decode("utf-8", "replace"))


def needs_package(param: str) -> None:
    """ApiError where llguidance is not installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        hint = f"install {installing.requirement('llguidance')} in the environment of the server"
        message = f"{param} needs llguidance, which is not installed"
        raise ApiError(400, message, param, "unsupported", hint=hint) from None


class Compiled(NamedTuple):
    """A grammar, and the field of the request that it is made of."""

    matcher: "LLMatcher"
    param: str


def compiled(grammar: str, words: "LLTokenizer", param: str) -> Compiled:
    """ApiError that names the field where the grammar is too large, or says what llguidance does not do."""
    from llguidance import LLMatcher, LLParserLimits

    if len(grammar) > LONGEST:
        raise ApiError(
            400,
            f"{param} makes a grammar of {len(grammar):,} characters, at most {LONGEST:,} are taken",
            param,
        )
    matcher = LLMatcher(
        words, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LLParserLimits(**LIMITS)
    )
    if matcher.is_error():
        raise ApiError(
            400, f"{param} cannot be turned into a grammar: {reason(matcher)}", param, "unsupported"
        )
    probe(Compiled(matcher.deep_copy(), param))
    return Compiled(matcher, param)


def probe(grammar: Compiled) -> None:
    """ApiError where the limits are passed by the first tokens already: at each of the first places a few of the tokens
    that may stand there are tried, and one of them is followed."""
    for _ in range(PROBED):
        bits = grammar.matcher.compute_bitmask()
        check_limits(grammar)
        if grammar.matcher.is_stopped():
            return
        found = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))[
            :PROBED
        ]
        tried = [Compiled(grammar.matcher.deep_copy(), grammar.param) for _ in found]
        for token, one in zip(found.tolist(), tried, strict=True):
            one.matcher.consume_token(token)
            check_limits(one)
        grammar = next((one for one in tried if not one.matcher.is_stopped()), grammar)


def check_limits(grammar: Compiled) -> None:
    """ApiError where llguidance has given up."""
    if grammar.matcher.is_error():
        raise ApiError(
            400,
            f"{grammar.param}: the schema leads beyond the limits of llguidance: "
            f"{reason(grammar.matcher)}",
            grammar.param,
            "unsupported",
        )


def reason(matcher: "LLMatcher") -> str:
    """Why llguidance refuses a grammar, in one line and without the grammar."""
    said = matcher.get_error().partition("\n   1 | ")[0].replace("<non-verbose/>", "")
    line = " ".join(part.strip() for part in said.splitlines() if part.strip(" ^"))
    line = line.partition("failed to compile JSON schema: ")[2] or line.strip()
    if keys := re.fullmatch(r"Unimplemented keys: \[(.*)\]", line):
        return f"{keys[1].replace(chr(34), '')} is not done"
    return (
        "oneOf is done where no two of its schemas may overlap, else anyOf"
        if "coerce_one_of" in line
        else line
    )


class Constraint:
    """Of one answer. Called with the tokens so far; it may be called again with the same ones."""

    def __init__(self, grammar: Compiled):
        self.matcher: Any = grammar.matcher.deep_copy()
        self.param = grammar.param
        self.seen, self.seconds = 0, 0.0

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
        allowed = torch.from_numpy(  # (V,)
            np.unpackbits(bits, bitorder="little")[: logits.shape[-1]].astype(bool)
        )
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)
