"""`nanokv serve --prefill-worker`: prompts are computed by another process, and every answer is the one without it.

One server with the process and one without answer the same requests. The engine here must compute no prompt; what it
reuses, cancels and leaves behind is counted on both sides.
"""

import concurrent.futures
import json
import os
import re
import signal
import socket
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import handover_peer as other
from nanokv.apps.serve.run.prefill import AHEAD, Elsewhere
from nanokv.cache.prefix import INDEXES
from nanokv.cache.saving import fingerprint
from nanokv.engine import Engine
from nanokv.errors import NanoKVError
from served_command import ended, send, serving
from serving import CHAT, TEXT, Serving, ask, chunks, error

QUESTIONS = [
    "Who are you?",
    "My name is Zorbla.",
    "What is my name?",
    "Once upon a time",
    "The cache holds one key",
]
PAGE = 4
SIZES = {"pages": 300, "page_size": PAGE, "step_tokens": 256, "max_running": 8}


def with_process(folder, slow_s=0.0, weights=None, **sizes):
    """For Serving: prompts are prefilled by a process that has loaded this folder."""

    def make(engine):
        load = partial(other.load, str(folder), slow_s)
        elsewhere = Elsewhere(engine, load, SIZES | sizes, weights or fingerprint(engine.model))
        elsewhere.load()
        return elsewhere

    return make


@pytest.fixture(scope="module")
def both(loaded, tiny_folder):
    """(with the process, without)"""
    torch.set_num_threads(1)
    with (
        Serving(*loaded, prefills=with_process(tiny_folder), keys=("one", "two")) as server,
        Serving(*loaded, keys=("one", "two")) as plain,
    ):
        yield server, plain


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test: no request, no place, no page here, and none over there."""
    yield
    if "both" in request.fixturenames:
        server = request.getfixturevalue("both")[0]
        server.wait(lambda: server.free and nobody_waits(server))
        server.wait(lambda: metrics(server)["prefill_worker_pages_free"] == SIZES["pages"])


def nobody_waits(server) -> bool:
    """For the process."""
    return not (server.prefills.asked or server.prefills.waiting)


def key(name="one"):
    return {"authorization": f"Bearer {name}"}


def metrics(server, headers=None) -> dict[str, float]:
    """nanokv_X and nanokv_X_total as X."""
    text = server.raw("GET", "/metrics", headers=headers or key())[2].decode()
    return {
        name.removesuffix("_total"): float(value)
        for name, value in re.findall(r"^nanokv_(\w+) ([\d.e+-]+)$", text, re.MULTILINE)
    }


def said(server, path, body, headers=None):
    """An answer without what is never the same: ids, seconds."""
    status, found = server.post(path, body, headers or key())
    assert status == 200, found
    return {name: found[name] for name in ("choices", "usage", "seed")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "seed": 7},
        {"temperature": 0.8, "seed": 3, "n": 3},
        {"logprobs": True, "top_logprobs": 3},
        {"max_tokens": 1},
        {"stop": ["e"]},
        {"response_format": {"type": "json_object"}, "max_tokens": 30},
    ],
    ids=str,
)
def test_answers_are_those_of_a_server_without_the_process(both, fields):
    server, plain = both
    before = metrics(server)
    for question in QUESTIONS:
        body = ask(question, **{"max_tokens": 12} | fields)
        assert said(server, CHAT, body) == said(plain, CHAT, body)
    assert metrics(server)["prefill_tokens"] == before["prefill_tokens"] == 0


def test_completions_echo_and_several_prompts(both):
    server, plain = both
    for body in (
        {"prompt": QUESTIONS, "max_tokens": 5, "n": 2, "seed": 1, "temperature": 1.0},
        {"prompt": "The cache", "max_tokens": 4, "echo": True, "logprobs": 2},
        {"prompt": "The cache", "max_tokens": 0, "echo": True, "logprobs": 0},
        {"prompt": [5, 9, 300], "max_tokens": 3},
    ):
        assert said(server, TEXT, body) == said(plain, TEXT, body)


def test_a_stream_is_the_whole_answer(both):
    server, plain = both
    body = ask(QUESTIONS[3], max_tokens=14)
    events = chunks(server.stream(CHAT, body, key()))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == said(plain, CHAT, body)["choices"][0]["message"]["content"]
    timings = server.post(CHAT, body, key())[1]["timings"]
    assert timings["queue_s"] >= 0 and timings["total_s"] > 0


def test_32_at_a_time_are_not_mixed_up(both):
    server, plain = both
    bodies = [
        ask(f"{QUESTIONS[i % 5]} {i}", max_tokens=6, seed=i, temperature=float(i % 2))
        for i in range(32)
    ]
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda body: said(server, CHAT, body)["choices"], bodies))
    assert found == [said(plain, CHAT, body)["choices"] for body in bodies]
    assert metrics(server)["prefill_tokens"] == 0


def test_beginnings_are_reused_under_one_key_and_only_what_is_missing_is_sent(both):
    server, _ = both
    text = "Zorbla and Zorbla met a cache of keys and values. " * 4
    counts = []
    for name in ("one", "one", "two"):
        before = metrics(server)
        usage = said(server, TEXT, {"prompt": text, "max_tokens": 3}, key(name))["usage"]
        after = metrics(server)
        counts.append(
            (
                usage["prompt_tokens_details"]["cached_tokens"],
                after["handover_bytes"] - before["handover_bytes"],
            )
        )
    (first, sent), (second, less), (third, more) = counts
    tokens, row = usage["prompt_tokens"], 2 * 3 * 2 * 32 * 4
    assert (first, third) == (0, 0) and second == (tokens - 1) // PAGE * PAGE
    # Keys, values, logits of 320 ids, a header.
    assert 0 < sent - tokens * row < 4_000 and abs(more - sent) < 100
    assert 0 < less - (tokens - second) * row < 4_000


def test_metrics_count_what_was_handed_over(both):
    server, plain = both
    before = metrics(server)
    said(server, CHAT, ask("Count me", max_tokens=2, n=3))
    after = metrics(server)
    change = {name: after[name] - before[name] for name in after}
    assert change["handover_prompts"] == 1  # for three answers
    assert (
        change["handover_bytes"] > 0
        and 0 < change["handover_seconds"] < 5
        and change["handover_lost"] == 0
    )
    assert after["prefill_worker_up"] == 1 and after["prefills_waiting"] == 0
    assert not any(
        name.startswith(("handover", "prefill_worker", "prefills")) for name in metrics(plain)
    )


def test_what_is_refused_is_refused_as_without_it(both):
    for body in (
        ask("x " * 600),
        ask("Hi", model="no such"),
        {"prompt": []},
        ask("Hi", max_tokens=-1),
    ):
        path = TEXT if "prompt" in body else CHAT
        (status, mine), (other_status, theirs) = (one.post(path, body, key()) for one in both)
        assert (status, error(mine)) == (other_status, error(theirs)) and status >= 400


# --- a slow one -------------------------------------------------------------------------------------------------------


# Over 100 tokens, 16 of them in a step.
LONG = "one two three four five six seven eight nine ten " * 8


@pytest.fixture
def slow(loaded, tiny_folder):
    """Its process needs 0.1 s for each step of 16 tokens."""
    torch.set_num_threads(1)
    with Serving(*loaded, prefills=with_process(tiny_folder, 0.1, step_tokens=16)) as server:
        yield server


def until_asked(server, count=1):
    server.wait(lambda: len(server.prefills.asked) >= count)
    time.sleep(0.2)


@pytest.mark.slow
def test_a_client_that_leaves_during_the_prefill_frees_both_sides(slow):
    connections = [
        slow.send("POST", CHAT, ask(f"{i} {LONG}", stream=i % 2 == 0)) for i in range(AHEAD + 2)
    ]
    until_asked(slow, AHEAD)
    assert metrics(slow)["prefills_waiting"] == AHEAD + 2 and len(slow.prefills.asked) == AHEAD
    for connection in connections:
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    slow.wait(lambda: slow.free and nobody_waits(slow))
    slow.wait(lambda: metrics(slow)["prefill_worker_pages_free"] == SIZES["pages"])
    assert metrics(slow)["handover_prompts"] == 0
    began = time.monotonic()
    assert (
        slow.post(CHAT, ask("Hi", max_tokens=2))[0] == 200 and metrics(slow)["prefill_tokens"] == 0
    )
    # The others' prompts, over 400 tokens in steps of 16, were not completed.
    assert time.monotonic() - began < 2


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_when_the_process_is_killed_prompts_are_prefilled_here(slow, loaded, stream):
    body = ask(LONG, max_tokens=6)
    with concurrent.futures.ThreadPoolExecutor(AHEAD + 2) as pool:
        send = (lambda: slow.stream(CHAT, body)) if stream else (lambda: slow.post(CHAT, body)[1])
        asked = [pool.submit(send) for _ in range(2)]
        others = [
            pool.submit(slow.post, CHAT, ask(f"{i} {LONG}", max_tokens=2)) for i in range(AHEAD)
        ]
        until_asked(slow, AHEAD)
        began = time.monotonic()
        os.kill(slow.prefills.process.pid, signal.SIGKILL)
        found = [one.result(20) for one in asked]
        assert [one.result(20)[0] for one in others] == [
            200
        ] * AHEAD and time.monotonic() - began < 25  # not after 30 s of silence
    with Serving(*loaded) as plain:
        text = plain.post(CHAT, body)[1]["choices"][0]["message"]["content"]
    said = [
        "".join(e["choices"][0]["delta"].get("content") or "" for e in chunks(one))
        if stream
        else one["choices"][0]["message"]["content"]
        for one in found
    ]
    assert said == [text] * 2
    counts = metrics(slow)
    assert (
        counts["prefill_worker_up"] == 0
        and counts["handover_lost"] == AHEAD + 2
        and counts["prefill_tokens"] > 0
    )
    assert slow.post(CHAT, ask("Hi", max_tokens=2))[0] == 200 and slow.free
    # Later ones never were its own.
    assert counts["handover_lost"] == metrics(slow)["handover_lost"]


@pytest.mark.slow
def test_a_server_that_ends_tells_those_who_wait_and_ends_its_process(loaded, tiny_folder):
    with Serving(
        *loaded, prefills=with_process(tiny_folder, 0.5, step_tokens=4), grace=0.2
    ) as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, CHAT, ask(LONG))
            until_asked(server)
            began = time.monotonic()
            server.stop.set()
            status, found = asked.result(20)
    assert (status, error(found)["code"]) == (503, "shutting_down")
    assert time.monotonic() - began < 15 and server.prefills.process._process.exitcode is not None


# --- one that says what it should not: our bug over there, or a damaged memory ----------------------------------------


class Dead:
    """In the place of the process."""

    def kill(self):
        self.killed = True


def rows(tokens=5, config=None, **changes):
    """(what is said of a prompt of so many tokens, its tensors) → the same with changes."""
    c = config
    keys = torch.ones(c.num_hidden_layers, c.num_key_value_heads, tokens, c.head_dim)
    meta, tensors = (
        {"done": 1, "start": 0, "reused": 0},
        {"keys": keys, "values": keys, "logits": torch.ones(1, 320)},
    )
    return {name: changes.get(name, x) for name, x in meta.items()}, {
        n: changes.get(n, x) for n, x in tensors.items()
    }


@pytest.mark.parametrize(
    "change",
    [
        {"keys": torch.ones(3, 2, 6, 32)},
        {"values": torch.ones(3, 2, 5, 32).double()},
        {"logits": torch.ones(1, 7)},
        {"values": torch.full((3, 2, 5, 32), torch.nan)},
        {"start": 1 << 40},
        {"start": "0"},
        {"done": [1]},
        {"start": -1, "keys": torch.ones(3, 2, 6, 32), "values": torch.ones(3, 2, 6, 32)},
        None,
    ],
    ids=lambda change: "-".join(change or ["nothing"]),
)
def test_what_is_not_the_prompts_is_computed_here_and_the_process_ended(loaded, change):
    """The engine's thread ended, or a client was told that its messages have the wrong shape."""
    engine = Engine(loaded[0], **SIZES)
    elsewhere, entered = Elsewhere(engine, None, SIZES, ""), []
    elsewhere.process = Dead()
    elsewhere.process.killed, elsewhere.process.alive = False, True
    elsewhere.start(elsewhere.take)
    submit = SimpleNamespace(opened=0.0)
    for message in (
        rows(5, engine.config),
        rows(5, engine.config, **change) if change else ({"hello": 1}, {}),
    ):
        elsewhere.asked[1] = ("", (1, 2, 3, 4, 5)), [submit]
        elsewhere._news(*message, 0, 0.0)
        entered += [prefilled for _, prefilled in elsewhere.ready()]
    assert entered[0].keys.shape == (3, 2, 5, 32) and entered[1:] == [None]
    assert elsewhere.process.killed and elsewhere.state["handover_lost"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("lie", other.LIES)
def test_a_server_goes_on_with_right_answers(loaded, tiny_folder, lie):
    """An exabyte that was announced ended the thread that reads, and everybody waited for ever."""
    torch.set_num_threads(1)

    def make(engine):
        elsewhere = Elsewhere(
            engine, partial(other.lies, str(tiny_folder), lie), SIZES, fingerprint(engine.model)
        )
        elsewhere.load()
        return elsewhere

    with Serving(*loaded) as plain, Serving(*loaded, prefills=make) as server:
        for question in QUESTIONS[:2]:
            body = ask(question, max_tokens=6)
            status, found = server.post(CHAT, body)
            assert status == 200 and found["choices"] == plain.post(CHAT, body)[1]["choices"]
        assert (
            server.admission.closed is None and server.free and metrics(server)["handover_lost"] > 0
        )


@pytest.mark.slow
def test_a_process_with_other_weights_is_refused(loaded, tiny_folder):
    with pytest.raises(NanoKVError, match="has loaded another model: its weights differ"):
        with_process(tiny_folder, weights="0123456789abcdef")(Serving(*loaded).engine)


# --- the command ------------------------------------------------------------------------------------------------------


def children(pid) -> list[int]:
    """Of a process, by /proc."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += [int(child) for child in file.read().split()]
    return found


def gone(pids, within=10.0):
    until = time.monotonic() + within
    while alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}") and state(pid) != "Z"]:
        assert time.monotonic() < until, f"still there: {alive}"
        time.sleep(0.05)


def state(pid) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize(("cache", "index"), [("prefix", "hash"), ("prefix:index=radix", "radix")])
def test_the_process_finds_pages_as_the_server_does(cli, monkeypatch, tiny_folder, cache, index):
    """The command, up to the process that it would start; the banner names an index that was chosen."""
    made = []

    def stop(engine, load, sizes, weights):
        made.append((engine.pool.index, Engine(engine.model, **sizes).pool.index))
        raise NanoKVError("no process in this test")

    monkeypatch.setattr("nanokv.apps.serve.run.prefill.Elsewhere", stop)
    flags = ("--prefill-worker", "--port", "0", "--pages", "64", "--cache", cache)
    code, out, err = cli("serve", "-m", tiny_folder, *flags)
    assert (code, out) == (2, "") and "no process in this test" in err
    assert f" · cache {cache} · " in err
    assert [type(one) for one in made[0]] == [INDEXES[index]] * 2


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_command_starts_the_process_and_takes_it_along(endless_folder, number):
    with serving(endless_folder, "--prefill-worker", "--pages", "64", "--context", "512") as (
        process,
        port,
    ):
        pids = children(process.pid)
        answer = json.loads(send(port, ask("Hi", max_tokens=3)).getresponse().read())
        assert answer["usage"]["completion_tokens"] == 3
        text = send(port, None, "GET", "/metrics").getresponse().read().decode()
        assert (
            "nanokv_prefill_tokens_total 0.0" in text
            and "nanokv_handover_prompts_total 1.0" in text
        )
        process.send_signal(number)
        assert (
            ended(process) == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
        )
        assert pids and "Traceback" not in process.stderr.read()
        gone(pids)
