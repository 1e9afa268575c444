"""Two libraries that compute which tokens may follow in JSON of a schema, side by side: llguidance, which
`nanokv serve` uses, and xgrammar, where it is installed.

    python tests/tools/grammar_libraries.py FOLDER     a folder with a tokenizer.json; xgrammar is no part of `.[dev]`

Each answer is fed token by token; after each token the mask of the next is computed. One thread.
"""

import argparse
import importlib
import json
import statistics
from pathlib import Path
from time import perf_counter

from transformers import PreTrainedTokenizerFast

import nanokv.apps.serve.api.grammar as ours
from nanokv.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["id", "buyer", "lines"],
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "buyer": PERSON,
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["what", "count", "state"],
                "properties": {
                    "what": {"type": "string"},
                    "count": {"type": "integer"},
                    "state": {"enum": ["open", "sent", "lost"]},
                },
            },
        },
    },
}
NESTED: dict = {"type": "string"}
for depth in range(24):
    NESTED = {
        "type": "object",
        "properties": {f"field{depth}": NESTED, f"count{depth}": {"type": "integer"}},
        "required": [f"field{depth}", f"count{depth}"],
        "additionalProperties": False,
    }


def nested(depth: int = 23):
    """An answer of NESTED."""
    return {f"field{depth}": nested(depth - 1) if depth else "the end", f"count{depth}": depth}


LINES = [
    {"what": f"a box of {what}", "count": i, "state": "sent"}
    for i, what in enumerate("pears nails rice".split())
]
CASES = {
    "two fields": (PERSON, {"name": "Zorbla of the seven hills", "age": 41}),
    "an order of three lines": (
        ORDER,
        {"id": "AB-1234", "buyer": {"name": "Ada", "age": 36}, "lines": LINES},
    ),
    "24 levels": (NESTED, nested()),
}


class LLGuidance:
    """As the server calls it."""

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.from_folder(folder)
        self.words = ours.vocabulary(self.tokenizer, self.tokenizer.rows, self.eos())

    def eos(self) -> list[int]:
        return [self.tokenizer.special_tokens["<|im_end|>"]]

    def compiled(self, schema: dict):
        return ours.compiled(
            ours.source(schema, (), False, False, "none"), self.words, "schema"
        ).deep_copy()

    def step(self, matcher, token: int) -> bool:
        took = matcher.consume_token(token)
        matcher.compute_bitmask()
        return took


class XGrammar:
    """With the same blanks."""

    def __init__(self, folder: Path):
        # Of the caller's, no package that we ask for.
        self.library = xgrammar = importlib.import_module("xgrammar")
        theirs = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>"
        )
        self.rows = len(theirs)
        self.compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(theirs, vocab_size=self.rows),
            max_threads=1,
            cache_enabled=False,
        )
        self.mask = xgrammar.allocate_token_bitmask(1, self.rows)

    def compiled(self, schema: dict):
        grammar = self.compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(", ", ": ")
        )
        return self.library.GrammarMatcher(grammar)

    def step(self, matcher, token: int) -> bool:
        took = matcher.accept_token(token)
        matcher.fill_next_token_bitmask(self.mask)
        return took


def measured(library, schema: dict, ids: list[int], rounds: int) -> tuple[float, float, float]:
    """Milliseconds to compile with the first mask, microseconds a token (median), microseconds of the slowest."""
    compiling, steps = [], []
    for _ in range(rounds):
        began = perf_counter()
        matcher = library.compiled(schema)
        compiling.append(perf_counter() - began)
        for token in ids:
            began = perf_counter()
            took = library.step(matcher, token)
            steps.append(perf_counter() - began)
            assert took, (
                f"{type(library).__name__} does not take token {token} of its own schema's answer"
            )
    return statistics.median(compiling) * 1e3, statistics.median(steps) * 1e6, max(steps) * 1e6


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", type=Path)
    options.add_argument("--rounds", type=int, default=20)
    args = options.parse_args()
    tokenizer = Tokenizer.from_folder(args.folder)
    for make in (LLGuidance, XGrammar):
        began = perf_counter()
        try:
            library = make(args.folder)
        except ImportError as missing:
            print(f"{make.__name__}: {missing}")
            continue
        print(
            f"{make.__name__}: vocabulary of {tokenizer.rows:,} tokens in {perf_counter() - began:.2f} s"
        )
        for name, (schema, answer) in CASES.items():
            ids = tokenizer.encode(json.dumps(answer))
            compiling, step, worst = measured(library, schema, ids, args.rounds)
            print(
                f"  {name:<24} {len(ids):>4} tokens  compile {compiling:8.2f} ms"
                f"  a token {step:6.1f} µs, slowest {worst:8.1f} µs"
            )


if __name__ == "__main__":
    main()
