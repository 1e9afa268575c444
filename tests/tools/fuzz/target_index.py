"""Fuzz target: model.safetensors.index.json beside two small shards."""

import json

import common
import target_safetensors

from weights_loader import shards
from weights_loader.strict import CheckpointError

INSTRUMENT = ["weights_loader"]
ALLOWED = (CheckpointError, OSError)  # weights_loader.load makes a CheckpointError of an OSError
mutate = common.json_mutator
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def seeds() -> dict[str, bytes]:
    whole = {"metadata": {"total_size": 32}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    return {
        "whole": json.dumps(whole).encode(),
        "outside": b'{"weight_map": {"a": "../a.safetensors"}}',
    }


def run(data: bytes) -> None:
    folder = common.scratch()
    for name, shard in zip("ab", SHARDS, strict=True):
        header = {name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
        (folder / shard).write_bytes(target_safetensors.file(header, bytes(16)))
    (folder / "model.safetensors.index.json").write_bytes(data)
    assert set(shards.read_entries(folder)) <= {"a", "b"}
