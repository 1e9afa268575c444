"""Bytes and FLOPs of models whose layers have windows: the formulas against caches that are filled, and by hand."""

import json

import pytest
import torch

from meta_cache import cached_bytes, model_of
from nanokv import costs
from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.costs.formulas import keys_seen
from nanokv.loading import skeleton
from oracle import HYBRID, LAYERED, pair, tiny_config

KINDS = {
    "dict": {},
    "static": {},
    "growing": {},
    "quantized": {"residual": 4, "group": 4},
    "paged": {"page": 5},
    "offloaded": {"to": "host"},
}


@pytest.fixture(scope="module", params=LAYERED)
def config(request):
    return pair(**LAYERED[request.param])[1].config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [5, 64, 70, 71, 200])
def test_bytes_of_every_cache(config, kind, tokens):
    cache = make_cache(kind, config, 2, 256, **KINDS[kind])
    k = torch.randn(2, config.num_key_value_heads, tokens, config.head_dim)
    for layer in cache:
        layer.append(k, k)
    expected = costs.cache_bytes(kind, config, tokens, 2, 4, 256, last=tokens, **KINDS[kind])
    assert cache.nbytes == expected


@pytest.mark.parametrize("name", LAYERED | HYBRID)
def test_the_report_has_the_bytes_of_transformers_too(name, cli, tmp_path):
    """Its cache keeps window − 1 positions and K inputs of a convolution; filled on the meta device."""
    config = Config.from_dict(tiny_config(**(LAYERED | HYBRID)[name]).to_dict())
    fields = config.to_dict() | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for context in (5, 200):
        code, out, _ = cli("memory", tmp_path, "--context", context, "--json")
        found = json.loads(out).get("transformers_kv_bytes")
        expected = None
        if any(config.windows) or config.states:
            expected = cached_bytes(model_of(fields, "bfloat16"), [context], 1)
        assert (code, found) == (0, expected)


def test_weights_are_those_of_the_model(config):
    assert costs.parameters(config) == sum(w.numel() for w in skeleton(config).parameters())


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (9, 0), (5, 3), (6, 90)])
def test_keys_that_queries_see(tokens, start, window):
    by_hand = sum(min(at + 1, window or at + 1) for at in range(start, start + tokens))
    assert keys_seen(tokens, start, window) == by_hand


def test_flops_of_attention_stop_growing_where_windows_are_full():
    config = pair(**LAYERED["gemma3-G4-scaled"])[1].config  # every layer has a window of 7
    assert costs.decode_flops(config, 1000) == costs.decode_flops(config, 7)
    assert costs.decode_flops(config, 7) - costs.decode_flops(config, 6) == 4 * 3 * 4 * 32
