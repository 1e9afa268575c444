"""Latent attention: two ways to compute it that must agree, its small cache, honest savings; KV heads by config."""

import pytest
import torch

from nanokv import costs
from nanokv.cache import make_cache
from nanokv.errors import ConfigError
from nanokv.inference import prefill, score
from nanokv.lab.study.mla import (
    LatentAttention,
    LatentCache,
    LatentConfig,
    absorbed,
    deepseek_v2_savings,
    naive,
    values_per_token,
    with_kv_heads,
)
from nanokv.loading import build
from oracle import SHAPES, gap, pair, random_ids

pytestmark = pytest.mark.sampled

TINY = LatentConfig(C=24, H=4, R=16, Dn=8, Dr=6, Dv=10)


@pytest.fixture
def layer():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LatentAttention(TINY).double().requires_grad_(False)


def texts(T=13):
    return torch.randn(2, T, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(layer, x, attend, chunks):
    cache = LatentCache()
    return torch.cat([layer(part, cache, attend) for part in x.split(list(chunks), 1)], 1), cache


def by_hand(layer, x):
    """The definition, one query and one head at a time, no cache, no matrix products over heads."""
    c, out = TINY, []
    latent = layer.norm(layer.down(x))
    speed = c.theta ** (-torch.arange(0, c.Dr, 2).double() / c.Dr)

    def turn(vector, position):
        a, b = vector[: c.Dr // 2], vector[c.Dr // 2 :]
        cos, sin = (position * speed).cos(), (position * speed).sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin))

    for b in range(len(x)):
        rows = []
        for t in range(x.shape[1]):
            q, heads = layer.q_proj(x[b, t]).view(c.H, -1), []
            for h in range(c.H):
                scores = torch.stack(
                    [
                        q[h, : c.Dn] @ (layer.key_up[h] @ latent[b, s])
                        + turn(q[h, c.Dn :], t) @ turn(layer.k_rope(x[b, s]), s)
                        for s in range(t + 1)
                    ]
                )
                p = (scores / (c.Dn + c.Dr) ** 0.5).softmax(0)
                heads.append(sum(p[s] * (layer.value_up[h] @ latent[b, s]) for s in range(t + 1)))
            rows.append(layer.o_proj(torch.cat(heads)))
        out.append(torch.stack(rows))
    return torch.stack(out)


@pytest.mark.parametrize("attend", [naive, absorbed])
@pytest.mark.parametrize("chunks", [(13,), (1,) * 13, (5, 1, 7)], ids=str)
def test_naive_absorbed_chunked_and_by_hand_are_one_function(layer, attend, chunks):
    x = texts()
    whole, _ = run(layer, x, naive, (13,))
    assert whole.std() > 0.05
    got, cache = run(layer, x, attend, chunks)
    assert gap(got, whole) <= 1e-10
    assert cache.length == 13


def test_the_definition_by_hand(layer):
    x = texts(6)
    assert gap(run(layer, x, absorbed, (6,))[0], by_hand(layer, x)) <= 1e-10


def test_the_cache_holds_one_latent_and_one_key_a_token(layer):
    x = texts()
    _, cache = run(layer, x, absorbed, (13,))
    assert (
        cache.nbytes
        == 2 * 13 * (TINY.R + TINY.Dr) * 8
        == 2 * 13 * values_per_token("mla", R=16, Dr=6) * 8
    )
    cache.truncate(9)
    assert (cache.length, cache.nbytes) == (9, 2 * 9 * 22 * 8)
    whole, _ = run(layer, x, naive, (13,))
    assert gap(layer(x[:, 9:], cache, absorbed), whole[:, 9:]) <= 1e-10


def test_where_the_93_percent_come_from():
    saved = [round(100 * x, 1) for x in deepseek_v2_savings().values()]
    assert saved == [93.3, 82.2, 71.9, 98.2, -125.0]
    assert [values_per_token(kind) for kind in ("mha", "gqa", "mqa", "mla")] == [
        32768,
        2048,
        256,
        576,
    ]


# --- KV heads -------------------------------------------------------------------------------------------------------


def state_of(model):
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


@pytest.fixture(scope="module")
def model():
    """H 4, Hk 2, random biases."""
    return pair(**SHAPES["G2-untied-bias"])[1]


def test_more_kv_heads_are_the_same_function_and_pool_back_to_the_same_weights(model):
    config, state = with_kv_heads(model.config, state_of(model), 4)
    ids, mha = random_ids(0, 2, 15), build(config, state)
    assert gap(score(mha, ids), score(model, ids)) <= 1e-5
    back, again = with_kv_heads(config, state, 2)
    assert back == model.config
    assert all(torch.equal(again[name], x) for name, x in state_of(model).items())


def test_fewer_kv_heads_are_the_means_and_cost_the_bytes_they_say(model):
    before = {name: x.clone() for name, x in state_of(model).items()}
    config, state = with_kv_heads(model.config, state_of(model), 1)
    name = "layers.1.self_attn.v_proj.weight"
    assert torch.allclose(state[name], (before[name][:32] + before[name][32:]) / 2)
    assert state["layers.0.self_attn.k_proj.bias"].shape == (32,)
    # The input is untouched.
    assert all(torch.equal(x, before[name]) for name, x in state_of(model).items())
    mqa, ids = build(config, state), random_ids(1, 1, 15)
    cache = make_cache("dict", config)
    prefill(mqa, ids, cache)
    assert 2 * cache.nbytes == costs.kv_bytes(model.config, 15, 1, 4)
    # Not the same model: it has to be trained on.
    assert gap(score(mqa, ids), score(model, ids)) > 0.01


@pytest.mark.parametrize("heads", [0, 3, 8, -1, 2.0, True])
def test_head_counts_that_do_not_fit_are_refused(model, heads):
    with pytest.raises(ConfigError, match="2 KV heads cannot become"):
        with_kv_heads(model.config, state_of(model), heads)
