"""Notebook 02, attention: a row of weights by hand, the formula, its scale, a test for leaks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from nanokv.school.course import forms
from nanokv.school.course.checking import (
    RIGHT,
    Mistake,
    Outcome,
    function,
    judged,
    questions,
    result_of,
    sizes,
    value,
    wrong,
)
from nanokv.school.course.trials import tensor


def _weights(scores):
    import torch

    return tuple(torch.tensor(scores, dtype=torch.float64).softmax(-1).tolist())


# --- 02.2: the formula ----------------------------------------------------------------------------


def _qkv(rng):
    """q, k, v, each (T,D)."""
    T = rng.randint(1, 6)
    D = 2 ** rng.randint(1, 4)
    return tuple(tensor(rng, 3, T, D))


def _attention(q, k, v):
    from nanokv.attention import causal_attention

    return causal_attention(*(x[None, None] for x in (q, k, v)))[0, 0]


MASKS = {  # (scores, visible) → masked scores; `visible` is 1 where a query may look, 0 elsewhere
    "added": lambda scores, visible: scores.masked_fill(visible == 0, -math.inf),
    "none": lambda scores, visible: scores,
    "multiplied": lambda scores, visible: scores * visible,
    "strict": lambda scores, visible: scores.masked_fill(visible.tril(-1) == 0, -1e9),
    "strict, infinite": lambda scores, visible: scores.masked_fill(
        visible.tril(-1) == 0, -math.inf
    ),
    "inverted": lambda scores, visible: scores.masked_fill(visible == 1, -math.inf),
    "upside down": lambda scores, visible: scores.masked_fill(visible.tril(-1) == 1, -math.inf),
    "one ahead": lambda scores, visible: scores.masked_fill((1 - visible).triu(2) == 1, -math.inf),
    "zero times infinity": lambda scores, visible: scores + (1 - visible) * -math.inf,
    "ones added": lambda scores, visible: scores + visible,
}


def _variant(divisor=lambda q: q.shape[-1] ** 0.5, mask="added", axis=-1):
    """An attention function with one part of the formula replaced."""

    def attend(q, k, v):
        return _weighted(q, k, divisor, mask, axis) @ v

    return attend


def _weighted(q, k, divisor=lambda q: q.shape[-1] ** 0.5, mask="added", axis=-1):
    import torch

    scores = q @ k.mT / divisor(q)
    visible = torch.ones(scores.shape).tril()
    if mask == "after softmax":
        return scores.softmax(axis) * visible
    return MASKS[mask](scores, visible).softmax(axis)


# --- 02.4: a test that finds a leak ---------------------------------------------------------------


def _judge_leak_test(answer, case):
    """Run the learner's test on models that leak and on models that do not."""
    import torch

    noise = torch.Generator().manual_seed(0)
    V = case.config.vocab_size
    ids = torch.randint(V, (1, 8), generator=noise)
    for subject in _subjects():
        forward = _forward(case.model, subject.attend, subject.noise, noise)
        given = result_of(answer, forward, ids.clone(), V)
        if not isinstance(given, bool) and not hasattr(given, "item"):
            return wrong(f"return True or False; this is {given!r:.40}", "no bool")
        if bool(given) != subject.leaks:
            return subject.outcome
    return RIGHT


@dataclass(frozen=True)
class _Subject:
    """A model on which the learner's test is tried.

    `attend`: its attention. `outcome`: the judgement of a test that is wrong about it. `noise`:
    the size of the rounding noise on its logits.
    """

    attend: Callable
    leaks: bool
    outcome: Outcome
    noise: float = 0.0


def _subjects():
    from nanokv.attention import causal_attention, prefill_attention

    alarm = "does not see the future, but your test says it does"
    unseen = "sees the future, unnoticed"
    return (
        _Subject(causal_attention, False, wrong(f"nanokv's causal model {alarm}", "false alarm")),
        _Subject(
            prefill_attention, True, wrong(f"a model without a mask {unseen}", "no mask missed")
        ),
        _Subject(
            _multiplied,
            True,
            wrong(f"a model with a multiplied mask {unseen}", "multiplied missed"),
        ),
        _Subject(
            _one_ahead,
            True,
            wrong(f"a model that sees one token ahead {unseen}", "one ahead missed"),
        ),
        _Subject(
            _first_row,
            True,
            wrong(f"a model whose first token sees ahead {unseen}", "first row missed"),
        ),
        _Subject(
            _late_row,
            True,
            wrong(f"a model whose last token but one sees ahead {unseen}", "late row missed"),
        ),
        _Subject(
            causal_attention,
            False,
            wrong(f"a causal model with noise of 1e-6 {alarm}", "rounding as a leak"),
            noise=1e-6,
        ),
    )


def _forward(model, attend, size, noise):
    """ids (B,T) → logits (B,T,V), with another attention function and random noise of this size."""
    import torch

    from nanokv.cache import NoCache

    @torch.inference_mode()
    def forward(ids):
        logits = model.lm_head(model(ids, NoCache(model.config.num_hidden_layers), 0, attend))
        return logits + size * torch.randn(logits.shape, generator=noise)

    return forward


def _multiplied(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return _variant(mask="multiplied")(q, k, v)


def _one_ahead(q, k, v):
    from nanokv.attention import prefill_attention

    return prefill_attention(q, k, v, q.new_ones(q.shape[2], q.shape[2]).tril(1).bool())


def _first_row(q, k, v):
    from nanokv.attention import prefill_attention

    mask = q.new_ones(q.shape[2], q.shape[2]).tril().bool()
    mask[0, : min(3, len(mask))] = True  # positions 1 and 2
    return prefill_attention(q, k, v, mask)


def _late_row(q, k, v):
    from nanokv.attention import prefill_attention

    mask = q.new_ones(q.shape[2], q.shape[2]).tril().bool()
    mask[-2:, -1] = True
    return prefill_attention(q, k, v, mask)


CHECKS = (
    value(
        "02.1",
        right=lambda c: _weights((math.log(c.a), math.log(c.b), -math.inf)),
        parameters={"a": (1, 2), "b": (3, 5), "c": (4, 6, 7)},
        wrong=(
            Mistake(
                "no mask",
                lambda c: _weights((math.log(c.a), math.log(c.b), math.log(c.c))),
                "That is the row without a mask: the third weight has to be 0.",
            ),
            Mistake(
                "multiplied",
                lambda c: _weights((math.log(c.a), math.log(c.b), 0)),
                "You made the forbidden score 0. e to the 0 is 1: it still takes its share.",
            ),
            Mistake(
                "masked after softmax",
                lambda c: (*_weights((math.log(c.a), math.log(c.b), math.log(c.c)))[:2], 0),
                "You masked after softmax. The weights no longer add up to 1.",
            ),
            Mistake(
                "scores, not weights",
                lambda c: (c.a, c.b, 0),
                "Divide by their sum: weights add up to 1.",
            ),
        ),
        otherwise="e to each score, 0 for the forbidden one, divided by the sum.",
        rel=5e-3,
        atol=1e-4,
    ),
    function(
        "02.2",
        right=_attention,
        inputs=_qkv,
        use=forms.COMPUTED,
        made=_variant,
        rel=1e-4,
        atol=1e-5,
        wrong=(
            Mistake(
                "no division",
                _variant(lambda q: 1),
                "The division by the root of D is missing.",
                {"divisor": lambda q: 1},
            ),
            Mistake(
                "divided by D",
                _variant(lambda q: q.shape[-1]),
                "You divide by D: its root is missing.",
                {"divisor": lambda q: q.shape[-1]},
            ),
            Mistake(
                "root of T",
                _variant(lambda q: q.shape[0] ** 0.5),
                "You divide by the root of T, the number of tokens. D is the last axis of q.",
                {"divisor": lambda q: q.shape[0] ** 0.5},
            ),
            Mistake(
                "multiplied by the root",
                _variant(lambda q: q.shape[-1] ** -0.5),
                "The scores are divided by the root of D, not multiplied.",
                {"divisor": lambda q: q.shape[-1] ** -0.5},
            ),
            Mistake(
                "divided after softmax",
                lambda q, k, v: _variant(lambda q: 1)(q, k, v) / q.shape[-1] ** 0.5,
                "You divide after softmax, so the weights no longer add up to 1. Divide the "
                "scores.",
            ),
            Mistake(
                "multiplied",
                _variant(mask="multiplied"),
                "Your mask makes forbidden scores 0. They have to become −∞: e to the 0 is 1.",
                {"mask": "multiplied"},
            ),
            Mistake(
                "no mask",
                _variant(mask="none"),
                "There is no mask: every token sees every other.",
                {"mask": "none"},
            ),
            Mistake(
                "masked after softmax",
                _variant(mask="after softmax"),
                "You masked after softmax, so the rows no longer add up to 1. Mask the scores.",
                {"mask": "after softmax"},
            ),
            Mistake(
                "sees not itself",
                _variant(mask="strict"),
                "A token sees itself too: the diagonal is allowed.",
                {"mask": "strict"},
            ),
            Mistake(
                "sees not itself, NaN",
                _variant(mask="strict, infinite"),
                "A token sees itself too: the diagonal is allowed. The first row has nothing left: "
                "NaN.",
            ),
            Mistake(
                "inverted",
                _variant(mask="inverted"),
                "Your mask is the other way round: it hides the past and shows the future.",
            ),
            Mistake(
                "upside down",
                _variant(mask="upside down"),
                "Your triangle is the upper one: a token sees itself and the later ones. tril is "
                "the lower one.",
            ),
            Mistake(
                "one ahead",
                _variant(mask="one ahead"),
                "Every token sees the next one. The mask begins right above the diagonal.",
            ),
            Mistake(
                "zero times infinity",
                _variant(mask="zero times infinity"),
                "All is NaN. Did you multiply −∞ by 0? Put −∞ only where it belongs: masked_fill "
                "does.",
            ),
            Mistake(
                "ones added",
                _variant(mask="ones added"),
                "You add 1 to the allowed scores. Add −∞ to the forbidden ones instead.",
            ),
            Mistake(
                "no softmax",
                lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).tril() @ v,
                "The softmax is missing: scores are not weights yet.",
            ),
            Mistake(
                "weights returned",
                lambda q, k, v: _weighted(q, k),
                "Those are the weights (T,T). They mix the values: multiply by v.",
            ),
            Mistake(
                "keys mixed",
                lambda q, k, v: _variant()(q, k, k),
                "You mix the keys. The keys determine the weights; mix the values.",
            ),
            Mistake(
                "over queries",
                _variant(axis=-2),
                "Your softmax runs down the columns. Each row, one query's weights, adds up to 1: "
                "the last axis.",
            ),
            Mistake(
                "swapped",
                lambda q, k, v: _variant()(k, q, v),
                "Queries and keys are exchanged: row i holds the scores of query i with every key.",
            ),
        ),
    ),
    value(
        "02.3",
        right=lambda case: case.config.head_dim**-0.5,
        wrong=(
            Mistake(
                "head size derived",
                lambda c: (c.config.hidden_size / c.config.num_attention_heads) ** -0.5,
                "You took hidden size over heads for the head size. D is a separate number.",
            ),
            Mistake(
                "hidden size",
                lambda c: c.config.hidden_size**-0.5,
                "A query has D numbers, the size of a head, not C.",
            ),
            Mistake(
                "head size",
                lambda c: c.config.head_dim,
                "That is D. The factor is one over its root.",
            ),
            Mistake(
                "no root", lambda c: 1 / c.config.head_dim, "That is 1/D: the root is missing."
            ),
            Mistake(
                "all heads",
                lambda c: (c.config.num_attention_heads * c.config.head_dim) ** -0.5,
                "That is the size of all query heads together. Each head is divided by the root of "
                "its own D.",
            ),
            Mistake(
                "number of heads",
                lambda c: c.config.num_attention_heads**-0.5,
                "That is the number of heads. D is the size of one.",
            ),
            Mistake(
                "times",
                lambda c: c.config.head_dim**0.5,
                "The scores are divided by it, not multiplied.",
            ),
        ),
        otherwise="One over the root of the head size, to three digits.",
        rel=5e-3,
        given=lambda case: sizes(case.config, ("C", "H", "Hk", "D")),
    ),
    judged("02.4", _judge_leak_test),
)

QUESTIONS = questions("02")
