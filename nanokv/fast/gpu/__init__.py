"""A GPU at the memory's speed: a decode step is one recorded graph over the pages of any cache.

    products.py    few rows times the weights, with the norm before and the residual after   )  in Triton, each
    kernels.py     what stands between two products: norm, heads, rotation, SwiGLU           )  beside the plain line
    attention.py   one query per row over the pages of any cache                             )  that it replaces
    draw.py        a token for each row                                                      )
    recorded.py    a step at fixed addresses, recorded once for each of a few batch sizes and replayed
    model.py       the model that calls them; what is no decode step goes from layer to layer, by the same kernels

Nothing here is imported before a model on a GPU is optimized: Triton takes a second.
"""

import contextlib
import functools
from importlib.util import find_spec

import torch

# Triton's products of 16-bit floats, and bf16 itself.
OLDEST = (8, 0)


def missing(device: torch.device | str, dtype: torch.dtype) -> str:
    """Why a model of this dtype cannot be recorded on this device, or ""."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"kernels are for CPUs and CUDA, this is {device.type}"
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        return "torch sees no such GPU"
    if torch.version.hip:
        return "the kernels were never tried on ROCm"
    if find_spec("triton") is None:
        return "there is no Triton: pip install triton"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"no kernels for {str(dtype).removeprefix('torch.')}"
    have = torch.cuda.get_device_capability(device)
    if have < OLDEST:
        return f"the kernels need compute capability 8.0, this GPU has {have[0]}.{have[1]}"
    return trial(device)


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, Triton and recordings are on this device. They take the current one, which each thread has of its own
    and which is cuda:0 until somebody says otherwise; torch's operators go by their tensors."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def trial(device: torch.device) -> str:
    """Why the smallest kernel does not run there, or "": Triton needs a C compiler, the headers of Python, a driver."""
    try:
        from nanokv.fast.gpu.kernels import swiglu

        with on(device):
            swiglu(torch.ones(1, 32, device=device)).tolist()
    # Whatever a compiler, a driver or an installation may raise: the plain model runs all the same.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = next(iter(lines), "")
        return f"Triton does not run here: {type(error).__name__} {first}".rstrip()
    return ""
