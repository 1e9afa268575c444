"""`nanokv serve` as a process: its flags, the line that says that it is ready, and how it ends."""

import contextlib
import http.client
import importlib.util
import json
import signal
import socket
import time

import pytest

from cli_helpers import errors_in
from nanokv.apps.cli.commands.serve import NEEDED
from nanokv.apps.serve.http.server import listen
from nanokv.errors import NanoKVError
from nanokv.support import installing
from served_command import ended, send, serving
from serving import CHAT, ask


def test_a_server_answers_and_sigterm_lets_the_running_answer_finish(endless_folder):
    with serving(endless_folder, "--api-key", "secret", "--grace", "60") as (process, port):
        assert send(port, ask()).getresponse().status == 401
        assert send(port, None, "GET", "/%1b%5b2J").getresponse().status == 401
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps(ask(max_tokens=300, stream=True))
        connection.request("POST", CHAT, body, {"Authorization": "Bearer secret"})
        response = connection.getresponse()
        response.readline()
        process.send_signal(signal.SIGTERM)
        events = response.read().decode().split("\n\n")
        assert events[-2] == "data: [DONE]" and '"finish_reason":"length"' in events[-3]
        assert ended(process) == 143
        log = process.stderr.read()
        assert f"POST {CHAT} 401" in log and "→ 300 out" in log and "Traceback" not in log
        assert r"GET /\u001b[2J 401" in log and "\x1b" not in log


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_ends_a_server_at_once(endless_folder, number):
    with serving(endless_folder, "--grace", "600") as (process, port):
        response = send(port, ask(max_tokens=50_000, stream=True)).getresponse()
        response.readline()
        process.send_signal(number)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(number)
        events = response.read().decode().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert ended(process) == (130 if number == signal.SIGINT else 143)


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_its_clients_with_an_error_and_can_be_started_again(
    endless_folder,
):
    with serving(endless_folder) as (process, port):
        response = send(port, ask(max_tokens=50_000, stream=True)).getresponse()
        response.readline()
        process.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
    with serving(endless_folder, "--port", port) as (_, again):
        assert again == port and send(port, ask(max_tokens=1)).getresponse().status == 200


def test_a_port_of_a_server_that_is_still_loading_is_in_use():
    with (
        listen("127.0.0.1", 0) as bound,
        pytest.raises(NanoKVError, match="Address already in use") as raised,
    ):
        listen("127.0.0.1", bound.getsockname()[1])
    assert "--port 0" in raised.value.hint


def test_the_second_part_of_an_answer_does_not_wait_for_the_first_to_be_acknowledged(server):
    """Nagle's algorithm and delayed acknowledgements would cost 40 ms per answer."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        (held,) = server.server.server_state.connections
        accepted = held.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_key_of_the_environment_is_checked_as_one_of_the_command_line(cli, monkeypatch):
    """A file read with its line break would make every key a wrong one."""
    monkeypatch.setenv("NANOKV_API_KEY", "abc\n")
    code, out, err = cli("serve", "--port", "0")
    assert (code, out) == (
        2,
        "",
    ) and "NANOKV_API_KEY: a key is made of visible ASCII characters" in err


def test_a_port_in_use_is_told_before_the_model_is_loaded(cli, monkeypatch):
    monkeypatch.setattr("nanokv.apps.cli.commands.serve.load_model", lambda *given: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = cli("serve", "--port", port)
    message, hint = errors_in(err)
    assert (code, out) == (
        2,
        "",
    ) and message == f"cannot listen at 127.0.0.1 port {port}: Address already in use"
    assert hint == "--port 0 takes a free one"
    code, _, err = cli("serve", "--host", "no such host")
    assert code == 2 and errors_in(err)[0].startswith("cannot listen at no such host")


def test_without_the_extra_it_says_what_to_install(cli, monkeypatch):
    there = importlib.util.find_spec
    find = lambda name, *more: None if name == "uvicorn" else there(name, *more)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", find)
    code, _, err = cli("serve")
    message, hint = errors_in(err)
    assert (code, message) == (2, "nanokv serve needs uvicorn") and hint == installing.hint(NEEDED)


def test_the_name_that_was_typed_is_a_name_of_the_model(tiny_folder, tmp_path):
    """A link's own name, and the path as it was typed; another name is refused with the flag that gives it."""
    link = tmp_path / "linked"
    link.symlink_to(tiny_folder)
    with serving(link, "--alias", "gpt-4o") as (_, port):
        for name in (tiny_folder.name, str(link), "linked", "gpt-4o"):
            assert send(port, ask(max_tokens=1, model=name)).getresponse().status == 200
        response = send(port, ask(max_tokens=1, model="gpt-5")).getresponse()
        found = json.loads(response.read())
        assert response.status == 404 and "--alias NAME" in found["hint"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key", ""], "--api-key: "),
        (["--api-key", "two words"], "--api-key: "),
        (["--port", "70000"], "--port: "),
        (["--cache", "dict"], "--cache dict with serve"),
        (["--cache", "static"], "--cache static with serve"),
        (["--queue", "-1"], "--queue: "),
        (["--pages", "5", "--cache", "prefix:pages=6"], "contradict each other"),
    ],
)
def test_wrong_flags_are_told_at_once(cli, flags, said):
    code, _, err = cli("serve", *flags)
    assert code == 2 and said in errors_in(err)[0]
