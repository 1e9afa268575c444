"""Chooses which code runs the model: kernels for this device, or the plain model.

The choice is made once, on a CPU before torch is imported, and never changes during a run: all
tokens of one run come from the same code.

    no flag                kernels, if this model can use them. On a CPU they have to be compiled:
                           if they are not, a background process builds them for the next start.
                           On CUDA a decode step is a recorded graph.
    --plain                the model of nanokv/model.py
    --fast, --quantize     the fused model; waits for the compiler, and prints the reason if there
                           are no kernels
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanokv.apps.cli.common.options import OutputOptions, SpeedOptions
from nanokv.apps.cli.common.plan import Choice, Plan
from nanokv.apps.cli.common.terminal import notice, sanitize_line
from nanokv.errors import ConfigError, NanoKVError
from nanokv.fast import building

if TYPE_CHECKING:
    from nanokv.model import Transformer
    from weights_loader.prefetch import Prefetch

NEXT_START = "kernels are being built for the next start"
NO_MEMORY = "no memory to fuse weights"
GRAPHS = "CUDA graphs"  # the banner's text on a GPU


def check(wanted: SpeedOptions | None, ranks: int) -> None:
    """Refuse flags that contradict each other, before anything is loaded."""
    if wanted is None or not (wanted.fast or wanted.quantize):
        return
    flag = "--fast" if wanted.fast else "--quantize"
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


def choose(plan: Plan, wanted: SpeedOptions | None, fits: Callable[[int], bool]) -> Choice:
    """Choose from the flags, the model and the kernels that are built.

    `fits(count)`: are `count` bytes free beside the memory that the plan needs?
    """
    if wanted is None:
        return Choice(False)
    if wanted.plain:
        return Choice(False, "plain (--plain)")
    if plan.ranks.size > 1:
        return Choice(False, f"plain, {plan.ranks.size} ranks")
    if plan.device.startswith("cuda"):
        return choose_on_gpu(plan, wanted, fits)
    if wanted.fast or wanted.quantize:
        text = " ".join(filter(None, ("fast", wanted.quantize)))
        return Choice(True, text, requested=True, quantize=wanted.quantize)
    why = unusable(plan)
    if not why and not fits(fusing_bytes(plan)):
        why = NO_MEMORY
    if not why:
        why = not_built()
    if why:
        return Choice(False, f"plain ({why})")
    return Choice(True, "fast kernels")


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

    None if nothing is fused, or if quantized weights replace them. `check_memory` has counted
    these bytes.
    """
    if plan.code.fast and plan.device == "cpu" and not plan.code.quantize:
        from weights_loader.prefetch import Prefetch

        return Prefetch(
            plan.folder, plan.dtype_name, (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
        )
    return None


def unusable(plan: Plan) -> str:
    """The reason why kernels cannot run this model, or ""."""
    if plan.device != "cpu":
        return f"kernels are for CPUs, this is {plan.device.partition(':')[0]}"
    if plan.dtype_name not in ("float32", "bfloat16"):
        return f"no kernels for {plan.dtype_name}"
    if plan.config.experts:
        return "no kernels for experts"
    return ""


def fusing_bytes(plan: Plan) -> int:
    """Peak bytes of fusing: the matrices of one layer are in memory twice (q, k, v; gate, up)."""
    from nanokv.costs import ITEMSIZE

    config = plan.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    rows = max(heads * config.head_dim, 2 * config.intermediate_size)
    return rows * config.hidden_size * ITEMSIZE[plan.dtype_name]


def optimized(model: "Transformer", choice: Choice, output: OutputOptions) -> "Transformer":
    """The model that `choice` names. If kernels were requested, a notice names the code."""
    if not choice.fast:
        return model
    from nanokv.fast import native, optimize

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
    if building.mode() != "off" and building.state().missing:
        notice(f"building the native kernels, once: about {building.SECONDS} seconds", output)
    model = optimize(model, choice.quantize)
    notice(f"fast: {model.weights} weights, {code_text()}", output)
    return model


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
