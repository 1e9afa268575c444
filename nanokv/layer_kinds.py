"""Layers of families that differ from Qwen3's: windows, no RoPE, norms in other places.

    SmolLM3   every fourth layer has no RoPE
    OLMo 3    three of four layers have a window; norms follow attention and MLP
    Gemma 3   five of six layers have a window and their own RoPE base; norms before and after;
              norms scale by 1 + w; embeddings are scaled by sqrt(C)
    Qwen3-CLA of kv_sharing_factor layers in turn, the first has keys and values (cla.py)
    gpt-oss   every second layer has a window; a sink per query head; experts in stacked tensors

Each class is a module of model.py with one difference. Names are Hugging Face's.
Reference: modeling_smollm3.py, modeling_olmo3.py, modeling_gemma3.py, modeling_gpt_oss.py of
transformers.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanokv.checkpoint import Attend, Layer
from nanokv.config import Config
from nanokv.model import MLP, Attention, Block, RMSNorm
from nanokv.rope import Rotation
from nanokv.sinks import with_sinks
from nanokv.stacked_experts import StackedExperts
from nanokv.windows import within

# --- attention ------------------------------------------------------------------------------------


class UnrotatedAttention(Attention):
    """No RoPE (Kazemnejad et al. 2023, arXiv 2305.19466): only the causal mask orders positions."""

    def forward(self, x: Tensor, rope: Rotation | None, cache: Layer, attend: Attend) -> Tensor:
        return super().forward(x, None, cache, attend)


class WindowAttention(Attention):
    """Sees the newest `window` positions, by the RoPE of windowed layers."""

    def __init__(self, config: Config, window: int):
        super().__init__(config)
        self.window = window

    def forward(self, x: Tensor, rope: Rotation | None, cache: Layer, attend: Attend) -> Tensor:
        local = getattr(rope, "local", rope)
        return super().forward(x, local, cache, within(attend, self.window))


def attention_of(config: Config, layer: int) -> Attention:
    """The attention of this layer."""
    window = config.window_of(layer)
    if window is not None:
        return WindowAttention(config, window)
    if layer in config.unrotated:
        return UnrotatedAttention(config)
    return Attention(config)


# --- norms ----------------------------------------------------------------------------------------


class WideNorm(RMSNorm):
    """Multiplies in fp32 and casts last."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        mean_square = y.pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(mean_square + self.eps)
        return (self.weight * y).to(x.dtype)


class NormOfHeads(WideNorm):
    """One norm over all heads together. x (B,T,H,D) → (B,T,H,D)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view_as(x)  # over H·D


class OnePlusNorm(RMSNorm):
    """Scales by (1 + weight) · factor, in fp32."""

    def __init__(self, width: int, eps: float, factor: float = 1.0):
        super().__init__(width, eps)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        mean_square = y.pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(mean_square + self.eps)
        scale = (1.0 + self.weight.float()) * self.factor
        return (y * scale).to(x.dtype)


# --- blocks ---------------------------------------------------------------------------------------


class SmolBlock(Block):
    """Block whose attention may have no RoPE."""

    def __init__(self, config: Config, layer: int):
        super().__init__(config, layer)
        self.self_attn = attention_of(config, layer)


class OlmoBlock(nn.Module):
    """Norms follow attention and MLP, inside the residual branch (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        C = config.hidden_size
        D = config.head_dim
        eps = config.rms_norm_eps
        self.self_attn = attention_of(config, layer)
        self.self_attn.q_norm = NormOfHeads(config.num_attention_heads * D, eps)
        self.self_attn.k_norm = NormOfHeads(config.num_key_value_heads * D, eps)
        self.mlp = MLP(C, config.intermediate_size)
        self.post_attention_layernorm = WideNorm(C, eps)
        self.post_feedforward_layernorm = WideNorm(C, eps)

    def forward(self, x: Tensor, rope: Rotation, cache: Layer, attend: Attend) -> Tensor:
        y = self.self_attn(x, rope, cache, attend)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(x)
        return x + self.post_feedforward_layernorm(y)


class GemmaMLP(MLP):
    """MLP with GELU, by its tanh form, in place of SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))  # (B,T,width) → (B,T,C)


class GemmaBlock(nn.Module):
    """Norms before and after attention and MLP (Gemma 3, arXiv 2503.19786)."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        C = config.hidden_size
        D = config.head_dim
        eps = config.rms_norm_eps
        self.input_layernorm = OnePlusNorm(C, eps)
        self.self_attn = attention_of(config, layer)
        # Scores are divided by the root of query_pre_attn_scalar, not of D.
        factor = math.sqrt(D / (config.query_pre_attn_scalar or D))
        self.self_attn.q_norm = OnePlusNorm(D, eps, factor)
        self.self_attn.k_norm = OnePlusNorm(D, eps)
        self.post_attention_layernorm = OnePlusNorm(C, eps)
        self.pre_feedforward_layernorm = OnePlusNorm(C, eps)
        self.mlp = GemmaMLP(C, config.intermediate_size)
        self.post_feedforward_layernorm = OnePlusNorm(C, eps)

    def forward(self, x: Tensor, rope: Rotation, cache: Layer, attend: Attend) -> Tensor:
        y = self.input_layernorm(x)
        y = self.self_attn(y, rope, cache, attend)
        x = x + self.post_attention_layernorm(y)
        y = self.pre_feedforward_layernorm(x)
        y = self.mlp(y)
        return x + self.post_feedforward_layernorm(y)


class SinkBlock(nn.Module):
    """A block whose attention has sinks, and whose MLP is a mixture of experts with biases."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        C = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = WideNorm(C, eps)
        self.self_attn: Any = attention_of(config, layer)
        self.self_attn.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))
        self.post_attention_layernorm = WideNorm(C, eps)
        experts = config.experts_of(layer)
        assert experts is not None  # in every layer
        self.mlp = StackedExperts(C, experts)

    def forward(self, x: Tensor, rope: Rotation, cache: Layer, attend: Attend) -> Tensor:
        y = self.input_layernorm(x)
        x = x + self.self_attn(y, rope, cache, with_sinks(attend, self.self_attn.sinks))
        y = self.post_attention_layernorm(x)
        return x + self.mlp(y)


class ScaledEmbedding(nn.Embedding):
    """Multiplies by sqrt(C), rounded to the dtype of the weights."""

    def forward(self, tokens: Tensor) -> Tensor:
        scale = torch.tensor(math.sqrt(self.embedding_dim)).to(self.weight.dtype)
        return super().forward(tokens) * scale.to(self.weight.device)
