"""What quantization costs: on a random model (that the measurement is right) and on the bundled one (targets)."""

import itertools
import random

import pytest
import torch

import nanokv
from nanokv.cache import make_cache
from nanokv.inference import score
from nanokv.lab.study.quality import (
    Scheme,
    log_likelihood,
    log_likelihood_through,
    measure,
    measure_cache,
)
from nanokv.school.training.corpus import conversation
from nanokv.school.training.data import render
from oracle import SHAPES, pair, random_ids


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


def test_log_likelihood_is_cross_entropy(model):
    ids = random_ids(0, 2, 12)
    logits = score(model, ids)
    expected = -torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(log_likelihood(logits, ids).flatten(), expected, atol=1e-5)


def test_an_exact_cache_changes_nothing(model):
    ids = random_ids(1, 2, 30)
    change = measure_cache(model, ids, make_cache("dict", model.config))
    assert change.shape == (2, 29)
    assert change.abs().max() < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, 29, 64])
def test_a_text_read_in_chunks_is_as_likely_as_in_one_pass(model, chunk):
    ids = random_ids(1, 2, 30)
    found = log_likelihood_through(
        model, ids, make_cache("dict", model.config, batch_size=2), chunk
    )
    assert torch.allclose(found, log_likelihood(score(model, ids), ids), atol=1e-5)


def test_fewer_bits_are_worse_in_every_layer(model):
    ids = random_ids(2, 2, 64)
    worse = [measure(model, ids, Scheme(bits, bits)) for bits in (8, 4, 2)]
    for good, bad in itertools.pairwise(worse):
        assert all(
            4 < b / g < 40
            for g, b in zip(good.keys + good.values, bad.keys + bad.values, strict=True)
        )
        assert bad.mean_abs > 3 * good.mean_abs > 0
    assert len(worse[0].keys) == model.config.num_hidden_layers


def test_outlier_channels_need_a_scale_a_channel_or_a_rotation(model):
    """Keys as Qwen3 has them: with one scale per token, 4 bits are spent on two channels out of 32."""
    ids = random_ids(3, 2, 64)
    planted = {"k_bits": 4, "v_bits": 8, "outliers": (3, 17)}
    channel = measure(model, ids, Scheme(**planted))
    token = measure(model, ids, Scheme(**planted, k_scale="token"))
    turned = measure(model, ids, Scheme(**planted, k_scale="token", rotate=True))
    assert min(token.keys) > 5 * max(channel.keys)
    assert token.mean_abs > 3 * channel.mean_abs
    assert token.mean_abs > turned.mean_abs
    plain = measure(model, ids, Scheme(k_bits=4, v_bits=8))
    # A scale per channel does not even notice them.
    assert channel.keys == pytest.approx(plain.keys, rel=0.02)


def test_the_real_cache_is_no_worse_than_the_measure_says(model):
    """It keeps the newest tokens exact."""
    ids = random_ids(4, 2, 96)
    real = (
        measure_cache(model, ids, make_cache("quantized", model.config, bits=4, residual=16))
        .abs()
        .mean()
    )
    assert 0 < real < 1.2 * measure(model, ids, Scheme(4, 4)).mean_abs


@pytest.fixture(scope="module")
def bundled():
    """(model, ids (4,T)): the bundled model and conversations about words that it never saw in training."""
    model, tokenizer = nanokv.load("tiny")
    texts = [
        render(conversation(random.Random(f"quality:{i}"), 16, held_out=True)) for i in range(4)
    ]
    ids = [tokenizer.encode(text) for text in texts]
    T = min(512, *map(len, ids))
    return model, torch.tensor([row[:T] for row in ids])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"bits": 8}, 0.005),
        ({"k_bits": 8, "v_bits": 4}, 0.02),
        ({"bits": 8, "rotate": "hadamard"}, 0.005),
    ],
    ids=str,
)
def test_the_bundled_model_hardly_notices(bundled, options, limit):
    """Mean absolute change of the log-likelihood of a held-out token, in nats."""
    model, ids = bundled
    cache = make_cache("quantized", model.config, batch_size=len(ids), residual=0, **options)
    change = measure_cache(model, ids, cache)
    assert sum(cache[0].blocks) >= ids.shape[1] - 32
    assert 0 < change.abs().mean().item() <= limit
