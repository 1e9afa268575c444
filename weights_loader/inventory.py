"""List the models on this disk: bundled, in the Hugging Face cache, and in a folder.

Without torch and without requests. A repository in the cache counts as a model if its snapshot has
a config.json. Missing files are named, not fetched.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from . import BUNDLED, gguf_folder, installed, resolve
from .gguf_file import MAGIC, read_gguf
from .gguf_model import model_config
from .names import INDEX, SINGLE, missing_weights, read_weight_map
from .strict import LIMITS, CheckpointError, parse_object

MOST_HERE = 20  # models listed for a folder
SEARCHED = 1000  # entries of a folder that are examined


@dataclass(frozen=True)
class Found:
    """One model on the disk."""

    name: str  # the source to pass to `load`
    folder: Path  # or the GGUF file
    nbytes: int  # on the disk, all revisions together
    missing: tuple[str, ...] = ()  # files that `load` needs and that are not there


def bundled() -> list[Found]:
    """The models that come with the package."""
    return [
        Found(name, folder, sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))
        for name, folder in BUNDLED.items()
        if folder.is_dir()
    ]


def cached() -> tuple[Path, list[Found]]:
    """(folder of the cache, the models in it by name).

    Broken repositories are left out, as in the hub's client. Of several revisions, `main` counts,
    else the newest.
    """
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    place = Path(constants.HF_HUB_CACHE)
    try:
        repos = scan_cache_dir(place).repos
    except (CacheNotFound, ValueError):  # ValueError: the path is a file
        return place, []
    found = []
    for repo in repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
        folder = newest.snapshot_path
        if (folder / "config.json").is_file():
            missing = missing_weights(folder) + missing_tokenizer(folder)
            found.append(Found(repo.repo_id, folder, repo.size_on_disk, tuple(missing)))
    return place, sorted(found, key=lambda one: one.name.lower())


def missing_tokenizer(folder: Path) -> list[str]:
    """["tokenizer.json"] if the folder lacks it, else []."""
    if (folder / "tokenizer.json").is_file():
        return []
    return ["tokenizer.json"]


def find(source: str) -> Path | None:
    """The folder of a model, by any source that `resolve` accepts; None if it must be downloaded.

    Raises UnknownModel for a name that no model can have, CheckpointError for a damaged model.
    """
    from huggingface_hub import try_to_load_from_cache

    from . import download

    short = source.lower()
    packaged = short in installed.PACKAGES
    if source in BUNDLED or (source and os.path.exists(os.path.expanduser(source))):
        return resolve(source)
    if packaged and installed.location(short):
        return resolve(source)
    repo, _, file = source.partition(":")
    if file.endswith(".gguf"):
        download.check_name(repo, tuple(BUNDLED))
        path = try_to_load_from_cache(repo, file)
        if not isinstance(path, str):
            return None
        return gguf_folder(Path(path))
    name = download.SHORT.get(short, source)
    if packaged:
        name = installed.PACKAGES[short].repository
    folder = next((one.folder for one in cached()[1] if one.name == name), None)
    if folder is None:
        download.check_name(name, tuple(BUNDLED))
    return folder


def beside(place: Path) -> tuple[list[Found], int]:
    """(the first MOST_HERE GGUF files and model folders in a folder, number of further ones).

    Subfolders are not searched. In a very full folder only the first SEARCHED entries count.
    """
    try:
        with os.scandir(place) as entries:
            seen = sorted(islice(entries, SEARCHED), key=lambda entry: entry.name.lower())
    except OSError:
        return [], 0
    paths = [Path(entry.path) for entry in seen if _is_model(entry)]
    if (place / "config.json").is_file():
        paths.insert(0, place)
    return [_measured(path, place) for path in paths[:MOST_HERE]], max(0, len(paths) - MOST_HERE)


def _is_model(entry: os.DirEntry) -> bool:
    """Whether this is a folder with config.json, or a GGUF file that is not an image encoder.

    Image encoders are named mmproj….
    """
    path = Path(entry.path)
    try:
        if entry.is_dir():
            return (path / "config.json").is_file()
        if not entry.name.endswith(".gguf") or entry.name.startswith("mmproj"):
            return False
        if not entry.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _measured(path: Path, place: Path) -> Found:
    """The model at `path`, named by its path relative to `place`."""
    name = "." if path == place else f".{os.sep}{path.name}"
    if path.is_file():
        return Found(name, path, path.stat().st_size)
    try:
        missing = missing_weights(path)
    except CheckpointError:  # a damaged index; reported when the model is opened
        missing = []
    missing = missing + missing_tokenizer(path)
    files = (one for one in islice(path.iterdir(), SEARCHED) if one.is_file())
    return Found(name, path, sum(one.stat().st_size for one in files), tuple(missing))


def of_gguf(path: Path) -> tuple[dict, Counter, dict[str, tuple[str, int, int]]]:
    """(config.json, number of values per type, matrices) of a GGUF file, from its header alone.

    The matrices: name → (type, bytes, values).
    """
    header = read_gguf(path)
    values: Counter[str] = Counter()
    matrices = {}
    for name, tensor in header.tensors.items():
        count = math.prod(tensor.shape)
        values[tensor.type.name] += count
        if len(tensor.shape) > 1:
            matrices[name] = tensor.type.name, tensor.nbytes, count
    return model_config(header), values, matrices


def stored(folder: Path) -> Counter:
    """Number of values per safetensors dtype, {"BF16": 596049920}, from the headers alone."""
    values: Counter[str] = Counter()
    names = [SINGLE]
    if not (folder / SINGLE).is_file():
        names = sorted(set(read_weight_map(folder / INDEX).values()))
    for name in names:
        path = folder / name
        for tensor in _header(path).values():
            try:
                values[str(tensor["dtype"])] += math.prod(map(int, tensor["shape"]))
            except (TypeError, KeyError, ValueError) as error:
                raise CheckpointError(f"{path}: a tensor without dtype or shape") from error
    return values


def _header(path: Path) -> dict:
    """The header of a safetensors file, without its metadata."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LIMITS["safetensors header"]:
            raise CheckpointError(f"{path}: its header says that it has {length:,} bytes")
        fields = parse_object(file.read(length), f"header of {path}")
    fields.pop("__metadata__", None)
    return fields
