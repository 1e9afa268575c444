"""The engine's thread. Only it touches the engine: it takes messages, steps, and sends results.

Messages are handled between two steps. The results of one step reach the event loop in one call.
Forwards without a request of the engine (`asides`: echoed prompts and embeddings) run one at a time
between two steps. Clients take turns in them as they do in the engine (engine/turns.py).
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from nanokv.apps.serve.api.answer import Piece
from nanokv.apps.serve.api.errors import ApiError, internal, refused, where
from nanokv.apps.serve.api.prompts import Job
from nanokv.apps.serve.run.messages import (
    Arrived,
    Cancel,
    Count,
    Embed,
    End,
    Ended,
    Failed,
    FromEngine,
    Pieces,
    Snapshot,
    Stopped,
    Submit,
    Taken,
    ToEngine,
    Usage,
)
from nanokv.apps.serve.run.metrics import Metrics, engine_counts
from nanokv.apps.serve.run.prefill import Here
from nanokv.apps.serve.run.snapshot import Departed, departed, snapshot
from nanokv.decoding.draw import SamplingParams, Step
from nanokv.engine import Engine, Request
from nanokv.engine.prefilled import Prefilled
from nanokv.engine.request import FINISHED
from nanokv.errors import DeviceMemoryError, NanoKVError, ParallelError

logger = logging.getLogger(__name__)
LONGEST_STEP_S = 30.0
REMEMBERED = 32  # ended requests of web pages, which show what their last one left in the cache


@dataclass(eq=False)
class Running:
    """One answer that the engine is working on."""

    submit: Submit
    request: Request = field(init=False)
    fresh: list[Piece] = field(default_factory=list)  # pieces not yet sent
    seen: float = 0.0  # time of the newest token

    def pieces(self) -> Pieces:
        """The pieces since the last call."""
        fresh = tuple(self.fresh)
        self.fresh = []
        request = self.request
        thought = self.submit.job.text.thought
        usage = Usage(len(request.prompt), request.reused_tokens, len(request.tokens), thought)
        return Pieces(self.submit.ticket, fresh, usage)

    def end(self) -> Ended | Failed:
        """How the answer ended."""
        ticket = self.submit.ticket
        request = self.request
        if request.error is not None:
            return Failed(ticket, client_error(request.error), "error")
        text = self.submit.job.text
        reason = request.finish_reason or ""
        return Ended(ticket, reason, text.stop_reason, text.calls.count, request.metrics())


class EngineThread:
    """`start`, `put` and `join` are for the event loop; all else runs in the thread."""

    def __init__(self, engine: Engine, prefills: Here, metrics: Metrics):
        self.engine = engine
        self.prefills = prefills
        self.metrics = metrics
        self.running: dict[int, Running] = {}  # ticket → answer
        self.asides: list[Submit | Embed] = []  # in order of arrival
        self.departed: deque[Departed] = deque(maxlen=REMEMBERED)
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="nanokv-engine", daemon=True)

    def start(
        self, loop: asyncio.AbstractEventLoop, receive: Callable[[Sequence[FromEngine]], None]
    ) -> None:
        """Start the thread. It calls `receive(messages)` in the event loop."""
        self._loop = loop
        self._receive = receive
        self.prefills.start(self.put)
        self._thread.start()

    def put(self, message: ToEngine) -> None:
        """Queue a message for the thread."""
        self._inbox.put(message)

    def join(self) -> None:
        """Wait for the thread to end its step: Python cannot exit while torch code runs."""
        self._thread.join(LONGEST_STEP_S)
        self.prefills.close()

    # --- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        lost = None
        try:
            while self._take():
                self._step()
                self._run_aside()
                self._enter_prefilled()
                self._send()
        except ParallelError as error:
            lost = error
        except BaseException as error:
            logger.error("the engine's thread has ended: %s", where(error))
            raise
        finally:
            self._post(Stopped(lost))

    def _take(self) -> bool:
        """Handle the queued messages; wait for one if there is nothing to do. False after End."""
        while not (self.running or self.asides) or not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, End):
                return False
            self._carry_out(message)
            self._enter_prefilled()
        return True

    def _step(self) -> None:
        if self.engine.idle:
            return
        try:
            self.engine.step()
        except ParallelError:  # a rank is gone: no step can follow
            raise
        except Exception as error:  # out of memory, or a bug: the same step would fail again
            for answer in self.running.values():
                if answer.request.finish_reason is None:
                    answer.request.error = error
                    self.engine.cancel(answer.request, "error")

    def _send(self) -> None:
        """Send what the step added to each answer."""
        messages: list[FromEngine] = []
        for ticket, answer in list(self.running.items()):
            messages.append(answer.pieces())
            if answer.request.finish_reason is not None:
                messages.append(answer.end())
                self._leave(ticket)
        self._post(*messages)

    def _post(self, *messages: FromEngine) -> None:
        try:
            self._loop.call_soon_threadsafe(self._receive, messages)
        except RuntimeError:  # the event loop is closed
            logger.debug("the event loop has ended")

    # --- messages ---------------------------------------------------------------------------------

    def _carry_out(self, message: ToEngine) -> None:
        match message:
            case Submit() if message.job.echo is not None:
                self._wait_aside(message)
            case Embed():
                self._wait_aside(message)
            case Submit():
                self._begin(message)
            case Cancel(ticket):
                self._cancel(ticket)
            case Arrived():
                self.prefills.take(message)
            case Snapshot() | Count():
                self._post(Taken(message.question, self._found(message)))

    def _begin(self, submit: Submit) -> None:
        """Start an answer: prefill it, or only echo its prompt."""
        if submit.job.wanted == 0:
            self._enter(submit, None)
        else:
            self.prefills.begin(submit)

    def _enter_prefilled(self) -> None:
        while ready := self.prefills.ready():
            for submit, prefilled in ready:
                self._enter(submit, prefilled)

    def _enter(self, submit: Submit, prefilled: Prefilled | None) -> None:
        """Give an answer to the engine, with keys and values if another process prefilled it."""
        job = submit.job
        answer = Running(submit)
        try:
            if job.echo is not None:
                answer.fresh.append(job.echo.piece())
            if job.wanted == 0:
                answer.request = nothing(job)
            else:
                put = partial(self._put, answer)
                answer.request = self.engine.submit(
                    job.ids, **job.settings, on_token=put, prefilled=prefilled
                )
            self.running[submit.ticket] = answer
        except Exception as error:
            self._post(Failed(submit.ticket, client_error(error, submit.param)))

    def _put(self, answer: Running, request: Request, step: Step) -> None:
        """The engine's callback for each token."""
        now = perf_counter()
        text = answer.submit.job.text
        self.metrics.token(now - (answer.seen or answer.submit.opened), first=not answer.seen)
        answer.seen = now
        answer.fresh += text.put(step, last=request.finish_reason is not None)
        if text.complete:
            self.engine.cancel(request, "stop")

    def _wait_aside(self, message: Submit | Embed) -> None:
        scheduler = self.engine.scheduler
        scheduler.turns.arrive(message, [*scheduler.waiting, *self.asides])
        self.asides.append(message)

    def _run_aside(self) -> None:
        """Compute one chunk of an echo or of embeddings, so that answers go on in between."""
        if not self.asides:
            return
        message = self.engine.scheduler.turns.first(self.asides)
        try:
            if isinstance(message, Embed):
                complete = self._embed(message)
            else:
                complete = self._echo(message)
        except Exception as error:
            param = ""  # the inputs of embeddings were checked before
            if isinstance(message, Submit):
                param = "echo"
            self._post(Failed(message.ticket, client_error(error, param)))
            complete = True
        if complete:
            self.asides.remove(message)

    def _echo(self, submit: Submit) -> bool:
        """One chunk of an echoed prompt; the answer begins after the last one."""
        echo = submit.job.echo
        assert echo is not None
        before = echo.computed
        complete = self.engine.aside(echo.advance)
        self.engine.scheduler.turns.count(submit.client, echo.computed - before)
        if complete:
            self._begin(submit)
        return complete

    def _embed(self, embed: Embed) -> bool:
        """One forward of embeddings."""
        embedding = embed.embedding
        before = embedding.computed
        advance = partial(embedding.advance, chunk=self.engine.aside_tokens)
        complete = self.engine.aside(advance)
        self.engine.scheduler.turns.count(embed.client, embedding.computed - before)
        if complete:
            seconds = {"total_s": perf_counter() - embed.opened}
            self._post(Ended(embed.ticket, "embedded", None, 0, seconds))
        return complete

    def _cancel(self, ticket: int) -> None:
        self.prefills.forget(ticket)
        self.asides = [message for message in self.asides if message.ticket != ticket]
        if ticket in self.running:
            self._leave(ticket)

    def _leave(self, ticket: int) -> None:
        """Remove an answer from the engine; for a web page, note what its request left there."""
        answer = self.running.pop(ticket)
        request = answer.request
        held = request.fed  # before `cancel` frees the request's pages
        self.engine.cancel(request)
        if answer.submit.tab:
            self.departed.append(departed(self.engine, request, answer.submit.tab, held))

    def _found(self, question: Snapshot | Count) -> dict | Exception:
        try:
            if isinstance(question, Count):
                clients = dict(self.engine.scheduler.turns.clients)
                counts = engine_counts(self.engine) | self.prefills.counts()
                return counts | {"clients": clients}
            tabs = {answer.request.number: answer.submit.tab for answer in self.running.values()}
            return snapshot(self.engine, tabs, self.departed)
        except Exception as error:
            return error


def client_error(error: Exception, param: str = "") -> ApiError:
    """The error for the client. A bug is logged; the client learns only that there was one.

    `param`: the request field to blame for an error of the engine.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DeviceMemoryError):
        logger.error("a request failed: %s", error)
        return ApiError(503, str(error), code="out_of_memory", hint=error.hint)
    if param and isinstance(error, NanoKVError):
        return refused(error, param)
    logger.error("a request failed: %s", where(error))
    return internal()


def nothing(job: Job) -> Request:
    """A complete request without tokens, for an answer that only repeats its prompt."""
    now = perf_counter()
    request = Request(
        number=-1,
        prompt=job.ids,
        params=SamplingParams(),
        max_new_tokens=0,
        room=0,
        eos_token_ids=(),
        arrived=now,
        state=FINISHED,
        finish_reason="length",
    )
    request.admitted = request.finished = now
    return request
