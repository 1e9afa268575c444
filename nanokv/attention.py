"""Attention over cached keys and values: the one file that calls scaled_dot_product_attention.

Prefill and decode are two functions because they are two problems. Prefill multiplies T×S scores and is bound by
arithmetic. Decode reads every cached key and value once for a single query row and is bound by memory bandwidth.
Softmax(q kᵀ / sqrt(D)) v throughout (Vaswani et al. 2017, arXiv 1706.03762); masks are bool, True = visible.

What the model calls is an object, `attend(q, k, v)`, that also says which keys the queries see. A fast kernel may
replace exactly these classes, where it computes what all of their fields say. Your own function or subclass is always
called as it is.

    Causal(keys)  T queries are the last T of S positions            prefill, score
    Masked(mask)  the mask says which keys each query sees           prefill of padded, ragged or windowed rows
    Decode(mask)  one query for each row; None = it sees every key   decode

Two more stand where they are used: cache/packed.py (several sequences, one behind the other) and parallel/merge.py (the
keys in parts).
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv import backends
from nanokv.errors import CacheError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v → y


class Causal:
    """Query t of T sees keys ≤ S−T+t: itself and all before it, for T = S and for T < S.

    `keys`: the S that the cache announced; another one is an error. None: whatever comes.
    """

    def __init__(self, keys: int | None = None):
        self.keys = keys

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        T, S = q.shape[2], k.shape[2]
        self.check(T, S)
        blocks = row_blocks(q, S)
        if len(blocks) == 1:
            return attention(q, k, v, causal=True)
        parts = []
        for a, b in blocks:
            end = S - T + b  # no query of this block sees a later key
            mask = causal_mask(b - a, end, q.device)
            parts.append(
                prefill_attention(q[:, :, a:b], k[:, :, :end], v[:, :, :end], mask)
            )  # (B,H,b−a,D)
        return torch.cat(parts, 2)

    def check(self, T: int, S: int) -> None:
        """CacheError if these S keys cannot be what the T queries expect."""
        if T > S or self.keys not in (None, S):
            expected = f"at least {T}" if self.keys is None else self.keys
            raise CacheError(
                f"attention got {S} keys for {T} queries, but the cache's mask speaks of {expected}"
            )


class Masked:
    """The mask and nothing else says what is visible: bool (T,S) or (B,1,T,S); None = every key, the future too."""

    def __init__(self, mask: Tensor | None):
        self.mask = mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        blocks = row_blocks(q, k.shape[2])
        if self.mask is None or len(blocks) == 1:
            return prefill_attention(q, k, v, self.mask)
        # A view: one row may stand for all queries.
        mask = self.mask.expand(*self.mask.shape[:-2], q.shape[2], -1)
        return torch.cat(
            [prefill_attention(q[:, :, a:b], k, v, mask[..., a:b, :]) for a, b in blocks], 2
        )


class Decode:
    """One query for each row. It sees every key, or what the mask says: bool (1,S) or (B,1,1,S).

    `rows` instead of a mask: row b sees its last rows[b] keys, (B,) int64. A mask is made only for those who ask.
    """

    def __init__(self, mask: Tensor | None = None, rows: Tensor | None = None):
        self.rows = rows
        if rows is None:
            self.mask = mask

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """What `rows` says: (B,1,1,S)."""
        if self.rows is None:
            return None
        return behind_padding(self.rows, int(self.rows.max()))[:, None, None]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,1,D), k and v (B,Hk,S,D) → (B,H,1,D)."""
        if self.mask is not None and self.mask.device != q.device:
            self.mask = self.mask.to(q.device)  # once, for all layers
        return decode_attention(q, k, v, self.mask)

    @functools.cached_property
    def lengths(self) -> Tensor | None:
        """(B,) int64 if the mask hides padding on the left and nothing else: row b sees its last lengths[b] keys."""
        if self.rows is not None:
            return self.rows
        if self.mask is None or self.mask.dim() != 4 or self.mask.dtype != torch.bool:
            return None
        if self.mask.shape[1:3] != (1, 1):  # each head has a mask of its own
            return None
        seen = self.mask[:, 0, 0]  # (B,S)
        lengths = seen.sum(-1)  # (B,)
        return lengths if torch.equal(seen, behind_padding(lengths, seen.shape[1])) else None


def behind_padding(lengths: Tensor, S: int) -> Tensor:
    """(B,S) bool: row b's last lengths[b] of S keys."""
    column = torch.arange(S, device=lengths.device)  # (S,)
    return column >= S - lengths[:, None]


def row_blocks(q: Tensor, S: int) -> list[tuple[int, int]]:
    """(first, end) of the queries that go into one call of attention: of q (B,H,T,D) over S keys about 2³¹ products.

    On a CPU that is a tenth of a second, and Ctrl-C is heard between two calls. In Qwen3-0.6B 2,048 queries over 2,048
    keys are three calls. A whole prompt (T = S) gets the bits of a single call: torch works in blocks of 256 rows from
    768 rows on, and those stay whole if ours begin at multiples of 512 and end with 768 or more. A GPU gets one call.
    """
    B, H, T, D = q.shape
    unit, last = (512, 768) if T == S else (256, 192)
    rows = max(unit, 2**31 // (B * H * S * D) // unit * unit) if q.device.type == "cpu" else T
    starts = [first for first in range(0, T, rows) if first == 0 or T - first >= last]
    return list(zip(starts, [*starts[1:], T], strict=True))


def causal_mask(T: int, S: int, device: torch.device | str | None = None) -> Tensor | None:
    """(T,S) bool, bottom-right aligned: the T queries are the last T of S positions, query t sees keys ≤ S−T+t.

    SDPA's own `is_causal=True` is top-left aligned: right only when S == T. Costs T·S bytes; None when T is 1,
    because the newest token sees everything.
    """
    if T == 1:
        return None
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def is_causal(mask: Tensor | None) -> bool:
    """Is this the plain causal mask and nothing else? Then half of the work can be skipped."""
    # A single query's plain causal mask is None.
    if mask is None or mask.dim() != 2 or mask.shape[0] == 1:
        return False
    T, S = mask.shape
    plain = causal_mask(T, S, mask.device)
    return plain is not None and torch.equal(mask, plain)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`Causal()` as a function, for code that calls attention itself. q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
    return Causal()(q, k, v)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Any chunk of T queries over S ≥ T keys. q (B,H,T,D), k and v (B,Hk,S,D), mask (T,S) or (B,1,T,S) → (B,H,T,D).

    Without a mask every query sees every key, the future too.
    """
    return attention(q, k, v, mask)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """One query row. The G heads that share a KV head become G rows of one query block: K and V are read once.

    q (B,H,1,D), k and v (B,Hk,S,D), mask None or (1,S) or (B,1,1,S) → (B,H,1,D). Repeating K and V G times instead
    would copy G·S·Hk·D·2 values per layer and token. `enable_gqa` gives the same to the last bit or two. At 4,096 keys
    of Qwen3-0.6B one Zen 5 core takes 3.0 ms per layer in bf16 where `enable_gqa` takes 14.3, and 5.1 against 6.2 in
    fp32. (On another processor: bf16 2.6 ms grouped and 1.7 with `enable_gqa`, fp32 1.3 and 3.0.)
    """
    B, H, _, D = q.shape
    q = q.reshape(B, k.shape[1], -1, D)  # (B,Hk,G,D)
    y = attention(q, k, v, mask)  # (B,Hk,G,D)
    # Free on a CPU; some GPU kernels return the rows in another order in memory.
    return y.reshape(B, H, 1, D)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, by a kernel that never has all T×S scores in memory, where there is one.

    q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D). A mask is (T,S) or (B,1,T,S); `causal`, instead of one: the T queries
    are the last T of the S positions.
    """
    T, S, H = q.shape[2], k.shape[2], q.shape[1]
    with backends.chosen(q.device):
        if causal and 1 < T < S:
            y = backends.lower_right(q, k, v)
            if y is not None:
                return y
            mask = causal_mask(T, S, q.device)
        if k.shape[1] != H and not backends.takes_groups(q, k, v, mask):
            k, v = backends.repeated(k, H), backends.repeated(v, H)  # (B,H,S,D) ×2
        # torch's own causal mask is top-left aligned: right only for T = S.
        causal, groups = causal and T == S, k.shape[1] != H
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=groups
        )
