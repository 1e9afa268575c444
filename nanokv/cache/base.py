"""The cache contract: one LayerCache per layer, and KVCache, the thin sequence that owns what concerns them all.

A cache is plugged into the model from outside. What `append` returns goes straight to the attention function; what
`mask` returns says which of those keys each new query may see. A new kind of cache overrides `append` and whatever
else it can do; what it cannot do raises UnsupportedError.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nanokv.attention import causal_mask
from nanokv.errors import CacheError, UnsupportedError


class LayerCache:
    """Keys and values of one layer. `length`, the number of tokens seen, is the next call's only legal start_pos."""

    length: int = 0
    capacity: int | None = None  # the most tokens that fit; None = as memory allows
    rollback: int | None = None  # tokens that one append may bring and truncate take back without a trace; None = any

    def append(self, k, v):
        """(B,Hk,T,D) ×2, keys already rotated → (B,Hk,S,D) ×2, oldest first; the last T rows are the new ones."""
        raise NotImplementedError

    def mask(self, T: int):
        """Which keys the next T queries see: None = all, else bool (T,S), bottom-right causal. Changes nothing."""
        return causal_mask(T, self.length + T)

    def width(self, T: int) -> int:
        """S: how many keys the append of T tokens will return."""
        return self.length + T

    @property
    def rows(self) -> int | None:
        """Rows of the batch; None while any number may come."""
        return None

    def truncate(self, n: int):
        """Forget positions ≥ n (a rejected draft, an edited turn). Absolute, and harmless when repeated."""
        raise UnsupportedError(f"{type(self).__name__} cannot truncate")

    def fork(self) -> "LayerCache":
        """An independent copy: appending to it leaves this one as it is."""
        raise UnsupportedError(f"{type(self).__name__} cannot fork")

    def reorder(self, index):
        """Row b becomes old row index[b] (beam search); the batch may grow or shrink."""
        raise UnsupportedError(f"{type(self).__name__} cannot reorder")

    def state(self) -> dict:
        """The tensors that `restore` needs to rebuild this layer: {name: tensor}."""
        raise UnsupportedError(f"{type(self).__name__} cannot be saved")

    def restore(self, state: dict):
        """Take over what `state` returned."""
        raise UnsupportedError(f"{type(self).__name__} cannot be loaded")

    @property
    def nbytes(self) -> int:
        """Bytes held for keys and values."""
        return 0


class KVCache(list):
    """One LayerCache per layer. Made by `nanokv.make_cache(name, config)`."""

    name, batch_size = "dict", 1
    options: dict = {}  # what make_cache was called with, besides sizes
    asked: int | None = None  # the capacity that make_cache was called with

    def __init__(self, layers=(), config=None):
        super().__init__(layers)
        self.config = config

    @property
    def length(self) -> int:
        """Tokens held, the same in every layer; a failed forward leaves them unequal, which raises until mended."""
        lengths = {layer.length for layer in self}
        if len(lengths) > 1:
            raise CacheError(
                f"layers hold between {min(lengths)} and {max(lengths)} tokens: a forward pass failed half-way",
                hint="truncate(n) with n at most the smaller number mends it",
            )
        return lengths.pop() if lengths else 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values in all layers."""
        return sum(layer.nbytes for layer in self)

    @property
    def capacity(self) -> int | None:
        """The most tokens this cache can hold; None = as memory allows."""
        return self[0].capacity if self else None

    @property
    def rollback(self) -> int | None:
        """The longest guess that can be appended and taken back as if it had never been there; None = any."""
        return self[0].rollback if self else None

    def mask(self, T: int):
        """The mask that all layers share, asked once per forward, before any layer appends."""
        return self[0].mask(T)

    def truncate(self, n: int):
        """Forget positions ≥ n in every layer; also mends layers of unequal length after a failed forward."""
        if type(n) is not int or n < 0:
            raise CacheError(f"truncate({n!r}): a number of tokens ≥ 0 was expected")
        for layer in self:
            layer.truncate(n)

    def reuse(self, tokens) -> int:
        """How many leading tokens of a prompt this empty cache already knows; a cache that shares nothing: none."""
        return 0

    def remember(self, tokens):
        """These tokens are in the cache now; a cache that shares prefixes takes note."""

    def fork(self) -> "KVCache":
        """An independent copy of the whole cache."""
        copy = type(self)((layer.fork() for layer in self), self.config)
        return copy.made_like(self)

    def made_like(self, other) -> "KVCache":
        """Take over what make_cache wrote on another cache."""
        self.name, self.options, self.asked = other.name, other.options, other.asked
        return self

    def rows_held(self) -> int | None:
        """Rows of the batch; None while nothing is stored."""
        return self[0].rows if self else None

    def reorder(self, index):
        """Row b of every layer becomes old row index[b]; the rows may repeat, and the batch may grow or shrink."""
        index = check_index(index, self.rows_held())
        for layer in self:
            layer.reorder(index)

    def save(self, path, tokens=(), model_fingerprint: str = ""):
        """Write keys and values as safetensors, with the config, the tokens and a checksum; replaces `path` atomically.

        `tokens` (the ids that are in the cache) and `model_fingerprint` are stored so that `load` can refuse a file
        that belongs to other text or other weights.
        """
        states = [layer.state() for layer in self]
        tensors = {f"layers.{i}.{key}": t.contiguous() for i, state in enumerate(states) for key, t in state.items()}
        tensors = _unshared(tensors)
        meta = {
            "format": "nanokv-cache-1",
            "cache": self.name,
            "options": json.dumps({k: v for k, v in self.options.items() if isinstance(v, str | int)}, sort_keys=True),
            "rows": str(self.batch_size),
            "capacity": json.dumps(self.asked),
            "length": json.dumps(torch.as_tensor(self.length).tolist()),
            "config": json.dumps(self.config.to_dict(), sort_keys=True),
            "tokens": json.dumps([int(i) for i in tokens]),
            "model": model_fingerprint,
        }
        meta["sha256"] = _digest(meta, tensors)
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        try:
            save_file(tensors, temporary, metadata=meta)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path, config, model_fingerprint: str = "", device="cpu", **options) -> "KVCache":
        """Rebuild a saved cache. Refuses another config, other weights, an edited or a truncated file, saying which.

        The ids that were saved with it are in `.tokens` of the result. `options` (a page pool, another capacity)
        override those that were saved.
        """
        from nanokv.cache import make_cache

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                meta = dict(file.metadata() or {})
                tensors = {key: file.get_tensor(key) for key in file.keys()}
        except (OSError, SafetensorError) as error:
            raise CacheError(f"{path} is not a readable cache file: {error}") from error
        if meta.get("format") != "nanokv-cache-1":
            raise CacheError(f"{path} is not a saved KV cache (format {meta.get('format')!r})")
        if meta.pop("sha256", None) != _digest(meta, tensors):
            raise CacheError(f"{path} was changed after it was saved: its checksum does not match")
        saved = json.loads(meta["config"])
        if saved != json.loads(json.dumps(config.to_dict())):
            differ = sorted(k for k in saved | config.to_dict() if saved.get(k) != config.to_dict().get(k))
            raise CacheError(f"{path} belongs to another model: {', '.join(differ)} differ")
        if model_fingerprint and meta["model"] and meta["model"] != model_fingerprint:
            raise CacheError(f"{path} belongs to other weights: {meta['model'][:12]}, not {model_fingerprint[:12]}")
        sizes = {"batch_size": int(meta["rows"]), "capacity": json.loads(meta["capacity"])}
        cache = make_cache(meta["cache"], config, **(sizes | json.loads(meta["options"]) | options))
        for i, layer in enumerate(cache):
            prefix = f"layers.{i}."
            layer.restore({k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)})
        cache.tokens = json.loads(meta["tokens"])
        return cache


def _unshared(tensors: dict) -> dict:
    """Forked rows share tensors, which a file cannot: each but the first is copied."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return tensors


def check_index(index, rows=None):
    """Row numbers as an int64 tensor; `rows` = how many there are."""
    index = torch.as_tensor(index)
    if index.dim() != 1 or index.numel() == 0 or index.dtype not in (torch.int64, torch.int32) or index.min() < 0:
        raise CacheError(f"reorder({index.tolist()!r}): a list of row numbers ≥ 0 was expected")
    if rows is not None and index.max() >= rows:
        raise CacheError(f"reorder: row {int(index.max())} of a cache with {rows} rows")
    return index.long().cpu()  # a CPU index selects rows on any device


def check_append(held, k):
    """Keys (B,Hk,T,D) must be of the batch, heads, width, dtype and device of what is held, (B,Hk,S,D).

    `cat` would promote another dtype without a word, and a slab would broadcast another batch.
    """
    kinds = [(*x.shape[:2], x.shape[3], x.dtype, x.device) for x in (held, k)]
    if kinds[0] != kinds[1]:
        have, new = (f"{tuple(x.shape)} {x.dtype}" for x in (held, k))
        devices = "" if held.device == k.device else f": the keys are on {k.device}, the cache on {held.device}"
        raise CacheError(f"cannot append keys {new} to a cache of {have} (B,Hk,S,D){devices}")


class NoCache(KVCache):
    """The null object: keeps nothing, `append` returns its input. So there is no `if cache is None` anywhere."""

    def __init__(self, num_layers: int):
        super().__init__(_KeepNothing() for _ in range(num_layers))

    def fork(self):
        return self

    def reorder(self, index):
        check_index(index)


class _KeepNothing(LayerCache):
    capacity = 0  # so that generating with it is refused: every decode would see one token and no past

    def append(self, k, v):
        return k, v

    def truncate(self, n: int):
        pass


def _digest(meta: dict, tensors: dict) -> str:
    """sha256 over the metadata and every tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in meta.items() if k != "sha256"}, sort_keys=True).encode())
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
