"""The cache of a layer with a window: which positions it keeps, how far it goes back, its bytes."""

import pytest
import torch
from transformers import DynamicCache

from nanokv.cache import KVCache, make_cache
from nanokv.cache.window import SPARE, WindowLayer
from nanokv.errors import CacheError, UnsupportedError
from nanokv.inference import prefill
from oracle import LAYERED, pair, random_ids

WINDOW = 7


def filled(n: int, chunk: int = 10):
    """(layer, keys): n positions in chunks; the key of a position is its number."""
    layer = WindowLayer(WINDOW)
    k = torch.arange(n, dtype=torch.float32)[None, None, :, None].repeat(1, 2, 1, 4)
    for part in k.split(chunk, 2):
        keys, _ = layer.append(part, -part)
    return layer, keys


@pytest.mark.parametrize("chunk", [1, 10, 200])
def test_it_keeps_the_window_and_the_spare_positions(chunk):
    layer, returned = filled(200, chunk)
    kept = WINDOW - 1 + SPARE
    assert layer.length == 200
    assert layer.keys[0, 0, :, 0].tolist() == list(range(200 - kept, 200))
    assert layer.nbytes == 2 * 2 * kept * 4 * 4  # keys and values, Hk, positions, D, bytes
    assert returned[0, 0, -1, 0] == 199  # the newest last, whatever came before


def test_it_goes_back_by_the_spare_positions_and_no_further():
    layer, _ = filled(200)
    assert layer.sizes.max_rollback == SPARE
    with pytest.raises(
        UnsupportedError, match=f"from 200 tokens to {199 - SPARE}: it can take back {SPARE}"
    ):
        layer.truncate(199 - SPARE)
    layer.truncate(200 - SPARE)
    assert layer.length == 200 - SPARE
    assert layer.keys[0, 0, :, 0].tolist() == list(range(200 - SPARE - WINDOW + 1, 200 - SPARE))
    assert layer.sizes.max_rollback == 0
    layer.truncate(0)
    assert (layer.length, layer.held, layer.nbytes) == (0, 0, 0)


def test_before_the_window_is_full_it_goes_back_to_any_length():
    layer, _ = filled(WINDOW - 1 + SPARE)
    assert layer.sizes.max_rollback is None
    layer.truncate(3)
    assert layer.keys[0, 0, :, 0].tolist() == [0, 1, 2]


def test_no_layer_changes_if_one_cannot_go_back():
    config = pair(**LAYERED["olmo3-G2"])[1].config
    cache = make_cache("dict", config)
    k = torch.randn(1, config.num_key_value_heads, 200, config.head_dim)
    for layer in cache:
        layer.append(k, k)
    assert cache.sizes.max_rollback == SPARE
    with pytest.raises(
        UnsupportedError, match="a layer with a window of 7 cannot go back from 200"
    ):
        cache.truncate(100)
    assert {layer.length for layer in cache} == {200}


def test_bytes_beside_those_of_transformers():
    """transformers keeps window − 1 positions of a windowed layer; here SPARE more can be taken back."""
    reference, ours = pair(**LAYERED["gemma3-G2"])
    ids = random_ids(1, 1, 120)
    cache, theirs = make_cache("dict", ours.config), DynamicCache(config=reference.config)
    prefill(ours, ids, cache)
    with torch.inference_mode():
        reference(ids, past_key_values=theirs)
    each = 2 * ours.config.num_key_value_heads * ours.config.head_dim * 4  # bytes of a position
    for layer, other, window in zip(cache, theirs.layers, ours.config.windows, strict=True):
        spare = 0 if window is None else SPARE * each
        assert layer.nbytes == other.keys.nbytes + other.values.nbytes + spare


@pytest.mark.parametrize("n", [5, 120])
def test_a_saved_cache_is_continued(n, tmp_path):
    _, ours = pair(**LAYERED["olmo3-G2"])
    ids = random_ids(2, 1, n + 4)
    cache = make_cache("growing", ours.config)
    prefill(ours, ids[:, :n], cache)
    cache.save(tmp_path / "x.kv", ids[0, :n].tolist())
    loaded = KVCache.load(tmp_path / "x.kv", ours.config)
    right = prefill(ours, ids[:, n:], cache, n)
    assert torch.equal(prefill(ours, ids[:, n:], loaded, n), right)


def test_a_state_with_too_few_positions_is_refused():
    layer, _ = filled(200)
    state = layer.state() | {"key": layer.keys[:, :, -3:], "value": layer.values[:, :, -3:]}
    with pytest.raises(CacheError, match="needs 6 of 200 positions, and 3 came"):
        WindowLayer(WINDOW).restore(state)
