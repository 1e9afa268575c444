"""The page at / and the stream that it draws: snapshots of the engine, who sees what of whom, limits, and the end.

The page in a real browser is in test_serve_browser.py.
"""

import asyncio
import base64
import contextlib
import hashlib
import http.client
import json
import re
import time
import tomllib
from pathlib import Path

import pytest

from nanokv.apps.serve.http import live, page
from nanokv.apps.serve.http.response import Limits
from nanokv.apps.serve.run.snapshot import CELLS, FREE, KEPT, SHARED, departed, runs, snapshot, view
from nanokv.engine import Engine
from serving import CHAT, Serving, ask, error

ENDLESS = {"max_tokens": 400, "ignore_eos": True}
PROMPT = list(range(5, 22))  # 17 tokens: 4 full pages of 4, and one more


class Watcher:
    """A client of /live; `wait(condition)` reads on until a snapshot fulfils it."""

    def __init__(self, server, **headers):
        names = {"tab": "X-Nanokv-Tab", "key": "Authorization"}
        given = {
            names[name]: f"Bearer {text}" if name == "key" else text
            for name, text in headers.items()
        }
        self.connection = server.send("GET", "/live", headers=given)
        self.response = self.connection.getresponse()
        self.comments = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.connection.close()

    def next(self):
        """The next event; None at the end of the stream."""
        while line := self.response.readline():
            self.comments += line.startswith(b":")
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None

    def wait(self, condition):
        until = time.monotonic() + 20
        while time.monotonic() < until:
            found = self.next()
            assert found is not None, "the stream has ended"
            if condition(found):
                return found
        raise AssertionError("waited in vain")


@contextlib.contextmanager
def streaming(server, body, **headers):
    """The open connection of a streamed answer."""
    connection = server.send("POST", CHAT, body | {"stream": True}, headers)
    try:
        yield connection
    finally:
        connection.close()


def watched_by(server) -> live.Live:
    """What the server knows of those who watch."""
    (route,) = [route for route in server.app.app.routes if route.path == "/live"]
    return route.endpoint.__self__.watched


def slow(server, seconds=0.01):
    step = server.engine.step
    server.engine.step = lambda: (time.sleep(seconds), step())[1]
    return server


# --- the snapshot, without a server -----------------------------------------------------------------------------------


@pytest.fixture
def engine(loaded):
    return Engine(loaded[0], pages=20, page_size=4, step_tokens=64, max_running=4)


def test_a_snapshot_counts_what_the_engine_holds(engine):
    first = engine.submit(PROMPT, max_new_tokens=30, eos_token_ids=[])
    engine.step()
    second = engine.submit([*PROMPT, 3, 4], max_new_tokens=30, eos_token_ids=[])
    engine.step()
    taken = view(snapshot(engine, {first.number: "mine", second.number: "yours"}), "", "mine")
    one, two = taken["requests"]
    assert (one["whose"], two["whose"]) == ("tab", "key") and one["state"] == two[
        "state"
    ] == "decode"
    assert (one["prompt"], one["reused"], one["prefilled"], one["generated"]) == (17, 0, 17, 2)
    assert (two["prompt"], two["reused"], two["prefilled"], two["generated"]) == (19, 16, 3, 1)
    assert (one["tokens"], one["held"], one["pages"]) == (19, 18, 5) and (
        two["held"],
        two["pages"],
    ) == (19, 5)
    pool = taken["pool"]
    assert (pool["pages"], pool["free"], pool["kept"], pool["cell"]) == (20, 14, 0, 1)
    assert pool["bytes_per_page"] == engine.pool.bytes_per_page > 0
    cells = [owner for owner, n in taken["cells"] for _ in range(n)]
    assert sorted(cells) == sorted([SHARED] * 4 + [0, 1] + [FREE] * 14)
    assert cells[first.cache.tables[0][4]] == 0 and cells[second.cache.tables[0][4]] == 1
    assert taken["engine"]["prefill_tokens"] == 20 and taken["engine"]["reused_tokens"] == 16


def test_a_queue_and_a_preemption_are_in_it(engine):
    requests = [
        engine.submit([7 + i, *PROMPT], max_new_tokens=40, eos_token_ids=[]) for i in range(5)
    ]
    taken = snapshot(engine, {})
    assert [one["state"] for one in taken["requests"]] == ["queued"] * 5 and taken["engine"][
        "waiting"
    ] == 5
    while not engine.metrics.preemptions:
        engine.step()
    found = [one for one in snapshot(engine, {})["requests"] if one["preemptions"]]
    (hit,) = [request for request in requests if request.preemptions]
    assert [(one["state"], one["pages"], one["held"]) for one in found] == [("queued", 0, 0)]
    assert (
        found[0]["tokens"] == len(hit.known) and snapshot(engine, {})["engine"]["preemptions"] == 1
    )


def test_what_a_stopped_request_leaves_is_counted_until_it_is_evicted(engine):
    request = engine.submit(PROMPT, max_new_tokens=30, eos_token_ids=[])
    for _ in range(5):
        engine.step()
    held = request.fed
    engine.cancel(request)
    left = [departed(engine, request, "mine", held)]
    taken = view(snapshot(engine, {}, left), "", "mine")
    (one,) = taken["ended"]
    assert (one["reason"], one["generated"], one["prefilled"], one["kept"]) == (
        "cancelled",
        5,
        17,
        20,
    )
    assert taken["cells"] == runs(
        [KEPT if page in kept_pages(engine) else FREE for page in range(20)]
    )
    for salt, tab in (("", "other"), ("x", "mine"), ("", "")):
        assert view(snapshot(engine, {}, left), salt, tab)["ended"] == []
    engine.submit(range(30, 90), max_new_tokens=18, eos_token_ids=[])
    engine.run()
    assert view(snapshot(engine, {}, left), "", "mine")["ended"][0]["kept"] < 20


def kept_pages(engine):
    return set(engine.pool.index.pages())


def test_of_another_key_only_lengths_are_seen(engine):
    """Not what was reused, not that two of its requests share pages, not its tab, not its key."""
    mine = engine.submit([2, *PROMPT], max_new_tokens=9, salt="a", eos_token_ids=[])
    theirs = engine.submit(PROMPT, max_new_tokens=9, salt="b", eos_token_ids=[])
    engine.step()
    again = engine.submit([*PROMPT, 9], max_new_tokens=9, salt="b", eos_token_ids=[])
    engine.step()
    assert again.reused_tokens == 16
    taken = snapshot(engine, {mine.number: "t", theirs.number: "t", again.number: "t"})
    seen = view(taken, "a", "t")
    assert [one["whose"] for one in seen["requests"]] == ["tab", "other", "other"]
    for one in seen["requests"][1:]:
        assert set(one) == {"whose", "id", "state", "tokens", "held", "pages", "preemptions"}
    assert SHARED not in [owner for owner, _ in seen["cells"]]
    assert SHARED in [owner for owner, _ in view(taken, "b", "t")["cells"]]
    assert "salt" not in json.dumps(seen) and '"t"' not in json.dumps(seen)
    ids = {one["id"] for one in seen["requests"]}
    assert len(ids) == 3 and all(re.fullmatch("[0-9a-f]{12}", name) for name in ids)


def test_a_large_pool_has_several_pages_in_a_cell(loaded):
    engine = Engine(loaded[0], pages=3 * CELLS + 1, page_size=4)
    engine.submit(PROMPT, max_new_tokens=3, eos_token_ids=[])
    engine.step()
    taken = view(snapshot(engine, {}), "", "")
    assert taken["pool"]["cell"] == 4 and sum(n for _, n in taken["cells"]) == -(
        -(3 * CELLS + 1) // 4
    )
    assert taken["cells"] == [[0, 2], [FREE, 383]]


# --- the stream -------------------------------------------------------------------------------------------------------


def test_a_watcher_sees_its_request_from_the_queue_to_what_it_leaves(loaded):
    with slow(Serving(*loaded)) as server, Watcher(server, tab="here") as watcher:
        first = watcher.next()
        assert (
            watcher.response.status == 200 and first["requests"] == [] and first["model"] == "tiny"
        )
        assert watcher.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert watcher.response.headers["cache-control"] == "no-store"
        with streaming(server, ask(**ENDLESS), **{"X-Nanokv-Tab": "here"}):
            seen = watcher.wait(lambda now: now["requests"] and now["requests"][0]["generated"] > 3)
            assert (
                seen["requests"][0]["whose"] == "tab" and seen["requests"][0]["state"] == "decode"
            )
        left = watcher.wait(lambda now: now["ended"])
        assert left["requests"] == [] and left["ended"][0]["reason"] == "cancelled"
        assert left["ended"][0]["kept"] == 4 * left["pool"]["kept"] > 0
        assert server.post(CHAT, ask(max_tokens=1), {"X-Nanokv-Tab": "here"})[0] == 200
        assert (
            watcher.wait(lambda now: now["ended"][0]["reason"] == "length")["ended"][0]["reused"]
            > 0
        )


def test_a_request_that_is_stopped_in_prefill_leaves_what_it_has_computed(loaded):
    with (
        slow(Serving(*loaded, step_tokens=8), 0.05) as server,
        Watcher(server, tab="here") as watcher,
    ):
        with streaming(
            server, ask("My name is Zorbla. " * 40, **ENDLESS), **{"X-Nanokv-Tab": "here"}
        ):
            seen = watcher.wait(
                lambda now: now["requests"] and now["requests"][0]["prefilled"] > 20
            )["requests"][0]
            assert seen["state"] == "prefill" and seen["held"] == seen["prefilled"] < seen["prompt"]
        (left,) = watcher.wait(lambda now: now["ended"])["ended"]
        assert seen["prefilled"] <= left["prefilled"] < left["prompt"] and left["generated"] == 0
        assert left["kept"] == left["prefilled"] // 4 * 4
        server.wait(lambda: server.free)
        assert len(server.engine_client.thread.departed) == 1


def test_another_client_and_another_tab_are_no_request_of_mine(loaded):
    with (
        slow(Serving(*loaded, keys=["one", "two"])) as server,
        Watcher(server, key="one", tab="a") as watcher,
    ):
        with contextlib.ExitStack() as stack:
            for key, tab in (("one", "a"), ("one", "b"), ("two", "a")):
                header = {"Authorization": f"Bearer {key}", "X-Nanokv-Tab": tab}
                stack.enter_context(streaming(server, ask(**ENDLESS), **header))
                server.wait(lambda: server.entered)
            seen = watcher.wait(lambda now: len(now["requests"]) == 3)
            assert sorted(one["whose"] for one in seen["requests"]) == ["key", "other", "tab"]
            assert all(("reused" in one) == (one["whose"] != "other") for one in seen["requests"])


def test_nothing_comes_while_nothing_changes_but_a_sign_of_life(loaded):
    with Serving(*loaded, limits=Limits(keepalive_s=0.3)) as server, Watcher(server) as watcher:
        assert watcher.next()["requests"] == []
        lines = [watcher.response.readline() for _ in range(5)]
        assert lines == [b"\n", b": keepalive\n", b"\n", b": keepalive\n", b"\n"]


def test_nobody_watches_and_nothing_is_taken(loaded, monkeypatch):
    taken = []
    take = lambda *more: taken.append(1) or snapshot(*more)  # noqa: E731
    monkeypatch.setattr("nanokv.apps.serve.run.engine_thread.snapshot", take)
    with Serving(*loaded) as server:
        watched = watched_by(server)
        assert server.post(CHAT, ask(max_tokens=2))[0] == 200 and not taken
        with Watcher(server) as one, Watcher(server) as two:
            assert one.next() and two.next() and watched.watchers == 2
        server.wait(lambda: watched.watchers == 0)
        time.sleep(0.1)
        before = len(taken)
        time.sleep(3 * live.TICK_S)
        assert len(taken) == before and watched.taken is None


def test_one_snapshot_serves_all_and_the_event_loop_never_waits_for_it(loaded):
    with Serving(*loaded) as server, Watcher(server) as watcher:
        assert watcher.next()
        with server.held(), streaming(server, ask(max_tokens=2)):
            server.wait(lambda: server.requests)
            with Watcher(server) as late:
                # What was taken before the step.
                assert late.next() and server.get("/health")[0] == 200


def test_watchers_are_bounded(loaded, monkeypatch):
    monkeypatch.setattr(live, "WATCHERS", 2)
    with Serving(*loaded) as server:
        with Watcher(server) as one, Watcher(server) as two:
            assert one.next() and two.next()
            with Watcher(server) as three:
                assert three.response.status == 429 and three.response.headers["retry-after"]
                found = error(json.loads(three.response.read()))
                assert found["code"] == "too_many_watchers" and "2 pages watch" in found["message"]
        server.wait(lambda: not watched_by(server).watchers)
        with Watcher(server) as again:
            assert again.next()


def test_a_reader_that_is_slow_skips_snapshots(server):
    """It gets the newest when it has taken the one before."""

    async def read():
        watched = live.Live(server.engine_client, server.served)
        events = live.Watching(watched, "", "", Limits()).events()
        seen = []
        for steps in ((1,), (2, 3, 4), (5,)):
            for step in steps:
                watched.taken = snapshot(server.engine, {}) | {"engine": step}
                watched.wake()
            seen.append(json.loads((await anext(events)).removeprefix(b"data: "))["engine"])
        return seen

    assert asyncio.run(read()) == [1, 4, 5]


def test_a_reader_that_reads_nothing_is_left(loaded, monkeypatch):
    monkeypatch.setattr(live, "data", lambda value: b": " + b"x" * 6_000_000 + b"\n\n")
    monkeypatch.setattr(live, "TICK_S", 0.01)
    monkeypatch.setattr("nanokv.apps.serve.http.server.READER_S", 0.3)
    with slow(Serving(*loaded)) as server, streaming(server, ask(**ENDLESS)):
        watcher = Watcher(server)
        watched = watched_by(server)
        server.wait(lambda: watched.watchers == 0)
        watcher.connection.close()


def test_the_end_of_the_server_ends_the_stream_at_once(loaded, monkeypatch):
    monkeypatch.setattr(live, "CHECK_S", 60)
    with Serving(*loaded) as server, Watcher(server) as watcher:
        assert watcher.next()
        began = time.monotonic()
        server.stop.set()
        assert error(watcher.wait(lambda found: "error" in found))["code"] == "shutting_down"
        assert watcher.next() is None
        server.thread.join(20)
        assert not server.thread.is_alive() and time.monotonic() - began < live.CHECK_S / 2


def test_an_engine_that_has_died_ends_the_stream(loaded, monkeypatch):
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    with Serving(*loaded) as server, Watcher(server) as watcher:
        assert watcher.next()
        monkeypatch.setattr(server.engine_client.thread, "_send", lambda: 1 / 0)
        server.post(CHAT, ask(max_tokens=2))
        assert error(watcher.wait(lambda found: "error" in found))["code"] == "engine_failed"
        assert error(server.get("/live")[1])["code"] == "engine_failed"


def test_a_snapshot_that_fails_is_told_and_the_engine_goes_on(loaded, monkeypatch, caplog):
    monkeypatch.setattr("nanokv.apps.serve.run.engine_thread.snapshot", lambda *more: 1 / 0)
    with Serving(*loaded) as server, Watcher(server) as watcher:
        assert error(watcher.wait(lambda found: "error" in found))["code"] == "internal_error"
        assert server.post(CHAT, ask(max_tokens=2))[0] == 200
    assert "no snapshot of the engine: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("tab", ["a b", "x" * 65, "ü", "<b>"])
@pytest.mark.parametrize("path", ["/live", CHAT])
def test_a_wrong_tab_is_told(server, tab, path):
    method, body = ("GET", None) if path == "/live" else ("POST", ask())
    status, _, data = server.raw(method, path, body, {"X-Nanokv-Tab": tab.encode()})
    assert status == 400 and error(json.loads(data))["param"] == "X-Nanokv-Tab"
    server.wait(lambda: server.free)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_runs_its_own_script_only_and_talks_to_this_server_only(server):
    status, headers, data = server.raw("GET", "/")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    parts = [part.split() for part in headers["content-security-policy"].split(";")]
    policy = {name: values for name, *values in parts}
    for name in ("default-src", "frame-ancestors", "base-uri", "form-action", "trusted-types"):
        assert policy[name] == ["'none'"]
    assert policy["connect-src"] == ["'self'"] and policy["require-trusted-types-for"] == [
        "'script'"
    ]
    text = data.decode()
    for tag in ("script", "style"):
        (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == [f"'sha256-{digest}'"]
    assert (
        headers["referrer-policy"] == "no-referrer"
        and headers["x-content-type-options"] == "nosniff"
    )
    assert headers["x-frame-options"] == "DENY"
    # The name of a kind of element.
    assert set(re.findall(r"\w+://[^\"\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"<\w[^>]*\s(on\w+|src|style)\s*=", text.split("<script>")[0])
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)
    assert "{{" not in text


def test_with_keys_the_page_loads_and_the_stream_asks_for_one(loaded):
    with Serving(*loaded, keys=["secret"]) as server:
        status, headers, data = server.raw("GET", "/")
        assert status == 200 and b"secret" not in data and "set-cookie" not in headers
        assert server.raw("GET", "//")[0] == 200
        status, found = server.get("/live")
        assert status == 401 and error(found)["code"] == "invalid_api_key"
        with Watcher(server, key="secret") as watcher:
            assert watcher.next()["requests"] == []


@pytest.mark.parametrize("path", ["/", "/live"])
def test_the_page_of_another_site_and_an_unknown_host_get_nothing(server, path):
    assert server.get(path, {"Host": "evil.com"})[0] == 403
    assert server.get(path, {"Origin": "http://evil.com"})[0] == 403


def test_the_parts_of_the_page_are_package_data():
    folder = Path(page.__file__).parent
    project = tomllib.loads((folder.parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["nanokv.apps.serve.http"]
    declared = {path for pattern in patterns for path in folder.glob(pattern)}
    parts = {path for path in folder.rglob("*") if path.suffix in (".html", ".css", ".js")}
    assert parts == declared and {path.name for path in parts} == {
        *page.SCRIPTS,
        *page.STYLES,
        "live.html",
    }


def test_closing_the_page_frees_its_place(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    watched = watched_by(server)
    connection.request("GET", "/live")
    connection.getresponse().readline()
    assert watched.watchers == 1
    connection.close()
    server.wait(lambda: watched.watchers == 0)
