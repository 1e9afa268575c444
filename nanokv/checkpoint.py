"""The base class of `model.Transformer`: its device, dtype and size, and saving to a folder.

Loading is in nanokv/loading.py. The files are written by weights_loader/writing.py.
"""

import os
from collections.abc import Callable, Iterator
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


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v → y


class Layer(Protocol):
    """What the model calls of one layer of a cache: a LayerCache."""

    def append(self, k: torch.Tensor, v: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]: ...


class Cache(Protocol):
    """What the model reads of a whole cache: a KVCache."""

    @property
    def length(self) -> Any: ...  # int, or (B,) if the rows differ
    @property
    def config(self) -> Config | None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Layer]: ...


class Model(Protocol):
    """The interface that prefill, decode and generate need.

    A Transformer satisfies it, plain, optimized or compiled.
    """

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
    generation_config = GenerationConfig()  # nanokv.load replaces it by the checkpoint's

    from_pretrained = Elsewhere(MODEL["from_pretrained"])

    if TYPE_CHECKING:  # nn.Module says that a call gives Any

        def __call__(
            self, tokens: Any, cache: Any, start_pos: Any, attend: Any
        ) -> torch.Tensor: ...

    else:  # type checkers use the signature in nn.Module

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                raise unknown_name(self, name, MODEL) from None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding. `load` gives it to all weights, unless its dtype is None."""
        return self.embed_tokens.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights. A tied head counts once."""
        return sum(tensor.nbytes for tensor in chain(self.parameters(), self.buffers()))

    def save(
        self,
        folder: str | os.PathLike[str],
        tokenizer: "Tokenizer | None" = None,
        force: bool = False,
    ) -> None:
        """Write an ordinary Hugging Face folder that nanokv.load and transformers can open.

        The weights keep their dtype. The tokenizer's files are written if a tokenizer is given.
        Raises CheckpointError if one of the files exists and `force` is false, or if the model was
        optimized, because an optimized model has other tensors.
        """
        config = self.config.to_dict() | {"torch_dtype": str(self.dtype).removeprefix("torch.")}
        files: tuple[str, ...] = writing.CHECKPOINT
        if tokenizer:
            files += writing.TOKENIZER
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
        """One line. `torch.nn.Module.__repr__(model)` gives the tree of modules."""
        c = self.config
        dtype = str(self.dtype).removeprefix("torch.")
        name = f"{type(self).__name__} {c.family.title}"
        sizes = f"{c.num_hidden_layers} layers, C {c.hidden_size}"
        heads = f"{c.num_attention_heads}/{c.num_key_value_heads}×{c.head_dim}"
        return f"<{name}: {sizes}, heads {heads}; {self.nbytes:,} B {dtype} on {self.device}>"
