"""Triton's kernels on a CPU, in its interpreter; on a machine with a GPU they run there. Import it
before the kernels.

The interpreter cuts bfloat16 off where every GPU rounds to the nearest (triton 3.5 to 3.9); here it
rounds too.
"""

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="no Triton here: pip install triton")
if DEVICE == "cpu":
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_exactly(values, source, target, rounding_mode):
        """fp32 to bfloat16 by the nearest, of two equally near the even one; and back."""
        names = source.name, target.name
        if names == ("bf16", "fp32"):
            bits = np.frombuffer(values.tobytes(), np.uint16).astype(np.uint32) << 16
        elif names == ("fp32", "bf16"):
            bits = np.frombuffer(values.tobytes(), np.uint32)
            nearest = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            bits = np.where(is_nan, (bits >> 16) | 0x40, nearest).astype(np.uint16)
        else:
            return convert(values, source, target, rounding_mode)
        return bits.reshape(values.shape)

    interpreter._convert_float = convert_exactly

    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_numbers(self, a, b, *others):
        """Of bfloat16 the interpreter multiplies the bits."""
        a, b = (
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        )
        return dot(self, a, b, *others)

    interpreter.InterpreterBuilder.create_dot = dot_of_numbers
