"""Connections: how many are open, in all and per address, and what happens without descriptors.

A process has a limit of open descriptors (`ulimit -n`, often 1,024), and every connection needs
one. So the server raises its soft limit, keeps SPARE of them free, and refuses further connections.
"""

import errno
import ipaddress
import logging
import socket
import time
from collections import Counter
from typing import Any

from nanokv.apps.serve.api.errors import ApiError, where
from nanokv.errors import NanoKVError

logger = logging.getLogger(__name__)
CONNECTIONS = 1_000
# Descriptors for all else: models, template and prefill processes, and connections that are
# accepted but not yet counted: 4 turns of the event loop with up to ACCEPTED each.
SPARE = 64
ACCEPTED = 8  # connections per turn of the event loop
FEWEST = 8  # connections with which a server is of use
# The soft limit is raised to at most this one: some programs close all possible descriptors.
DESCRIPTORS = 4_096
PENDING = 1_024  # connections that wait in the kernel
PAUSE_S = 0.5  # after a failed accept; asyncio tries again after one second
OUT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def allowed() -> int:
    """Raise the soft limit of descriptors, and return how many connections it leaves room for.

    Raises NanoKVError for fewer than FEWEST.
    """
    descriptors = raised_limit()
    if descriptors - SPARE < FEWEST:
        raise NanoKVError(
            f"this process may open {descriptors} files, nanokv serve needs {SPARE + FEWEST}",
            "ulimit -n 1024",
        )
    return min(CONNECTIONS, descriptors - SPARE)


def raised_limit() -> int:
    """The soft limit of open files, after it was raised as far as the hard limit allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS
    wanted = DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # a sandbox forbids it
        return soft
    return wanted


class Places:
    """The open connections. Used in the event loop only.

    An address has a quarter of all places. If more requests than that can run and wait, it has one
    for each of them, but at most three quarters: silent connections of one address never keep the
    others out.
    """

    def __init__(self, most: int, requests: int):
        self.most = most
        self.per_address = max(1, min(max(most // 4, requests), most * 3 // 4))
        self.open: Counter[str] = Counter()

    def take(self, address: str) -> None:
        """Count a connection; ApiError (503) if there is no place for it."""
        if self.open[address] >= self.per_address:
            self._refuse(f"{self.per_address:,} connections of one address are open")
        if self.open.total() >= self.most:
            self._refuse(f"{self.most:,} connections are open")
        self.open[address] += 1

    def leave(self, address: str) -> None:
        """Free the place of a connection."""
        self.open[address] -= 1
        if not self.open[address]:
            del self.open[address]

    def _refuse(self, words: str) -> None:
        raise ApiError(
            503,
            f"{words}, which is the limit",
            code="overloaded",
            headers={"connection": "close", "retry-after": "1"},
        )


def address_of(peer: Any) -> str:
    """The name under which a host is counted: its IPv4 address, or the /64 of its IPv6 address.

    peer: the socket's address of the other side. A host chooses freely within its /64.
    """
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except (IndexError, TypeError, ValueError, AttributeError):
        return ""
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Listener(socket.socket):
    """A listening socket that fails at most once in PAUSE_S for lack of descriptors.

    asyncio's accept loop tries again at once after such a failure and schedules one more retry for
    each (python/cpython#151615), so that a core is busy until connections close.
    """

    _paused_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        if time.monotonic() < self._paused_until:
            raise BlockingIOError  # ends the loop
        try:
            return super().accept()
        except OSError as error:
            if error.errno in OUT:
                self._paused_until = time.monotonic() + PAUSE_S
            raise


class Seldom(logging.Filter):
    """Passes one record per second. The next one gives the number of dropped ones."""

    def __init__(self) -> None:
        super().__init__()
        self.next = 0.0  # monotonic seconds
        self.dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self.next:
            self.dropped += 1
            return False
        if self.dropped:
            record.msg = f"{record.getMessage()} ({self.dropped:,} more lines were left out)"
            record.args = ()
        self.next = now + 1
        self.dropped = 0
        return True


def failed(loop: Any, context: dict[str, Any]) -> None:
    """The event loop's exception handler: one line, without text of a client."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in OUT:
        logger.error("no connection can be accepted: %s", error.strerror)
    elif error is not None:
        logger.error("the event loop: %s", where(error))
    else:
        logger.error("the event loop: %s", context.get("message", ""))


logger.addFilter(Seldom())
