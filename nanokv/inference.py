"""The four ways to run the model, side by side.

    score         all T positions, no cache     computes every token again   the parity reference
    prefill       T new tokens into the cache   bound by arithmetic          ≈ 2·T·weights FLOPs
    decode        one new token                 bound by memory bandwidth    reads weights + cache
    verify_draft  T guessed tokens, all logits  computed like a prefill      ≈ one decode, small T

The caller always states `start_pos`; the model checks it against the cache. A first reading may
skip everything below `verify_draft` except `attention_over`.
"""

import math
from typing import TypeGuard

import torch
from torch import Tensor

from nanokv.attention import Attend, Causal, Decode, Masked, is_causal
from nanokv.cache.base import KVCache, NoCache
from nanokv.cache.capabilities import causal_keys, row_lengths
from nanokv.checkpoint import Model
from nanokv.costs.formulas import forward_bytes
from nanokv.costs.free_memory import available_memory
from nanokv.errors import CacheError
from nanokv.support.device_memory import full_memory_named
from nanokv.support.neighbours import fewer_threads
from nanokv.text.ids import Rows, id_rows

Position = int | Tensor  # start_pos; a tensor (B,) if the rows differ in length


@torch.inference_mode()
def score(model: Model, tokens: Rows) -> Tensor:
    """Logits of every position, without a cache. tokens (B,T) → (B,T,V).

    The fp32 logits take B·T·V·4 bytes: 622 MB for T = 1,024 and V = 151,936.
    """
    cache = NoCache(model.config.num_kv_layers)
    with full_memory_named(model):
        hidden = model(token_ids(model, tokens), cache, 0, Causal())  # (B,T,C)
        return model.lm_head(hidden)  # (B,T,V)


@torch.inference_mode()
def prefill(model: Model, tokens: Rows, cache: KVCache, start_pos: Position = 0) -> Tensor:
    """Append T tokens to the cache, return the logits that follow the last. tokens (B,T) → (B,V).

    `start_pos` is 0 for an empty cache, and the cache's length for the next chunk of a long prompt
    or the next turn of a chat.
    """
    hidden = _append(model, tokens, cache, start_pos)  # (B,T,C)
    # Slice before lm_head: the logits of the other T−1 positions are not needed.
    return model.lm_head(hidden[:, -1])  # (B,C) → (B,V)


@torch.inference_mode()
def prefill_chunks(
    model: Model, tokens: Rows, cache: KVCache, start_pos: Position = 0, chunk: int = 512
) -> Tensor:
    """`prefill` in parts of `chunk` tokens: equal logits, bounded memory. tokens (B,T) → (B,V).

    The temporary memory of a forward grows with its T (MLP: 3·T·intermediate values, mask: T·S
    bytes); here T ≤ chunk. If one part fails, the cache keeps the parts before it:
    cache.truncate(start_pos) removes them.
    """
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk is {chunk!r}: it must be an integer ≥ 1")
    for part in token_ids(model, tokens).split(chunk, dim=1):  # (B,t), t ≤ chunk
        logits = prefill(model, part, cache, start_pos)
        start_pos = start_pos + part.shape[1]
    return logits  # (B,V)


def prefill_chunk(model: Model, rows: int = 1) -> int:
    """Tokens per forward of a long prompt, on this model's device.

    All commands, generate, Session, beams, batches, drafts and the bench use it, and the engine as
    its budget per step. (`nanokv serve` uses a smaller budget.)

    CPU: Python handles Ctrl-C between two operators, so the longest matrix product is limited to
    8 GFLOP, 0.2 s on a slow CPU. It computes gate and up, 4·C·I FLOPs per token. The minimum is 64:
    above 32 rows a forward is bound by arithmetic, not by reading the weights. The maximum is 512,
    because longer chunks cost no less per token.

    GPU: as many tokens as memory allows, at most 16,384 in all `rows` together.
    """
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        return chunk_in(available_memory(str(device)), model, rows)
    if device.type != "cpu":
        return 2048
    wanted = 8e9 / (4 * model.config.hidden_size * model.config.intermediate_size)
    return min(512, max(64, 2 ** int(math.log2(wanted))))


def chunk_in(free: int | None, model: Model, rows: int) -> int:
    """Tokens per row such that one forward takes at most a quarter of the `free` bytes.

    A power of two between 512 and 16,384, divided by `rows`. Three quarters stay free for the
    growing cache and for a second process on the same device.
    """
    fit = 16_384
    if free is not None:
        fit = free // 4 // forward_bytes(model.config, model.embed_tokens.weight.element_size())
    power_of_two = 1 << max(1, fit).bit_length() - 1
    tokens = min(16_384, max(512, power_of_two))
    return max(64, tokens // rows)


@torch.inference_mode()
def decode(model: Model, token: Rows, cache: KVCache, start_pos: Position) -> Tensor:
    """Append one token to the cache and return the logits that follow it. token (B,1) → (B,V)."""
    token = token_ids(model, token)
    check_cache(cache)
    if token.shape[1] != 1:
        raise ValueError(
            f"decode takes one token per row, got {token.shape[1]}: prefill takes any number"
        )
    with fewer_threads(model, len(token)), full_memory_named(model, cache):
        hidden = model(token, cache, start_pos, attention_of_one(cache))  # (B,1,C)
        return model.lm_head(hidden[:, -1])  # (B,V)


@torch.inference_mode()
def verify_draft(model: Model, tokens: Rows, cache: KVCache, start_pos: Position) -> Tensor:
    """Append T guessed tokens and return the logits that follow each. tokens (B,T) → (B,T,V).

    Weights and cache are read once for all T tokens, so where decode is bound by memory bandwidth a
    check of T guesses takes about as long as one decode. The logits take B·T·V·4 bytes. The caller
    then removes wrong guesses with cache.truncate.
    """
    with full_memory_named(model, cache):
        return model.lm_head(_append(model, tokens, cache, start_pos))  # (B,T,C) → (B,T,V)


def _append(model, tokens, cache, start_pos):
    """Run T new tokens over the cached ones. tokens (B,T) → hidden states (B,T,C)."""
    tokens = token_ids(model, tokens)
    check_cache(cache)
    with full_memory_named(model, cache):
        attend = attention_over(cache, tokens.shape[1], tokens.device)
        return model(tokens, cache, start_pos, attend)


def attention_of_one(cache: KVCache) -> Attend:
    """`attention_over` for a decode step.

    The mask stays on its device: a kernel that reads row lengths from it must not wait for a GPU.
    """
    own = own_attention(cache, 1)
    if own:
        return own
    lengths = row_lengths(cache)
    if lengths is not None:
        return Decode(rows=lengths)
    return Decode(cache.mask(1))  # None, unless rows differ in length


def attention_over(cache: KVCache, T: int, device: torch.device) -> Attend:
    """The attention object for the next T queries over this cache, made before the first append."""
    own = own_attention(cache, T)
    if own:
        return own
    keys = causal_keys(cache, T)
    if keys:  # most caches: causal, so no mask is made
        return Causal(keys)
    mask = cache.mask(T)
    if mask is None and T == 1:
        return Causal()
    if mask is None:  # every query sees every key
        return Masked(None)
    if is_causal(mask):
        return Causal(keys=mask.shape[1])
    return Masked(mask.to(device))


def own_attention(cache: KVCache, T: int) -> Attend | None:
    """The cache's own attention object, if its class has the optional method `attention`."""
    if not hasattr(cache, "attention"):
        return None
    return cache.attention(T)


def check_cache(cache: object) -> None:
    """CacheError if a name or None was passed instead of a cache."""
    if hasattr(cache, "mask"):
        return
    name = cache if isinstance(cache, str) else "dict"
    hint = f'make_cache("{name}", model.config)'
    raise CacheError(f"cache is {cache!r}: a KVCache was expected", hint)


def token_ids(model: Model, ids: Rows) -> Tensor:
    """Ids as a list, an array or a tensor (B,T) → int64 (B,T) on the model's device.

    Raises TokenIdsError before any work. Valid ids on a CPU cost two comparisons. Ids on a GPU are
    not checked, because a check would wait for the GPU.
    """
    device = model.embed_tokens.weight.device
    vocabulary = model.config.vocab_size
    if is_id_tensor(ids):
        if ids.device.type != "cpu" and device.type != "cpu":
            return ids.to(device, torch.int64)
        if ids.numel() == 1:  # a decode step
            known = 0 <= ids.item() < vocabulary
        else:
            low, high = ids.aminmax()
            known = bool(low >= 0 and high < vocabulary)
        if known:
            return ids.to(device, torch.int64)
    # Everything else, valid or not: id_rows converts it, or raises an error with the reason.
    return torch.tensor(id_rows(ids, vocabulary), device=device)  # (B,T)


def is_id_tensor(ids: Rows) -> TypeGuard[Tensor]:
    """True for an integer tensor (B,T) with at least one element."""
    return (
        isinstance(ids, Tensor)
        and ids.dim() == 2
        and ids.numel() > 0
        and ids.dtype in (torch.int64, torch.int32)
    )
