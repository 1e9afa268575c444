"""The supported model families, and the differences between them that config.json does not state.

Source: the config and attention classes of transformers 5.23 (models/llama, qwen2, qwen3,
qwen3_moe, smollm3, olmo3, gemma3, gpt_oss, lfm2). A family that differs in more than these fields is not
supported: its `model_type` raises CheckpointError.
"""

from dataclasses import dataclass, field
from typing import Any

from .strict import CheckpointError, quote


@dataclass(frozen=True)
class Family:
    """One family. `defaults`: sizes for absent fields; None: derived from the other sizes."""

    model_type: str
    title: str
    architecture: str  # the class of transformers, as config.json names it
    qk_norm: bool = False  # RMSNorm over each head of q and k
    qkv_bias: bool | None = None  # None: the field attention_bias decides
    output_bias: bool | None = None  # bias of o_proj; None: the field attention_bias decides
    experts: bool = False  # some layers have a router and experts instead of an MLP
    # All layers have; all experts of a layer are in one tensor, (E,in,out), with biases.
    stacked: bool = False
    shares_kv: bool = False  # kv_sharing_factor layers in turn use the keys of the first
    sinks: bool = False  # each query head has a learned score in the softmax beside its keys'
    window_switch: bool = True  # sliding_window has no effect without use_sliding_window
    # Every n-th layer sees all positions, the others a window; None: every layer sees all.
    full_every: int | None = None
    window: int | None = None  # sliding_window where the config has none
    unrotated_every: int | None = None  # every n-th layer has no RoPE
    linear_every: int | None = None  # every n-th layer has attention, the others a state
    # layer_types has "conv" too: a short convolution, without keys. The MLP's width is adjusted.
    convolutions: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # of a layer
    whole_norm: bool = False  # q_norm and k_norm are over all heads together
    activation: str = "silu"
    tied: bool = False  # tie_word_embeddings where the config has none
    eps: float = 1e-6  # rms_norm_eps where the config has none
    theta: float = 10_000.0  # rope_theta where the config has none
    rope: dict[str, Any] = field(default_factory=dict)  # rope_parameters where the config has none
    local_theta: float | None = None  # of windowed layers, where the config has none
    query_scale: int | None = None  # query_pre_attn_scalar where the config has none
    names: dict[str, str] = field(default_factory=dict)  # Hugging Face's name → nanokv's
    spellings: dict[str, str] = field(default_factory=dict)  # its name of a field → ours
    own_parts: bool = False  # blocks or norms of nanokv/layer_kinds.py
    defaults: dict[str, int | None] = field(default_factory=dict)


QWEN3_DEFAULTS: dict[str, int | None] = {"num_key_value_heads": 32, "head_dim": 128}
EXPERT_DEFAULTS: dict[str, int | None] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
}
LINEAR_DEFAULTS: dict[str, int | None] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
LFM2_NAMES = {
    "embedding_norm": "norm",  # of the whole model; the others are parts of a layer
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn.q_layernorm": "self_attn.q_norm",
    "self_attn.k_layernorm": "self_attn.k_norm",
}
FAMILIES = {
    family.model_type: family
    for family in (
        Family("qwen3", "Qwen3", "Qwen3ForCausalLM", qk_norm=True, defaults=QWEN3_DEFAULTS),
        Family(
            "qwen3_moe",
            "Qwen3-MoE",
            "Qwen3MoeForCausalLM",
            qk_norm=True,
            experts=True,
            defaults={"num_key_value_heads": 4, "head_dim": None} | EXPERT_DEFAULTS,
        ),
        Family(
            "qwen2",
            "Qwen2",
            "Qwen2ForCausalLM",
            qkv_bias=True,
            output_bias=False,
            defaults={"num_key_value_heads": 32, "head_dim": None},
        ),
        Family(
            "llama",
            "Llama",
            "LlamaForCausalLM",
            window_switch=False,
            defaults={"num_key_value_heads": None, "head_dim": None},
        ),
        Family(
            "smollm3",
            "SmolLM3",
            "SmolLM3ForCausalLM",
            unrotated_every=4,
            tied=True,
            theta=2_000_000.0,
            own_parts=True,
            defaults={"num_key_value_heads": 4, "head_dim": None},
        ),
        Family(
            "olmo3",
            "OLMo 3",
            "Olmo3ForCausalLM",
            qk_norm=True,
            whole_norm=True,
            window_switch=False,
            full_every=4,
            window=4096,
            norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            eps=1e-5,
            theta=500_000.0,
            local_theta=500_000.0,
            own_parts=True,
            defaults={"num_key_value_heads": None, "head_dim": None},
        ),
        Family(
            "gemma3_text",
            "Gemma 3",
            "Gemma3ForCausalLM",
            qk_norm=True,
            window_switch=False,
            full_every=6,
            window=4096,
            norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            activation="gelu_pytorch_tanh",
            tied=True,
            theta=1_000_000.0,
            local_theta=10_000.0,
            query_scale=256,
            own_parts=True,
            defaults={"num_key_value_heads": 4, "head_dim": 256},
        ),
        # nanokv's own, no class of transformers: Qwen3 with cross-layer attention.
        Family(
            "qwen3_cla",
            "Qwen3-CLA",
            "Qwen3CLAForCausalLM",
            qk_norm=True,
            shares_kv=True,
            own_parts=True,
            defaults={"num_key_value_heads": 32, "head_dim": 128},
        ),
        Family(
            "qwen3_5_text",
            "Qwen3.5",
            "Qwen3_5ForCausalLM",
            qk_norm=True,
            linear_every=4,
            own_parts=True,
            defaults=LINEAR_DEFAULTS | {"num_key_value_heads": 4, "head_dim": 256},
        ),
        Family(
            "lfm2",
            "LFM2",
            "Lfm2ForCausalLM",
            qk_norm=True,
            qkv_bias=False,
            output_bias=False,
            convolutions=True,
            window_switch=False,
            tied=True,
            eps=1e-5,
            theta=1_000_000.0,
            names=LFM2_NAMES,
            spellings={
                "norm_eps": "rms_norm_eps",
                "block_ff_dim": "intermediate_size",
                "tie_embedding": "tie_word_embeddings",
            },
            own_parts=True,
            defaults={
                "num_key_value_heads": 8,
                "head_dim": None,
                "conv_L_cache": 3,
                "block_multiple_of": 256,
            },
        ),
        Family(
            "gpt_oss",
            "gpt-oss",
            "GptOssForCausalLM",
            qkv_bias=True,
            output_bias=True,
            experts=True,
            stacked=True,
            sinks=True,
            window_switch=False,
            full_every=2,
            window=128,
            eps=1e-5,
            theta=150_000.0,
            rope={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
            own_parts=True,
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 64,
                "moe_intermediate_size": None,
                "decoder_sparse_step": 1,
            },
        ),
    )
}


def family_of(config: dict) -> Family:
    """The family of a config's model_type; CheckpointError if it is not supported."""
    kind = config.get("model_type", "qwen3")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type {quote(kind)} is not implemented",
            hint=f"known: {', '.join(FAMILIES)}",
        )
    return FAMILIES[kind]
