"""`nanokv serve` in a process of its own, and requests to it."""

import contextlib
import http.client
import json
import re

from cli_helpers import spawn_cli
from serving import CHAT


@contextlib.contextmanager
def serving(folder, *flags):
    """(process, port) of a server that is ready."""
    process = spawn_cli(
        "serve", "-m", folder, "--port", "0", "--plain", *flags, text=True, bufsize=1
    )
    try:
        line = ""
        while not (
            found := re.search(r"http://127\.0\.0\.1:(\d+)/v1 · page http://127\.0\.0\.1:\1 ", line)
        ):
            line = process.stderr.readline()
            assert line, process.wait()
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()


def send(port, body, method="POST", path=CHAT) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, json.dumps(body))
    return connection


def ended(process) -> int:
    process.stdout.close()
    return process.wait(60)
