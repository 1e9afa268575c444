"""Notebook 07, the bug hunt: find a fault in a trace, count bytes, write a test, mend a cache."""

import itertools
from typing import TYPE_CHECKING

from nanokv.school.course import checking
from nanokv.school.course.checking import (
    UNANSWERED,
    Mistake,
    Outcome,
    function,
    judged,
    questions,
    wrong,
)
from nanokv.school.course.feedback import line
from nanokv.school.course.trials import tensor

if TYPE_CHECKING:
    from nanokv.school.course.checking import Case

WANTED = 16  # faults that the test of exercise 07.4 has to kill
SECONDS = 20  # for one run of that test; the model is small

# --- 07.1: the position of a key ------------------------------------------------------------------


def _rotated(config, key, position):
    import torch

    from nanokv.rope import apply_rope, rope_angles

    return apply_rope(key, rope_angles(config, torch.tensor([position]), key.dtype))


def _key(rng):
    """(config, key, the key rotated to a position below 100), each key (1,1,1,D)."""
    from nanokv.lab.study.equality import small_model

    config = small_model().config
    key = tensor(rng, 1, 1, 1, config.head_dim)
    return config, key, _rotated(config, key, rng.randint(0, 99))


def _position_of(config, key, rotated):
    return min(range(100), key=lambda p: float((_rotated(config, key, p) - rotated).abs().max()))


# --- 07.2: name the fault -------------------------------------------------------------------------

FAMILIES = {
    "The inputs of attention are right, its output is not. Which tokens of the second chunk are "
    "wrong, the last one too? And the single tokens after it?": (
        "no_mask_on_chunk",
        "top_left_mask",
        "cached_before_rope",
    ),
    "Positions are wrong, yes. By how much? Your function of 07.1 gives the position of a key.": (
        "start_pos_off_by_one",
        "start_pos_advanced_twice",
        "start_pos_restarts",
    ),
    "The first key is wrong already. Only that of token 0, or all of them, and by how much?": (
        "first_token_unwritten",
        "rounded_to_bf16",
        "last_layer_closure",
    ),
}
SUSPECTS = tuple(sorted(name for family in FAMILIES.values() for name in family))


def trace(case: "Case") -> tuple[list, list]:
    """The forward passes (nanokv.debug.Pass) of a correct run, and of one with the case's fault.

    In both runs a random model reads the same prompt of 24 tokens in chunks of 8, then the same
    three single tokens.
    """
    from nanokv.lab import faults
    from nanokv.lab.faults.diagnosis import random_prompts
    from nanokv.lab.study.debug import watch
    from nanokv.lab.study.equality import small_model

    model = small_model()
    run = faults.SCENARIOS["chunked"]
    prompts = random_prompts(model)
    answer = [[5, 6, 7, 8]]
    with watch(model) as right:
        run(model, prompts, answer)
    with faults.inject(case.fault), watch(model) as seen:
        run(model, prompts, answer)
    return right, seen


def _judge_name(answer, case):
    name = str(answer).strip()
    if name not in SUSPECTS:
        return wrong(f"answer with one of the names {', '.join(SUSPECTS)}")
    if name == case.fault:
        return Outcome("right")
    hint = next(hint for hint, family in FAMILIES.items() if case.fault in family)
    if name in FAMILIES[hint]:
        return wrong(f"You are near. {hint}", "same family")
    return wrong(
        "That one would show elsewhere. Which operation of layer 0 differs first, and at which "
        "token?",
        "elsewhere",
    )


# --- 07.4: a test, graded by the faults that it finds ---------------------------------------------


def _judge_test(test, case):
    from nanokv.lab import faults

    if not callable(test):
        return wrong("hand in the function itself, without calling it")

    returned: list = []
    raised: list[str] = []

    def finished(model):
        try:
            returned.append(test(model))
        except BaseException as error:  # pytest.fail does not raise an Exception
            raised.append(line(error))
            raise
        if returned[-1] is ...:
            raise NotImplementedError

    grade = faults.grade(finished, seconds=SECONDS)
    if grade.false_alarm.startswith(NotImplementedError.__name__):
        return UNANSWERED
    if grade.false_alarm:
        return wrong("\n    ".join([str(grade), *filter(None, raised[:1])]), "false alarm")
    if len(grade.kills) < WANTED and any(isinstance(one, bool) for one in returned):
        return wrong(
            "it returns True or False, which is ignored: raise where something is wrong, as "
            "`assert` does",
            "returned",
        )
    if grade.note:
        return wrong(grade.note, "vacuous")
    if len(grade.kills) < WANTED:
        return wrong(f"{WANTED} are wanted. {grade}", "survivors")
    return Outcome("right", str(grade))


# --- 07.5: a cache to be mended -------------------------------------------------------------------


def _judge_cache(answer, case):
    from nanokv.lab.study import equality

    outcome = checking.no_class(answer)
    if outcome:
        return outcome
    report = equality.check(answer)
    if not report.passed:
        failed = sum(one.status == "failed" for one in report.cases)
        return wrong(
            f"{failed} cases fail. The first to mend is {checking.failing(report)}", "differs"
        )
    dropped = [
        one.name
        for one in report.cases
        if one.status == "not offered" and not one.name.startswith(OPTIONAL)
    ]
    if dropped:
        return wrong(
            f"nothing fails, but the broken one could do more: {'; '.join(dropped)}", "not offered"
        )
    moves = _moves(answer())
    if moves > APPENDS // 2:
        return wrong(
            f"the cases pass, but {APPENDS} tokens moved the keys {moves} times: write in place",
            "moved",
        )
    return Outcome("right", str(report).splitlines()[-1])


def _moves(layer) -> int:
    """How often the keys are at another address after an append of one token.

    A few moves are fine: a cache may exchange its block now and then.
    """
    import torch

    one = torch.zeros(1, 2, 1, 6)  # (B,Hk,T,D)
    # All results are kept, so that no memory is reused.
    kept = [layer.append(one, one)[0] for _ in range(APPENDS + 1)]
    return sum(a.data_ptr() != b.data_ptr() for a, b in itertools.pairwise(kept))


APPENDS = 40
OPTIONAL = (
    "A cache loaded from a file",
    "32 tokens take",
)  # cases of save and nbytes, which are not asked for

CHECKS = (
    function(
        "07.1",
        right=_position_of,
        inputs=_key,
        wrong=(
            Mistake(
                "counted from 1",
                lambda *a: _position_of(*a) + 1,
                "One too many: positions are counted from 0.",
            ),
            Mistake(
                "first is nearest",
                lambda *a: 0,
                "Always 0: are you comparing the rotated key with itself?",
            ),
        ),
        trials=20,
    ),
    judged(
        "07.2",
        _judge_name,
        {"fault": ("no_mask_on_chunk", *SUSPECTS)},
        key=lambda case: case.fault,
        hidden=True,
        choices=lambda case: SUSPECTS,
    ),
    function(
        "07.3",
        right=lambda H, Hk: ((H + 2 * Hk) / (2 * Hk), H / Hk),
        inputs=lambda rng: (lambda Hk: (Hk * rng.randint(2, 8), Hk))(rng.randint(1, 8)),
        wrong=(
            Mistake(
                "as if H = Hk",
                lambda H, Hk: (1.5, H / Hk),
                "One and a half times would be right if there were as many query heads as KV "
                "heads.",
            ),
            Mistake(
                "one of K and V",
                lambda H, Hk: ((H + Hk) / Hk, H / Hk),
                "The right cache holds keys and values: 2·Hk heads per layer, not Hk.",
            ),
            Mistake(
                "swapped",
                lambda H, Hk: (H / Hk, (H + 2 * Hk) / (2 * Hk)),
                "Right numbers in the wrong order.",
                alone=True,
            ),
            Mistake(
                "one more copy",
                lambda H, Hk: ((H + 2 * Hk) / (2 * Hk), H / Hk + 1),
                "The repeated heads replace the Hk that there were: H of them, no more.",
            ),
        ),
    ),
    judged("07.4", _judge_test),
    judged("07.5", _judge_cache),
)

QUESTIONS = questions("07")
