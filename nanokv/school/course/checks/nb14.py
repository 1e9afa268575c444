"""Notebook 14, several machines: bytes sent, heads per rank, the merge, and the handover of KV."""

import math

from nanokv.school.course.checking import Mistake, function, questions, value

# --- 14.1: bytes of the sums ----------------------------------------------------------------------


def _summed(c) -> int:
    """Bytes summed per token: a vector after attention and one after the MLP in every layer."""
    return 2 * c.L * c.C * c.itemsize


# --- 14.2: which KV heads a rank needs ------------------------------------------------------------


def _ranks_and_heads(rng):
    """(Hk, n, rank), where one of Hk and n divides the other."""
    Hk = 2 ** rng.randint(0, 4)
    n = 2 ** rng.randint(0, 4)
    return Hk, n, rng.randint(0, n - 1)


def _kv_heads(Hk, n, rank):
    first = rank * Hk // n
    return list(range(first, first + max(1, Hk // n)))


# --- 14.3: the merge ------------------------------------------------------------------------------


def _two_parts(rng):
    """(a, la, b, lb): two outputs with log-sum-exps, some of them large, or of an empty part."""
    a = float(rng.randint(-9, 9))
    b = float(rng.randint(-9, 9))
    la = float(rng.randint(1, 5))
    lb = float(rng.randint(1, 5))
    kind = rng.randint(0, 5)
    if kind == 4:
        la += 1000
        lb += 1000
    if kind == 5:
        b = 0.0
        lb = -math.inf
    return a, la, b, lb


def _weighed(a, la, b, lb):
    """(sum of the parts, each times its weight; sum of the weights)"""
    top = max(la, lb)
    wa = math.exp(la - top)
    wb = math.exp(lb - top)
    return wa * a + wb * b, wa + wb


def _merged(a, la, b, lb):
    total, weights = _weighed(a, la, b, lb)
    return total / weights


# --- 14.4: send the cache, or prefill again -------------------------------------------------------


def _seconds(c, bits=8, tokens=True):
    """(seconds to send the keys and values, seconds to compute them again)."""
    computed = c.T if tokens else 1
    sending = c.T * c.kv * bits / (c.link * 1e9)
    computing = 2 * c.P * computed / (c.F * 1e12)
    return sending, computing


CHECKS = (
    value(
        "14.1",
        right=lambda c: _summed(c) * 2 * (c.n - 1) / c.n,
        parameters={
            "L": (28, 36, 24),
            "C": (1024, 2560, 2048),
            "n": (4, 8, 16),
            "itemsize": (4,),
        },
        factors=True,
        wrong=(
            Mistake(
                "numbers, not bytes",
                lambda c: _summed(c) * 2 * (c.n - 1) / c.n / c.itemsize,
                "That is how many numbers are sent. Each has `itemsize` bytes.",
            ),
            Mistake(
                "one sum per layer",
                lambda c: _summed(c) * (c.n - 1) / c.n,
                "Attention and MLP end in a sum each: two per layer.",
            ),
            Mistake(
                "vector once",
                _summed,
                "That is what is summed. In a ring each rank passes on parts of it, twice around: "
                "2·(n−1)/n of it.",
            ),
            Mistake(
                "to everybody",
                lambda c: _summed(c) * (c.n - 1),
                "That is for a rank that sends its whole vector to every other one. A ring sends "
                "parts.",
            ),
            Mistake(
                "not divided",
                lambda c: _summed(c) * 2 * (c.n - 1),
                "A ring passes parts on: each message is an n-th of the vector.",
            ),
        ),
        otherwise=(
            "Two sums per layer, of C numbers each; a ring sends 2·(n−1)/n of these bytes from "
            "each rank."
        ),
    ),
    function(
        "14.2",
        right=_kv_heads,
        inputs=_ranks_and_heads,
        wrong=(
            Mistake(
                "dealt out",
                lambda Hk, n, rank: list(range(rank % Hk, Hk, n)),
                "You deal the heads out one by one. Query heads that share a KV head lie side by "
                "side, so a rank has a run of KV heads.",
            ),
            Mistake(
                "every n-th",
                lambda Hk, n, rank: list(range(rank, Hk, n)),
                "You deal the heads out one by one. Query heads that share a KV head lie side by "
                "side, so a rank has a run of KV heads.",
            ),
            Mistake(
                "runs of no head",
                lambda Hk, n, rank: list(
                    range(rank * (Hk // n), rank * (Hk // n) + max(1, Hk // n))
                ),
                "With more ranks than KV heads, Hk // n is 0, so every rank begins at head 0. "
                "Multiply first: rank · Hk // n.",
            ),
            Mistake(
                "no head left",
                lambda Hk, n, rank: list(range(rank * Hk // n, (rank + 1) * Hk // n)),
                "With more ranks than KV heads some ranks get none this way. Each rank has query "
                "heads, and they need a KV head: a copy.",
            ),
            Mistake(
                "all heads",
                lambda Hk, n, rank: list(range(Hk)),
                "Then every rank would hold the whole cache. It needs only what its own query "
                "heads read.",
            ),
        ),
    ),
    function(
        "14.3",
        right=_merged,
        inputs=_two_parts,
        rel=1e-6,
        atol=1e-9,
        wrong=(
            Mistake(
                "mean",
                lambda a, la, b, lb: (a + b) / 2,
                "The mean is right only if both parts have the same weight. The log-sum-exps give "
                "the weights.",
            ),
            Mistake(
                "weighted by lse",
                lambda a, la, b, lb: (la * a + lb * b) / (la + lb),
                "The weight of a part is exp(lse), not lse: lse is its logarithm.",
            ),
            Mistake(
                "not divided",
                lambda a, la, b, lb: _weighed(a, la, b, lb)[0],
                "The weights do not add up to 1 yet: divide by their sum.",
            ),
            Mistake(
                "swapped",
                lambda a, la, b, lb: _merged(b, la, a, lb),
                "Each output belongs to its own log-sum-exp.",
            ),
        ),
    ),
    value(
        "14.4",
        right=_seconds,
        rel=5e-3,
        parameters={
            "T": (8000, 4000, 16000),
            "kv": (114_688, 147_456),
            "P": (600_000_000, 4_000_000_000),
            "F": (20, 100, 50),
            "link": (10, 100, 25),
        },
        wrong=(
            Mistake(
                "bits and bytes",
                lambda c: _seconds(c, bits=1),
                "The speed of a link is given in bits per second, and a byte has 8 bits.",
            ),
            Mistake(
                "one token",
                lambda c: _seconds(c, tokens=False),
                "The first number is right. The prefill computes all T tokens, with 2 FLOPs per "
                "weight for each.",
                alone=True,
            ),
            Mistake(
                "swapped",
                lambda c: _seconds(c)[::-1],
                "Right numbers, wrong order: first sending, then computing.",
                alone=True,
            ),
        ),
        otherwise=(
            "Sending: T · bytes per token · 8 / bits per second. Computing: 2 · P · T / FLOPs per "
            "second."
        ),
    ),
)

QUESTIONS = questions("14")
