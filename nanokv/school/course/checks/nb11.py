"""Notebook 11, reuse and rollback: masks of chunks, shared prefixes, rejected guesses."""

from nanokv.attention import causal_mask
from nanokv.school.course import forms
from nanokv.school.course.checking import Mistake, function, questions, value
from nanokv.school.course.work import prefilled_after_prefix
from nanokv.text.ids import common_prefix

# --- 11.1: the mask of a chunk --------------------------------------------------------------------


def _split(rng):
    """(cached, T) with cached + T ≤ 12."""
    cached = rng.randint(0, 11)
    return cached, rng.randint(1, 12 - cached)


def _ones(rows: int, columns: int):
    import torch

    return torch.ones(rows, columns, dtype=torch.bool)


def _chunk_mask(cached, T):
    mask = causal_mask(T, cached + T)  # None for one token: it sees everything
    if mask is None:
        return _ones(1, cached + 1)
    return mask


# --- 11.4 and 11.5: how much can be kept ----------------------------------------------------------


def _two_lists(rng):
    """(cached, new): lists of few different ids, which may agree again after a difference.

    In some draws the whole new prompt is cached.
    """
    new = [rng.randint(0, 3) for _ in range(rng.randint(1, 12))]
    cached = [rng.choice((token, token, token, 9)) for token in new] + [1] * rng.randint(0, 4)
    if rng.random() < 0.3:
        cached = new + [1] * rng.randint(0, 4)
    return cached, new


def _keep(cached, new):
    return min(common_prefix(cached, new), len(new) - 1)


def _guessed(rng):
    best = [rng.randint(0, 9) for _ in range(rng.randint(2, 6))]
    return [rng.choice((token, token, token + 10)) for token in best[:-1]], best


def _accept(guesses, best):
    kept = common_prefix(guesses, best)
    return [*guesses[:kept], best[kept]]


CHECKS = (
    function(
        "11.1",
        right=_chunk_mask,
        inputs=_split,
        wrong=(
            Mistake(
                "top left",
                lambda n, T: _ones(T, n + T).tril(),
                "This begins in the top left corner: query 0 of the chunk sees key 0 only. Its own "
                "key is number `cached`.",
            ),
            Mistake(
                "square",
                lambda n, T: _ones(T, T).tril(),
                "This knows the chunk only. There is a column for every cached key too.",
            ),
            Mistake(
                "no mask",
                lambda n, T: _ones(T, n + T),
                "Within the chunk every token sees what comes after it.",
            ),
            Mistake(
                "without itself",
                lambda n, T: _ones(T, n + T).tril(n - 1),
                "A token sees itself too.",
            ),
            Mistake(
                "inverted",
                lambda n, T: ~_chunk_mask(n, T),
                "The other way round: True where a query may look.",
            ),
        ),
    ),
    value(
        "11.2",
        right=lambda case: prefilled_after_prefix(case.system, case.question, case.page),
        parameters={"system": (397, 333, 251), "question": (20, 33, 45), "page": (16, 32, 8)},
        wrong=(
            Mistake(
                "half pages",
                lambda c: c.question,
                "The system prompt does not end at the end of a page, and only full pages are "
                "kept.",
            ),
            Mistake(
                "rounded up",
                lambda c: c.system + c.question - -(-c.system // c.page) * c.page,
                "The last page of the system prompt also holds the other question, so it is not "
                "the same page.",
            ),
            Mistake("nothing reused", lambda c: c.system + c.question, "That is the whole prompt."),
        ),
        otherwise="How many full pages are there in the shared part? The rest is fed.",
    ),
    value(
        "11.3",
        right=lambda case: (case.n + 1 + case.g, case.n + 1 + case.k),
        # Never g = k + 1, for which two of the mistakes give the same numbers.
        parameters={"n": (40, 57, 33), "g": (4, 5, 6), "k": (2, 1)},
        wrong=(
            Mistake(
                "newest forgotten",
                lambda c: (c.n + c.g, c.n + c.k),
                "The newest token is fed before the guesses: it was drawn, but it has not been "
                "fed yet.",
            ),
            Mistake(
                "newest forgotten when cutting",
                lambda c: (c.n + 1 + c.g, c.n + c.k),
                "The first number is right. Then you cut off a token too many: the newest one "
                "stays as well.",
                alone=True,
            ),
            Mistake(
                "drawn token kept",
                lambda c: (c.n + 1 + c.g, c.n + 2 + c.k),
                "The first number is right. The token that the model put in place of the wrong "
                "guess has not been fed; the wrong guess is at its place.",
                alone=True,
            ),
            Mistake(
                "only accepted written",
                lambda c: (c.n + 1 + c.k, c.n + 1 + c.k),
                "The check writes all guesses. Only afterwards is it known which of them are "
                "right.",
            ),
            Mistake(
                "nothing taken back",
                lambda c: (c.n + 1 + c.g, c.n + 1 + c.g),
                "The rejected guesses would stay, and every later token would see them.",
            ),
        ),
        otherwise=(
            "Count the tokens that are fed: the newest token and all guesses. Then count how many "
            "of them are right."
        ),
    ),
    function(
        "11.4",
        right=_keep,
        inputs=_two_lists,
        use=forms.COUNT,
        wrong=(
            Mistake(
                "nothing left to feed",
                common_prefix,
                "If the whole prompt is in the cache, nothing is left to feed, and so there are no "
                "logits. One token must be fed again.",
            ),
            Mistake(
                "equal places",
                lambda a, b: min(sum(x == y for x, y in zip(a, b, strict=False)), len(b) - 1),
                "You count all places that are equal. After the first difference nothing can be "
                "kept: every later key depends on it.",
            ),
            Mistake(
                "by length",
                lambda a, b: min(len(a), len(b) - 1),
                "This assumes that the new prompt continues where the cache ends. A template may "
                "have changed it.",
            ),
        ),
    ),
    function(
        "11.5",
        right=_accept,
        inputs=_guessed,
        wrong=(
            Mistake(
                "no token of its own",
                lambda g, b: g[: common_prefix(g, b)],
                "The model's own choice after the last good guess is known too: a round adds at "
                "least one token.",
            ),
            Mistake(
                "last choice",
                lambda g, b: [*g[: common_prefix(g, b)], b[-1]],
                "The last of the choices follows the wrong guesses. Take the one after the last "
                "good guess.",
            ),
            Mistake(
                "all that agree",
                lambda g, b: [x for x, y in zip(g, b, strict=False) if x == y] + [b[-1]],
                "A guess after a wrong one was made for a different text, even if it agrees by "
                "chance.",
            ),
            Mistake(
                "the model's list",
                lambda g, b: list(b),
                "After the first wrong guess, the choices of the model are for a different text.",
            ),
        ),
    ),
)

QUESTIONS = questions("11")
