"""Notebook 16, the step on a GPU: a norm, pages, a softmax in parts, the merge, recorded inputs.

Kernels run in Triton's interpreter, which is imported when the first of them is judged. Without
Triton these exercises stay unanswered, with a message that says why.
"""

import copy
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nanokv.school.course import feedback
from nanokv.school.course.answers import is_stub, plain
from nanokv.school.course.checking import (
    CALLED,
    RIGHT,
    Mistake,
    Outcome,
    Told,
    judged,
    questions,
    value,
    wrong,
)

if TYPE_CHECKING:
    import torch

    from nanokv.school.course.own_inputs import Inputs

# Numbers on either side of a kernel's tensors, so that a wrong address stays inside our memory.
GUARD = 4096
EMPTY = -12345.0  # the value of numbers that were not written


def kernels() -> ModuleType:
    """nanokv's own kernels. Raises Told where they cannot run."""
    from nanokv.school.course import own_kernels

    if not own_kernels.here:
        raise Told(Outcome("unanswered", own_kernels.WHY_NOT))
    return own_kernels


def check_kernel(answer: Any) -> None:
    """Raise Told if an answer is not a kernel, NotImplementedError if it is still the stub."""
    if not hasattr(answer, "fn"):
        said = CALLED.format(answer)
        if callable(answer) and not isinstance(answer, type):
            said = "Write @triton.jit above your def"
        raise Told(wrong(said, "no kernel"))
    if any(is_stub(constant) for constant in answer.fn.__code__.co_consts):
        raise NotImplementedError


def launch(own: ModuleType, returns: str, *arguments: Any) -> None:
    """own.launch. Raises Told if the result of the learner's function cannot be unpacked."""
    try:
        own.launch(*arguments)
    except (TypeError, ValueError) as error:
        if feedback.line(error) or "argument" in str(error):
            raise
        raise Told(wrong(f"Your function returns something else: {returns}", "form")) from None


def guarded(tensor: "torch.Tensor", fill: float) -> "tuple[torch.Tensor, torch.Tensor]":
    """A copy of a tensor in the middle of a larger memory → (the copy, the memory)."""
    memory = tensor.new_full((2 * GUARD + tensor.numel(),), fill)
    view = memory[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor), memory


def untouched(memory: "torch.Tensor", view: "torch.Tensor") -> bool:
    """Is the memory around the view unchanged?"""
    around = memory[:GUARD], memory[GUARD + view.numel() :]
    return all(bool((part == EMPTY).all()) for part in around)


def near(a: "torch.Tensor", b: "torch.Tensor") -> bool:
    import torch

    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5, equal_nan=True)


def short(numbers: Any) -> str:
    """Numbers to four digits."""
    digits = plain(numbers)
    if isinstance(digits, list):
        return f"[{', '.join(map(short, digits))}]"
    return f"{digits:.4g}"


def other_row(out: "torch.Tensor", right: "torch.Tensor", begins: str) -> Outcome:
    """The Outcome for the first wrong row. `begins`: where the numbers of a row begin, in words."""
    row = next(i for i in range(len(out)) if not near(out[i], right[i]))
    said = f"Row {row} is {short(out[row])}, but it should be {short(right[row])}"
    if row == 0:
        return wrong(said)
    return wrong(f"Row 0 is right, and row {row} is not: {begins}. {said}", "other rows")


def nothing_written(answer: Any) -> Outcome:
    """The Outcome for a kernel that stores nothing; NotImplementedError for an untouched stub."""
    if not answer.fn.__code__.co_names:
        raise NotImplementedError
    return wrong(
        "Nothing was written to y: a kernel returns nothing, write with tl.store", "no store"
    )


# --- 16.1: RMSNorm --------------------------------------------------------------------------------

EPS = 0.3  # large, so that its place in the formula matters


def _norms(x, weight, memory, C, BLOCK):
    """{mistake: the numbers that a kernel with it writes} for rows of C numbers."""
    import torch

    square = x.pow(2).sum(-1, keepdim=True)
    wide = torch.stack([memory[GUARD + r * C :][:BLOCK].pow(2).sum() for r in range(len(x))])[
        :, None
    ]
    centred = x - x.mean(-1, keepdim=True)
    root = (square / C + EPS).sqrt()
    return {
        "right": weight * x / root,
        "no mask": weight * x / (wide / C + EPS).sqrt(),
        "padding counted": weight * x / (square / BLOCK + EPS).sqrt(),
        "sum": weight * x / (square + EPS).sqrt(),
        "no eps": weight * x / (square / C).sqrt(),
        "eps outside": weight * x / ((square / C).sqrt() + EPS),
        "no weight": x / root,
        "upside down": weight * x * root,
        "no root": weight * x / (square / C + EPS),
        "mean subtracted": weight * centred / (centred.pow(2).mean(-1, keepdim=True) + EPS).sqrt(),
    }


NORM_SLIPS = (  # the outcomes of the slips of _norms
    wrong(
        "The numbers behind the row are counted too: load with a mask, and 0 where it is off",
        "no mask",
    ),
    wrong(
        "The mean is over the C numbers of the row, not over the BLOCK that are loaded",
        "padding counted",
    ),
    wrong("That is the sum of the squares: their mean is wanted, divide by C", "sum"),
    wrong("eps is missing under the root", "no eps"),
    wrong("eps belongs under the root, added to the mean", "eps outside"),
    wrong("Each number is also multiplied with its weight", "no weight"),
    wrong("Divide by the root: you multiplied with it", "upside down"),
    wrong("The root is missing: you divided by the mean of the squares", "no root"),
    wrong("That is LayerNorm: RMSNorm subtracts no mean", "mean subtracted"),
)


def _judge_norm(answer, case):
    import torch

    own = kernels()
    check_kernel(answer)
    for N, C in ((1, 8), (3, 8), (3, 6), (2, 48)):
        source = torch.Generator().manual_seed(C)
        x, memory = guarded(torch.randn(N, C, generator=source) + 1, 3.0)
        weight, _ = guarded(torch.randn(C, generator=source), 3.0)
        out, written = guarded(torch.full((N, C), EMPTY), EMPTY)
        own.norm(answer, x, weight, EPS, out=out)
        BLOCK = own.triton.next_power_of_2(C)
        if bool((written == EMPTY).all()):
            return nothing_written(answer)
        outcome = _norm_outcome(out, written, _norms(x, weight, memory, C, BLOCK))
        if outcome is not None:
            return outcome
    return RIGHT


def _norm_outcome(out, written, slips):
    """An Outcome for the numbers that were written; None if they are right."""
    if len(out) > 1 and bool((out[1:] == EMPTY).all()):
        return wrong(
            "Only the first row is written. There is a program for each row: tl.program_id(0) says "
            "which. Its mask is about the columns",
            "one row",
        )
    name = next((name for name, slip in slips.items() if near(out, slip)), "")
    if name == "right" and untouched(written, out):
        return None
    if name == "right":
        return wrong(
            "Right, but numbers behind the last row are overwritten: store with the mask",
            "store unmasked",
        )
    for outcome in NORM_SLIPS:
        if outcome.mistake == name:
            return outcome
    return other_row(
        out,
        slips["right"],
        "a row of x and y begins at row · C, and the weight is the same for all",
    )


# --- 16.2: how many parts -------------------------------------------------------------------------


def _splits(c, heads="Hk", up=True):
    """(programs without a split, parts per row that keep all processors busy: a power of two)."""
    programs = c.B * getattr(c, heads)
    splits = 1
    while programs * splits < c.processors:
        splits *= 2
    if not up:
        splits //= 2
    return programs, splits


# --- 16.3: pages ----------------------------------------------------------------------------------

UNSEEN = 77  # the value of the memory after a table


def _judge_place(answer, case):
    import torch

    own = kernels()
    check_kernel(answer)
    for table, end, first, SIZE in (
        ([5, 0, 9], 12, 0, 4),
        ([3, 8, 1, 6], 27, 8, 8),
        ([2], 3, 0, 16),
    ):
        entries, _ = guarded(torch.tensor(table, dtype=torch.int32), UNSEEN)
        token = first + torch.arange(16, dtype=torch.int32)
        pages, slots = (torch.full((16,), -1, dtype=torch.int32) for _ in "ps")
        arguments = entries, token, pages, slots, end, answer, SIZE, 16
        launch(own, "return pages, slots", own.place_kernel, (1,), *arguments)
        outcome = _place_outcome(table, token, end, SIZE, pages, slots)
        if outcome is not None:
            return outcome
    return RIGHT


def _place_outcome(table, token, end, SIZE, pages, slots):
    import torch

    seen = token < end
    at = (token // SIZE)[seen].long()
    page = torch.tensor(table)[at]
    slot = (token % SIZE)[seen]
    got = pages[seen].long(), slots[seen].long()
    if near(got[0], page) and near(got[1], slot):
        if bool((pages[~seen] == UNSEEN).any()):
            return wrong(
                "Right, but memory behind the table is read for tokens that are not seen: load "
                "with the mask `seen`",
                "no mask",
            )
        return None
    if near(got[0], slot) and near(got[1], page):
        return wrong("First the page, then the slot", "swapped")
    if near(got[0], at) and near(got[1], slot):
        return wrong(
            "That is the place in the table: the table has the number of the page there", "no table"
        )
    if near(got[0], page) and near(got[1], token[seen]):
        return wrong("The slot counts from the beginning of the page", "token as slot")
    entries = torch.tensor([*table, *[UNSEEN] * len(token)])  # with the memory after the table
    if near(got[0], entries[token[seen].long().clamp(max=len(entries) - 1)]):
        return wrong("The table has an entry per page, and not per token", "entry per token")
    return wrong(
        f"With pages of {SIZE} and the table {table}, the tokens {plain(token[seen])} are in pages "
        f"{plain(page)}, slots {plain(slot)}; yours says pages {plain(got[0])}, slots "
        f"{plain(got[1])}"
    )


# --- 16.4: a softmax, block by block --------------------------------------------------------------


def _folded(
    scores, values, own=False, flat=False, shrink_total=True, shrink_mixed=True, turned=False
):
    """(highest, total, mixed) after all blocks (n,BLOCK); the switches introduce mistakes."""
    import torch

    highest = torch.tensor(-torch.inf)
    total = torch.tensor(0.0)
    mixed = torch.zeros(values.shape[-1])
    for s, v in zip(scores, values, strict=True):
        higher = torch.maximum(highest, s.max())
        if own:
            higher = s.max()
        if flat:
            higher = torch.tensor(0.0)
        shrink = (highest - higher).exp()
        if turned:
            shrink = (higher - highest).exp()
        if flat:
            shrink = torch.tensor(1.0)
        if shrink_total:
            total = total * shrink
        if shrink_mixed:
            mixed = mixed * shrink
        share = (s - higher).exp()
        total = total + share.sum()
        mixed = mixed + share @ v
        highest = higher
    return highest, total, mixed


FOLD_SLIPS = (  # (slip of _folded, its outcome)
    (
        {"shrink_total": False, "shrink_mixed": False},
        wrong(
            "The earlier sums used a lower highest score: multiply total and mixed by exp(highest "
            "− higher)",
            "no shrink",
        ),
    ),
    (
        {"shrink_mixed": False},
        wrong(
            "`mixed` was added up with the old highest score too: shrink it as `total`",
            "mixed not shrunk",
        ),
    ),
    (
        {"shrink_total": False},
        wrong(
            "`total` was added up with the old highest score too: shrink it as `mixed`",
            "total not shrunk",
        ),
    ),
    (
        {"own": True},
        wrong(
            "The highest score is that of all blocks so far, not of this block alone: a later "
            "block may be lower",
            "own highest",
        ),
    ),
    (
        {"turned": True},
        wrong("exp(higher − highest) grows: it is the other way round", "upside down"),
    ),
)


def _judge_fold(answer, case):
    import torch

    own = kernels()
    check_kernel(answer)
    for blocks, size, falling in (
        (1, 1.0, False),
        (3, 3.0, False),
        (3, 3.0, True),
        (3, 200.0, False),
    ):
        source = torch.Generator().manual_seed(blocks)
        scores = (torch.rand(blocks, 8, generator=source) * size).sort(0, falling)[0]
        scores[-1, 5:] = -torch.inf  # not seen
        values = torch.randn(blocks, 8, 4, generator=source)
        found = torch.full((2,), torch.nan)
        mixed = torch.full((4,), torch.nan)
        arguments = scores, values, found, mixed, blocks, answer, 8, 4
        launch(own, "return highest, total, mixed", own.fold_kernel, (1,), *arguments)
        count = "1 block" if blocks == 1 else f"{blocks} blocks"
        outcome = _fold_outcome(
            (found[0], found[1], mixed), partial(_folded, scores, values), count
        )
        if outcome is not None:
            return outcome
    return RIGHT


def _fold_outcome(got, folded, count):
    """An Outcome for a wrong state after `count` ("3 blocks")."""

    def is_(**slip) -> bool:
        return all(near(a, b) for a, b in zip(got, folded(**slip), strict=True))

    if is_():
        return None
    for slip, outcome in FOLD_SLIPS:
        if is_(**slip):
            return outcome
    right = folded()
    flat = folded(flat=True)
    if near(got[1], flat[1]) or (near(got[0], right[0]) and not bool(got[1].isfinite())):
        return wrong(
            "exp of a large score is infinite: subtract the highest score first", "no highest"
        )
    if near(got[0], right[1]) and near(got[1], right[0]):
        return wrong("First the highest score, then the total", "swapped")
    if near(got[1], right[1]) and near(got[2], right[2] / right[1]):
        return wrong(
            "`mixed` is divided by the total already. The kernel does that once, at the end",
            "divided",
        )
    named = zip(("highest", "total", "mixed"), got, right, strict=True)
    off = [(name, mine, theirs) for name, mine, theirs in named if not near(mine, theirs)]
    said = (
        f"{name} is {short(mine)}, but it should be {short(theirs)}" for name, mine, theirs in off
    )
    return wrong(f"After {count}: {'; '.join(said)}")


# --- 16.5: the merge ------------------------------------------------------------------------------


MERGE_SLIPS = (  # (sums → weights of the parts with this mistake, its outcome)
    (
        lambda sums: sums.softmax(-1),
        wrong(
            "Right, but numbers behind the result are overwritten: store where d < D",
            "store unmasked",
        ),
    ),
    (
        lambda sums: sums.new_ones(sums.shape) / sums.shape[-1],
        wrong(
            "That is the mean: a part counts as much as the exponentials that it has added up",
            "mean",
        ),
    ),
    (
        lambda sums: sums.new_ones(sums.shape),
        wrong("That is the sum of the parts: each has a weight, and these add up to 1", "sum"),
    ),
    (
        lambda sums: sums / sums.sum(-1, keepdim=True),
        wrong("Those are logarithms: the weight of a part is exp(lse)", "weighted by lse"),
    ),
    (
        lambda sums: (sums - sums.max(-1, keepdim=True)[0]).exp(),
        wrong("The weights have to add up to 1: divide by their sum", "not divided"),
    ),
)


def _judge_merge(answer, case):
    import torch

    own = kernels()
    check_kernel(answer)
    for splits, shift in ((1, 0.0), (2, 0.0), (4, 500.0)):
        source = torch.Generator().manual_seed(splits)
        parts = torch.randn(1, 3, splits, 6, generator=source)
        sums = torch.rand(1, 3, splits, generator=source) * 4 + 0.5 + shift
        if splits == 4:
            sums[0, 1, 3] = -torch.inf  # a part without tokens
            parts[0, 1, 3] = 0
        out, written = guarded(torch.full((1, 3, 6), EMPTY), EMPTY)
        BLOCK = own.triton.next_power_of_2(6)
        own.launch(
            answer, (3,), guarded(parts, 3.0)[0], guarded(sums, 3.0)[0], out, 6, splits, BLOCK
        )
        if bool((written == EMPTY).all()):
            return nothing_written(answer)
        outcome = _merge_outcome(out, written, parts, sums)
        if outcome is not None:
            return outcome
    return RIGHT


def _merge_outcome(out, written, parts, sums):
    """An Outcome for a wrong result of the merge."""

    def mixed(share):
        return (parts * share[..., None]).sum(2)

    right = mixed(sums.softmax(-1))
    if near(out, right) and untouched(written, out):
        return None
    for weights, outcome in MERGE_SLIPS:
        if near(out, mixed(weights(sums))):
            return outcome
    return _unmerged(out) or other_row(
        out[0],
        right[0],
        "the sums of a row begin at row · SPLITS, its parts at row · SPLITS · D, and y at row · D",
    )


def _unmerged(out):
    """An Outcome for rows that were not written, or are not finite."""
    if bool((out[:, 1:] == EMPTY).all()):
        return wrong(
            "Only the first row is written: there is a program for each, and tl.program_id(0) says "
            "which",
            "one row",
        )
    if not bool(out.isfinite().all()):
        return wrong(
            "exp of a large log-sum-exp is infinite: subtract the largest one first", "no highest"
        )
    return None


# --- 16.6: the inputs of a recording --------------------------------------------------------------


def fill(
    inputs: "Inputs", tokens: list[int], positions: list[int], tables: list[list[int]]
) -> None:
    """nanokv's answer: write other values to the same addresses."""
    import torch

    b = len(tokens)
    inputs.tokens[:b] = torch.tensor(tokens)
    inputs.positions[:b] = torch.tensor(positions)
    inputs.lengths.zero_()
    inputs.lengths[:b] = torch.tensor(positions) + 1
    for row, table in enumerate(tables):
        inputs.table[row, : len(table)] = torch.tensor(table)


FIELDS = ("tokens", "positions", "lengths", "table")
# (tokens, positions, tables) of consecutive steps
STEPS = (
    ([7], [4], [[2, 5]]),
    ([9, 8, 3], [5, 0, 17], [[2, 5], [1], [6, 0, 4]]),
    ([1, 6], [1, 18], [[1], [6, 0, 4]]),
)


def _judge_fill(answer, case):
    from nanokv.school.course.own_inputs import Inputs

    inputs = Inputs(4, 3)
    before = {name: getattr(inputs, name).data_ptr() for name in FIELDS}
    for step in STEPS:
        given = copy.deepcopy(step)
        if answer(inputs, *given) is ...:
            raise NotImplementedError
        if given != step:
            return wrong(
                "You changed the lists that you were given. They are read again: the tables are "
                "those of the caches. Write into the tensors only",
                "lists changed",
            )
        outcome = _filled(inputs, before, *step)
        if outcome is not None:
            return outcome
    return RIGHT


def _filled(inputs, before, tokens, positions, tables):
    """An Outcome for an input with wrong values, or at another address."""
    b = len(tokens)
    for name in FIELDS:
        if getattr(inputs, name).data_ptr() != before[name]:
            return wrong(
                f"inputs.{name} is another tensor now. The recording reads the old address: write "
                "into it, as in inputs.tokens[:b] = …",
                "new tensor",
            )
    if inputs.lengths[:b].tolist() == positions:
        return wrong(
            "The lengths count the new token too: it sees itself, so positions + 1",
            "new token not counted",
        )
    if any(inputs.lengths[b:].tolist()):
        return wrong(
            f"{b} rows are asked for, and the lengths are {inputs.lengths.tolist()}: a row of the "
            "step before would go on. The others see 0 tokens",
            "old rows",
        )
    expected = {"tokens": tokens, "positions": positions, "lengths": [p + 1 for p in positions]}
    for name, numbers in expected.items():
        if getattr(inputs, name)[:b].tolist() != numbers:
            given = getattr(inputs, name)[:b].tolist()
            return wrong(f"inputs.{name}[:{b}] is {given}, but it should be {numbers}")
    for row, table in enumerate(tables):
        if inputs.table[row, : len(table)].tolist() != table:
            given = inputs.table[row, : len(table)].tolist()
            return wrong(f"inputs.table[{row}] begins {given}, but it should be {table}", "table")
    return None


CHECKS = (
    judged("16.1", _judge_norm),
    value(
        "16.2",
        right=_splits,
        parameters={
            "B": (1, 3),
            "H": (24, 40),
            "Hk": (8, 4),
            "processors": (132, 108),
        },
        wrong=(
            Mistake(
                "query heads",
                lambda c: _splits(c, heads="H"),
                "Here one program serves all query heads that share a KV head, so that their keys "
                "are read once.",
            ),
            Mistake(
                "one too few",
                lambda c: _splits(c, up=False),
                "With so many parts there are fewer programs than processors.",
            ),
            Mistake(
                "no power of two",
                lambda c: (c.B * c.Hk, -(-c.processors // (c.B * c.Hk))),
                "A power of two was asked for: the next larger one.",
            ),
            Mistake(
                "programs in all",
                lambda c: (c.B * c.Hk * _splits(c)[1], _splits(c)[1]),
                "The second number is right. The first is without a split.",
                alone=True,
            ),
            Mistake(
                "swapped",
                lambda c: _splits(c)[::-1],
                "Right numbers, wrong order: first the programs without a split.",
                alone=True,
            ),
        ),
        otherwise="A program per row and KV head; then double the parts until there are enough.",
    ),
    judged("16.3", _judge_place),
    judged("16.4", _judge_fold),
    judged("16.5", _judge_merge),
    judged("16.6", _judge_fill),
)

QUESTIONS = questions("16")
