"""The fast model for a GPU: a decode step is one recorded CUDA graph over the pages of any cache.

The first four files are in Triton. Each kernel quotes the line of the plain model that it replaces.

    products.py    few rows times the weights, with the norm before and the residual after
    kernels.py     the operations between two products: norm, heads, rotation, SwiGLU
    attention.py   one query per row over the pages of any cache
    draw.py        draws a token for each row
    recorded.py    a step at fixed addresses, recorded for each of a few batch sizes and replayed
    model.py       the model that calls them; prefill runs layer by layer with the same kernels

These modules are imported only when a model on a GPU is optimized, because importing Triton takes a
second.
"""

import contextlib
import functools
from importlib.util import find_spec

import torch

# The oldest compute capability with bf16 and with Triton's products of 16-bit floats.
OLDEST = (8, 0)


def missing(device: torch.device | str, dtype: torch.dtype) -> str:
    """The reason why a model of this dtype cannot be recorded on this device, or ""."""
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
    """A context in which Triton and recordings use this device.

    Both use the current device, which is a setting of each thread and cuda:0 by default. torch's
    operators use the device of their tensors.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def trial(device: torch.device) -> str:
    """The reason why the smallest kernel does not run on this device, or "".

    Triton needs a C compiler, the headers of Python and a driver.
    """
    try:
        from nanokv.fast.gpu.kernels import swiglu

        with on(device):
            swiglu(torch.ones(1, 32, device=device)).tolist()
    # A compiler, a driver or an installation may raise anything. The plain model still runs.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = next(iter(lines), "")
        return f"Triton does not run here: {type(error).__name__} {first}".rstrip()
    return ""
