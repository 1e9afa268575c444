"""Notebook 12: batches, what their rows share, and a turn of the learner's engine."""

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanokv.school.course.answers import plain
from nanokv.school.course.checking import (
    RIGHT,
    Mistake,
    Told,
    judged,
    questions,
    result_of,
    value,
    wrong,
)

if TYPE_CHECKING:
    import torch

    from nanokv.model import Transformer

# --- 12.1: the rectangle --------------------------------------------------------------------------


def _judge_rectangle(answer, case):
    """Every row must give the logits of its prompt alone, through PaddedCache."""
    import torch

    from nanokv.cache import make_cache
    from nanokv.cache.padded import PaddedCache
    from nanokv.inference import prefill, score

    rng = random.Random("12.1")
    prompts = [[rng.randrange(1, case.config.vocab_size) for _ in range(n)] for n in (9, 4, 12, 7)]
    given = result_of(answer, [list(prompt) for prompt in prompts], like=([[1]], [1]))
    rows, pads = (plain(part) for part in given)
    outcome = _rectangle_outcome(prompts, rows, pads)
    if outcome is not None:
        return outcome
    cache = PaddedCache(make_cache("dict", case.config, batch_size=len(rows)), pads)
    logits = prefill(case.model, rows, cache, start_pos=cache.length)
    for b, prompt in enumerate(prompts):
        if not torch.allclose(logits[b], score(case.model, [prompt])[0, -1], atol=1e-3):
            return wrong(f"row {b} gives different logits from its prompt alone", "logits")
    return RIGHT


def _rectangle_outcome(prompts, rows, pads):
    """An Outcome for faults that show without running the model."""
    longest = max(map(len, prompts))
    widths = {len(row) for row in rows}
    if len(rows) != len(prompts) or len(pads) != len(prompts):
        return wrong(
            f"{len(prompts)} prompts need as many rows and as many numbers of columns", "count"
        )
    if len(widths) > 1:
        return wrong(
            f"the rows are {sorted(widths)} long: a rectangle has rows of one length", "ragged"
        )
    if min(widths) < longest:
        return wrong("the longest prompt was cut: fill up the short ones instead", "cut")
    if all(list(row[: len(prompt)]) == prompt for row, prompt in zip(rows, prompts, strict=True)):
        return wrong(
            "the padding is on the right: the next token would follow the padding",
            "right",
        )
    right = [len(row) - len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    order = [_prompt_of(row, prompts) for row in rows]
    if order != sorted(order) and set(order) == set(range(len(prompts))):
        first = next(b for b, of in enumerate(order) if of != b)
        return wrong(
            f"row {first} is not prompt {first}, it is prompt {order[first]}: keep the order of "
            "the prompts",
            "order",
        )
    if pads != right:
        return wrong(
            f"the numbers of padding columns are {pads}, but your rows have {right}", "pads"
        )
    if min(pads) > 0:
        return wrong(
            f"every row has padding, {min(pads)} columns at least: the longest prompt needs none",
            "too wide",
        )
    if any(set(row[:pad]) - {0} for row, pad in zip(rows, pads, strict=True)):
        return wrong("the padding id has to be 0", "padding id")
    return None


def _prompt_of(row, prompts) -> int:
    """The index of the prompt with which this row ends; −1 if there is none."""
    for number, prompt in enumerate(prompts):
        if list(row[len(row) - len(prompt) :]) == prompt:
            return number
    return -1


# --- 12.2: padding --------------------------------------------------------------------------------


def _padding(c, of=lambda c: len(c.lengths) * max(c.lengths)):
    """The padding of a rectangle in percent of `of(c)`, by default of all its cells."""
    return 100 * (len(c.lengths) * max(c.lengths) - sum(c.lengths)) / of(c)


# --- 12.4: a turn of the engine -------------------------------------------------------------------


class Desk:
    """The engine of a turn. It runs nanokv's own forward pass. The first mistake raises Told."""

    def __init__(self, model: "Transformer", stop: list[int]):
        self.model = model
        self.stop = stop
        self.clear()

    def begin(self, prompt: list[int], most: int) -> None:
        """Start a turn: at most `most` tokens that follow the prompt."""
        self._prompt = list(prompt)
        self._most = most
        self.fed: list[int] = []  # tokens of each forward

    def clear(self) -> None:
        from nanokv.cache import make_cache

        self.cache = make_cache("dict", self.model.config)
        self.held: list[int] = []

    def feed(self, ids: Iterable[int], start_pos: int) -> "torch.Tensor":
        from nanokv.inference import prefill

        ids = [int(token) for token in ids]
        slip = self._cache_slip(ids, start_pos) or self._end_slip(ids)
        if slip:
            raise Told(slip)
        logits = prefill(self.model, [ids], self.cache, start_pos=start_pos)
        self.held = self.held + ids
        self.fed = [*self.fed, len(ids)]
        return logits[0]  # (V,)

    def draw(self, logits: "torch.Tensor") -> int:
        return int(logits.argmax())

    def _cache_slip(self, ids, start_pos):
        held = len(self.held)
        if not self.fed and self.held != self._prompt[:held]:
            return wrong(
                f"the cache holds {held} tokens that the prompt does not begin with: clear it",
                "not cleared",
            )
        if not ids:
            return wrong(
                "no token was fed: keep one token fewer of the prompt, for its logits",
                "nothing fed",
            )
        if start_pos != held:
            return wrong(
                f"start_pos is {start_pos}, but the cache holds {held} tokens", "start_pos"
            )
        return None

    def _end_slip(self, ids):
        if len(self.held) >= len(self._prompt) and ids[-1] in self.stop:
            if ids[-1] == self.stop[0]:
                return wrong(
                    "an end token was drawn, and you went on: it ends the answer", "stop ignored"
                )
            return wrong(
                "you look at one stop id only: each of engine.stop ends the answer", "one stop id"
            )
        if len(self.fed) == self._most:
            return wrong(
                f"token {self._most} of at most {self._most} was fed: nothing reads its logits",
                "last token fed",
            )
        return None


def _judge_turn(answer, case):
    """Run a chat of two turns, then other chats, on one engine.

    Right: the tokens of nanokv.generate, with no row fed more than necessary.
    """
    from nanokv.decoding.generation import generate
    from nanokv.lab.study.equality import small_model

    model = small_model()
    first = [5, 8, 13, 21, 34, 2]
    other = [5, 8, 40, 25, 17]
    third = [50, 7, 7, 19]
    stop = [
        list(generate(model, prompt, max_new_tokens=4, eos_token_ids=[]))[-1]
        for prompt in (first, other)
    ]
    said = list(generate(model, first, max_new_tokens=9, eos_token_ids=stop))
    desk = Desk(model, stop)
    turns = (
        (first, 9),
        ([*first, *said, 44, 9, 30], 9),
        (other, 9),
        (other, 9),
        (third, 2),
        (third, 1),
        (third, 1),
    )
    for prompt, most in turns:
        kept = 0
        if desk.held == prompt[: len(desk.held)] and len(desk.held) < len(prompt):
            kept = len(desk.held)
        desk.begin(prompt, most)
        given = result_of(answer, desk, list(prompt), most, like=[1])
        expected = list(generate(model, prompt, max_new_tokens=most, eos_token_ids=stop))
        outcome = _turn_outcome(plain(given), expected, prompt, kept, desk)
        if outcome is not None:
            return outcome
    return RIGHT


def _turn_outcome(given, expected, prompt, kept, desk):
    """An Outcome if the answer of a turn is wrong, or more rows were fed than necessary."""
    if given == prompt + expected:
        return wrong("return the answer only, without the prompt", "with prompt")
    if given == expected[:-1] and expected[-1] in desk.stop:
        return wrong(
            "the end token is missing: it is the last one of an answer, as in nanokv.generate",
            "no end",
        )
    if given != expected:
        return wrong(f"the answer is {given}, but nanokv.generate gives {expected}", "tokens")
    if kept and desk.fed[0] == len(prompt):
        return wrong(
            f"right tokens, but all {len(prompt)} of the prompt were fed: {kept} of them were in "
            "the cache",
            "nothing kept",
        )
    rows = len(prompt) - kept + len(expected) - 1
    if sum(desk.fed) != rows or len(desk.fed) != len(expected):
        fed = f"{sum(desk.fed)} rows were fed in {len(desk.fed)} forwards"
        return wrong(f"right tokens, but {fed}, where {rows} in {len(expected)} are enough", "rows")
    return None


CHECKS = (
    judged("12.1", _judge_rectangle),
    value(
        "12.2",
        right=_padding,
        parameters={"lengths": ((9, 4, 12, 7), (30, 10, 20, 15), (5, 6, 16, 8, 10))},
        rel=5e-3,
        wrong=(
            Mistake(
                "of the prompts",
                lambda c: _padding(c, lambda c: sum(c.lengths)),
                "That is padding per prompt token. The question is its share of all that is "
                "computed.",
            ),
            Mistake(
                "what is used",
                lambda c: 100 - _padding(c),
                "That is the part that is not padding.",
            ),
            Mistake(
                "a fraction",
                lambda c: _padding(c) / 100,
                "In percent: times 100.",
            ),
            Mistake(
                "a number of tokens",
                lambda c: len(c.lengths) * max(c.lengths) - sum(c.lengths),
                "That is the number of padding tokens. What percentage of all cells are they?",
            ),
        ),
        otherwise=(
            "The rectangle has rows × longest cells. The prompts fill the sum of their lengths."
        ),
    ),
    value(
        "12.3",
        right=lambda c: c.W / c.B + c.S * c.kv,
        parameters={
            "W": (1_192_000_000, 3_087_000_000),
            "B": (16, 32, 8),
            "S": (1000, 2000, 4000),
            "kv": (114_688, 147_456),
        },
        rel=5e-3,
        wrong=(
            Mistake(
                "one row",
                lambda c: c.W + c.S * c.kv,
                "That is one row alone. The weights are read once for all rows of a step.",
            ),
            Mistake(
                "caches shared",
                lambda c: (c.W + c.S * c.kv) / c.B,
                "The rows share the weights only. Each row reads its own cache.",
            ),
            Mistake(
                "whole step",
                lambda c: c.W + c.B * c.S * c.kv,
                "That is read per step. A step gives B tokens: one per row.",
            ),
            Mistake(
                "no weights",
                lambda c: c.S * c.kv,
                "The weights are read as well, and divided among the B rows.",
            ),
            Mistake(
                "no cache",
                lambda c: c.W / c.B,
                "Attention reads the keys and values of the row as well.",
            ),
        ),
        otherwise=(
            "One reading of the weights for all rows, one cache for each; then divide by the new "
            "tokens."
        ),
    ),
    judged("12.4", _judge_turn),
)

QUESTIONS = questions("12")
