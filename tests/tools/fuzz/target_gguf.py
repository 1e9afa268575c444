"""Fuzz target: a GGUF file, from its header to config, tokenizer and weights, as a model is loaded from it."""

import os
import shutil
import struct

import common

import weights_loader
from nanokv.config import Config
from nanokv.errors import ConfigError, TokenizerError
from nanokv.text.tokenizer import Tokenizer
from weights_loader.strict import CheckpointError

INSTRUMENT = ["weights_loader", "nanokv.config", "nanokv.text.tokenizer_file"]
ALLOWED = (CheckpointError, ConfigError, TokenizerError)
ARCHITECTURE = b"general.architecture"


def seeds() -> dict[str, bytes]:
    return {
        "llama": file("llama", 0),
        "qwen3": file("qwen3", 1),
        "moe": file("qwen3moe", 2),
        "none": b"GGUF",
    }


def file(architecture: str, kind: int) -> bytes:
    """One layer of width 64, with a tokenizer of bytes alone; the matrices in F32, F16 or Q4_0."""
    import gguf
    import numpy as np

    path = common.scratch() / "seed.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    sizes = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
    } | (
        {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32}
        if kind == 2
        else {}
    )
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    tokens = ["<|im_end|>", *(chr(33 + i) for i in range(94)), "!!"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    mlp = (
        {
            "ffn_gate_exps": (2, 32, 64),
            "ffn_up_exps": (2, 32, 64),
            "ffn_down_exps": (2, 64, 32),
            "ffn_gate_inp": (2, 64),
        }
        if kind == 2
        else {"ffn_gate": (64, 64), "ffn_up": (64, 64), "ffn_down": (64, 64)}
    )
    norms = {"attn_q_norm": (32,), "attn_k_norm": (32,)} if kind else {}
    layer = (
        {
            "attn_norm": (64,),
            "ffn_norm": (64,),
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
        }
        | norms
        | mlp
    )
    shapes = {"token_embd.weight": (len(tokens), 64), "output_norm.weight": (64,)}
    shapes |= {f"blk.0.{leaf}.weight": shape for leaf, shape in layer.items()}
    type_ = (
        gguf.GGMLQuantizationType.F32,
        gguf.GGMLQuantizationType.F16,
        gguf.GGMLQuantizationType.Q4_0,
    )[kind]
    for name, shape in shapes.items():
        array = np.ones(shape, np.float32)
        if len(shape) == 1 or kind == 0:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def mutate(data: bytes, rng) -> bytes:
    """A number of the header changes, or the bytes do."""
    data = bytearray(data)
    if rng.random() < 0.7 and len(data) > 64:
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(4, min(len(data), 6_000) - 8)
            form, value = rng.choice(
                (
                    ("<I", rng.choice((0, 1, 7, 8, 9, 77, 2**31, 2**32 - 1))),
                    ("<Q", rng.choice((0, 1, 33, 2**20, 2**40, 2**63, 2**64 - 1))),
                )
            )
            struct.pack_into(form, data, at, value)
        return bytes(data)
    return common.byte_mutator(bytes(data), rng)


def run(data: bytes) -> None:
    path = common.scratch() / "model.gguf"
    path.write_bytes(data)
    before, os.environ["NANOKV_CACHE"] = os.environ.get("NANOKV_CACHE"), str(common.scratch())
    try:
        folder = weights_loader.resolve(path)
        config = Config.from_folder(folder)
        Tokenizer.from_folder(folder).encode("a b!!")
        fields, state = weights_loader.load(folder)
        assert (
            state["norm.weight"].shape == (config.hidden_size,)
            and fields["vocab_size"] == config.vocab_size
        )
    finally:
        shutil.rmtree(common.scratch() / "nanokv", ignore_errors=True)
        del os.environ["NANOKV_CACHE"]
        if before is not None:
            os.environ["NANOKV_CACHE"] = before
