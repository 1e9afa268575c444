"""Recurrent layers against transformers' Qwen3.5 and LFM2: whole, in chunks, token by token, behind padding.

The oracle's own functions take keys that are not normed and (B,T,H,D); ours take what delta_keys makes of them.
"""

import pytest
import torch
from transformers import DynamicCache, Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    causal_conv1d_update,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from nanokv.recurrent import (
    CHUNK,
    GatedDeltaNet,
    ShortConv,
    Written,
    causal_conv,
    delta_keys,
    gated_delta_chunks,
    gated_delta_steps,
)
from oracle import gap

TOLERANCE = 3e-5  # fp32, values of size 1: measured up to 3e-6
RULES = [gated_delta_steps, gated_delta_chunks]
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]
B, H, Hk, Dk, Dv, K, C = 2, 6, 2, 16, 24, 4, 40


class Kept:
    """The smallest state: what the layer kept last, and the padding that rows begin with."""

    def __init__(self, real=None):
        self.conv, self.S, self.length, self.real = None, None, 0, real

    def read(self, T):
        real = None if self.real is None else self.real[:, self.length : self.length + T]
        return self.conv, self.S, real

    def keep(self, written, S):
        self.conv, self.S, self.length = written.conv(written.T), S, self.length + written.T


@pytest.fixture
def g():
    return torch.Generator().manual_seed(0)


def normal(g, *shape):
    return torch.randn(shape, generator=g)


def tokens(g, T):
    """q, k, v, g, beta as transformers takes them, with keys that resemble each other, and a state that is not zero."""
    k = normal(g, B, T, Hk, Dk) + 2 * normal(g, B, 1, Hk, Dk)
    decay, beta = -normal(g, B, T, H).abs(), normal(g, B, T, H).sigmoid()
    return (
        [normal(g, B, T, Hk, Dk), k, normal(g, B, T, H, Dv), decay, beta],
        normal(g, B, H, Dk, Dv),
    )


def ours(q, k, v, decay, beta):
    """The same as gated_delta_steps and gated_delta_chunks take them."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return *delta_keys(q, k, H), v, decay.mT, beta.mT


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_transformers(g, rule, T):
    """From an old state: transformers#45513 began its chunks with an empty one."""
    inputs, S = tokens(g, T)
    before = S.clone()
    y, new = rule(*ours(*inputs), S)
    for reference in (torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule):
        expected, state = reference(
            *inputs, initial_state=S, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert gap(y.transpose(1, 2), expected) <= TOLERANCE
        assert gap(new, state) <= TOLERANCE
    assert torch.equal(S, before) and not torch.equal(new, before)


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_by_hand(rule):
    """Orthogonal keys and beta 1: S is a dictionary. A second value at a key replaces the first."""
    k = torch.eye(4)[[0, 1, 0, 2]][None, None]  # (1,1,4,4)
    v = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])[None, None]  # (1,1,4,2)
    g, beta = torch.tensor([[[0.0, 0, 0, -0.5]]]), torch.ones(1, 1, 4)
    y, S = rule(k, k, v, g, beta, torch.zeros(1, 1, 4, 2))
    half = torch.tensor(0.5).neg().exp()
    expected = torch.stack(
        [5 * half, 6 * half, 3 * half, 4 * half, torch.tensor(7.0), torch.tensor(8.0)]
    )
    assert gap(y, v) <= 1e-6  # each token reads what it has written
    assert gap(S[0, 0, :3].flatten(), expected) <= 1e-6 and not S[0, 0, 3].any()


def test_chunks_of_a_strong_decay_do_not_overflow(g):
    """Over 64 tokens exp(c_i − c_j) passes 1e38 above the diagonal: infinity times zero would be NaN."""
    (q, k, v, _, beta), S = tokens(g, 70)
    inputs = [q, k, v, torch.full((B, 70, H), -20.0), beta]
    found, expected = (rule(*ours(*inputs), S) for rule in reversed(RULES))
    assert all(gap(a, b) <= TOLERANCE for a, b in zip(found, expected, strict=True))
    v.requires_grad_()
    decay = inputs[3].requires_grad_()
    gated_delta_chunks(*ours(*inputs), S)[0].sum().backward()
    assert v.grad.isfinite().all() and decay.grad.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_padding_does_not_touch_the_state(g, rule):
    """Tokens with g = 0 and beta = 0, in front, between and behind."""
    inputs, S = tokens(g, 80)
    real = torch.rand(80, generator=g) < 0.6
    q, k, v, decay, beta = ours(*inputs)
    y, new = rule(q, k, v, decay * real, beta * real, S)
    expected, state = rule(*(x[:, :, real] for x in (q, k, v, decay, beta)), S)
    assert gap(y[:, :, real], expected) <= TOLERANCE and gap(new, state) <= TOLERANCE


def test_a_state_in_bf16_would_not_learn():
    """A thousand writes of 1 over 0.9, each by a thousandth: fp32 ends at 1 − 0.1·0.999¹⁰⁰⁰, bf16 stays at 0.9."""
    one = torch.ones(1, 1, 1, 1)
    exact = rounded = 0.9 * one
    for _ in range(1000):
        exact = gated_delta_steps(one, one, one, 0 * one[0], 0.001 * one[0], exact)[1]
        rounded = gated_delta_steps(one, one, one, 0 * one[0], 0.001 * one[0], rounded)[1]
        rounded = rounded.bfloat16().float()
    assert abs(exact.item() - 0.96323) < 1e-4 and abs(rounded.item() - 0.9) < 0.002


# --- the convolution ------------------------------------------------------------------------------


def conv(g, K=K, bias=True):
    made = torch.nn.Conv1d(C, C, K, groups=C, bias=bias)
    for parameter in made.parameters():
        parameter.data = normal(g, *parameter.shape)
    return made.requires_grad_(False)


@pytest.mark.parametrize("T", [1, 2, 3, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_convolution_is_transformers(g, T, width):
    made, x, past = conv(g, width), normal(g, B, C, T), normal(g, B, C, width - 1)
    kept = past.clone()
    expected = causal_conv1d_update(x, kept, made.weight[:, 0], made.bias) if width > 1 else made(x)
    y, window = causal_conv(x, past, made, None)
    new = Written(T, window).conv(T)
    assert gap(y, expected) <= TOLERANCE
    assert torch.equal(new, torch.cat((past, x), 2)[:, :, T:])
    assert new.untyped_storage().nbytes() == new.nbytes  # the inputs of a prefill are not kept


@pytest.mark.parametrize("began", [False, True])
def test_a_row_behind_padding_is_the_row_alone(g, began):
    """The padding holds numbers, and the last row has only padding: its past stays as it is."""
    pads, T = [0, 1, 2, 5, 6], 6
    made, x = conv(g), normal(g, len(pads), C, T)
    past = normal(g, len(pads), C, K - 1) if began else None
    real = torch.arange(T) >= torch.tensor(pads)[:, None]
    y, window = causal_conv(x, past, made, real)
    new = Written(T, window).conv(T)
    for b, pad in enumerate(pads):
        row = torch.zeros(1, C, K - 1) if past is None else past[b : b + 1]
        if pad == T:
            assert torch.equal(new[b : b + 1], row)
            continue
        expected, kept = causal_conv(x[b : b + 1, :, pad:], row, made, None)
        assert gap(y[b : b + 1, :, pad:], expected) <= TOLERANCE
        assert torch.equal(new[b : b + 1], Written(T - pad, kept).conv(T - pad))


def test_padding_on_the_right_is_refused(g):
    real = torch.tensor([[True, True], [True, False]])
    with pytest.raises(ValueError, match="pad the rows on the left"):
        causal_conv(normal(g, B, C, 2), None, conv(g), real)


# --- the layers -----------------------------------------------------------------------------------


def filled(module, g):
    """Random weights that are no small numbers: a norm of ones, or a zero bias, would hide a fault."""
    for name, parameter in module.named_parameters():
        scale = C**-0.5 if parameter.dim() > 1 else 1.0
        parameter.data = normal(g, *parameter.shape) * scale + ("norm" in name)
    return module.requires_grad_(False).eval()


def delta_net(g):
    config = Qwen3_5TextConfig(
        hidden_size=C,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=Hk,
        linear_num_value_heads=H,
        linear_key_head_dim=Dk,
        linear_value_head_dim=Dv,
        linear_conv_kernel_dim=K,
        rms_norm_eps=1e-5,
    )
    reference = filled(Qwen3_5GatedDeltaNet(config, 0), g)
    return config, reference, GatedDeltaNet(C, Hk=Hk, H=H, Dk=Dk, Dv=Dv, K=K, eps=1e-5)


def short_conv(g):
    config = Lfm2Config(
        hidden_size=C, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=3, conv_bias=True
    )
    reference = filled(Lfm2ShortConv(config, 0), g)
    return config, reference, ShortConv(C, 3, bias=True)


@pytest.fixture(params=[delta_net, short_conv])
def layers(request, g):
    """(config, transformers' layer, ours with the same weights under the same names)."""
    config, reference, layer = request.param(g)
    layer.load_state_dict(reference.state_dict())  # strict
    return config, reference, layer.requires_grad_(False)


def in_parts(layer, x, sizes, state):
    return torch.cat([layer(part, state) for part in x.split(sizes, 1)], 1)


@pytest.mark.parametrize("sizes", [[150], [1] * 20, [3, 1, 2, 64, 1, 70, 9], [100, 1, 1, 48]])
def test_a_layer_is_transformers(layers, g, sizes):
    """In one pass, in chunks and token by token; the oracle in one pass and with its cache."""
    config, reference, layer = layers
    x = normal(g, B, sum(sizes), C)
    state, cache = Kept(), DynamicCache(config=config)
    y = in_parts(layer, x, sizes, state)
    assert gap(y, reference(x)) <= TOLERANCE
    name = "cache_params" if isinstance(layer, GatedDeltaNet) else "past_key_values"
    for part in x.split(sizes, 1):
        last = reference(part, **{name: cache})
    assert gap(y[:, -sizes[-1] :], last) <= TOLERANCE
    kept = cache.layers[0]
    assert state.length == sum(sizes)
    assert gap(state.conv, kept.conv_states[0][:, :, 1:]) <= TOLERANCE
    if state.S is not None:
        assert gap(state.S, kept.recurrent_states[0]) <= TOLERANCE


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("sizes", [[9], [1] * 9, [2, 3, 1, 3]])
def test_a_padded_row_of_a_layer_is_the_row_alone(layers, g, sizes, began):
    """Padding may end within a chunk, and a row may be padding for several; also where a text goes on."""
    _, _, layer = layers
    pads, T = [0, 1, 4, 8], 9
    x, old = normal(g, len(pads), T, C), Kept()
    if began:
        layer(normal(g, len(pads), 7, C), old)
    state = Kept(torch.arange(T) >= torch.tensor(pads)[:, None])
    state.conv, state.S = old.conv, old.S
    y = in_parts(layer, x, sizes, state)
    for b, pad in enumerate(pads):
        alone = Kept()
        if began:
            alone.conv, alone.S = (None if x is None else x[b : b + 1] for x in (old.conv, old.S))
        assert gap(y[b : b + 1, pad:], layer(x[b : b + 1, pad:], alone)) <= TOLERANCE
        for padded, row in ((state.conv, alone.conv), (state.S, alone.S)):
            assert row is None or gap(padded[b : b + 1], row) <= TOLERANCE


def test_bf16_keeps_the_state_in_fp32(layers, g):
    """As transformers does: rounded in the same places."""
    _, reference, layer = layers
    x = normal(g, B, 30, C).bfloat16()
    state = Kept()
    y, expected = layer.bfloat16()(x, state), reference.bfloat16()(x)
    assert y.dtype == state.conv.dtype == torch.bfloat16
    assert state.S is None or state.S.dtype == torch.float32
    assert gap(y, expected) <= 2**-7 * expected.abs().max()  # here they are equal


def test_bytes_of_a_state():
    """The sizes of Qwen3.5's default text config, and the sum in the docstring of nanokv/recurrent.py."""
    sizes = {"Hk": 16, "H": 32, "Dk": 128, "Dv": 128, "K": 4}
    layer = GatedDeltaNet(64, **sizes, eps=1e-6).bfloat16()
    state = Kept()
    layer(torch.zeros(1, 5, 64, dtype=torch.bfloat16), state)
    assert (state.S.nbytes, state.conv.nbytes) == (2_097_152, 49_152)
    assert state.S.nbytes + state.conv.nbytes == 2_146_304 == 2_162_688 - 8192 * 2
