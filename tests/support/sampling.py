"""Which combinations of a parametrized test run by day: few, drawn by a fixed seed, with every value in them.

A file with `pytestmark = pytest.mark.sampled` (or one test with the mark) says that its parameters are lists whose
product is tried: cache × path × model. `make test` runs a sample in which each value of each parameter occurs. What it
leaves out is marked slow: `make check` runs a second such sample and a sixth of the rest, and `make night` what is left
then. Few combinations are not left to the night. `pytest tests/test_x.py` alone runs all.
"""

import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import pytest

SPLIT = pytest.StashKey()  # test → (sample, rest, of it the night's), for the tests of this file
FEW = 24  # combinations of a rest that `make check` runs whole


def sample(cases: Sequence[Mapping[str, Hashable]], seed: str) -> list[int]:
    """Positions of the chosen cases: a greedy cover of all (parameter, value), ties drawn by the seed."""
    order = list(range(len(cases)))
    random.Random(seed).shuffle(order)
    missing, chosen = {pair for case in cases for pair in case.items()}, []
    while missing:
        best = max(order, key=lambda i: len(missing & cases[i].items()))
        missing -= cases[best].items()
        chosen.append(best)
    return sorted(chosen)


def by_test(items) -> dict[str, list]:
    """The combinations of each sampled test, without those that are slow by themselves."""
    tests = defaultdict(list)
    for item in items:
        if (
            hasattr(item, "callspec")
            and item.get_closest_marker("sampled")
            and not item.get_closest_marker("slow")
        ):
            tests[item.nodeid.partition("[")[0]].append(item)
    return tests


def values_of(item) -> dict[tuple, tuple]:
    """{parameters of one list: the values}. Combinations share their lists' objects, whether these can be compared or
    not; names that stand in one list, as ("field", "value"), are one parameter."""
    axes = {name: (name,) for name in item.callspec.params}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = tuple(
            name.strip() for name in (names.split(",") if isinstance(names, str) else names)
        )
        axes |= dict.fromkeys(names, names)
    return {
        names: tuple(id(item.callspec.params[name]) for name in names) for names in axes.values()
    }


def nightly(rest: list, test: str) -> list:
    """Of the rest what repeats: neither in a second sample nor in a sixth that the seed draws."""
    if len(rest) <= FEW:
        return []
    by_day = set(sample([values_of(case) for case in rest], test + " by day"))
    by_day |= set(random.Random(test).sample(range(len(rest)), len(rest) // 6))
    return [case for i, case in enumerate(rest) if i not in by_day]


def split(items) -> dict[str, tuple[list, list, list]]:
    """test → (the sample, the rest, of the rest what the night runs)."""
    found = {}
    for test, cases in by_test(items).items():
        chosen = set(sample([values_of(case) for case in cases], test))
        rest = [case for i, case in enumerate(cases) if i not in chosen]
        found[test] = (
            [case for i, case in enumerate(cases) if i in chosen],
            rest,
            nightly(rest, test),
        )
    return found


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    config.stash[SPLIT] = found = split(items)
    for _, rest, night in found.values():
        for item in rest:
            item.add_marker(pytest.mark.slow)
        for item in night:
            item.add_marker(pytest.mark.night)
    for item in items:
        if item.get_closest_marker("night"):
            item.add_marker(pytest.mark.slow)
