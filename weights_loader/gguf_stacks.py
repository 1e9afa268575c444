"""gpt-oss's experts in a GGUF file: gate and up are apart, and matrices are (out, in).

    Hugging Face                                          llama.cpp
    gate_up_proj  (E,C,2·width), gate and up in turn      ffn_gate_exps, ffn_up_exps  (E,width,C)
    down_proj     (E,width,C)                             ffn_down_exps               (E,C,width)

The biases are apart in the same way, (E,2·width) and (E,width). Sources: llama.cpp's
conversion/gpt_oss.py and src/models/openai-moe.cpp.
"""

import re
from typing import Any, NamedTuple

from .gguf_file import GgufFile, TensorInfo
from .strict import CheckpointError, quote

PARTS = {  # our tensor → theirs, whose columns it has in turn
    "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "down_proj": ("ffn_down_exps",),
}
SUFFIXES = {"": "weight", "_bias": "bias"}  # of our name → of theirs
DIMENSIONS = {"weight": 3, "bias": 2}
THEIRS = re.compile(r"blk\.(\d{1,5})\.ffn_(?:gate|up|down)_exps\.(?:weight|bias)")
OURS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(|_bias)")
MXFP4_HINT = "take a checkpoint in bf16, such as unsloth/gpt-oss-20b-BF16, or a file in Q8_0"


class Stack(NamedTuple):
    """Where one tensor of all experts of a layer is: tensors whose columns it has in turn."""

    parts: tuple[TensorInfo, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of our tensor: (E,in,out), or (E,out) of a bias."""
        experts, *sizes = self.parts[0].shape
        sizes[0] *= len(self.parts)
        return experts, *reversed(sizes)


def stacks(found: GgufFile) -> dict[str, Stack]:
    """Hugging Face's name → its place, for the experts of all layers."""
    layers = {int(match[1]): None for match in map(THEIRS.fullmatch, found.tensors) if match}
    return {
        f"model.layers.{layer}.mlp.experts.{ours}{suffix}": stack(found, layer, theirs, kind)
        for layer in layers
        for ours, theirs in PARTS.items()
        for suffix, kind in SUFFIXES.items()
    }


def stack(found: GgufFile, layer: int, theirs: tuple[str, ...], kind: str) -> Stack:
    """These tensors of a layer. CheckpointError if one is absent or has another shape or type."""
    parts = []
    for leaf in theirs:
        name = f"blk.{layer}.{leaf}.{kind}"
        info = found.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{found.path}: tensor {quote(name)} is missing")
        if info.type.name == "MXFP4":
            raise CheckpointError(
                f"{found.path}: tensor {quote(name)} has type MXFP4, which is not implemented for "
                "gpt-oss",
                MXFP4_HINT,
            )
        parts.append(info)
        if len(info.shape) != DIMENSIONS[kind] or info.shape != parts[0].shape:
            raise CheckpointError(
                f"{found.path}: tensor {quote(name)} has shape {list(info.shape)}, "
                f"{DIMENSIONS[kind]} sizes as of {quote(parts[0].name)} {list(parts[0].shape)} "
                "were expected"
            )
    return Stack(tuple(parts))


# --- writing --------------------------------------------------------------------------------------


def parts_of(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Their name → shape of each part of our tensor with this name; {} if it is no stack."""
    found = OURS.fullmatch(name)
    if found is None:
        return {}
    theirs = PARTS[found[2]]
    experts, *sizes = shape
    sizes[-1] //= len(theirs)
    kind = SUFFIXES[found[3]]
    return {f"blk.{found[1]}.{leaf}.{kind}": (experts, *reversed(sizes)) for leaf in theirs}


def part(name: str, tensor: Any) -> Any:
    """Their tensor with this name, of ours (E,in,out) or (E,out): a view (E,out,in) or (E,out)."""
    leaf, kind = name.rsplit(".", 2)[1:]
    theirs = next(leaves for leaves in PARTS.values() if leaf in leaves)
    columns = tensor[..., theirs.index(leaf) :: len(theirs)]
    return columns.mT if kind == "weight" else columns
