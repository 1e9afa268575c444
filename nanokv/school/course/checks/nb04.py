"""Notebook 04, the same logits: the file, the tolerance, and finding a fault from numbers alone."""

import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.school.course.answers import as_number, plain, same
from nanokv.school.course.checking import (
    RIGHT,
    Mistake,
    function,
    judged,
    questions,
    result_of,
    value,
    wrong,
)

if TYPE_CHECKING:
    import torch

    from nanokv.school.course.checking import Case


def _tensors(L, tied):
    """7 projections and 4 norms per layer, the embedding, the last norm, and a head if not tied."""
    return 11 * L + 2 + (not tied)


# --- 04.2: a tensor out of a file -----------------------------------------------------------------


def _judge_reader(read, case):
    """Try read(path, name) on a small file with two dtypes."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        "first": torch.arange(6.0).view(2, 3),
        "half": torch.linspace(-2, 2, 20).bfloat16().view(4, 5),
        "last": torch.tensor([7.5, -1.25]),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(tensors, path, metadata={"format": "pt"})
        for name, right in tensors.items():
            given = result_of(read, path, name)
            outcome = _tensor_outcome(name, given, right)
            if outcome:
                return outcome
    return RIGHT


def _tensor_outcome(name, given, right):
    import torch

    if not isinstance(given, torch.Tensor):
        return wrong(f"“{name}” came back as {type(given).__name__}, not as a tensor", "no tensor")
    if given.dtype != right.dtype:
        return wrong(
            f"“{name}” is stored as {right.dtype}, and yours is {given.dtype}: see its dtype field",
            "dtype",
        )
    if given.numel() != right.numel():
        return wrong(
            f"“{name}” has {right.numel()} values, and yours {given.numel()}: the offsets are "
            "bytes",
            "size",
        )
    if given.shape != right.shape:
        return wrong(
            f"“{name}” has shape {tuple(right.shape)}, and yours {tuple(given.shape)}", "shape"
        )
    if not torch.equal(given, right):
        return wrong(
            f"“{name}” has the right shape and wrong numbers: data_offsets count from the end of "
            "the header, at byte 8 + n",
            "offset",
        )
    return None


# --- 04.3 and 04.5: the effects of rounding, and of the three faults ------------------------------


def _distances(case):
    """The largest change of a logit from each cause.

    Keys: "fp32" and "bf16" (rounding), "theta", "eps" and "head" (faults).
    """
    import copy

    import torch

    from nanokv.inference import score
    from nanokv.school.course.reference import one_by_one, prompt, sabotaged

    model = case.model
    ids = prompt(model)
    right = score(model, ids)
    half = score(copy.deepcopy(model).to(torch.bfloat16), ids).float()
    seen = {name: score(one, ids) for name, one in sabotaged(model).items()}
    seen |= {"fp32": one_by_one(model, ids)[None, "lm_head"], "bf16": half}
    return {name: float((logits - right).abs().max()) for name, logits in seen.items()}


def _judge_tolerance(answer, case):
    """Right: at least twice the rounding of fp32, and below every fault larger than rounding."""
    atol = as_number(plain(answer))
    if atol is None:
        return wrong("answer with one number, such as 0.5")
    found = _distances(case)
    noise = found["fp32"]
    bugs = {name: found[name] for name in ("theta", "eps", "head") if found[name] > 4 * noise}
    missed = [name for name, size in bugs.items() if size <= atol]
    if atol <= 0:
        return wrong(
            "zero asks for equal bits: right code that multiplies in another order fails", "zero"
        )
    if atol <= noise:
        return wrong(
            f"rounding alone gives {noise:.1e} in Experiment 3: right code would fail",
            "below rounding",
        )
    if missed:
        return wrong(
            f"with {atol:g} these wrong checkpoints pass: {', '.join(missed)}", "too loose"
        )
    if atol < 2 * noise:
        return wrong(
            f"just above the {noise:.1e} of this machine; another one will go over it", "no margin"
        )
    return RIGHT


def _hidden_by_bf16(case):
    found = _distances(case)
    return {name for name in ("theta", "eps", "head") if found[name] <= found["bf16"]}


# --- 04.4: one more wrong checkpoint; only its activations are known ------------------------------

CAUSES = {
    "a": "gate_proj and up_proj of a layer were exchanged",
    "b": "q_norm and k_norm of a layer were exchanged",
    "c": "the rows of q_proj are in the order of interleaved pairs, as for another RoPE",
    "d": "down_proj was taken from another layer",
    "e": "o_proj was taken from another layer",
    "f": "both norms of a layer were exchanged",
}


def _place(case):
    return case.place % max(1, case.config.num_hidden_layers - 2)


def _cause(case):
    """The drawn cause; f instead of b for a family without norms of the heads."""
    if case.cause == "b" and not case.config.qk_norm:
        return "f"
    return case.cause


def mystery(case: "Case", ids: "torch.Tensor") -> dict:
    """nanokv.debug.record of case.model, with one or two wrong weights in one layer."""
    from nanokv.lab.study.debug import record
    from nanokv.loading import build

    weights = {
        name: weight for name, weight in case.model.state_dict().items() if name != "lm_head.weight"
    }
    if not case.config.tie_word_embeddings:
        weights["lm_head.weight"] = case.model.lm_head.weight
    D = case.config.head_dim
    here = _place(case)
    mine = f"layers.{here}."
    next_one = f"layers.{(here + 1) % case.config.num_hidden_layers}."
    pairs = {
        "a": ("mlp.gate_proj", "mlp.up_proj"),
        "b": ("self_attn.q_norm", "self_attn.k_norm"),
        "f": ("input_layernorm", "post_attention_layernorm"),
    }
    if (cause := _cause(case)) in pairs:
        one, other = (f"{mine}{name}.weight" for name in pairs[cause])
        weights[one], weights[other] = weights[other], weights[one]
    elif cause == "c":
        name = f"{mine}self_attn.q_proj.weight"
        rows = weights[name].view(-1, 2, D // 2, weights[name].shape[1])  # (H,2,D/2,C): halves
        weights[name] = rows.transpose(1, 2).reshape(weights[name].shape)  # (H,D/2,2,C): pairs
    else:
        name = {"d": "mlp.down_proj", "e": "self_attn.o_proj"}[cause]
        weights[f"{mine}{name}.weight"] = weights[f"{next_one}{name}.weight"]
    return record(build(case.config, weights), ids)


def _judge_place(answer, case):
    """Judge a pair (layer, cause). A hint about the layer is right whatever the cause is."""
    answer = plain(answer)
    if (
        not isinstance(answer, list)
        or len(answer) != 2
        or str(answer[1]).strip().casefold() not in CAUSES
    ):
        return wrong(f'answer with a pair such as (0, "a"), its second one of {", ".join(CAUSES)}')
    place = _place(case)
    if same(answer, (place, _cause(case))):
        return RIGHT
    if same(answer[0], place):
        return wrong(
            "the layer is right. Which operation of it differs first, and which ones before it do "
            "not?",
            "other cause",
        )
    if same(answer[0], case.config.num_hidden_layers - 1):
        return wrong(
            "in the last layer everything differs, because it was handed on from layer to layer. "
            "Where does it begin?",
            "last layer",
        )
    if same(answer[0], place + 1):
        return wrong("layers are counted from 0", "counted from 1")
    return wrong(
        "go through nanokv.debug.compare in order: the first step that is not ok has a layer and "
        "an operation. Which of the causes first touches that operation?"
    )


CHECKS = (
    function(
        "04.1",
        right=_tensors,
        inputs=lambda rng: (rng.randint(1, 80), rng.random() < 0.5),
        wrong=(
            Mistake(
                "head always",
                lambda L, tied: 11 * L + 3,
                "A tied head is the embedding: it is not stored again.",
            ),
            Mistake(
                "head never",
                lambda L, tied: 11 * L + 2,
                "A head that is not tied is one tensor more.",
            ),
            Mistake(
                "swapped",
                lambda L, tied: 11 * L + 2 + tied,
                "Tied means that the head needs no tensor.",
            ),
            Mistake(
                "two norms",
                lambda L, tied: 9 * L + 2 + (not tied),
                "Nine a layer: you forgot q_norm and k_norm, which Qwen3 has and Llama has not.",
            ),
            Mistake(
                "no last norm",
                lambda L, tied: 11 * L + 1 + (not tied),
                "There is a norm after the last layer.",
            ),
        ),
    ),
    judged("04.2", _judge_reader),
    judged("04.3", _judge_tolerance),
    judged(
        "04.4",
        _judge_place,
        {"place": (2, 1, 3), "cause": ("c", "a", "b", "d", "e")},
        key=lambda case: (_place(case), _cause(case)),
        hidden=True,
        choices=lambda case: itertools.product(range(case.config.num_hidden_layers), CAUSES),
    ),
    value(
        "04.5",
        right=_hidden_by_bf16,
        wrong=(
            Mistake(
                "all found",
                lambda case: set(),
                "Compare the changes of the logits in Experiment 4 with the rounding of bf16 in "
                "Experiment 3.",
            ),
            Mistake(
                "same words",
                lambda case: {"theta", "eps"},
                "Those give the same words. Do both stay below the rounding of bf16 in their "
                "logits?",
            ),
        ),
        otherwise=(
            "Go through the three, one at a time: is the change of its logits in Experiment 4 "
            "larger than the rounding of bf16 in Experiment 3?"
        ),
        names=("theta", "eps", "head"),
    ),
)

QUESTIONS = questions("04")
