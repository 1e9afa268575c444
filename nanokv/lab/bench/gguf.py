"""GGUF files for the bench: the same weights for llama.cpp, and for the model that reads them as stored.

The files that are written here have no tokenizer.
"""

import json
import tempfile
from pathlib import Path

import torch

import weights_loader
from nanokv.errors import NanoKVError
from nanokv.fast import stored
from nanokv.model import Transformer
from weights_loader.gguf_model import POINTER, places
from weights_loader.gguf_writing import write_gguf
from weights_loader.names import to_hugging_face

QUANTIZED = {
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
}


def write(model: Transformer, path: str | Path, kind: str = "bf16") -> Path:
    """Write matrices in `kind` and vectors in fp32 to `path`; returns it. NanoKVError if the model
    has experts or an extended context (YaRN, Llama 3 scaling)."""
    config = model.config
    if config.experts or config.yarn or config.llama3:
        raise NanoKVError(
            f"{config} is not written for llama.cpp: experts or an extended context",
            "leave llama.cpp out of --against",
        )
    return write_any(model, path, kind)


def write_any(model: Transformer, path: str | Path, kind: str) -> Path:
    """`write` for a reader of our own."""
    family = model.config.model_type
    tensors = {to_hugging_face(name, family): x for name, x in model.state_dict().items()}
    write_gguf(path, model.config.to_dict(), tensors, kind, name="nanokv")
    return Path(path)


def quantize(path: Path, kind: str) -> Path:
    """The same file in a type of QUANTIZED, made by llama.cpp's quantizer."""
    import llama_cpp  # type: ignore[import-not-found]  # optional

    target = path.with_suffix(f".{kind}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, QUANTIZED[kind])
    if llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), params):
        raise NanoKVError(f"llama.cpp could not quantize {path.name} to {kind}")
    return target


def read_as(model: Transformer, kind: str, dtype: torch.dtype) -> Transformer:
    """The model written as a GGUF file of this `kind` (convert's --type) and read as stored.

    The file is deleted when its pages are mapped.
    """
    with tempfile.TemporaryDirectory(prefix="nanokv-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        fields = model.config.to_dict()
        path = write_any(model, folder / "model.gguf", kind)
        (folder / "config.json").write_text(json.dumps(fields))
        (folder / POINTER).write_text(json.dumps({"path": str(path)}))
        return stored.read(folder, fields, dtype, torch.device("cpu"))


def file_of(folder: Path) -> Path:
    """The GGUF file behind the folder of a loaded model. NanoKVError if there is none."""
    if not weights_loader.stored_matrices(folder):
        raise NanoKVError(
            "stored means the blocks of a GGUF file, and this model is none",
            f"-m FILE.gguf; or one of {', '.join(QUANTIZED)}, which are written for the run",
        )
    return places(folder)[0]
