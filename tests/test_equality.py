"""The equality suite: right caches pass it, each of its cases can fail, and its report says where.

Wrong caches are made by the faults of nanokv.faults, which know nothing of the suite, and by layers written here.
"""

import pytest
import torch

import nanokv
from nanokv import equality
from nanokv.cache import DictCache, KVCache, LayerCache
from nanokv.errors import CacheError, UnsupportedError

EXACT = sorted(set(nanokv.CACHES) - {"quantized", "sliding"})  # these two round or forget by design


@pytest.fixture(scope="module")
def model():
    return equality.small_model()


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
    assert report.passed and report.first_failure is None and len(report.cases) == len(equality.CASES)


def test_a_cache_that_forgets_fails_only_where_it_forgets(model):
    """A sliding window of 8 drops token 0 when token 8 comes."""
    report = equality.check("sliding", model)
    [case] = [case for case in report.cases if case.status != "passed"]
    assert case.name.startswith("Beyond its capacity") and (case.layer, case.token) == (0, 8)
    assert not report.passed and report.first_failure is case and 1e-4 < case.delta < 100


@pytest.mark.parametrize("base", [Mine, type("MineToo", (Mine, LayerCache), {})])
def test_a_class_with_append_alone_passes_what_it_offers(base, model):
    report = equality.check(base, model)
    assert report.passed
    refused = [case.name for case in report.cases if case.status == "not offered"]
    assert len(refused) == 6 and all(f"{case}" in str(report) for case in report.cases)
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


def test_what_a_class_raises_is_its_result(model):
    class Broken:
        def append(self, k, v):
            raise ZeroDivisionError("oh")

    report = equality.check(Broken, model)
    assert [case.status for case in report.cases].count("failed") == len(equality.CASES) - 1, "all but loading"
    assert report.first_failure.detail == "ZeroDivisionError: oh"
    assert len(equality.check(Broken, model, stop=True).cases) == 1


def test_a_cache_that_offers_nothing_has_not_passed(model):
    class Refuses:
        def append(self, k, v):
            raise UnsupportedError("no")

    report = equality.check(Refuses, model)
    assert {case.status for case in report.cases} == {"not offered"} and not report.passed


def test_an_unknown_name_is_refused():
    with pytest.raises(CacheError, match=r"no cache is called 'dcit': there are dict"):
        equality.check("dcit")


CATCHES = {  # each case → a fault that it must notice, and where that is not so by default, the kind of cache
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
    equality.reorder: "reorder_ignored",
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
    monkeypatch.setattr(DictCache, "state", lambda self: {"key": self["key"].flip(2), "value": self["value"]})
    with pytest.raises(equality.Different, match="attention"):
        equality.save_and_load(equality.Lab(model, equality.maker("dict"), equality.TOLERANCE))


def test_every_case_is_tested_here():
    assert {*CATCHES, equality.save_and_load} == set(equality.CASES)
