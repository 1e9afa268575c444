"""Fuzz target: a saved cache. Its checksum stops every mutation at the door, so a file that is still safetensors is
signed again: what is behind the door must not trust what it reads either (the checksum has no key).
"""

import functools
import json

import common
import target_safetensors
import torch

from nanokv.cache import KVCache, make_cache, saving
from nanokv.config import Config
from nanokv.errors import NanoKVError

INSTRUMENT = ["nanokv.cache", "nanokv.cache.options"]
ALLOWED = (NanoKVError,)
SIZES = {
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "max_position_embeddings": 64,
}
KINDS = {
    "dict": {},
    "static": {"capacity": 8},
    "paged": {"page": 4},
    "sliding": {"window": 4},
    "quantized": {},
}
mutate = target_safetensors.mutate


@functools.cache
def config():
    return Config.from_dict({"model_type": "qwen3", **SIZES})


def seeds() -> dict[str, bytes]:
    found = {}
    for name, options in KINDS.items():
        cache = make_cache(name, config(), batch_size=1, dtype=torch.float32, **options)
        for layer in cache:
            layer.append(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
        path = common.scratch() / "seed.kv"
        cache.save(path, tokens=[1, 2, 3])
        found[name] = path.read_bytes()
    return found


def signed(data: bytes) -> bytes:
    """With the checksum that belongs to it, if it is a safetensors file with texts as metadata."""
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        meta = {k: v for k, v in header["__metadata__"].items() if k != "sha256"}
        header["__metadata__"] = meta | {"sha256": saving.digest(meta, load(data))}
        return target_safetensors.file(header, data[8 + length :])
    except Exception:  # no such file: it goes in as it is
        return data


def run(data: bytes) -> None:
    path = common.scratch() / "a.kv"
    for content in dict.fromkeys((data, signed(data))):
        path.write_bytes(content)
        common.expect(ALLOWED, KVCache.load, path, config())
