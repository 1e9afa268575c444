"""Attention over cached keys and values: the one file that calls scaled_dot_product_attention.

Prefill and decode are two functions because they are two problems. Prefill multiplies T×S scores and is bound by
arithmetic. Decode reads every cached key and value once for a single query row and is bound by memory bandwidth.
Softmax(q kᵀ / sqrt(D)) v throughout (Vaswani et al. 2017, arXiv 1706.03762); masks are bool, True = visible.
"""

import torch
import torch.nn.functional as F


def causal_mask(T: int, S: int, device=None):
    """(T,S) bool, bottom-right aligned: the T queries are the last T of S positions, query t sees keys ≤ S−T+t.

    SDPA's own `is_causal=True` is top-left aligned: right only when S == T. Costs T·S bytes; None when T is 1,
    because the newest token sees everything.
    """
    if T == 1:
        return None
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def is_causal(mask) -> bool:
    """Is this the plain causal mask and nothing else? Then half of the work can be skipped."""
    if mask is None or mask.dim() != 2 or mask.shape[0] == 1:  # a single query's plain causal mask is None
        return False
    return torch.equal(mask, causal_mask(*mask.shape, mask.device))


def causal_attention(q, k, v, mask=None):
    """The T queries are the last of S positions; `mask` says the same and is needed where T < S: SDPA aligns top-left.

    q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D). A function of its own, so that a kernel that needs no mask can tell.
    """
    if q.shape[2] < k.shape[2]:
        return prefill_attention(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def prefill_attention(q, k, v, mask=None):
    """Any chunk of T queries over S ≥ T keys. q (B,H,T,D), k and v (B,Hk,S,D), mask (T,S) or (B,1,T,S) → (B,H,T,D)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def packed_attention(q, keys, values, attends):
    """Several sequences one behind the other: attends[b] takes the T_b queries of sequence b, which see its keys only.

    q (N,H,1,D) with N = ΣT_b, keys and values lists of (1,Hk,S_b,D) with the T_b new ones last → (N,H,1,D).
    """
    queries = q.split([size for size, _ in attends])  # (T_b,H,1,D)
    each = zip(queries, keys, values, attends, strict=True)
    return torch.cat([attend(rows.transpose(0, 2), k, v).transpose(0, 2) for rows, k, v, (_, attend) in each])


def decode_attention(q, k, v, mask=None):
    """One query row. The G heads that share a KV head become G rows of one query block: K and V are read once.

    q (B,H,1,D), k and v (B,Hk,S,D), mask None or (1,S) or (B,1,1,S) → (B,H,1,D). Repeating K and V G times instead
    would copy G·S·Hk·D·2 values a layer a token. `enable_gqa` gives the
    same to the last bit or two (Qwen3-0.6B, one core, S 4,096: 3.0 ms in fp32 and 1.7 in bf16; grouped 1.3 and 2.6).
    """
    B, H, _, D = q.shape
    q = q.reshape(B, k.shape[1], -1, D)  # (B,Hk,G,D)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B,Hk,G,D)
    return y.reshape(B, H, 1, D)  # free on a CPU; some GPU kernels return the rows in another order in memory
