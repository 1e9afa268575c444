"""`nanokv serve` among strangers: clients that leave, hosts and keys, bodies that are none, a full queue, and the end.

A client that leaves frees its place and its pages in prefill and in decode; nobody waits for a forward; every refusal
has OpenAI's form; what a client sends stays out of the log.
"""

import contextlib
import json
import logging
import socket
import threading
import time

import openai
import pytest
from starlette.datastructures import Headers

from asking import ENDLESS, LONG, asked
from nanokv.apps.serve.api import forms, prompts
from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.http.response import Limits
from nanokv.apps.serve.http.security import Hosts, Keys, host_name
from serving import CHAT, TEXT, Serving, ask, error


def only_request(server):
    """The engine's, of the one answer that has a place."""
    server.wait(lambda: server.entered)
    (request,) = server.requests
    return request


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_client_that_leaves_in_prefill_frees_its_place_and_its_pages(loaded, stream, path):
    body = (
        ask(LONG, stream=stream, **ENDLESS)
        if path == CHAT
        else {"prompt": LONG, "stream": stream} | ENDLESS
    )
    with Serving(*loaded, step_tokens=4) as server:
        with server.held():
            connection = server.send("POST", path, body)
            request = only_request(server)
            connection.close()
            server.wait(lambda: not server.tickets)  # while the engine is in the middle of a step
        server.wait(lambda: server.free)
        assert (request.finish_reason, request.tokens) == ("cancelled", []) and server.steps <= 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_in_decode_frees_its_place_and_its_pages(loaded, stream):
    with Serving(*loaded) as server:
        step = server.engine.step
        server.engine.step = lambda: (time.sleep(0.003), step())[1]
        connection = server.send("POST", CHAT, ask(stream=stream, **ENDLESS))
        request = only_request(server)
        server.wait(lambda: len(request.tokens) > 3)
        connection.close()
        server.wait(lambda: server.free)
        assert request.finish_reason == "cancelled" and 3 < len(request.tokens) < 300
        assert server.post(CHAT, ask(max_tokens=2))[0] == 200


def test_a_client_that_reads_nothing_does_not_stay(loaded, monkeypatch):
    monkeypatch.setattr("nanokv.apps.serve.http.server.READER_S", 0.2)
    monkeypatch.setattr(
        forms.ChatForm, "opening", lambda self, index: b":" + b"x" * 12_000_000 + b"\n\n"
    )
    with Serving(*loaded) as server:
        step = server.engine.step
        server.engine.step = lambda: (time.sleep(0.003), step())[1]
        connection = server.send("POST", CHAT, ask(stream=True, **ENDLESS))
        request = only_request(server)
        server.wait(lambda: server.free)
        assert request.finish_reason == "cancelled" and len(request.tokens) < 400
        connection.close()


def test_a_client_that_reads_nothing_of_a_whole_answer_does_not_stay(loaded, monkeypatch):
    """All of it is written, and the request has ended, while the socket has taken a part of it."""
    monkeypatch.setattr(forms.ChatForm, "whole", lambda *args, **facts: {"x": "x" * 12_000_000})
    with Serving(*loaded) as server:
        assert len(server.raw("POST", CHAT, ask(max_tokens=2))[2]) > 12_000_000, (
            "who reads has all of it"
        )
        monkeypatch.setattr("nanokv.apps.serve.http.server.READER_S", 0.3)
        connection = server.send("POST", CHAT, ask(max_tokens=2))
        server.wait(
            lambda: b'reason="length"} 2.0' in server.engine_client.metrics.text({}) and server.free
        )
        server.wait(lambda: not server.server.server_state.connections)
        connection.close()


def test_the_event_loop_never_waits_for_a_forward(server):
    with server.held():
        with asked(server, ask(max_tokens=2)) as found:
            only_request(server)
            assert (
                server.get("/health") == (200, {"status": "ok"})
                and server.get("/v1/models")[0] == 200
            )
            assert server.post("/tokenize", {"prompt": "Hi"})[0] == 200 and not found
            server.gate.set()
        assert found[0][0] == 200


# --- full, late, failed, ended ----------------------------------------------------------------------------------------


def test_a_full_queue_is_429_with_retry_after(loaded):
    with Serving(*loaded, running=1, queue=1) as server, contextlib.ExitStack() as stack:
        stack.enter_context(server.held())
        both = [stack.enter_context(asked(server, ask(max_tokens=2))) for _ in range(2)]
        server.wait(lambda: len(server.tickets) == 2)
        status, headers, data = server.raw("POST", CHAT, ask())
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert error(json.loads(data))["code"] == "queue_full"
        with (
            server.client() as client,
            pytest.raises(openai.RateLimitError, match="2 requests run or wait"),
        ):
            client.chat.completions.create(model="tiny", **ask())
        server.gate.set()
        server.wait(lambda: all(both))
        assert [found[0][0] for found in both] == [200, 200] and server.post(
            CHAT, ask(max_tokens=1)
        )[0] == 200
        server.wait(lambda: server.free)


@pytest.fixture
def failing(monkeypatch):
    """A request with seed 13 fails at its third token, in drawing; its message quotes the prompt."""
    from nanokv.decoding import draw as drawing

    draw = drawing.draw

    def fail(logits, values, generator, prompt, tokens):
        if generator.initial_seed() == 13 and len(tokens) == 2:
            raise RuntimeError("secret words of the prompt")
        return draw(logits, values, generator, prompt, tokens)

    monkeypatch.setattr(drawing, "draw", fail)


def test_an_error_after_the_200_stands_in_the_stream(server, failing, caplog):
    """Of one request; its neighbour goes on. The answer does not quote what the log does not either."""
    with asked(server, ask(max_tokens=8, ignore_eos=True)) as neighbour:
        events = server.stream(CHAT, ask(seed=13, temperature=1, max_tokens=8, ignore_eos=True))
        assert (
            server.post(CHAT, ask(seed=13, temperature=1, max_tokens=8, ignore_eos=True))[0] == 500
        )
    assert neighbour[0][1]["usage"]["completion_tokens"] == 8
    assert error(json.loads(events[-1].removeprefix("data: ")))["type"] == "server_error"
    assert (
        "data: [DONE]" not in events
        and len(events) > 1
        and "secret" not in str(events) + caplog.text
    )
    assert "RuntimeError at " in caplog.text
    with server.client() as client, pytest.raises(openai.APIError, match="its log says why"):
        list(
            client.chat.completions.create(
                model="tiny", stream=True, seed=13, **ask(temperature=1, max_tokens=8)
            )
        )


def test_a_fault_in_the_stream_itself_is_told_in_the_stream(server, monkeypatch, caplog):
    caplog.set_level("INFO", "nanokv.apps.serve")
    monkeypatch.setattr(forms.ChatForm, "chunk", lambda self, index, pieces, usage: {}[index])
    *_, last = server.stream(CHAT, ask(max_tokens=3, ignore_eos=True))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "a stream failed: KeyError at " in caplog.text
    server.wait(lambda: server.free and " out · failed" in caplog.text)


def test_a_step_that_fails_ends_its_requests_and_not_the_server(loaded, monkeypatch):
    with Serving(*loaded) as server:
        decode = server.engine._decode
        monkeypatch.setattr(
            server.engine, "_decode", lambda requests: 1 / 0 if requests else decode(requests)
        )
        assert server.post(CHAT, ask(max_tokens=5, ignore_eos=True))[0] == 500
        monkeypatch.setattr(server.engine, "_decode", decode)
        assert server.post(CHAT, ask(max_tokens=5))[0] == 200
        server.wait(lambda: server.free)


def test_an_engine_that_has_died_leaves_nobody_waiting(loaded, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with Serving(*loaded) as server:
        monkeypatch.setattr(server.engine_client.thread, "_send", lambda: 1 / 0)
        assert server.post(CHAT, ask(max_tokens=5))[0] == 500
        server.wait(lambda: server.admission.closed)
        assert server.post(CHAT, ask())[0] == 503 and server.get("/health")[0] == 503
        assert error(server.get("/metrics")[1])["code"] == "engine_failed", "it would wait for ever"


def test_a_fault_in_submitting_ends_that_request_and_not_the_engine(loaded, monkeypatch):
    with Serving(*loaded) as server:
        submit = server.engine.submit
        monkeypatch.setattr(server.engine, "submit", lambda *args, **more: 1 / 0)
        assert error(server.post(CHAT, ask())[1])["code"] == "internal_error"
        monkeypatch.setattr(server.engine, "submit", submit)
        assert server.post(CHAT, ask(max_tokens=2))[0] == 200


def test_an_answer_that_takes_too_long_is_ended(loaded):
    with Serving(*loaded, limits=Limits(answer_s=0.15)) as server, server.held():
        status, found = server.post(CHAT, ask())
        assert (status, found["error"]["code"]) == (504, "timeout")
        *_, last = server.stream(CHAT, ask())
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_running_answers_finish_when_the_server_is_ended(loaded):
    with Serving(*loaded) as server, server.held():
        with asked(server, ask(max_tokens=4)) as found:
            only_request(server)
            server.stop.set()
            server.wait(lambda: server.admission.closed)
            server.gate.set()
        assert found[0][0] == 200
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_answers_that_do_not_finish_in_time_are_told(loaded):
    with Serving(*loaded, grace=0.1) as server, server.held():
        connection = server.send("POST", CHAT, ask(max_tokens=4, stream=True))
        with asked(server, ask(max_tokens=4)) as whole:
            server.wait(lambda: len(server.tickets) == 2)
            server.stop.set()
        events = connection.getresponse().read().decode().split("\n\n")
        connection.close()
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert whole[0][0] == 503 and whole[0][1]["error"]["code"] == "shutting_down"


def test_an_end_in_the_middle_of_a_body_is_told_at_once(loaded, caplog):
    with Serving(*loaded, grace=60) as server, contextlib.ExitStack() as stack:
        halves = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(2)
        ]
        for half, path in zip(halves, (CHAT, "/tokenize"), strict=True):
            half.sendall(
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
                % path.encode()
            )
        server.wait(lambda: server.admission.reading == 2)
        server.stop.set()
        for half in halves:
            found = half.makefile("rb").read()
            assert b" 503 " in found and b'"code":"shutting_down"' in found
        server.thread.join(5)
        assert not server.thread.is_alive() and "Exception" not in caplog.text


def test_a_client_that_reads_nothing_does_not_keep_a_server_that_ends(loaded, monkeypatch, caplog):
    monkeypatch.setattr("nanokv.apps.serve.http.server.FAREWELL_S", 0.2)
    monkeypatch.setattr(
        forms.ChatForm, "opening", lambda self, index: b":" + b"x" * 12_000_000 + b"\n\n"
    )
    with Serving(*loaded, grace=0.1) as server:
        connection = server.send("POST", CHAT, ask(stream=True, **ENDLESS))
        only_request(server)
        server.stop.set()
        server.thread.join(5)
        assert (
            not server.thread.is_alive()
            and "Exception" not in caplog.text
            and "Cancel" not in caplog.text
        )
        connection.close()


# --- hosts, origins, keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("[::1]:8000", True),
        ("evil.com", False),
        ("127.0.0.1.evil.com", False),
        ("evil.com:8000", False),
        ("localhost:8000@evil.com", False),
        ("", False),
        ("evil.com/127.0.0.1", False),
        ("8.8.8.8", False),
        ("localhost:x", False),
        ("localhost.", False),
    ],
)
def test_only_known_hosts_are_answered(server, host, allowed):
    """A page whose name was bound to 127.0.0.1 afterwards still sends its own name."""
    status, found = server.get("/v1/models", {"Host": host})
    assert status == (200 if allowed else 403)
    assert allowed or error(found)["code"] == "unknown_host"


@pytest.mark.parametrize(
    "origin", ["http://evil.com", "null", "http://127.0.0.1:1", "http://localhost", "file://"]
)
def test_a_page_of_another_site_is_refused_and_there_is_no_cors(server, origin):
    for method in ("POST", "OPTIONS", "GET"):
        status, headers, data = server.raw(method, CHAT, ask(max_tokens=1), {"Origin": origin})
        assert status == 403 and json.loads(data)["error"]["code"] == "unknown_origin"
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_a_page_of_this_server_may_ask(server):
    here = {"Origin": server.url, "Host": server.url.removeprefix("http://")}
    assert server.post(CHAT, ask(max_tokens=1), here)[0] == 200


def test_elsewhere_than_on_loopback_an_address_is_known_and_a_name_is_not():
    hosts = Hosts("0.0.0.0", ["box.local"])
    assert all(known(hosts, name) for name in ("192.168.1.5", "::1", "localhost", "box.local"))
    assert not known(hosts, "evil.com") and host_name("a.b:99999999") == ""


def known(hosts, name) -> bool:
    from starlette.datastructures import Headers

    with contextlib.suppress(ApiError):
        hosts.check(Headers({"host": f"[{name}]" if ":" in name else name}))
        return True
    return False


@pytest.fixture(scope="module")
def locked(loaded):
    with Serving(*loaded, keys=["one-key", "another-key"]) as server:
        yield server


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer one-ke",
        "Bearer one-key1",
        "Basic one-key",
        "one-key",
        "Bearer one-key another-key",
        "Bearer \xe9",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing", "//metrics/"])
def test_nothing_without_a_key(locked, header, path):
    status, headers, data = locked.raw(
        "GET", path, headers={} if header is None else {"Authorization": header}
    )
    assert status == 401 and headers["www-authenticate"] == "Bearer"
    assert error(json.loads(data))["code"] == "invalid_api_key"


def test_each_key_opens_and_health_needs_none(locked):
    for key in ("one-key", "another-key"):
        assert locked.get("/v1/models", {"Authorization": f"bearer {key}"})[0] == 200
        assert locked.raw("GET", "/metrics", headers={"Authorization": f"Bearer {key}"})[0] == 200
    assert locked.get("/health")[0] == 200
    with locked.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_every_key_is_compared_by_digest(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b
    )
    keys = Keys(["a", "bb", "ccc"])
    assert keys.salt(Headers({"authorization": "Bearer a"})) != keys.salt(
        Headers({"x-api-key": "bb"})
    )
    assert compared == [(32, 32)] * 6, "also those after the right one"


def test_a_key_never_finds_the_prefixes_of_another(locked):
    """Else the time to the first token tells one user what another has asked."""

    def cached(key):
        _, found = locked.post(CHAT, ask(LONG, max_tokens=1), {"Authorization": f"Bearer {key}"})
        return found["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one-key") == 0 and cached("one-key") > 100
    assert cached("another-key") == 0 and cached("another-key") > 100


def test_two_keys_at_once_share_nothing(locked):
    """In one step too: the engine lets a request wait for the pages of another, unless their salts differ."""
    prompt = {"prompt": "Nice to meet you, Zorbla. " * 9, "max_tokens": 1}
    with locked.held(), contextlib.ExitStack() as stack:
        headers = [
            {"Authorization": f"Bearer {key}"} for key in ("one-key", "another-key", "one-key")
        ]
        first = stack.enter_context(asked(locked, ask("hold", max_tokens=1), CHAT, headers[0]))
        only_request(locked)
        found = [stack.enter_context(asked(locked, prompt, TEXT, header)) for header in headers]
        locked.wait(lambda: len(locked.tickets) == 4)
        locked.gate.set()
        locked.wait(lambda: first and all(found))
    cached = [one[0][1]["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    assert sorted(map(bool, (cached[0], cached[2]))) == [False, True] and cached[1] == 0


# --- bodies and headers -----------------------------------------------------------------------------------------------

HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[1]",
    "a text": b'"x"',
    "NaN": b'{"temperature": NaN}',
    "infinity": b'{"temperature": -Infinity}',
    "too large a number": b'{"temperature": 1e999}',
    "a huge integer": b'{"max_tokens": ' + b"9" * 5_000 + b"}",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    "many lists": b'{"a": [' + b"[]," * 300_000 + b"[]]}",
    "twice": b'{"messages": [], "messages": []}',
    "not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "half a character": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "half a character as a name": b'{"\\udfff": 1}',
    "NUL": b"\x00",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_hostile_bodies_are_400(server, body, path):
    began = time.process_time()  # of the server too, which is a thread
    status, found = server.post(path, body)
    assert status == 400 and len(error(found)["message"]) < 2_100
    assert time.process_time() - began < 5


def test_a_body_that_is_too_long_is_413(server):
    status, found = server.post(CHAT, b" " * 10_000_000)
    assert (status, found["error"]["code"]) == (413, "body_too_large")
    unknown = {"Transfer-Encoding": "chunked"}  # how long it will be
    assert server.post(CHAT, b"400000\r\n" + b" " * 0x400000 + b"\r\n0\r\n\r\n", unknown)[0] == 413


def test_a_body_that_does_not_arrive_is_408(loaded):
    start = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with Serving(*loaded, limits=Limits(body_s=0.2)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(start)
            assert b" 408 " in half.recv(10_000)
        server.wait(lambda: server.free)


def test_many_bodies_at_once_are_bounded(loaded):
    start = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000\r\n\r\n"
        + b" " * 2_000
    )
    with Serving(*loaded, limits=Limits(bodies=5_000)) as server, contextlib.ExitStack() as stack:
        halves = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(3)
        ]
        for half in halves:
            half.sendall(start)
        assert b" 503 " in halves[2].recv(10_000)
        halves[0].sendall(b" " * 1_000)
        assert b" 400 " in halves[0].recv(10_000) and server.post(CHAT, ask(max_tokens=1))[0] == 200


@pytest.fixture
def busy(monkeypatch):
    """The tokenizer waits for busy.set()."""
    gate, text_ids = threading.Event(), prompts.text_ids
    monkeypatch.setattr(prompts, "text_ids", lambda *args: gate.wait(20) and text_ids(*args))
    yield gate
    gate.set()


def test_requests_to_the_tokenizer_are_bounded(loaded, busy):
    with Serving(*loaded, limits=Limits(beside=3)) as server, contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(asked(server, {"prompt": "Hi"}, "/tokenize")) for _ in range(3)
        ]
        server.wait(lambda: server.admission.beside == 3)
        for path, body in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [5]})):
            status, headers, data = server.raw("POST", path, body)
            assert status == 429 and int(headers["retry-after"]) >= 1
            assert error(json.loads(data))["code"] == "queue_full"
        busy.set()
        server.wait(lambda: all(found))
        assert [one[0][0] for one in found] == [200] * 3 and server.post(
            "/tokenize", {"prompt": "Hi"}
        )[0] == 200


@pytest.mark.parametrize("path", [TEXT, "/tokenize"])
def test_bodies_that_wait_for_the_tokenizer_count_as_bodies_that_arrive(loaded, busy, path):
    body = {"prompt": "Hi", "user": "x" * 2_000, "max_tokens": 1}
    with Serving(*loaded, limits=Limits(bodies=5_000)) as server:
        with asked(server, body, path) as one, asked(server, body, path) as other:
            server.wait(lambda: server.admission.reading > 4_000)
            status, found = server.post("/detokenize", b" " * 1_000)
            assert (status, error(found)["code"]) == (503, "overloaded")
            busy.set()
        assert [one[0][0], other[0][0]] == [200, 200] and server.admission.reading == 0
        assert server.post("/detokenize", b" " * 1_000)[0] == 400


NO_HTTP = {
    "TLS": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two words": b"\r\n\r\n\r\nx y\r\n\r\n",
    "no length of a chunk": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno\r\n",
}


def said(server, *parts) -> bytes:
    """To these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        for part in parts:
            raw.sendall(part)
        return raw.makefile("rb").read()


@pytest.mark.parametrize("garbage", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_refused_in_the_form_of_an_error(server, garbage):
    head, _, body = said(server, garbage).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head.lower()
    assert error(json.loads(body))["code"] == "invalid_http"


def test_a_body_that_turns_out_to_be_none_after_the_answer_ends_the_connection(server, caplog):
    start = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(start)
        found = raw.recv(10_000)
        raw.sendall(b"no length\r\n")
        # To the end, which comes at once and not after 5 idle seconds.
        found += raw.makefile("rb").read()
        assert found.startswith(b"HTTP/1.1 404 ") and found.count(b"HTTP/1.1") == 1
    assert "Exception" not in caplog.text and "Fatal" not in caplog.text


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n", b" 200 "),
        (b"POST /x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b" 404 "),
        (b"POST /tokenize HTTP/1.1\r\nHost: evil\r\nContent-Length: 1000000\r\n\r\n", b" 403 "),
    ],
)
def test_a_body_that_goes_on_after_the_answer_does_not_hold_the_connection(
    server, monkeypatch, head, status
):
    monkeypatch.setattr("nanokv.apps.serve.http.server.UNREAD_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(head)
        assert status in raw.recv(4096)
        raw.sendall(b"1")  # ends uvicorn's own timer
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(4096):
                pass
    server.wait(lambda: not server.server.server_state.connections)


def test_a_body_that_arrives_after_the_answer_keeps_the_connection(server, monkeypatch):
    monkeypatch.setattr("nanokv.apps.serve.http.server.UNREAD_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n")
        # The answer may come in several parts, its first line is in the first.
        found = raw.recv(4096)
        assert b" 200 " in found
        raw.sendall(b"late")
        time.sleep(0.5)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found += raw.makefile("rb").read()
        assert found.count(b" 200 ") == found.count(b'{"status":"ok"}') == 2


def test_a_body_with_two_lengths_is_refused_and_nothing_after_it_is_read(server):
    heads = b"Host: localhost\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n"
    found = said(
        server, b"POST /tokenize HTTP/1.1\r\n" + heads + b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n"
    )
    assert (
        found.count(b"HTTP/1.1 ") == 1 and b"HTTP/1.1 400" in found and b"one of them says" in found
    )


def test_headers_that_come_at_once_are_bounded_too(server):
    """The parser counts only those whose end it has not seen."""
    assert server.get("/health", {"X": "x" * 15_000})[0] == 200
    for headers in (
        {"X": "x" * 17_000},
        {f"X{i}": "x" * 80 for i in range(90)} | {"Y": "y" * 10_000},
    ):
        assert server.raw("GET", "/health", headers=headers)[0] in (400, 431)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"x" * 20_000))
        found = raw.recv(10_000)
        assert b" 431 " in found or b" 400 " in found


def test_headers_that_do_not_arrive_or_are_too_long_close_the_connection(server, monkeypatch):
    monkeypatch.setattr("nanokv.apps.serve.http.server.HEADER_S", 0.2)
    for start in (b"", b"GET /health HTTP/1.1\r\nHost: loc"):
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.settimeout(10)
            half.sendall(start)
            while half.recv(10_000):
                pass
    with socket.create_connection(("127.0.0.1", server.port)) as much:
        much.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
        with contextlib.suppress(ConnectionError):
            assert b" 400 " in much.recv(10_000)
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/", 405),
        ("POST", "/live", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("GET", "/v1/../health", 404),
        ("POST", "/health", 405),
    ],
)
def test_unknown_addresses_have_the_form_of_an_error_too(server, method, path, status):
    got, _, data = server.raw(method, path)
    assert got == status and error(json.loads(data))


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_says_what_happened_and_nothing_of_a_prompt(server, caplog):
    caplog.set_level(logging.DEBUG)
    server.post(CHAT, ask("Zanzibar", max_tokens=2, **{"no\x1b[2Jsuch": "Timbuktu"}))
    server.post(CHAT, ask("Zanzibar<|im_end|>"))
    server.post(CHAT, {"messages": [{"role": "Zanzibar", "content": "x"}]})
    server.raw("GET", "/a%1b%5b2Jb%0anew")
    server.wait(lambda: "new 404" in caplog.text)
    assert (
        r'ignored: "no\u001b[2Jsuch"' in caplog.text and r"GET /a\u001b[2Jb\nnew 404" in caplog.text
    )
    assert "POST /v1/chat/completions 200 · " in caplog.text and "→ 2 out" in caplog.text
    assert not [word for word in ("Zanzibar", "Timbuktu", "\x1b") if word in caplog.text]
    assert all("\n" not in record.getMessage() for record in caplog.records)
