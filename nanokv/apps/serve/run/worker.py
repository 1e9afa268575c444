"""The engine's own thread, and a request's place in its queue.

    tickets = worker.open(tab, count)           one per answer; 429 where the queue is full; `tab`: of the page, or ""
    ticket.submit(job, param)                   returns at once; a refusal of the engine comes out of news()
    async for i, pieces in news(tickets): ...   text as it comes; raises ApiError, or ClientGone
    ticket.close()                              always: frees the place, and the engine's pages if it still runs

Only this thread touches the engine. Commands go in through a queue and are carried out between two steps; what the
requests of a step have produced comes back to the event loop in one call. A Ticket's methods belong to the event loop,
but for those that say otherwise.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.errors import ApiError, internal, refused
from nanokv.apps.serve.api.prompts import Job
from nanokv.apps.serve.run.metrics import Metrics
from nanokv.apps.serve.run.prefill import HERE, Here
from nanokv.apps.serve.run.snapshot import Ended, ended, snapshot
from nanokv.decoding.draw import SamplingParams, Step
from nanokv.engine import Engine, Request
from nanokv.engine.prefilled import Prefilled
from nanokv.engine.request import FINISHED
from nanokv.errors import NanoKVError, ParallelError

logger = logging.getLogger(__name__)
LONGEST_STEP_S = 30.0
REMEMBERED = 32  # requests of pages that have ended: a page shows what its last one has left
ENDED = object()  # the last event of a ticket that nothing has gone wrong with


class Worker:
    """`queue_size` requests may wait besides those that run; `prefills`: where prompts are computed (prefill.py). Made
    and used in the event loop's thread."""

    def __init__(self, engine: Engine, queue_size: int, prefills: Here = HERE):
        self.prefills = prefills
        self.engine, self.places = engine, engine.scheduler.max_running + queue_size
        self.metrics = Metrics()
        self.tickets: set[Ticket] = set()
        self.closing = False
        self.lost: ParallelError | None = None  # why the engine's ranks no longer answer
        self.at_end: list[Callable[[], None]] = []  # called when nothing more is taken
        self._waits: set[asyncio.Timeout] = set()
        self._active: list[Ticket] = []  # the engine's thread only, as are the next two
        self._echoing: list[Ticket] = []  # their prompts' log-probabilities come first
        self._left: deque[Ended] = deque(maxlen=REMEMBERED)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nanokv-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """In a running event loop, once."""
        self._loop = asyncio.get_running_loop()
        self.prefills.start(self._inbox.put)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests are still answered."""
        return self._thread.is_alive()

    def open(self, tab: str = "", count: int = 1, held: "Sequence[Ticket]" = ()) -> "list[Ticket]":
        """Places for all answers of a request, or for none. `held`: those that it has already."""
        self.check_open()
        if count > self.places:
            raise ApiError(400, f"{count:,} answers in one request, this server has {self.places:,} places",
                           "n", hint="nanokv serve --queue N makes more")  # fmt: skip
        if len(self.tickets) - len(held) + count > self.places:
            self.metrics.count("rejected")
            seconds = self.metrics.retry_after()
            raise ApiError(429, f"{self.places:,} requests run or wait, which is the limit; try again in {seconds} s",
                           code="queue_full", headers={"retry-after": str(seconds)})  # fmt: skip
        events = held[0].events if held else asyncio.Queue()
        more = [Ticket(self, tab, events, index) for index in range(len(held), count)]
        self.tickets.update(more)
        return [*held, *more]

    def check_open(self) -> None:
        """ApiError where nothing is answered any more."""
        if self.closing:  # the engine's thread may have ended already
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if not self.alive:
            raise ApiError(503, "the engine has failed, and the server must be started again", code="engine_failed")

    @contextlib.asynccontextmanager
    async def wait(self, seconds: float) -> AsyncIterator[None]:
        """Around a wait for a client: TimeoutError after so many seconds, ApiError as soon as the server ends."""
        self.check_open()
        try:
            async with asyncio.timeout(seconds) as wait:
                self._waits.add(wait)
                yield
        except TimeoutError:
            self.check_open()
            raise
        finally:
            self._waits.discard(wait)

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """function(engine), between two steps."""
        self.check_open()
        future = asyncio.get_running_loop().create_future()

        def command():
            try:
                outcome, value = future.set_result, function(self.engine)
            except Exception as error:
                outcome, value = future.set_exception, error
            self._tell(lambda: future.done() or outcome(value))

        self._inbox.put(command)
        return await future

    async def snapshot(self) -> dict:
        """All requests and pages, between two steps (nanokv/apps/serve/run/snapshot.py)."""
        tabs = lambda: {ticket.request.number: ticket.tab for ticket in self._active}  # noqa: E731
        return await self.call(lambda engine: snapshot(engine, tabs(), self._left))

    async def end(self, grace: float) -> None:
        """Take nothing more; what runs has `grace` seconds to finish, then it is told. Ends the thread."""
        self.closing = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)
        for tell in self.at_end:
            tell()
        until = perf_counter() + grace
        while self.tickets and perf_counter() < until:
            await asyncio.sleep(0.02)
        for ticket in list(self.tickets):
            ticket.fail(ApiError(503, "the server was shut down before the answer was complete", code="shutting_down"))
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the thread, which ends after its step: Python cannot end while it is inside of torch."""
        self._thread.join(LONGEST_STEP_S)
        self.prefills.close()

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take():
                self._step()
                self.prefills.pump()
                self._score()
                self._deliver()
        except ParallelError as error:
            self.lost = error
        except BaseException as error:
            logger.error("the engine's thread has ended: %s", where(error))
            raise
        finally:
            self._tell(self._fail_all)

    def _fail_all(self) -> None:
        for ticket in self.tickets:
            ticket.fail(internal())

    def _step(self) -> None:
        if self.engine.idle:
            return
        try:
            self.engine.step()
        except ParallelError:  # a rank is gone: no step can follow
            raise
        except Exception as error:  # out of memory, or our bug: the same step would fail again
            for ticket in self._active:
                if ticket.request.finish_reason is None:
                    ticket.request.error = error
                    self.engine.cancel(ticket.request, "error")

    def _score(self) -> None:
        """One chunk of the oldest prompt whose log-probabilities were asked for, so that the others go on."""
        if self._echoing:
            ticket = self._echoing[0]
            try:
                if self.engine.aside(ticket.job.echo.advance):
                    self._echoing.remove(ticket)
                    ticket.begin()
            except Exception as error:
                self._echoing.remove(ticket)
                reason = refused(error, "echo") if isinstance(error, NanoKVError) else self.fault(error)
                self._tell(lambda: ticket.fail(reason))

    def _take(self) -> bool:
        """Carry out what came in; wait for something where there is nothing to do. False: the end."""
        while not (self._active or self._echoing) or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            command()
        return True

    def _deliver(self) -> None:
        """What the step has given to each request, in one call for all."""
        news = [(ticket, *ticket.take_news()) for ticket in self._active]
        self._active = [ticket for ticket, _, event in news if event is None]
        if any(pieces or event is not None for _, pieces, event in news):
            self._tell(lambda: self._spread(news))

    @staticmethod
    def _spread(news: "list[tuple[Ticket, list[Piece], Any]]") -> None:
        for ticket, pieces, event in news:
            ticket.hear(pieces, event)

    @staticmethod
    def fault(error: Exception) -> ApiError:
        """Logged; what the client is told, which is no more than that where it is our bug."""
        if isinstance(error, ApiError):
            return error
        logger.error("a request failed: %s", where(error))
        return internal()

    def _tell(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None, "start() has not been called"
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop has ended, and nobody listens
            logger.debug("the event loop has ended")


class Ticket:
    """One answer, from the arrival of its request to its last token."""

    def __init__(self, worker: Worker, tab: str, events: asyncio.Queue, index: int):
        self.worker, self.tab, self.events, self.index = worker, tab, events, index
        self.opened = perf_counter()
        self.request: Any = None  # the engine's, once it has it
        self.job: Any = None
        self.param = ""
        self._fresh: list[Piece] = []  # the engine's thread only, as is _seen
        self._seen = 0.0
        self._told = False  # the reader has been, or will be, told how it ended

    def submit(self, job: Job, param: str) -> None:
        """Into the engine, which may be in the middle of a step. Should it refuse the job, although prompts.py has
        checked it, the field `param` is named."""
        self.job, self.param = job, param
        self.worker._inbox.put(self.begin if job.echo is None else lambda: self.worker._echoing.append(self))

    def hear(self, pieces: list[Piece], event: Any) -> None:
        """From the engine's thread, through the loop."""
        for part in (pieces, event):
            if part:
                self.events.put_nowait((self, part))
        self._told = self._told or event is not None

    def fail(self, error: Exception) -> None:
        """End it here, for a reason that the engine does not know."""
        if not self._told:
            self._told = True
            self.events.put_nowait((self, error))
            self._cancel()

    def close(self) -> None:
        """Free the place; what still runs is cancelled, in prefill too."""
        if self in self.worker.tickets:
            self.worker.tickets.discard(self)
            self._cancel()
            self.worker.metrics.finished(self)

    def _cancel(self) -> None:
        def cancel():
            self.worker.prefills.forget(self)
            if self.request is not None:
                held = self.request.fed
                self.worker.engine.cancel(self.request)
                if self.tab:
                    self.worker._left.append(ended(self.worker.engine, self.request, self.tab, held))
                    self.tab = ""  # once
            self.worker._active = [ticket for ticket in self.worker._active if ticket is not self]
            self.worker._echoing = [ticket for ticket in self.worker._echoing if ticket is not self]

        self.worker._inbox.put(cancel)

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """What is to be generated, after the prompt where that is repeated."""
        if self.job.wanted == 0:
            self.enter(None)
        else:
            self.worker.prefills.begin(self)

    def enter(self, prefilled: Prefilled | None) -> None:
        """Into the engine, with what another process has prefilled."""
        echo, submit = self.job.echo, partial(self.worker.engine.submit, on_token=self._put, prefilled=prefilled)
        try:
            self.request = submit(self.job.ids, **self.job.settings) if self.job.wanted != 0 else nothing(self.job)
            self._fresh += [] if echo is None else [echo.piece()]
            self.worker._active.append(self)
        except Exception as error:
            reason = refused(error, self.param) if isinstance(error, NanoKVError) else self.worker.fault(error)
            self.worker._tell(lambda: self.fail(reason))

    def _put(self, request: Request, step: Step) -> None:
        """The engine's callback for each token."""
        now = perf_counter()
        self.worker.metrics.token(now - (self._seen or self.opened), first=not self._seen)
        self._seen = now
        self._fresh += self.job.text.put(step, last=request.finish_reason is not None)
        if self.job.text.complete:
            self.worker.engine.cancel(request, "stop")

    def take_news(self) -> tuple[list[Piece], Any]:
        """(text since the last time, and how it ended if it has)."""
        fresh, self._fresh = self._fresh, []
        if self.request.finish_reason is None:
            return fresh, None
        if self.request.error is None:
            return fresh, ENDED
        return fresh, self.worker.fault(self.request.error)


async def news(tickets: Sequence[Ticket], patience: float | None = None) -> AsyncIterator[tuple[int, list[Piece]]]:
    """(index, text) as it comes, until all have ended: then an answer's pieces are []. (-1, []) after `patience`
    seconds without any."""
    running = len(tickets)
    while running:
        try:
            ticket, event = await asyncio.wait_for(tickets[0].events.get(), patience)
        except TimeoutError:
            yield -1, []
            continue
        if isinstance(event, Exception):
            raise event
        running -= event is ENDED
        yield ticket.index, [] if event is ENDED else event


def nothing(job: Job) -> Request:
    """A request of no tokens, which is complete: the prompt is only repeated."""
    now = perf_counter()
    return Request(-1, job.ids, SamplingParams(), 0, 0, (), arrived=now, state=FINISHED, finish_reason="length",
                   admitted=now, finished=now)  # fmt: skip


def where(error: BaseException) -> str:
    """The error's type and the line that raised it. Not its text, which may quote what a client sent."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    logger.debug("%s", "".join(traceback.format_exception(error)))
    return f"{type(error).__name__}{place}"
