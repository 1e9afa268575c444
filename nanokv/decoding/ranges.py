"""The sampling settings and the range of each, in one table.

The command line, `nanokv batch`, the library and the server read it, so all of them accept the same
values. It needs no torch, because `--help` reads it.

    check_sampling(temperature=0.7, top_k=20)       GenerationError that names the first value out
    of its range
"""

from typing import NamedTuple

from nanokv.errors import GenerationError


class Range(NamedTuple):
    """The values that one setting accepts."""

    kind: type  # int, or float, which accepts whole numbers too
    low: float
    high: float
    words: str  # the range in words, after "it must be"
    also: float | None = None  # one more legal value, outside low … high
    help: str = ""  # for --help

    def holds(self, value: object) -> bool:
        """True if the value is legal. True and False are not numbers; NaN is in no range."""
        if isinstance(value, bool):
            return False
        if not isinstance(value, int) and not (self.kind is float and isinstance(value, float)):
            return False
        return value == self.also or self.low <= value <= self.high


INT64 = 2**63 - 1  # the largest number that torch accepts
UINT64 = 2**64 - 1  # the largest seed that torch accepts
COUNT = Range(int, 1, INT64, "an integer ≥ 1")
RANGES = {
    "temperature": Range(
        float,
        1e-30,
        1e6,
        "0 (always the likeliest token) or a number from 1e-30 to 1,000,000",
        also=0,
        help="0 = greedy: always the most probable token",
    ),  # logits divided by less than 1e-30 leave fp32's range
    "top_k": Range(
        int,
        -1,
        INT64,
        "an integer ≥ 0 (0 = off; so is -1)",
        help="sample from the K most probable tokens; 0 = all",
    ),
    "top_p": Range(
        float,
        0.0,
        1.0,
        "a number from 0 to 1 (1 = off)",
        help="sample from the fewest tokens whose probabilities reach P; 1 = all",
    ),
    "min_p": Range(
        float,
        0.0,
        1.0,
        "a number from 0 to 1 (0 = off)",
        help="drop tokens below P × the best probability; 0 = none",
    ),
    "repetition_penalty": Range(
        float,
        1e-6,
        1e6,
        "a number from 0.000001 to 1,000,000 (1 = off)",
        help="divide the logits of tokens seen before; 1 = off",
    ),
    "max_new_tokens": COUNT._replace(help="stop after this many tokens"),
    "seed": Range(
        int,
        -(2**63),
        UINT64,
        "an integer from -2^63 to 2^64 - 1 (-1: drawn)",
        help="makes a sampled run repeatable; drawn and printed when not given, or -1",
    ),
    "top_logprobs": Range(int, 0, INT64, "an integer ≥ 0 (0 = off)"),
    "max_ngram": COUNT,  # this setting and the next two are those of speculative.py
    "tokens": COUNT,
    "layers": COUNT,
}


def check_sampling(**values: object) -> None:
    """GenerationError that names the first value out of range, and the range."""
    for name, value in values.items():
        if not RANGES[name].holds(value):
            raise GenerationError(f"{name} is {value!r}: it must be {RANGES[name].words}")


def chosen_seed(seed: int | None) -> int | None:
    """The seed as an unsigned 64-bit number; None means a random seed.

    -1 also asks for a random seed, as in vLLM and llama.cpp.
    """
    if seed is None:
        return None
    check_sampling(seed=seed)
    if seed == -1:
        return None
    return seed % 2**64
