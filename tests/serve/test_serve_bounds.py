"""Limits for one client: connections, descriptors, log lines, memory, the tokenizer's time."""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import resource
import socket
import sys
import threading
import time

import pytest

from asking import asked
from nanokv.apps.cli.commands.serve import Log
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.serve.api import prompts
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.http import connections, lanes
from nanokv.apps.serve.http.connections import Listener, Places, Seldom, address_of
from nanokv.apps.serve.http.server import SWITCH_S, share_the_interpreter
from nanokv.errors import NanoKVError
from serving import CHAT, TEXT, Serving, ask, error

# --- connections ------------------------------------------------------------------------------------------------------


def connect(server, source="127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10, (source, 0))


def refusal(raw) -> dict:
    """The error that the server sends to a client that has sent nothing, before it closes."""
    head, _, body = raw.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1" in head
    return error(json.loads(body))


def test_a_refused_connection_is_told_and_closed_before_it_asks(loaded, monkeypatch):
    monkeypatch.setattr(connections, "address_of", lambda peer: str(peer))
    with Serving(*loaded, connections=3) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(server))
        server.wait(lambda: server.server.server_state.places.open.total() == 3)
        for _ in range(4):
            with connect(server) as one:
                found = refusal(one)
                assert found["code"] == "overloaded"
                assert found["message"] == "3 connections are open, which is the limit"
        assert len(server.server.server_state.connections) == 3, "the refused ones are gone"
        stack.close()
        server.wait(lambda: not server.server.server_state.places.open)
        assert server.get("/health")[0] == 200


def test_silent_connections_of_one_address_keep_no_other_out(loaded):
    with Serving(*loaded, connections=8, queue=0, running=1) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(connect(server, "127.0.0.2"))
            server.wait(lambda: server.server.server_state.places.open["127.0.0.2"] == 2)
            with connect(server, "127.0.0.2") as third:
                assert refusal(third)["message"].startswith("2 connections of one address are open")
            assert server.get("/health")[0] == 200
        server.wait(lambda: not server.server.server_state.places.open)


@pytest.mark.parametrize(
    ("most", "requests", "each"),
    [(1_000, 80, 250), (1_000, 320, 320), (1_000, 5_000, 750), (8, 80, 6), (1, 80, 1)],
)
def test_an_address_has_places_for_all_requests_and_never_all_places(most, requests, each):
    places = Places(most, requests)
    for _ in range(each):
        places.take("a")
    with pytest.raises(ApiError, match="which is the limit"):
        places.take("a")
    if most > 1:
        places.take("b")
    for _ in range(each):
        places.leave("a")
    assert set(places.open) <= {"b"}


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8::1:2:3:4", 5, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (None, ""),
        ("", ""),
    ],
)
def test_a_host_is_counted_by_what_it_cannot_choose(peer, address):
    assert address_of(peer) == address


# --- descriptors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "raised", "places"),
    [
        ((1_024, 1_048_576), 4_096, 1_000),
        ((1_024, 1_024), None, 960),
        ((256, resource.RLIM_INFINITY), 4_096, 1_000),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None, 1_000),
        ((100, 200), 200, 136),
        ((20_000, 20_000), None, 1_000),
    ],
)
def test_the_limit_of_descriptors_is_raised_and_leaves_some_for_all_else(
    monkeypatch, limits, raised, places
):
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: found.append(both))
    assert connections.allowed() == places
    assert found == ([] if raised is None else [(raised, limits[1])])


def test_too_few_descriptors_are_told_before_the_model_is_loaded(cli, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (48, 48))
    monkeypatch.setattr("nanokv.apps.cli.commands.serve.load_model", lambda *given: 1 / 0)
    code, _, err = cli("serve", "--port", "0")
    assert code == 2 and "may open 48 files, nanokv serve needs 72" in err
    assert "ulimit -n 1024" in err
    with pytest.raises(NanoKVError):
        connections.allowed()


def test_without_descriptors_the_server_pauses_and_says_so_once_a_second(
    loaded, monkeypatch, caplog
):
    tried = []
    accept = socket.socket.accept

    def failing(bound):
        tried.append(bound)
        raise OSError(errno.EMFILE, "Too many open files")

    with Serving(*loaded) as server, contextlib.ExitStack() as stack:
        monkeypatch.setattr(socket.socket, "accept", failing)
        for _ in range(30):
            stack.enter_context(connect(server))
        time.sleep(2.5)
        assert 1 <= len(tried) <= 4, "once per second"
        told = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        assert 1 <= len(told) <= 3
        assert told[0].startswith("no connection can be accepted: Too many open files")
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert server.get("/health")[0] == 200
    assert "Traceback" not in caplog.text


def test_a_listener_fails_once_and_then_has_nobody_waiting():
    with Listener() as bound, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            socket.socket, "accept", lambda one: (_ for _ in ()).throw(OSError(errno.EMFILE, "out"))
        )
        with pytest.raises(OSError, match="out"):
            bound.accept()
        with pytest.raises(BlockingIOError):
            bound.accept()


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["asyncio", "uvicorn.error"])
def test_a_library_logs_one_line_a_second(capsys, monkeypatch, name):
    now = [100.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    log = Log(OutputOptions(quiet=True, debug=False))
    try:
        for _ in range(50):
            logging.getLogger(name).error("out of\nsystem resource", exc_info=OSError("long"))
        now[0] += 1
        logging.getLogger(name).error("again")
    finally:
        log.close()
    assert capsys.readouterr().err.splitlines() == [
        "nanokv: warning: out of␊system resource",
        "nanokv: warning: again (49 more lines were left out)",
    ]
    assert not [one for one in logging.getLogger(name).filters if isinstance(one, Seldom)]


def test_errors_of_the_loop_are_one_line_without_the_text_of_a_client(caplog):
    connections.logger.filters[0].next = 0.0
    loop = asyncio.new_event_loop()
    connections.failed(loop, {"message": "x", "exception": ValueError("secret")})
    loop.close()
    assert "the event loop: ValueError" in caplog.text and "secret" not in caplog.text


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch, loaded):
    """The lengths of the texts that the tokenizer has got."""
    found, encode = [], type(loaded[1]).encode
    monkeypatch.setattr(
        type(loaded[1]),
        "encode",
        lambda self, text, *more: found.append(len(text)) or encode(self, text, *more),
    )
    return found


@pytest.mark.parametrize("text", ["1", "é", "<|im_end|> 1"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_text_that_cannot_fit_is_not_tokenized(loaded, encoded, path, text):
    long = text * (500_000 // len(text))
    with Serving(*loaded, context=64, allow_special=True) as server:
        status, found = server.post(path, ask(long) if path == CHAT else {"prompt": long})
        assert (status, error(found)["code"]) == (400, "context_length_exceeded")
        assert " bytes, which are at least " in found["error"]["message"]
        assert not encoded


def test_a_control_token_in_a_long_text_is_found_without_tokenizing_it(server, encoded):
    status, found = server.post(CHAT, ask("1" * 500_000 + "<|im_end|>" + "1" * 500_000))
    assert (status, "a control token" in error(found)["message"]) == (400, True)
    assert max(encoded) < 20


def test_a_text_that_just_fits_is_answered(loaded):
    """No token of the bundled model has two digits: the bound is the number of tokens."""
    with Serving(*loaded, context=64) as server:
        assert server.post(TEXT, {"prompt": "1" * 64, "max_tokens": 1})[0] == 200
        for digits in (65, 66, 10_000):
            status, found = server.post(TEXT, {"prompt": "1" * digits, "max_tokens": 1})
            assert (status, error(found)["code"]) == (400, "context_length_exceeded")


COUNTING = {  # address → its body for a text
    "/tokenize": lambda text: {"prompt": text},
    "/v1/messages/count_tokens": ask,
    "/v1/responses/input_tokens": lambda text: {"input": text},
}


@pytest.mark.parametrize("path", [*COUNTING, "/tokenize of a chat"])
def test_counting_is_for_a_few_contexts(loaded, encoded, path):
    body = COUNTING.get(path, ask)
    path = path.split()[0]
    with Serving(*loaded, context=64) as server:
        for text in ("1" * 200, "grandmother" * 80):
            status, found = server.post(path, body(text))
            assert (status, found.get("count", found.get("input_tokens", 0)) > 64) == (200, True)
        encoded.clear()
        for text in ("1" * 257, "grandmother" * 94, "1" * 500_000, "\U0001f600" * 300):
            status, found = server.post(path, body(text))
            assert status == 400
            assert " bytes, which are at least " in found["error"]["message"]
            assert "At most 256 tokens or 1,024 bytes are counted." in found["error"]["message"]
        assert not encoded


def test_the_bounds_of_counting_are_tight(loaded):
    with Serving(*loaded, context=64) as server:
        long = "grandmother" * 93 + "g"  # 1,024 bytes
        for text in ("1" * 256, long):
            assert server.post("/tokenize", {"prompt": text})[0] == 200
            status, found = server.post("/tokenize", {"prompt": text + "1"})
            assert (status, error(found)["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("path", "name"), [(TEXT, "prompts"), ("/tokenize", "beside")])
def test_a_small_prompt_does_not_wait_for_large_ones(loaded, monkeypatch, path, name):
    gate, text_ids, trimmed = threading.Event(), prompts.text_ids, threading.Event()

    def slow(served, text, *more):
        assert len(text) < 100 or gate.wait(20)
        return text_ids(served, text[:5], *more)

    monkeypatch.setattr(prompts, "text_ids", slow)
    for name in ("check_text", "check_counted"):
        monkeypatch.setattr(prompts.Served, name, lambda *given: None)
    monkeypatch.setattr(lanes, "trim", trimmed.set)
    large = {"prompt": "x" * 2 * lanes.LARGE, "max_tokens": 1}
    with Serving(*loaded) as server, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(asked(server, large, path)) for _ in range(4)]
        server.wait(lambda: server.admission.reading > 8 * lanes.LARGE)
        for _ in range(3):
            assert server.post(path, {"prompt": "Hi", "max_tokens": 1})[0] == 200
        assert not any(waiting)
        trimmed.clear()  # a server before this one may have called it
        gate.set()
        server.wait(lambda: all(waiting))
        assert [found[0][0] for found in waiting] == [200] * 4
        assert trimmed.wait(5), "their memory is returned"
        trimmed.clear()
        assert server.post(path, large)[0] == 200 and trimmed.wait(5), "and that of a later one"


def test_memory_is_returned_where_the_allocator_can():
    lanes.trim()


# --- other threads ----------------------------------------------------------------------------------------------------


def many(path, count) -> dict:
    """A body of so many messages, parts of a message, or parts inside a part."""
    said = {"role": "user", "content": "a"}
    part = {"type": "text", "text": "a"}
    inside = {"type": "tool_result", "tool_use_id": "a", "content": [part] * (count - 2)}
    bodies = {
        CHAT: {"messages": [said] * count},
        "/tokenize": {"messages": [said | {"content": [part] * (count - 1)}]},
        "/v1/responses": {"input": [said] * count},
        "/v1/messages": {"messages": [said | {"content": [inside]}], "max_tokens": 4},
    }
    bodies["/v1/responses/input_tokens"] = bodies["/v1/responses"]
    bodies["/v1/messages/count_tokens"] = {"messages": [said] * count}
    return bodies[path]


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/responses", "/v1/messages", "/tokenize", *list(COUNTING)[1:]]
)
def test_more_messages_than_tokens_are_refused(loaded, path):
    with Serving(*loaded, context=64) as server:
        most = 64 if path in (CHAT, "/v1/responses", "/v1/messages") else 256
        words = f" messages, parts and calls, and at most {most:,} are read."
        assert words not in str(server.post(path, many(path, most)))
        status, found = server.post(path, many(path, most + 1))
        assert (status, f"{most + 1:,}{words}" in found["error"]["message"]) == (400, True)


@pytest.mark.parametrize("param", ["system", "input"])
def test_parts_of_a_system_prompt_and_of_thoughts_count(loaded, param):
    part = {"type": "text", "text": ""}
    thoughts = {"type": "reasoning", "summary": [part | {"type": "summary_text"}] * 64}
    path, body = {
        "system": ("/v1/messages", {"messages": [], "max_tokens": 4, "system": [part] * 65}),
        "input": ("/v1/responses", {"input": [thoughts]}),
    }[param]
    with Serving(*loaded, context=64) as server:
        status, found = server.post(path, body)
        words = f"your {param} has 65 messages, parts and calls, and at most 64 are read."
        assert (status, words in found["error"]["message"]) == (400, True)


def test_100_000_messages_are_refused_before_they_are_checked(loaded):
    with Serving(*loaded, context=64) as server:
        messages = many(CHAT, 100_000)["messages"]
        messages[-1] = {"role": "king"}
        status, found = server.post(CHAT, {"messages": messages})
        assert (status, error(found)["code"]) == (400, "context_length_exceeded")


def test_objects_that_stay_are_not_collected_again(monkeypatch):
    """A collection of 230,000 objects held the interpreter for 0.1 s."""
    interval = sys.getswitchinterval()
    try:
        share_the_interpreter()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
        assert len(gc.get_objects()) < 20_000 < gc.get_freeze_count()
    finally:
        sys.setswitchinterval(interval)
