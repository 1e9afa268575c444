"""GET /live: the engine as it is now, as server-sent events, a few times a second and only when something changed.

One snapshot is taken for all who watch, and none while nobody does. A watcher that reads slowly skips snapshots: it
gets the newest when it has taken the one before. The stream ends with the server, with the engine, and with its reader.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanokv import __version__
from nanokv.apps.serve.api.errors import ApiError, internal, where
from nanokv.apps.serve.api.forms import data
from nanokv.apps.serve.api.prompts import Served
from nanokv.apps.serve.http.response import EVENT_STREAM, Limits, gone
from nanokv.apps.serve.run.engine_client import EngineClient
from nanokv.apps.serve.run.messages import Snapshot
from nanokv.apps.serve.run.snapshot import view

logger = logging.getLogger(__name__)
WATCHERS = 32
TICK_S = 0.2  # between two snapshots
CHECK_S = 0.5  # after so long without news: does the engine still live?
HEADERS = [*EVENT_STREAM, (b"x-content-type-options", b"nosniff")]
TAB, TABS = "X-Nanokv-Tab", "[A-Za-z0-9_-]{0,64}"


def tab_of(request: Request) -> str:
    """The tab of the page that asks, as it names itself; "" for every other client."""
    tab = request.headers.get(TAB, "")
    if not re.fullmatch(TABS, tab):
        raise ApiError(
            400, "X-Nanokv-Tab is made of at most 64 ASCII letters, digits, - and _", TAB
        )
    return tab


class Live:
    """The newest snapshot, for all who watch."""

    def __init__(self, client: EngineClient, served: Served):
        self.client, self.watchers = client, 0
        self.facts = {"model": served.names[0], "context": served.context, "version": __version__}
        self.taken: dict | None = None
        self.news = asyncio.Event()
        self._task: asyncio.Task | None = None
        self._failed = False
        client.admission.at_end.append(self.wake)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A place among those who watch."""
        self.check()
        if self.watchers >= WATCHERS:
            raise ApiError(
                429,
                f"{self.watchers} pages watch the cache, which is the limit; close one",
                code="too_many_watchers",
                headers={"retry-after": "10"},
            )
        self.watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._take())
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._task.cancel()
                self._task = self.taken = None

    def check(self) -> None:
        """ApiError where there is nothing to see any more."""
        self.client.admission.check()
        if self._failed:
            raise internal()

    def wake(self) -> None:
        """Each watcher looks again."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    async def _take(self) -> None:
        try:
            while True:
                taken = await self.client.ask(Snapshot)
                if taken != self.taken:
                    self.taken = taken
                    self.wake()
                await asyncio.sleep(TICK_S)
        except ApiError:  # the end: each watcher finds out by itself
            pass
        except Exception as error:
            logger.error("no snapshot of the engine: %s", where(error))
            self._failed = True


class Watching(Response):
    """The stream of one watcher."""

    def __init__(self, live: Live, salt: str, tab: str, limits: Limits):
        self.live, self.salt, self.tab, self.limits = live, salt, tab, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the reader goes, or the server ends; server.py sends away who does not read."""
        with self.live.watching():
            tasks = [asyncio.create_task(self._send(send)), asyncio.create_task(gone(receive))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async for part in self.events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def events(self) -> AsyncIterator[bytes]:
        """A snapshot whenever what this client may see of it is new; a comment every `keepalive_s` besides."""
        shown: dict | None = None
        said = monotonic()
        try:
            while True:
                self.live.check()
                news, taken = self.live.news, self.live.taken
                now = view(taken, self.salt, self.tab) if taken else None
                if now is not None and now != shown:
                    shown, said = now, monotonic()
                    yield data(self.live.facts | now)
                elif monotonic() - said > self.limits.keepalive_s:
                    said = monotonic()
                    yield b": keepalive\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), CHECK_S)
        except ApiError as error:
            yield data(error.body)
