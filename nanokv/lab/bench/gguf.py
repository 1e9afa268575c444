"""Write a model as a GGUF file without a tokenizer, so that llama.cpp runs the same weights."""

from pathlib import Path

import gguf
import torch
from torch import Tensor

from nanokv.config import Config
from nanokv.errors import NanoKVError
from nanokv.model import Transformer
from weights_loader.gguf_model import ENDS, FAMILY_OF, KEYS, NAMES

ARCHITECTURES = {family: name for name, family in FAMILY_OF.items()}
THEIRS = {ours: theirs for theirs, ours in NAMES.items()}
THEIR_ENDS = {ours.removeprefix("model."): theirs for theirs, ours in ENDS.items()}
QUANTIZED = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def write(model: Transformer, path: str | Path) -> Path:
    """Write matrices in bf16 and vectors in fp32 to `path`; returns it. NanoKVError if the model
    has experts or an extended context (YaRN, Llama 3 scaling)."""
    config = model.config
    if config.experts or config.yarn or config.llama3:
        raise NanoKVError(
            f"{config} is not written for llama.cpp: experts or an extended context",
            "leave llama.cpp out of --against",
        )
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[config.model_type])
    writer.add_name("nanokv")
    for key, field in KEYS.items():
        value = getattr(config, field, None)
        if isinstance(value, float):
            writer.add_float32(f"{writer.arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{writer.arch}.{key}", value)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = permuted(name, tensor, config)
        if tensor.dim() == 1:
            writer.add_tensor(their_name(name), tensor.float().numpy())
        else:
            data = tensor.bfloat16().contiguous().view(torch.uint8).numpy()  # (N,2K) bytes
            writer.add_tensor(their_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def permuted(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Reorder the rows of Llama's q and k. Hugging Face rotates dimension i of a head with
    dimension i + D/2, llama.cpp rotates neighbours."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        name.split(".")[-2]
    )
    if config.model_type != "llama" or not heads:
        return tensor
    return tensor.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)


def their_name(name: str) -> str:
    """layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight"""
    part, kind = name.rsplit(".", 1)
    if part in THEIR_ENDS:
        return f"{THEIR_ENDS[part]}.{kind}"
    _, layer, rest = part.split(".", 2)
    return f"blk.{layer}.{THEIRS[rest]}.{kind}"


def quantize(path: Path, kind: str) -> Path:
    """The same file as q8_0 or q4_0, made by llama.cpp's quantizer."""
    import llama_cpp  # type: ignore[import-not-found]  # optional

    target = path.with_suffix(f".{kind}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, QUANTIZED[kind])
    if llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), params):
        raise NanoKVError(f"llama.cpp could not quantize {path.name} to {kind}")
    return target
