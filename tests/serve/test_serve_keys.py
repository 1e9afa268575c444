"""Keys share places and turns: one with 90 clients leaves another its half, and each sees its own part."""

import contextlib
import json
import random
import threading
import time

import pytest

from asking import asked
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.run.admission import Admission
from nanokv.engine.turns import OUTPUT, Client
from serving import CHAT, Serving, ask, error

PLACES = 16
RUNNING = 4
NEW = 6
BODY = ask(max_tokens=NEW, ignore_eos=True)


def key(name):
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
def keyed(loaded):
    with Serving(
        *loaded, keys=["busy", "quiet"], running=RUNNING, queue=PLACES - RUNNING
    ) as server:
        yield server


def salts(server):
    return list(server.app.keys.numbers)


def counts(server) -> list[Client]:
    clients = server.engine.scheduler.turns.clients
    return [clients.get(salt, Client()) for salt in salts(server)]


def live(server, name) -> dict:
    """The first event of /live."""
    connection = server.send("GET", "/live", headers=key(name))
    with contextlib.closing(connection):
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
    raise AssertionError("no event")


def metrics(server) -> dict[str, float]:
    text = server.raw("GET", "/metrics", headers=key("quiet"))[2].decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("nanokv_key")]
    return {name: float(value) for name, value in lines}


# --- places -----------------------------------------------------------------------------------------------------------


def refused(admission, key, number=1) -> str:
    with pytest.raises(ApiError) as found:
        admission.open(key=key, number=number)
    assert found.value.status == 429 and found.value.code == "queue_full"
    return str(found.value)


def test_a_key_alone_has_all_places_and_leaves_the_next_one_its_half():
    admission = Admission(10)
    busy = [admission.open(key="busy")[0] for _ in range(10)]
    assert "10 requests run or wait, which is the limit" in refused(admission, "busy")
    quiet = [admission.open(key="quiet")[0] for _ in range(5)]
    assert "this key has 5 places and asks for 1 more, its share is 5 of 10" in refused(
        admission, "quiet"
    )
    for ticket in busy[:5]:
        refused(admission, "busy")  # its places beyond the half are not given out again
        admission.leave(ticket)
    refused(admission, "busy")
    admission.leave(quiet.pop())
    busy.append(admission.open(key="busy")[0])  # a place that no one needs
    refused(admission, "busy")
    admission.open(key="quiet")
    assert admission.share("quiet") == (5, 5) and admission.share("busy") == (6, 5)


def test_answers_of_one_request_count_one_by_one():
    admission = Admission(10)
    admission.open(key="busy", number=10)
    first = admission.open(key="quiet")
    assert len(admission.open(key="quiet", number=5, held=first)) == 5
    admission = Admission(10)
    admission.open(key="busy", number=10)
    first = admission.open(key="quiet")
    with pytest.raises(ApiError, match="asks for 5 more"):
        admission.open(key="quiet", number=6, held=first)
    assert admission.share("quiet").taken == 1, "all of them or none"


def test_a_request_keeps_the_places_that_it_has():
    """The second call comes when its prompt is known; its key's share may have shrunk meanwhile."""
    admission = Admission(4)
    busy = [admission.open(key="busy") for _ in range(4)]
    admission.open(key="quiet")
    assert admission.open(key="busy", held=busy[0]) == busy[0]


def test_more_keys_than_places_get_one_each():
    admission = Admission(2)
    for name in "abcde":
        admission.open(key=name)
        if len(admission.tickets) > 2:
            refused(admission, name)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_of_all_places_holds_whoever_comes_and_goes(seed):
    """P · (1 + 1/2 + … + 1/k), and a key below its share is never refused."""
    dice = random.Random(seed)
    admission = Admission(12)
    most = sum(12 / j for j in range(1, 5))
    highest = 0
    for _ in range(3000):
        name = dice.choice("abcd")
        if dice.random() < 0.6:
            share = admission.share(name)
            with contextlib.suppress(ApiError):
                admission.open(key=name)
            assert share.taken >= share.places or admission.share(name).taken == share.taken + 1
        else:
            for ticket in [one for one in admission.tickets.values() if one.key == name][:9]:
                admission.leave(ticket)
        highest = max(highest, len(admission.tickets))
    assert 12 < highest <= most


# --- turns ------------------------------------------------------------------------------------------------------------


def test_a_key_that_came_first_with_all_places_leaves_half_of_the_tokens(keyed):
    """Both have answers that wait, from the first step on that this looks at, until the last of `quiet` is admitted."""
    both = []
    step = keyed.engine.step

    def watched():
        done = step()
        waiting = {request.client for request in keyed.engine.scheduler.waiting}
        if waiting == set(salts(keyed)):
            both.append(counts(keyed))
        return done

    keyed.engine.step = watched
    with keyed.held(), contextlib.ExitStack() as stack:
        busy = [stack.enter_context(asked(keyed, BODY, CHAT, key("busy"))) for _ in range(PLACES)]
        keyed.wait(lambda: len(keyed.tickets) == PLACES)
        keyed.wait(lambda: all(ticket.submitted for ticket in keyed.tickets))
        status, found = keyed.post(CHAT, BODY, key("busy"))
        assert status == 429 and error(found)["code"] == "queue_full"
        quiet = [stack.enter_context(asked(keyed, BODY, CHAT, key("quiet"))) for _ in range(8)]
        keyed.wait(lambda: len(keyed.tickets) == PLACES + 8)
        status, found = keyed.post(CHAT, BODY, key("quiet"))
        assert status == 429 and "its share is 8 of 16" in error(found)["message"]
        keyed.wait(lambda: all(ticket.submitted for ticket in keyed.tickets))
        keyed.gate.set()
        keyed.wait(lambda: all([*busy, *quiet]))
    assert [one[0][0] for one in [*busy, *quiet]] == [200] * (PLACES + 8)
    prompt = both[0][0].prompt_tokens // RUNNING
    one, two = (last.counter - first.counter for first, last in zip(both[0], both[-1], strict=True))
    assert abs(one - two) <= 2 * OUTPUT * RUNNING * (prompt + NEW)
    # In order of arrival, `quiet` would have had nothing until the end.
    assert two > 0.35 * (one + two) and two > 100


def test_90_clients_in_a_loop_leave_another_key_its_half(keyed):
    ended = threading.Event()
    statuses = {"busy": [], "quiet": []}

    def loop(name, rounds):
        for _ in range(rounds):
            if ended.is_set():
                return
            status = keyed.post(CHAT, BODY, key(name))[0]
            statuses[name].append(status)
            if status == 429:
                time.sleep(0.2)  # the server says 1 s

    threads = [threading.Thread(target=loop, args=("busy", 10_000)) for _ in range(90)]
    quiet = [threading.Thread(target=loop, args=("quiet", 3)) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        keyed.wait(lambda: 429 in statuses["busy"])
        before = counts(keyed)
        for thread in quiet:
            thread.start()
        for thread in quiet:
            thread.join(60)
        after = counts(keyed)
    finally:
        ended.set()
        for thread in threads:
            thread.join(20)
    assert statuses["quiet"] == [200] * 24 and 429 in statuses["busy"]
    one, two = (
        last.new_tokens - first.new_tokens for first, last in zip(before, after, strict=True)
    )
    assert two == 24 * NEW and two > 0.3 * (one + two), (one, two)


# --- who sees what ----------------------------------------------------------------------------------------------------


def test_metrics_number_the_keys_and_live_shows_the_own_one(keyed):
    for _ in range(2):
        assert keyed.post(CHAT, BODY, key("busy"))[0] == 200
    with keyed.held(), contextlib.ExitStack() as stack:
        stack.enter_context(asked(keyed, BODY, CHAT, key("quiet")))
        keyed.wait(lambda: keyed.entered)
        keyed.gate.set()
    keyed.wait(lambda: keyed.free)
    found = metrics(keyed)
    assert found['nanokv_key_generated_tokens_total{key="1"}'] == 2 * NEW
    assert found['nanokv_key_generated_tokens_total{key="2"}'] == NEW
    prompts = [found[f'nanokv_key_prompt_tokens_total{{key="{i}"}}'] for i in (1, 2)]
    assert prompts[0] == 2 * prompts[1] > 0
    assert found['nanokv_key_places{key="1"}'] == found['nanokv_key_places{key="2"}'] == 0
    assert not {"busy", "quiet", *salts(keyed)} & set(str(found).split('"'))
    seen = live(keyed, "busy")
    assert seen["key"] == {
        "prompt_tokens": prompts[0],
        "generated_tokens": 2 * NEW,
        "places": 0,
        "share": PLACES,
    }
    assert "clients" not in seen and not any(salt in json.dumps(seen) for salt in salts(keyed))


def test_the_places_of_both_keys_while_they_have_answers(keyed):
    with contextlib.ExitStack() as stack:
        step = keyed.engine.step
        keyed.engine.step = lambda: (time.sleep(0.02), step())[1]
        body = BODY | {"max_tokens": 60}
        for name in ("busy", "busy", "quiet"):
            stack.enter_context(asked(keyed, body, CHAT, key(name)))
        keyed.wait(lambda: len(keyed.tickets) == 3)
        found = metrics(keyed)
        assert [found[f'nanokv_key_places{{key="{i}"}}'] for i in (1, 2)] == [2, 1]
        seen = live(keyed, "quiet")["key"]
        assert (seen["places"], seen["share"]) == (1, PLACES // 2)
