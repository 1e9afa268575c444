"""The evidence of two models → a list of checks, each with its difference, its tolerance and
details.

Differences are max |Δ|. The tolerance of tensors is the dtype's tolerance times the size of the
values (study.debug.Step). Greedy tokens must be equal, except that either token may win where two
logits are closer than the tolerance.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from nanokv.lab.study.debug import TOLERANCE, Key, Step, compare
from nanokv.lab.verify.evidence import Evidence, Questions

# Factor on the tolerance for cached against uncached: other matrix shapes sum in another order.
# Measured at the shapes of Qwen3-0.6B with random weights of size 0.06, the worst of 28 layers:
# 9e-6 × the values' size in fp32, 6e-2 in bf16.
CACHED = 5
# Fields about how weights are stored. They are no check, because the tensors are compared anyway.
HINT_ONLY = {"torch_dtype", "tie_word_embeddings"}


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    status: str  # ok | differs | skipped
    detail: str = ""
    difference: float | None = None
    tolerance: float | None = None


def verdict(name: str, equal: bool, detail: str = "", step: Step | None = None) -> Check:
    """A check that is ok or differs, with the figures of `step` if there is one."""
    status = "ok" if equal else "differs"
    if step is None:
        return Check(name, status, detail)
    return Check(name, status, detail, step.difference, step.tolerance)


def within(name: str, difference: float, tolerance: float, detail: str) -> Check:
    """A check that is ok if the difference is at most the tolerance."""
    status = "ok" if difference <= tolerance else "differs"
    return Check(name, status, detail, difference, tolerance)


def layer_steps(a: Evidence, b: Evidence) -> list[Step]:
    """One Step per operation, the worst of all prompts, in the order of the forward pass."""
    lists = [compare(x, y) for x, y in zip(a.records, b.records, strict=True)]
    return [max(steps, key=excess) for steps in zip(*lists, strict=True)]


def excess(step: Step) -> float:
    """Difference in units of the tolerance; nan counts as infinite."""
    ratio = step.difference / step.tolerance
    if math.isnan(ratio):
        return float("inf")
    return ratio


def compare_evidence(
    a: Evidence, b: Evidence, questions: Questions, steps: list[Step]
) -> list[Check]:
    """All checks of `a` against the reference `b`; `steps` are layer_steps(a, b)."""
    logits = [step for step in steps if step.operation == "lm_head"]
    hidden = [step for step in steps if step.operation != "lm_head"]
    cache = [step for step in steps if step.operation in ("rope_k", "cached_v")]
    in_steps = f"chunked prefill and decode against {b.name}"
    return [
        check_config(a, b),
        check_rope(a, b, questions.positions),
        check_steps("hidden states", hidden, f"{len(a.records)} prompts"),
        check_steps("keys and values", cache, "after one prefill"),
        check_cached("keys and values, in steps", a, b.records, in_steps),
        check_steps("logits", logits, f"{sum(p.shape[1] for p in questions.prompts)} positions"),
        check_greedy(a, b),
        *check_tokenizer(a, b, questions),
        check_template(a, b, questions),
    ]


def config_differences(a: Evidence, b: Evidence) -> dict:
    """{field: (value of a, value of b)} of all config fields that differ."""
    ours = asdict(a.config)
    theirs = asdict(b.config)
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


def check_config(a: Evidence, b: Evidence) -> Check:
    """Compare every config field that changes the computation. Both sides have transformers'
    defaults filled in."""
    found = {name: pair for name, pair in config_differences(a, b).items() if name not in HINT_ONLY}
    detail = ", ".join(f"{name} {x} against {y}" for name, (x, y) in found.items())
    return verdict("config", not found, detail or "every field that changes the maths")


def check_rope(a: Evidence, b: Evidence, positions: torch.Tensor) -> Check:
    """Compare cos and sin in fp32, also at far positions: the error of a wrong frequency grows with
    the position."""
    where = f"positions {', '.join(f'{p:,}' for p in positions.tolist())}"
    if a.rope.shape != b.rope.shape:
        return verdict("rope", False, f"head_dim {a.rope.shape[-1]} and {b.rope.shape[-1]}")
    difference = (a.rope - b.rope).abs().max().item()
    return within("rope", difference, TOLERANCE[torch.float32], where)


def check_steps(name: str, steps: list[Step], detail: str) -> Check:
    """A check with the figures of the worst of several operations."""
    worst = max(steps, key=excess)
    place = f", worst {worst.place}" if worst.difference else ""
    return verdict(name, worst.ok, f"{detail}, {len(steps)} operations{place}", worst)


def check_cached(name: str, a: Evidence, records: list, detail: str) -> Check:
    """Compare the keys and values of a's chunked path with those of recorded passes: a's own, or
    the reference's."""
    steps = []
    for (_, layers), record in zip(a.path, records, strict=True):
        base = {k: t for k, t in record.items() if k[1] in ("rope_k", "cached_v", "embed_tokens")}
        mine: dict[Key, torch.Tensor] = {(None, "embed_tokens"): base[None, "embed_tokens"]}
        for i, (key, value) in enumerate(layers):
            mine[i, "rope_k"] = key.transpose(1, 2)
            mine[i, "cached_v"] = value.transpose(1, 2)
        steps += compare(mine, base, CACHED * TOLERANCE[base[None, "embed_tokens"].dtype])
    worst = max(steps, key=excess)
    return verdict(name, worst.ok, f"{detail}, worst {worst.place}", worst)


def check_cached_logits(a: Evidence) -> Check:
    """Compare the logits of chunked prefill and decode with those of one uncached pass."""
    steps = []
    for (logits, _), record in zip(a.path, a.records, strict=True):
        key: Key = (None, "lm_head")
        full = record[key][:, -len(logits) :]
        steps += compare({key: logits[None]}, {key: full.float()}, CACHED * TOLERANCE[full.dtype])
    worst = max(steps, key=excess)
    detail = "chunked prefill and decode against one pass"
    return verdict("cached = uncached, logits", worst.ok, detail, worst)


def check_greedy(a: Evidence, b: Evidence) -> Check:
    """Greedy tokens are equal up to the first tie: a place where the reference's token has our
    highest logit within the tolerance."""
    unit = CACHED * TOLERANCE[a.records[0][None, "embed_tokens"].dtype]
    ties = 0
    for i, (ours, theirs) in enumerate(zip(a.greedy, b.greedy, strict=True)):
        if ours == theirs:
            continue
        n = first_unequal(ours, theirs)
        row = a.forced[i][n]  # (V,); up to here both sides have the same tokens
        gap = float("inf")
        if theirs[n] < len(row):  # another checkpoint may have a larger vocabulary
            # abs: decode, which chose our token, may differ from `forced`, which is uncached
            gap = abs(row[ours[n]] - row[theirs[n]]).item()
        limit = 2 * unit * max(1.0, row.abs().max().item())
        if not gap <= limit:
            detail = (
                f"prompt {i + 1}, new token {n + 1}: {ours[n]} against {theirs[n]}, "
                f"their logits {gap:.3g} apart"
            )
            return Check("greedy tokens", "differs", detail, gap, limit)
        ties += 1
    detail = f"{sum(map(len, a.greedy))} tokens equal"
    if ties:
        detail += f", {ties} prompts up to a tie"
    return verdict("greedy tokens", True, detail)


def check_tokenizer(a: Evidence, b: Evidence, questions: Questions) -> list[Check]:
    """Compare text → ids and ids → text."""
    return [
        check_list("tokenizer encode", a.encodings, b.encodings, questions.texts),
        check_list("tokenizer decode", a.decodings, b.decodings, questions.id_lists),
    ]


def check_template(a: Evidence, b: Evidence, questions: Questions) -> Check:
    """Compare rendered conversations byte by byte. A conversation that both refuse is equal."""
    if a.templates is None and b.templates is None:
        return Check("chat template", "skipped", "the checkpoint has none")
    if a.templates is None or b.templates is None:
        name = a.name if a.templates is None else b.name
        return verdict("chat template", False, f"{name} has none")
    ours = without_reasons(a.templates)
    theirs = without_reasons(b.templates)
    messages = [conversation["messages"] for conversation in questions.conversations]
    return check_list("chat template", ours, theirs, messages)


def without_reasons(texts: list[str]) -> list[str]:
    """The rendered conversations, with each refusal replaced by "refused", without its reason."""
    return ["refused" if text.startswith("refused: ") else text for text in texts]


def check_list(name: str, ours: list, theirs: list, questions: list) -> Check:
    """A check that two lists are equal. The first difference is quoted, shortened."""
    wrong = [i for i, (x, y) in enumerate(zip(ours, theirs, strict=True)) if x != y]
    if not wrong:
        return verdict(name, True, f"{len(ours)} cases")
    first = wrong[0]
    x, y = _around(ours[first], theirs[first])
    count = f"{len(wrong)} of {len(ours)} cases"
    question = str(questions[first])[:40]
    return verdict(name, False, f"{count}, first {question!r}: {x!r} against {y!r}")


def _around(x: Sequence, y: Sequence) -> tuple[Sequence, Sequence]:
    """The part of each sequence around their first difference."""
    n = first_unequal(x, y)
    start = max(0, n - 4)
    return x[start : n + 12], y[start : n + 12]


def first_unequal(x: Sequence, y: Sequence) -> int:
    """The index at which two sequences first differ; the shorter length if one is a prefix."""
    for n, (p, q) in enumerate(zip(x, y, strict=False)):
        if p != q:
            return n
    return min(len(x), len(y))
