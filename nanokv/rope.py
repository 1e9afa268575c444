"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): a position is an angle by which q and k are turned.

Pairs are rotate_half's: dimension i turns together with i + D/2. YaRN (Peng et al. 2023, arXiv 2309.00071) and Llama
3.1's rule serve contexts longer than the model was trained on. Reference: transformers' modeling_rope_utils.py.
"""

import math

import torch

from nanokv.config import Config, Llama3Rope, Yarn


def rope_frequencies(config: Config, device=None):
    """(D/2,) rotation speeds in radians per position, and the factor that goes on cos and sin.

    Dimension pair i turns by theta^(-2i/D) per position, unless the config extends the context.
    """
    D, theta = config.head_dim, config.rope_theta
    exponents = torch.arange(0, D, 2, device=device, dtype=torch.float32) / D  # (D/2,)
    wavelength = theta**exponents
    if config.yarn is not None:
        return yarn_frequencies(config.yarn, D, theta, wavelength)
    if config.llama3 is not None:
        return llama3_frequencies(config.llama3, 1.0 / wavelength), 1.0
    return 1.0 / wavelength, 1.0


def yarn_frequencies(yarn: Yarn, D: int, theta: float, wavelength):
    """Pairs that turn less than beta_slow times within the original context turn `factor` times slower; those that turn
    more than beta_fast times stay; between them the change is gradual. The scores get sharper by the scale."""

    def pair_that_turns(times):  # which pair makes so many turns within the original context
        context = yarn.original_max_position_embeddings
        return D * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    pairs = torch.arange(D // 2, device=wavelength.device, dtype=torch.float32)
    ramp = (pairs - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)  # 1 = keep the speed, 0 = divide it by the factor
    slowed, kept = 1 / (yarn.factor * wavelength), 1 / wavelength
    return slowed * (1 - keep) + kept * keep, yarn.scale


def llama3_frequencies(rope: Llama3Rope, speed):
    """As YaRN, but which pairs stay is decided by the positions that a full turn takes: fewer than the original context
    / high_freq_factor stay, more than the original context / low_freq_factor turn `factor` times slower."""
    low, high, context = (
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    )
    turn = 2 * math.pi / speed  # (D/2,) positions
    keep = (context / turn - low) / (high - low)  # 1 at the one border, 0 at the other
    between = (1 - keep) * speed / rope.factor + keep * speed
    slowed = torch.where(turn > context / low, speed / rope.factor, between)
    return torch.where(turn < context / high, speed, slowed)


def rope_angles(config: Config, positions, dtype):
    """cos and sin for integer positions (T,) or (B,T). Computed for every forward: no table to outgrow or to clamp.

    Angles in fp32 (bf16 cannot tell position 257 from 256), then cast to the model's dtype, as the reference does.
    """
    speed, scale = rope_frequencies(config, positions.device)
    cos, sin = turned(speed, scale, positions, dtype)  # (…,T,D) ×2
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]  # (B,1,T,D) ×2: the same for every head
    return cos, sin


def turned(speed, scale: float, positions, dtype):
    """cos and sin (…,D) of positions (…) at these speeds (D/2,); what `rope_frequencies` gives goes in front."""
    angle = positions[..., None].float() * speed  # (…,D/2)
    # Dims i and i + D/2 form a pair and share an angle.
    angle = torch.cat((angle, angle), dim=-1)  # (…,D)
    return (angle.cos() * scale).to(dtype), (angle.sin() * scale).to(dtype)


def apply_rope(x, rope):
    """Rotate each pair (x_i, x_{i+D/2}) of x (B,H,T,D) by its position's angle."""
    cos, sin = rope
    x1, x2 = x.chunk(2, dim=-1)  # (B,H,T,D/2) ×2
    rotated = torch.cat((-x2, x1), dim=-1)  # (B,H,T,D)
    return x * cos + rotated * sin
