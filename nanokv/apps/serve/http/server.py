"""uvicorn around the application, with deadlines for clients and a graceful shutdown."""

import asyncio
import contextlib
import gc
import json
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
import uvicorn.server
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.http import connections
from nanokv.apps.serve.http.connections import CONNECTIONS, Listener, Places
from nanokv.apps.serve.http.security import HEADER_BYTES, Guard
from nanokv.apps.serve.run.engine_client import EngineClient
from nanokv.errors import NanoKVError

HEADER_S = 15.0  # for all headers of a request to arrive
UNREAD_S = 5.0  # for the rest of a body whose request has been answered
READER_S = 60.0  # for a client to read the data that was sent
FAREWELL_S = 3.0  # for a client to read the last bytes at shutdown
# Seconds after which a thread that waits for Python's lock (the GIL) gets it. By default 5 ms: the
# event loop waits so long at each of its system calls, and the engine at each operation of torch,
# while another thread reads a large body.
SWITCH_S = 0.0005


class State(uvicorn.server.ServerState):
    """The state that all connections of a server share."""

    def __init__(self, places: Places):
        super().__init__()
        self.places = places


class Protocol(H11Protocol):
    """Closes connections whose request does not arrive or whose client does not read.

    uvicorn would wait forever. `transport.close()` also waits, until everything is written; only
    `abort()` does not.
    """

    server_state: State
    _address: str | None = None  # under which the connection is counted
    _deadline: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Writing pauses as soon as the socket does not accept everything.
        transport.set_write_buffer_limits(high=0)
        try:
            address = connections.address_of(self.client)
            self.server_state.places.take(address)
        except ApiError as error:
            connections.logger.warning("a connection was refused: %s", error)
            self._end_with(error, b"Service Unavailable")
            return
        self._address = address
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Further bytes of the body cancel uvicorn's own timer, but not this one.
        if self.conn.their_state is h11.SEND_BODY:
            self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._address is not None:
            self.server_state.places.leave(self._address)
            self._address = None
        self._stop_waiting()
        self._stop_unread()
        self.resume_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader = self.loop.call_later(READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader is not None:
            self._reader.cancel()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP in OpenAI's form; once a response has begun, only close."""
        self._end_with(ApiError(400, msg, code="invalid_http"), b"Bad Request")

    def _end_with(self, error: ApiError, reason: bytes) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            headers |= error.headers
            start = h11.Response(
                status_code=error.status, headers=list(headers.items()), reason=reason
            )
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _wait_for_headers(self) -> None:
        if self.conn.their_state is not h11.SEND_BODY:
            self._stop_unread()
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_S, self.transport.close)

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def share_the_interpreter() -> None:
    """Keep the pauses of this process short. Called once, when the model is loaded.

    The garbage collector would look at all objects of torch and the model again and again: 0.1 s
    each time, in which no other thread runs. What exists now stays until the end.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """Shuts down when `stop()` is true or the engine has lost a rank.

    It then accepts no requests, lets running answers finish for `grace` seconds, and fails the
    rest. Once `hurry()` is true, it fails them at once.
    """

    def __init__(
        self,
        app: Guard,
        client: EngineClient,
        stop: Callable[[], bool],
        hurry: Callable[[], bool],
        grace: float = 10.0,
        ready: Callable[[], None] = lambda: None,
        most: int = CONNECTIONS,
    ):
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=HEADER_BYTES,
                backlog=connections.ACCEPTED,
                timeout_graceful_shutdown=int(grace) + 10,  # in case _farewell fails
            )
        )
        self.server_state = State(Places(most, client.admission.places))
        self.client = client
        self.stop = stop
        self.hurry = hurry
        self.grace = grace
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(connections.failed)
        self.client.start()
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(connections.PENDING)  # asyncio has set it to ACCEPTED
        self.ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self.stop() or self.client.lost is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self.client.end(self.grace))
        others = [asyncio.create_task(self._hurry()), asyncio.create_task(self._farewell(ending))]
        await super().shutdown(sockets)
        for task in others:
            task.cancel()
        await ending
        await asyncio.to_thread(self.client.thread.join)

    async def _farewell(self, ending: asyncio.Task) -> None:
        await asyncio.wait([ending])
        await asyncio.sleep(FAREWELL_S)
        for connection in list(self.server_state.connections):  # of clients that read nothing
            connection.transport.abort()

    async def _hurry(self) -> None:
        while not self.hurry():
            await asyncio.sleep(0.05)
        await self.client.end(0)
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the command line has its own signal handlers."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket before the model is loaded; NanoKVError if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sets TCP_NODELAY only if the protocol is given. Without it, the second part of an
        # answer waits 40 ms.
        found = Listener(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()  # clients wait while the model loads; a second server fails to bind
    except OSError as error:
        hint = "--port 0 takes a free one"
        if isinstance(error, socket.gaierror):
            hint = "--host 127.0.0.1"
        raise NanoKVError(f"cannot listen at {host} port {port}: {error.strerror}", hint) from error
    return found


def url(bound: socket.socket) -> str:
    """The server's address for a browser, as in http://127.0.0.1:8000."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    if ":" in host:
        return f"http://[{host}]:{port}"
    return f"http://{host}:{port}"
