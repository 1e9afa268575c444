"""Which of torch's attention kernels runs on a GPU. Only attention.py imports this file.

    flash       fp16 and bf16; no mask except the causal one; reads each KV head once for the query
                heads that share it
    efficient   also fp32 and any mask; needs as many KV heads as query heads
    cuDNN       not used: it plans again for every new length, 1.5 ms per layer, and every decode
                step has a new length
    math        the fallback for all other inputs: plain matrix products, (T,S) scores in memory

A CPU has one kernel and no choice. The inputs that flash and efficient accept depend on the dtype,
the head size, the GPU and the torch release (sdp_utils.cpp in torch), so torch's own checks decide.
torch.compile cannot trace these checks: a compiled model groups its heads itself, or has a mask.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import has_torch_function

ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# sdpa_kernel sets and restores state of the whole process, so threads take turns.
TURN = threading.Lock()
NO_CHOICE = contextlib.nullcontext()
LOWER_RIGHT = 2  # torch's number for the causal mask aligned to the bottom right


def chooses(device: torch.device) -> bool:
    """Whether torch has several kernels on this device. (ROCm devices are called cuda too.)"""
    return device.type == "cuda"


def chosen(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which attention on this device uses the first suitable kernel of ORDER."""
    if not chooses(device):
        return NO_CHOICE
    if torch.compiler.is_compiling():  # the graph keeps the choice
        return sdpa_kernel(ORDER, set_priority=True)
    return in_turn()


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """The same context, for one thread at a time."""
    with TURN, sdpa_kernel(ORDER, set_priority=True):
        yield


def takes_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether G query heads (B,H,T,D) may share one KV head (B,Hk,S,D) in this call.

    If not, the caller repeats the keys and values.
    """
    if not chooses(q.device):
        return True
    return mask is None and (torch.compiler.is_compiling() or flash_takes(q, k, v))


def flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the flash kernel accepts these tensors, without a mask."""
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True))


def lower_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """Causal attention of the last T of S positions without a (T,S) mask; None if no kernel can.

    q (B,H,T,D), k and v (B,Hk,S,D) → (B,H,T,D). The same as torch.nn.attention.bias's
    causal_lower_right, whose module imports torch.compile (two seconds). A tracer that overrides
    torch functions gets None, because it would not see the operators called here.
    """
    compiling = torch.compiler.is_compiling()
    if compiling or not chooses(q.device) or has_torch_function((q, k, v)) or q.shape[-1] % 8:
        return None
    if flash_takes(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    k = repeated(k, q.shape[1])  # (B,H,S,D)
    v = repeated(v, q.shape[1])  # (B,H,S,D)
    if not can_use_efficient_attention(SDPAParams(q, k, v, None, 0.0, False, False)):
        return None
    rows = (x.transpose(1, 2) for x in (q, k, v))  # (B,T,H,D), (B,S,H,D) ×2
    none = (None,) * 5  # no bias, and the same length for all rows
    gradient = any(x.requires_grad for x in (q, k, v))
    y = torch.ops.aten._efficient_attention_forward(*rows, *none, 0.0, LOWER_RIGHT, gradient)[0]
    return y.transpose(1, 2)


def repeated(x: Tensor, H: int) -> Tensor:
    """Repeat each KV head for the query heads that share it: (B,Hk,S,D) → (B,H,S,D).

    A copy if H is larger than Hk.
    """
    B, Hk, S, D = x.shape
    return x[:, :, None].expand(B, Hk, H // Hk, S, D).reshape(B, H, S, D)
