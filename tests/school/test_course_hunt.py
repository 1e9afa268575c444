"""The judges of notebook 07: each suspect can be told from the others by its trace; tests get what they earn."""

import re
import sys

import pytest
import torch

import nanokv
from nanokv.lab import faults
from nanokv.lab.study import equality
from nanokv.school.course import checking
from nanokv.school.course.checks import nb07

NAME, TEST, CACHE = (checking.find(id) for id in ("07.2", "07.4", "07.5"))


def evidence(name):
    """What the notebook prints: tokens of layer 0 that differ by more than rounding, a pass and an operation a row."""
    right, seen = nb07.trace(checking.Case({"fault": name}))
    rows = []
    for a, b in zip(right, seen, strict=True):
        for operation in ("rope_k", "cached_v", "attention"):
            key = 0, operation
            gaps = (
                (a.values[key] - b.values[key]).flatten(2).abs().amax((0, 2))
                if key in b.values
                else None
            )
            rows.append(None if gaps is None else tuple(round(float(gap), 2) for gap in gaps))
    return tuple(rows)


def test_every_suspect_leaves_a_trace_of_its_own():
    traces = {name: evidence(name) for name in nb07.SUSPECTS}
    assert set(nb07.SUSPECTS) <= set(faults.FAULTS) and len(nb07.SUSPECTS) == 9
    assert len(set(traces.values())) == len(traces)
    assert all(any(row is None or any(row) for row in rows) for rows in traces.values())


@pytest.mark.parametrize("fault", nb07.SUSPECTS)
def test_a_name_is_right_near_or_elsewhere(fault):
    case = checking.Case({"fault": fault})
    family = next(names for names in nb07.FAMILIES.values() if fault in names)
    for name in nb07.SUSPECTS:
        outcome = NAME.judge(name, case)
        expected = (
            ("right", "")
            if name == fault
            else ("wrong", "same family" if name in family else "elsewhere")
        )
        assert (outcome.state, outcome.mistake) == expected


def test_a_tool_that_finds_positions_finds_them():
    from random import Random

    for seed in range(5):
        config, key, rotated = nb07._key(Random(seed))
        position = nb07._position_of(config, key, rotated)
        assert torch.allclose(nb07._rotated(config, key, position), rotated, atol=1e-6)


@pytest.mark.slow
def test_a_test_is_judged_by_what_it_kills():
    def blind(model):
        pass

    def runs(model):
        nanokv.score(model, torch.arange(5)[None])

    def alarm(model):
        raise AssertionError("never content")

    def unfinished(model):
        return ...

    case = TEST.case()
    found = {test.__name__: TEST.judge(test, case) for test in (blind, runs, alarm, unfinished)}
    found["one"] = TEST.judge(faults.smallest_test("start_pos_restarts"), case)
    assert {name: outcome.mistake for name, outcome in found.items()} == {
        "blind": "vacuous",
        "runs": "vacuous",
        "alarm": "false alarm",
        "unfinished": "",
        "one": "survivors",
    }
    assert (
        found["unfinished"].state == "unanswered"
        and "survived: top_left_mask" in found["one"].message
    )

    def everything(model):
        for name in faults.FAULTS:
            faults.smallest_test(name)(model)

    assert TEST.judge(everything, case).message.startswith("31 of 31 faults killed")


@pytest.mark.slow
def test_a_test_that_returns_its_verdict_is_told_that_nobody_looks_at_it():
    def verdict(model):
        ids = torch.arange(5)[None]
        return torch.equal(nanokv.score(model, ids), nanokv.score(model, ids))

    outcome = TEST.judge(verdict, TEST.case())
    assert outcome.mistake == "returned" and "survived" not in outcome.message

    def both(model):
        for name in faults.FAULTS:
            faults.smallest_test(name)(model)
        return True

    assert TEST.judge(both, TEST.case()).state == "right"


@pytest.mark.parametrize(
    "leave", [pytest.fail, pytest.skip, lambda _: sys.exit(1)], ids=["fail", "skip", "exit"]
)
def test_a_test_is_run_under_guard_and_a_stub_but_once(leave, monkeypatch):
    """Nothing that a test raises escapes, and what never ends is ended."""
    runs = []

    def leaves(model):
        runs.append(nanokv.score(model, torch.arange(5)[None]))
        leave("not today")

    outcome = TEST.judge(leaves, TEST.case())
    assert outcome.mistake == ("vacuous" if leave is pytest.skip else "false alarm")
    assert len(runs) == (len(faults.FAULTS) + 2 if leave is pytest.skip else 1)

    def stub(model):
        runs.append(1)
        raise NotImplementedError

    def hangs(model):
        while True:
            pass

    runs.clear()
    assert TEST.judge(stub, TEST.case()).state == "unanswered" and runs == [1]
    monkeypatch.setattr(nb07, "SECONDS", 0.3)
    assert "Overtime" in TEST.judge(hangs, TEST.case()).message


class Plain(nanokv.cache.LayerCache):
    """Right, and can do nothing else than append."""

    def __init__(self):
        self.length, self.parts = 0, []

    def append(self, k, v):
        self.parts.append((k, v))
        self.length += k.shape[2]
        return tuple(torch.cat(one, dim=2) for one in zip(*self.parts, strict=True))


class Copied(Plain):
    """With all that the broken one could do, and a copy of everything in each step."""

    def truncate(self, n):
        k, v = (torch.cat(one, dim=2)[:, :, :n] for one in zip(*self.parts, strict=True))
        self.parts, self.length = [(k, v)] * (n > 0), n

    def fork(self):
        other = type(self)()
        other.parts, other.length = list(self.parts), self.length
        return other

    def reorder(self, index):
        self.parts = [(k[index], v[index]) for k, v in self.parts]


class Whole(nanokv.cache.LayerCache):
    """With everything that the exercise asks for."""

    def __init__(self):
        self.length, self.slabs = 0, None

    def append(self, k, v):
        end = self.length + k.shape[2]
        if self.slabs is None:
            self.slabs = [k.new_empty(*k.shape[:2], 4, k.shape[3]) for _ in "kv"]
        while end > self.slabs[0].shape[2]:
            self.slabs = [torch.cat((slab, slab), dim=2) for slab in self.slabs]
        for slab, new in zip(self.slabs, (k, v), strict=True):
            slab[:, :, self.length : end] = new
        self.length = end
        return tuple(slab[:, :, :end] for slab in self.slabs)

    def truncate(self, n):
        self.length = min(n, self.length)

    def fork(self):
        other = type(self)()
        other.length, other.slabs = (
            self.length,
            self.slabs and [slab.clone() for slab in self.slabs],
        )
        return other

    def reorder(self, index):
        self.slabs = self.slabs and [slab[index] for slab in self.slabs]


@pytest.mark.slow
def test_a_mended_cache_passes_and_must_still_do_all_that_the_broken_one_did():
    class Shallow(Whole):
        def fork(self):
            return self

    case = CACHE.case()
    mended = CACHE.judge(Whole, case)
    assert mended.state == "right" and re.fullmatch(r"(\d\d) of \1 cases passed", mended.message)
    assert CACHE.judge(Plain, case).mistake == "not offered" and equality.check(Plain).passed
    for copied in (Copied, nanokv.cache.DictCache):
        assert CACHE.judge(copied, case).mistake == "moved" and equality.check(copied).passed
    assert (
        CACHE.judge(Shallow, case).mistake == "differs"
        and CACHE.judge(Whole(), case).state == "wrong"
    )
