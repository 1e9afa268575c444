"""Write config and tensors as an ordinary Hugging Face folder that transformers and `load` open.

    with new_files(folder, CHECKPOINT) as new:
        write_checkpoint(new, config, state_dict, generation_config)

The files are written to a temporary folder and moved once all are on the disk. So a failed write
loses nothing, and a model can be saved to the folder from which its weights are mapped.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from . import names
from .families import family_of
from .strict import CheckpointError, quote

if TYPE_CHECKING:
    import torch

    from .shards import Entry

CHECKPOINT = ("config.json", "generation_config.json", names.SINGLE, names.INDEX)
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates",
)


@contextmanager
def new_files(
    folder: str | os.PathLike, files: Iterable[str], force: bool = False
) -> Iterator[Path]:
    """Yield an empty folder whose content will replace `files` of `folder`.

    A name of `files` that is not written is removed from `folder`. Raises CheckpointError, before
    anything is written, if one of the files exists and `force` is false.
    """
    folder = Path(os.path.expanduser(folder))
    taken = [name for name in files if os.path.lexists(folder / name)]
    if taken and not force:
        raise CheckpointError(
            f"{folder / taken[0]} exists already; nothing was written",
            "another folder, or force=True to replace it",
        )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        yield temporary
        for path in temporary.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        for name in {*files, *os.listdir(temporary)}:
            if (temporary / name).exists():
                os.replace(temporary / name, folder / name)
            else:  # belongs to the model that was saved here before
                remove(folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_checkpoint(
    folder: Path,
    config: dict,
    state_dict: dict[str, "torch.Tensor"],
    generation_config: dict | None = None,
) -> None:
    """Write model.safetensors with Hugging Face's names, config.json and generation_config.json.

    A tied head is stored once. Raises CheckpointError if tensors of the config are missing, left
    over or of the wrong shape. An empty generation_config is not written.
    """
    from safetensors.torch import save_file

    tied = names.flag(config, "tie_word_embeddings")
    kind = family_of(config).model_type
    tensors = {names.to_hugging_face(name, kind): tensor for name, tensor in state_dict.items()}
    shapes = names.expected(config)
    if tied:
        tensors.pop(names.HEAD, None)
        del shapes[names.HEAD]
    check_shapes(tensors, shapes)
    tensors = {name: tensors[name].detach().to("cpu").contiguous() for name in shapes}
    write_json(folder / "config.json", config)
    if generation_config:
        write_json(folder / "generation_config.json", generation_config)
    save_file(tensors, folder / names.SINGLE, metadata={"format": "pt"})


def check_shapes(
    tensors: "Mapping[str, torch.Tensor | Entry]", expected: Mapping[str, tuple[int, ...]]
) -> None:
    """CheckpointError unless the tensors have exactly these names and shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            raise CheckpointError(
                f"tensor {quote(name)} has shape {shapes.get(name)}, "
                f"config.json asks for {expected.get(name)}",
                "save the model that nanokv.load returns, not an optimized one",
            )


def write_json(path: Path, fields: dict) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
