"""Notebook 05, the waste: counting the work that is done twice."""

from nanokv.school.course.answers import Sealed
from nanokv.school.course.checking import Mistake, function, questions, value
from nanokv.school.course.work import rows_with_cache, rows_without_cache


def _text_lengths(rng):
    return rng.randint(1, 200), rng.randint(1, 200)


def _mlp_rows(L, S):
    """Rows that need an MLP for one more token without a cache; only one in the last layer."""
    return sum(S for _ in range(L - 1)) + 1


CHECKS = (
    value(
        "05.1",
        right=lambda case: (rows_without_cache(case.P, case.N), rows_with_cache(case.P, case.N)),
        parameters={"P": (5, 6, 7, 9, 11, 12), "N": (4, 3, 5, 6)},
        wrong=(
            Mistake(
                "last token fed",
                lambda c: (rows_without_cache(c.P, c.N + 1), rows_with_cache(c.P, c.N + 1)),
                "You fed the last token too. The token after it is not needed: N tokens need N "
                "forwards, and the first of them is the prompt.",
            ),
            Mistake(
                "prompt every step, no growth",
                lambda c: (c.P * c.N, rows_with_cache(c.P, c.N)),
                "You fed the prompt N times, but the text grows: the second step feeds P + 1 "
                "tokens.",
            ),
            Mistake(
                "all at the end",
                lambda c: (c.N * (c.P + c.N), rows_with_cache(c.P, c.N)),
                "You fed the finished text N times. The text has P tokens at first and grows by "
                "one each step.",
            ),
            Mistake(
                "one ahead",
                lambda c: (c.N * c.P + c.N * (c.N + 1) // 2, rows_with_cache(c.P, c.N)),
                "Your first step feeds P + 1 tokens. It feeds the prompt, P tokens; the second one "
                "feeds P + 1.",
            ),
            Mistake(
                "prompt is free",
                lambda c: (rows_without_cache(c.P, c.N), c.N),
                "With a cache the prompt still has to go through the model once.",
            ),
            Mistake(
                "last token fed, cached only",
                lambda c: (rows_without_cache(c.P, c.N), c.P + c.N),
                "The last token of the answer is never fed: one less.",
            ),
            Mistake(
                "swapped",
                lambda c: (rows_with_cache(c.P, c.N), rows_without_cache(c.P, c.N)),
                "Right numbers, wrong order: without a cache comes first.",
                alone=True,
            ),
        ),
        otherwise="Write down how many tokens each step feeds, and add them up.",
    ),
    function(
        "05.2",
        right=rows_without_cache,
        inputs=_text_lengths,
        wrong=(
            Mistake(
                "no growth",
                lambda P, N: P * N,
                "This feeds the prompt N times. The text grows by one each step.",
            ),
            Mistake(
                "all at the end",
                lambda P, N: N * (P + N),
                "This feeds the finished text N times. The text has P tokens at first and grows by "
                "one each step.",
            ),
            Mistake(
                "last token fed",
                lambda P, N: N * P + N * (N + 1) // 2,
                "This counts the last token's own forward too. Its successor is never needed: N(N "
                "− 1)/2.",
            ),
            Mistake("with a cache", rows_with_cache, "That is the count with a cache."),
        ),
    ),
    value(
        "05.3",
        right=lambda case: ((case.n + 1) ** 2, case.n + 1),
        parameters={"n": (5, 7, 9, 12)},
        wrong=(
            Mistake(
                "row and column",
                lambda c: ((c.n + 1) ** 2, 2 * c.n + 1),
                "You counted the new row and the new column. The column belongs to old queries, "
                "which must not see the new key: causality masks it.",
            ),
            Mistake(
                "triangle",
                lambda c: ((c.n + 1) * (c.n + 2) // 2, c.n + 1),
                "That is the triangle that the mask leaves. The question asks about all cells, "
                "including the masked ones.",
            ),
            Mistake(
                "only what is new",
                lambda c: (2 * c.n + 1, c.n + 1),
                "Without a cache the whole square is computed, not only the new row and column.",
            ),
            Mistake(
                "old square",
                lambda c: (c.n**2, c.n),
                "That is the square before the token was added.",
            ),
            Mistake(
                "without itself",
                lambda c: ((c.n + 1) ** 2, c.n),
                "The new token attends to itself too: one more.",
            ),
        ),
        otherwise="The first number is a square, the second one row of it.",
    ),
    function(
        "05.4",
        right=_mlp_rows,
        inputs=lambda rng: (rng.randint(1, 40), rng.randint(1, 500)),
        wrong=(
            Mistake(
                "all rows",
                lambda L, S: L * S,
                "This counts all rows in the last layer too. Does anything read them there?",
            ),
            Mistake(
                "no row",
                lambda L, S: (L - 1) * S,
                "The newest token does need the last layer's MLP: one row.",
            ),
            Mistake(
                "with a cache", lambda L, S: L, "That is the count with a cache: one row per layer."
            ),
        ),
    ),
    value(
        "05.5",
        right=Sealed("05.5", "513d41ae1abd2c59b557"),
        wrong=(
            Mistake(
                "no queries",
                lambda c: {"K", "V"},
                "Run the comparison for the queries too. There is a different reason for not "
                "caching them.",
            ),
            Mistake(
                "queries only",
                lambda c: {"Q"},
                "Why should keys and values change, if queries do not?",
            ),
        ),
        otherwise=(
            "Experiment 3 compared K. Run the same comparison for the two others, with the causal "
            "mask."
        ),
        names=("Q", "K", "V"),
    ),
)

QUESTIONS = questions("05")
