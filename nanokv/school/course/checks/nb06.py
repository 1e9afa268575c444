"""Notebook 06, the cache: its shapes, the class, the loop, the positions."""

import itertools
import random
import traceback
from typing import Any

from nanokv.school.course.checking import (
    RIGHT,
    Case,
    Mistake,
    Outcome,
    failing,
    guarded,
    judged,
    no_class,
    questions,
    result_of,
    value,
    wrong,
)


def _shapes(case, H=None, S=None):
    """Query, cached keys and scores of one decode step, after the append."""
    B = case.B
    D = case.D
    S = S or case.t
    return (B, case.H, 1, D), (B, H or case.Hk, S, D), (B, case.H, 1, S)


# --- 06.3: a class with append --------------------------------------------------------------------


def _judge_class(answer, case):
    """Try two small appends, which identify the usual mistakes; then the public equality suite."""
    from nanokv.lab.study import equality

    outcome = no_class(answer) or _two_appends(answer)
    if outcome:
        return outcome
    failed = failing(equality.check(answer, stop=True))
    if failed:
        return wrong(f"compared with the model without a cache, {failed}", "differs")
    return RIGHT


@guarded
def judge_quickly(answer: Any, case: Case) -> Outcome:
    """A quick replacement of the suite: a prompt in two chunks and a decode in a small model."""
    from nanokv.inference import decode, prefill, score
    from nanokv.lab.study import equality

    outcome = no_class(answer) or _two_appends(answer)
    if outcome:
        return outcome
    model = equality.small_model()
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    cache = equality.maker(answer)(model.config, 1, None)
    prefill(model, [ids[:4]], cache, start_pos=0)
    prefill(model, [ids[4:7]], cache, start_pos=4)
    logits = decode(model, [ids[7:]], cache, start_pos=7)  # (1,V)
    gap = float((logits - score(model, [ids])[:, -1]).abs().max())
    if gap >= equality.TOLERANCE:
        return wrong(f"the logits are off by {gap:.0e}")
    return RIGHT


def _two_appends(make):
    """Append two tokens in turn: an Outcome unless both come back, the older one first."""
    import torch

    k, v = torch.arange(2 * 3 * 2 * 5.0).reshape(2, 1, 3, 2, 5)  # (B,Hk,T,D) = (1,3,2,5) each
    layer = make()
    for part in (slice(0, 1), slice(1, 2)):
        returned = result_of(layer.append, k[:, :, part], v[:, :, part])
    pair = returned if isinstance(returned, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(part, torch.Tensor) for part in pair):
        return wrong("append returns two tensors, the keys and the values: return keys, values")
    keys, values = pair
    axes = [axis for axis in range(4) if keys.shape[axis] != k.shape[axis]]
    if keys.shape[2] == 1 and not [axis for axis in axes if axis != 2]:
        return wrong(
            "append returns the new token only. Attention needs everything so far.", "only new"
        )
    if axes:
        name = {0: "the batch", 1: "the KV heads", 2: "the tokens", 3: "the head size"}[axes[0]]
        return wrong(
            f"after two tokens the keys have shape {tuple(keys.shape)}: axis {axes[0]} is {name}",
            "axis",
        )
    if torch.equal(keys, v) and torch.equal(values, k):
        return wrong("keys and values come back in each other's place", "swapped")
    if torch.equal(keys[:, :, :1], k[:, :, 1:]):
        return wrong(
            "the new token comes before the old ones. One query would not notice; a chunk would.",
            "order",
        )
    if not (torch.equal(keys, k) and torch.equal(values, v)):
        return wrong("the numbers that come back are not those that went in", "values")
    if layer.length != 2:
        return wrong(f"length is {layer.length} after 2 tokens: it is the next start_pos", "length")
    if make().append(k, v)[0].shape[2] != 2:
        return wrong(
            "a second object finds the tokens of the first: they share one store", "shared"
        )
    return None


# --- 06.4: the loop -------------------------------------------------------------------------------


def _judge_loop(answer, case):
    """Compare the tokens with nanokv.generate, and the rows fed with the fewest possible."""
    import torch

    from nanokv.decoding.generation import generate

    rng = random.Random("06.4")
    for P, n in ((1, 1), (5, 6), (12, 9)):
        ids = torch.tensor([[rng.randrange(case.config.vocab_size) for _ in range(P)]])
        given, rows, borrowed = _watched(
            case.model, lambda ids=ids, n=n: answer(case.model, ids, n), P + n + 1
        )
        if borrowed:
            return wrong(
                "that loop is nanokv's own: write yours, with nanokv.prefill and nanokv.decode",
                "borrowed",
            )
        expected = list(generate(case.model, ids, max_new_tokens=n, eos_token_ids=[]))
        outcome = _loop_outcome(
            [int(token) for token in given], expected, ids[0].tolist(), rows, P, n
        )
        if outcome:
            return outcome
    return RIGHT


def _watched(model, call, most):
    """Run call() and watch the model.

    Returns (at most `most` tokens that it returned or yielded, rows of each forward, was nanokv's
    own loop used?).
    """
    import torch

    from nanokv.decoding import generation

    rows: list[int] = []
    callers: set[str] = set()

    def seen(module, args):
        rows.append(args[0].shape[1])  # (B,T,C)
        callers.update(frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))

    hook = model.layers[0].register_forward_pre_hook(seen)
    try:
        given = result_of(call)
        if isinstance(given, torch.Tensor):
            given = given.flatten().tolist()
        # A generator runs here, and may never end.
        given = result_of(list, itertools.islice(given, most))
    finally:
        hook.remove()
    return given, rows, generation.__file__ in callers


def _loop_outcome(given, expected, prompt, rows, P, n):
    if given == prompt + expected:
        return wrong("return the new tokens only, without the prompt", "with prompt")
    if len(given) != n:
        many = "more" if len(given) > len(prompt) + n else f"{len(given)}"
        return wrong(f"tokens asked for: {n}, given: {many}", "count")
    if given != expected:
        at = next(i for i, (a, b) in enumerate(zip(given, expected, strict=True)) if a != b)
        return wrong(
            f"token {at} is {given[at]}, but greedy decoding gives {expected[at]}", "tokens"
        )
    if sum(rows) == P + n:
        return wrong(
            "the tokens are right, but you fed the last one too: N − 1 decodes are enough",
            "last token fed",
        )
    if sum(rows) != P + n - 1:
        return wrong(
            f"the tokens are right, but {sum(rows)} rows were fed where {P + n - 1} are enough",
            "rows",
        )
    if rows != [P] + [1] * (n - 1):
        pieces = (
            f"{P} tokens of prompt and {n} new ones took {len(rows)} forwards where {n} are enough"
        )
        return wrong(
            f"the tokens are right, but {pieces}: one prefill takes the whole prompt",
            "prompt in pieces",
        )
    return None


CHECKS = (
    value(
        "06.1",
        right=_shapes,
        parameters={"B": (2, 3, 1), "H": (4, 8, 6), "Hk": (2, 1), "D": (16, 32), "t": (5, 7, 9)},
        wrong=(
            Mistake(
                "query heads cached",
                lambda c: _shapes(c, H=c.H),
                "The cache has Hk heads, not H: grouped queries share keys.",
            ),
            Mistake(
                "before the append",
                lambda c: _shapes(c, S=c.t - 1),
                "That is before the append. The new token attends to itself, so its key is there "
                "too.",
            ),
            Mistake(
                "tokens before heads",
                lambda c: ((c.B, 1, c.H, c.D), (c.B, c.t, c.Hk, c.D), (c.B, c.H, 1, c.t)),
                "That is the order before the heads are moved to the front: attention takes (B, "
                "heads, tokens, D).",
            ),
            Mistake(
                "keys with tokens before heads",
                lambda c: ((c.B, c.H, 1, c.D), (c.B, c.t, c.Hk, c.D), (c.B, c.H, 1, c.t)),
                "The cached keys are (B, heads, tokens, D), as the query is: heads come before "
                "tokens.",
            ),
            Mistake(
                "scores per KV head",
                lambda c: (*_shapes(c)[:2], (c.B, c.Hk, 1, c.t)),
                "Each query head has its own scores, even where several share the keys of a KV "
                "head.",
            ),
            Mistake(
                "square scores",
                lambda c: (*_shapes(c)[:2], (c.B, c.H, c.t, c.t)),
                "There is one query, so the scores have one row.",
            ),
            Mistake(
                "all queries",
                lambda c: ((c.B, c.H, c.t, c.D), (c.B, c.Hk, c.t, c.D), (c.B, c.H, c.t, c.t)),
                "That is a forward without a cache: a decode step has one query row.",
            ),
        ),
        otherwise="Go through the three in turn: which heads, how many rows, how wide.",
    ),
    value(
        "06.2",
        right=lambda case: (case.P + case.N - 1, case.M + 1),
        parameters={"P": (20, 30, 41), "N": (8, 12, 5), "M": (10, 6, 15)},
        wrong=(
            Mistake(
                "all fed",
                lambda c: (c.P + c.N, c.M),
                "The last token of the answer was never fed, so the cache does not hold it. It is "
                "fed now.",
            ),
            Mistake(
                "from zero",
                lambda c: (0, c.P + c.N + c.M),
                "That throws away the cache of the first turn.",
            ),
            Mistake(
                "answer not cached",
                lambda c: (c.P, c.N + c.M),
                "The tokens of the answer were fed one by one, all but the last: they are in the "
                "cache.",
            ),
            Mistake(
                "last token lost",
                lambda c: (c.P + c.N - 1, c.M),
                "The start is right. But then the last token of the answer would never be fed.",
                alone=True,
            ),
        ),
        otherwise=(
            "How many tokens does the cache hold after the first turn? Which have not been fed yet?"
        ),
    ),
    judged("06.3", _judge_class),
    judged("06.4", _judge_loop),
)

QUESTIONS = questions("06")
