"""Rotary position embedding: q and k are rotated by position (Su et al. 2021, arXiv 2104.09864).

Dimension i forms a pair with i + D/2 (transformers' rotate_half). YaRN (Peng et al. 2023, arXiv
2309.00071) and Llama 3.1's rule extend the context beyond the trained one; a first reading may skip
both. Reference: transformers' modeling_rope_utils.py.
"""

import math

import torch
from torch import Tensor

from nanokv.config import Config, Llama3Rope, Yarn

Rotation = tuple[Tensor, Tensor]  # cos and sin of every position and dimension


class TwoRotations(tuple[Tensor, Tensor]):
    """A Rotation for the layers that see all positions, with one of windowed layers beside it."""

    local: Rotation


def rope_frequencies(
    config: Config, device: torch.device | str | None = None
) -> tuple[Tensor, float]:
    """(D/2,) rotation speeds in radians per position, and the factor for cos and sin.

    Pair i rotates by theta^(-2i/D) radians per position, unless the config extends the context.
    """
    D = config.rotary_dim
    theta = config.rope_theta
    exponents = torch.arange(0, D, 2, device=device, dtype=torch.float32) / D  # (D/2,)
    wavelength = theta**exponents
    if config.yarn is not None:
        return yarn_frequencies(config.yarn, D, theta, wavelength)
    if config.llama3 is not None:
        return llama3_frequencies(config.llama3, 1.0 / wavelength), 1.0
    return 1.0 / wavelength, 1.0


def yarn_frequencies(yarn: Yarn, D: int, theta: float, wavelength: Tensor) -> tuple[Tensor, float]:
    """Speeds (D/2,) and the factor for cos and sin, from the normal `wavelength` (D/2,).

    Pairs with fewer than beta_slow rotations within the original context become `factor` times
    slower. Pairs with more than beta_fast rotations keep their speed. Between the two the speed
    changes gradually.
    """

    def pair_with(
        rotations: float,
    ) -> float:  # the pair with this many rotations within the original context
        context = yarn.original_max_position_embeddings
        return D * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(yarn.beta_fast)
    high = pair_with(yarn.beta_slow)
    if yarn.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, D - 1)
    width = (high - low) or 0.001  # as in transformers: no division by zero
    pairs = torch.arange(D // 2, device=wavelength.device, dtype=torch.float32)
    ramp = (pairs - low) / width
    keep = 1 - ramp.clamp(0, 1)  # 1: keep the speed, 0: divide it by `factor`
    slowed = 1 / (yarn.factor * wavelength)
    kept = 1 / wavelength
    return slowed * (1 - keep) + kept * keep, yarn.scale


def llama3_frequencies(rope: Llama3Rope, speed: Tensor) -> Tensor:
    """Speeds (D/2,) from the normal `speed` (D/2,), by Llama 3.1's rule.

    A pair keeps its speed if a full rotation takes fewer than context / high_freq_factor positions,
    and becomes `factor` times slower if it takes more than context / low_freq_factor. Between the
    two the speed changes gradually.
    """
    low = rope.low_freq_factor
    high = rope.high_freq_factor
    context = rope.original_max_position_embeddings
    turn = 2 * math.pi / speed  # (D/2,) positions per full rotation
    keep = (context / turn - low) / (high - low)  # 1: keep the speed, 0: divide it by `factor`
    between = (1 - keep) * speed / rope.factor + keep * speed
    slowed = torch.where(turn > context / low, speed / rope.factor, between)
    return torch.where(turn < context / high, speed, slowed)


def rope_angles(config: Config, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """cos and sin for integer positions (T,) or (B,T): (T,D) ×2 or (B,1,T,D) ×2.

    Computed in every forward, so there is no table whose end a long text could pass. Angles are
    fp32 (in bf16 positions 256 and 257 are equal); cos and sin are cast to the model's dtype, as in
    the reference.
    """
    speed, scale = rope_frequencies(config, positions.device)
    cos, sin = turned(speed, scale, positions, dtype)  # (…,T,D) ×2
    if cos.dim() == 3:
        cos = cos[:, None]  # (B,1,T,D): the same for every head
        sin = sin[:, None]  # (B,1,T,D)
    if config.local is None:
        return cos, sin
    both = TwoRotations((cos, sin))
    both.local = rope_angles(config.local, positions, dtype)
    return both


def turned(speed: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """cos and sin (…,D) of positions (…); `speed` (D/2,) and `scale` come from rope_frequencies."""
    angle = positions[..., None].float() * speed  # (…,D/2)
    # Dimensions i and i + D/2 form a pair and share an angle.
    angle = torch.cat((angle, angle), dim=-1)  # (…,D)
    cos = angle.cos() * scale
    sin = angle.sin() * scale
    return cos.to(dtype), sin.to(dtype)


def apply_rope(x: Tensor, rope: Rotation | None) -> Tensor:
    """Rotate each pair (x_i, x_{i+D/2}) of x (B,H,T,D) by the angle of its position; None: by 0."""
    if rope is None:
        return x
    cos, sin = rope
    rotated_dims = cos.shape[-1]
    if rotated_dims < x.shape[-1]:  # Qwen3.5 rotates a quarter of the dimensions
        first = apply_rope(x[..., :rotated_dims], rope)
        return torch.cat((first, x[..., rotated_dims:]), dim=-1)  # (B,H,T,D)
    x1, x2 = x.chunk(2, dim=-1)  # (B,H,T,D/2) ×2
    rotated = torch.cat((-x2, x1), dim=-1)  # (B,H,T,D)
    return x * cos + rotated * sin
