"""The samples of a day leave out combinations, never a value: each cache, path and model is in them."""

import fcntl
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

import sampling
import taking_turns
from every_test_ran import EveryTestRan

pytest_plugins = ["pytester"]


def product(**axes):
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def test_every_value_of_every_parameter_is_in_a_sample():
    cases = product(cache=range(23), path=range(10), model=range(6), kernels=range(2))
    chosen = [cases[i] for i in sampling.sample(cases, "seed")]
    assert len(chosen) == 23, "as many as the longest list, of 2760"
    for axis, values in {"cache": 23, "path": 10, "model": 6, "kernels": 2}.items():
        assert {case[axis] for case in chosen} == set(range(values))


def test_a_value_that_occurs_once_is_in_the_sample():
    cases = [*product(a=range(5), b=range(5)), {"a": 9, "b": 0}]
    assert len(cases) - 1 in sampling.sample(cases, "seed")


def test_the_seed_decides_and_one_list_is_taken_whole():
    cases = product(a=range(8), b=range(8))
    assert sampling.sample(cases, "x") == sampling.sample(cases, "x") != sampling.sample(cases, "y")
    assert sampling.sample(product(a=range(7)), "x") == list(range(7))
    assert sampling.sample([], "x") == []


def test_what_is_run_and_what_is_left_out_are_all_there_is(request):
    """Over the tests that this run collected: nothing lost, nothing twice, no value missing from `make test`."""
    collected = request.config.stash[sampling.SPLIT]
    if not collected:
        pytest.skip("no sampled test was collected")
    for test, (chosen, rest, night) in collected.items():
        assert not {item.nodeid for item in chosen} & {item.nodeid for item in rest}
        assert all(item.get_closest_marker("slow") for item in rest)
        assert not any(item.get_closest_marker("slow") for item in chosen)
        by_day = [item for item in rest if not item.get_closest_marker("night")]
        assert len(by_day) + len(night) == len(rest) and len(by_day) >= len(rest) // 6
        later = {pair for item in night for pair in sampling.values_of(item).items()}
        assert later <= {pair for item in by_day for pair in sampling.values_of(item).items()}
        left_out = {pair for item in rest for pair in sampling.values_of(item).items()}
        assert left_out <= {pair for item in chosen for pair in sampling.values_of(item).items()}, (
            test
        )


def test_the_rest_is_slow_and_the_sample_is_not(pytester):
    """A file of 4 × 3 combinations and one that is slow by itself, as `-m slow` sees it."""
    pytester.makepyfile("""
        import pytest

        @pytest.mark.sampled
        @pytest.mark.parametrize("a", range(4))
        @pytest.mark.parametrize("b", [1, 2, 3])
        def test_two_lists(a, b): pass

        @pytest.mark.parametrize("a", range(5))
        def test_that_is_not_sampled(a): pass

        @pytest.mark.sampled
        @pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow)])
        def test_with_a_slow_one(a): pass
    """)
    done = pytester.inline_run("-p", "sampling", "-m", "slow", "-p", "no:anyio", "-W", "ignore")
    left_out = done.getcalls("pytest_deselected")[0].items
    assert (done.countoutcomes(), len(left_out)) == ([8 + 1, 0, 0], 4 + 5 + 1)


def test_of_many_combinations_the_night_runs_most(pytester):
    pytester.makepyfile("""
        import pytest

        @pytest.mark.sampled
        @pytest.mark.parametrize("a", range(10))
        @pytest.mark.parametrize("b", range(10))
        def test_two_lists(a, b): pass
    """)
    counts = []
    for marks in ("not slow", "slow and not night", "night"):
        flags = "-p", "sampling", "-m", marks, "-p", "no:anyio", "-W", "ignore"
        counts.append(pytester.inline_run(*flags).countoutcomes()[0])
    assert sum(counts) == 100 and counts[0] == 10 and 15 <= counts[1] <= 25


def test_a_serial_test_is_alone_and_is_not_passed_by(tmp_path, monkeypatch):
    """flock holds between threads that opened the file each for itself, as between processes."""
    for name in ("ROOM", "TURNSTILE"):  # this test itself may hold the true ones
        (tmp_path / name).touch()
        monkeypatch.setattr(taking_turns, name, tmp_path / name)
    order, leave = [], threading.Event()

    def visit(name, alone):
        with taking_turns.turn(alone):
            order.append(f"{name} in")
            leave.wait(30)
            order.append(f"{name} out")

    def start(name, alone, until):
        thread = threading.Thread(target=visit, args=(name, alone))
        thread.start()
        end = time.monotonic() + 30
        while not until() and time.monotonic() < end:
            time.sleep(0.005)
        return thread

    threads = [
        start("a", False, lambda: "a in" in order),
        start("b", False, lambda: "b in" in order),
    ]
    threads.append(start("serial", True, turnstile_is_taken))
    threads.append(start("c", False, lambda: True))
    assert order == ["a in", "b in"], "two that need not be alone are in the room together"
    leave.set()
    for thread in threads:
        thread.join(30)
    assert order[4:] == ["serial in", "serial out", "c in", "c out"]


def test_a_test_that_becomes_serial_waits_for_others_and_lets_them_in_again(tmp_path, monkeypatch):
    for name in ("ROOM", "TURNSTILE"):
        (tmp_path / name).touch()
        monkeypatch.setattr(taking_turns, name, tmp_path / name)

    def others_may_come() -> bool:
        with open(taking_turns.ROOM) as room:
            try:
                fcntl.flock(room, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    found, go = [], threading.Event()

    def becomes_serial():
        with taking_turns.turn(alone=False):
            found.append(others_may_come())
            with taking_turns.alone():
                found.append((others_may_come(), go.is_set()))
            found.append(others_may_come())

    with taking_turns.turn(alone=False):
        thread = threading.Thread(target=becomes_serial)
        thread.start()
        end = time.monotonic() + 30
        while not turnstile_is_taken() and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.05)
        go.set()
    thread.join(30)
    assert found == [True, (False, True), True]


def turnstile_is_taken() -> bool:
    with open(taking_turns.TURNSTILE) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_test_that_was_given_out_and_not_run_is_missed():
    plugin = EveryTestRan()
    plugin.pytest_xdist_node_collection_finished(None, ["a", "b"])
    plugin.pytest_runtest_logreport(SimpleNamespace(nodeid="a"))
    session = SimpleNamespace(shouldfail=False, shouldstop=False, exitstatus=0)
    plugin.pytest_sessionfinish(session)
    assert plugin.missing() == {"b"} and session.exitstatus == 1
    plugin.pytest_runtest_logreport(SimpleNamespace(nodeid="b"))
    session.exitstatus = 0
    plugin.pytest_sessionfinish(session)
    assert plugin.missing() == set() and session.exitstatus == 0
