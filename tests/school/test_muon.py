"""Muon in batches of one shape does what torch.optim.Muon does matrix by matrix, in the format that is asked for."""

import pytest
import torch

from nanokv.school.training import trainer
from nanokv.school.training.muon import Muon, orthogonal
from nanokv.school.training.trainer import Recipe, Trainer
from small_training import SMALL, small_tokenizer

JORDAN = (3.4445, -4.775, 2.0315)
SHAPES = [(24, 64), (64, 24), (24, 64), (32, 32), (24, 64)]
RATE, DECAY = 0.02, 0.1


def matrices(seed: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, seed: int, steps: int = 3) -> list[torch.Tensor]:
    """The matrices after steps with random gradients; the fourth one has none in the first step."""
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for n, matrix in enumerate(owned):
            gradient = torch.randn(matrix.shape, generator=generator) * 10.0 ** (step - 1)
            matrix.grad = None if n == 3 and step == 0 else gradient
        optimizer.step()
    return [matrix.detach().clone() for matrix in owned]


def theirs(seed: int) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices(seed), RATE, DECAY, adjust_lr_fn="match_rms_adamw")


def test_it_is_torch_muon_in_fp32(monkeypatch):
    """Torch's Muon always rounds to bf16; with that rounding left out both end in the same matrices."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    expected = train(theirs(0), seed=1)
    ours = train(Muon(matrices(0), RATE, DECAY, torch.float32), seed=1)
    start = matrices(0)
    for a, b, before in zip(ours, expected, start, strict=True):
        assert (b - before).abs().max() > 0.01
        assert (a - b).abs().max() < 1e-6


def test_it_is_torch_muon_in_bf16():
    """The updates differ by less than the rounding of bf16 does: 0.05 of their norm, against fp32 too."""
    expected = train(theirs(0), seed=1)
    for dtype in (torch.bfloat16, torch.float32):
        ours = train(Muon(matrices(0), RATE, DECAY, dtype), seed=1)
        for a, b, before in zip(ours, expected, matrices(0), strict=True):
            assert (a - b).norm() < 0.05 * (b - before).norm()


@pytest.mark.parametrize("shape", [(3, 24, 64), (2, 64, 24), (1, 32, 32)])
def test_singular_values_go_through_the_quintic(shape):
    """Each s becomes a·s + b·s³ + c·s⁵ five times, the singular vectors stay: worked out with an SVD in fp64."""
    torch.manual_seed(0)
    given = torch.randn(shape, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(given, full_matrices=False)
    s = S / S.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        a, b, c = JORDAN
        s = a * s + b * s**3 + c * s**5
    made = orthogonal(given.float(), JORDAN, 5, 1e-7)
    assert (made - U @ (s.unsqueeze(-1) * Vh)).abs().max() < 1e-4
    assert 0.3 < s.min() and s.max() < 1.5


def test_a_matrix_of_zeros_stays():
    assert orthogonal(torch.zeros(2, 8, 4), JORDAN, 5, 1e-7).abs().max() == 0


def test_the_state_is_torch_muon_s():
    """So a run that stopped with one continues with the other."""
    one = Muon(matrices(0), RATE, DECAY, torch.float32)
    train(one, seed=1)
    other = theirs(0)
    train(other, seed=1)
    stored = one.state_dict()["state"]
    assert {n: set(state) for n, state in stored.items()} == {
        n: set(state) for n, state in other.state_dict()["state"].items()
    }
    for n, state in other.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], stored[n]["momentum_buffer"])


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_run_uses_the_format_that_the_machine_multiplies_fast(monkeypatch, fast, dtype):
    monkeypatch.setattr(trainer, "multiplies_bf16", lambda device: fast)
    run = Trainer(Recipe(tokens_per_batch=64), config=SMALL, tokenizer=small_tokenizer())
    assert run.optimizers[0].dtype == dtype and isinstance(run.optimizers[0], Muon)
