"""The pooling of an embedding model, as sentence-transformers or a GGUF file names it.

`modules.json` lists the steps from a text to its embedding; the step Pooling has a folder of its
own, usually 1_Pooling, whose config.json names the pooling. Source: sentence-transformers'
modules/pooling.py, which reads one name, or a flag per kind as in older versions.
"""

from pathlib import Path
from typing import Any

from .strict import CheckpointError, loads, quote, read_bytes, read_object

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
STEPS = {"Transformer", "Pooling", "Normalize"}
NAMES = {"lasttoken": "last", "mean": "mean"}  # sentence-transformers' name → nanokv's
FLAGS = {  # older files: flag → name
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
GGUF = {1: "mean", 2: "cls", 3: "lasttoken"}  # llama.cpp's pooling_type → the name


def gguf_pooling(metadata: dict[str, Any]) -> str | None:
    """sentence-transformers' name of the pooling of a GGUF file; None if it has none."""
    kind = metadata.get("general.architecture")
    number = metadata.get(f"{kind}.pooling_type")
    if type(number) is not int:
        return None
    return GGUF.get(number)


def read_pooling(folder: Path) -> str | None:
    """ "last" or "mean"; None for a folder without these files.

    Raises CheckpointError for another pooling, and for a step that changes the vectors.
    """
    path = folder / POOLING
    if (folder / MODULES).is_file():
        check_steps(folder / MODULES)
    if not path.is_file():
        return None
    fields = read_object(path)
    name = pooling_name(fields)
    if name not in NAMES:
        raise CheckpointError(
            f"{path}: the pooling {quote(name)} is not implemented: {' and '.join(NAMES)} are"
        )
    if name == "mean" and fields.get("include_prompt") is False:
        raise CheckpointError(
            f"{path}: include_prompt false is not implemented: instructions are part of the text"
        )
    return NAMES[name]


def pooling_name(fields: dict[str, Any]) -> str:
    """The name of the pooling. Several are joined by a plus; without any it is the mean."""
    names = fields.get("pooling_mode")
    if names is None:
        names = [name for flag, name in FLAGS.items() if fields.get(flag)] or ["mean"]
    if isinstance(names, list):
        return "+".join(map(str, names))
    return str(names)


def check_steps(path: Path) -> None:
    """CheckpointError if modules.json has a step besides those of STEPS."""
    data = read_bytes(path)
    try:
        kinds = [module["type"].rpartition(".")[2] for module in list(loads(data))]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a list of modules: {error!r}") from error
    for kind in kinds:
        if kind not in STEPS:
            raise CheckpointError(
                f"{path}: the module {quote(kind)} is not implemented: "
                f"{', '.join(sorted(STEPS))} are"
            )
