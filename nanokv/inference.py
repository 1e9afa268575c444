"""The ways to run the model, side by side.

    score         all T positions, no cache     every token again          the baseline and the parity reference
    prefill       T new tokens into the cache   bound by arithmetic        cost ≈ 2·T·(weights) FLOPs, weights read once
    decode        one new token                 bound by memory bandwidth  cost ≈ weights + cache, read once, in bytes
    verify_draft  T guessed tokens, all logits  computed like a prefill    cost ≈ one decode while T is small

`start_pos` is always stated by the caller and checked against the cache by the model.
"""

import math

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

Position = int | Tensor  # of the next token; (B,) where rows differ in length


@torch.inference_mode()
def score(model: Model, tokens: Rows) -> Tensor:
    """Logits of every position without a cache. tokens (B,T) → (B,T,V); V·T·4 bytes: 622 MB at T 1024, V 151,936."""
    cache = NoCache(model.config.num_hidden_layers)
    with full_memory_named(model):
        hidden = model(token_ids(model, tokens), cache, 0, Causal())  # (B,T,C)
        return model.lm_head(hidden)  # (B,T,V)


@torch.inference_mode()
def prefill(model: Model, tokens: Rows, cache: KVCache, start_pos: Position = 0) -> Tensor:
    """Write T tokens into the cache, return the logits that follow the last one. tokens (B,T) → (B,V).

    Works from any start_pos: an empty cache, the next chunk of a long prompt, the next turn of a chat.
    """
    hidden = _append(model, tokens, cache, start_pos)  # (B,T,C)
    # Slice first, the other T−1 rows of logits are never needed.
    return model.lm_head(hidden[:, -1])  # (B,C) → (B,V)


@torch.inference_mode()
def prefill_chunks(
    model: Model, tokens: Rows, cache: KVCache, start_pos: Position = 0, chunk: int = 512
) -> Tensor:
    """`prefill` of a long prompt in parts of `chunk` tokens: the same logits, a bounded peak. tokens (B,T) → (B,V).

    What a forward needs besides weights and cache grows with its T (MLP: 3·T·intermediate values, mask: T·S bytes);
    here T ≤ chunk. If one part fails, the parts before it stay: cache.truncate(start_pos) forgets them.
    """
    if type(chunk) is not int or chunk < 1:
        raise ValueError(f"chunk is {chunk!r}: it must be an integer ≥ 1")
    for part in token_ids(model, tokens).split(chunk, dim=1):  # (B,t), t ≤ chunk
        logits = prefill(model, part, cache, start_pos)
        start_pos = start_pos + part.shape[1]
    return logits  # (B,V)


def prefill_chunk(model: Model, rows: int = 1) -> int:
    """Tokens per forward of a long prompt: of every command, generate, Session, beams, batches, drafts and the bench,
    and the engine's budget of a step. (`nanokv serve` has a smaller one; prefill_chunks takes what it is given.)

    Ctrl-C is heard inside a forward, between two operators, so one product must be short: 8 GFLOP, 0.2 s of a slow
    CPU. The longest makes gate and up of all tokens, 4·C·I FLOPs for each. At least 64, because from 33 rows on a
    forward is bound by arithmetic and no longer by reading the weights; 512 cost no more per token than 2,048.

    On a GPU a forward is as long as memory allows, up to 16,384 tokens in all `rows`.
    """
    device = model.embed_tokens.weight.device
    if device.type == "cuda":
        return chunk_in(available_memory(str(device)), model, rows)
    if device.type != "cpu":
        return 2048
    wanted = 8e9 / (4 * model.config.hidden_size * model.config.intermediate_size)
    return min(512, max(64, 2 ** int(math.log2(wanted))))


def chunk_in(free: int | None, model: Model, rows: int) -> int:
    """Tokens of each row whose forward takes at most a quarter of the free bytes: a power of two, 512 … 16,384 for one.

    A quarter, because the cache grows into the same memory, and because two processes may share the device.
    """
    each = forward_bytes(model.config, model.embed_tokens.weight.element_size())
    fit = 16_384 if free is None else free // 4 // each
    return max(64, min(16_384, max(512, 1 << max(1, fit).bit_length() - 1)) // rows)


@torch.inference_mode()
def decode(model: Model, token: Rows, cache: KVCache, start_pos: Position) -> Tensor:
    """Append one token to the cache, return the logits that follow it. token (B,1) → (B,V)."""
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
    """Append T guessed tokens, return the logits that follow each of them. tokens (B,T) → (B,T,V).

    Weights and cache are read once for all T, so a memory-bound machine checks T guesses for about the price of one
    decode; the logits are B·T·V·4 bytes. What was guessed wrong is then taken back with cache.truncate.
    """
    with full_memory_named(model, cache):
        return model.lm_head(_append(model, tokens, cache, start_pos))  # (B,T,C) → (B,T,V)


def _append(model, tokens, cache, start_pos):
    """Any T new tokens over what is cached → hidden states (B,T,C)."""
    tokens = token_ids(model, tokens)
    check_cache(cache)
    with full_memory_named(model, cache):
        attend = attention_over(cache, tokens.shape[1], tokens.device)
        return model(tokens, cache, start_pos, attend)


def attention_of_one(cache: KVCache) -> Attend:
    """`attention_over` of a decode step. The mask stays where it is: a kernel that reads each row's length from it must
    not wait for a GPU."""
    if own := own_attention(cache, 1):
        return own
    if (lengths := row_lengths(cache)) is not None:
        return Decode(rows=lengths)
    return Decode(cache.mask(1))  # None, unless rows differ in length


def attention_over(cache: KVCache, T: int, device: torch.device) -> Attend:
    """How the next T queries see what is cached; asked once, before the first append."""
    if own := own_attention(cache, T):
        return own
    if keys := causal_keys(cache, T):  # of most caches
        return Causal(keys)
    mask = cache.mask(T)
    if mask is None:
        # A cache that answers None lets its queries see everything.
        return Causal() if T == 1 else Masked(None)
    return Causal(keys=mask.shape[1]) if is_causal(mask) else Masked(mask.to(device))


def own_attention(cache: KVCache, T: int) -> Attend | None:
    """What the cache says itself; a class of the caller's need not know of it."""
    return cache.attention(T) if hasattr(cache, "attention") else None


def check_cache(cache: object) -> None:
    """CacheError for a name, or None, where a cache belongs."""
    if not hasattr(cache, "mask"):
        name = cache if isinstance(cache, str) else "dict"
        raise CacheError(
            f"cache is {cache!r}: a KVCache was expected", f'make_cache("{name}", model.config)'
        )


def token_ids(model: Model, ids: Rows) -> Tensor:
    """Ids, a list, an array or a tensor (B,T), as int64 on the model's device; TokenIdsError before any work.

    Valid CPU ids cost two comparisons; ids on a GPU are not checked, because that would wait for the GPU.
    """
    device, vocabulary = model.embed_tokens.weight.device, model.config.vocab_size
    if (
        isinstance(ids, torch.Tensor)
        and ids.dim() == 2
        and ids.numel()
        and ids.dtype in (torch.int64, torch.int32)
    ):
        if ids.device.type != "cpu" and device.type != "cpu":
            return ids.to(device, torch.int64)
        # The common case, in one operator.
        low, high = (ids.item(),) * 2 if ids.numel() == 1 else ids.aminmax()
        if low >= 0 and high < vocabulary:
            return ids.to(device, torch.int64)
    return torch.tensor(id_rows(ids, vocabulary), device=device)  # (B,T); or it says what is wrong
