"""Which of torch's kernels computes attention on a GPU. Only attention.py asks; a CPU has one kernel and no choice.

    flash       fp16 and bf16, no mask but the causal one; reads a KV head once for the query heads that share it
    efficient   fp32 too, and any mask; as many KV heads as query heads
    cuDNN       not used: it plans for every new length, 1.5 ms a layer, and each decode step has a new length
    math        plain products, T×S scores in memory: for what neither flash nor efficient takes

What flash and efficient take depends on dtype, head size, GPU and the release of torch (its sdp_utils.cpp), so torch is
asked. torch.compile cannot follow that question: a compiled model groups its heads itself, or has a mask.
"""

import contextlib
import threading

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import has_torch_function

ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# What sdpa_kernel sets holds for the whole process, and it puts back what it found: threads take turns.
TURN = threading.Lock()
NO_CHOICE = contextlib.nullcontext()
LOWER_RIGHT = 2  # torch's number for that causal mask


def chooses(device: torch.device) -> bool:
    """Does torch have several kernels there? (ROCm calls its devices cuda too.)"""
    return device.type == "cuda"


def chosen(device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, attention on this device takes the first of ORDER that can compute it; afterwards all is as before."""
    if not chooses(device):
        return NO_CHOICE
    if torch.compiler.is_compiling():  # the graph keeps the choice
        return sdpa_kernel(ORDER, set_priority=True)
    return in_turn()


@contextlib.contextmanager
def in_turn():
    """The choice, by one thread at a time."""
    with TURN, sdpa_kernel(ORDER, set_priority=True):
        yield


def takes_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """May G query heads (B,H,T,D) share a KV head (B,Hk,S,D) in this call? If not, keys and values are repeated."""
    if not chooses(q.device):
        return True
    return mask is None and (torch.compiler.is_compiling() or flash_takes(q, k, v))


def flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Does the flash kernel take these, without a mask?"""
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True))


def lower_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Causal attention of the last T of S positions by a kernel that needs no (T,S) mask; None where there is none.

    q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D). As torch.nn.attention.bias.causal_lower_right, whose file imports
    torch.compile: two seconds. Somebody who watches torch's functions (a trace) gets None: these are no functions.
    """
    compiling = torch.compiler.is_compiling()
    if compiling or not chooses(q.device) or has_torch_function((q, k, v)) or q.shape[-1] % 8:
        return None
    if flash_takes(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])  # (B,H,S,D) ×2
    if not can_use_efficient_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        return None
    rows = (x.transpose(1, 2) for x in (q, k, v))  # (B,T,H,D), (B,S,H,D) ×2
    none = (None,) * 5  # no bias, one length for all rows
    gradient = any(x.requires_grad for x in (q, k, v))
    y = torch.ops.aten._efficient_attention_forward(*rows, *none, 0.0, LOWER_RIGHT, gradient)[0]
    return y.transpose(1, 2)


def repeated(x: Tensor, H: int) -> Tensor:
    """Each KV head for every query head that shares it. (B,Hk,S,D) → (B,H,S,D), a copy if H is more than Hk."""
    B, Hk, S, D = x.shape
    return x[:, :, None].expand(B, Hk, H // Hk, S, D).reshape(B, H, S, D)
