"""Reads a GGUF file into the fast model, with its matrices in the blocks in which they are stored.

Nothing is dequantized and nothing copied: the matrices are the pages of the mapped file. Only the
permuted rows of Llama's q and k are copied into their order. Matrices of a type without kernels
become dense, and vectors (norms, biases) are as in the plain model.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weights_loader
from nanokv.config import Config
from nanokv.errors import ConfigError
from nanokv.fast.blocks import SIZES, Blocks, stacked
from nanokv.fast.experts import Expert, ExpertBlock, Mixture
from nanokv.fast.model import Block, FastTransformer, Layer, Norm
from nanokv.fast.weights import Dense, Matrix
from nanokv.support.neighbours import watch
from weights_loader import CheckpointError
from weights_loader.prefetch import Prefetch

Get = Callable[[str], Any]


def read(
    folder: Path,
    fields: dict[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
    prefetched: Prefetch | None = None,
    check_finite: bool = False,
) -> FastTransformer:
    """The model of a GGUF file. A `Read` of nanokv.loading.

    `dtype` is that of the cache and of matrices without blocks. Raises ConfigError for a GPU, for
    float16 and for a folder of another kind, and CheckpointError for a damaged file.
    """
    fields = dict(fields)
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"blocks of a GGUF file have kernels on a CPU in bfloat16 or float32, not for {dtype} "
            f"on {device}",
            hint="dequantize them: load without `read`, or --dequantize",
        )
    if not weights_loader.stored_matrices(folder):
        raise ConfigError(
            f"{folder} is no GGUF file: its weights are numbers, there is nothing to dequantize",
            hint="load it without `read`",
        )
    config = Config.from_dict(fields)
    if config.family.own_parts:
        raise ConfigError(
            f"{config.family.title} has layers of its own kinds, which no kernel computes over "
            "blocks of a GGUF file",
            hint="dequantize them: load without `read`, or --dequantize",
        )
    watch(torch.get_num_threads())
    state, blocks = weights_loader.read_blocks(folder, fields, dtype, device, SIZES)
    model = assembled(config, state, blocks, dtype)
    if check_finite:
        refuse_unfinite(folder, model, state)
    return model


def assembled(
    config: Config,
    state: dict[str, Tensor],
    blocks: dict[str, tuple[str, Tensor]],
    dtype: torch.dtype,
) -> FastTransformer:
    """The fast model over these tensors and blocks, by their names in the plain model."""

    def matrix(name: str) -> Matrix:
        bias = state.get(f"{name}.bias")
        if f"{name}.weight" not in blocks:
            return Dense(state[f"{name}.weight"], bias)
        kind, rows = blocks[f"{name}.weight"]
        return Blocks(rows, kind, dtype, bias)

    table = matrix("embed_tokens")
    head = table if config.tie_word_embeddings else matrix("lm_head")
    norm = Norm(state["norm.weight"], config.rms_norm_eps)
    layers = [layer(config, i, matrix, state.get) for i in range(config.num_hidden_layers)]
    counts: Counter[str] = Counter()
    for kind, rows in blocks.values():
        counts[kind] += rows.nbytes
    kinds = " and ".join(kind for kind, _ in counts.most_common())
    return FastTransformer(config, table, layers, norm, head, kinds)


def layer(config: Config, number: int, matrix: Callable[[str], Matrix], vector: Get) -> Layer:
    """The layer with this number. q, k and v keep their own types, and so do gate and up."""
    name = f"layers.{number}"
    attention = f"{name}.self_attn"
    qkv = stacked([matrix(f"{attention}.{part}_proj") for part in "qkv"])
    o = matrix(f"{attention}.o_proj")
    norms = {
        "norm": vector(f"{name}.input_layernorm.weight"),
        "q_norm": vector(f"{attention}.q_norm.weight"),
        "k_norm": vector(f"{attention}.k_norm.weight"),
        "mlp_norm": vector(f"{name}.post_attention_layernorm.weight"),
    }
    sizes = config.experts_of(number)
    if sizes is None:
        return Block(config, qkv, o, *mlp(f"{name}.mlp", matrix), norms)
    experts = [Expert(*mlp(f"{name}.mlp.experts.{e}", matrix)) for e in range(sizes.num_experts)]
    mixture = Mixture(sizes, matrix(f"{name}.mlp.gate"), experts)
    return ExpertBlock(config, qkv, o, mixture, norms)


def mlp(name: str, matrix: Callable[[str], Matrix]) -> tuple[Matrix, Matrix]:
    """(gate above up, down) of the MLP with this name."""
    gate_up = stacked([matrix(f"{name}.{part}_proj") for part in ("gate", "up")])
    return gate_up, matrix(f"{name}.down_proj")


def refuse_unfinite(folder: Path, model: FastTransformer, state: dict[str, Tensor]) -> None:
    """CheckpointError if a weight, also one that its block gives, is NaN or infinite."""
    bad = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    for name, part in model.named_modules():
        if isinstance(part, Blocks) and any(not each.isfinite().all() for _, each in part.parts()):
            bad.append(f"{name} ({part.kind})")
    if bad:
        raise CheckpointError(
            f"{folder}: {', '.join(bad[:3])}: NaN or infinite values in {len(bad)} tensors",
            hint="the file is damaged, or the training went wrong: fetch it again",
        )
