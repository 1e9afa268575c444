"""A cache as a file: safetensors with a checksum over everything, which detects any change.

The file holds the kind of cache with its options, the config and the fingerprint of the model, the
ids, and the `state` of every layer. A salt is not stored: it is a secret between tenants, and
anyone may read the file. `contents` and `rebuild` do the same without a file; remote/handover.py
uses them to send a cache to another process.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nanokv.config import Config
from nanokv.errors import CacheError, foreign
from nanokv.support.device_memory import full_memory
from weights_loader.strict import loads

PathText = str | os.PathLike[str]
Rank = tuple[int, int]  # (rank, number of ranks)

FORMAT = "nanokv-cache-1"
ALONE = (0, 1)  # the rank of a single process, which has all heads
MOST_ROWS = 65_536  # a batch cache makes one object per row and layer
MOST_PAGES = 4_194_304  # each takes about 40 bytes before a token is stored
MAY_CHANGE = {  # options that decide only where bytes are stored, not what they mean
    "paged": {"pool", "page", "pages"},
    "prefix": {"pool", "page", "pages", "salt", "index"},
    "offloaded": {"to", "folder"},
}


class Facts(NamedTuple):
    """The metadata of a file that is stored as JSON."""

    options: dict[str, Any]
    salted: bool
    rows: int
    capacity: int | None
    length: int | list[int]
    config: dict[str, Any]
    tokens: list[Any]


def save(
    cache: Any,
    path: PathText,
    tokens: Iterable[Any] = (),
    model_fingerprint: str = "",
    rank: Rank = ALONE,
) -> None:
    """See KVCache.save."""
    path = Path(path)
    meta, tensors = contents(cache, tokens, model_fingerprint)
    if rank != ALONE:
        meta["rank"] = json.dumps(rank)
    if not path.parent.is_dir():
        raise CacheError(
            f"{path} cannot be written: there is no folder {path.parent}",
            hint="create the folder first",
        )
    meta["sha256"] = digest(meta, tensors)
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata=meta)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)  # a process that has the old file open keeps the old contents
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        free = shutil.disk_usage(path.parent).free
        reason = getattr(error, "strerror", None) or str(error)
        reason = f"{reason}; it needs {size:,} bytes, {path.parent} has {free:,} free"
        raise OSError(getattr(error, "errno", None), reason, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def contents(
    cache: Any, tokens: Iterable[Any] = (), model_fingerprint: str = ""
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, tensors) that `rebuild` needs. The tensors may share memory with the cache."""
    states = [layer.state() for layer in cache]
    if cache.config is None:
        raise CacheError(
            "a cache without a config cannot be saved: no model could be checked against it",
            hint="make it with make_cache(name, config)",
        )
    tensors: dict[str, Tensor] = {}
    for i, state in enumerate(states):
        for key, tensor in state.items():
            tensors[f"layers.{i}.{key}"] = tensor.contiguous()
    tensors = _unshared(tensors)
    length = torch.as_tensor(cache.length).tolist()
    options = {
        k: v for k, v in cache.made.options.items() if isinstance(v, str | int) and k != "salt"
    }
    meta = {
        "format": FORMAT,
        "cache": cache.made.name,
        "options": json.dumps(options, sort_keys=True),
        "salted": json.dumps(bool(cache.made.options.get("salt"))),
        "rows": str(cache.sizes.batch_size),
        "capacity": json.dumps(cache.made.capacity),
        "length": json.dumps(length),
        "config": json.dumps(cache.config.to_dict(), sort_keys=True),
        "tokens": json.dumps(_ids(tokens, length, cache.sizes.batch_size)),
        "model": model_fingerprint,
    }
    return meta, tensors


def load(
    path: PathText,
    config: Config,
    make_cache: Callable[..., Any],
    model_fingerprint: str,
    device: torch.device | str | None,
    options: dict[str, Any],
    rank: Rank = ALONE,
) -> Any:
    """See KVCache.load."""
    if device is None:  # the device of the pool in `options`, if there is one
        device = getattr(getattr(options.get("pool"), "keys", None), "device", "cpu")
    meta, tensors = _read(path)
    return rebuild(
        path, meta, tensors, config, make_cache, model_fingerprint, options, rank, device
    )


def check_rank(path: PathText, meta: dict[str, str], rank: Rank) -> None:
    """CacheError if the heads in the file belong to another rank, or to another number of ranks."""
    saved = loads(meta.get("rank", json.dumps(ALONE)))
    if saved != list(rank):
        raise CacheError(
            f"{path} was saved by {_rank_text(saved)}, this is {_rank_text(list(rank))}",
            hint="load it on as many ranks as saved it",
        )


def _rank_text(rank: list[int]) -> str:
    return "one process" if rank == list(ALONE) else f"rank {rank[0]} of {rank[1]}"


def rebuild(
    path: PathText,
    meta: dict[str, str],
    tensors: dict[str, Tensor],
    config: Config,
    make_cache: Callable[..., Any],
    model_fingerprint: str,
    options: dict[str, Any],
    rank: Rank = ALONE,
    device: torch.device | str = "cpu",
) -> Any:
    """The inverse of `contents`. Raises CacheError for anything that does not fit.

    `path` names the source in errors. The layers are moved to the device one by one.
    """
    try:
        check_rank(path, meta, rank)
        return _rebuild(path, meta, tensors, config, make_cache, model_fingerprint, options, device)
    except CacheError:
        raise
    except torch.OutOfMemoryError as error:
        raise full_memory(error) from error
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        RuntimeError,
        OverflowError,
    ) as error:
        # The checksum is no signature: a file made by hand can have a valid one.
        raise CacheError(
            f"{path} is not what a save writes: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _rebuild(
    path: PathText,
    meta: dict[str, str],
    tensors: dict[str, Tensor],
    config: Config,
    make_cache: Callable[..., Any],
    model_fingerprint: str,
    options: dict[str, Any],
    device: torch.device | str,
) -> Any:
    facts = Facts(*(loads(meta[key]) for key in Facts._fields))
    check_model(path, meta, facts.config, config, model_fingerprint)
    _check_sizes(path, facts, options)
    name = meta["cache"]
    saved = facts.options
    capacity = options.pop("capacity", facts.capacity)
    _check_options(path, saved.get("of", name), saved, options, facts.salted)
    if "pool" in options:  # the pool decides the page size and the number of pages
        saved = {key: value for key, value in saved.items() if key not in ("page", "pages")}
    cache = make_cache(name, config, batch_size=facts.rows, capacity=capacity, **(saved | options))
    for layer, state in zip(cache, _states(path, tensors, config), strict=True):
        layer.restore({key: tensor.to(device) for key, tensor in state.items()})
    restored = torch.as_tensor(cache.length).tolist()
    if restored != facts.length:
        raise CacheError(
            f"{path} says {facts.length} tokens, but a {name} cache reads {restored} from it"
        )
    if (held := cache.sizes.batch_size) != facts.rows:
        raise CacheError(f"{path} says {facts.rows} rows, and holds {held}")
    cache.tokens = _ids(facts.tokens, facts.length, facts.rows)
    return cache


def _check_sizes(path: PathText, facts: Facts, options: dict[str, Any]) -> None:
    """CacheError if rebuilding would make too many rows or pages."""
    rows = facts.rows
    if not 1 <= rows <= MOST_ROWS:
        raise CacheError(f"{path} says {rows} rows; 1 to {MOST_ROWS:,} are read")
    if {"pages", "pool"} & options.keys():
        return
    pages = facts.options.get("pages", 0)
    if not 0 <= pages * rows <= MOST_PAGES:  # a batch cache makes a pool for each row
        raise CacheError(
            f"{path} says {pages:,} pages, {rows} rows; at most {MOST_PAGES:,} are made for a file",
            hint="pass pages= to load",
        )


def _read(path: PathText) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, tensors) of a complete, unchanged file; the tensors are in host memory."""
    with foreign(f"{path} is not a readable cache file", CacheError):
        with safe_open(path, framework="pt") as file:
            meta = dict(file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    if meta.get("format") != FORMAT:
        raise CacheError(f"{path} is not a saved KV cache (format {meta.get('format')!r})")
    if meta.pop("sha256", None) != digest(meta, tensors):
        raise CacheError(f"{path} was changed after it was saved: its checksum does not match")
    return meta, tensors


def _states(path: PathText, tensors: dict[str, Tensor], config: Config) -> list[dict[str, Tensor]]:
    """The argument of each layer's `restore`.

    Raises CacheError unless all layers are alike, with keys and values (B,Hk,S,D) of this config.
    """
    states: list[dict[str, Tensor]] = [{} for _ in range(config.num_kv_layers)]
    for key, tensor in tensors.items():
        _, i, name = key.split(".", 2)
        states[int(i)][name] = tensor
    shapes = [{k: (t.shape, t.dtype) for k, t in state.items()} for state in states]
    # Layers with a window hold fewer positions than the others.
    windows = config.windows[:: config.kv_sharing_factor]
    first = {window: i for i, window in reversed(list(enumerate(windows)))}
    if any(shapes[i] != shapes[first[window]] for i, window in enumerate(windows)):
        raise CacheError(f"{path} is not what a save writes: its layers differ in shape")
    want = config.num_key_value_heads, config.head_dim
    for name, tensor in (pair for i in first.values() for pair in states[i].items()):
        if name.rpartition(".")[2] not in ("key", "value"):
            continue
        if tensor.dim() != 4 or tensor.shape[1::2] != want:
            raise CacheError(
                f"{path}: {name} has shape {list(tensor.shape)}, not (B,{want[0]},S,{want[1]})"
            )
    return states


def check_model(
    path: PathText,
    meta: dict[str, str],
    saved: dict[str, Any],
    config: Config,
    model_fingerprint: str,
) -> None:
    """CacheError for another config, or for other weights if `model_fingerprint` is not empty."""
    mine = json.loads(json.dumps(config.to_dict()))
    if saved != mine:
        differ = sorted(k for k in saved | mine if saved.get(k) != mine.get(k))
        raise CacheError(f"{path} belongs to another model: {', '.join(differ)} differ")
    if model_fingerprint and not meta["model"]:
        raise CacheError(
            f"{path} does not say which weights it belongs to: "
            "it was saved without model_fingerprint"
        )
    if model_fingerprint and meta["model"] != model_fingerprint:
        raise CacheError(
            f"{path} belongs to other weights: {meta['model'][:12]}, not {model_fingerprint[:12]}"
        )


def _check_options(
    path: PathText, kind: str, saved: dict[str, Any], options: dict[str, Any], salted: bool
) -> None:
    """CacheError for options that would change the meaning of the stored tokens."""
    for name, value in options.items():
        if name not in MAY_CHANGE.get(kind, ()) and saved.get(name) != value:
            stored = repr(saved[name]) if name in saved else "the default"
            raise CacheError(f"{name}={value!r} contradicts {path}, which was saved with {stored}")
    if salted and "salt" not in options:
        raise CacheError(
            f"{path} was saved by a cache with a salt, which is not stored",
            hint="pass salt= to load",
        )


def _ids(tokens: Iterable[Any], length: int | list[int], rows: int) -> list[Any]:
    """The ids for JSON: one list, or one list per row; CacheError unless one id per token."""
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    tokens = list(tokens)
    each = bool(tokens) and isinstance(tokens[0], list | tuple)
    lists = tokens if each else [tokens]
    lengths = length if isinstance(length, list) else [length] * rows
    if each and len(lists) != rows:
        raise CacheError(f"{len(lists)} lists of tokens for a cache of {rows} rows")
    if tokens and not each and len(set(lengths)) > 1:
        raise CacheError(
            f"rows of {lengths} tokens cannot all hold the same ids",
            hint="pass a list of ids for each",
        )
    for ids, n in zip(lists, lengths, strict=False):
        if wrong := [i for i in ids if type(i) is not int]:
            raise CacheError(f"tokens hold {wrong[0]!r}: whole numbers were expected")
        if tokens and len(ids) != n:
            raise CacheError(
                f"{len(ids)} tokens were passed for a cache that holds {n}",
                hint="pass tokens[:length]",
            )
    return tokens


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that share memory with an earlier one, which a file does not allow."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensor.data_ptr())
    return tensors


def digest(meta: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """sha256 over the metadata and every tensor's name, dtype, shape and bytes."""
    described = {key: value for key, value in meta.items() if key != "sha256"}
    found = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def fingerprint(model: nn.Module) -> str:
    """16 hex digits that identify the weights, because two checkpoints may share a config.

    sha256 over the config and, for every parameter, its name, shape, dtype and 320 values: both
    ends and a stride through the rest. For a 0.6B model this reads some 100 kilobytes in
    milliseconds. It detects honest mix-ups, also of a fine-tuned checkpoint and its base; it is no
    defence against forgery.
    """
    config: Any = model.config
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=str).encode())
    # An optimized model keeps weights in buffers.
    for name, weight in sorted([*model.named_parameters(), *model.named_buffers()]):
        flat = weight.detach().flatten()
        # An odd stride visits all columns of a matrix whose width is a power of two.
        stride = flat.numel() // 256 | 1
        sample = torch.cat((flat[:32], flat[::stride][:256], flat[-32:])).float().cpu().numpy()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]
