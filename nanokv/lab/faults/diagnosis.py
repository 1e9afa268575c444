"""diagnose(name, model, tokenizer): the effect of a fault on one answer, from its words down to the
first wrong tensor.

The fault's scenario runs without and with the fault. The greedy answers are compared as text. Then
the right answer is fed to both runs, and their logits, bytes, computed tokens and every operation of
every layer are compared token by token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanokv.errors import NanoKVError
from nanokv.lab.faults.catalogue import Fault
from nanokv.lab.faults.injection import find, inject
from nanokv.lab.faults.scenarios import SCENARIOS, Outcome, Scenario, model_of, solo
from nanokv.lab.study.debug import Key, Pass, compare, earliest, watch
from nanokv.model import Transformer
from nanokv.text.tokenizer import Tokenizer

SHORTEST = 10  # tokens of a prompt: a chunk of 8, and a second chunk that needs a mask
# A larger max |Δ logits| is no rounding: correct code on another path differs by 1e-4 at most.
SEEN = 1e-3
TALK = (  # conversations that the bundled model answers well; the first one is compared
    ["My name is Zorbla.", "So your name is Zorbla.", "What is my name?"],
    ["My name is Tilda.", "So your name is Tilda.", "Reverse the list: cat, dog, fish, bird"],
    ["Count from 3 to 12."],
)


@dataclass(frozen=True)
class Diagnosis:
    """right, wrong: the answers, one per row of a batch. layer, token: where values differ first.

    deltas[i] is the max |Δ logits| at the i-th compared position (in a batch, of row i); bytes and
    computed, the tokens that the model computed in all requests, are (right, wrong).
    """

    fault: Fault
    seen_by: str  # words, logits, bytes, tokens, error, or nothing
    right: list[str]
    wrong: list[str]
    layer: int | None
    token: int | None  # position in the compared request, from 0
    operation: str
    deltas: list[float]
    bytes: tuple[int, int]
    computed: tuple[int, int]
    error: str

    def __str__(self) -> str:
        lines = [
            f"{self.fault.name}: {self.fault.title}",
            f"  scenario {self.fault.scenario}, {self.place}",
        ]
        for right, wrong in zip(self.right, self.wrong, strict=True):
            lines.append(f"  right  {right}")
            if wrong != right:
                lines.append(f"  wrong  {wrong}")
        if self.deltas:
            right_bytes, wrong_bytes = self.bytes
            lines.append(
                f"  max |Δ logits| {max(self.deltas):.3g}, bytes {right_bytes:,} → {wrong_bytes:,}"
            )
            right_tokens, wrong_tokens = self.computed
            if right_tokens != wrong_tokens:
                lines.append(f"  tokens computed {right_tokens:,} → {wrong_tokens:,}")
        if self.error:
            lines.append(f"  {self.error}")
        lines.append(f"  seen by: {self.seen_by}")
        return "\n".join(lines)

    @property
    def place(self) -> str:
        """The first difference, as text."""
        if self.token is None:
            return "no value differs"
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return f"first difference: {layer}token {self.token} ({self.operation})"


def diagnose(
    name: str,
    model: Transformer,
    tokenizer: Tokenizer | None = None,
    prompts: list[list[int]] | None = None,
) -> Diagnosis:
    """Run the fault's scenario without and with the fault, and compare.

    prompts: at least three lists of at least 10 ids, not all of the same length; the first one is
    compared. By default short conversations that the bundled model knows, or random ids if there is
    no tokenizer.

    NanoKVError: there is no such fault, or the prompts cannot show every fault.
    """
    fault = find(name)
    prompts = prompts_for(model, tokenizer, prompts)
    model = model_of(fault.scenario, model)
    scenario = SCENARIOS[fault.scenario]
    # The right answer to `overflow` is an error, so its text comes from a cache with enough room.
    right_one = solo if fault.scenario == "overflow" else scenario
    right = right_one(model, prompts)
    truth, passes, _ = watched(right_one, model, prompts, right.answers)
    assert truth is not None  # correct code does not fail
    with inject(name):
        said, _, error = watched(scenario, model, prompts)
        wrong, wrong_passes, _ = watched(scenario, model, prompts, right.answers)
    step, layer, token = first_difference(passes, wrong_passes, failed=bool(error))
    answers: list[list[int]] = [[] for _ in right.answers] if said is None else said.answers
    if wrong is None:  # it failed: no position is compared
        wrong = Outcome(truth.logits[:0], [], 0)
    deltas = per_position(truth.logits, wrong.logits)
    sizes = (truth.bytes, wrong.bytes)
    computed = (truth.computed, wrong.computed)
    text = numbers if tokenizer is None else tokenizer.text_of
    return Diagnosis(
        fault,
        seen_by(right.answers, answers, deltas, sizes, computed, error),
        [text(ids) for ids in right.answers],
        [text(ids) for ids in answers],
        layer,
        token,
        step,
        deltas,
        sizes,
        computed,
        error,
    )


def prompts_for(
    model: Transformer, tokenizer: Tokenizer | None, prompts: list[list[int]] | None = None
) -> list[list[int]]:
    """The prompts, or default ones. NanoKVError if they cannot show every fault."""
    if prompts is None:
        prompts = random_prompts(model) if tokenizer is None else talk(tokenizer)
    lengths = [len(prompt) for prompt in prompts]
    if len(lengths) < 3 or min(lengths) < SHORTEST or len(set(lengths)) == 1:
        raise NanoKVError(
            f"diagnose needs three prompts of at least {SHORTEST} tokens, not all of the same "
            f"length: these have {lengths}",
            hint="some bugs show only in a second request, in padding, "
            "or in a second chunk of 8 tokens",
        )
    return prompts


def numbers(ids: list[int]) -> str:
    """The ids as text, for a model without a tokenizer."""
    return " ".join(map(str, ids))


def seen_by(
    right: list[list[int]],
    wrong: list[list[int]],
    deltas: list[float],
    sizes: tuple[int, int],
    computed: tuple[int, int],
    error: str,
) -> str:
    """The weakest observation that reveals the fault: error, words, logits, bytes, tokens, or
    nothing."""
    seen = {
        "error": bool(error),
        "words": right != wrong,
        "logits": max(deltas, default=0) > SEEN,
        "bytes": sizes[0] != sizes[1],
        "tokens": computed[0] != computed[1],
    }
    return next((observer for observer, sees in seen.items() if sees), "nothing")


def watched(
    scenario: Scenario,
    model: Transformer,
    prompts: list[list[int]],
    forced: list[list[int]] | None = None,
) -> tuple[Outcome | None, list, str]:
    """(outcome or None, forward passes, error). The passes before a failure are kept."""
    with watch(model) as passes:
        try:
            return scenario(model, prompts, forced), passes, ""
        # torch's error about shapes, or one of nanokv's
        except (RuntimeError, ValueError) as error:
            return None, passes, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def first_difference(
    right: list[Pass], wrong: list[Pass], failed: bool = False
) -> tuple[str, int | None, int | None]:
    """(operation, layer, token) where two lists of passes first differ; ("", None, None) if they
    are equal.

    The positions are those of the right pass: a wrong one may count them wrongly, or compute more
    or fewer tokens. Both end with the same token.
    """
    for a, b in zip(right, wrong, strict=False):
        values = comparable(a, a, b)
        seen = comparable(b, a, b)
        step = next((step for step in compare(values, seen) if not step.ok), None)
        first = step and earliest(values, seen, step)
        if failed and b is wrong[-1] and first is None:
            layer = max(layer for layer, _ in b.values if layer is not None)
            return "the pass that failed", layer, position(a, (0, 0))
        if step is not None:
            # the operation may cover the last tokens only, as the logits do
            late = a.tokens.shape[1] - values[step.layer, step.operation].shape[1]
            at, row = first or (0, 0)
            return step.operation, step.layer, position(a, (at + late, row))
    return "", None, None


def comparable(one: Pass, right: Pass, wrong: Pass) -> dict[Key, Tensor]:
    """The values of a pass, for the last tokens that both passes have; 0 in padding, which is
    never read."""
    T = min(right.tokens.shape[1], wrong.tokens.shape[1])
    columns = torch.arange(right.tokens.shape[1])[-T:]
    padding = torch.as_tensor(right.start).reshape(-1, 1) + columns < 0  # (B,T), or (1,T)
    values = {}
    for key, value in one.values.items():
        value = value[:, -T:]  # (B,t,…), t ≤ T
        hidden = padding[:, -value.shape[1] :]  # (B,t)
        values[key] = value.masked_fill(hidden.view(*hidden.shape, *[1] * (value.dim() - 2)), 0)
    return values


def position(one: Pass, first: tuple[int, int]) -> int:
    """Position of (column, row) of a pass within its request."""
    column, row = first
    start = torch.as_tensor(one.start)
    if start.dim() == 1:
        start = start[row]
    return int(start) + column


def per_position(right: Tensor, wrong: Tensor) -> list[float]:
    """max |Δ| of each row of two (N,V) logits; nan counts as an infinite difference."""
    N = min(len(right), len(wrong))
    return (right[:N] - wrong[:N]).abs().amax(-1).nan_to_num(nan=float("inf")).tolist()


def talk(tokenizer: Tokenizer) -> list[list[int]]:
    """The conversations of TALK as ids, by the model's chat template."""
    prompts = []
    for lines in TALK:
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": line} for i, line in enumerate(lines)
        ]
        prompts.append(tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True)))
    return prompts


def random_prompts(model: Transformer) -> list[list[int]]:
    """Three prompts of 24, 17 and 20 ids."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(model.config.vocab_size, (T,), generator=generator).tolist()
        for T in (24, 17, 20)
    ]
