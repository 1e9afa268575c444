"""What a model can do besides computing: say where it is and how large, and be written to a folder.

The base class of `model.Transformer`. Reading is nanokv/loading.py; the files are written by weights_loader/writing.py.
"""

import os
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from nanokv.config import Config, GenerationConfig
from nanokv.support.habits import MODEL, Elsewhere, unknown_name
from weights_loader import CheckpointError, writing

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer


class Model(Protocol):
    """What prefill, decode and generate need: a Transformer, plain, optimized or compiled."""

    @property
    def config(self) -> Config: ...
    @property
    def generation_config(self) -> GenerationConfig: ...
    @property
    def embed_tokens(self) -> nn.Embedding: ...
    @property
    def lm_head(self) -> Callable[[torch.Tensor], torch.Tensor]: ...
    def __call__(self, tokens: Any, cache: Any, start_pos: Any, attend: Any, /) -> torch.Tensor: ...


class PretrainedModel(nn.Module):
    """An nn.Module with a config, an embedding and a head."""

    config: Config
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    generation_config = GenerationConfig()  # replaced by the checkpoint's own when one is loaded

    from_pretrained = Elsewhere(MODEL["from_pretrained"])

    if not TYPE_CHECKING:  # nn.Module's own says what it gives

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                raise unknown_name(self, name, MODEL) from None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding; a model that is loaded has it everywhere."""
        return self.embed_tokens.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; a tied head is counted once."""
        return sum(tensor.nbytes for tensor in chain(self.parameters(), self.buffers()))

    def save(
        self, folder: str | os.PathLike, tokenizer: "Tokenizer | None" = None, force: bool = False
    ) -> None:
        """An ordinary Hugging Face folder, which nanokv.load and transformers open; with a tokenizer, its files too.

        The weights keep their dtype. CheckpointError names a file that is there already, unless `force` replaces it,
        and refuses an optimized model, whose tensors are others.
        """
        config = self.config.to_dict() | {"torch_dtype": str(self.dtype).removeprefix("torch.")}
        files = writing.CHECKPOINT + (writing.TOKENIZER if tokenizer else ())
        try:
            with writing.new_files(folder, files, force) as new:
                writing.write_checkpoint(
                    new, config, self.state_dict(), self.generation_config.to_dict()
                )
                if tokenizer:
                    tokenizer.write_files(new)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder} was not saved: {error}") from error

    def __repr__(self) -> str:
        """One line; `torch.nn.Module.__repr__(model)` draws the tree of modules."""
        c = self.config
        heads = f"{c.num_attention_heads}/{c.num_key_value_heads}×{c.head_dim}"
        where = f"{self.nbytes:,} B {str(self.dtype).removeprefix('torch.')} on {self.device}"
        what = f"{type(self).__name__} {c.family.title}: {c.num_hidden_layers} layers, C {c.hidden_size}"
        return f"<{what}, heads {heads}; {where}>"
