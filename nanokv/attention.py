"""Attention over cached keys and values: the one file that calls scaled_dot_product_attention.

Prefill and decode are two functions because they are two problems. Prefill computes T×S scores and
is bound by arithmetic. Decode reads every cached key and value for one query and is bound by memory
bandwidth. Both compute softmax(q kᵀ / sqrt(D)) v (Vaswani et al. 2017, arXiv 1706.03762). Masks are
bool, True = visible.

The model calls an object, `attend(q, k, v)`, which also holds which keys each query sees:

    Causal(keys)  T queries are the last T of S positions        prefill, score
    Masked(mask)  the mask has the keys that each query sees     padded, ragged or windowed rows
    Decode(mask)  one query per row; None = it sees every key    decode

A fast kernel may replace exactly these classes, and only if it honours all their fields. Any other
callable, including a subclass, is called unchanged.

cache/packed.py has a fourth class (several sequences end to end), parallel/merge.py a fifth (keys
split between ranks), windows.py a sixth (layers that see only the newest positions), sinks.py a
seventh (a score beside the keys'). A first reading may skip `row_blocks`, `visible` and
`Decode.lengths`.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv import backends
from nanokv.errors import CacheError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v → y
Rows = tuple[int, int]  # the queries a … b−1 of T


class Causal:
    """Query t of T sees keys 0 … S−T+t: its own and all earlier ones, for T = S and for T < S.

    `keys` is the S that the cache announced; another number of keys is an error. None: any number.
    """

    def __init__(self, keys: int | None = None):
        self.keys = keys

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        T = q.shape[2]
        S = k.shape[2]
        self.check(T, S)
        blocks = row_blocks(q, S)
        if len(blocks) == 1:
            return attention(q, k, v, causal=True)
        parts = []
        for a, b in blocks:
            end = S - T + b  # no query of this block sees a later key
            queries = q[:, :, a:b]  # (B,H,b−a,D)
            keys = k[:, :, :end]  # (B,Hk,end,D)
            values = v[:, :, :end]  # (B,Hk,end,D)
            mask = causal_mask(b - a, end, q.device)
            parts.append(prefill_attention(queries, keys, values, mask))  # (B,H,b−a,D)
        return torch.cat(parts, 2)  # (B,H,T,D)

    def visible(self, rows: Rows, T: int, S: int, device: torch.device) -> Tensor | None:
        """What these of T queries see of the last S keys, bool (rows,S); None: all."""
        a, b = rows
        position = torch.arange(S, device=device)  # (S,)
        query = torch.arange(S - T + a, S - T + b, device=device)[:, None]  # (rows,1)
        return None if T == 1 else position <= query

    def check(self, T: int, S: int) -> None:
        """CacheError if S is less than T, or not the number that the cache announced."""
        if T <= S and self.keys in (None, S):
            return
        expected = f"at least {T}" if self.keys is None else self.keys
        raise CacheError(
            f"attention got {S} keys for {T} queries, but the cache's mask covers {expected}"
        )


class Masked:
    """Only the mask decides what is visible: bool (T,S) or (B,1,T,S).

    None: every query sees every key, later ones too.
    """

    def __init__(self, mask: Tensor | None):
        self.mask = mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        blocks = row_blocks(q, k.shape[2])
        if self.mask is None or len(blocks) == 1:
            return prefill_attention(q, k, v, self.mask)
        # A mask with one row applies to all queries; expand copies nothing.
        mask = self.mask.expand(*self.mask.shape[:-2], q.shape[2], -1)  # (…,T,S)
        parts = [prefill_attention(q[:, :, a:b], k, v, mask[..., a:b, :]) for a, b in blocks]
        return torch.cat(parts, 2)  # (B,H,T,D)

    def visible(self, rows: Rows, T: int, S: int, device: torch.device) -> Tensor | None:
        """What these of T queries see of the last S keys, bool (…,rows or 1,S); None: all."""
        return last_keys(self.mask, rows, S, device)


class Decode:
    """One query per row. It sees every key, or those of a mask: bool (1,S) or (B,1,1,S).

    `rows`, (B,) int64, replaces a mask: row b sees its last rows[b] keys. The mask is then built
    only if an attention function reads it.
    """

    def __init__(self, mask: Tensor | None = None, rows: Tensor | None = None):
        self.rows = rows
        if rows is None:
            self.mask = mask

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """`rows` as a mask (B,1,1,S)."""
        if self.rows is None:
            return None
        return behind_padding(self.rows, int(self.rows.max()))[:, None, None]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,1,D), k and v (B,Hk,S,D) → (B,H,1,D)."""
        if self.mask is not None and self.mask.device != q.device:
            self.mask = self.mask.to(q.device)  # once, for all layers
        return decode_attention(q, k, v, self.mask)

    def visible(self, rows: Rows, T: int, S: int, device: torch.device) -> Tensor | None:
        """What the query sees of the last S keys, bool (…,1,S); None: all."""
        return last_keys(self.mask, rows, S, device)

    @functools.cached_property
    def lengths(self) -> Tensor | None:
        """(B,) int64: row b sees its last lengths[b] keys. None if the mask hides anything else."""
        if self.rows is not None:
            return self.rows
        if self.mask is None or self.mask.dim() != 4 or self.mask.dtype != torch.bool:
            return None
        if self.mask.shape[1:3] != (1, 1):  # one mask per head
            return None
        seen = self.mask[:, 0, 0]  # (B,S)
        lengths = seen.sum(-1)  # (B,)
        if not torch.equal(seen, behind_padding(lengths, seen.shape[1])):
            return None
        return lengths


def last_keys(mask: Tensor | None, rows: Rows, S: int, device: torch.device) -> Tensor | None:
    """These rows of a mask and the columns of the last S keys, (…,rows or 1,S) on this device."""
    if mask is None:
        return None
    if mask.shape[-2] > 1:  # one row may serve all queries
        mask = mask[..., rows[0] : rows[1], :]
    return mask[..., -S:].to(device)


def behind_padding(lengths: Tensor, S: int) -> Tensor:
    """(B,S) bool: row b's last lengths[b] of S keys."""
    column = torch.arange(S, device=lengths.device)  # (S,)
    return column >= S - lengths[:, None]


def row_blocks(q: Tensor, S: int) -> list[tuple[int, int]]:
    """Split the T queries of q (B,H,T,D) into calls of attention over S keys: (first, end) of each.

    On a CPU one call has about 2³¹ products, a tenth of a second, because Python handles Ctrl-C
    between two calls: 2,048 queries over 2,048 keys of Qwen3-0.6B are three calls. A GPU gets one.

    For a whole prompt (T = S) the result equals a single call to the bit: torch works in blocks of
    256 rows if there are 768 rows or more, so parts begin at multiples of 512 and the last has at
    least 768 rows.
    """
    B, H, T, D = q.shape
    if q.device.type != "cpu":
        return [(0, T)]
    unit = 512 if T == S else 256
    shortest_last = 768 if T == S else 192
    rows = max(unit, 2**31 // (B * H * S * D) // unit * unit)
    starts = [first for first in range(0, T, rows) if first == 0 or T - first >= shortest_last]
    ends = [*starts[1:], T]
    return list(zip(starts, ends, strict=True))


def causal_mask(T: int, S: int, device: torch.device | str | None = None) -> Tensor | None:
    """(T,S) bool for the last T of S positions: query t sees keys 0 … S−T+t. T·S bytes.

    None for T = 1: the newest token sees every key. This mask is aligned bottom-right; SDPA's own
    `is_causal=True` is aligned top-left, which is correct only for S = T.
    """
    if T == 1:
        return None
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def is_causal(mask: Tensor | None) -> bool:
    """True if the mask is exactly `causal_mask`: attention can then skip half of the work."""
    # For a single query causal_mask is None, so a mask with one row hides something else.
    if mask is None or mask.dim() != 2 or mask.shape[0] == 1:
        return False
    T, S = mask.shape
    plain = causal_mask(T, S, mask.device)
    return plain is not None and torch.equal(mask, plain)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`Causal()` as a function. q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
    return Causal()(q, k, v)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """T queries over S ≥ T keys. q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D).

    The mask is (T,S) or (B,1,T,S). Without one every query sees every key, later ones too.
    """
    return attention(q, k, v, mask)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """One query per row. q (B,H,1,D), k and v (B,Hk,S,D), mask (1,S) or (B,1,1,S) → (B,H,1,D).

    The G query heads of a KV head become G rows of one query block, so K and V are read once.
    Repeating K and V G times would copy 2·G·S·Hk·D values per layer and token. `enable_gqa` gives
    the same result to the last bit or two; which is faster depends on the processor. Per layer of
    Qwen3-0.6B at 4,096 keys: 3.0 ms here and 14.3 with `enable_gqa` in bf16 on one Zen 5 core, 5.1
    and 6.2 in fp32; on another processor 2.6 and 1.7 in bf16, 1.3 and 3.0 in fp32.
    """
    B, H, _, D = q.shape
    q = q.reshape(B, k.shape[1], -1, D)  # (B,Hk,G,D)
    y = attention(q, k, v, mask)  # (B,Hk,G,D)
    # Not `view`: some GPU kernels return another memory order. On a CPU this copies nothing.
    return y.reshape(B, H, 1, D)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v. q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D).

    A mask is (T,S) or (B,1,T,S). `causal` replaces a mask: the T queries are the last T of the S
    positions. Where torch has one, a kernel computes it that never stores all T×S scores.
    """
    H = q.shape[1]
    T = q.shape[2]
    S = k.shape[2]
    with backends.chosen(q.device):
        if causal and 1 < T < S:
            y = backends.lower_right(q, k, v)
            if y is not None:
                return y
            mask = causal_mask(T, S, q.device)
        if k.shape[1] != H and not backends.takes_groups(q, k, v, mask):
            k = backends.repeated(k, H)  # (B,H,S,D)
            v = backends.repeated(v, H)  # (B,H,S,D)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and T == S,  # torch's own causal mask is wrong for T < S
            enable_gqa=k.shape[1] != H,
        )
