"""Prefixes and whole prompts that another process has computed, in the engine: equal to the bit, and no page is lost.

One real process prefills for the whole file. Its engine has the same sizes as the one here, so a prompt is cut into the
same chunks, and log-probabilities must be equal in every bit.
"""

import os
import queue
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import handover_peer as other
from engines import all_free, alone
from nanokv.cache import KVCache, make_cache
from nanokv.cache.saving import fingerprint
from nanokv.engine import Engine
from nanokv.engine.prefilled import Prefilled, taken
from nanokv.errors import CapacityError, HandoverError, NanoKVError
from nanokv.inference import prefill
from nanokv.remote import prefill_process
from nanokv.remote.link import SocketLink
from nanokv.remote.prefill_process import PrefillProcess, received

SIZES = {"pages": 40, "page_size": 4, "step_tokens": 7, "max_running": 4}
PATIENCE_S = 20


def started(load, **sizes):
    """(process, what it says, what it has loaded)"""
    news = queue.Queue()
    process = PrefillProcess(load, SIZES | sizes, lambda *message: news.put(message))
    return process, news, process.start()


@pytest.fixture(scope="module")
def model(loaded):
    torch.set_num_threads(1)
    return loaded[0]


@pytest.fixture(scope="module")
def elsewhere(tiny_folder):
    process, news, _ = started(partial(other.load, str(tiny_folder)))
    yield process, news
    process.close()


@pytest.fixture
def ask(elsewhere):
    """ask(ids, salt, start) → Prefilled; afterwards all pages over there are free."""
    process, news = elsewhere
    number = iter(range(1000))

    def ask(ids, salt="", start=0):
        mine = next(number)
        process.ask(mine, ids, salt, start)
        meta, tensors, count, seconds = until(news, lambda meta: meta.get("done") == mine)
        assert count > sum(tensor.nbytes for tensor in tensors.values()) and seconds >= 0
        idle = until(news, lambda meta: "idle" in meta)[0]["idle"]
        assert idle == {"pages": SIZES["pages"], "free": SIZES["pages"]}
        return received(meta, tensors, ids, time.perf_counter())

    return ask


def until(news, right):
    while True:
        message = news.get(timeout=PATIENCE_S)
        if right(message[0]):
            return message


def prompt(seed, tokens):
    return other.ids(seed, 1, tokens)[0].tolist()


def answer(model, ids, engine=None, **options):
    """(tokens, their log-probabilities) of an engine that prefills itself."""
    request = (engine or Engine(model, **SIZES)).submit(
        ids, max_new_tokens=9, eos_token_ids=(), **options
    )
    return request, lambda: (request.tokens, request.logprobs)


# --- the engine only decodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 5, 23])
def test_a_prompt_that_came_prefilled_is_answered_bit_by_bit_the_same(model, ask, tokens):
    engine, own = Engine(model, **SIZES), Engine(model, **SIZES)
    ids = prompt(tokens, tokens)
    sampled = {"temperature": 0.9, "seed": 5, "top_k": 20}
    for options in ({}, sampled):
        _, theirs = answer(model, ids, engine, prefilled=ask(ids), **options)
        _, mine = answer(model, ids, own, **options)
        engine.run()
        own.run()
        assert theirs() == mine() and len(theirs()[0]) == 9
    assert engine.metrics.prefill_tokens == 0 and all_free(engine)


def test_many_at_a_time_in_a_pool_that_is_too_small(model, ask):
    """Preempted requests compute their prompts here; nobody waits for ever, and no page is lost."""
    engine = Engine(model, **SIZES | {"pages": 14})
    prompts = [prompt(30 + i, n) for i, n in enumerate((9, 21, 4, 17, 13))]
    requests = [answer(model, ids, engine, prefilled=ask(ids))[0] for ids in prompts]
    engine.run()
    for ids, request in zip(prompts, requests, strict=True):
        assert request.tokens == alone(model, ids, max_new_tokens=9, eos_token_ids=[])
        assert request.finish_reason == "length"
    assert engine.metrics.preemptions > 0 and all_free(engine)


def test_one_token_is_an_answer_too(model, ask):
    """It is drawn from logits that came, in a step without any work."""
    ids = prompt(3, 9)
    engine = Engine(model, **SIZES)
    request = engine.submit(ids, max_new_tokens=1, prefilled=ask(ids), eos_token_ids=())
    engine.run()
    assert request.tokens == alone(model, ids, max_new_tokens=1, eos_token_ids=[])
    times = request.metrics()
    assert (
        0 <= times["queue_s"] <= times["ttft_s"] <= times["total_s"]
        and engine.metrics.forwards == 0
    )


def test_only_what_is_missing_is_sent(model, ask):
    """The pages of the first turn are here; the rows of the second come, and follow them."""
    talk = prompt(40, 31)
    engine = Engine(model, **SIZES)
    answer(model, talk[:18], engine, prefilled=ask(talk[:18]))
    engine.run()
    rest = ask(talk, start=16)
    assert rest.start == 16 and rest.keys.shape[2] == 15 and rest.reused == 16
    request, _ = answer(model, talk, engine, prefilled=rest)
    engine.run()
    assert request.tokens == alone(model, talk, max_new_tokens=9, eos_token_ids=[])
    assert request.reused_tokens == 16 and engine.metrics.prefill_tokens == 0 and all_free(engine)


def test_what_came_twice_is_kept_once(model, ask):
    """All of a prompt comes, of which pages are here: those of another request that still runs."""
    ids = prompt(45, 22)
    engine = Engine(model, **SIZES)
    ask(ids)
    found = ask(ids)
    first, _ = answer(model, ids, engine, prefilled=found)
    engine.step()
    assert first.reused_tokens == found.reused == 20  # over there
    held = len(engine.pool.free)
    others = [answer(model, ids, engine, prefilled=found)[0], answer(model, ids, engine)[0]]
    engine.step()
    assert held - len(engine.pool.free) == 2  # the last page of each
    assert [other.reused_tokens for other in others] == [
        20,
        20,
    ] and engine.metrics.prefill_tokens == 2
    engine.run()
    assert others[0].tokens == others[1].tokens == first.tokens
    # Of steps with other neighbours.
    assert others[0].logprobs == pytest.approx(first.logprobs, abs=1e-5)
    assert first.tokens == alone(model, ids, max_new_tokens=9, eos_token_ids=[]) and all_free(
        engine
    )


def test_pages_that_were_evicted_meanwhile_are_computed_here(model, ask):
    ids = prompt(41, 18)
    engine = Engine(model, **SIZES)
    request, _ = answer(model, ids, engine, prefilled=ask(ids, start=16))
    engine.run()
    assert request.tokens == alone(model, ids, max_new_tokens=9, eos_token_ids=[])
    assert engine.metrics.prefill_tokens == 18 and all_free(engine)


def test_prefixes_are_shared_under_the_same_salt_only(ask):
    ids = prompt(42, 14)
    assert [ask(ids, salt).reused for salt in ("one", "one", "two", "")] == [0, 12, 0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda found: replace(found, tokens=found.tokens[:-1]),
            "12 tokens were prefilled, which are not the 13 ",
        ),
        (
            lambda found: replace(found, tokens=[9, *found.tokens[1:]]),
            "13 tokens were prefilled, which are not the 13 ",
        ),
        (
            lambda found: replace(found, keys=found.keys[:, :, 1:]),
            r"keys of 13 tokens .* \[3, 2, 12, 32\], not \[3, 2, 13",
        ),
        (
            lambda found: replace(found, values=found.values[:2]),
            "values of 13 tokens from token 0 on have the shape",
        ),
        (
            lambda found: replace(found, keys=found.keys.half()),
            "keys are in torch.float16, this engine computes in",
        ),
        (lambda found: replace(found, logits=found.logits[:, 1:]), "logits have the shape"),
        (lambda found: replace(found, logits=None), "no logits follow the 13 tokens"),
        (
            lambda found: replace(
                found, start=13, keys=found.keys[:, :, :0], values=found.values[:, :, :0]
            ),
            "the shape",
        ),
    ],
)
def test_what_does_not_belong_to_the_prompt_is_refused(model, ask, change, words):
    ids = prompt(43, 13)
    found = change(ask(ids))
    engine = Engine(model, **SIZES)
    with pytest.raises(HandoverError, match=words):
        engine.submit(ids, prefilled=found)
    assert engine.idle and len(engine.pool.free) == SIZES["pages"]


def test_a_cancelled_request_gives_its_pages_back(model, ask):
    ids = prompt(44, 13)
    engine = Engine(model, **SIZES)
    requests = [answer(model, ids, engine, prefilled=ask(ids))[0] for _ in range(3)]
    engine.cancel(requests[0])
    engine.step()
    engine.cancel(requests[1])
    engine.run()
    assert requests[2].tokens == alone(model, ids, max_new_tokens=9, eos_token_ids=[]) and all_free(
        engine
    )


# --- prefixes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["memory", "file"])
@pytest.mark.parametrize(
    "spec", [("dict", {}), ("paged", {"page": 3}), ("static", {}), ("offloaded", {})]
)
def test_a_received_prefix_becomes_pages_of_the_index(model, spec, way, tmp_path):
    """A request that begins with it computes only the rest; one of another salt computes all."""
    name, options = spec
    cache, tokens = other.filled(model, "chunked", name, options)
    cache.tokens = tokens
    if way == "file":
        cache.save(tmp_path / "prefix", tokens)
        cache = KVCache.load(tmp_path / "prefix", model.config)
    ids = [*tokens, *prompt(50, 6)]
    engine = Engine(model, **SIZES)
    assert engine.add_prefix(cache, salt="a") == 20
    assert len(engine.pool.free) == SIZES["pages"] - 5
    request, _ = answer(model, ids, engine, salt="a")
    stranger, _ = answer(model, ids, engine, salt="b")
    engine.run()
    assert (request.reused_tokens, stranger.reused_tokens) == (20, 0)
    assert engine.metrics.prefill_tokens == len(ids) - 20 + len(ids)
    assert (
        request.tokens == stranger.tokens == alone(model, ids, max_new_tokens=9, eos_token_ids=[])
    )
    assert engine.add_prefix(cache, salt="a") == 20 and all_free(engine)


def test_a_prefix_of_the_same_chunks_is_equal_to_the_bit(model):
    """The engine that has computed its own prefix and the one that was given it."""
    start, rest = prompt(51, 12), prompt(52, 9)
    own, given = Engine(model, **SIZES), Engine(model, **SIZES)
    answer(model, start, own)
    own.run()
    cache = make_cache("dict", model.config)
    prefill(model, [start[:7]], cache)
    prefill(model, [start[7:]], cache, 7)  # the chunks of step_tokens=7
    cache.tokens = start
    assert given.add_prefix(cache) == 12
    one, two = (answer(model, start + rest, engine)[1] for engine in (own, given))
    own.run()
    given.run()
    assert one() == two()


def test_a_prefix_that_cannot_be_used_changes_nothing(model):
    engine = Engine(model, **SIZES | {"pages": 4})
    cache, tokens = other.filled(model, "chunked", "dict", {})
    with pytest.raises(NanoKVError, match="the prompt is empty"):
        engine.add_prefix(cache)
    cache.tokens = tokens
    with pytest.raises(CapacityError, match="6 pages of 4 tokens wanted, 4 of 4 free"):
        engine.add_prefix(cache)
    cache.tokens = tokens[:-1]
    with pytest.raises(HandoverError, match="20 tokens were passed for"):
        engine.add_prefix(cache)
    for name in ("quantized", "sliding"):
        cache, tokens = other.filled(
            model, "chunked", name, {"window": 6} if name == "sliding" else {}
        )
        cache.tokens = tokens
        with pytest.raises(HandoverError, match=f"which a {name} cache does not keep"):
            engine.add_prefix(cache)
    assert all_free(engine)


def test_a_prefix_shorter_than_a_page_is_none(model):
    cache = make_cache("dict", model.config)
    prefill(model, [prompt(1, 3)], cache)
    cache.tokens = prompt(1, 3)
    engine = Engine(model, **SIZES)
    assert engine.add_prefix(cache) == 0 and len(engine.pool.free) == SIZES["pages"]


def test_taken_leaves_out_what_the_other_has(model):
    cache, tokens = other.filled(model, "chunked", "paged", {"page": 4})
    all_of_it, rest = taken(cache, tokens), taken(cache, tokens, 16)
    assert torch.equal(all_of_it.keys[:, :, 16:], rest.keys) and torch.equal(
        all_of_it.values[:, :, 16:], rest.values
    )
    assert rest.nbytes == 2 * 3 * 2 * 5 * 32 * 4 and isinstance(rest, Prefilled)


def test_rows_of_a_whole_prompt_begin_with_its_first_token(model):
    cache, tokens = other.filled(model, "whole", "dict", {})
    rows = taken(cache, tokens)
    assert rows.start == rows.reused == 0
    Prefilled(tokens, rows.keys, rows.values).check(model.config, torch.float32)
    with pytest.raises(HandoverError, match=re.escape("from token 1 on have the shape [3, 2, 13,")):
        replace(rows, start=1).check(model.config, None)


# --- the process ----------------------------------------------------------------------------------------------------


def test_it_says_what_it_has_loaded_and_ends_when_it_is_closed(model, tiny_folder):
    process, news, facts = started(partial(other.load, str(tiny_folder)))
    assert facts == {"config": model.config.to_dict(), "weights": fingerprint(model)}
    # Of the terminal: they mean the program that started it.
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(process.pid, number)
    process.ask(1, prompt(1, 5), "", 0)
    assert until(news, lambda meta: "done" in meta or "lost" in meta)[0]["done"] == 1
    began = time.monotonic()
    process.close()
    process.close()
    assert time.monotonic() - began < 5 and process._process.exitcode == 0 and not process.alive
    assert all("lost" not in message[0] for message in list(news.queue))


def test_it_says_that_it_lives_while_it_loads_and_while_it_waits(model, monkeypatch):
    """Who started it takes silence for its end."""
    exits, loading = [], threading.Event()
    monkeypatch.setattr(prefill_process, "BEAT_S", 0.01)
    monkeypatch.setattr(os, "_exit", exits.append)

    def load():
        assert loading.wait(PATIENCE_S)
        return model, "its weights"

    with socket.create_server(("127.0.0.1", 0)) as door:
        arguments = load, SIZES, door.getsockname()[1], bytes(32)
        thread = threading.Thread(target=prefill_process.run, args=arguments, daemon=True)
        thread.start()
        words = prefill_process.Words(SocketLink(door.accept()[0], 5.0))
    words.link.read(torch.empty(32, dtype=torch.uint8))
    assert [words.hear()[0] for _ in "ab"] == [{"beat": True}] * 2
    loading.set()
    heard = [words.hear()[0]]
    while "ready" not in heard[-1]:
        heard.append(words.hear()[0])
    assert heard[-1]["ready"]["weights"] == "its weights"
    assert words.hear()[0] == {"beat": True}
    words.link.close()
    thread.join(PATIENCE_S)
    assert exits == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "words"),
    [
        (partial(other.fails, "no such model"), "the prefill process: no such model"),
        (
            partial(other.ends, 3),
            "the prefill process has not become ready: the other process has gone",
        ),
        (partial(other.load, "/nowhere"), "the prefill process: "),
    ],
)
def test_one_that_cannot_load_is_an_error_and_leaves_no_process(load, words):
    process = PrefillProcess(load, SIZES, print)
    with pytest.raises(NanoKVError, match=words):
        process.start()
    assert process._process.exitcode is not None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_is_killed_or_stopped_is_lost_within_seconds(tiny_folder, number):
    news = queue.Queue()
    load = partial(other.load, str(tiny_folder), 0.2)
    process = PrefillProcess(load, SIZES, lambda *message: news.put(message), silence_s=5.0)
    process.start()
    try:
        process.ask(1, prompt(1, 60), "", 0)
        time.sleep(0.5)
        os.kill(process.pid, number)
        began = time.monotonic()
        meta, *_ = until(news, lambda meta: "lost" in meta or "done" in meta)
        assert "lost" in meta and time.monotonic() - began < 8 and not process.alive
        process.ask(2, prompt(1, 5), "", 0)  # goes nowhere, and waits for nobody
    finally:
        process.close()
    assert process._process.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_prompt_that_is_cancelled_half_way_gives_its_pages_back(tiny_folder):
    process, news, _ = started(partial(other.load, str(tiny_folder), 0.2))
    try:
        process.ask(1, prompt(1, 60), "", 0)
        time.sleep(0.5)
        process.cancel(1)
        meta, *_ = until(news, lambda meta: "idle" in meta or "done" in meta)
        assert meta == {"idle": {"pages": 40, "free": 40}}
        process.ask(2, prompt(2, 5), "", 0)
        assert until(news, lambda meta: "done" in meta)[0]["done"] == 2
        process.ask(3, prompt(3, 400), "", 0)  # more than its pool has pages for
        assert until(news, lambda meta: "failed" in meta)[0] == {"failed": 3}
    finally:
        process.close()


def test_one_that_ends_before_it_is_ready_is_an_error(monkeypatch):
    """As a process that has no memory for its model."""
    ended = []

    class Ends:
        """A process that connects, and is gone."""

        pid = 1

        def __init__(self, target, args, daemon):
            self.port, self.secret = args[2:]

        def start(self):
            link = SocketLink(socket.create_connection(("127.0.0.1", self.port)))
            link.write(torch.tensor(list(self.secret), dtype=torch.uint8))
            link.close()

        def join(self, timeout=None):
            ended.append(timeout)

        kill = join

    monkeypatch.setattr(prefill_process, "get_context", lambda how: SimpleNamespace(Process=Ends))
    process = PrefillProcess(other.load, SIZES, print)
    with pytest.raises(NanoKVError, match="has not become ready: the other process") as raised:
        process.start()
    assert type(raised.value) is NanoKVError and ended and not process.alive


def test_a_stranger_at_the_door_is_sent_away():
    """Any user of the machine can connect to the loopback."""
    process = PrefillProcess(other.load, SIZES, print)
    process._process = SimpleNamespace(is_alive=lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as door:
        stranger, friend = (socket.create_connection(door.getsockname()) for _ in "ab")
        stranger.sendall(b"x" * 32)
        SocketLink(friend).write(torch.full((32,), 7, dtype=torch.uint8))
        found = process._accepted(door, bytes([7] * 32))
        assert found.getpeername() == friend.getsockname()
        assert stranger.recv(1) == b""
        for end in (stranger, friend, found):
            end.close()
