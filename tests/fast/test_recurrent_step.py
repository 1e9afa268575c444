"""A step of the gated delta rule in place: the kernel, and torch without it, against nanokv/recurrent.py.

test_instructions.py runs these tests over kernels for other processors.
"""

import pytest
import torch

from nanokv.fast import native
from nanokv.fast.recurrent import delta_steps, gated_delta_step
from nanokv.recurrent import delta_keys, gated_delta_steps
from oracle import gap
from small_model import needs_kernels

SIZES = [  # B, H, Dk, Dv; the last two are divided among threads
    (1, 1, 4, 16),
    (2, 3, 32, 48),
    (1, 2, 7, 5),
    (3, 2, 33, 21),
    (1, 1, 1, 1),
    (1, 8, 128, 128),
    (2, 5, 100, 72),
]


@pytest.fixture(params=[pytest.param("kernels", marks=needs_kernels), "torch"])
def code(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "kernels", lambda: None)
    return request.param


def token(B, H, Dk, Dv, dtype=torch.float32):
    """q, k, v, g, beta of one token, and a state."""
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, B, H, 1, Dk, generator=random)
    q, k = (x[:, :, 0].to(dtype) for x in delta_keys(q, k, H))
    v = torch.randn(B, H, Dv, generator=random).to(dtype)
    g = -torch.randn(B, H, generator=random).abs()
    beta = torch.randn(B, H, generator=random).sigmoid()
    return [q, k, v, g, beta], torch.randn(B, H, Dk, Dv, generator=random)


def expected(inputs, S):
    y, new = gated_delta_steps(*(x[:, :, None].float() for x in inputs), S)
    return y[:, :, 0], new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_delta_step_is_the_plain_rule(code, sizes, dtype):
    """Twenty tokens, in place: the address of the state stays, and errors do not grow."""
    inputs, S = token(*sizes, dtype)
    plain, address = S.clone(), S.data_ptr()
    for _ in range(20):
        y = gated_delta_step(*inputs, S)
        right, plain = expected(inputs, plain)
        assert y.dtype == torch.float32 and gap(y, right) <= 1e-5
        assert gap(S, plain) <= 1e-5 and S.data_ptr() == address


def test_delta_step_writes_nothing_beside_its_state(code):
    """A state in the middle of a larger buffer, as in a pool of states."""
    inputs, S = token(2, 3, 10, 21)
    pool = torch.full((4, 3, 10, 21), 7.0)
    pool[1:3] = S
    y = gated_delta_step(*inputs, pool[1:3])
    right, new = expected(inputs, S)
    assert gap(y, right) <= 1e-5 and gap(pool[1:3], new) <= 1e-5
    assert (pool[0] == 7).all() and (pool[3] == 7).all()


def test_delta_step_of_padding_changes_no_bit(code):
    (q, k, v, g, beta), S = token(1, 8, 128, 128)
    before = S.clone()
    gated_delta_step(q, k, v, 0 * g, 0 * beta, S)
    assert torch.equal(S, before)


def test_delta_step_takes_views(code):
    """q, k and v are parts of one row in a layer."""
    inputs, S = token(2, 3, 16, 16)
    row = torch.stack(inputs[:3], 2)  # (B,H,3,D)
    views = [*row.unbind(2), *(x.mT.contiguous().mT for x in inputs[3:])]
    assert not views[0].is_contiguous() and not views[3].is_contiguous()
    right, new = expected(inputs, S)
    assert gap(gated_delta_step(*views, S), right) <= 1e-5 and gap(S, new) <= 1e-5


def test_delta_step_keeps_what_is_no_number(code):
    """Only in the columns that it belongs to."""
    inputs, S = token(1, 1, 8, 40)
    S[0, 0, 3, 20] = torch.nan
    y = gated_delta_step(*inputs, S)
    bad = torch.arange(40) == 20
    assert y[0, 0, bad].isnan().all() and y[0, 0, ~bad].isfinite().all()
    assert S[0, 0, :, bad].isnan().all() and S[0, 0, :, ~bad].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda S: S.bfloat16(), "bfloat16 and contiguous"),
        (lambda S: S.mT, "float32 and not contiguous"),
        (lambda S: S[:, :1].contiguous(), r"a state \(2, 1, 16, 16\) needs"),
    ],
)
def test_delta_step_refuses_a_state_that_it_cannot_change(code, change, message):
    inputs, S = token(2, 3, 16, 16)
    with pytest.raises(ValueError, match=message):
        gated_delta_step(*inputs, change(S))


def test_delta_steps_leave_the_old_state(code):
    """As the plain rule for T = 1: marks of a cache share the old state."""
    inputs, S = token(2, 3, 32, 48)
    inputs, before = [x[:, :, None] for x in inputs], S.clone()
    y, new = delta_steps(*inputs, S)
    right, after = gated_delta_steps(*inputs, S)
    assert y.shape == right.shape and gap(y, right) <= 1e-5 and gap(new, after) <= 1e-5
    assert torch.equal(S, before)
