"""Notebook 17: the bytes of a state, one step of the delta rule, and snapshots that can be reused."""

import json
from pathlib import Path
from typing import Any

from nanokv.school.course import forms
from nanokv.school.course.checking import Mistake, function, questions, value

# Written by tests/tools/hybrid_twin.py: what twins of one size recall, by model and cache.
RECALL = Path(__file__).parent.parent / "assets" / "state_recall.json"


def recorded() -> dict[str, Any]:
    """steps, pairs, and table: name, bytes and recall by number of pairs.

    talks: steps, told, and table with the share known by number of facts.
    """
    return json.loads(RECALL.read_text("utf-8"))


# --- 17.2: one step -------------------------------------------------------------------------------


def _numbers(rng):
    """(S (Dk,Dv), k (Dk,), v (Dv,), decay, beta) with small numbers; k has length 1."""
    import torch

    Dk, Dv = 3, rng.choice((2, 4))
    S = torch.tensor([[rng.randint(-4, 4) * 1.0 for _ in range(Dv)] for _ in range(Dk)])
    k = torch.tensor(rng.choice(([1.0, 0, 0], [0.6, 0.8, 0], [0, -0.8, 0.6])))
    v = torch.tensor([rng.randint(1, 9) * 1.0 for _ in range(Dv)])
    return S, k, v, rng.choice((0.5, 0.25)), rng.choice((0.5, 0.75))


def _step(S, k, v, decay, beta):
    S = decay * S
    return S + k[:, None] * (beta * (v - S.T @ k))


def _no_decay(S, k, v, decay, beta):
    return _step(S, k, v, 1.0, beta)


def _decay_late(S, k, v, decay, beta):
    return decay * _step(S, k, v, 1.0, beta)


def _only_added(S, k, v, decay, beta):
    return decay * S + k[:, None] * (beta * v)


# --- 17.3: what a snapshot allows -----------------------------------------------------------------


def _match(rng):
    """(matching tokens, interval), both multiples of nothing in particular."""
    interval = rng.choice((16, 32, 64))
    return interval * rng.randint(0, 4) + rng.randint(1, 15), interval


CHECKS = (
    value(
        "17.1",
        right=lambda c: c.layers * (4 * c.H * c.Dk * c.Dv + 2 * c.channels * (c.K - 1)),
        parameters={
            "layers": (24, 36, 18),
            "H": (32, 48, 16),
            "Dk": (128, 64, 96),
            "Dv": (128, 192, 64),
            "channels": (8192, 10240, 6144),
            "K": (4, 3, 5),
        },
        wrong=(
            Mistake(
                "S in two bytes",
                lambda c: c.layers * (2 * c.H * c.Dk * c.Dv + 2 * c.channels * (c.K - 1)),
                "S is in fp32, four bytes a number, also in a model in bf16.",
            ),
            Mistake(
                "K inputs",
                lambda c: c.layers * (4 * c.H * c.Dk * c.Dv + 2 * c.channels * c.K),
                "A convolution over K inputs needs the K − 1 before the new one.",
            ),
            Mistake(
                "no convolution",
                lambda c: c.layers * 4 * c.H * c.Dk * c.Dv,
                "The inputs of the convolution belong to the state too.",
            ),
            Mistake(
                "one layer",
                lambda c: 4 * c.H * c.Dk * c.Dv + 2 * c.channels * (c.K - 1),
                "Each of the layers has its own state.",
            ),
        ),
        otherwise="Per layer: S has H · Dk · Dv numbers of 4 bytes, conv channels · (K − 1) of 2.",
    ),
    function(
        "17.2",
        right=_step,
        inputs=_numbers,
        rel=1e-5,
        atol=1e-5,
        wrong=(
            Mistake("no decay", _no_decay, "The old state is multiplied by `decay` first."),
            Mistake(
                "decay at the end",
                _decay_late,
                "The decay comes first: the new value is written at its full size.",
            ),
            Mistake(
                "only added",
                _only_added,
                "That adds v to what is there. The delta rule first subtracts what S has at k.",
            ),
        ),
    ),
    function(
        "17.3",
        right=lambda match, interval: match // interval * interval,
        inputs=_match,
        use=forms.COUNT,
        wrong=(
            Mistake(
                "as keys",
                lambda match, interval: match,
                "Keys can be cut after any token. A state is only there where a snapshot is.",
            ),
            Mistake(
                "rounded up",
                lambda match, interval: -(-match // interval) * interval,
                "The next snapshot has already read tokens that differ.",
            ),
        ),
    ),
    value(
        "17.4",
        right=lambda c: -(-c.snapshot // c.token),
        parameters={
            "snapshot": (51_000_000, 19_000_000, 9_000_000),
            "token": (32_768, 24_576, 12_288),
        },
        wrong=(
            Mistake(
                "rounded down",
                lambda c: c.snapshot // c.token,
                "With this interval a snapshot still weighs more than the keys between two.",
            ),
            Mistake(
                "upside down",
                lambda c: c.token / c.snapshot,
                "How many tokens of keys weigh as much as one snapshot?",
            ),
        ),
        otherwise="One snapshot per interval; interval · token bytes of keys between two of them.",
    ),
)
QUESTIONS = questions("17")
