"""Clients take turns in the engine: what two busy ones are served differs by no more than the paper's bound.

Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588).
"""

import itertools
from types import SimpleNamespace

import pytest

from nanokv.engine import Engine
from nanokv.engine.turns import INPUT, OUTPUT, Client, Turns
from nanokv.errors import GenerationError
from oracle import SHAPES, pair, random_ids

RUNNING = 3
SEEDS = itertools.count(1)


@pytest.fixture(scope="module")
def model():
    return pair(**SHAPES["G2-tied"])[1]


def submit(engine, client, count, tokens, new):
    """`count` requests of a client; no two prompts share a page."""
    return [
        engine.submit(
            random_ids(next(SEEDS), 1, tokens)[0].tolist(), new, eos_token_ids=[], client=client
        )
        for _ in range(count)
    ]


def served(requests) -> int:
    """Weighted tokens, counted from the requests alone: a prompt from its admission on."""
    admitted = [request for request in requests if request.admitted is not None]
    return sum(INPUT * request.prompt_tokens + OUTPUT * len(request.tokens) for request in admitted)


def backlogged(engine, clients) -> bool:
    return set(clients) <= {request.client for request in engine.scheduler.waiting}


def differences(engine, one, two) -> list[int]:
    """Served to `one` minus served to `two`, after each step in which both have waiting requests."""
    found = []
    names = one[0].client, two[0].client
    while backlogged(engine, names):
        found.append(served(one) - served(two))
        engine.step()
    return found


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [((24, 20, 2), (24, 3, 9)), ((40, 4, 8), (12, 12, 8)), ((100, 2, 2), (12, 30, 10))],
    ids=["prompts against answers", "equal", "tiny against large"],
)
def test_two_busy_clients_are_served_alike(model, mine, theirs):
    engine = Engine(model, pages=80, page_size=4, step_tokens=64, max_running=RUNNING)
    one = submit(engine, "one", *mine)
    two = submit(engine, "two", *theirs)
    found = differences(engine, one, two)
    assert len(found) > 5
    longest = max(mine[1], theirs[1])
    together = RUNNING * max(tokens + new for _, tokens, new in (mine, theirs))
    bound = 2 * max(INPUT * longest, OUTPUT * together)
    # Over any interval: the least and the largest difference are ends of one.
    assert max(found) - min(found) <= bound
    # In order of arrival, all requests of `one` would have come first.
    total = served(one) + served(two)
    assert abs(found[-1]) <= bound and total > 1.5 * bound, "the run is too short to tell"
    engine.run()
    assert all(request.finish_reason == "length" for request in [*one, *two])


def test_one_client_is_served_in_order_of_arrival(model):
    engine = Engine(model, pages=40, page_size=4, max_running=2)
    requests = submit(engine, "", 6, 5, 4)
    engine.run()
    admitted = [request.admitted for request in requests]
    assert admitted == sorted(admitted) and engine.scheduler.turns.clients == {
        "": Client(6 * (5 * INPUT + 4 * OUTPUT), 30, 24)
    }


def test_a_client_that_was_idle_does_not_catch_up(model):
    """It is lifted to those who wait; else it would be served alone until it had the same sum."""
    engine = Engine(model, pages=80, page_size=4, step_tokens=64, max_running=RUNNING)
    one = submit(engine, "one", 60, 5, 6)
    while sum(request.finished is not None for request in one) < 30:
        engine.step()
    two = submit(engine, "two", 20, 5, 6)
    before = served(one)
    found = differences(engine, one, two)
    assert found[-1] > before - 2 * OUTPUT * RUNNING * 11 and served(two) > 100
    # It is not behind either: its first request is admitted after at most one of the others.
    earlier = [request for request in one if request.admitted is not None]
    last = max(request.admitted for request in earlier)
    assert two[0].admitted < last


def test_a_lift_when_no_one_waits_is_to_the_client_admitted_last(model):
    engine = Engine(model, pages=80, page_size=4, max_running=RUNNING)
    submit(engine, "one", 2, 5, 6)
    engine.run()
    submit(engine, "two", 1, 5, 1)
    turns = engine.scheduler.turns
    assert turns.counter("two") == turns.counter("one") == 2 * (5 * INPUT + 6 * OUTPUT)


def test_a_lift_is_to_the_least_counter_of_those_who_wait():
    turns = Turns()
    turns.clients = {"one": Client(30), "two": Client(10), "idle": Client(2)}
    waiting = [SimpleNamespace(client="one"), SimpleNamespace(client="two")]
    turns.arrive(SimpleNamespace(client="new"), waiting)
    turns.arrive(SimpleNamespace(client="one"), waiting)
    assert turns.counter("new") == 10 and turns.counter("one") == 30
    assert turns.first([*waiting, SimpleNamespace(client="idle")]).client == "idle"


def test_preempted_and_cancelled_requests_count_once(model):
    """A recomputed prompt is not the client's doing; one that was never admitted costs nothing."""
    engine = Engine(model, pages=14, page_size=4, step_tokens=16, max_running=4)
    requests = submit(engine, "one", 3, 9, 14) + submit(engine, "two", 3, 9, 14)
    engine.cancel(requests[-1])
    engine.run()
    assert engine.metrics.preemptions > 0
    counted = engine.scheduler.turns.clients
    assert [counted[name][1:] for name in ("one", "two")] == [(27, 42), (18, 28)]


@pytest.mark.parametrize("client", [None, 7, b"x"])
def test_a_client_is_named_by_text(model, client):
    with pytest.raises(GenerationError, match="client is"):
        Engine(model).submit([1, 2], client=client)
