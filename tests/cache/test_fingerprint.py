"""A fingerprint must tell checkpoints of one config apart, wherever they differ, and cost next to nothing."""

import copy
from types import SimpleNamespace

import pytest
import torch

from nanokv.cache.saving import fingerprint
from oracle import SHAPES, pair


@pytest.fixture
def model():
    return copy.deepcopy(pair(**SHAPES["G2-tied"])[1])  # the tests change it


def test_the_same_weights_have_the_same_name(model):
    assert fingerprint(model) == fingerprint(copy.deepcopy(model))
    assert len(fingerprint(model)) == 16


def test_the_name_of_given_weights_is_that_of_the_first_release():
    """Sessions saved then are read today: their fingerprint must still be that of their model."""
    model = torch.nn.Linear(100, 41)
    model.weight.data, model.bias.data = (
        torch.arange(4100.0).view(41, 100),
        torch.arange(41.0).to(torch.bfloat16),
    )
    model.config = SimpleNamespace(to_dict=lambda: {"hidden_size": 100, "vocab_size": 41})
    assert fingerprint(model) == "b5905f2958970eb7"


@pytest.mark.parametrize("part", ["beginning", "middle", "end"])
def test_a_changed_part_of_one_matrix_is_seen(model, part):
    """Only both ends were read: weights trained in between had the same name."""
    before, weight = fingerprint(model), model.layers[1].mlp.up_proj.weight.data.view(-1)
    N = weight.numel()
    start, end = {"beginning": (0, 2), "middle": (N // 3, N // 2), "end": (N - 2, N)}[part]
    weight[start:end] += 0.25
    assert fingerprint(model) != before


def test_every_third_of_every_matrix_is_sampled(model):
    before = fingerprint(model)
    for name, weight in model.named_parameters():
        third = -(-weight.numel() // 3)
        for part in weight.data.view(-1).split(third):
            part += 0.25
            assert fingerprint(model) != before, name
            part -= 0.25
            before = fingerprint(model)  # rounding: back to almost what it was


def test_config_and_dtype_count(model):
    assert fingerprint(copy.deepcopy(model).to(torch.bfloat16)) != fingerprint(model)
    other = copy.deepcopy(model)
    object.__setattr__(other, "config", pair(**SHAPES["G2-untied-bias"])[1].config)
    assert fingerprint(other) != fingerprint(model)
