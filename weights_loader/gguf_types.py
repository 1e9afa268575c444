"""The types that a GGUF file can be written in: which type each tensor gets, and its bytes.

    layout = types(TYPES["q4_k_m"], shapes, layers)   {"token_embd.weight": "Q6_K", …}
    encode(name, tensor, layout[name])                (rows, bytes of a row)

The choice is llama.cpp's (src/llama-quant.cpp: `llama_tensor_get_type`,
`tensor_allows_quantization`, `tensor_type_fallback`). Two of its special cases are left out: models
with exactly 8 experts and Llama 70B get more bits in a few tensors there. Q4_K and Q6_K are
quantized in k_quants.py, the other types by the `gguf` package.
"""

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .k_quants import quantize_q4_k, quantize_q6_k
from .strict import CheckpointError, quote

Shape = tuple[int, ...]
CHUNK = 1 << 20  # numbers that are converted at once
LARGEST_F16 = 65_504.0
PLAIN = ("F32", "F16", "BF16")
FULL_PRECISION = (  # the ends of names of matrices in F32
    ".bias",
    ".ffn_gate_inp.weight",
    ".shortconv.conv.weight",
    ".ssm_conv1d.weight",
)


@dataclass(frozen=True)
class FileType:
    """A value of --type. `usual`: the type of most matrices; `code`: general.file_type."""

    usual: str
    code: str  # a name of gguf.LlamaFileType
    mix: bool = False  # some matrices get Q6_K


TYPES = {
    "bf16": FileType("BF16", "MOSTLY_BF16"),
    "f16": FileType("F16", "MOSTLY_F16"),
    "f32": FileType("F32", "ALL_F32"),
    "q8_0": FileType("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": FileType("Q4_0", "MOSTLY_Q4_0"),
    "q4_1": FileType("Q4_1", "MOSTLY_Q4_1"),
    "q5_0": FileType("Q5_0", "MOSTLY_Q5_0"),
    "q5_1": FileType("Q5_1", "MOSTLY_Q5_1"),
    "q4_k_m": FileType("Q4_K", "MOSTLY_Q4_K_M", mix=True),
}
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no whole super-blocks; else F16
# The tensors of which q4_k_m stores some layers in Q6_K.
SENSITIVE = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down|ffn_down_exps)\.weight")
VALUES = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv)\.weight")  # counted by themselves


def types(kind: FileType, shapes: Mapping[str, Shape], layers: int) -> dict[str, str]:
    """GGUF name → name of the tensor's type. `layers`: number of layers of the model.

    Vectors, biases, routers and short convolutions are F32. The head has the largest effect on the
    answer, so a file of 4 or 5 bits has it in Q6_K; a tied head is the embedding.
    """
    head = "output.weight" if "output.weight" in shapes else "token_embd.weight"
    valued = sorted(int(found[1]) for found in map(VALUES.fullmatch, shapes) if found)
    found = {}
    for name, shape in shapes.items():
        type_ = wanted(kind, name, shape, name == head)
        if kind.mix and type_ == kind.usual and is_sensitive(name, valued, layers):
            type_ = "Q6_K"
        found[name] = fitting(type_, shape)
    return found


def wanted(kind: FileType, name: str, shape: Shape, is_head: bool) -> str:
    """The type of a tensor, without regard to its layer and to the length of its rows."""
    if len(shape) == 1 or name.endswith(FULL_PRECISION):
        return "F32"
    if kind.usual in PLAIN or kind.usual == "Q8_0":
        return kind.usual
    if is_head:
        return "Q6_K"
    return kind.usual


def is_sensitive(name: str, valued: list[int], layers: int) -> bool:
    """Whether q4_k_m has more bits for this tensor.

    `valued`: the layers with values (LFM2 has them in some layers only), whose tensors are counted
    by themselves.
    """
    found = SENSITIVE.fullmatch(name)
    if found is None:
        return False
    layer = int(found[1])
    if VALUES.fullmatch(name):
        return has_more_bits(valued.index(layer), len(valued))
    return has_more_bits(layer, layers)


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether q4_k_m has more bits for this layer: in the first and last eighth, and every third."""
    eighth = layers // 8
    if layer < eighth or layer >= 7 * layers // 8:
        return True
    return (layer - eighth) % 3 == 2


def fitting(type_: str, shape: Shape) -> str:
    """The type, or a larger one if a row of the tensor is no whole number of its blocks."""
    import gguf

    while shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]][0]:
        type_ = FALLBACKS.get(type_, "F16")
    return type_


def nbytes(type_: str, shape: Shape) -> int:
    """Bytes of a tensor of this type."""
    import gguf

    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    return math.prod(shape) // block * block_bytes


def encode(name: str, tensor: torch.Tensor, type_: str) -> NDArray[np.uint8]:
    """(…,K) numbers → (rows, bytes of a row), on as many threads as torch uses.

    A part of the tensor is converted at a time, so that the memory is that of the result. Raises
    CheckpointError with the tensor's `name` for a number that is infinite, NaN or too large for the
    type.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    result = np.empty((len(rows), nbytes(type_, tuple(rows.shape)) // len(rows)), np.uint8)
    step = max(1, CHUNK // rows.shape[1])

    def fill(first: int) -> None:
        part = rows[first : first + step]
        if type_ not in ("F32", "BF16"):
            check_range(name, part, type_)
        result[first : first + step] = encode_rows(part, type_)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(0, len(rows), step)))  # list: raises the first error
    return result


def encode_rows(rows: torch.Tensor, type_: str) -> NDArray[np.uint8]:
    """`encode` for a few rows."""
    import gguf

    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if type_ in plain:
        return rows.to(plain[type_]).contiguous().view(torch.uint8).numpy()
    numbers = rows.to(torch.float32).contiguous().numpy()
    if type_ == "Q4_K":
        return quantize_q4_k(numbers)
    if type_ == "Q6_K":
        return quantize_q6_k(numbers)
    return gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[type_])


def check_range(name: str, rows: torch.Tensor, type_: str) -> None:
    """CheckpointError unless fp16 holds all numbers. Scales of blocks are fp16 too."""
    low, high = rows.aminmax()
    largest = max(abs(float(low)), abs(float(high)))
    if largest <= LARGEST_F16:  # false for NaN
        return
    raise CheckpointError(
        f"tensor {quote(name)} has a number that does not fit in {type_} "
        f"(largest {largest:.6g}, limit {LARGEST_F16:,.0f})",
        "--type bf16 or f32 holds every number",
    )
