"""Fuzz target: a safetensors file, header and values, as the loader reads it."""

import json
import struct

import common
import torch

from weights_loader import shards
from weights_loader.strict import CheckpointError

INSTRUMENT = ["weights_loader"]
ALLOWED = (CheckpointError,)


def file(header: dict, values: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def seeds() -> dict[str, bytes]:
    one = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    two = one | {"b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]}}
    zero = {
        "z": {"dtype": "F16", "shape": [0, 4], "data_offsets": [0, 0]},
        "__metadata__": {"format": "pt"},
    }
    return {
        "one": file(one, bytes(16)),
        "two": file(two, bytes(22)),
        "zero": file(zero, b""),
        "none": file({}, b""),
    }


def mutate(data: bytes, rng) -> bytes:
    """The header changes as JSON does, and its length follows it; or the bytes change."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.6 and 8 + length <= len(data):
        header = common.json_mutator(data[8 : 8 + length], rng)
        return struct.pack("<Q", len(header)) + header + data[8 + length :]
    return common.byte_mutator(data, rng)


def run(data: bytes) -> None:
    path = common.scratch() / "model.safetensors"
    path.write_bytes(data)
    for entry in list(shards.read_header(path).values())[:20]:
        if 0 < entry.nbytes < 1 << 20:  # no size of a config is 0
            assert shards.materialize(entry, None, torch.device("cpu")).shape == entry.shape
