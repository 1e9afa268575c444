"""Notebook 00, the bridge: a dot product, softmax, a token's new vectors, savings of a cache."""

from nanokv.school.course.checking import Mistake, questions, value

NAMES = tuple(f"{letter}{number}" for letter in "qkv" for number in range(6))


def _softmax(*scores):
    import torch

    return tuple(torch.tensor(scores, dtype=torch.float64).softmax(0).tolist())


def _vectors(letters, numbers):
    return {f"{letter}{number}" for letter in letters for number in numbers}


CHECKS = (
    value(
        "00.1",
        right=lambda c: c.a[0] * c.b[0] + c.a[1] * c.b[1],
        parameters={"a": ((2, 3), (3, 5), (5, 2)), "b": ((4, 1), (1, 7), (6, 3))},
        wrong=(
            Mistake(
                "not added",
                lambda c: (c.a[0] * c.b[0], c.a[1] * c.b[1]),
                "Those are the two products. The dot product is their sum: one number.",
            ),
            Mistake(
                "crossed",
                lambda c: c.a[0] * c.b[1] + c.a[1] * c.b[0],
                "You multiplied the first number of one with the second of the other. Multiply "
                "first with first.",
            ),
            Mistake(
                "all added",
                lambda c: sum(c.a) + sum(c.b),
                "You added all four. Multiply first, then add.",
            ),
        ),
        otherwise="First number times first number, plus second times second.",
    ),
    value(
        "00.2",
        right=lambda c: _softmax(c.s, c.t),
        parameters={"s": (1, 2), "t": (3, 5)},
        rel=5e-3,
        atol=5e-4,
        wrong=(
            Mistake(
                "shares of the scores",
                lambda c: (c.s / (c.s + c.t), c.t / (c.s + c.t)),
                "You divided the scores themselves by their sum. First take e to the power of "
                "each.",
            ),
            Mistake(
                "largest takes all",
                lambda c: (0, 1),
                "The largest score gets the largest weight, but the other keeps a share.",
            ),
            Mistake(
                "not divided",
                lambda c: (2.718281828459045**c.s, 2.718281828459045**c.t),
                "Those are the powers of e. Divide each by their sum, so that the weights add up "
                "to 1.",
            ),
            Mistake(
                "percent",
                lambda c: [100 * w for w in _softmax(c.s, c.t)],
                "Those are percent. Weights add up to 1.",
            ),
            Mistake(
                "swapped",
                lambda c: _softmax(c.t, c.s),
                "Right weights, wrong order: that of s comes first.",
                alone=True,
            ),
        ),
        otherwise="e to the power of each score, each divided by the sum of both; to three digits.",
    ),
    value(
        "00.3",
        right=lambda c: _vectors("qkv", [c.n]),
        parameters={"n": (2, 3, 4)},
        names=NAMES,
        wrong=(
            Mistake(
                "everything",
                lambda c: _vectors("qkv", range(c.n + 1)),
                "That is the step without a cache. The k and v of the old tokens are read from the "
                "cache.",
            ),
            Mistake(
                "no query",
                lambda c: _vectors("kv", [c.n]),
                "The new k and v go into the cache. But the scores also need a query: the token's own "
                "q is computed too.",
            ),
            Mistake(
                "query only",
                lambda c: _vectors("q", [c.n]),
                "The new token also needs a k and a v: for itself, and for every later token.",
            ),
            Mistake(
                "all queries",
                lambda c: _vectors("q", range(c.n)) | _vectors("qkv", [c.n]),
                "The q of an old token was used when that token arrived. It is not needed again.",
            ),
            Mistake(
                "what is read",
                lambda c: _vectors("q", [c.n]) | _vectors("kv", range(c.n + 1)),
                "Those are the vectors that the step uses. The k and v of the old tokens are read "
                "from the cache, not computed.",
            ),
            Mistake(
                "counted from 1", lambda c: _vectors("qkv", [c.n + 1]), "Tokens are counted from 0."
            ),
            Mistake(
                "the token before",
                lambda c: _vectors("qkv", [c.n - 1]),
                "Token n - 1 is in the cache already. The one that arrives is token n.",
            ),
        ),
        otherwise="Which vectors belong to the new token? All others were computed before.",
    ),
    value(
        "00.4",
        right=lambda c: 3 * c.n * c.C * c.D,
        parameters={"n": (5, 7, 9), "C": (4, 6), "D": (2, 8)},
        factors=True,
        wrong=(
            Mistake(
                "k and v only",
                lambda c: 2 * c.n * c.C * c.D,
                "You left out q. It is not cached, but without a cache it would be computed again "
                "too, so the cache saves it.",
            ),
            Mistake(
                "new token too",
                lambda c: 3 * (c.n + 1) * c.C * c.D,
                "That is the whole work without a cache. The new token's q, k and v are computed "
                "either way.",
            ),
            Mistake(
                "one vector per token",
                lambda c: c.n * c.C * c.D,
                "You counted one vector for each old token. There are three: q, k and v.",
            ),
            Mistake(
                "vectors",
                lambda c: 3 * c.n,
                "Those are the vectors that are saved. Each of them costs C times D "
                "multiplications.",
            ),
            Mistake(
                "what remains",
                lambda c: 3 * c.C * c.D,
                "That is what the step still costs with a cache. What does it no longer cost?",
            ),
        ),
        otherwise=(
            "How many old tokens, how many vectors for each, how many multiplications for each "
            "vector?"
        ),
    ),
)

QUESTIONS = questions("00")
