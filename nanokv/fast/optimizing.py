"""optimize(model): picks the model that decodes at the speed of the memory on this device."""

from typing import TYPE_CHECKING, overload

import torch

from nanokv.errors import ConfigError
from nanokv.fast import gpu
from nanokv.fast.checks import check_plain
from nanokv.fast.model import fuse
from nanokv.fast.products import with_products
from nanokv.model import Transformer
from nanokv.support.habits import hinted
from nanokv.support.neighbours import watch

if TYPE_CHECKING:
    from nanokv.fast.compiled import Compiled


@overload
def optimize(
    model: Transformer, weights: str | None = None, compile: None = None
) -> Transformer: ...
@overload
def optimize(model: Transformer, weights: str | None = None, *, compile: int) -> "Compiled": ...
@hinted
# Inference mode is off because the weights of the plain model become views here. A view made in
# inference mode could not be trained.
@torch.inference_mode(False)
@torch.no_grad()
def optimize(
    model: Transformer, weights: str | None = None, compile: int | None = None
) -> "Transformer | Compiled":
    """A model that decodes faster, for every function and cache that takes the plain model.

    On a GPU a decode step is one recorded CUDA graph, with the weights as loaded and logits in the
    model's dtype. On a CPU the logits are fp32.

    `weights` (CPU): None (as loaded), "fp32", "bf16", "int8" or "int4". int4 keeps the embedding
    and the head in int8, just as llama.cpp gives them more bits. With None nothing is stored
    twice: the weights of `model` become views of the fused weights, and an optimizer still finds
    its parameters. The fast model may copy other parameters: call optimize again after changing
    weights. Raises ConfigError for another name, a shape that has no whole groups,
    a model in float16, or a model that is optimized already.

    A family with blocks of its own keeps them: its products and the attention and states of a
    decode step are kernels then, activations stay in the model's dtype, and the embedding stays as
    loaded (nanokv/fast/products.py).

    A kernel replaces attention only where it computes the same: causal prefill in bf16, and
    decode steps in which each query sees its whole row. Other masks, and custom attention
    functions and cache classes, are called unchanged. Seeds: in fp32 the logits differ from the
    plain model's by rounding alone (about 1e-6), so a seed draws the same tokens. In bf16, int8
    and int4 a seed draws other tokens than from the plain model, and always the same for one
    format of weights.

    `compile`: the number of cache slots. Instead of using kernels, run the plain blocks through
    torch.compile with static shapes, over `result.make_cache()` (nanokv/fast/compiled.py).
    """
    if compile is not None:
        if weights is not None:
            raise ConfigError(
                f"weights={weights!r} and compile={compile!r}: "
                "kernels are compiled already, choose one"
            )
        from nanokv.fast.compiled import Compiled

        return Compiled(model, compile)
    if isinstance(model, Transformer) and model.config.family.own_parts:
        if model.device.type == "cpu":
            watch(torch.get_num_threads())
            return with_products(model, weights)
    check_plain(model)
    if model.device.type == "cuda":
        return record(model, weights)
    watch(torch.get_num_threads())
    return fuse(model, weights)


def record(model: Transformer, weights: str | None) -> Transformer:
    """The model that `optimize` returns for a GPU.

    ConfigError if the kernels do not run on it, or for quantized weights.
    """
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if weights not in (None, names.get(model.dtype)):
        raise ConfigError(
            f"weights={weights!r} has no kernels on a GPU: "
            f"products of {weights} codes are for CPUs",
            hint=f'weights=None, the model in {model.dtype}; or device="cpu"',
        )
    why = gpu.missing(model.device, model.dtype)
    if why:
        raise ConfigError(f"no fast path on this GPU: {why}", hint="the plain model runs here")
    from nanokv.fast.gpu.model import recorded

    return recorded(model)
