"""Notebook 09, time: a profiler and its repair, attention against weights, limits, the gain."""

import random
import statistics

from nanokv import costs
from nanokv.costs.memory import FAMILY
from nanokv.school.course.answers import same
from nanokv.school.course.checking import (
    RIGHT,
    Mistake,
    function,
    judged,
    questions,
    result_of,
    sizes,
    value,
    wrong,
)
from nanokv.school.course.claims.article1 import profiled_rate


def _attention_equals_weights(case):
    """The length at which attention takes as many FLOPs in a decode step as all matrices."""
    config = FAMILY[case.name]
    matrices = costs.decode_flops(config, 0)
    return matrices / (costs.decode_flops(config, 1) - matrices)


def _heads(case):
    """Query heads per KV head."""
    return FAMILY[case.name].num_attention_heads / FAMILY[case.name].num_key_value_heads


def _limit(weights, per_token, context, batch, bandwidth):
    return batch * bandwidth / (weights + batch * context * per_token)


def _server(rng):
    return (
        rng.randint(1, 60) * 10**9,
        rng.choice((57_344, 114_688, 262_144)),
        100 * rng.randint(1, 300),
        rng.randint(2, 64),
        rng.choice((2e11, 1e12, 3.35e12)),
    )


# --- 09.2: a profiler on a simulated machine ------------------------------------------------------


class _Machine:
    """Simulated generations of `tokens` tokens, with a clock that only they advance.

    The first generation is slower by the factor `cold`; in each, one step by `disturbed`.
    """

    def __init__(self, prefill: float, step: float, tokens: int, cold: float, disturbed: float):
        self.prefill = prefill
        self.step = step
        self.tokens = tokens
        self.cold = cold
        self.disturbed = disturbed
        self.time = 100.0
        self.started = 0

    def clock(self) -> float:
        return self.time

    def start(self):
        self.started += 1
        return self._stream(slower=self.cold if self.started == 1 else 1.0)

    def _stream(self, slower):
        for seconds in self.seconds():
            self.time += seconds * slower
            yield 0

    def seconds(self) -> list[float]:
        """The seconds of each token of a warm generation."""
        steps = [self.step] * (self.tokens - 1)
        if len(steps) > 2:
            steps[len(steps) // 2] *= self.disturbed
        return [self.prefill, *steps]


def _judge_profile(answer, case):
    rng = random.Random("09.2")
    for tokens in (9, 30, 1):
        machine = _Machine(
            rng.uniform(0.5, 2),
            rng.uniform(0.01, 0.05),
            tokens,
            rng.uniform(2, 4),
            rng.uniform(20, 40),
        )
        given = result_of(answer, machine.start, machine.clock, like=(1.0, None))
        first, between = given
        outcome = _first_outcome(machine, first) or _between_outcome(machine, between)
        if outcome:
            return outcome
    return RIGHT


def _near(a, b) -> bool:
    return same(a, b, rel=0.1)


def _first_outcome(m, first):
    """What is wrong with the time to the first token, or None."""
    if _near(first, m.prefill * m.cold):
        return wrong(
            "you timed the first generation, which is slower than all others: run one before",
            "cold",
        )
    if not _near(first, m.prefill):
        return wrong(
            f"the first token took {m.prefill:.3f} s from start(), yours says {_shown(first)} "
            "(10 % off is right)",
            "first token",
        )
    return None


def _between_outcome(m, between):
    """What is wrong with the time between tokens, or None."""
    if m.tokens == 1 and between is None:
        return None
    if m.tokens == 1:
        return wrong("with a single token there is no time between tokens: None", "single")
    _, *steps = m.seconds()
    whole = m.prefill + sum(steps)
    prefilled = wrong("the prefill is in your time between tokens", "prefill in the rate")
    known = (
        (
            statistics.mean(steps),
            wrong("one disturbed step is in your mean: take the median", "mean"),
        ),
        (
            sum(steps) / m.tokens,
            wrong("n tokens have n − 1 times between them; and take the median", "n for n - 1"),
        ),
        (whole / m.tokens, prefilled),
        (whole / (m.tokens - 1), prefilled),
        (1 / m.step, wrong("that is tokens per second; seconds per token were asked for", "rate")),
    )
    if _near(between, m.step):
        return None
    for number, outcome in known:
        if _near(between, number):
            return outcome
    return wrong(
        f"a step took {m.step:.4f} s, yours says {_shown(between)} (10 % off is right)", "between"
    )


def _shown(seconds) -> str:
    if isinstance(seconds, int | float):
        return f"{seconds:.4g} s"
    return repr(seconds)[:40]


CHECKS = (
    value(
        "09.1",
        right=lambda c: (profiled_rate(c.prefill, c.step, c.n), 1 / c.step),
        parameters={"prefill": (2.0, 0.5, 0.8), "step": (0.025, 0.04, 0.0125), "n": (41, 33, 60)},
        rel=3.5e-3,  # three digits; "one step too many" is this near
        wrong=(
            Mistake(
                "trusted",
                lambda c: (1 / c.step, 1 / c.step),
                "You trust the profiler. Its second call starts without a cache: what does it do "
                "first?",
            ),
            Mistake(
                "one step too many",
                lambda c: ((c.n - 1) / (c.prefill + (c.n - 1) * c.step), 1 / c.step),
                "The second prefill gives a token too: n − 2 steps are left in the second call.",
            ),
            Mistake(
                "both calls",
                lambda c: (c.n / (2 * c.prefill + (c.n - 2) * c.step), 1 / c.step),
                "The first call is timed separately. The rate includes only the second one.",
            ),
            Mistake(
                "swapped",
                lambda c: (1 / c.step, profiled_rate(c.prefill, c.step, c.n)),
                "Right numbers, wrong order: the reported rate comes first.",
                alone=True,
            ),
        ),
        otherwise=(
            "Write down what the second call does, one forward after another, and add up their "
            "seconds. Answer to four digits."
        ),
    ),
    judged("09.2", _judge_profile),
    value(
        "09.3",
        right=_attention_equals_weights,
        parameters={"name": ("Qwen/Qwen3-4B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B")},
        rel=0.01,
        wrong=(
            Mistake(
                "KV heads",
                lambda c: _attention_equals_weights(c) * _heads(c),
                "Every query head computes scores: H, not Hk. (With Hk it is the length at which "
                "the bytes are equal: heads that share a key read it once and compute with it "
                "several times.)",
            ),
            Mistake(
                "scores only",
                lambda c: _attention_equals_weights(c) * 2,
                "You counted the scores but not the mix of values, which takes the same number of "
                "FLOPs.",
            ),
            Mistake(
                "two FLOPs forgotten",
                lambda c: _attention_equals_weights(c) / 2,
                "A multiplication with a weight is two FLOPs too: multiply and add.",
            ),
        ),
        otherwise=(
            "FLOPs of all matrices for one row, divided by the FLOPs of attention for one visible "
            "token."
        ),
        given=lambda c: sizes(FAMILY[c.name], ("C", "L", "H", "Hk", "D", "width of the MLP", "V")),
    ),
    function(
        "09.4",
        right=_limit,
        inputs=_server,
        wrong=(
            Mistake(
                "one sequence",
                lambda w, p, S, B, bw: bw / (w + S * p),
                "That is one sequence alone, or every sequence reading the weights anew. One "
                "reading serves the whole batch.",
            ),
            Mistake(
                "steps",
                lambda w, p, S, B, bw: bw / (w + B * S * p),
                "That is steps per second. A step gives a token to every sequence.",
            ),
            Mistake(
                "one cache",
                lambda w, p, S, B, bw: B * bw / (w + S * p),
                "Every sequence has its own cache to read.",
            ),
            Mistake(
                "no cache", lambda w, p, S, B, bw: B * bw / w, "The caches have to be read too."
            ),
        ),
    ),
    value(
        "09.5",
        right=lambda c: (c.a + c.b * c.S) / (c.a + c.b),
        parameters={"a": (3.0, 4.0, 2.5), "b": (0.2, 0.1, 0.5), "S": (64, 48, 80)},
        rel=5e-3,
        wrong=(
            Mistake(
                "rows", lambda c: c.S, "That is the ratio of rows. Both steps pay `a` as well."
            ),
            Mistake(
                "free with a cache",
                lambda c: (c.a + c.b * c.S) / c.b,
                "The step with a cache pays `a` as well, however few its rows are.",
            ),
            Mistake(
                "no row",
                lambda c: (c.a + c.b * c.S) / c.a,
                "The step with a cache still feeds one row.",
            ),
            Mistake(
                "upside down",
                lambda c: (c.a + c.b) / (c.a + c.b * c.S),
                "The other way round: times as fast.",
            ),
            Mistake(
                "one row less",
                lambda c: (c.a + c.b * (c.S - 1)) / (c.a + c.b),
                "Without a cache all S rows are fed: the new token is one of them.",
            ),
        ),
        otherwise=(
            "Time without a cache (S rows) divided by time with one (1 row), to three digits."
        ),
    ),
)

QUESTIONS = questions("09")
