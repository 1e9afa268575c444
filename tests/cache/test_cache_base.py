"""The contract as a reader meets it: few members in base.py; classes of the first release go on working."""

import ast
from pathlib import Path

import pytest
import torch

import nanokv
from nanokv import inference
from nanokv.cache import BatchCache, make_cache
from nanokv.cache.base import KVCache, LayerCache, NoCache
from nanokv.errors import UnsupportedError
from oracle import SHAPES, TOLERANCE, gap, pair, random_ids

BASE = Path(nanokv.__file__).with_name("cache") / "base.py"


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-untied-bias"])[1]


def public_members(source: str) -> dict:
    """Class → names that its body defines, without those that begin with an underscore."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            names = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            names += [n.target.id for n in node.body if isinstance(n, ast.AnnAssign)]
            found[node.name] = {name for name in names if not name.startswith("_")}
    return found


def test_the_contract_has_six_members_and_no_kernel():
    members = public_members(BASE.read_text())
    assert members["LayerCache"] == {"length", "append", "mask", "truncate", "fork", "nbytes"}
    assert members["KVCache"] == {"length", "mask", "truncate", "fork", "nbytes"}
    assert len(BASE.read_text().splitlines()) <= 110  # types included
    assert "ctypes" not in BASE.read_text() and "struct" not in BASE.read_text()


class Old(LayerCache):
    """As a reader of the first release would have written it after notebook 06."""

    def __init__(self):
        self.length, self.key, self.value = 0, None, None

    def append(self, k, v):
        if self.key is not None:
            k, v = torch.cat((self.key, k), dim=2), torch.cat((self.value, v), dim=2)
        self.key, self.value, self.length = k, v, k.shape[2]
        return k, v

    def truncate(self, n):
        self.length = n = min(n, self.length)
        self.key, self.value = (self.key[:, :, :n], self.value[:, :, :n]) if n else (None, None)


def old_cache(model):
    return KVCache((Old() for _ in range(model.config.num_hidden_layers)), model.config)


def test_a_class_of_the_first_release_runs_everywhere(model):
    ids = random_ids(0, 1, 12)
    expected = inference.score(model, ids)
    for this in (model, nanokv.optimize(pair(**SHAPES["G2-untied-bias"])[1])):
        cache = old_cache(model)
        inference.prefill(this, ids[:, :7], cache)
        assert gap(inference.decode(this, ids[:, 7:8], cache, 7), expected[:, 7]) <= TOLERANCE
        cache.truncate(5)
        assert gap(inference.verify_draft(this, ids[:, 5:], cache, 5), expected[:, 5:]) <= TOLERANCE
    batch = BatchCache([cache, old_cache(model)], model.config)
    assert batch.length.tolist() == [12, 0] and batch.max_rollback is None and batch.capacity is None
    with pytest.raises(UnsupportedError, match="Old cannot fork"):
        cache.fork()
    with pytest.raises(UnsupportedError, match="Old cannot be saved"):
        cache.save("never")


def test_members_under_their_first_names_are_found(model):
    """A class that overrides what is called snapshot, rollback, max_rollback and expected today."""
    with pytest.warns(DeprecationWarning) as told:

        class Older(Old):
            rollback = 3
            expects = (2, 32, None, None)

            def mark(self):
                return self.length, self.key, self.value

            def back(self, mark):
                self.length, self.key, self.value = mark

    assert sorted(str(warning.message) for warning in told) == [
        "Older.back is called rollback now", "Older.expects is called expected now",
        "Older.mark is called snapshot now", "Older.rollback is called max_rollback now",
    ]  # fmt: skip
    layer = Older()
    with pytest.warns(DeprecationWarning, match="Older.rows is called batch_size now"):
        assert layer.rows is None
    with pytest.warns(DeprecationWarning, match="KVCache.rollback is called max_rollback now"):
        assert KVCache([layer]).rollback == 3
    with pytest.raises(AttributeError, match="'Older' object has no attribute 'lenght'"):
        _ = layer.lenght
    assert layer.max_rollback == 3 and layer.expected == (2, 32, None, None)
    layer.append(*torch.ones(2, 1, 2, 4, 32))
    before = layer.snapshot()
    layer.append(*torch.ones(2, 1, 2, 1, 32))
    layer.rollback(before)
    assert layer.length == layer.key.shape[2] == 4 and layer.key is before[1]  # its own `back`, not truncate


def test_an_append_of_ones_own_below_a_cache_in_place_is_called(model):
    """`reserve` of the class above would pass it by; so would a kernel, past an append that was patched."""
    called = []

    class Counting(type(make_cache("static", model.config, capacity=20)[0])):
        def append(self, k, v):
            called.append(k.shape[2])
            return super().append(k, v)

    assert make_cache("static", model.config)[0].in_place and not Counting.in_place
    cache = KVCache((Counting(20) for _ in range(model.config.num_hidden_layers)), model.config)
    fast = nanokv.optimize(pair(**SHAPES["G2-untied-bias"])[1])
    inference.prefill(fast, random_ids(1, 1, 5), cache)
    inference.decode(fast, random_ids(2, 1, 1), cache, 5)
    assert called == [5] * len(cache) + [1] * len(cache)
    layer = make_cache("static", model.config, capacity=20)[0]
    assert not layer.patched
    layer.append = lambda k, v: (k, v)
    assert layer.patched


def test_the_null_object_has_no_length(model):
    assert NoCache(3).length == 0 and NoCache(3).fork().capacity == 0 and NoCache(3).nbytes == 0
