"""optimize(model): which model decodes at the memory's speed on this device."""

from typing import TYPE_CHECKING, overload

import torch

from nanokv.errors import ConfigError
from nanokv.fast import gpu
from nanokv.fast.checks import check_plain
from nanokv.fast.model import fuse
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
# Outside of inference mode: the plain model, whose weights become views, can still be trained.
@torch.inference_mode(False)
@torch.no_grad()
def optimize(
    model: Transformer, weights: str | None = None, compile: int | None = None
) -> "Transformer | Compiled":
    """A model that decodes faster and answers the same: for every function and cache that takes the plain one.

    On a GPU a decode step is one recorded CUDA graph, with weights as loaded and logits in the model's dtype.

    `weights`: None (as loaded), "fp32", "bf16", "int8" or "int4". int4 keeps the embedding and the head in int8, as
    llama.cpp keeps them in more bits than the rest. As loaded, the weights are shared: those of `model` become views of
    the fused ones, and an optimizer finds them as they were. If you change `model` later, call optimize again. Logits
    are fp32. Raises ConfigError for another name, a shape that has no whole groups, a model in float16, or one that is
    optimized already.

    A kernel takes the place of attention only where it computes the same: causal prefill in bf16, and decode steps
    whose queries see the whole of their own row. Other masks, functions and cache classes of the caller's are called as
    they are. Seeds: in fp32 a seed draws the tokens that it draws from the plain model, since logits differ by rounding
    alone (about 1e-6). In bf16, int8 and int4 it draws others: a seed is repeatable on one format of weights.

    `compile`: instead of all that, the plain blocks through torch.compile with static shapes, for a cache of so many
    slots, `result.make_cache()` (nanokv/fast/compiled.py).
    """
    if compile is not None:
        if weights is not None:
            raise ConfigError(
                f"weights={weights!r} and compile={compile!r}: kernels are compiled already, choose one"
            )
        from nanokv.fast.compiled import Compiled

        return Compiled(model, compile)
    check_plain(model)
    if model.device.type == "cuda":
        return record(model, weights)
    watch(torch.get_num_threads())
    return fuse(model, weights)


def record(model: Transformer, weights: str | None) -> Transformer:
    """What `optimize` gives for a GPU; ConfigError where its kernels do not run, and for fewer bits."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if weights not in (None, names.get(model.dtype)):
        raise ConfigError(
            f"weights={weights!r} has no kernels on a GPU: products of {weights} codes are for CPUs",
            hint=f'weights=None, the model in {model.dtype}; or device="cpu"',
        )
    why = gpu.missing(model.device, model.dtype)
    if why:
        raise ConfigError(f"no fast path on this GPU: {why}", hint="the plain model runs here")
    from nanokv.fast.gpu.model import recorded

    return recorded(model)
