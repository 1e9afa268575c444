"""Loads a rank's part of a model: reads only its weights, and compares the files of all ranks.

group = nanokv.parallel.group.start()                             on every rank
model, tokenizer = nanokv.parallel.reading.load("Qwen/Qwen3-0.6B", group)
"""

import hashlib
import os
from functools import partial
from pathlib import Path

import torch

import weights_loader
from nanokv.config import Config
from nanokv.errors import ConfigError
from nanokv.loading import Read, load_folder
from nanokv.model import Transformer
from nanokv.parallel.group import Ranks
from nanokv.parallel.shards import Shard, build_shard
from nanokv.parallel.watch import Watch
from nanokv.text.tokenizer import Tokenizer
from weights_loader import Device, Dtype, shards
from weights_loader.prefetch import Prefetch
from weights_loader.strict import read_object

SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# The bytes compared at each place of a tensor. The headers alone do not distinguish a fine-tuned
# checkpoint from its base.
PROBE = 64
# The places, from the first to the last bytes of a tensor. An interrupted copy may have the right
# size and a hole.
PLACES = 8


def load(
    source: str | os.PathLike,
    ranks: Ranks,
    dtype: Dtype = torch.float32,
    device: Device = "cpu",
    revision: str | None = None,
) -> tuple[Transformer, Tokenizer]:
    """`nanokv.load` for this rank's part. Every rank of the group calls it with the same source.

    ParallelError if the sizes are not divisible or the ranks see different files; otherwise the
    errors of nanokv.load.
    """
    dtype, device = weights_loader.check_target(dtype, device)
    folder = weights_loader.resolve(source, revision=revision)
    fields = read_object(folder / "config.json", ConfigError)
    return load_folder(folder, fields, dtype, device, read=reader(ranks))


def reader(ranks: Ranks) -> Read:
    """The function with which load_folder makes the model of this rank."""
    return partial(read_shard, ranks)


def read_shard(
    ranks: Ranks,
    folder: Path,
    fields: dict,
    dtype: torch.dtype | None,
    device: torch.device,
    prefetched: Prefetch | None = None,
) -> Transformer:
    """This rank's part of the weights as a model that compares its inputs with the other ranks."""
    # Check the sizes and the files before any weight is read.
    shard = Shard(Config.from_dict(fields), ranks.rank, ranks.size)
    hint = "every rank needs the same checkpoint: compare the folders"
    ranks.check_alike(f"the checkpoint in {folder}", fingerprint(folder), hint)
    fields, state = weights_loader.read_part(folder, dict(fields), dtype, device, shard.part)
    model = build_shard(Shard(Config.from_dict(fields), ranks.rank, ranks.size), state, ranks)
    model.register_forward_pre_hook(Watch(ranks))
    return model


def fingerprint(folder: Path) -> str:
    """sha256 over the small files and over the name, dtype, shape and some bytes of every tensor.

    PROBE bytes are read at each of PLACES evenly spaced places, 8 pages per tensor: some
    milliseconds if the file is in memory. A difference of one value between two places is missed; a
    hole of a seventh of a tensor is found.
    """
    digest = hashlib.sha256()
    for name in SMALL:
        path = folder / name
        content = b""
        if path.is_file():
            content = path.read_bytes()
        digest.update(hashlib.sha256(content).digest())
    for name, entry in sorted(shards.read_entries(folder).items()):
        digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
        with open(entry.path, "rb") as file:
            last = max(0, entry.nbytes - PROBE)
            for i in range(PLACES):
                file.seek(entry.start + last * i // (PLACES - 1))
                digest.update(file.read(min(PROBE, entry.nbytes)))
    return digest.hexdigest()
