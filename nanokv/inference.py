"""The three ways to run the model, side by side.

    score    all T positions, no cache     every token again          the baseline and the parity reference
    prefill  T new tokens into the cache   bound by arithmetic        cost ≈ 2·T·(weights) FLOPs, weights read once
    decode   one new token                 bound by memory bandwidth  cost ≈ weights + cache, read once, in bytes

`start_pos` is always stated by the caller and checked against the cache by the model.
"""

from functools import partial

import torch

from nanokv.attention import decode_attention, is_square_causal, prefill_attention, square_attention
from nanokv.cache.base import NoCache


@torch.inference_mode()
def score(model, tokens):
    """Logits of every position without a cache. tokens (B,T) → (B,T,V); V·T·4 bytes: 622 MB at T 1024, V 151,936."""
    cache = NoCache(model.config.num_hidden_layers)
    hidden = model(_ids(model, tokens), cache, 0, square_attention)  # (B,T,C)
    return model.lm_head(hidden)  # (B,T,V)


@torch.inference_mode()
def prefill(model, tokens, cache, start_pos: int = 0):
    """Write T tokens into the cache, return the logits that follow the last one. tokens (B,T) → (B,V).

    Works from any start_pos: an empty cache, the next chunk of a long prompt, the next turn of a chat.
    """
    tokens = _ids(model, tokens)
    mask = cache.mask(tokens.shape[1])  # asked once, before the first append
    mask = mask if mask is None else mask.to(tokens.device)
    attend = square_attention if is_square_causal(mask) else partial(prefill_attention, mask=mask)
    hidden = model(tokens, cache, start_pos, attend)  # (B,T,C)
    return model.lm_head(hidden[:, -1])  # (B,C) → (B,V): slice first, the other T−1 rows of logits are never needed


@torch.inference_mode()
def decode(model, token, cache, start_pos: int):
    """Append one token to the cache, return the logits that follow it. token (B,1) → (B,V)."""
    token = _ids(model, token)
    if token.shape[1] != 1:
        raise ValueError(f"decode takes one token a row, got {token.shape[1]}: prefill takes any number")
    attend = partial(decode_attention, mask=cache.mask(1))
    hidden = model(token, cache, start_pos, attend)  # (B,1,C)
    return model.lm_head(hidden[:, -1])  # (B,V)


def _ids(model, tokens):
    """Ids as a (B,T) int64 tensor on the model's device; anything else is refused before work starts."""
    tokens = torch.as_tensor(tokens, device=model.embed_tokens.weight.device)
    if tokens.dim() != 2 or tokens.numel() == 0 or tokens.dtype not in (torch.int64, torch.int32):
        got = f"{tuple(tokens.shape)} {tokens.dtype}"
        raise ValueError(f"token ids must be a (B,T) integer tensor with B and T ≥ 1, got {got}")
    return tokens.long()
