"""The catalogue: real KV-cache bugs, each as the code that does it, with its public thread and what it takes to see it.

Every function below returns the swaps (see substitute.py) that put one bug into nanokv; its docstring says what the
wrong code does. `seen_by` is what the weakest observer needs: the words of the bundled model's answer, its logits, an
error, or, where every value is right and only memory is wasted, a byte counter. It is measured by diagnose() and the
tests compare it with what is written here.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import nanokv.cache.base
import nanokv.decoding.batching
from nanokv.attention import prefill_attention
from nanokv.cache import BatchCache, KVCache
from nanokv.cache.base import LayerCache
from nanokv.cache.capabilities import CacheCapabilities
from nanokv.cache.padded import PaddedCache
from nanokv.cache.sliding import SlidingCache
from nanokv.cache.static import StaticCache
from nanokv.inference import prefill_chunks
from nanokv.lab.faults.substitute import PerObject, between, has_cache, in_all, positions, real
from nanokv.model import Attention, Transformer
from nanokv.rope import apply_rope

TABLE = 32  # rows of the RoPE table that is too short


@dataclass(frozen=True)
class Fault:
    """One bug. `swaps()` puts it in; everything else is for the reader."""

    name: str
    title: str  # one line
    cause: str  # what the wrong code does, and why it passes
    thread: str  # owner/repo#number where this bug, its symptom or the thought behind it was met
    seen_by: str  # words, logits, bytes or error: measured on the bundled model
    scenario: str  # the situation in which it shows, a name in faults.SCENARIOS
    swaps: object = field(repr=False, compare=False)


FAULTS: dict[str, Fault] = {}


def fault(title, cause, thread, seen_by, scenario="solo"):
    """Enter the decorated function into FAULTS under its own name."""

    def enter(swaps):
        FAULTS[swaps.__name__] = Fault(
            swaps.__name__, title, cause, thread, seen_by, scenario, swaps
        )
        return swaps

    return enter


# --- positions ---------------------------------------------------------------------------------


@fault(
    "every decode is one position too far",
    "The loop counts the newest token before it is fed, so all of the answer is rotated one position on. Distances "
    "inside the answer stay right; only the gap to the prompt is wrong.",
    "karpathy/nanochat#855",
    "logits",
)
def start_pos_off_by_one():
    """start + 1 wherever something is cached."""
    return positions(lambda at, start: at + (start > 0))


@fault(
    "the offset is advanced twice",
    "Cache and loop both add what was fed, so after a prompt of 6 tokens the offset says 12, and it grows by two from "
    "there.",
    "skyzh/tiny-llm#46",
    "words",
)
def start_pos_advanced_twice():
    """2·start."""
    return positions(lambda at, start: at + start.clamp(min=0))


@fault(
    "every call counts positions from 0",
    "Each new token is rotated as if it stood at position 0, and the prompt is right: the angles are sliced [:T] where "
    "[start_pos:start_pos+T] was meant.",
    "karpathy/nanochat#855",
    "words",
)
def start_pos_restarts():
    """start forgotten."""
    return positions(lambda at, start: torch.where(start > 0, at - start, at))


@fault(
    "the RoPE table is too short, and the index is clamped",
    f"The table has {TABLE} rows, or T if one call brings more: its size is checked against T where T0+T was meant. "
    "Later positions all take the last row, so short texts are right.",
    "karpathy/nanochat#520",
    "words",
    "long",
)
def rope_table_too_short():
    """Positions end at the last row of the table."""
    return positions(lambda at, start: at.clamp(max=max(TABLE, at.shape[-1]) - 1))


@fault(
    "keys are cached before they are rotated",
    "The cache stores k first and RoPE turns only the new keys afterwards, so every key that comes back from the cache "
    "stands at position 0.",
    "EleutherAI/gpt-neox#363",
    "words",
)
def cached_before_rope():
    """Nothing is rotated on its way into the cache; queries and new keys are, on their way to attention."""
    right = Attention.forward

    def forward(self, x, rope, cache, attend):
        def rotate_late(q, k, v):
            T = q.shape[2]
            # The past stays unturned.
            k = torch.cat((k[:, :, :-T], apply_rope(k[:, :, -T:], rope)), dim=2)  # (B,Hk,S,D)
            return attend(apply_rope(q, rope), k, v)

        not_turned = torch.ones_like(rope[0]), torch.zeros_like(rope[1])  # cos 1, sin 0
        return right(self, x, not_turned, cache, rotate_late)

    return [(Attention, "forward", forward)]


# --- what is stored, and where -----------------------------------------------------------------


@fault(
    "new keys are joined along the wrong axis",
    "cat(dim=0) stacks tokens as if they were rows of the batch. Token by token the shapes fit and scores come out; "
    "here the reshape after attention notices, or cat itself.",
    "deepspeedai/Megatron-DeepSpeed#112",
    "error",
)
def wrong_axis():
    """cat along the batch."""

    def append(cache, i, k, v):
        T = k.shape[2]
        own = cache[i].append(k, v)  # (B,Hk,S,D) ×2
        if own[0].shape[2] == T:
            return own
        return tuple(torch.cat((x[:, :, :-T], x[:, :, -T:]), dim=0) for x in own)

    return between(append)


@fault(
    "the first token is never written",
    "The write begins at slot 1, so key and value of position 0 stay zero for ever. Attention gives a zero key some "
    "weight like any other, and no shape is wrong.",
    "TrenTorch/TrenTorch#192",
    "logits",
)
def first_token_unwritten():
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
    "`[{}] * L` makes one dict L times: each layer writes its own new rows over those of the layer before, so the past "
    "that every layer reads is the last layer's.",
    "lucidrains/x-transformers#219",
    "words",
)
def one_dict_for_all_layers():
    """One slab a cache."""
    slabs = PerObject()

    def append(cache, i, k, v):
        own = cache[i].append(k, v)
        slab = slabs.keep(cache[0], written(slabs.of(cache[0]), own, k.shape[2]))
        return tuple(x[:, :, : own[0].shape[2]] for x in slab)

    return between(append)


@fault(
    "every layer is bound to the last one by a closure",
    "Functions made in a loop share the loop's variable: when they are called, all of them run the last block. Only "
    "the cached path is wrapped like this, so the uncached one stays right.",
    "TrenTorch/TrenTorch#141",
    "words",
)
def last_layer_closure():
    """`[lambda …: block(…) for block in layers]`, called after the loop."""
    right = Transformer.forward

    def forward(self, tokens, cache, start_pos, attend):
        if not has_cache(cache):
            return right(self, tokens, cache, start_pos, attend)
        # The same weights, other layers; the model itself is not touched.
        bound = object.__new__(type(self))
        bound.__dict__ = self.__dict__ | {"_modules": dict(self._modules)}
        bound.layers = nn.ModuleList([self.layers[-1]] * len(self.layers))
        return right(bound, tokens, cache, start_pos, attend)

    return [(Transformer, "forward", forward)]


@fault(
    "keys and values are cached in half precision",
    "Everything is rounded to bfloat16 on its way into the cache of a float32 model. Whether that is a bug or rounding "
    "is the most repeated question of all; the size of the difference answers it.",
    "karpathy/nanoGPT#613",
    "logits",
)
def rounded_to_bf16():
    """8 bits of mantissa are kept."""
    return between(
        lambda cache, i, k, v: cache[i].append(k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype))
    )


@fault(
    "a full buffer drops new tokens without a word",
    "Capacity is never checked: a write behind the last slot is a write into an empty slice, which torch allows. The "
    "position moves on, and the newest tokens cannot be seen by anyone.",
    "rasbt/LLMs-from-scratch#925",
    "logits",
    "overflow",
)
def static_overflow():
    """The static cache counts tokens that it does not keep."""
    capacity = CacheCapabilities.capacity

    def append(cache, i, k, v):
        layer = real(cache[i])
        if type(layer) is not StaticCache:
            return cache[i].append(k, v)
        T = k.shape[2]
        room = max(0, layer.capacity - layer.length)
        if T <= room:
            return cache[i].append(k, v)
        if room:
            cache[i].append(k[:, :, :room], v[:, :, :room])
        layer.length += T - room
        return layer.keys, layer.values  # (B,Hk,N,D): N slots, whatever S should be

    # 0 = NoCache, as it was.
    unlimited = property(lambda cache: 0 if capacity.fget(cache) == 0 else None)
    return [*between(append), (CacheCapabilities, "capacity", unlimited)]


# --- masks -------------------------------------------------------------------------------------


@fault(
    "the mask of a chunk is square",
    "A (T,T) mask where the chunk sees T0+T keys: right for a first prompt, a shape error for the next chunk of a "
    "conversation.",
    "meta-llama/llama#899",
    "error",
    "chunked",
)
def square_mask():
    """History forgotten in the mask's width."""
    return masks(lambda right, T, S: right(T, T))


@fault(
    "the causal mask is aligned top-left",
    "SDPA's is_causal=True counts from the first key: query t of a chunk sees keys ≤ t, so most of the cache is hidden "
    "from it. Equal to the right mask only while nothing is cached.",
    "lucidrains/x-transformers#187",
    "words",
    "chunked",
)
def top_left_mask():
    """tril(0) instead of tril(S − T)."""

    def mask(right, T, S):
        if T == 1:
            return None
        return torch.ones(T, S, dtype=torch.bool).tril()

    return masks(mask)


@fault(
    "a chunk after the first has no mask",
    "is_causal=(T == S) is false as soon as something is cached, and nothing else masks: the tokens of a chunk see "
    "those that come after them.",
    "huggingface/nanoVLM#90",
    "logits",
    "chunked",
)
def no_mask_on_chunk():
    """Causal only while T == S."""

    def mask(right, T, S):
        if T in (1, S):
            return right(T, S)
        return torch.ones(T, S, dtype=torch.bool)

    return masks(mask)


def masks(wrong) -> list:
    """Swaps for the mask that caches share and for the sliding cache's own; wrong(right, T, S) gives (T,S) or None."""
    right = nanokv.cache.base.causal_mask
    band = SlidingCache.mask

    def mask(self, T):
        return wrong(right, T, self.length + T)

    def window(self, T):
        own = band(self, T)
        S = self.sizes.held + T
        if own is not None:
            S = own.shape[1]

        def right_here(t, s):
            return own if s == S else right(t, s)

        return wrong(right_here, T, S)

    return [(LayerCache, "mask", mask), (SlidingCache, "mask", window)]


# --- batches -----------------------------------------------------------------------------------


@fault(
    "prompts of a batch are padded on the right",
    "The last column of logits is read for every row, but in the shorter ones it follows padding, which is also "
    "cached and never masked.",
    "huggingface/transformers#25420",
    "words",
    "batch",
)
def right_padding():
    """Rows are turned so that their padding comes last, and nothing hides it."""
    pads = []

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
    "The mask is built for one prompt and broadcast: rows with more padding see it, rows with less lose their first "
    "tokens. Row 0, which is looked at first, is right.",
    "huggingface/candle#3582",
    "logits",
    "batch",
)
def mask_of_row_0():
    """(B,1,T,S) from its first row."""

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
    "Beam search keeps the best continuations and moves their tokens, but every row of the cache stays where it was: "
    "beams go on with the past of others.",
    "huggingface/transformers#46612",
    "logits",
    "beams",
)
def reorder_ignored():
    """Rows stay where they are, as long as their number does."""

    def make(right):
        def reorder(self, index):
            if len(index) != self.sizes.batch_size:
                right(self, index)

        return reorder

    return in_all(KVCache, "reorder", make)


# --- requests ----------------------------------------------------------------------------------


@fault(
    "the cache is not cleared between requests",
    "A new request starts at position 0, but the rows of the last one are still there and can be seen.",
    "EricLBuehler/candle-vllm#6",
    "words",
    "two_requests",
)
def not_cleared():
    """Whatever starts empty sees the rows of the request before it."""
    last = {}
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
    "The buffers hang on the model, or are a default argument that is made once: whoever writes last owns the slots, "
    "and the other request goes on with a foreign past.",
    "MemTensor/MemOS#2301",
    "words",
    "interleaved",
)
def shared_between_requests():
    """One slab per layer, for all caches."""
    slabs = {}

    def append(cache, i, k, v):
        own = cache[i].append(k, v)
        slabs[i] = written(slabs.get(i), own, k.shape[2])
        return tuple(x[:, :, : own[0].shape[2]] for x in slabs[i])

    return between(append)


@fault(
    "truncate moves the length, but the rows stay",
    "After a rejected draft or an undone turn the forgotten keys can still be seen; positions go on from the right "
    "place, so nothing looks odd.",
    "ml-explore/mlx-lm#1486",
    "logits",
    "undo",
)
def truncate_keeps_rows():
    """What truncate should forget is seen by all that comes later."""
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


# --- cost --------------------------------------------------------------------------------------


@fault(
    "queries are cached too",
    "Q is stored beside K and V although no later token ever asks for an old query: every value is right, and the "
    "cache is (H + 2·Hk) / (2·Hk) times as large.",
    "jingyaogong/minimind#156",
    "bytes",
)
def cached_queries():
    """Queries are kept beside every layer."""
    held = PerObject()
    now = []

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
    "repeat_kv comes before the cache instead of after it, so each of the Hk heads is stored G times: the saving of "
    "grouped-query attention is gone, and no value tells.",
    "FYYFU/HeadKV#3",
    "bytes",
)
def repeated_before_caching():
    """The other G − 1 copies of every head are kept beside every layer."""
    held = PerObject()

    def append(cache, i, k, v):
        own = cache[i].append(k, v)
        copies = cache.config.num_attention_heads // cache.config.num_key_value_heads - 1
        repeated = torch.cat((k, v), dim=1).repeat_interleave(copies, dim=1)  # (B,2·Hk·(G−1),T,D)
        held.keep(cache[i], grown(held.of(cache[i]), repeated, own[0].shape[2]))
        return own

    return between(append) + counted(held)


# --- what several of them do -------------------------------------------------------------------


def is_empty(layer) -> bool:
    """Before the first token of a request."""
    return isinstance(layer.length, int) and layer.length == 0


def written(slab, own, T: int):
    """Keys and values of a slab after its last T rows of `own` (B,Hk,S,D) ×2 were written to their places."""
    S = own[0].shape[2]
    if slab is None or slab[0].shape[0] != own[0].shape[0]:
        return tuple(x.clone() for x in own)
    slab = tuple(
        torch.cat((old, new[:, :, old.shape[2] :]), dim=2)
        for old, new in zip(slab, own, strict=True)
    )
    for old, new in zip(slab, own, strict=True):
        old[:, :, S - T : S] = new[:, :, S - T :]
    return slab


def behind(stale, own):
    """`own` keys and values with stale ones in front of them: attention does not mind in which order keys come."""
    if stale is None:
        return own
    return tuple(torch.cat(pair, dim=2) for pair in zip(stale, own, strict=True))


def seeing_all_stale(attend):
    """The attention with its mask widened to the left: what stands in front is visible."""
    mask = getattr(attend, "mask", None)

    def wider(q, k, v):
        if mask is None:
            return attend(q, k, v)
        return prefill_attention(q, k, v, F.pad(mask, (k.shape[2] - mask.shape[-1], 0), value=True))

    return wider


def grown(held, new, S: int):
    """(B,H,S,D): what is held for S − T tokens and T new ones; what was truncated is cut, another batch starts anew."""
    T = new.shape[2]
    if held is None or len(held) != len(new):
        return new
    return torch.cat((held[:, :, : S - T], new), dim=2)


def counted(held) -> list:
    """Swaps that add tensors held beside the layers to the bytes of their cache."""

    def make(right):
        def nbytes(cache):
            total = right.fget(cache)
            for layer in cache:
                extra = held.of(layer)
                if extra is not None:
                    total += extra[:, :, : layer.length].nbytes
            return total

        return property(nbytes)

    # Which asks its inner one.
    return [swap for swap in in_all(KVCache, "nbytes", make) if swap[0] is not PaddedCache]
