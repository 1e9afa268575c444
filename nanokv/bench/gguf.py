"""A Qwen3 as a GGUF file, so that llama.cpp runs the very same weights; without a tokenizer. Needs `gguf`."""

from pathlib import Path

import torch

from nanokv.errors import NanoKVError

NAMES = {  # ours: llama.cpp's
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
ENDS = {
    "embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
}  # fmt: skip
QUANTIZED = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0"}


def write(model, path) -> Path:
    """Matrices in bf16, vectors in fp32."""
    try:
        import gguf
    except ImportError:
        raise NanoKVError("the gguf package is not installed", "pip install llama-cpp-python gguf") from None
    config, writer = model.config, gguf.GGUFWriter(str(path), "qwen3")
    writer.add_name("nanokv")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
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


def their_name(name: str) -> str:
    """layers.3.self_attn.q_proj.weight → blk.3.attn_q.weight"""
    if name in ENDS:
        return ENDS[name]
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def quantize(path: Path, kind: str) -> Path:
    """The same file as q8_0 or q4_0, by llama.cpp's own quantizer."""
    import llama_cpp

    target = path.with_suffix(f".{kind}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, QUANTIZED[kind])
    if llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), params):
        raise NanoKVError(f"llama.cpp could not quantize {path.name} to {kind}")
    return target
