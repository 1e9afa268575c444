"""The catalogue of faults: real KV-cache bugs as code, each with its public issue and the weakest
observation that reveals it.

Every function below returns the swaps (see substitute.py) that put one bug into nanokv. `seen_by`
is the weakest observation that suffices: an error, the words of the bundled model's answer, its
logits; or, if all values are right, the bytes of the cache or the tokens that were computed.
diagnose() measures it, and the tests compare the measurement with the entry here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanokv.cache.base
import nanokv.decoding.batching
from nanokv.attention import Attend, prefill_attention
from nanokv.cache import BatchCache, KVCache
from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import CacheCapabilities
from nanokv.cache.evicting import EvictingCache, EvictingLayer
from nanokv.cache.padded import PaddedCache
from nanokv.cache.pool import PagePool
from nanokv.cache.prefix import PrefixPool
from nanokv.cache.sliding import SlidingCache
from nanokv.cache.state import History, StateLayer
from nanokv.cache.static import StaticCache
from nanokv.cla import SharingAttention
from nanokv.inference import prefill_chunks
from nanokv.lab.faults.sinks import SINK, SplitWithSink
from nanokv.lab.faults.substitute import (
    KeysValues,
    PerObject,
    StandIn,
    Swaps,
    between,
    has_cache,
    in_all,
    positions,
    real,
)
from nanokv.model import Attention, Transformer
from nanokv.parallel.merge import merge
from nanokv.rope import Rotation, apply_rope, rope_frequencies, turned

TABLE = 32  # rows of the RoPE table that is too short


@dataclass(frozen=True)
class Fault:
    """One bug. `swaps()` gives the swaps that inject it; the other fields describe it."""

    name: str
    title: str  # one line
    cause: str  # the mistake in the code, and why it is not noticed
    thread: str  # owner/repo#number of an issue with this bug, its symptom or the same idea
    seen_by: str  # words, logits, bytes, tokens or error: measured on the bundled model
    scenario: str  # the situation in which the bug shows, a name in faults.SCENARIOS
    swaps: Callable[[], Swaps] = field(repr=False, compare=False)


FAULTS: dict[str, Fault] = {}


def fault(
    title: str, cause: str, thread: str, seen_by: str, scenario: str = "solo"
) -> Callable[[Callable[[], Swaps]], Callable[[], Swaps]]:
    """Add the decorated function to FAULTS under its name."""

    def enter(swaps):
        FAULTS[swaps.__name__] = Fault(
            swaps.__name__, title, cause, thread, seen_by, scenario, swaps
        )
        return swaps

    return enter


# --- positions ---------------------------------------------------------------------------------


@fault(
    "every decode is one position too far",
    "The loop counts the newest token before feeding it, so the whole answer is rotated one "
    "position too far. Distances inside the answer stay right; only the distance to the prompt is "
    "wrong.",
    "karpathy/nanochat#855",
    "logits",
)
def start_pos_off_by_one() -> Swaps:
    """Positions are start + 1 whenever something is cached."""
    return positions(lambda at, start: at + (start > 0))


@fault(
    "the offset is advanced twice",
    "The cache and the loop both add the number of tokens fed, so the offset is 12 after a prompt "
    "of 6 tokens, and grows by two per token from there.",
    "skyzh/tiny-llm#46",
    "words",
)
def start_pos_advanced_twice() -> Swaps:
    """Positions begin at 2·start."""
    return positions(lambda at, start: at + start.clamp(min=0))


@fault(
    "every call counts positions from 0",
    "Every new token is rotated as if it were at position 0, and only the prompt is right: the "
    "angles are sliced [:T] instead of [start_pos:start_pos+T].",
    "karpathy/nanochat#855",
    "words",
)
def start_pos_restarts() -> Swaps:
    """Positions begin at 0 in every call."""
    return positions(lambda at, start: torch.where(start > 0, at - start, at))


@fault(
    "the RoPE table is too short, and the index is clamped",
    f"The table has {TABLE} rows, or T if one call has more tokens: its size is checked against T "
    "instead of T0+T. All later positions use the last row, so short texts are right.",
    "karpathy/nanochat#520",
    "words",
    "long",
)
def rope_table_too_short() -> Swaps:
    """Positions end at the last row of the table."""
    return positions(lambda at, start: at.clamp(max=max(TABLE, at.shape[-1]) - 1))


@fault(
    "keys are cached before they are rotated",
    "The cache stores k first, and RoPE then rotates only the new keys, so every key read from the "
    "cache is at position 0.",
    "EleutherAI/gpt-neox#363",
    "words",
)
def cached_before_rope() -> Swaps:
    """Keys enter the cache unrotated; queries and new keys are rotated just before attention."""
    right = Attention.forward

    def forward(self, x, rope, cache, attend):
        def rotate_late(q, k, v):
            T = q.shape[2]
            # cached keys stay unrotated
            k = torch.cat((k[:, :, :-T], apply_rope(k[:, :, -T:], rope)), dim=2)  # (B,Hk,S,D)
            return attend(apply_rope(q, rope), k, v)

        unrotated = torch.ones_like(rope[0]), torch.zeros_like(rope[1])  # cos 1, sin 0
        return right(self, x, unrotated, cache, rotate_late)

    return [(Attention, "forward", forward)]


@fault(
    "the offset is advanced in place before queries are rotated",
    "The layer reads the cache's offset, appends, and rotates the query afterwards. For one request "
    "the offset is an int, which += replaces. For a batch it is a tensor, which += changes in place: "
    "all queries of a batch are T positions too far from their keys. Rotate before the append, or "
    "let the cache make a new tensor.",
    "ml-explore/mlx-lm#1699",
    "words",
    "batch",
)
def offset_advanced_in_place() -> Swaps:
    """Queries of T tokens are rotated T positions too far, if start_pos is a tensor."""
    right = Transformer.forward

    def forward(self, tokens, cache, start_pos, attention):
        if isinstance(start_pos, Tensor):
            speed, _ = rope_frequencies(self.config, tokens.device)
            T = torch.tensor([tokens.shape[1]], device=tokens.device)
            further = turned(speed, 1.0, T, torch.float32)  # cos, sin (1,D)
            attention = StandIn(attention, rotating_queries(further))
        return right(self, tokens, cache, start_pos, attention)

    return [(Transformer, "forward", forward)]


def rotating_queries(rope: Rotation) -> Callable[[Attend], Attend]:
    """Turns an attention into one that rotates the queries once more, by `rope`."""

    def attend(right):
        return lambda q, k, v: right(apply_rope(q, rope).to(q.dtype), k, v)

    return attend


@fault(
    "a cache that forgets counts its entries as positions",
    "After an eviction the number of entries is no longer the position of the next token: it stops "
    "at the budget, so all later tokens are rotated to one position. A caller that counts the "
    "tokens itself, and states start_pos, gets an error. Count tokens and entries apart.",
    "rajveer43/VeloxQuant-MLX#389",
    "words",
    "evicted",
)
def entries_as_position() -> Swaps:
    """The length of an evicting cache is the number of its entries."""
    return [(EvictingCache, "length", property(lambda cache: cache[0].entries))]


# --- storage -----------------------------------------------------------------------------------


@fault(
    "new keys are joined along the wrong axis",
    "cat(dim=0) stacks tokens as if they were rows of the batch. When tokens are fed one by one, "
    "the shapes fit and scores are computed; then the reshape after attention fails, or cat itself.",
    "deepspeedai/Megatron-DeepSpeed#112",
    "error",
)
def wrong_axis() -> Swaps:
    """Old and new keys are joined along the batch dimension."""

    def append(cache, i, k, v):
        T = k.shape[2]
        own = cache[i].append(k, v)  # (B,Hk,S,D) ×2
        if own[0].shape[2] == T:
            return own
        return tuple(torch.cat((x[:, :, :-T], x[:, :, -T:]), dim=0) for x in own)

    return between(append)


@fault(
    "the first token is never written",
    "Writing begins at slot 1, so key and value of position 0 stay zero. Attention gives a zero "
    "key some weight like any other key, and no shape is wrong.",
    "TrenTorch/TrenTorch#192",
    "logits",
)
def first_token_unwritten() -> Swaps:
    """Slot 0 stays zero."""

    def append(cache, i, k, v):
        if is_empty(cache[i]):
            k = k.clone()
            v = v.clone()
            k[:, :, 0] = 0
            v[:, :, 0] = 0
        return cache[i].append(k, v)

    return between(append)


@fault(
    "all layers share one dict",
    "`[{}] * L` is one dict L times. Each layer overwrites the new rows of the layer before it, so "
    "all layers read the past of the last layer.",
    "lucidrains/x-transformers#219",
    "words",
)
def one_dict_for_all_layers() -> Swaps:
    """All layers of a cache share one slab."""
    slabs = PerObject()

    def append(cache, i, k, v):
        own = cache[i].append(k, v)
        slab = slabs.keep(cache[0], written(slabs.of(cache[0]), own, k.shape[2]))
        return tuple(x[:, :, : own[0].shape[2]] for x in slab)

    return between(append)


@fault(
    "every layer is bound to the last one by a closure",
    "Functions made in a loop share the loop's variable: called later, all of them run the last "
    "block. Only the cached path is wrapped like this, so the uncached path is right.",
    "TrenTorch/TrenTorch#141",
    "words",
)
def last_layer_closure() -> Swaps:
    """`[lambda …: block(…) for block in layers]`, called after the loop."""
    right = Transformer.forward

    def forward(self, tokens, cache, start_pos, attend):
        if not has_cache(cache):
            return right(self, tokens, cache, start_pos, attend)
        # a shallow copy with other layers; `self` is not changed
        bound = object.__new__(type(self))
        bound.__dict__ = self.__dict__ | {"_modules": dict(self._modules)}
        bound.layers = nn.ModuleList([self.layers[-1]] * len(self.layers))
        return right(bound, tokens, cache, start_pos, attend)

    return [(Transformer, "forward", forward)]


@fault(
    "keys and values are cached in half precision",
    "All keys and values of a float32 model are rounded to bfloat16 in the cache. Issues ask most "
    "often whether a difference is a bug or rounding; the size of the difference answers that.",
    "karpathy/nanoGPT#613",
    "logits",
)
def rounded_to_bf16() -> Swaps:
    """Keys and values keep 8 bits of precision."""
    return between(
        lambda cache, i, k, v: cache[i].append(k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype))
    )


@fault(
    "a full buffer silently drops new tokens",
    "Capacity is never checked: a write past the last slot goes to an empty slice, which torch "
    "allows. The position advances, and no query can attend to the newest tokens.",
    "rasbt/LLMs-from-scratch#925",
    "logits",
    "overflow",
)
def static_overflow() -> Swaps:
    """The static cache counts tokens that it does not keep."""
    capacity: Any = CacheCapabilities.capacity  # the property itself

    def append(cache, i, k, v):
        layer = real(cache[i])
        if type(layer) is not StaticCache:
            return cache[i].append(k, v)
        T = k.shape[2]
        assert layer.capacity is not None  # every static cache has one
        room = max(0, layer.capacity - layer.length)
        if T <= room:
            return cache[i].append(k, v)
        if room:
            cache[i].append(k[:, :, :room], v[:, :, :room])
        layer.length += T - room
        return layer.keys, layer.values  # (B,Hk,N,D): N slots, fewer than S

    # capacity 0 is NoCache and stays 0; None means unlimited
    unlimited = property(lambda cache: 0 if capacity.fget(cache) == 0 else None)
    return [*between(append), (CacheCapabilities, "capacity", unlimited)]


# --- masks -------------------------------------------------------------------------------------


@fault(
    "the mask of a chunk is square",
    "The mask is (T,T), but the chunk has T0+T keys: right for the first prompt, a shape error for "
    "the next chunk of a conversation.",
    "meta-llama/llama#899",
    "error",
    "chunked",
)
def square_mask() -> Swaps:
    """The mask's width leaves out the cached tokens."""
    return masks(lambda right, T, S: right(T, T))


@fault(
    "the causal mask is aligned top-left",
    "SDPA's is_causal=True counts from the first key: query t of a chunk sees keys ≤ t, so most of "
    "the cache is masked. It equals the right mask only while nothing is cached.",
    "lucidrains/x-transformers#187",
    "words",
    "chunked",
)
def top_left_mask() -> Swaps:
    """The mask is tril(0) instead of tril(S − T)."""

    def mask(right, T, S):
        if T == 1:
            return None
        return torch.ones(T, S, dtype=torch.bool).tril()

    return masks(mask)


@fault(
    "a chunk after the first has no mask",
    "is_causal=(T == S) is false as soon as something is cached, and there is no other mask: the "
    "tokens of a chunk see later tokens.",
    "huggingface/nanoVLM#90",
    "logits",
    "chunked",
)
def no_mask_on_chunk() -> Swaps:
    """Attention is causal only while T == S."""

    def mask(right, T, S):
        if T in (1, S):
            return right(T, S)
        return torch.ones(T, S, dtype=torch.bool)

    return masks(mask)


def masks(wrong: Callable) -> Swaps:
    """Swaps for the mask of LayerCache and of caches that forget. wrong(right, T, S) → mask (T,S) or
    None, where right(T, S) is the correct mask."""
    right = nanokv.cache.base.causal_mask

    def mask(self, T):
        return wrong(right, T, self.length + T)

    forget = SlidingCache, EvictingLayer
    others = [(kind, "mask", forgetting(kind.mask, right, wrong)) for kind in forget]
    return [(LayerCache, "mask", mask), *others]


def forgetting(band: Callable, right: Callable, wrong: Callable) -> Callable:
    """The swap for `band`, the mask of a cache that holds fewer keys than tokens."""

    def mask(self, T):
        own = band(self, T)
        S = self.sizes.held + T
        if own is not None:
            S = own.shape[1]

        def right_here(t, s):
            return own if s == S else right(t, s)

        return wrong(right_here, T, S)

    return mask


# --- parts of the keys -------------------------------------------------------------------------


@fault(
    "the learned sink is counted once per part of the keys",
    "Attention is computed in n parts of the keys. Each part has the sink in its softmax, and the "
    "merge adds the parts, so the sink takes n shares. One part is right, and short texts have only "
    "one. Add the sink in the merge.",
    "EricLBuehler/mistral.rs#1872",
    "logits",
    "split",
)
def sink_per_part() -> Swaps:
    """The divisor of every part's softmax has the sink."""

    def merged(self, outputs, lse):
        sink = torch.full_like(lse, SINK)  # (n,B,H,T)
        share = (lse - sink).sigmoid()[..., None]  # of the part's keys, beside the sink
        return merge(outputs * share, torch.logaddexp(lse, sink))

    return [(SplitWithSink, "merged", merged)]


# --- states, and keys that layers share --------------------------------------------------------


@fault(
    "a rejected draft stays in the recurrent state",
    "trim cuts off the keys of rejected tokens. A recurrent state is a sum of all tokens, of which "
    "nothing can be cut off: trim does nothing there, and raises nothing. Positions and keys go on "
    "from the right place, and the state from another. Restore a snapshot, or refuse.",
    "ml-explore/mlx-lm#1109",
    "logits",
    "rejected",
)
def draft_stays_in_state() -> Swaps:
    """truncate of a state sets its length, and leaves S and conv as they are."""
    right = StateLayer.truncate

    def truncate(self, n):
        if n == 0:
            return right(self, n)
        now = replace(self.history.now, length=n)
        self.history = History(now, (now,))

    return [(StateLayer, "truncate", truncate)]


@fault(
    "a chunk starts from an empty recurrent state",
    "The kernel for many tokens is called with initial_state=None, as for a first prompt; only the "
    "step of one token takes the old state. A prompt in one pass and its answer are right. The "
    "second chunk of a prompt, the next turn and the check of a draft forget everything before.",
    "huggingface/transformers#45513",
    "logits",
    "resumed",
)
def chunk_from_empty_state() -> Swaps:
    """T > 1 tokens get neither S nor conv."""
    right = StateLayer.read

    def read(self, T):
        conv, S, real = right(self, T)
        if T > 1:
            return None, None, real
        return conv, S, real

    return [(StateLayer, "read", read)]


@fault(
    "keys that layers share are rotated once more",
    "A layer without keys of its own takes those of an earlier layer from the cache, where they "
    "are rotated already, and then runs the lines of every other layer: RoPE again. Without a "
    "cache it gets them before RoPE, so training and a pass without a cache are right.",
    "ml-explore/mlx-lm#1702",
    "logits",
    "shared_keys",
)
def shared_keys_rotated_twice() -> Swaps:
    """A sharing layer rotates the newest T keys that it reads."""
    right = SharingAttention.forward

    def forward(self, x, rope, cache, attend):
        def rotate_again(q, k, v):
            T = q.shape[2]
            new = apply_rope(k[:, :, -T:], rope)
            return attend(q, torch.cat((k[:, :, :-T], new), dim=2), v)

        if cache.entry.capacity == 0:  # NoCache
            return right(self, x, rope, cache, attend)
        return right(self, x, rope, cache, rotate_again)

    return [(SharingAttention, "forward", forward)]


# --- batches -----------------------------------------------------------------------------------


@fault(
    "prompts of a batch are padded on the right",
    "The last column of logits is read for every row, but in shorter rows it follows padding, "
    "which is also cached and never masked.",
    "huggingface/transformers#25420",
    "words",
    "batch",
)
def right_padding() -> Swaps:
    """Rows are rolled so that their padding comes last, and no mask hides it."""
    pads: list[int] = []

    def no_padding(cache, widths):
        pads[:] = widths
        return PaddedCache(cache, [0] * len(widths))

    def prefill(model, ids, cache, **options):
        turned = [row.roll(-pad) for row, pad in zip(ids, pads, strict=True)]
        return prefill_chunks(model, torch.stack(turned), cache, **options)

    batching = nanokv.decoding.batching
    return [(batching, "PaddedCache", no_padding), (batching, "prefill_chunks", prefill)]


@fault(
    "every row gets the mask of row 0",
    "The mask is built for one prompt and broadcast: rows with more padding attend to it, rows "
    "with less padding lose their first tokens. Row 0, which is checked first, is right.",
    "huggingface/candle#3582",
    "logits",
    "batch",
)
def mask_of_row_0() -> Swaps:
    """The mask (B,1,T,S) is row 0's, repeated."""

    def make(right):
        def mask(self, T):
            own = right(self, T)
            if own is None or own.dim() < 4:
                return own
            return own[:1].expand_as(own)

        return mask

    return [(cls, "mask", make(cls.mask)) for cls in (PaddedCache, BatchCache)]


@fault(
    "the cache is not reordered with its beams",
    "Beam search keeps the best continuations and moves their tokens, but the rows of the cache "
    "stay where they were: beams continue from the cache of other beams.",
    "huggingface/transformers#46612",
    "logits",
    "beams",
)
def reorder_ignored() -> Swaps:
    """reorder does nothing unless it changes the number of rows."""

    def make(right):
        def reorder(self, index):
            if len(index) != self.sizes.batch_size:
                right(self, index)

        return reorder

    return in_all(KVCache, "reorder", make)


# --- requests ----------------------------------------------------------------------------------


@fault(
    "the cache is not cleared between requests",
    "A new request starts at position 0, but the rows of the previous request are still in the "
    "cache and visible.",
    "EricLBuehler/candle-vllm#6",
    "words",
    "two_requests",
)
def not_cleared() -> Swaps:
    """A cache that starts empty sees the rows of the request before it."""
    last: dict[int, KeysValues] = {}
    stale = PerObject()

    def append(cache, i, k, v):
        if is_empty(cache[i]):
            stale.keep(cache[i], last.get(i))
        own = cache[i].append(k, v)
        last[i] = tuple(x.clone() for x in own)
        return behind(stale.of(cache[i]), own)

    return between(append, seeing_all_stale)


@fault(
    "two requests share one storage",
    "The buffers belong to the model, or are a default argument that is created once: the request "
    "that writes last owns the slots, and the other one continues from the wrong past.",
    "MemTensor/MemOS#2301",
    "words",
    "interleaved",
)
def shared_between_requests() -> Swaps:
    """All caches share one slab per layer."""
    slabs: dict[int, KeysValues] = {}

    def append(cache, i, k, v):
        own = cache[i].append(k, v)
        slabs[i] = written(slabs.get(i), own, k.shape[2])
        return tuple(x[:, :, : own[0].shape[2]] for x in slabs[i])

    return between(append)


@fault(
    "truncate moves the length, but the rows stay",
    "After a rejected draft or an undone turn, the truncated keys are still visible. Positions "
    "continue from the right place, so nothing looks odd.",
    "ml-explore/mlx-lm#1486",
    "logits",
    "undo",
)
def truncate_keeps_rows() -> Swaps:
    """Truncated tokens stay visible to all later tokens."""
    held = PerObject()
    stale = PerObject()

    def append(cache, i, k, v):
        layer = cache[i]
        length = layer.length
        before = held.of(layer)
        if is_empty(layer) or not isinstance(length, int):
            stale.keep(layer, None)
        elif before is not None and length < before[0].shape[2]:
            stale.keep(layer, behind(stale.of(layer), tuple(x[:, :, length:] for x in before)))
        own = layer.append(k, v)
        held.keep(layer, tuple(x.clone() for x in own))
        return behind(stale.of(layer), own)

    return between(append, seeing_all_stale)


# --- pages that requests share -----------------------------------------------------------------


@fault(
    "stored pages are found by their tokens alone",
    "The keys and values of a token depend on the weights too, or on the adapter, but a page is "
    "found by its tokens. A request reads what another adapter computed, and is even faster. The "
    "name of the weights belongs into the page's key; in nanokv the salt is part of it.",
    "ggml-org/llama.cpp#26207",
    "logits",
    "adapters",
)
def page_key_without_adapter() -> Swaps:
    """The index gets no salt."""
    right_find = PrefixPool.find
    right_remember = PrefixPool.remember

    def find(self, tokens, salt):
        return right_find(self, tokens, "")

    def remember(self, tokens, table, salt):
        right_remember(self, tokens, table, "")

    return [(PrefixPool, "find", find), (PrefixPool, "remember", remember)]


@fault(
    "a page is given back while a table lists it",
    "Two requests compute the same prompt. The second finds the same tokens in the index and gives "
    "its own pages back as duplicates, but its table still lists them, and another request writes "
    "into them. Put the index's pages into the table first, or keep the duplicates to the end.",
    "sgl-project/mini-sglang#142",
    "words",
    "twins",
)
def page_freed_in_use() -> Swaps:
    """remember gives back the pages whose tokens are stored in other pages."""
    right = PrefixPool.remember

    def remember(self, tokens, table, salt):
        right(self, tokens, table, salt)
        stored = self.index.match(tokens, salt)
        with self.change():
            self._release([own for own, page in zip(table, stored, strict=False) if own != page])

    def release(self, pages):
        # nanokv's refuses a page without an owner, so it would notice when the table is freed
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                self.free.append(page)

    return [(PrefixPool, "remember", remember), (PagePool, "_release", release)]


# --- cost --------------------------------------------------------------------------------------


@fault(
    "a stored prefix is never found, and computed again",
    "What is stored may be used if it begins before the common prefix ends. Its beginning is "
    "reported as the end of the whole stored text, so the same prompt again finds nothing, and an "
    "edited turn neither. Answers are right; prompts are computed from their first token on. Test "
    "the number of reused tokens, not only the answer.",
    "ggml-org/llama.cpp#22384",
    "tokens",
    "again",
)
def prefix_never_eligible() -> Swaps:
    """A stored page counts as one that begins where its sequence ends."""
    right_find = PrefixPool.find
    right_remember = PrefixPool.remember
    begins = PerObject()  # pool → {page: its first position, as reported}

    def find(self, tokens, salt):
        known = begins.of(self) or {}
        pages = right_find(self, tokens, salt)
        return list(takewhile(lambda page: known.get(page, 0) < len(tokens), pages))

    def remember(self, tokens, table, salt):
        right_remember(self, tokens, table, salt)
        begins.keep(self, (begins.of(self) or {}) | dict.fromkeys(table, len(tokens)))

    return [(PrefixPool, "find", find), (PrefixPool, "remember", remember)]


@fault(
    "queries are cached too",
    "Q is stored beside K and V, although no later token uses an old query: every value is right, "
    "and the cache is (H + 2·Hk) / (2·Hk) times as large.",
    "jingyaogong/minimind#156",
    "bytes",
)
def cached_queries() -> Swaps:
    """Queries are kept in every layer."""
    held = PerObject()
    now: list[LayerCache] = []

    def append(cache, i, k, v):
        now[:] = [cache[i]]
        return cache[i].append(k, v)

    def attend(right):
        def keep_query(q, k, v):
            held.keep(now[0], grown(held.of(now[0]), q, k.shape[2]))
            return right(q, k, v)

        return keep_query

    return between(append, attend) + counted(held)


@fault(
    "KV heads are repeated before they are cached",
    "repeat_kv runs before the cache instead of after it, so each of the Hk heads is stored G "
    "times. Grouped-query attention then saves no memory; no value differs.",
    "FYYFU/HeadKV#3",
    "bytes",
)
def repeated_before_caching() -> Swaps:
    """The other G − 1 copies of every KV head are kept in every layer."""
    held = PerObject()

    def append(cache, i, k, v):
        own = cache[i].append(k, v)
        copies = cache.config.num_attention_heads // cache.config.num_key_value_heads - 1
        repeated = torch.cat((k, v), dim=1).repeat_interleave(copies, dim=1)  # (B,2·Hk·(G−1),T,D)
        held.keep(cache[i], grown(held.of(cache[i]), repeated, own[0].shape[2]))
        return own

    return between(append) + counted(held)


# --- helpers of several faults -----------------------------------------------------------------


def is_empty(layer: LayerCache) -> bool:
    """True before the first token of a request."""
    return isinstance(layer.length, int) and layer.length == 0


def written(slab: KeysValues | None, own: KeysValues, T: int) -> KeysValues:
    """The slab's keys and values after the last T tokens of `own` (B,Hk,S,D) ×2 are written at
    their positions. Without a slab, or for another batch size, a copy of `own`."""
    keys, values = own
    if slab is None or slab[0].shape[0] != keys.shape[0]:
        return keys.clone(), values.clone()
    return overwritten(slab[0], keys, T), overwritten(slab[1], values, T)


def overwritten(old: Tensor, new: Tensor, T: int) -> Tensor:
    """`old`, extended to the length of `new` (B,H,S,D), with the last T tokens of `new`."""
    S = new.shape[2]
    old = torch.cat((old, new[:, :, old.shape[2] :]), dim=2)
    old[:, :, S - T : S] = new[:, :, S - T :]
    return old


def behind(stale: KeysValues | None, own: KeysValues) -> KeysValues:
    """The stale keys and values, followed by `own`. The order of keys does not matter to
    attention."""
    if stale is None:
        return own
    return torch.cat((stale[0], own[0]), dim=2), torch.cat((stale[1], own[1]), dim=2)


def seeing_all_stale(attend: Attend) -> Attend:
    """Attention whose mask is widened on the left, so that the stale keys are visible."""
    mask = getattr(attend, "mask", None)

    def wider(q, k, v):
        if mask is None:
            return attend(q, k, v)
        return prefill_attention(q, k, v, F.pad(mask, (k.shape[2] - mask.shape[-1], 0), value=True))

    return wider


def grown(held: Tensor | None, new: Tensor, S: int) -> Tensor:
    """(B,H,S,D): the tensors held for the first S − T tokens, and the T new ones. Truncated tokens
    are cut off; a batch of another size starts over."""
    T = new.shape[2]
    if held is None or len(held) != len(new):
        return new
    return torch.cat((held[:, :, : S - T], new), dim=2)


def counted(held: PerObject) -> Swaps:
    """Swaps that add the tensors in `held` to the `nbytes` of their cache."""

    def make(right):
        def nbytes(cache):
            total = right.fget(cache)
            for layer in cache:
                extra = held.of(layer)
                if extra is not None:
                    total += extra[:, :, : layer.length].nbytes
            return total

        return property(nbytes)

    # PaddedCache.nbytes is its inner cache's and would count the extra bytes twice
    return [swap for swap in in_all(KVCache, "nbytes", make) if swap[0] is not PaddedCache]
