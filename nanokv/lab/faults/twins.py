"""Twins of a model with parts that it lacks, for the faults of these parts.

A twin has the model's layers and as many new ones, without an MLP, so that it answers much as the
model does (Net2Net deepens a trained network like this: Chen et al. 2015, arXiv 1511.05641):

    with_states     before each layer, one with a recurrent state (hybrid.py) and random weights
    sharing_keys    behind each layer, one that reads its keys and values (cla.py), with its queries

The config is that of the family with such layers, so `make_cache` makes what they need.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanokv.cla import SharingBlock
from nanokv.config import Config, Linear
from nanokv.hybrid import LinearBlock
from nanokv.model import MLP, Transformer

WRITES = 0.1  # factor of what a state adds; at 0.3 the bundled model says other words
STATE = Linear(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)


def itself(model: Transformer) -> Transformer:
    """For a scenario that needs no other parts."""
    return model


@torch.no_grad()
def with_states(model: Any) -> Transformer:
    """A layer with a state before each layer. A model with states is its own twin."""
    if model.config.states:
        return model
    L = model.config.num_hidden_layers
    twin: Transformer = copy.deepcopy(model)
    twin.config = replace(
        model.config,
        model_type="qwen3_5_text",
        num_hidden_layers=2 * L,
        layer_types=("linear_attention", "full_attention") * L,
        linear=STATE,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        states = [state_block(twin.config) for _ in range(L)]
    pairs = zip(states, twin.layers, strict=True)
    twin.layers = nn.ModuleList(block for pair in pairs for block in pair)
    return twin.to(model.embed_tokens.weight)  # the dtype and the device


def state_block(config: Config) -> LinearBlock:
    """Random weights, and no MLP."""
    block = LinearBlock(config, STATE)
    block.linear_attn.out_proj.weight *= WRITES
    block.mlp = nothing(config)
    return block


@torch.no_grad()
def sharing_keys(model: Any) -> Transformer:
    """A layer that shares keys behind each layer. A model with such layers is its own twin."""
    if model.config.kv_sharing_factor > 1:
        return model
    L = model.config.num_hidden_layers
    twin: Transformer = copy.deepcopy(model)
    twin.config = replace(
        model.config, model_type="qwen3_cla", num_hidden_layers=2 * L, kv_sharing_factor=2
    )
    with torch.random.fork_rng(devices=()):  # new modules draw numbers, that are replaced
        pairs = [(first, sharing_block(twin.config, first)) for first in twin.layers]
    twin.layers = nn.ModuleList(block for pair in pairs for block in pair)
    return twin.to(model.embed_tokens.weight)  # the dtype and the device


def sharing_block(config: Config, first: Any) -> SharingBlock:
    """The queries and the output of `first`, over its keys and values, and no MLP."""
    block = SharingBlock(config, layer=1)
    for name in ("q_proj", "q_norm", "o_proj"):
        setattr(block.self_attn, name, copy.deepcopy(getattr(first.self_attn, name)))
    block.input_layernorm = copy.deepcopy(first.input_layernorm)
    block.mlp = nothing(config)
    return block


def nothing(config: Config) -> MLP:
    """An MLP that adds 0."""
    mlp = MLP(config.hidden_size, 1)
    for weight in mlp.parameters():
        weight.zero_()
    return mlp
