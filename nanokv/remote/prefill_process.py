"""A process that only prefills, and sends what it has computed over the loopback to the process that started it.

    process = PrefillProcess(load, sizes, news)      load() → (model, fingerprint of its weights), run over there
    process.start()                                  {"config", "weights", "dtype"}; NanoKVError if it cannot
    process.ask(1, ids, salt, start)                 news({"done": 1, …}, tensors, bytes, seconds), in a thread
    process.cancel(1)
    process.close()

Over there an Engine prefills, with its own pages and prefix index, and its requests end with their first token: that
one is drawn here, from the logits. Messages are JSON with tensors behind it, as in handover.py; whoever connects must
know a secret. The process ends when its connection does, so also when this one is killed. It says every BEAT_S that it
lives: one that is silent for SILENCE_S is lost, like one that has ended.
"""

import contextlib
import hmac
import os
import queue
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context, resource_tracker
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from nanokv.checkpoint import Model
from nanokv.decoding.draw import Step
from nanokv.engine.engine import Engine
from nanokv.engine.prefilled import Prefilled, taken
from nanokv.engine.request import Request
from nanokv.errors import HandoverError, NanoKVError
from nanokv.remote.handover import read_header, read_tensors, size, write_header, write_tensors
from nanokv.remote.link import SILENCE_S, SocketLink, as_bytes
from weights_loader import CheckpointError

START_S = 60.0  # until it has imported torch and connected; its model may take longer
BEAT_S = 2.0
END_S = 5.0  # for the step that it is in
SECRET = 32  # bytes
Load = Callable[[], tuple[Model, str]]
News = Callable[[dict, dict[str, Tensor], int, float], object]


class Words:
    """Messages over a link: JSON with tensors behind it. `say` may be called by several threads."""

    def __init__(self, link: SocketLink):
        self.link = link
        self.lock = threading.Lock()

    def say(self, meta: dict, tensors: dict[str, Tensor] | None = None) -> None:
        """HandoverError where nobody hears it."""
        with self.lock:
            write_header(self.link, meta, tensors or {})
            write_tensors(self.link, tensors or {})

    def hear(self) -> tuple[dict, dict[str, Tensor], int, float]:
        """The next message, its bytes, and the seconds that they took to arrive."""
        meta, shapes, count = read_header(self.link)
        began = perf_counter()
        tensors = read_tensors(self.link, meta, shapes)
        del meta["sha256"]
        return meta, tensors, count + size(shapes), perf_counter() - began


# --- here -----------------------------------------------------------------------------------------------------------


class PrefillProcess:
    """`sizes`: of its Engine. `news` hears {"done"}, {"failed"} and {"idle"}, and at last {"lost": why}."""

    def __init__(self, load: Load, sizes: dict, news: News, silence_s: float = SILENCE_S):
        self.load = load
        self.sizes = sizes
        self.news = news
        self.silence_s = silence_s
        self.alive = False
        self._process: Any = None
        self._words: Words | None = None
        # Who asks never waits for a process that has stopped.
        self._outbox = ThreadPoolExecutor(1, "nanokv-ask")
        self._reader = threading.Thread(target=self._hear, name="nanokv-prefilled", daemon=True)

    def start(self) -> dict:
        """What it has loaded, when it is ready."""
        secret = secrets.token_bytes(SECRET)
        try:
            with socket.create_server(("127.0.0.1", 0)) as door:
                port = door.getsockname()[1]
                arguments = self.load, self.sizes, port, secret
                spawn = get_context("spawn")
                self._process = spawn.Process(target=run, args=arguments, daemon=True)
                with signals_are_ours():
                    self._process.start()
                self._words = Words(SocketLink(self._met(door, secret), self.silence_s))
            ready: dict = {}
            while "ready" not in ready:
                ready, *_ = self._words.hear()
                if "error" in ready:
                    message, hint = ready["error"]
                    raise NanoKVError(f"the prefill process: {message}", hint)
        except BaseException as error:
            self.close()
            if isinstance(error, HandoverError):
                raise NanoKVError(f"the prefill process has not become ready: {error}") from error
            raise
        self.alive = True
        self._reader.start()
        return ready["ready"]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, number: int, ids: Sequence[int], salt: str, start: int) -> None:
        """Prefill ids; what comes are the rows of ids[start:] and logits. At most all but one of them are left out."""
        asked = {"prefill": number, "ids": list(ids), "salt": salt, "start": start}
        self._outbox.submit(self._say, asked)

    def cancel(self, number: int) -> None:
        """It is not needed any more; it may be on its way."""
        self._outbox.submit(self._say, {"cancel": number})

    def kill(self) -> None:
        """The end, of one that has stopped or says what it should not: `news` hears no more of it."""
        self.alive = False
        self._process.kill()

    def close(self) -> None:
        """The end: it has END_S for the step that it is in."""
        self.alive = False
        self._outbox.shutdown(wait=False, cancel_futures=True)
        if self._words is not None:
            self._words.link.close()
        if self._process is not None and self._process.pid is not None:
            self._process.join(END_S)
            self._process.kill()
            self._process.join()

    def _met(self, door: socket.socket, secret: bytes) -> socket.socket:
        """The connection of the process that was started, and of no other."""
        door.settimeout(0.2)
        until = monotonic() + START_S
        while monotonic() < until:
            with contextlib.suppress(TimeoutError):
                found = door.accept()[0]
                said = torch.zeros(SECRET, dtype=torch.uint8)
                with contextlib.suppress(HandoverError):
                    SocketLink(found, 2.0).read(said)
                if hmac.compare_digest(bytes(said.tolist()), secret):
                    return found
                found.close()
            if not self._process.is_alive():
                raise NanoKVError(
                    f"the prefill process ended before it was ready, with exit code "
                    f"{self._process.exitcode}"
                )
        raise NanoKVError(f"the prefill process did not connect within {START_S:g} seconds")

    def _say(self, meta: dict) -> None:
        assert self._words is not None
        with contextlib.suppress(HandoverError):  # the reader is told too
            self._words.say(meta)

    def _hear(self) -> None:
        assert self._words is not None
        try:
            while True:
                meta, tensors, count, seconds = self._words.hear()
                if "beat" not in meta:
                    self.news(meta, tensors, count, seconds)
        # Whatever it has said: who waits for it must hear that nothing will come.
        except Exception as error:
            if self.alive:
                self.kill()
                self.news({"lost": str(error) or type(error).__name__}, {}, 0, 0.0)


def received(meta: dict, tensors: dict[str, Tensor], ids: Sequence[int], asked: float) -> Prefilled:
    """What {"done"} has brought for these ids."""
    return Prefilled(ids, **tensors, start=meta["start"], reused=meta["reused"], asked=asked)


@contextlib.contextmanager
def signals_are_ours() -> Iterator[None]:
    """A process that is started inside is not told by the terminal: Ctrl-C means the program that started it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # the first child starts it, and that unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- over there -----------------------------------------------------------------------------------------------------


def run(load: Load, sizes: dict, port: int, secret: bytes) -> None:
    """The process: load, then prefill what is asked for until the connection ends."""
    link = SocketLink(socket.create_connection(("127.0.0.1", port), START_S))
    link.write(as_bytes(secret))
    words = Words(link)
    threading.Thread(target=beat, args=(words,), name="nanokv-beat", daemon=True).start()
    with contextlib.suppress(HandoverError):  # nobody is there any more
        try:
            model, weights = load()
            engine = Engine(model, **sizes)
        except (NanoKVError, CheckpointError) as error:
            return words.say({"error": [str(error), error.hint]})
        words.say({"ready": {"config": model.config.to_dict(), "weights": weights}})
        Prefiller(engine, words).run()
    # Other threads may be inside of torch, which would abort if Python ended them there.
    os._exit(0)


def beat(words: Words) -> None:
    """Say that this process lives; a transfer that is under way says so, too."""
    with contextlib.suppress(HandoverError):
        while True:
            words.say({"beat": True})
            threading.Event().wait(BEAT_S)


class Prefiller:
    """Takes what is asked for between two steps of the engine."""

    def __init__(self, engine: Engine, words: Words):
        self.engine = engine
        self.words = words
        self.asked: dict[int, Request] = {}
        self.inbox: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self.outbox = ThreadPoolExecutor(1, "nanokv-send")  # the next prompt is computed meanwhile

    def run(self) -> None:
        """Until the connection ends."""
        threading.Thread(target=self.hear, name="nanokv-hear", daemon=True).start()
        while True:
            while self.engine.idle or not self.inbox.empty():
                told = self.inbox.get()
                if told is None:
                    return
                self.take(told)
            self.step()

    def hear(self) -> None:
        """In a thread."""
        try:
            while True:
                self.words.link.wait()
                self.inbox.put(self.words.hear()[0])
        except HandoverError:
            pass
        finally:
            self.inbox.put(None)

    def take(self, told: dict) -> None:
        """A prompt, or that one is not needed any more."""
        if "cancel" in told:
            request = self.asked.pop(told["cancel"], None)
            if request is not None:
                self.engine.cancel(request)
                self.tell_idle()
            return
        number = told["prefill"]
        prompt = Prompt(told, self.hand_over)
        try:
            self.asked[number] = self.engine.submit(
                told["ids"],
                1,
                salt=told["salt"],
                eos_token_ids=(),
                constrain=prompt.note,
                on_token=prompt.complete,
            )
        except NanoKVError:  # it is refused over there, too, in words for the client
            self.outbox.submit(self.words.say, {"failed": number})

    def step(self) -> None:
        """After an exception all requests have failed: the same step would fail again."""
        try:
            self.engine.step()
        except Exception:
            for request in self.asked.values():
                self.engine.cancel(request, "error")
        for number, request in list(self.asked.items()):
            if request.finish_reason is not None:
                del self.asked[number]
                if request.finish_reason == "error":
                    self.outbox.submit(self.words.say, {"failed": number})
        self.tell_idle()

    def tell_idle(self) -> None:
        """Where no request has pages: how many can be had."""
        if self.engine.idle:
            pool = self.engine.pool
            pages = {"pages": len(pool.references), "free": pool.available()}
            self.outbox.submit(self.words.say, {"idle": pages})

    def hand_over(self, told: dict, request: Request, logits: Tensor) -> None:
        """The rows are copied out of the pages; then the next prompt may have these."""
        found = taken(request.cache, request.prompt, told["start"])
        meta = {"done": told["prefill"], "start": found.start, "reused": request.reused_tokens}
        tensors = {"keys": found.keys, "values": found.values, "logits": logits}
        self.outbox.submit(self.words.say, meta, tensors)


class Prompt:
    """The engine's callbacks of one request: its logits, and its end."""

    def __init__(self, told: dict, hand_over: Callable[[dict, Request, Tensor], None]):
        self.told = told
        self.hand_over = hand_over

    def note(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """`constrain` of the only token, which nobody will see."""
        self.logits = logits
        return logits

    def complete(self, request: Request, step: Step) -> None:
        """`on_token`: all of the prompt is in the pages, which still belong to it."""
        self.hand_over(self.told, request, self.logits)
