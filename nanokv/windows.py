"""Attention of layers that see only the newest positions, over any cache.

    within(attend, 128)(q, k, v)    each query sees its own position and the 127 before it

The keys of every cache end with the newest position. So a window is a band at the end of the keys,
whether the cache still holds older ones or not. `attend` says what is visible otherwise (padding).
Sources: Beltagy et al. 2020, arXiv 2004.05150; masking_utils.py of transformers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanokv.attention import Attend, Rows, decode_attention, prefill_attention, row_blocks


class Window:
    """`attend`, of which query t of T sees keys S−T+t−width+1 … S−T+t."""

    def __init__(self, attend: Any, width: int):
        self.attend = attend
        self.width = width

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D)."""
        T = q.shape[2]
        if not hasattr(self.attend, "visible"):
            return self.one_by_one(q, k, v)
        if T == 1:
            k = k[:, :, -self.width :]  # (B,Hk,n,D), n ≤ width
            v = v[:, :, -self.width :]  # (B,Hk,n,D)
            mask = self.attend.visible((0, 1), 1, k.shape[2], q.device)
            return decode_attention(q, k, v, mask)
        blocks = row_blocks(q, k.shape[2])
        parts = [self.block(q, k, v, rows) for rows in blocks]
        return torch.cat(parts, 2)  # (B,H,T,D)

    def one_by_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Any other function gets one query at a time, with the keys of its window."""
        T = q.shape[2]
        parts = []
        for t in range(T):
            end = k.shape[2] - T + t + 1
            first = max(0, end - self.width)
            parts.append(self.attend(q[:, :, t : t + 1], k[:, :, first:end], v[:, :, first:end]))
        return torch.cat(parts, 2)  # (B,H,T,D)

    def block(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        """These of the queries of a call. q (B,H,T,D) → (B,H,rows,D)."""
        T, S = q.shape[2], k.shape[2]
        first, end = self.span(rows, T, S)
        mask = self.visible(rows, T, S - first, q.device)[..., : end - first]  # (…,rows,s)
        queries = q[:, :, rows[0] : rows[1]]  # (B,H,rows,D)
        return prefill_attention(queries, k[:, :, first:end], v[:, :, first:end], mask)

    def span(self, rows: Rows, T: int, S: int) -> tuple[int, int]:
        """The first of S keys that these of T queries see, and the one after the last."""
        a, b = rows
        return max(0, S - T + a - self.width + 1), S - T + b

    def visible(self, rows: Rows, T: int, S: int, device: torch.device) -> Tensor:
        """What these of T queries see of the last S keys, bool (…,rows,S)."""
        a, b = rows
        end = S - T + b  # no query of these sees a later key
        mask = F.pad(band(b - a, end, self.width, device), (0, S - end))  # (rows,S)
        seen = self.attend.visible(rows, T, S, device)  # (…,rows or 1,S)
        return mask if seen is None else mask & seen


def within(attend: Attend, width: int) -> Attend:
    """The attention of a layer with a window of `width` positions."""
    if hasattr(attend, "within"):  # an attention of several parts
        return attend.within(width)
    return Window(attend, width)


def band(T: int, S: int, width: int, device: torch.device | str | None = None) -> Tensor:
    """(T,S) bool for the last T of S positions: each query sees the newest `width` up to itself."""
    position = torch.arange(S, device=device)  # (S,)
    query = torch.arange(S - T, S, device=device)[:, None]  # (T,1)
    return (position <= query) & (position > query - width)
