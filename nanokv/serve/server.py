"""uvicorn around the application: it listens, gives headers a deadline, and ends so that running answers are told."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanokv.errors import NanoKVError
from nanokv.serve.security import Guard
from nanokv.serve.worker import Worker

HEADER_BYTES = 16_384
HEADER_S = 15.0  # for all headers of a request to arrive
CONNECTIONS = 1_000
FAREWELL_S = 3.0  # for a client to take the last bytes


class Protocol(H11Protocol):
    """Closes a connection whose request does not arrive: uvicorn waits for the rest of the headers for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """Ends when `stop()` is true: nothing new is taken, answers have `grace` seconds, and none when `hurry()` is true.
    """

    def __init__(self, app: Guard, worker: Worker, stop: Callable[[], bool], hurry: Callable[[], bool],
                 grace: float = 10.0, ready: Callable[[], None] = lambda: None):  # fmt: skip
        super().__init__(uvicorn.Config(
            app, http=Protocol, ws="none", loop="asyncio", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, h11_max_incomplete_event_size=HEADER_BYTES,
            limit_concurrency=CONNECTIONS, timeout_graceful_shutdown=int(grace + FAREWELL_S),
        ))  # fmt: skip
        self.worker, self.stop, self.hurry, self.grace, self.ready = worker, stop, hurry, grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.start()
        await super().startup(sockets)
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self.worker.end(self.grace))
        hurrying = asyncio.create_task(self._hurry())
        await super().shutdown(sockets)
        hurrying.cancel()
        await ending
        await asyncio.to_thread(self.worker.join)

    async def _hurry(self) -> None:
        while not self.hurry():
            await asyncio.sleep(0.05)
        await self.worker.end(0)
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The command line has its own handlers."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before anything is loaded; NanoKVError where the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # who comes while the model is loaded waits; a second server is refused now
    except OSError as error:
        hint = "--port 0 takes a free one" if not isinstance(error, socket.gaierror) else "--host 127.0.0.1"
        raise NanoKVError(f"cannot listen at {host} port {port}: {error.strerror}", hint) from error
    return found


def url(bound: socket.socket) -> str:
    """http://127.0.0.1:8000"""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
