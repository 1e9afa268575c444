"""Qwen3, the architecture and nothing else: read it top to bottom.

    B batch · T tokens in this call · S keys visible = cached + T · C hidden size · V vocabulary
    H query heads · Hk KV heads · G = H // Hk · D head dim (a number of its own: H·D need not be C) · L layers

No cache, no kernel and no sampling live here. A cache and an attention function come in as arguments, so that
every cache and every fast path plugs into this one model. Module names are Hugging Face's, so loading a
checkpoint is a prefix strip. Reference: transformers' models/qwen3/modeling_qwen3.py, equal to 1e-5 in fp32.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from nanokv.config import Config, GenerationConfig


class RMSNorm(nn.Module):
    """Scale to unit root mean square: no mean subtraction, no bias (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        y = x.float()  # fp32 inside: squares of bf16 lose 16 bits
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)  # cast, THEN weight: the other order changes a quarter of all bf16 values


def rope_frequencies(config: Config, device=None):
    """(D/2,) rotation speeds in radians per position, and the factor that YaRN puts on cos and sin.

    Dimension pair i turns by theta^(-2i/D) each position. YaRN (arXiv 2309.00071) slows the pairs that turn less than
    beta_slow times within the original context by `factor`, keeps those that turn more than beta_fast times.
    """
    D, theta, yarn = config.head_dim, config.rope_theta, config.yarn
    speed = theta ** (torch.arange(0, D, 2, device=device, dtype=torch.float32) / D)
    if yarn is None:
        return 1.0 / speed, 1.0

    def pair_that_turns(times):  # which pair makes so many turns within the original context
        return D * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), D - 1)
    ramp = (torch.arange(D // 2, device=device, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)  # 1 = keep the speed, 0 = divide it by the factor
    scale = yarn.attention_factor or (0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0)
    return (1 / (yarn.factor * speed)) * (1 - keep) + (1 / speed) * keep, scale


def rope_angles(config: Config, positions, dtype):
    """cos and sin for integer positions (T,) or (B,T). Computed for every forward: no table to outgrow or to clamp.

    Angles in fp32 (bf16 cannot tell position 257 from 256), then cast to the model's dtype, as the reference does.
    """
    speed, scale = rope_frequencies(config, positions.device)
    angle = positions[..., None].float() * speed  # (T,D/2) or (B,T,D/2)
    angle = torch.cat((angle, angle), dim=-1)  # (…,T,D): dims i and i + D/2 form a pair and share an angle
    angle = angle if angle.dim() == 2 else angle[:, None]  # (B,1,T,D): the same for every head
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def apply_rope(x, rope):
    """Rotate each pair (x_i, x_{i+D/2}) of x (B,H,T,D) by its position's angle."""
    cos, sin = rope
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): G query heads read each of Hk KV heads."""

    def __init__(self, config: Config):
        super().__init__()
        C, H, Hk, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim, bias = D, config.attention_bias
        self.q_proj = nn.Linear(C, H * D, bias)
        self.k_proj = nn.Linear(C, Hk * D, bias)
        self.v_proj = nn.Linear(C, Hk * D, bias)
        self.o_proj = nn.Linear(H * D, C, bias)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def forward(self, x, rope, cache, attend):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)  # (B,T,H,D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)  # (B,T,Hk,D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)  # (B,T,Hk,D)
        q, k = self.q_norm(q), self.k_norm(k)  # over D, before RoPE; v is neither normed nor rotated
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B,H,T,D), (B,Hk,T,D) ×2
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        k, v = cache.append(k, v)  # rotate, THEN cache: a cached key never moves again    (B,Hk,S,D) ×2
        y = attend(q, k, v)  # (B,H,T,D)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))  # (B,T,H·D) → (B,T,C)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): one half decides how much of the other half passes."""

    def __init__(self, config: Config):
        super().__init__()
        C, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention mixes positions, the MLP works on each alone; both only add to the residual stream."""

    def __init__(self, config: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, rope, cache, attend):
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """Tokens in, hidden states out; `lm_head` is applied by the caller, to the rows that it needs."""

    generation_config = GenerationConfig()  # replaced by the checkpoint's own when one is loaded

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, cache, start_pos: int, attend):
        """tokens (B,T) int64 at positions start_pos … start_pos+T-1 → (B,T,C). `cache` holds one entry a layer."""
        if not torch.equal(torch.as_tensor(start_pos), torch.as_tensor(cache.length)):  # int, or (B,) for ragged rows
            raise ValueError(  # a wrong position gives fluent nonsense, so it is an error and not a guess
                f"start_pos is {start_pos}, but the cache holds {cache.length} tokens: pass start_pos={cache.length}"
            )
        if len(cache) != len(self.layers) or cache.config not in (None, self.config):  # keys may fit and be wrong
            theirs = cache.config if len(cache) == len(self.layers) else f"{len(cache)} layers"
            raise ValueError(f"the cache was made for another model, with {theirs}: make_cache(name, model.config)")
        x = self.embed_tokens(tokens)  # (B,T,C)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = torch.as_tensor(start_pos, device=tokens.device)[..., None] + steps  # (T,) or (B,T)
        rope = rope_angles(self.config, positions, x.dtype)  # cos, sin (T,D): the same for every layer
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, rope, layer_cache, attend)
        return self.norm(x)  # (B,T,C)
