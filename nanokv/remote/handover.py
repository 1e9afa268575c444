"""Sends a finished cache from one process to another, which continues with the same bits.

    sent = send(link, cache, tokens)                  in the process that has prefilled
    cache, received = receive(link, model.config)     in the process that decodes

The content is the same as in KVCache.save: the `state` of every layer. A quantized cache is sent as
codes, and a sliding one without the tokens it has dropped. The rows of pages are sent, not the
pages, so the receiver's pages may have another size.

    header       kind, options, config, fingerprint of the weights, ids, length, checksum;
                 name, dtype and shape of each tensor
    verdict  ←   the receiver accepts, or gives the reason for a refusal, before any tensor is sent
                 and any memory is taken
    tensors      as they are in memory, layer by layer
    verdict  ←   the receiver has the cache, and the sender may drop it

The cost is 2·L·Hk·D values per token over the link, a copy if the values must be gathered, and
sha256 on both sides. `nanokv memory --link` compares it with another prefill. vLLM and SGLang move
pages between machines in the same way, with NIXL or Mooncake as the link.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nanokv.cache import KVCache, make_cache, saving
from nanokv.config import Config
from nanokv.errors import HandoverError, NanoKVError, foreign
from nanokv.remote.link import Link, as_bytes
from weights_loader.strict import loads

MAGIC = b"nanokv-1"
LONGEST_HEADER = 1 << 28  # bytes: the ids of 30 million tokens
WIDEST = 2 * 8  # bytes per value: more than any state takes, with scales
NAMES = ("float32", "bfloat16", "float16", "float64", "uint8", "int16", "int32", "int64")
DTYPES = {name: getattr(torch, name) for name in NAMES}
# The caches whose state is rows of exact keys and values, so that one can be received as another.
EXACT = ("dict", "static", "growing", "paged", "prefix", "offloaded")
SENT = "the cache that was sent"
Shapes = list[tuple[str, torch.dtype, list[int]]]


@dataclass(frozen=True)
class Receipt:
    """The bytes of a transfer, and its seconds from the header to the last verdict."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


def send(link: Link, cache: KVCache, tokens: Any = (), model_fingerprint: str = "") -> Receipt:
    """Send a whole cache. `tokens` and `model_fingerprint`: as in KVCache.save.

    HandoverError if the receiver refuses the cache, has ended, or does not answer.
    """
    began = perf_counter()
    meta, tensors = saving.contents(cache, tokens, model_fingerprint)
    count = write_header(link, meta, tensors)
    read_verdict(link)
    count += write_tensors(link, tensors)
    read_verdict(link)
    return Receipt(count, perf_counter() - began)


def receive(
    link: Link,
    config: Config,
    model_fingerprint: str = "",
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    kind: str | None = None,
    **options: Any,
) -> tuple[KVCache, Receipt]:
    """Receive a cache from `send` for a model of this config. The ids are in `cache.tokens`.

    `dtype`: of the model that will continue. `kind`: receive it as another of the EXACT caches.
    `options`: where to store the values, as in KVCache.load: a pool, a capacity.

    HandoverError before any tensor is received, if the config, the dtype or the weights differ.
    Later an error if the cache does not fit, or if the checksum differs. The sender raises the same
    refusal.
    """
    meta, shapes, count = read_header(link)
    began = perf_counter()
    with verdict(link), foreign(f"{SENT} is not what send writes", HandoverError):
        check(meta, shapes, config, model_fingerprint, dtype)
        changed = as_kind(meta, kind)
    tensors = read_tensors(link, meta, shapes)
    with verdict(link):
        cache = saving.rebuild(
            SENT,
            meta | changed,
            tensors,
            config,
            make_cache,
            model_fingerprint,
            options,
            device=device,
        )
    return cache, Receipt(count + size(shapes), perf_counter() - began)


# --- checks ---------------------------------------------------------------------------------------


def check(
    meta: dict, shapes: Shapes, config: Config, model_fingerprint: str, dtype: torch.dtype | None
) -> None:
    """HandoverError for a header with another model or dtype, or too many bytes for its tokens."""
    if meta.get("format") != saving.FORMAT:
        raise HandoverError(
            f"{SENT} has the format {meta.get('format')!r}, not {saving.FORMAT!r}",
            "both processes need the same version of nanokv",
        )
    saving.check_model(SENT, meta, loads(meta["config"]), config, model_fingerprint)
    for name, kind, _ in shapes:
        is_key = name.rpartition(".")[2] in ("key", "exact0")
        if is_key and dtype not in (None, kind):
            raise HandoverError(
                f"{SENT} has keys in {plain(kind)}, this model computes in {plain(dtype)}",
                "load the model with the same dtype in both processes",
            )
    rows = int(meta["rows"])
    longest = loads(meta["length"])
    if isinstance(longest, list):
        longest = max(longest)
    per_token = 2 * config.num_kv_layers * config.num_key_value_heads * config.head_dim
    most = WIDEST * per_token * rows * longest
    if size(shapes) > most:
        raise HandoverError(
            f"{SENT} has {size(shapes):,} bytes for {rows} × {longest:,} tokens: at most {most:,}"
        )


def as_kind(meta: dict, kind: str | None) -> dict:
    """The fields of the header to replace if the receiver uses another kind of cache."""
    if kind in (None, meta["cache"]):
        return {}
    if not {kind, meta["cache"]} <= set(EXACT):
        raise HandoverError(
            f"a {meta['cache']} cache cannot be received as a {kind} one",
            f"these keep the same rows: {', '.join(EXACT)}",
        )
    return {"cache": kind, "options": "{}", "salted": "false"}


@contextmanager
def verdict(link: Link) -> Iterator[None]:
    """Send the sender a verdict on the block: b"" if it succeeds, else the NanoKVError.

    The sender raises the error as well.
    """
    try:
        yield
    except NanoKVError as error:
        write_words(link, json.dumps([str(error), error.hint]).encode())
        raise
    write_words(link, b"")


def read_verdict(link: Link) -> None:
    """HandoverError with the receiver's reason if it has refused."""
    words = read_words(link)
    if words:
        message, hint = loads(words.decode())
        raise HandoverError(f"the receiver has refused: {message}", hint)


# --- messages -------------------------------------------------------------------------------------


def write_header(link: Link, meta: dict, tensors: dict[str, Tensor]) -> int:
    """Write the header → bytes written. `meta`: any JSON object."""
    listed = [[name, plain(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()]
    whole = {"meta": meta | {"sha256": saving.digest(meta, tensors)}, "tensors": listed}
    return write_words(link, json.dumps(whole).encode())


def write_tensors(link: Link, tensors: dict[str, Tensor]) -> int:
    """Write the tensors → bytes written."""
    count = 0
    for tensor in filter(Tensor.numel, tensors.values()):
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)  # (N,)
        link.write(data)
        count += len(data)
    return count


def read_header(link: Link) -> tuple[dict, Shapes, int]:
    """Read the header → (meta, shapes of the tensors, bytes read). HandoverError if invalid."""
    words = read_words(link)
    try:
        header = loads(words.decode())
        shapes = [(str(name), DTYPES[kind], shape) for name, kind, shape in header["tensors"]]
        if any(type(n) is not int or n < 0 for _, _, shape in shapes for n in shape):
            raise ValueError("a shape is made of whole numbers")
        return dict(header["meta"]), shapes, 16 + len(words)
    except (ValueError, KeyError, TypeError) as error:
        raise HandoverError(
            f"a header of {len(words):,} bytes cannot be read: {type(error).__name__}",
            "both processes need the same version of nanokv",
        ) from error


def read_tensors(link: Link, meta: dict, shapes: Shapes) -> dict[str, Tensor]:
    """Read the tensors. HandoverError if the checksum differs."""
    tensors = {}
    for name, dtype, shape in shapes:
        data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)  # (N,)
        if len(data):
            link.read(data)
        tensors[name] = data.view(dtype).view(shape)
    if saving.digest(meta, tensors) != meta.get("sha256"):
        raise HandoverError(
            f"{size(shapes):,} bytes arrived, but they are not the bytes sent: the checksum differs"
        )
    return tensors


def size(shapes: Shapes) -> int:
    """The bytes of the tensors."""
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in shapes)


def plain(dtype: torch.dtype | None) -> str:
    """torch.bfloat16 → bfloat16"""
    return str(dtype).removeprefix("torch.")


def write_words(link: Link, words: bytes) -> int:
    """Write the length of `words` and the words → bytes written."""
    link.write(as_bytes(MAGIC + len(words).to_bytes(8, "little")))
    if words:
        link.write(as_bytes(words))
    return 16 + len(words)


def read_words(link: Link) -> bytes:
    """Read what `write_words` wrote. HandoverError if it is no message of nanokv."""
    head = torch.empty(16, dtype=torch.uint8)
    link.read(head)
    magic = bytes(head[:8].tolist())
    count = int.from_bytes(bytes(head[8:].tolist()), "little")
    if magic != MAGIC or count > LONGEST_HEADER:
        raise HandoverError(
            f"{bytes(head.tolist())!r} begins no message of nanokv",
            "both processes need the same version of nanokv",
        )
    words = torch.empty(count, dtype=torch.uint8)
    if count:
        link.read(words)
    return words.numpy().tobytes()
