"""Chooses which code runs the model: kernels for this device, or the plain model.

The choice is made once, on a CPU before torch is imported, and never changes during a run: all
tokens of one run come from the same code.

    no flag                kernels, if this model can use them. On a CPU they have to be compiled:
                           if they are not, a background process builds them for the next start.
                           On CUDA a decode step is a recorded graph.
    --plain                the model of nanokv/model.py
    --fast, --quantize     the fused model; waits for the compiler, and prints the reason if there
                           are no kernels
    --dequantize           kernels over plain numbers; without it they read a GGUF file's blocks
    --batch-invariant      kernels with one order of sums; refused where there are none
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common.options import CacheOptions, OutputOptions, SpeedOptions
from nanokv.apps.cli.common.plan import Choice, Plan
from nanokv.apps.cli.common.terminal import notice, sanitize_line
from nanokv.errors import ConfigError, NanoKVError
from nanokv.fast import building

if TYPE_CHECKING:
    from nanokv.config import Config
    from nanokv.model import Transformer
    from weights_loader.prefetch import Prefetch

NEXT_START = "kernels are being built for the next start"
NO_MEMORY = "no memory to fuse weights"
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as in fast/blocks.py
PLAIN = ("F32", "F16", "BF16")
GRAPHS = "CUDA graphs"  # the banner's text on a GPU


def check(wanted: SpeedOptions | None, ranks: int) -> None:
    """Refuse flags that contradict each other, before anything is loaded."""
    flags = wanted and {
        "--fast": wanted.fast,
        "--quantize": wanted.quantize,
        "--batch-invariant": wanted.invariant,
    }
    flag = next((name for name, given in (flags or {}).items() if given), None)
    if wanted is None or flag is None:
        return
    if wanted.plain:
        raise NanoKVError(
            f"--plain and {flag} contradict each other", f"leave out --plain, or {flag}"
        )
    if ranks > 1:
        raise NanoKVError(
            f"{flag} with --tensor-parallel: "
            "the kernels compute with whole weights, a rank has parts",
            f"leave out {flag}",
        )


def check_invariant(wanted: SpeedOptions | None, cache: CacheOptions) -> None:
    """Refuse --batch-invariant over a cache whose rows depend on how tokens come."""
    if wanted is None or not wanted.invariant:
        return
    kinds = {cache.name, cache.options.get("of")}
    if found := kinds & {"quantized", "sliding", "evicting"}:
        raise NanoKVError(
            f"--batch-invariant over --cache {found.pop()}: "
            "which keys it rounds or drops depends on the chunks",
            "--cache growing, static, dict, paged, prefix or offloaded",
        )
    page = cache.options.get("page") or 16
    if page % 16:
        raise NanoKVError(
            f"--batch-invariant with pages of {page} tokens: it reads keys 16 at a time",
            "a page size that is a multiple of 16",
        )


def refuse_variant(plan: Plan) -> None:
    """NanoKVError for --batch-invariant if this model has no kernels here."""
    why = not_for_kernels(plan)
    if not why and plan.config.family.own_parts:
        why = f"no kernels compute whole layers of {plan.config.family.title}"
    if not why and plan.config.experts:
        why = "no kernels compute whole layers of experts"
    if not why and not kernels_possible():
        found = building.state()
        why = found.detail or found.why
    if why:
        raise NanoKVError(f"--batch-invariant: {sanitize_line(why)}", "leave out --batch-invariant")


def choose(plan: Plan, wanted: SpeedOptions | None, fits: Callable[[int], bool]) -> Choice:
    """Choose from the flags, the model and the kernels that are built.

    `fits(count)`: are `count` bytes free beside the memory that the plan needs?
    """
    if wanted is None:
        return Choice(False)
    if wanted.invariant:
        refuse_variant(plan)
    if wanted.plain:
        return Choice(False, "plain (--plain)")
    if plan.ranks.size > 1:
        return Choice(False, f"plain, {plan.ranks.size} ranks")
    if plan.device.startswith("cuda"):
        return choose_on_gpu(plan, wanted, fits)
    blocks = not (wanted.dequantize or wanted.quantize or plan.config.family.own_parts)
    if wanted.fast or wanted.quantize or wanted.invariant:
        invariant = "batch-invariant" if wanted.invariant else None
        text = " ".join(filter(None, ("fast", wanted.quantize, invariant)))
        blocks = blocks and kernels_possible()
        stored = blocks and plan.stored is not None
        return Choice(True, text, True, wanted.quantize, stored, blocks, wanted.invariant)
    why = unusable(plan)
    if not why and plan.stored is None and not fits(fusing_bytes(plan)):
        why = NO_MEMORY
    if not why:
        why = not_built()
    if why:
        return Choice(False, f"plain ({why})")
    if plan.stored is not None:
        return Choice(True, "fast kernels, weights as stored", as_stored=True, blocks=True)
    text = "fast products" if plan.config.family.own_parts else "fast kernels"
    return Choice(True, text, blocks=blocks)


def kernels_possible() -> bool:
    """Whether kernels are built, or can be built now."""
    found = building.state()
    return found.ready or (found.missing and building.mode() != "off")


def stored_matrices(plan: Plan, wanted: SpeedOptions | None) -> dict[str, tuple[str, int, int]]:
    """name → (type, bytes, values) of the matrices of a GGUF file that kernels may read as stored.

    {} if flags, the model or the device do not allow it, or if no matrix has a type with kernels.
    """
    if wanted is None or wanted.plain or wanted.quantize or wanted.dequantize:
        return {}
    if plan.ranks.size > 1 or not_for_kernels(plan) or plan.config.family.own_parts:
        return {}
    return blocks_in(plan.folder)


def blocks_in(folder: Path) -> dict[str, tuple[str, int, int]]:
    """The matrices of a GGUF file; {} for another folder, or if no matrix has a type with kernels."""
    from weights_loader import stored_matrices

    return with_blocks(stored_matrices(folder))


def with_blocks(matrices: dict[str, tuple[str, int, int]]) -> dict[str, tuple[str, int, int]]:
    """These matrices; {} if none has a type with kernels."""
    if not any(kind in BLOCKS for kind, _, _ in matrices.values()):
        return {}
    return matrices


def stored_bytes(matrices: dict[str, tuple[str, int, int]], config: "Config", itemsize: int) -> int:
    """Bytes of a model over these matrices: those without kernels have `itemsize` per value.

    The other weights are vectors, norms and biases, which the fast model keeps in fp32.
    """
    from nanokv.costs import parameters

    vectors = parameters(config)
    total = 0
    for kind, nbytes, values in matrices.values():
        vectors -= values
        if kind in BLOCKS:
            total += nbytes
        else:
            total += values * itemsize
    return total + 4 * vectors


def without_kernels(matrices: dict[str, tuple[str, int, int]]) -> dict[str, int]:
    """Type → number of matrices, for the quantized types that have no kernels."""
    kinds = [kind for kind, _, _ in matrices.values()]
    return {kind: kinds.count(kind) for kind in sorted({*kinds} - {*BLOCKS, *PLAIN})}


def not_built() -> str:
    """The reason why no kernels are built, or "". Starts a background build if that is allowed."""
    found = building.state()
    if found.missing and building.mode() == "on":
        building.begin()
        return NEXT_START
    return found.why


def choose_on_gpu(plan: Plan, wanted: SpeedOptions, fits: Callable[[int], bool]) -> Choice:
    """A recorded graph of Triton kernels, or the plain model with the reason.

    Raises NanoKVError for --quantize, and for --fast if the kernels cannot run here.
    """
    import torch

    from nanokv.fast import gpu

    if wanted.quantize:
        raise NanoKVError(
            f"--quantize {wanted.quantize} on {plan.device}: "
            f"products of {wanted.quantize} codes are for CPUs",
            "leave out --quantize, or --device cpu",
        )
    if plan.config.experts:
        why = "experts"
    elif plan.config.family.own_parts:
        why = f"no kernels for {plan.config.family.title}"
    else:
        why = gpu.missing(plan.device, getattr(torch, plan.dtype_name))
    if not why and not fits(fusing_bytes(plan)):
        why = NO_MEMORY
    if why and wanted.fast:
        raise NanoKVError(f"--fast on {plan.device}: {why}", "leave out --fast")
    if why:
        return Choice(False, f"plain ({why})")
    return Choice(True, GRAPHS)


def prefetch(plan: Plan) -> "Prefetch | None":
    """Start reading the weights that will be fused, while torch is imported.

    None if nothing is fused, as in blocks of a family's own, or if quantized weights replace them.
    `check_memory` has counted these bytes.
    """
    code = plan.code
    if plan.config.family.own_parts:
        return None
    if code.fast and plan.device == "cpu" and not code.quantize and not code.as_stored:
        from weights_loader.prefetch import Prefetch

        return Prefetch(
            plan.folder, plan.dtype_name, (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        )
    return None


def unusable(plan: Plan) -> str:
    """The reason why kernels cannot run this model, or ""."""
    why = not_for_kernels(plan)
    own_parts = plan.config.family.own_parts  # among them experts, whose products have kernels
    if not why and plan.config.experts and plan.stored is None and not own_parts:
        why = "no kernels for experts"
    return why


def not_for_kernels(plan: Plan) -> str:
    """The reason why this device or dtype has no kernels, or ""."""
    if plan.device != "cpu":
        return f"kernels are for CPUs, this is {plan.device.partition(':')[0]}"
    if plan.dtype_name not in ("float32", "bfloat16"):
        return f"no kernels for {plan.dtype_name}"
    return ""


def fusing_bytes(plan: Plan) -> int:
    """Peak bytes of fusing: the matrices of one layer are in memory twice.

    They are q, k and v, or gate and up; of stacked experts, gate and up of all.
    """
    from nanokv.costs import ITEMSIZE

    config = plan.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    rows = max(heads * config.head_dim, 2 * config.intermediate_size)
    if config.family.stacked and config.experts:
        rows = 2 * config.experts.moe_intermediate_size * config.experts.num_experts
    return rows * config.hidden_size * ITEMSIZE[plan.dtype_name]


def optimized(model: "Transformer", choice: Choice, output: OutputOptions) -> "Transformer":
    """The model that `choice` names. If kernels were requested, a notice names the code."""
    if not choice.fast:
        return model
    fast = fused(model, choice, output)
    if not choice.invariant:
        return fast
    from nanokv.fast import batch_invariant

    notice("batch-invariant: a row has one order of sums, whoever else is in the batch", output)
    return batch_invariant(fast)


def fused(model: "Transformer", choice: Choice, output: OutputOptions) -> "Transformer":
    """The model over kernels, or the plain one if those that are built cannot be loaded."""
    from nanokv.fast import native, optimize

    if choice.as_stored:
        if choice.requested:
            notice(f"fast: {model.weights} weights as stored, {code_text()}", output)
        return model

    if model.device.type == "cuda":
        return optimize(model)
    if not choice.requested:
        if not native.built():
            notice(
                "plain: the kernels that are built cannot be loaded; --fast builds them again",
                output,
            )
            return model
        return optimize(model)
    announce_build(output)
    model = optimize(model, choice.quantize)
    family = model.config.family
    what = f"; the rest of {family.title}'s layers is plain" if family.own_parts else ""
    notice(f"fast: {model.weights} weights, {code_text()}{what}", output)
    return model


def announce_build(output: OutputOptions) -> None:
    """A notice if the next use of kernels waits for the compiler."""
    if building.mode() != "off" and building.state().missing:
        notice(f"building the native kernels, once: about {building.SECONDS} seconds", output)


def confirmed(choice: Choice, output: OutputOptions) -> Choice:
    """The choice, without as_stored if kernels cannot be loaded. Waits for a requested build."""
    if not choice.as_stored:
        return choice
    from nanokv.fast import native

    if choice.requested:
        announce_build(output)
        usable = native.kernels() is not None
    else:
        usable = native.built()
    if usable:
        return choice
    return replace(choice, as_stored=False, blocks=False)


def code_text() -> str:
    """The code that decodes. Of the 80 hexadecimal digits in a kernel file's name, 8 are shown."""
    from nanokv.fast import native

    return re.sub(r"(kernels-[0-9a-f]{8})[0-9a-f]+-[0-9a-f]+", r"\1…", native.library()[1])


def setting() -> tuple[str, str]:
    """The row of `nanokv env`: the code that runs without flags, and the reason. Builds nothing."""
    try:
        found = building.state()
    except ConfigError as error:
        return "refused", str(error)
    if found.ready:
        return (
            "native kernels",
            f"NANOKV_KERNELS={building.mode()}: {building.MODES[building.mode()]}",
        )
    if found.missing and building.mode() == "on":
        return "plain", "kernels are not built yet: the first chat, generate or batch begins that"
    return "plain", sanitize_line(found.detail or found.why)
