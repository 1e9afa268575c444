"""Whole URLs as targets, and pages of other origins that --allow-origin names."""

import json
import socket

import pytest

from cli_helpers import errors_in
from serving import CHAT, Serving, ask, error

PAGE = "http://localhost:3000"


@pytest.fixture(scope="module")
def open_to(loaded):
    with Serving(*loaded, origins=[PAGE, "https://ui.example"], keys=["key"]) as server:
        yield server


def target(server, line: bytes, host: bytes = b"localhost") -> tuple[bytes, dict]:
    """(first line, JSON) of the answer to a request with this target."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (line, host))
        found = raw.makefile("rb").read()
    head, _, body = found.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)


@pytest.mark.parametrize(
    "line",
    [
        b"http://localhost/v1/models",
        b"HTTP://127.0.0.1:9/v1/models?x=1",
        b"https://localhost//v1/models/",
    ],
)
def test_a_whole_url_is_a_target(server, line):
    status, found = target(server, line)
    assert b" 200 " in status and found["object"] == "list"


def test_the_host_of_the_target_counts_and_the_header_does_not(server):
    assert b" 200 " in target(server, b"http://localhost/health", b"evil.com")[0]
    status, found = target(server, b"http://evil.com/health")
    assert b" 403 " in status and error(found)["code"] == "unknown_host"
    for line in (
        b"http:///health",
        b"http://evil.com@localhost/health",
        b"http://localhost@evil.com/",
    ):
        assert b" 403 " in target(server, line)[0]
    assert b" 404 " in target(server, b"ftp://localhost/health")[0]


def cors(headers) -> dict:
    found = {name.lower(): value for name, value in headers.items()}
    return {name: value for name, value in found.items() if name.startswith("access-control")}


def test_a_preflight_of_an_allowed_origin_is_answered_without_a_key(open_to):
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    status, headers, data = open_to.raw("OPTIONS", CHAT, headers=asked)
    assert (status, data) == (204, b"") and headers["vary"] == "origin"
    assert cors(headers) == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "authorization,content-type,x-stainless-os",
        "access-control-expose-headers": "retry-after",
        "access-control-max-age": "600",
    }
    for other in ("http://localhost:3001", "null", "https://localhost:3000", "http://ui.example"):
        status, headers, _ = open_to.raw("OPTIONS", CHAT, headers=asked | {"Origin": other})
        assert status == 403 and not cors(headers)


def test_a_page_of_an_allowed_origin_reads_answers_streams_and_errors(open_to):
    page = {"Origin": PAGE}
    key = page | {"Authorization": "Bearer key"}
    for status, body, more in (
        (200, ask(max_tokens=1), key),
        (200, ask(max_tokens=1, stream=True), key),
        (400, {}, key),
        (401, ask(), page),
    ):
        got, headers, _ = open_to.raw("POST", CHAT, body, more)
        assert got == status and cors(headers)["access-control-allow-origin"] == PAGE
    without = {"Authorization": "Bearer key"}
    assert not cors(open_to.raw("GET", "/v1/models", headers=without)[1])
    assert open_to.raw("OPTIONS", CHAT, headers=page)[0] == 401, "it is no preflight"


@pytest.mark.parametrize(
    "origin", ["*", "null", "localhost:3000", "http://a/", "http://a/b", "http://A", "ftp://a", ""]
)
def test_an_origin_is_one_site(cli, origin):
    code, _, err = cli("serve", "--allow-origin", origin)
    assert code == 2 and "--allow-origin: " in errors_in(err)[0]
