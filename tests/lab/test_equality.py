"""The equality suite: right caches pass it, each of its cases can fail, and its report says where.

Wrong caches are made by the faults of nanokv.faults, which know nothing of the suite, and by layers written here.
"""

import copy
from dataclasses import replace

import pytest
import torch

import nanokv
from nanokv.cache import DictCache, KVCache, LayerCache
from nanokv.errors import CacheError, NanoKVError, UnsupportedError
from nanokv.lab.study import equality
from nanokv.model import Qwen3

# These round or forget by design.
EXACT = sorted(set(nanokv.CACHES) - {"evicting", "quantized", "sliding"})


@pytest.fixture(scope="module")
def model():
    return equality.small_model()


@pytest.fixture(scope="module")
def shallow(model):
    """Its first layer alone: where every layer's cache is wrong in the same way, one is enough."""
    one = Qwen3(replace(model.config, num_hidden_layers=1))
    state = model.state_dict()
    one.load_state_dict({name: state[name] for name in one.state_dict()})
    return one.requires_grad_(False).eval()


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch):
    """Files that nobody needs after a power cut."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


class Mine:
    """What a learner writes first: append, and nothing else."""

    def append(self, k, v):
        if self.length:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        self.k, self.v, self.length = k, v, k.shape[2]
        return k, v


def of(*layers):
    """make(config, batch_size, capacity) from one function a layer."""
    return lambda config, batch_size, capacity: KVCache((layer() for layer in layers), config)


@pytest.mark.parametrize("name", EXACT)
def test_every_exact_cache_passes_every_case(name, model):
    report = equality.check(name, model)
    assert [str(case) for case in report.cases if case.status != "passed"] == []
    assert (
        report.passed and report.first_failure is None and len(report.cases) == len(equality.CASES)
    )


def test_a_cache_that_forgets_fails_only_where_it_forgets(model):
    """A sliding window as wide as the capacity drops token 0 when the capacity is passed."""
    report = equality.check("sliding", model)
    long, full, bytes_held = [case for case in report.cases if case.status != "passed"]
    assert long.name.startswith("130 tokens") and (long.layer, long.token) == (0, 130)
    assert full.name.startswith("Beyond its capacity") and (full.layer, full.token) == (0, 8)
    assert bytes_held.name.startswith("32 tokens"), "it keeps 31"
    assert not report.passed and report.first_failure is long and 1e-4 < full.delta < 100


@pytest.mark.parametrize("base", [Mine, type("MineToo", (Mine, LayerCache), {})])
def test_a_class_with_append_alone_passes_what_it_offers(base, model):
    report = equality.check(base, model)
    assert report.passed
    refused = [case.name for case in report.cases if case.status == "not offered"]
    assert len(refused) == 9 and all(f"{case}" in str(report) for case in report.cases)
    assert str(report).endswith("9 of 9 cases passed")


def test_the_first_wrong_layer_and_token_are_named(model):
    """Layer 1 forgets the value of token 3 when it stores it; layers 0 and 2 are right."""

    class Forgets(DictCache):
        def append(self, k, v):
            if self.length <= 3 < self.length + v.shape[2]:
                v = v.clone()
                v[:, :, 3 - self.length] = 0
            return super().append(k, v)

    failure = equality.check(of(DictCache, Forgets, DictCache), model).first_failure
    assert (failure.layer, failure.token) == (1, 3) and failure.delta > 1e-3
    assert "layer 1, token 3 (cached_v)" in str(failure)


def test_a_wrong_mask_is_found_at_attention(model):
    class SeesAll(DictCache):
        def mask(self, T):
            return None

    failure = equality.check(of(SeesAll, SeesAll, SeesAll), model).first_failure
    assert (failure.layer, failure.token) == (0, 0) and "attention" in failure.detail
    assert failure.name == "Prefill, then decode", "one token at a time needs no mask"


def test_a_length_that_stays_behind_is_named(model):
    class Lazy(DictCache):
        @property
        def length(self):
            return 0

    failure = equality.check(of(Lazy, Lazy, Lazy), model).first_failure
    assert failure.token == 0 and failure.detail == "length is 0 after 1 tokens"


def test_nan_is_not_equal(model):
    class Nan(DictCache):
        def append(self, k, v):
            return super().append(k, v * float("nan"))

    assert not equality.check(of(Nan, Nan, Nan), model, stop=True).passed


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_what_a_class_raises_is_its_result(error, model):
    class Broken:
        def append(self, k, v):
            raise error("oh")

    report = equality.check(Broken, model)
    assert [case.status for case in report.cases].count("failed") == len(equality.CASES) - 1, (
        "all but loading"
    )
    assert report.first_failure.detail == f"{error.__name__}: oh"
    assert len(equality.check(Broken, model, stop=True).cases) == 1


class Slab(LayerCache):
    """Room for 256 tokens, written in place; a fork shares it until one of the two appends."""

    def __init__(self):
        self.length, self.slab, self.shared = 0, None, False

    def append(self, k, v):
        new = torch.stack((k, v))  # (2,B,Hk,T,D)
        if self.slab is None:
            self.slab = new.new_zeros(*new.shape[:3], 256, new.shape[4])
        if self.shared:
            self.slab, self.shared = self.slab.clone(), False
        self.slab[..., self.length : self.length + k.shape[2], :] = new
        self.length += k.shape[2]
        return tuple(self.slab[..., : self.length, :])

    def truncate(self, n):
        self.length = min(self.length, n)
        if n == 0:
            self.slab = None

    def fork(self):
        copy = type(self)()
        copy.length, copy.slab = self.length, self.slab
        copy.shared = self.shared = True
        return copy

    def reorder(self, index):
        if self.slab is not None:
            self.slab = self.slab[:, index]


def window(n):
    """A dict cache that gives the last n tokens only."""

    def append(self, k, v):
        return tuple(x[:, :, -n:] for x in DictCache.append(self, k, v))

    return type(f"Window{n}", (DictCache,), {"append": append})


class ForgetsSharing(Slab):
    """What is shared is written to after truncate."""

    def truncate(self, n):
        super().truncate(n)
        self.shared = False


class ReordersInPlace(Slab):
    """The rows of the other one change places too."""

    @torch.inference_mode()
    def reorder(self, index):
        if len(index) == self.slab.shape[1]:
            self.slab[:] = self.slab[:, index].clone()
        else:
            super().reorder(index)


class SameRowsOnly(Slab):
    """No row is added or taken away."""

    def reorder(self, index):
        if self.slab is not None and len(index) == self.slab.shape[1]:
            super().reorder(index)


class ThreeRows(DictCache):
    """Rows from the fourth on get the keys of the row before."""

    def append(self, k, v):
        keys, values = super().append(k, v)
        return (keys if len(keys) <= 3 else torch.cat((keys[:3], keys[2:-1]))), values


class GrowsWrong(DictCache):
    """Right for more rows, but of fewer it keeps the first ones."""

    def reorder(self, index):
        super().reorder(index if len(index) >= self.sizes.batch_size else list(range(len(index))))


def claims(count):
    """A dict cache that says it takes so many bytes."""
    return type(f"Says{count}", (DictCache,), {"nbytes": property(lambda self: count)})


WRONG = [
    (window(49), equality.long_text),
    (window(64), equality.long_text),
    (window(129), equality.long_text),
    (window(249), equality.long_text),
    (ForgetsSharing, equality.fork_taken_back),
    (ReordersInPlace, equality.fork_reordered),
    (SameRowsOnly, equality.more_rows_and_fewer),
    (GrowsWrong, equality.more_rows_and_fewer),
    (ThreeRows, equality.batch_rows, equality.more_rows_and_fewer),
    (claims(1), equality.bytes_held),
    (claims(-5), equality.bytes_held),
    (claims(10**6), equality.bytes_held),
]


@pytest.mark.parametrize(("layer", "cases"), [(layer, cases) for layer, *cases in WRONG])
def test_a_cache_that_is_wrong_in_one_situation_fails_there_and_nowhere_else(layer, cases, shallow):
    failed = [one.name for one in equality.check(layer, shallow).cases if one.status == "failed"]
    assert failed == [case.__doc__.rstrip(".") for case in cases]


def test_the_right_slab_passes(model):
    """What the wrong ones are made from."""
    report = equality.check(Slab, model)
    assert report.passed and str(report).endswith("16 of 16 cases passed")


@pytest.mark.parametrize("tolerance", [-1, float("nan"), float("inf")])
def test_a_tolerance_that_means_nothing_is_refused(tolerance, model):
    with pytest.raises(NanoKVError, match="the tolerance is"):
        equality.check("dict", model, tolerance=tolerance)
    assert not equality.check("dict", model, tolerance=0, stop=True).passed, (
        "another path rounds otherwise"
    )


def test_a_model_that_cannot_be_compared_with_is_refused(model):
    """In half precision a right cache differs by more than many a wrong one does in fp32."""
    with pytest.raises(NanoKVError, match=r"torch\.bfloat16") as caught:
        equality.check("dict", copy.deepcopy(model).bfloat16())
    assert caught.value.hint == "model.float()"
    assert equality.check("dict", copy.deepcopy(model).double(), stop=True).passed
    short = Qwen3(replace(model.config, max_position_embeddings=249))
    with pytest.raises(NanoKVError, match="249 positions, and the longest case takes 250"):
        equality.check("dict", short)


@pytest.mark.parametrize("what", [5, None, [DictCache]])
def test_what_makes_no_cache_is_refused(what, model):
    with pytest.raises(CacheError, match="makes no cache"):
        equality.check(what, model)


def test_a_cache_that_offers_nothing_has_not_passed(model):
    class Refuses:
        def append(self, k, v):
            raise UnsupportedError("no")

    report = equality.check(Refuses, model)
    assert {case.status for case in report.cases} == {"not offered"} and not report.passed


def test_an_unknown_name_is_refused():
    with pytest.raises(CacheError, match=r"no cache is called 'dcit': the caches are dict"):
        equality.check("dcit")


# Each case → a fault that it must notice, and where that is not so by default, the kind of cache.
CATCHES = {
    equality.token_by_token: "wrong_axis",
    equality.prefill_then_decode: "start_pos_off_by_one",
    equality.every_split: "top_left_mask",
    equality.long_text: "rope_table_too_short",
    equality.batch_rows: "cached_before_rope",
    equality.padded_rows: "mask_of_row_0",
    equality.truncate_and_go_on: "truncate_keeps_rows",
    equality.second_request: "not_cleared",
    equality.emptied: "not_cleared",
    equality.two_at_once: "shared_between_requests",
    equality.fork: "shared_between_requests",
    equality.fork_taken_back: "shared_between_requests",
    equality.fork_reordered: "reorder_ignored",
    equality.reorder: "reorder_ignored",
    equality.more_rows_and_fewer: "one_dict_for_all_layers",
    equality.more_than_fits: "static_overflow",
    equality.bytes_held: "repeated_before_caching",
}


@pytest.mark.parametrize("case", CATCHES, ids=lambda case: case.__name__)
def test_every_case_can_fail(case, model):
    kind = "static" if case is equality.more_than_fits else "dict"
    lab = equality.Lab(model, equality.maker(kind), equality.TOLERANCE)
    case(lab)
    with nanokv.faults.inject(CATCHES[case]), pytest.raises((equality.Different, RuntimeError)):
        case(lab)


def test_a_file_of_other_keys_is_noticed(model, monkeypatch):
    """Keys in another order than their values."""
    monkeypatch.setattr(
        DictCache, "state", lambda self: {"key": self["key"].flip(2), "value": self["value"]}
    )
    with pytest.raises(equality.Different, match="attention"):
        equality.save_and_load(equality.Lab(model, equality.maker("dict"), equality.TOLERANCE))


def test_every_case_is_tested_here():
    assert {*CATCHES, equality.save_and_load} == set(equality.CASES)
