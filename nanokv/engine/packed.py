"""The prefill of several prompts in one forward, without padding.

A matmul of 60 rows takes nearly as long as one of 120, so short prompts are faster together. The
model sees N rows of one token, (N,1), each with its position; only attention knows which rows
belong to one prompt.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanokv.cache import KVCache
from nanokv.cache.packed import Packed, positions
from nanokv.cache.paged_pack import pack
from nanokv.checkpoint import Model
from nanokv.inference import attention_over, token_ids
from nanokv.support.device_memory import full_memory_named


@torch.inference_mode()
def prefill_packed(
    model: Model,
    prompts: Sequence[Sequence[int]],
    caches: Sequence[KVCache],
    start_pos: Sequence[int],
) -> Tensor:
    """prompts[b] into caches[b] from start_pos[b] → the logits that follow each, (B,V).

    The same as `prefill` of each prompt. The caches may be of any kind and hold one sequence each.
    After a failure, truncate all of them to start_pos.
    """
    hidden = forward_packed(model, prompts, caches, start_pos)  # (N,C)
    last = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1  # (B,) last rows
    with full_memory_named(model):
        return model.lm_head(hidden[last])  # (B,C) → (B,V)


@torch.inference_mode()
def forward_packed(
    model: Model,
    prompts: Sequence[Sequence[int]],
    caches: Sequence[KVCache],
    start_pos: Sequence[int],
) -> Tensor:
    """The forward of `prefill_packed`: the hidden states of all N tokens, in order, (N,C)."""
    tokens = [token_ids(model, [prompt]) for prompt in prompts]  # (1,T_b) each
    if model.config.states:
        return forward_apart(model, tokens, caches, start_pos)
    sizes = [rows.shape[1] for rows in tokens]
    packed = pack(caches, sizes, model.config)
    device = tokens[0].device
    parts = [(T, attention_over(cache, T, device)) for cache, T in zip(caches, sizes, strict=True)]
    rows = torch.cat(tokens, 1).T  # (N,1)
    at = positions(start_pos, sizes)  # (N,)
    with full_memory_named(model, packed):
        return model(rows, packed, at, Packed(parts))[:, 0]  # (N,C)


def forward_apart(
    model: Model, tokens: Sequence[Tensor], caches: Sequence[KVCache], start_pos: Sequence[int]
) -> Tensor:
    """A forward per prompt, tokens[b] (1,T_b): a recurrent layer takes whole sequences → (N,C)."""
    hidden = []
    for rows, cache, start in zip(tokens, caches, start_pos, strict=True):
        attend = attention_over(cache, rows.shape[1], rows.device)
        with full_memory_named(model, cache):
            hidden.append(model(rows, cache, start, attend)[0])  # (T_b,C)
    return torch.cat(hidden)
