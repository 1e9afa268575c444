"""The decoder-only transformer of Qwen3, Qwen2, Llama 3 and Qwen3-MoE. Read it top to bottom.

    B batch · T tokens in this call · S keys visible = cached + T · C hidden size · V vocabulary
    H query heads · Hk KV heads · G = H // Hk · D head dim (H·D may differ from C) · L layers

This file has no cache, no kernel and no sampling. The caller passes in a cache and an attention
function, so every cache and every fast path plugs into this one model. rope.py rotates queries and
keys by their positions. Blocks choose what differs between families (a norm, a bias, experts) when
they are built; other_families.py lists the families with blocks of their own. Module names match
Hugging Face's, so loading a checkpoint only strips a prefix.

A first reading may stop after inference.py, attention.py, cache/base.py and cache/dict_cache.py:
those five files are a language model with a KV cache.

Reference: modeling_qwen3.py and its relatives in transformers; logits equal to 1e-5 in fp32.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# PretrainedModel: nn.Module with .device, .dtype and save. The others are types of arguments.
from nanokv.checkpoint import Attend, Cache, Layer, PretrainedModel
from nanokv.config import Config, Experts
from nanokv.rope import Rotation, apply_rope, rope_angles


class RMSNorm(nn.Module):
    """Scale to unit root mean square (Zhang & Sennrich 2019, arXiv 1910.07467).

    Unlike LayerNorm it subtracts no mean and adds no bias.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()  # a bf16 square would lose 16 bits
        mean_square = y.pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(mean_square + self.eps)
        # Cast first, then multiply: the other order changes a quarter of all bf16 values.
        return self.weight * y.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention: G query heads share one KV head.

    Ainslie et al. 2023, arXiv 2305.13245. Queries and keys are rotated by position, values are not.
    """

    def __init__(self, config: Config):
        super().__init__()
        C = config.hidden_size
        D = config.head_dim
        H = config.num_attention_heads
        Hk = config.num_key_value_heads
        self.head_dim = D
        self.q_proj = nn.Linear(C, H * D, config.qkv_bias)
        self.k_proj = nn.Linear(C, Hk * D, config.qkv_bias)
        self.v_proj = nn.Linear(C, Hk * D, config.qkv_bias)
        self.o_proj = nn.Linear(H * D, C, config.output_bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.qk_norm:  # Qwen3; Llama and Qwen2 have none
            self.q_norm = RMSNorm(D, config.rms_norm_eps)
            self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rotation | None, cache: Layer, attend: Attend) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim)  # (B,T,H,D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim)  # (B,T,Hk,D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)  # (B,T,Hk,D)
        q = self.q_norm(q).transpose(1, 2)  # (B,H,T,D); the norm is over D
        k = self.k_norm(k).transpose(1, 2)  # (B,Hk,T,D)
        v = v.transpose(1, 2)  # (B,Hk,T,D); v is neither normed nor rotated
        q = apply_rope(q, rope)
        k = apply_rope(k, rope)
        # Rotate first, then cache: a cached key never changes again.
        k, v = cache.append(k, v)  # (B,Hk,S,D) ×2
        y = attend(q, k, v)  # (B,H,T,D)
        y = y.transpose(1, 2).reshape(B, T, -1)  # (B,T,H·D)
        return self.o_proj(y)  # (B,T,C)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): silu(gate) scales each value of `up`."""

    def __init__(self, C: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(C, width, bias=False)
        self.up_proj = nn.Linear(C, width, bias=False)
        self.down_proj = nn.Linear(width, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # (B,T,width) → (B,T,C)


class MixtureOfExperts(nn.Module):
    """A router sends each token through k of E small MLPs (Shazeer et al. 2017, arXiv 1701.06538).

    The order of softmax, top-k and normalization is Qwen3-MoE's.
    """

    def __init__(self, C: int, sizes: Experts):
        super().__init__()
        self.sizes = sizes
        self.gate = nn.Linear(C, sizes.num_experts, bias=False)  # the router
        width = sizes.moe_intermediate_size
        self.experts = nn.ModuleList(MLP(C, width) for _ in range(sizes.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)  # (N,C), N = B·T tokens
        scores = self.gate(rows).softmax(-1, dtype=torch.float32)  # (N,E)
        weights, chosen = scores.topk(self.sizes.num_experts_per_tok)  # (N,k) ×2
        if self.sizes.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        y = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():  # weights of experts without tokens are not read
            # n tokens chose this expert: token `row` as its choice number `slot`.
            slot, row = torch.where(chosen.T == expert)  # (n,) ×2
            part = self.experts[expert](rows[row])  # (n,C)
            y.index_add_(0, row, part * weights[row, slot, None])
        return y.view_as(x)  # (B,T,C)


class Block(nn.Module):
    """Attention mixes positions, the MLP works on each alone; both add to the residual stream."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        experts = config.experts_of(layer)
        self.mlp: nn.Module
        if experts is None:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(config.hidden_size, experts)

    def forward(self, x: Tensor, rope: Rotation, cache: Layer, attend: Attend) -> Tensor:
        y = self.input_layernorm(x)
        x = x + self.self_attn(y, rope, cache, attend)
        y = self.post_attention_layernorm(x)
        return x + self.mlp(y)


class Parts(NamedTuple):
    """The classes that some families replace; other_families.py lists theirs."""

    embedding: type[nn.Embedding] = nn.Embedding
    block: Callable[..., Any] = Block  # called with (config, number of the layer)
    norm: type[RMSNorm] = RMSNorm
    # Called with (cache, config): the entry of each layer in one forward.
    entries: Any = lambda cache, _: cache


def parts_of(config: Config) -> Parts:
    """The classes of this family. By name, because other_families.py builds on this file."""
    if not config.family.own_parts:
        return Parts()
    return importlib.import_module("nanokv.other_families").PARTS[config.model_type]


class Transformer(PretrainedModel):
    """Tokens in, hidden states out. The caller applies `lm_head` where it needs logits."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        parts = parts_of(config)
        self.embed_tokens = parts.embedding(config.vocab_size, config.hidden_size)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(parts.block(config, layer) for layer in numbers)
        self.norm = parts.norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, tokens: Tensor, cache: Cache, start_pos: int | Tensor, attend: Attend
    ) -> Tensor:
        """tokens (B,T) int64 at positions start_pos … start_pos+T-1 → hidden states (B,T,C).

        A `start_pos` (B,) has one value per row. `cache` has one entry per layer with keys.
        `attend(q, k, v)` computes attention (see attention.py).
        Raises ValueError if `start_pos` is not the number of tokens that the cache holds, or if the
        cache was made for another model.
        """
        self.check(cache, start_pos)
        x = self.embed_tokens(tokens)  # (B,T,C)
        start = torch.as_tensor(start_pos, device=tokens.device)
        steps = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        positions = start[..., None] + steps  # (T,), or (B,T) for ragged rows
        rope = rope_angles(self.config, positions, x.dtype)  # cos, sin (T,D), for all layers
        return self.norm(self.run_layers(x, rope, cache, attend))  # (B,T,C)

    def run_layers(self, x: Tensor, rope: Rotation, cache: Cache, attend: Attend) -> Tensor:
        """Every block in turn, each with its entry of the cache. x (B,T,C) → (B,T,C)."""
        cache = parts_of(self.config).entries(cache, self.config)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, rope, layer_cache, attend)
        return x

    def check(self, cache: Cache, start_pos: int | Tensor) -> None:
        """ValueError for a wrong start_pos or another model's cache: both give fluent nonsense."""
        held = cache.length
        same = (type(held) is int and start_pos == held) is True
        if not same and not torch.equal(torch.as_tensor(start_pos), torch.as_tensor(held)):
            raise ValueError(
                f"start_pos is {start_pos}, but the cache holds {held} tokens: "
                f"pass start_pos={held}"
            )
        wrong = "the cache was made for another model, with"
        hint = "make_cache(name, model.config)"
        if len(cache) != self.config.num_kv_layers:
            raise ValueError(f"{wrong} {len(cache)} layers: {hint}")
        if cache.config not in (None, self.config):
            raise ValueError(f"{wrong} {cache.config}: {hint}")


Qwen3 = Transformer  # the name of the first release
