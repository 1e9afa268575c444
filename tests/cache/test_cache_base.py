"""The contract as a reader meets it: few members, and a class of one's own needs four of them."""

import ast
import functools
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
    assert len(BASE.read_text().splitlines()) <= 115  # types included
    assert "ctypes" not in BASE.read_text() and "struct" not in BASE.read_text()


class Own(LayerCache):
    """As a reader writes it after notebook 06: append, length and truncate, with the mask that is there."""

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


def own_cache(model):
    return KVCache((Own() for _ in range(model.config.num_hidden_layers)), model.config)


def test_a_class_of_ones_own_runs_everywhere(model):
    ids = random_ids(0, 1, 12)
    expected = inference.score(model, ids)
    for this in (model, nanokv.optimize(pair(**SHAPES["G2-untied-bias"])[1])):
        cache = own_cache(model)
        inference.prefill(this, ids[:, :7], cache)
        assert gap(inference.decode(this, ids[:, 7:8], cache, 7), expected[:, 7]) <= TOLERANCE
        cache.truncate(5)
        assert gap(inference.verify_draft(this, ids[:, 5:], cache, 5), expected[:, 5:]) <= TOLERANCE
    batch = BatchCache([cache, own_cache(model)], model.config)
    assert (
        batch.length.tolist() == [12, 0]
        and batch.sizes.max_rollback is None
        and batch.capacity is None
    )
    with pytest.raises(UnsupportedError, match="Own cannot fork"):
        cache.fork()
    with pytest.raises(UnsupportedError, match="Own cannot be saved"):
        cache.save("never")


def counting(calls):
    """A mixin whose append is counted."""

    class Counting:
        def append(self, k, v):
            calls.append(k.shape[2])
            return super().append(k, v)

    return Counting


def on_an_object(layer, calls):
    right = layer.append
    layer.append = functools.wraps(right)(lambda k, v: calls.append(k.shape[2]) or right(k, v))
    return layer


class Wrapped(LayerCache):
    """A layer in a layer, as a fault or a learner's print makes it."""

    def __init__(self, layer, calls):
        self.layer, self.calls, self.truncate = layer, calls, layer.truncate

    length = property(lambda self: self.layer.length)

    def append(self, k, v):
        self.calls.append(k.shape[2])
        return self.layer.append(k, v)


class Borrowed(LayerCache):
    """A layer whose append is the method of another one."""

    def __init__(self, layer, calls):
        right = layer.append
        layer.append = lambda k, v: calls.append(k.shape[2]) or right(k, v)
        self.layer, self.append, self.truncate = layer, layer.append, layer.truncate

    length = property(lambda self: self.layer.length)


class Duck:
    """No class of ours: append, length and mask alone, and something else that is called pages."""

    pages = 3
    mask, capacity, batch_size, nbytes = LayerCache.mask, None, None, 0

    def __init__(self, layer, calls):
        self.layer, self.calls = layer, calls

    length = property(lambda self: self.layer.length)

    def append(self, k, v):
        self.calls.append(k.shape[2])
        return self.layer.append(k, v)


WAYS = {
    "a layer with a borrowed append": Borrowed,
    "an object that is no layer": Duck,
    "a layer around it": Wrapped,
    "a class below it": lambda layer, calls: type("Own", (counting(calls), type(layer)), {})(20),
    "a method put on it": on_an_object,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("at", [slice(None), slice(1, 2)], ids=["every layer", "the second"])
def test_an_append_of_ones_own_is_called_and_no_kernel_passes_it_by(model, way, at):
    """`pages` belong to the append of the class above, not to this one. Of the layers before it nothing is left."""
    calls, cache, ids = [], make_cache("static", model.config, capacity=20), random_ids(1, 1, 7)
    cache[at] = [way(layer, calls) for layer in cache[at]]
    fast = nanokv.optimize(pair(**SHAPES["G2-untied-bias"])[1])
    inference.prefill(fast, ids[:, :5], cache)
    assert cache.pages(torch.empty(1, 2, 1, 32)) is None and cache.length == 5
    for t in (5, 6):
        logits = inference.decode(fast, ids[:, t : t + 1], cache, t)
    assert gap(logits, inference.score(model, ids)[:, 6]) <= TOLERANCE
    layers = len(cache[at])
    assert calls == [5] * layers + [1] * layers * 2


def members(one, base) -> set[str]:
    """Public names besides those of the base."""
    return {name for name in dir(one) if not name.startswith("_")} - set(dir(base))


def test_the_members_to_know_are_few():
    """A name that joins them makes one more thing to read before a cache is understood."""
    layer, cache = members(LayerCache(), object), members(KVCache(), list)
    assert layer == {
        "length",
        "append",
        "mask",
        "truncate",
        "fork",
        "nbytes",
        "capacity",
        "lossless",
        "sizes",
        "pages",
        "reorder",
        "state",
        "restore",
    }
    assert cache == {
        "length",
        "page_size",
        "mask",
        "truncate",
        "fork",
        "reorder",
        "nbytes",
        "save",
        "load",
        "config",
        "capacity",
        "sizes",
        "made",
        "tokens",
        "pages",
        "snapshot",
        "nearest",
    }
    assert (len(layer), len(cache)) == (13, 17)


def test_the_null_object_has_no_length(model):
    assert NoCache(3).length == 0 and NoCache(3).fork().capacity == 0 and NoCache(3).nbytes == 0


def test_keys_that_lie_in_another_layer_are_appended_there(model):
    """A bound method of another layer: the slots of this one must not be written in its place."""
    cache, others = (make_cache("static", model.config, capacity=20) for _ in range(2))
    for layer, other in zip(cache, others, strict=True):
        layer.append = other.append
    assert cache.pages(torch.empty(1, 2, 1, 32)) is None


def test_values_that_were_replaced_are_read(model):
    """As keys are: what the step before gave to the kernel is given again only while both are there."""
    ids, fast = random_ids(1, 1, 8), nanokv.optimize(pair(**SHAPES["G2-untied-bias"])[1])
    found = []
    for this in (model, fast):
        cache = make_cache("static", model.config, capacity=20)
        inference.prefill(this, ids[:, :5], cache)
        inference.decode(this, ids[:, 5:6], cache, 5)
        for layer in cache:
            layer.values = torch.zeros_like(layer.values)
        found.append(inference.decode(this, ids[:, 6:7], cache, 6))
    assert gap(*found) <= TOLERANCE
