"""nanokv.load: from a name, a folder or a hub id to a model and its tokenizer.

weights_loader reads the files; this module builds the model from the tensors.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import weights_loader
from nanokv.config import Config, GenerationConfig
from nanokv.config_file import eos_token_ids, optional
from nanokv.errors import ConfigError
from nanokv.model import Transformer
from nanokv.support.clock import stamp
from nanokv.support.habits import hinted
from nanokv.support.neighbours import watch
from nanokv.text import endings
from nanokv.text.tokenizer import Tokenizer
from weights_loader import CheckpointError, Device, Dtype, names
from weights_loader.prefetch import Prefetch
from weights_loader.strict import read_object

Read = Callable[
    [Path, dict[str, Any], torch.dtype | None, torch.device, Prefetch | None], Transformer
]


@hinted
def load(
    source: str | os.PathLike[str] = "tiny",
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: str | None = None,
    check_finite: bool = False,
    read: Read | None = None,
) -> tuple[Transformer, Tokenizer]:
    """A model in eval mode and its tokenizer.

    source: "tiny", "smollm2", a folder, a GGUF file, or a hub id such as "Qwen/Qwen3-0.6B".
    dtype and device are torch objects or their names: torch.bfloat16, "bfloat16" or "bf16". "auto"
    is also the command line's default: a GPU if there is one, and the checkpoint's dtype, except
    that a CPU uses float32 for "tiny" and for float16 checkpoints. dtype None keeps the dtype of
    each tensor.

    The model is built on the meta device and the loaded tensors are assigned to it, so that each
    weight exists once in memory. Raises CheckpointError or ConfigError before memory is allocated.

    read: builds the model from the weights. nanokv.fast.stored.read is for a GGUF file on a CPU: the
    model is a fast one, as of nanokv.optimize, and its matrices stay in the blocks of the file. By
    default all weights become numbers of this dtype.

    check_finite also reads every weight, 0.1 to 0.2 s per GB on two cores, and rejects NaN and
    infinity: softmax can turn them into logits that are finite and wrong.
    """
    _, place = weights_loader.check_target(dtype, device)
    folder = weights_loader.resolve(source, revision=revision)
    fields = read_object(folder / "config.json", ConfigError)
    if dtype == "auto":
        dtype = weights_loader.default_dtype(
            source, Config.from_dict(fields).torch_dtype, place.type
        )
    if read is not None and check_finite:
        raise ConfigError(
            "check_finite with a reader of its own: only that reader knows its weights",
            hint="functools.partial(nanokv.fast.stored.read, check_finite=True)",
        )
    return load_folder(folder, fields, dtype, place, check_finite, read=read)


def load_folder(
    folder: Path,
    fields: dict[str, Any],
    dtype: Dtype,
    device: Device,
    check_finite: bool = False,
    prefetched: Prefetch | None = None,
    read: Read | None = None,
    prepare: Callable[[Tokenizer], None] | None = None,
) -> tuple[Transformer, Tokenizer]:
    """`load` for a local folder whose config.json has these `fields`. Each file is read once.

    `read` builds the model from the weights: the whole model by default, one rank's part in
    nanokv/parallel. `prepare` may change the tokenizer's chat template; it runs before the tokens
    that end an answer are looked up.
    """
    dtype, device = weights_loader.check_target(dtype, device)
    if device.type == "cpu":
        watch(torch.get_num_threads())
    # Raises for anything not implemented, before any weights are read.
    config = Config.from_dict(fields)
    generation = optional(folder / "generation_config.json")
    generation_config = GenerationConfig.from_fields(fields, generation)
    tokenizer = Tokenizer.from_folder(folder, rows=config.vocab_size)
    templates = [*tokenizer.chat_templates.values()]
    if prepare is not None:
        prepare(tokenizer)
        templates += tokenizer.chat_templates.values()
    ends = endings.ends(tokenizer, eos_token_ids(generation), eos_token_ids(fields), templates)
    generation_config = replace(generation_config, eos_token_ids=tuple(end.id for end in ends))
    tokenizer.control_ids |= {end.id for end in ends} & set(tokenizer.special_tokens.values())
    stamp("tokenizer")
    check_vocabulary(folder, tokenizer, config)
    model = (read or read_model)(folder, fields, dtype, device, prefetched)
    model.generation_config = generation_config
    if check_finite:
        refuse_unfinite(folder, model)
    return model, tokenizer


def check_vocabulary(folder: Path, tokenizer: Tokenizer, config: Config) -> None:
    """CheckpointError if the tokenizer's largest id has no row in the embedding."""
    last = tokenizer.vocab_size - 1
    if last < 0:
        return
    token = tokenizer.backend.id_to_token(last) or ""
    weights_loader.check_last_id(folder / "tokenizer.json", token, last, config.vocab_size)


def read_model(
    folder: Path,
    fields: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
    prefetched: Prefetch | None = None,
) -> Transformer:
    """A model with all the weights of a folder."""
    fields, state_dict = weights_loader.read(folder, dict(fields), dtype, device, prefetched)
    return build(Config.from_dict(fields), state_dict)


def refuse_unfinite(folder: Path, model: Transformer) -> None:
    """CheckpointError names the first three tensors that hold NaN or infinity."""
    bad = unfinite(model)
    if bad:
        more = f", and {len(bad) - 3} more tensors" if len(bad) > 3 else ""
        raise CheckpointError(
            f"{folder}: {'; '.join(bad[:3])}{more}",
            hint="the file is damaged, or the training went wrong: fetch it again",
        )


def unfinite(model: Transformer) -> list[str]:
    """One sentence per weight that holds NaN or infinity; [] if all values are finite.

    "model.layers.0.self_attn.q_proj.weight holds 3 NaN and 1 infinite of 4,096 values". The minimum
    and the maximum show it without a second tensor: if one value is NaN, both are NaN.
    """
    found = []
    kind = model.config.model_type
    for name, weight in model.named_parameters():
        low, high = weight.aminmax()
        if low.isfinite() and high.isfinite():
            continue
        name = names.to_hugging_face(name, kind)
        nans = int(weight.isnan().sum())
        infinite = int(weight.isinf().sum())
        found.append(
            f"{name} holds {nans:,} NaN and {infinite:,} infinite of {weight.numel():,} values"
        )
    return found


def build(config: Config, state_dict: dict[str, torch.Tensor]) -> Transformer:
    """A model in eval mode with exactly these tensors.

    RuntimeError from torch if a tensor is missing, left over or of the wrong shape.
    """
    return fill(skeleton(config), state_dict)


def fill(model: Transformer, state_dict: dict[str, torch.Tensor]) -> Transformer:
    """`build` into a skeleton that the caller has made."""
    tied = model.config.tie_word_embeddings
    if tied:
        state_dict = {**state_dict, "lm_head.weight": state_dict["embed_tokens.weight"]}
    model.load_state_dict(state_dict, strict=True, assign=True)
    if tied:
        model.lm_head.weight = model.embed_tokens.weight  # one parameter: V·C values, stored once
    return model.requires_grad_(False).eval()


def random_model(
    config: Config, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Transformer:
    """A model with seeded random weights, for measuring time and memory without a download.

    The weights are the same in every run on one kind of device.
    """
    if torch.device(device).type == "cpu":
        watch(torch.get_num_threads())
    generator = torch.Generator(device).manual_seed(0)
    state = {}
    for name, empty in skeleton(config).named_parameters():
        weight = torch.empty(empty.shape, dtype=dtype, device=device)
        if weight.dim() > 1:
            weight.normal_(0, 0.02, generator=generator)
        else:  # of a norm, or a bias
            weight.fill_(1)
        state[name] = weight
    return build(config, state)


class NotInitialised(TorchFunctionMode):
    """Inside this mode torch.nn.init does nothing.

    On the meta device it has no effect anyway, but it would import torch's compiler, 1.7 s.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def skeleton(config: Config, kind: type[Transformer] = Transformer) -> Transformer:
    """A model on the meta device: every parameter has its name and shape, but no values.

    The loaded tensors are assigned to it, so that no weight exists twice and no random values are
    drawn only to be replaced.
    """
    with torch.device("meta"), NotInitialised():
        return kind(config)
