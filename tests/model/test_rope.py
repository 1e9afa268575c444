"""Rotary positions against transformers' rotary embedding: default and YaRN, at the ends of every context length.

cos and sin are compared before they are used, because logits of plain RoPE only depend on differences of positions
and would hide a shift. Angles are fp32; at position 131,071 one fp32 step of an angle is 0.008 radians, so the two
sides must compute the same product in the same order: equality is exact.
"""

import math

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from nanokv.config import Config
from nanokv.inference import score
from nanokv.rope import apply_rope, rope_angles, rope_frequencies
from oracle import (
    copy_of,
    gap,
    pair_from_disk,
    random_ids,
    reference_logits,
    tiny_config,
    tiny_reference,
)

pytestmark = pytest.mark.sampled

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "theta-1e4": {"rope_type": "default", "rope_theta": 1e4},
    "theta-5e6": {"rope_type": "default", "rope_theta": 5e6},
    "yarn": YARN,
    "yarn-factor-1": YARN | {"factor": 1.0},
    "yarn-attention-factor": YARN | {"attention_factor": 0.75},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-equal-betas": YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
    "yarn-zero-betas": YARN | {"beta_fast": 0, "beta_slow": None},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-mscale-of-deepseek": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "factor": 40.0},
    "yarn-mscale-alone": YARN | {"mscale": 0.5, "mscale_all_dim": 0},
    "yarn-attention-factor-and-mscale": YARN
    | {"attention_factor": 0.75, "mscale": 2.0, "mscale_all_dim": 1.0},
    "yarn-borders-between-pairs": YARN | {"truncate": False},
    "yarn-no-factor": YARN | {"factor": None},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn-short-context": YARN | {"original_max_position_embeddings": 64, "rope_theta": 1e4},
}
POSITIONS = [0, 1, 255, 256, 257, 2048, 4095, 32767, 32768, 40959, 131071]


def both(rope, head_dim=128):
    """(reference rotary embedding, our config)."""
    config = tiny_config(
        rope_parameters=dict(rope), head_dim=head_dim, max_position_embeddings=131072
    )
    return Qwen3RotaryEmbedding(config), Config.from_dict(config.to_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROPES)
def test_cos_and_sin_equal_transformers(name, dtype):
    theirs, config = both(ROPES[name])
    positions = torch.tensor(POSITIONS)
    expected = theirs(torch.zeros(1, dtype=dtype), positions[None])
    for mine, other in zip(rope_angles(config, positions, dtype), expected, strict=True):
        assert mine.dtype == dtype
        assert gap(mine, other[0]) == 0.0


@pytest.mark.parametrize("head_dim", [2, 8, 48, 64, 128])
@pytest.mark.parametrize("name", ["default", "yarn", "yarn-short-context"])
def test_frequencies_equal_transformers_for_every_head_dim(name, head_dim):
    theirs, config = both(ROPES[name], head_dim)
    speed, scale = rope_frequencies(config)
    assert gap(speed, theirs.inv_freq) == 0.0
    assert scale == theirs.attention_scaling


def test_yarn_by_hand():
    """Fast pairs keep their speed, slow ones turn 4 times slower, and cos and sin grow by 0.1 ln 4 + 1 = 1.13863."""
    _, config = both(YARN)
    speed, scale = rope_frequencies(config)
    plain = 1e6 ** (-torch.arange(0, 128, 2).double() / 128)
    ratio = speed.double() / plain
    turns = 32768 * plain / (2 * math.pi)  # within the original context
    assert scale == pytest.approx(1.138629436, abs=1e-8)
    assert torch.allclose(ratio[turns > 40], torch.ones(1).double(), atol=1e-5)
    assert torch.allclose(ratio[turns < 0.9], torch.full((1,), 0.25).double(), atol=1e-5)
    assert ((ratio > 0.2499) & (ratio < 1.0001)).all()
    cos, _ = rope_angles(config, torch.tensor([0]), torch.float32)
    assert gap(cos, torch.full((1, 128), 1.138629436)) <= 1e-6


def test_missing_original_context_means_max_position_embeddings():
    """As transformers: YaRN without its original length starts from the config's own maximum."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    theirs, config = both(rope)
    assert config.yarn.original_max_position_embeddings == 131072
    assert gap(rope_frequencies(config)[0], theirs.inv_freq) == 0.0


def test_the_original_context_beside_the_rope_comes_first_as_in_transformers():
    fields = tiny_config(rope_parameters=dict(YARN), original_max_position_embeddings=256).to_dict()
    theirs = Qwen3RotaryEmbedding(
        tiny_config(rope_parameters=dict(YARN), original_max_position_embeddings=256)
    )
    config = Config.from_dict(fields)
    assert config.yarn.original_max_position_embeddings == 256
    assert gap(rope_frequencies(config)[0], theirs.inv_freq) == 0.0


ATTN_FACTOR = YARN | {"attn_factor": 0.8782488562869419}  # as in DeepSeek-R1-0528-Qwen3-8B


@pytest.mark.parametrize(
    ("rope", "replaced"),
    [
        (ATTN_FACTOR, 0.8782488562869419 * (0.1 * math.log(4) + 1)),
        (
            ATTN_FACTOR | {"attn_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0},
            0.5 * (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
        ),
        (ATTN_FACTOR | {"attention_factor": 0.9}, 0.9),
    ],
)
def test_attn_factor_multiplies_what_attention_factor_replaces(rope, replaced):
    """The reference is transformers with the product as attention_factor: it has no name for the multiplier."""
    rope = rope | {"original_max_position_embeddings": 64}
    told = {name: value for name, value in rope.items() if name != "attn_factor"} | {
        "attention_factor": replaced
    }
    reference = tiny_reference(rope_parameters=told)
    ours = copy_of(reference)
    ours.config = Config.from_dict(reference.config.to_dict() | {"rope_parameters": rope})
    ids = random_ids(0, 2, 200)
    assert gap(score(ours, ids), reference_logits(reference, ids)) <= 1e-5
    plain = tiny_reference(rope_parameters=rope)  # which ignores it
    assert ("attention_factor" in rope) == (
        gap(score(ours, ids), reference_logits(plain, ids)) <= 1e-5
    )


@pytest.mark.parametrize("name", ["default", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(name, dtype):
    """Pairing i with i + D/2 (not 2i with 2i+1), rotation in the model's own dtype."""
    theirs, config = both(ROPES[name])
    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(2, heads, len(POSITIONS), 128, generator=generator).to(dtype)
        for heads in (4, 2)
    )
    positions = torch.tensor(POSITIONS)
    expected = apply_rotary_pos_emb(q, k, *theirs(q, positions[None]))
    rope = rope_angles(config, positions, dtype)
    assert gap(apply_rope(q, rope), expected[0]) == 0.0
    assert gap(apply_rope(k, rope), expected[1]) == 0.0


def test_rotation_by_hand():
    """D = 4, position 1, theta 100: pair (0, 2) turns by 1 radian, pair (1, 3) by 0.1."""
    _, config = both({"rope_type": "default", "rope_theta": 100.0}, head_dim=4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    y = apply_rope(x, rope_angles(config, torch.tensor([1]), torch.float32)).flatten()
    c, s, c2, s2 = math.cos(1), math.sin(1), math.cos(0.1), math.sin(0.1)
    assert torch.allclose(
        y, torch.tensor([c - 3 * s, 2 * c2 - 4 * s2, 3 * c + s, 4 * c2 + 2 * s2]), atol=1e-6
    )


def test_rows_may_have_positions_of_their_own():
    """positions (B,T), for padded batches: the same as each row's alone, broadcast over heads."""
    _, config = both(ROPES["default"])
    positions = torch.tensor([[0, 1, 2], [40957, 40958, 40959]])
    cos, sin = rope_angles(config, positions, torch.float32)
    assert cos.shape == sin.shape == (2, 1, 3, 128)
    for b in range(2):
        assert torch.equal(cos[b, 0], rope_angles(config, positions[b], torch.float32)[0])
    x = torch.randn(2, 5, 3, 128)
    assert gap(apply_rope(x, (cos, sin))[1:], apply_rope(x[1:], (cos[1:], sin[1:]))) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_of_the_model_leaves_the_frequencies_in_fp32(dtype):
    """transformers' `.to(bfloat16)` casts inv_freq as well: cos is then wrong by 0.05 at position 300."""
    reference = tiny_reference()
    ours = copy_of(reference)
    before = rope_angles(ours.config, torch.tensor([300]), torch.float32)[0]
    ours.to(dtype)
    speed, _ = rope_frequencies(ours.config)
    assert speed.dtype == torch.float32
    assert torch.equal(rope_angles(ours.config, torch.tensor([300]), torch.float32)[0], before)
    after = rope_angles(ours.config, torch.tensor([300]), dtype)[0]
    assert gap(after, before) <= 0.004  # only the rounding of the result


def test_default_dtype_and_device_of_the_process_do_not_matter():
    _, config = both(ROPES["yarn"])
    expected = rope_angles(config, torch.tensor(POSITIONS), torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        actual = rope_angles(config, torch.tensor(POSITIONS), torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert gap(actual[0], expected[0]) == 0.0
    assert gap(actual[1], expected[1]) == 0.0


@pytest.mark.parametrize("name", ["default", "yarn", "yarn-betas"])
def test_bf16_model_uses_the_same_positions_as_transformers_from_disk(tmp_path, name):
    reference, ours = pair_from_disk(
        tmp_path, rope_parameters=dict(ROPES[name]), max_position_embeddings=131072
    )
    ids = random_ids(0, 1, 400)
    assert gap(score(ours, ids), reference_logits(reference, ids)) == 0.0


def test_far_positions_do_not_run_out_of_a_table():
    """RoPE is a function: a start beyond max_position_embeddings gives the formula's value, not an error or a clamp."""
    _, config = both(ROPES["default"])
    cos, sin = rope_angles(config, torch.tensor([10_000_000, 9_999_999]), torch.float32)
    assert gap(cos**2 + sin**2, torch.ones(2, 128)) <= 1e-6
    assert gap(cos[:1], cos[1:]) > 0.1
