"""What the kernels of nanokv/fast/gpu compute, in torch's operators: for tests of the model around them.

Same names, same arguments. Triton's interpreter runs the kernels themselves, program by program in Python, a hundred
times slower than these.
"""

import ctypes
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from nanokv.attention import decode_attention
from nanokv.rope import apply_rope

ITEMS = {2: ctypes.c_uint16, 4: ctypes.c_uint32}


def normed(x, weight, eps):
    if weight is None:
        return x
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def rms_norm(x, weight, eps, add=None, out=None):
    if add is not None:
        x += add
    return normed(x, weight, eps)


def swiglu(gate_up, out=None):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def split_heads(qkv, heads, q_norm, k_norm, eps, cos, sin, T, out=None):
    H, Hk, D = heads
    q, k, v = qkv.view(len(qkv) // T, T, -1, D).split((H, Hk, Hk), dim=2)
    q, k = normed(q, q_norm, eps).transpose(1, 2), normed(k, k_norm, eps).transpose(1, 2)
    cos, sin = (x.reshape(-1, 1, T, D) for x in (cos, sin))  # (1 or B,1,T,D)
    rope = cos, sin
    return apply_rope(q, rope), apply_rope(k, rope), v.transpose(1, 2).contiguous()


def memory(address, count, dtype):
    """`count` numbers at an address, as the tensor that they are in."""
    array = (ITEMS[dtype.itemsize] * count).from_address(address)
    return torch.frombuffer(array, dtype=dtype)


def slots(places, layer, b, tokens, Hk, D, dtype):
    """Keys and values of the first `tokens` tokens of a row, each (Hk,D): views into the cache's memory."""
    keys, values, page_stride, head_stride, token_stride, size, table, stride = places[
        layer
    ].tolist()
    for token in range(tokens):
        page = b
        if table:
            entry = table + 4 * (b * stride + token // size)
            page = ctypes.c_int32.from_address(entry).value
        at = page * page_stride + token % size * token_stride
        reach = (Hk - 1) * head_stride + D
        yield [
            memory(base + at * dtype.itemsize, reach, dtype).as_strided((Hk, D), (head_stride, 1))
            for base in (keys, values)
        ]


def split_heads_into_pages(
    qkv, heads, q_norm, k_norm, eps, cos, sin, places, layer, lengths, out=None
):
    _, Hk, D = heads
    q, k, v = split_heads(qkv, heads, q_norm, k_norm, eps, cos[:, None], sin[:, None], 1)
    for b, length in enumerate(lengths[layer].tolist()):
        if length:
            *_, (key, value) = slots(places, layer, b, length, Hk, D, qkv.dtype)
            key.copy_(k[b, :, 0])
            value.copy_(v[b, :, 0])
    return q[:, :, 0]


def paged_attention(q, places, layer, lengths, splits, kv_heads, out=None):
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths[layer].tolist()):
        if length:
            pairs = slots(places, layer, b, length, kv_heads, q.shape[2], q.dtype)
            k, v = map(torch.stack, zip(*pairs, strict=True))  # (S,Hk,D) ×2
            k, v = (x.transpose(0, 1)[None] for x in (k, v))  # (1,Hk,S,D) ×2
            out[b] = decode_attention(q[b][None, :, None], k, v)[0, :, 0]
    return out


def product(x, weight, bias=None, norm=None, add=None, swiglu=False, out=None):
    x = x if norm is None else normed(x, *norm)
    y = F.linear(x, weight, bias)
    if swiglu:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    y = y if add is None else add + y
    return y if out is None else out.copy_(y)


@contextmanager
def in_place():
    """Meanwhile the model of a GPU calls these."""
    from nanokv.fast.gpu import kernels, model

    names = ("rms_norm", "swiglu", "split_heads", "split_heads_into_pages")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(kernels, name, globals()[name])
        patch.setattr(model, "paged_attention", paged_attention)
        patch.setattr(model, "product", product)
        yield


def around(forward):
    """The same forward, which finds these."""

    def wrapped(*args):
        with in_place():
            return forward(*args)

    return wrapped
