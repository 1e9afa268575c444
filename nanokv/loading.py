"""From a name, a folder or a hub id to a model and its tokenizer: the only place where weights_loader meets nanokv."""

import torch

import weights_loader
from nanokv.config import Config, GenerationConfig
from nanokv.model import Qwen3
from nanokv.skeleton import skeleton
from nanokv.tokenizer import Tokenizer


def load(source="tiny", dtype=torch.float32, device="cpu", revision=None):
    """("tiny" | folder | "Qwen/Qwen3-0.6B") → (model in eval mode, tokenizer).

    dtype None keeps what the checkpoint stores. The model is built on the meta device and the loaded tensors are
    assigned to it, so weights exist once in memory. Raises CheckpointError or ConfigError before memory is taken.
    """
    folder = weights_loader.resolve(source, revision=revision)
    Config.from_folder(folder)  # refuse what is not implemented before a byte of weights is read
    generation_config = GenerationConfig.from_folder(folder)
    tokenizer = Tokenizer.from_folder(folder)
    fields, state_dict = weights_loader.load(folder, dtype=dtype, device=device)
    model = build(Config.from_dict(fields), state_dict)
    model.generation_config = generation_config
    return model, tokenizer


def build(config: Config, state_dict: dict) -> Qwen3:
    """A Qwen3 in eval mode that owns exactly these tensors; a missing, left-over or misshapen one raises."""
    model = skeleton(config)
    if config.tie_word_embeddings:
        state_dict = {**state_dict, "lm_head.weight": state_dict["embed_tokens.weight"]}
    model.load_state_dict(state_dict, strict=True, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight  # one parameter, V·C values stored once
    return model.requires_grad_(False).eval()
