"""Multi-head latent attention as in DeepSeek-V2 (arXiv 2405.04434), and Qwen3 with another number
of KV heads.

The cache keeps one latent of R numbers per token, from which the keys and values of all heads are
computed, and one key of Dr numbers with the position. The rotated key is separate, because RoPE
between a weight and the latent would make `absorbed` impossible.

    naive      rebuild keys and values of all heads at every step: H·(Dn + Dv) numbers per token
    absorbed   multiply the rebuilding matrices into the query and the output instead, and attend
               over the R + Dr cached numbers

Both compute the same product, bracketed differently. This module is for reading and measuring; it
does not load checkpoints.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanokv.attention import causal_mask
from nanokv.config import Config
from nanokv.errors import CacheError, ConfigError
from nanokv.rope import apply_rope


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of a layer, by default DeepSeek-V2's. C hidden size, H heads, R latent size, Dn key
    dims without RoPE, Dr key dims with RoPE, Dv value dims."""

    C: int = 5120
    H: int = 128
    R: int = 512
    Dn: int = 128
    Dr: int = 64
    Dv: int = 128
    theta: float = 10_000.0


class LatentCache:
    """`latent` (B,S,R) and `key` (B,S,Dr), which grow by concatenation. The contract is
    LayerCache's, for other tensors."""

    def __init__(self) -> None:
        self.latent: Tensor | None = None
        self.key: Tensor | None = None

    @property
    def length(self) -> int:
        if self.key is None:
            return 0
        return self.key.shape[1]

    def append(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """(B,T,R), (B,T,Dr) → (B,S,R), (B,S,Dr)."""
        if self.latent is not None and self.key is not None:
            latent = torch.cat((self.latent, latent), 1)
            key = torch.cat((self.key, key), 1)
        self.latent = latent
        self.key = key
        return latent, key

    def truncate(self, n: int) -> None:
        """Remove positions ≥ n. CacheError unless n is an int ≥ 0."""
        if type(n) is not int or n < 0:
            raise CacheError(f"truncate({n!r}): a number of tokens ≥ 0 was expected")
        if self.latent is not None and self.key is not None:
            self.latent = self.latent[:, :n].clone()
            self.key = self.key[:, :n].clone()

    @property
    def nbytes(self) -> int:
        if self.latent is None or self.key is None:
            return 0
        return self.latent.nbytes + self.key.nbytes


class LatentAttention(nn.Module):
    """One layer: x (B,T,C) at positions from cache.length on → (B,T,C). `attend` is `naive` or
    `absorbed`."""

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(c.C, c.H * (c.Dn + c.Dr), bias=False)
        self.down = nn.Linear(c.C, c.R, bias=False)  # makes the latent, which is cached
        self.norm = nn.RMSNorm(c.R, 1e-6)
        # These rebuild each head's keys and values from the latent.
        self.key_up = nn.Parameter(torch.randn(c.H, c.Dn, c.R) * c.R**-0.5)
        self.value_up = nn.Parameter(torch.randn(c.H, c.Dv, c.R) * c.R**-0.5)
        # One rotated key for all heads, as in multi-query attention.
        self.k_rope = nn.Linear(c.C, c.Dr, bias=False)
        self.o_proj = nn.Linear(c.H * c.Dv, c.C, bias=False)

    def forward(self, x: Tensor, cache: LatentCache, attend: Callable) -> Tensor:
        B, T, _ = x.shape
        c = self.config
        start = cache.length
        rope = rope_angles(c, start, T, x)
        q = self.q_proj(x).view(B, T, c.H, c.Dn + c.Dr).transpose(1, 2)  # (B,H,T,Dn+Dr)
        q_plain, q_rope = q.split((c.Dn, c.Dr), dim=-1)
        q_rope = apply_rope(q_rope, rope)
        key = apply_rope(self.k_rope(x)[:, None], rope)[:, 0]  # (B,T,Dr)
        latent, key = cache.append(self.norm(self.down(x)), key)  # (B,S,R), (B,S,Dr)
        position = q_rope @ key[:, None].mT  # (B,H,T,S)
        mask = causal_mask(T, start + T, x.device)
        y = attend(self, q_plain, latent, position, mask)  # (B,H,T,Dv)
        return self.o_proj(y.transpose(1, 2).flatten(2))  # (B,T,H·Dv) → (B,T,C)


def naive(
    layer: LatentAttention, q: Tensor, latent: Tensor, position: Tensor, mask: Tensor | None
) -> Tensor:
    """Rebuild keys and values: 2·S·R·H·(Dn + Dv) FLOPs per step, and S·H·(Dn + Dv) numbers in
    memory."""
    keys = torch.einsum("hdr,bsr->bhsd", layer.key_up, latent)  # (B,H,S,Dn)
    values = torch.einsum("hdr,bsr->bhsd", layer.value_up, latent)  # (B,H,S,Dv)
    return weights(layer, q @ keys.mT + position, mask) @ values


def absorbed(
    layer: LatentAttention, q: Tensor, latent: Tensor, position: Tensor, mask: Tensor | None
) -> Tensor:
    """(q Wᵏ) cᵀ instead of q (Wᵏ c)ᵀ: all heads read the same latent, so a step reads R + Dr
    numbers per cached token."""
    q = torch.einsum("bhtd,hdr->bhtr", q, layer.key_up)  # (B,H,T,R)
    mixed = weights(layer, q @ latent[:, None].mT + position, mask) @ latent[:, None]  # (B,H,T,R)
    return torch.einsum("bhtr,hdr->bhtd", mixed, layer.value_up)  # (B,H,T,Dv)


def weights(layer: LatentAttention, scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of the scores over the visible keys. The scale is that of Dn + Dr key dims."""
    scores = scores * (layer.config.Dn + layer.config.Dr) ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


def rope_angles(config: LatentConfig, start: int, T: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (T,Dr) for positions start … start+T−1."""
    dims = torch.arange(0, config.Dr, 2, device=like.device, dtype=torch.float64)  # (Dr/2,)
    speed = config.theta ** (-dims / config.Dr)
    positions = torch.arange(start, start + T, device=like.device)  # (T,)
    angle = positions[:, None] * torch.cat((speed, speed))  # (T,Dr)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def values_per_token(
    kind: str, H: int = 128, D: int = 128, groups: int = 8, R: int = 512, Dr: int = 64
) -> int:
    """Cached numbers per token and layer: keys and values of every KV head, or for MLA one latent
    and one key."""
    return {"mha": 2 * H * D, "gqa": 2 * groups * D, "mqa": 2 * D, "mla": R + Dr}[kind]


def deepseek_v2_savings() -> dict[str, float]:
    """The parts of the published "93.3 % less KV cache": it compares with another model and
    includes fewer layers and 6-bit storage."""
    mha, gqa, mqa, mla = (values_per_token(kind) for kind in ("mha", "gqa", "mqa", "mla"))
    gqa_67b = 95 * gqa  # 194,560 numbers per token
    mla_v2 = 60 * mla  # 34,560 numbers per token
    return {
        "as published: V2 in 6 bits against the 67B (95 layers, GQA-8) in 16": 1
        - mla_v2 * 6 / (gqa_67b * 16),
        "the same in equal bits": 1 - mla_v2 / gqa_67b,
        "a layer against GQA-8 of the same head size": 1 - mla / gqa,
        "a layer against its own 128 heads without sharing (MHA)": 1 - mla / mha,
        "a layer against MQA, which is smaller (a negative saving)": 1 - mla / mqa,
    }


def with_kv_heads(
    config: Config, state: dict[str, Any], heads: int
) -> tuple[Config, dict[str, Any]]:
    """The model with another number of KV heads → (config, state dict). The input is unchanged.

    More heads are copies and compute exactly the same function (GQA → MHA). Fewer heads are means
    of neighbouring heads, as in Ainslie et al. 2023 (arXiv 2305.13245), who then train for
    another 5 % of the steps; without this training the outputs differ. ConfigError if `heads`
    does not divide the query heads, or is neither a divisor nor a multiple of the present number.
    """
    H, Hk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if type(heads) is not int or heads < 1 or H % heads or (Hk % heads and heads % Hk):
        raise ConfigError(
            f"{Hk} KV heads cannot become {heads!r}: it must divide {H} query heads, "
            f"and be a divisor or a multiple of {Hk}"
        )

    def convert(x):  # (Hk·D,C), or the bias (Hk·D,)
        x = x.unflatten(0, (Hk, D))
        if heads >= Hk:
            return x.repeat_interleave(heads // Hk, dim=0).flatten(0, 1)
        return x.float().unflatten(0, (heads, -1)).mean(1).flatten(0, 1).to(x.dtype)

    converted = dict(state)
    for name, x in state.items():
        if "self_attn.k_proj." in name or "self_attn.v_proj." in name:
            converted[name] = convert(x)
    return dataclasses.replace(config, num_key_value_heads=heads), converted
