"""Write a model as one GGUF file, which llama.cpp, transformers and `load` open.

    write_gguf(path, config, tensors, "q4_k_m", vocabulary)      → bytes of the file

The inverse of gguf_model.py, with the same tables of names. A model with something that GGUF or the
reader has no place for is refused by name before anything is written. The tensors are read,
converted and written one at a time, so that the memory is that of the largest one. The file has a
temporary name until it is complete.

Sources: llama.cpp's gguf-py/gguf/constants.py (keys) and convert_hf_to_gguf.py (order of the rows
of Llama's q and k, stacked experts, vectors and routers in fp32). The header is written by the
`gguf` package.
"""

import functools
import glob
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import gguf_layers, gguf_stacks, names, readable
from .gguf_model import (
    FAMILY_OF,
    FLOATS,
    KEYS,
    LLAMA3,
    ROPE_FACTORS,
    SAMPLING,
    STACKED,
    end_names,
    llama3_divisors,
    part_names,
)
from .gguf_types import TYPES, Shape, encode, nbytes, types
from .gguf_vocabulary import Vocabulary, metadata
from .shards import Entry, materialize
from .strict import CheckpointError, quote
from .writing import check_shapes

ARCHITECTURES = {family: name for name, family in FAMILY_OF.items()}
THEIR_STACKS = {ours: theirs for theirs, ours in STACKED.items()}
Tensors = Mapping[str, "torch.Tensor | Entry"]
CPU = torch.device("cpu")
HINT = "a Hugging Face folder holds every model: give a folder instead of FILE.gguf"


@dataclass(frozen=True)
class Place:
    """One tensor of the file: its name and shape, and the names of the tensors that it holds."""

    name: str
    shape: Shape
    sources: tuple[str, ...]


def write_gguf(
    path: str | os.PathLike[str],
    config: dict[str, Any],
    tensors: Tensors,
    type_name: str = "bf16",
    vocabulary: Vocabulary | None = None,
    generation: dict[str, Any] | None = None,
    name: str = "",
) -> int:
    """Write the file, replacing an existing one; returns its size in bytes.

    config: the fields that Config.to_dict gives. tensors: Hugging Face's name → tensor, or its
    Entry in a checkpoint. type_name: a key of TYPES. Without a vocabulary the file has no
    tokenizer. generation: the fields of generation_config.json. name: for general.name.

    Raises CheckpointError, before anything is written, for a model without a place in GGUF.
    """
    kind = TYPES[type_name]
    shapes = names.expected(config)
    if names.flag(config, "tie_word_embeddings"):
        tensors = {key: tensor for key, tensor in tensors.items() if key != names.HEAD}
        del shapes[names.HEAD]
    check_shapes(tensors, shapes)
    keys = config_keys(config)
    if vocabulary is None:
        keys["tokenizer.ggml.model"] = "no_vocab"
    else:
        keys |= metadata(vocabulary, config["vocab_size"])
    tables = places(config, shapes)
    layout = types(kind, {place.name: place.shape for place in tables}, config["num_hidden_layers"])
    general = general_keys(kind.code, name) | sampling_keys(generation or {})
    with temporary(Path(path)) as file:
        writer = header(file, ARCHITECTURES[config["model_type"]], general | keys, tables, layout)
        for place in tables:
            writer.write_tensor_data(data(place, config, tensors, layout[place.name]))
        writer.close()
        return file.stat().st_size


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its name if no error is raised. It is on the disk then.

    A process that is killed leaves the temporary file, never half of `path`. The next one to write
    `path` removes it.
    """
    remove_leftovers(path)
    held, file = created(path)
    try:
        with held:
            yield file
            with open(file, "rb") as written:
                os.fsync(written.fileno())
            mask = os.umask(0)
            os.umask(mask)
            file.chmod(0o666 & ~mask)  # mkstemp's files are private
            let_go(held)
            os.replace(file, path)
    finally:
        file.unlink(missing_ok=True)


def created(path: Path) -> tuple[BinaryIO, Path]:
    """A new file beside `path`, locked.

    Another process may take it for a leftover before it is locked: then it is one, and the next
    file is ours. On a file system without locks nobody can take it.
    """
    while True:
        handle, place = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
        held = open(handle, "rb")
        try:
            lock(held)
        except BlockingIOError:
            held.close()
            continue
        except OSError:
            return held, Path(place)
        if os.fstat(handle).st_nlink:
            return held, Path(place)
        held.close()


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote `path`."""
    for place in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        with suppress(OSError):  # its writer lives, or the file is not ours
            with open(place, "rb") as file:
                lock(file)
                let_go(file)
                place.unlink()


def lock(file: BinaryIO) -> None:
    """Lock a file that is being written, until it is closed or the process ends.

    BlockingIOError if another process holds it. Windows needs no lock: an open file cannot be
    removed.
    """
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def let_go(file: BinaryIO) -> None:
    """Close a file that is removed or renamed next, on Windows, which does neither to an open one.

    Elsewhere it stays locked until then.
    """
    if sys.platform == "win32":
        file.close()


def header(
    file: Path,
    architecture: str,
    keys: dict[str, Any],
    tables: list[Place],
    layout: dict[str, str],
) -> Any:
    """A gguf.GGUFWriter that has written everything up to the first tensor."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(file), architecture)
    for key, value in keys.items():
        add_key(writer, key, value)
    for place in tables:
        type_ = layout[place.name]
        size = nbytes(type_, place.shape)
        stored = gguf.GGMLQuantizationType[type_]
        # The dtype is only read for uint8, whose shape would be one of bytes.
        writer.add_tensor_info(place.name, place.shape, np.dtype("float32"), size, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def add_key(writer: Any, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp expects for it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


# --- keys -----------------------------------------------------------------------------------------


def general_keys(code: str, name: str) -> dict[str, Any]:
    """The keys that describe the file."""
    import gguf

    found: dict[str, Any] = {"general.type": "model"}
    if name:
        found["general.name"] = name
    return found | {
        "general.file_type": int(gguf.LlamaFileType[code]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "general.alignment": gguf.GGUF_DEFAULT_ALIGNMENT,
    }


def sampling_keys(generation: dict[str, Any]) -> dict[str, Any]:
    """The sampling defaults. A model that is greedy by default has none but its penalty."""
    wanted = SAMPLING
    if not generation.get("do_sample"):
        wanted = {"penalty_repeat": "repetition_penalty"}
        if generation.get("repetition_penalty", 1.0) == 1.0:
            return {}
    found = {key: generation[field] for key, field in wanted.items() if field in generation}
    return {f"general.sampling.{key}": value for key, value in found.items()}


def config_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the architecture. CheckpointError for a field that has none."""
    check_config(config)
    config = gguf_layers.keyed(config)
    architecture = ARCHITECTURES[config["model_type"]]
    found = {key: config[field] for key, field in KEYS.items() if config.get(field) is not None}
    for key, field in KEYS.items():
        if field in FLOATS:
            found[key] = float(found[key])
    found["attention.value_length"] = config["head_dim"]
    found["rope.dimension_count"] = config["head_dim"]
    found["vocab_size"] = config["vocab_size"]
    rope = gguf_layers.full_rope(config)
    if rope["rope_type"] == "yarn":
        found |= yarn_keys(rope)
    found |= gguf_layers.layer_keys(config)
    return {f"{architecture}.{key}": value for key, value in found.items()}


def check_config(config: dict[str, Any]) -> None:
    """CheckpointError for a field that changes the maths and has no key, or another value."""
    kind = config["model_type"]
    if kind not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json: model_type {quote(kind)} is not written as GGUF",
            f"known: {', '.join(ARCHITECTURES)}",
        )
    fixed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    fixed["conv_bias"] = False
    if kind != "llama":  # llama.cpp has biases of attention in Llama only
        fixed["attention_bias"] = False
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise CheckpointError(
                f"config.json: {name} is {quote(config[name])}; in a GGUF file of architecture "
                f"{ARCHITECTURES[kind]} it is always {quote(value)}",
                HINT,
            )
    rope = gguf_layers.full_rope(config)
    if rope["rope_type"] == "yarn" and rope.get("truncate", True) != (kind != "gpt_oss"):
        said = "false" if kind != "gpt_oss" else "true"
        raise CheckpointError(
            f"config.json: YaRN with truncate {said} has no key in a GGUF file of architecture "
            f"{ARCHITECTURES[kind]}",
            HINT,
        )
    if rope["rope_type"] == "llama3":
        check_llama3(config)


def check_llama3(config: dict[str, Any]) -> None:
    """CheckpointError unless the reader gets the same fields back from the stored divisors."""
    rope = config["rope_parameters"]
    for name, value in LLAMA3.items():
        if rope[name] != value:
            raise CheckpointError(
                f"config.json: rope_type llama3 with {name} {rope[name]:g} cannot be written: a "
                f"GGUF file stores divisors, which are read with {value:g}",
                HINT,
            )
    largest = float(llama3_divisors(rope, config["head_dim"], config["rope_theta"]).max())
    if abs(largest - rope["factor"]) > 1e-6 * rope["factor"]:
        raise CheckpointError(
            f"config.json: rope_type llama3 with factor {rope['factor']:g} divides no frequency "
            f"by more than {largest:g}, so a GGUF file cannot hold the factor",
            HINT,
        )


def yarn_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """The keys of YaRN. attn_factor multiplies the 0.1 ln(factor) + 1 that llama.cpp computes."""
    found: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
    }
    scale = rope.get("attention_factor")
    if scale is not None:
        usual = 0.1 * math.log(max(rope["factor"], 1.0)) + 1.0
        found["rope.scaling.attn_factor"] = scale / usual
    return found


# --- tensors --------------------------------------------------------------------------------------


def places(config: dict[str, Any], shapes: Mapping[str, Shape]) -> list[Place]:
    """The tensors of the file in its order. The matrices of the experts of a layer are stacked.

    Those of gpt-oss are stacked already, with gate and up in one tensor, which becomes two.
    """
    sources: dict[str, list[str]] = {}
    apart = []
    for source, shape in shapes.items():
        parts = gguf_stacks.parts_of(source, shape)
        if parts:
            apart += [Place(name, part, (source,)) for name, part in parts.items()]
            continue
        name = their_name(source, config["model_type"])
        sources.setdefault(name, []).append(source)
    found = []
    for name, held in sources.items():
        shape = shapes[held[0]]
        for form in gguf_layers.forms(config, held[0]):
            shape = form.stored_shape(shape)
        if name.split(".")[-2] in STACKED:
            shape = (len(held), *shape)
        found.append(Place(name, shape, tuple(held)))
    found += apart
    if gguf_layers.full_rope(config)["rope_type"] == "llama3":
        found.append(Place(ROPE_FACTORS, (config["head_dim"] // 2,), ()))
    return found


@functools.cache
def their_names(model_type: str) -> Mapping[str, str]:
    """Our name → theirs, of the tensors outside layers and of those of a layer."""
    table = part_names(model_type) | end_names(model_type)
    return {ours: theirs for theirs, ours in table.items()}


def their_name(name: str, model_type: str) -> str:
    """model.layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight

    The matrices of all experts of a layer have one name.
    """
    theirs = their_names(model_type)
    ours = names.to_nanokv(name, model_type)
    if ours in theirs:
        return theirs[ours]
    _, layer, leaf = ours.split(".", 2)
    if leaf.startswith("mlp.experts."):
        part, kind = leaf.rsplit(".", 2)[1:]
        return f"blk.{layer}.{THEIR_STACKS[part]}.{kind}"
    return f"blk.{layer}.{theirs[leaf]}"


def data(place: Place, config: dict[str, Any], tensors: Tensors, type_: str) -> Any:
    """The bytes of one tensor of the file."""
    import numpy as np

    if place.name == ROPE_FACTORS:
        rope = config["rope_parameters"]
        divisors = llama3_divisors(rope, config["head_dim"], config["rope_theta"])
        return divisors.astype(np.float32)
    parts = []
    for source in place.sources:
        tensor = permuted(source, values(tensors[source]), config)
        if gguf_stacks.OURS.fullmatch(source):
            tensor = gguf_stacks.part(place.name, tensor)
        for form in gguf_layers.forms(config, source):
            tensor = form.stored(tensor.float())
        parts.append(encode(source, tensor, type_))
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts)


def values(tensor: "torch.Tensor | Entry") -> torch.Tensor:
    """The tensor on the CPU, in the dtype in which it is stored; fp32 if it is quantized."""
    if isinstance(tensor, Entry):
        with readable(tensor.path):
            return materialize(tensor, None, CPU)
    return tensor.detach().to(CPU)


def permuted(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The rows of Llama's q and k in llama.cpp's order.

    Hugging Face rotates dimension i of a head with dimension i + D/2, llama.cpp rotates neighbours.
    """
    fields = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    field = fields.get(name.split(".")[-2])
    if config["model_type"] not in gguf_layers.PERMUTED or field is None:
        return tensor
    heads = config[field]
    D = config["head_dim"]
    return tensor.reshape(heads, 2, D // 2, -1).transpose(1, 2).reshape(tensor.shape)
