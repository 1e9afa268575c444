"""Write a checkpoint as a GGUF file, tensor by tensor, without building the model.

weights_loader.gguf_writing writes the file. This module checks the checkpoint as `nanokv.load`
does, and collects what the file records of the tokenizer.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

import weights_loader
from nanokv.config import Config
from nanokv.loading import load_folder, skeleton
from nanokv.model import Transformer
from nanokv.text.tokenizer import Tokenizer
from weights_loader.gguf_model import POINTER, places, tensors_at
from weights_loader.gguf_types import PLAIN
from weights_loader.gguf_vocabulary import Vocabulary
from weights_loader.gguf_writing import ARCHITECTURES, write_gguf

CPU = torch.device("cpu")


def export_gguf(
    folder: Path,
    fields: dict[str, Any],
    path: str | os.PathLike[str],
    type_name: str,
    name: str = "",
) -> int:
    """Write the checkpoint of `folder`, whose config.json has these `fields`, to the file `path`.

    Returns the size of the file in bytes. type_name: a key of weights_loader.gguf_types.TYPES;
    name: for general.name. An existing file is replaced once the new one is complete. Raises
    CheckpointError, ConfigError or TokenizerError, before anything is written, for a checkpoint
    that `nanokv.load` refuses or that a GGUF file has no place for.
    """
    fields = dict(fields)
    model, tokenizer = load_folder(folder, fields, None, CPU, read=without_weights)
    with weights_loader.readable(folder):
        tensors = weights_loader.checked_entries(folder, fields)  # decides if the head is tied
    config = Config.from_dict(fields).to_dict()
    generation = model.generation_config
    recorded = vocabulary(tokenizer, generation.eos_token_ids)
    return write_gguf(path, config, tensors, type_name, recorded, generation.to_dict(), name)


def without_weights(folder: Path, fields: dict[str, Any], *_: Any) -> Transformer:
    """A model on the meta device, for `load_folder`."""
    return skeleton(Config.from_dict(fields))


def vocabulary(tokenizer: Tokenizer, ends: tuple[int, ...]) -> Vocabulary:
    """What a GGUF file records of a tokenizer. `ends`: the ids that end an answer."""
    fields = json.loads(tokenizer.backend.to_str())
    return Vocabulary(fields, tokenizer.names, tokenizer.chat_templates, ends)


def unreadable_elsewhere(config: Config) -> str:
    """Why llama.cpp refuses a file with this config, or "".

    Its qwen2, olmo2 and lfm2 read q as (C,C), whatever attention.key_length says, its olmo2 and
    gpt-oss demand a head of their own (llama-model.cpp, olmo2.cpp, openai-moe.cpp), and its qwen35
    has values as wide as keys.
    """
    linear = config.linear
    if linear and linear.linear_value_head_dim != linear.linear_key_head_dim:
        return (
            f"llama.cpp refuses this file: in its qwen35 linear_value_head_dim is "
            f"linear_key_head_dim {linear.linear_key_head_dim}, here {linear.linear_value_head_dim}"
        )
    heads, D, C = config.num_attention_heads, config.head_dim, config.hidden_size
    if config.model_type in ("qwen2", "olmo3", "lfm2") and heads * D != C:
        return (
            f"llama.cpp refuses this file: in its {ARCHITECTURES[config.model_type]} {heads} heads "
            f"have {C} dimensions together, here {heads * D}"
        )
    if config.model_type in ("olmo3", "gpt_oss") and config.tie_word_embeddings:
        name = ARCHITECTURES[config.model_type]
        return f"llama.cpp refuses this file: its {name} has a head that is not tied"
    return ""


def quantized_types(folder: Path) -> str:
    """The quantized types in the GGUF file of `folder`, such as "Q4_1"; "" for plain numbers."""
    if not (folder / POINTER).is_file():
        return ""
    _, tensors = places(folder)
    found = {info.type.name for place in tensors.values() for info in tensors_at(place)}
    return ", ".join(sorted(found - set(PLAIN)))
