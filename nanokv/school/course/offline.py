"""Limits for a kernel that runs an untrusted notebook: no network, and a bound on its output.

The network is blocked by an audit hook, which Python code cannot remove; connections within this
machine remain possible. The hook sees only Python's own sockets: native code and other programs
are not stopped. Where that matters, run everything in a container.
"""

import ipaddress
import sys
from typing import Any
from urllib.parse import urlsplit

from nanokv.school.course import log

OUTPUT_LIMIT = 5_000_000  # characters that a cell may print
EVENTS = (
    "socket.connect",
    "socket.sendto",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "urllib.Request",
)


def block() -> None:
    """Refuse every connection and name lookup beyond this machine, for the rest of the process."""
    sys.addaudithook(_hook)


def _hook(event: str, args: tuple) -> None:
    if event not in EVENTS:
        return
    if event == "urllib.Request":
        address = (urlsplit(args[0]).hostname or "no host",)
    elif event in ("socket.connect", "socket.sendto"):
        address = args[1]
    else:
        address = args[:1]
    if isinstance(address, tuple) and address and not is_local(address[0]):
        raise ConnectionRefusedError(f"no network here: {address[0]}")


def is_local(host: Any) -> bool:
    """Is the host this machine: localhost, 127.0.0.0/8, ::1, or no host (all local addresses)?"""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    host = str(host or "localhost")
    if host in ("localhost", "0.0.0.0"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_ipython_extension(shell: Any) -> None:
    """Runs first in a kernel with --IPKernelApp.extensions=nanokv.school.course.offline."""
    block()
    log.take_key()
    for stream in (sys.stdout, sys.stderr):
        _limit(stream, shell.events)


def _limit(stream, events) -> None:
    """Make a stream raise OSError once a cell has printed more than OUTPUT_LIMIT characters.

    Outputs are kept in memory, so a cell that prints without end would fill it.
    """
    write = stream.write
    printed = 0

    def begin(cell):
        nonlocal printed
        printed = 0

    def limited(text):
        nonlocal printed
        printed += len(text)
        if printed > OUTPUT_LIMIT:
            raise OSError(f"more than {OUTPUT_LIMIT:,} characters were printed")
        return write(text)

    events.register("pre_run_cell", begin)
    stream.write = limited
