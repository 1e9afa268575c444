"""Cross-layer attention: layers that read the keys and values of an earlier one. Caches of every kind are in
tests/test_matrix.py; here the numbers, bytes, files and refusals.
"""

import json

import pytest
import torch

from nanokv import costs
from nanokv.cache import DictCache, KVCache, make_cache
from nanokv.config import Config
from nanokv.errors import CacheError, ConfigError, UnsupportedError
from nanokv.inference import prefill, score, verify_draft
from nanokv.loading import load
from oracle import SHAPES, gap, pair, random_ids, sharing, tiny_config
from tiny_checkpoint import write_tiny_checkpoint
from weights_loader import CheckpointError, names
from weights_loader.gguf_writing import config_keys


@pytest.fixture(scope="module")
def plain():
    """Five layers: the last group of two has one."""
    return pair(**SHAPES["G2-untied-bias"], num_hidden_layers=5)[1]


class Ignores(DictCache):
    """An entry of a plain model's cache that gives an earlier entry's keys and values for its own."""

    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def append(self, k, v):
        super().append(k, v)
        return self.owner["key"], self.owner["value"]


def over_shared_keys(model, ids, factor: int):
    """(B,T,V) of a plain model whose layers see the keys of the first layer of their group."""
    layers = []
    for i in range(model.config.num_hidden_layers):
        layers.append(Ignores(layers[i // factor * factor]) if i % factor else DictCache())
    cache = KVCache(layers, model.config)
    return verify_draft(model, ids, cache, 0)


@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_logits_are_those_of_a_plain_model_over_shared_keys(plain, factor):
    model, ids = sharing(plain, factor), random_ids(1, 2, 40)
    right = over_shared_keys(plain, ids, factor)
    assert gap(score(model, ids), right) < 1e-5
    if factor > 1:
        assert gap(score(plain, ids), right) > 0.1
    cache = make_cache("dict", model.config)
    parts = [verify_draft(model, part, cache, cache.length) for part in ids.split([9, 1, 21, 9], 1)]
    assert gap(torch.cat(parts, 1), right) < 1e-5


@pytest.mark.parametrize("spec", ["dict", "static", "paged:page=4", "quantized:residual=4:group=4"])
def test_bytes_are_those_of_the_layers_with_keys(plain, spec):
    """3 of 5; what `nanokv memory` counts."""
    model, held = sharing(plain), {}
    for tried in (model, plain):
        cache = make_cache(spec, tried.config, capacity=16)
        prefill(tried, random_ids(1, 1, 16), cache)
        held[tried] = cache.nbytes
    assert held[model] * 5 == held[plain] * 3
    ours, theirs = (costs.kv_bytes_per_token(tried.config, 4) for tried in (model, plain))
    assert ours * 5 == theirs * 3
    assert costs.parameters(model.config) == sum(x.numel() for x in model.parameters())
    assert costs.active_weights(model.config) < costs.active_weights(plain.config)


def test_a_cache_of_another_model_is_refused(plain):
    model, ids = sharing(plain), random_ids(1, 1, 4)
    with pytest.raises((CacheError, ValueError), match="another model"):
        prefill(model, ids, make_cache("dict", plain.config))
    with pytest.raises((CacheError, ValueError), match="another model"):
        prefill(plain, ids, make_cache("dict", model.config))


def test_policies_that_choose_by_queries_are_refused(plain):
    config = sharing(plain).config
    make_cache("evicting:policy=norms:budget=8", config)
    for policy in ("h2o", "snapkv", "matching", "quest"):
        with pytest.raises(UnsupportedError, match="by the queries of one layer"):
            make_cache(f"evicting:policy={policy}:budget=32", config)


def test_a_folder_is_written_and_read(tmp_path):
    plain, tokenizer = load(write_tiny_checkpoint(tmp_path / "plain"))
    model = sharing(plain)
    model.save(tmp_path / "it", tokenizer)
    fields = json.loads((tmp_path / "it/config.json").read_text())
    assert fields["kv_sharing_factor"] == 2 and fields["model_type"] == "qwen3_cla"
    again, _ = load(tmp_path / "it")
    ids = random_ids(1, 1, 9)
    assert torch.equal(score(again, ids), score(model, ids)) and again.config == model.config
    assert set(names.expected(fields)) == {
        names.to_hugging_face(name) for name in (*model.state_dict(), names.HEAD)
    }
    with pytest.raises(CheckpointError, match=r"qwen3_cla.* is not written as GGUF"):
        config_keys(fields)


def test_the_field_belongs_to_its_own_model_type():
    """In a Qwen3 config it would be silently ignored elsewhere."""
    fields = tiny_config().to_dict()
    with pytest.raises(ConfigError, match="kv_sharing_factor 2"):
        Config.from_dict(fields | {"kv_sharing_factor": 2})
    for wrong in (None, 0, True, "2"):
        with pytest.raises((ConfigError, CheckpointError), match="kv_sharing_factor"):
            Config.from_dict(fields | {"model_type": "qwen3_cla", "kv_sharing_factor": wrong})
