"""GET /live: the engine's state as server-sent events, sent up to five times a second on change.

All watchers share one snapshot, and none is taken while there are no watchers. A slow watcher
skips snapshots: after each one it gets the newest. The stream ends when the server shuts down, the
engine fails, or the watcher disconnects.
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
CHECK_S = 0.5  # longest wait for news before checking that the engine is alive
HEADERS = [*EVENT_STREAM, (b"x-content-type-options", b"nosniff")]
TAB = "X-Nanokv-Tab"
TABS = "[A-Za-z0-9_-]{0,64}"


def tab_of(request: Request) -> str:
    """The id of the web page's tab that sends the request; "" for other clients."""
    tab = request.headers.get(TAB, "")
    if not re.fullmatch(TABS, tab):
        raise ApiError(
            400, "X-Nanokv-Tab is made of at most 64 ASCII letters, digits, - and _", TAB
        )
    return tab


class Live:
    """The newest snapshot, shared by all watchers."""

    def __init__(self, client: EngineClient, served: Served):
        self.client = client
        self.watchers = 0
        self.facts = {"model": served.names[0], "context": served.context, "version": __version__}
        self.taken: dict | None = None
        self.news = asyncio.Event()
        self._task: asyncio.Task | None = None
        self._failed = False
        client.admission.at_end.append(self.wake)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count one more watcher; ApiError (429) above WATCHERS. The first one starts snapshots."""
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
        """Raise ApiError if there will be no more snapshots."""
        self.client.admission.check()
        if self._failed:
            raise internal()

    def wake(self) -> None:
        """Wake every watcher, to look at the newest state."""
        news = self.news
        self.news = asyncio.Event()
        news.set()

    async def _take(self) -> None:
        try:
            while True:
                taken = await self.client.ask(Snapshot)
                if taken != self.taken:
                    self.taken = taken
                    self.wake()
                await asyncio.sleep(TICK_S)
        except ApiError:  # the server is shutting down; each watcher notices through `check`
            pass
        except Exception as error:
            logger.error("no snapshot of the engine: %s", where(error))
            self._failed = True


class Watching(Response):
    """The stream of one watcher."""

    def __init__(self, live: Live, salt: str, tab: str, limits: Limits):
        self.live = live
        self.salt = salt
        self.tab = tab
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the client leaves or the server ends; server.py drops clients that stall."""
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

    def _view(self, taken: dict) -> dict:
        """What this client may see, with the places that its key has and could take."""
        now = view(taken, self.salt, self.tab)
        share = self.live.client.admission.share(self.salt)
        return now | {"key": now["key"] | {"places": share.taken, "share": share.places}}

    async def events(self) -> AsyncIterator[bytes]:
        """A snapshot when this client's view changes; a comment after `keepalive_s` of silence."""
        shown: dict | None = None
        said = monotonic()
        try:
            while True:
                self.live.check()
                news = self.live.news
                taken = self.live.taken
                now = None
                if taken:
                    now = self._view(taken)
                if now is not None and now != shown:
                    shown = now
                    said = monotonic()
                    yield data(self.live.facts | now)
                elif monotonic() - said > self.limits.keepalive_s:
                    said = monotonic()
                    yield b": keepalive\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), CHECK_S)
        except ApiError as error:
            yield data(error.body)
