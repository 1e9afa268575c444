"""Models with keys and values in some layers only: Qwen3.5's text model, and LFM2.

    Qwen3.5  three of four layers have a recurrent state. Attention has a gate per value and
             rotates a quarter of the dimensions. Norms scale by 1 + w
    LFM2     ten of sixteen layers have a short convolution; the others are the blocks of model.py,
             with the norms of q and k, under other names (weights_loader/families.py)

The layers without keys come from recurrent.py. Reference: modeling_qwen3_5.py and modeling_lfm2.py
of transformers.
"""

from typing import Any

from torch import Tensor, nn

from nanokv.checkpoint import Attend, Layer
from nanokv.config import Config, Conv, Linear
from nanokv.layer_kinds import OnePlusNorm
from nanokv.model import MLP, Attention, Block, RMSNorm
from nanokv.recurrent import GatedDeltaNet, ShortConv
from nanokv.rope import Rotation, apply_rope


class GatedAttention(Attention):
    """Attention whose q_proj computes a gate, too: y · sigmoid(gate) goes to o_proj."""

    def __init__(self, config: Config):
        super().__init__(config)
        C, D = config.hidden_size, config.head_dim
        H = config.num_attention_heads
        self.q_proj = nn.Linear(C, 2 * H * D, config.qkv_bias)
        self.q_norm = OnePlusNorm(D, config.rms_norm_eps)
        self.k_norm = OnePlusNorm(D, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rotation | None, cache: Layer, attend: Attend) -> Tensor:
        B, T, _ = x.shape
        both = self.q_proj(x).view(B, T, -1, 2 * self.head_dim)  # (B,T,H,2·D)
        q, gate = both.chunk(2, dim=-1)  # (B,T,H,D) ×2
        k = self.k_proj(x).view(B, T, -1, self.head_dim)  # (B,T,Hk,D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)  # (B,T,Hk,D)
        q = self.q_norm(q).transpose(1, 2)  # (B,H,T,D)
        k = self.k_norm(k).transpose(1, 2)  # (B,Hk,T,D)
        v = v.transpose(1, 2)  # (B,Hk,T,D)
        q = apply_rope(q, rope)
        k = apply_rope(k, rope)
        k, v = cache.append(k, v)  # (B,Hk,S,D) ×2
        y = attend(q, k, v).transpose(1, 2)  # (B,T,H,D)
        y = y * gate.sigmoid()
        return self.o_proj(y.reshape(B, T, -1))  # (B,T,H·D) → (B,T,C)


class HybridBlock(nn.Module):
    """What both kinds of layers share: norms, the MLP and the residual stream."""

    def __init__(self, config: Config):
        super().__init__()
        C = config.hidden_size
        self.input_layernorm = OnePlusNorm(C, config.rms_norm_eps)
        self.post_attention_layernorm = OnePlusNorm(C, config.rms_norm_eps)
        self.mlp = MLP(C, config.intermediate_size)

    def after(self, x: Tensor) -> Tensor:
        """The second half of the block. x (B,T,C) → (B,T,C)."""
        y = self.post_attention_layernorm(x)
        return x + self.mlp(y)


class AttentionBlock(HybridBlock):
    """A layer with keys and values."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.self_attn = GatedAttention(config)

    def forward(self, x: Tensor, rope: Rotation, cache: Layer, attend: Attend) -> Tensor:
        y = self.input_layernorm(x)
        return self.after(x + self.self_attn(y, rope, cache, attend))


class LinearBlock(HybridBlock):
    """A layer with a recurrent state; order comes from the recurrence, so there is no RoPE."""

    def __init__(self, config: Config, sizes: Linear):
        super().__init__(config)
        self.linear_attn = GatedDeltaNet(
            config.hidden_size,
            Hk=sizes.linear_num_key_heads,
            H=sizes.linear_num_value_heads,
            Dk=sizes.linear_key_head_dim,
            Dv=sizes.linear_value_head_dim,
            K=sizes.linear_conv_kernel_dim,
            eps=config.rms_norm_eps,
        )

    def forward(self, x: Tensor, rope: Rotation, cache: Any, attend: Attend) -> Tensor:
        y = self.input_layernorm(x)
        return self.after(x + self.linear_attn(y, cache))  # the cache is a recurrent.State


def block_of(config: Config, layer: int) -> HybridBlock:
    """The block of this layer of Qwen3.5."""
    if config.linear is not None and config.has_state(layer):
        return LinearBlock(config, config.linear)
    return AttentionBlock(config)


class ConvBlock(nn.Module):
    """The block of model.py with a short convolution in the place of attention."""

    def __init__(self, config: Config, sizes: Conv):
        super().__init__()
        C = config.hidden_size
        self.input_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.conv = ShortConv(C, sizes.conv_L_cache, sizes.conv_bias)
        self.post_attention_layernorm = RMSNorm(C, config.rms_norm_eps)
        self.mlp = MLP(C, config.intermediate_size)

    def forward(self, x: Tensor, rope: Rotation, cache: Any, attend: Attend) -> Tensor:
        y = self.input_layernorm(x)
        x = x + self.conv(y, cache)  # the cache is a recurrent.State
        y = self.post_attention_layernorm(x)
        return x + self.mlp(y)


def lfm2_block(config: Config, layer: int) -> Block | ConvBlock:
    """The block of this layer of LFM2."""
    if config.conv is not None and config.has_state(layer):
        return ConvBlock(config, config.conv)
    return Block(config, layer)
