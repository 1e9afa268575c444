"""Checks of the assumptions that the kernels make, which they cannot check themselves.

at optimize    every module is the plain one and matches the config
at each step   no module has hooks or was replaced, and each query sees its whole row, or in a
               packed forward its sequence up to itself
"""

from collections.abc import Iterable
from itertools import repeat
from operator import contains, itemgetter
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules import module

from nanokv import model as plain_model
from nanokv.attention import Attend, Causal, Decode
from nanokv.cache.base import KVCache, LayerCache
from nanokv.cache.capabilities import has_pages, reserve_of
from nanokv.cache.packed import Packed
from nanokv.config import Config
from nanokv.errors import ConfigError
from nanokv.fast.weights import check_dense
from nanokv.model import Transformer
from nanokv.rope import rope_angles

HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks")
Kinds = tuple[type[nn.Module], type[nn.Module], type[nn.Module]]
PLAIN: tuple[type[nn.Module], ...] = (
    plain_model.Block,
    plain_model.Attention,
    plain_model.MLP,
    plain_model.RMSNorm,
    nn.Linear,
    nn.Embedding,
    nn.ModuleList,
    nn.Identity,
)


def check_plain(model: Transformer) -> None:
    """ConfigError if the kernels cannot compute what this model computes.

    That is a model without plain blocks, with experts, custom modules or hooks, with a bias or eps
    that the config does not have, or with weights of several dtypes.
    """
    if isinstance(model, Transformer):
        check_dense(model.config)
    if not all(hasattr(layer, "self_attn") for layer in getattr(model, "layers", [None])):
        raise ConfigError(
            f"{type(model).__name__} has no plain blocks to fuse: "
            "it is optimized already, or not a Transformer",
            hint="optimize the model that nanokv.load returns",
        )
    for name, part in model.named_modules():
        expected = PLAIN if name else (Transformer,)
        if type(part) not in expected or has_own_forward(part):
            what = name or "the model"
            raise ConfigError(
                f"{what} is a {type(part).__name__} with a custom forward or hooks: "
                "kernels would skip them",
                hint="use the plain model; hooks that only listen can be put on the optimized one",
            )
        check_values(name, part, model.config)
    check_one_dtype(model)


def check_one_dtype(model: Transformer) -> None:
    """ConfigError if the matrices have several dtypes."""
    matrices = [each for each in model.named_parameters() if each[1].dim() == 2]
    dtypes = {weight.dtype: name for name, weight in matrices}
    if len(dtypes) > 1:
        (one, first), (other, second) = list(dtypes.items())[:2]
        raise ConfigError(
            f"{first} is {one} and {second} is {other}: an optimized model has one dtype",
            hint="bring the model into one dtype: model.to(torch.bfloat16)",
        )


def check_values(name: str, part: nn.Module, config: Config) -> None:
    """ConfigError if a bias or an eps differs from the config, which the kernels rely on."""
    biased = {"q_proj": config.qkv_bias, "k_proj": config.qkv_bias, "v_proj": config.qkv_bias}
    biased["o_proj"] = config.output_bias
    expected = biased.get(name.rpartition(".")[2], False)
    if type(part) is nn.Linear and (part.bias is not None) != expected:
        found = "no" if expected else "a"
        raise ConfigError(
            f"{name} has {found} bias, unlike in the config, which the kernels follow",
            hint="use the plain model",
        )
    if type(part) is plain_model.RMSNorm and part.eps != config.rms_norm_eps:
        raise ConfigError(
            f"{name} has eps {part.eps}, but the kernels use the eps of the config, "
            f"{config.rms_norm_eps}",
            hint="use the plain model",
        )


def has_own_forward(part: nn.Module) -> bool:
    """Whether the module has forward hooks, or a `forward` assigned to the instance."""
    return bool("forward" in part.__dict__ or part._forward_hooks or part._forward_pre_hooks)


def any_has_own_forward(parts: Iterable[nn.Module]) -> bool:
    """`has_own_forward` of any module, in a fifth of the time: a decode step checks every layer."""
    owned = list(map(vars, parts))
    return any(map(contains, owned, repeat("forward"))) or any(map(any, map(HOOKS, owned)))


def is_one_call(model: Transformer, kinds: Kinds, cache: KVCache, attend: Attend) -> bool:
    """Whether one kernel call computes the same as calling module after module.

    `kinds`: the classes of embedding, norm and layers.
    """
    if not is_whole(model, kinds) or not has_pages(cache):
        return False
    return reserve_of(cache[0]) is not None and sees_its_row(attend, cache[0])


def is_one_packed_call(model: Transformer, kinds: Kinds, cache: KVCache, attend: Packed) -> bool:
    """`is_one_call` for a packed forward."""
    return is_whole(model, kinds) and has_pages(cache) and sees_its_sequence(attend, cache)


def is_whole(model: Transformer, kinds: Kinds) -> bool:
    """False if a module has hooks or was replaced."""
    if module._global_forward_hooks or module._global_forward_pre_hooks:
        return False
    modules: dict[str, Any] = model._modules  # saves the two Python calls behind `model.layers`
    parts = modules["embed_tokens"], modules["norm"], *modules["layers"]
    embedding, norm, block = kinds
    known = embedding, norm, *[block] * (len(parts) - 2)
    if tuple(map(type, parts)) != known or any_has_own_forward(parts):
        return False
    return plain_model.rope_angles is rope_angles


def sees_its_sequence(attend: Packed, cache: KVCache) -> bool:
    """Whether each query sees its sequence, a part of the cache, up to itself and no other."""
    sequences = getattr(cache, "sequences", ())  # of a packed cache
    if [n for _, n in sequences] != [T for T, _ in attend.parts]:
        return False
    return all(
        type(own) is Causal and own.keys in (None, one.length + T)
        for (one, _), (T, own) in zip(sequences, attend.parts, strict=True)
    )


def sees_its_row(attend: Attend, cache: LayerCache) -> TypeGuard[Decode]:
    """Whether each query sees all tokens of its row and no others, as in the decode kernel.

    With a mask this holds if the cache has pages, whose lengths the kernel reads, and the mask
    shows exactly these lengths.
    """
    if type(attend) is not Decode:
        return False
    made = vars(attend).get("mask", attend)  # not `attend.mask`, which makes a mask from `rows`
    if made is None:
        return True
    if reserve_of(cache) is None:
        return False
    lengths = attend.lengths
    if lengths is None:
        return False
    if made is not attend and made.shape[-1] != lengths.max():
        return False
    return bool((lengths == torch.as_tensor(cache.length) + 1).all())
