"""A process that only prefills, and sends the results over the loopback to its parent process.

    process = PrefillProcess(load, sizes, news)
    process.start()                     {"config", "weights"}; NanoKVError if it fails
    process.ask(1, ids, salt, start)    later, in a thread: news({"done": 1, …}, tensors, bytes,
    process.cancel(1)                   seconds)
    process.close()

`load()` runs in the prefill process and returns (model, fingerprint of its weights).

The prefill process runs an Engine with its own pages and prefix index. Its requests end with their
first token, and the parent draws this token from the logits. Messages are JSON followed by tensors,
as in handover.py, and a connection must begin with a secret. The process ends when its connection
ends, so also when the parent is killed. It sends a message every BEAT_S. If it is silent for
SILENCE_S, the parent treats it as ended.
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

START_S = 60.0  # for the process to import torch and connect; loading the model may take longer
BEAT_S = 2.0
END_S = 5.0  # for the current step to end
SECRET = 32  # bytes
Load = Callable[[], tuple[Model, str]]
News = Callable[[dict, dict[str, Tensor], int, float], object]


class Words:
    """Messages over a link: JSON followed by tensors. Several threads may call `say`."""

    def __init__(self, link: SocketLink):
        self.link = link
        self.lock = threading.Lock()

    def say(self, meta: dict, tensors: dict[str, Tensor] | None = None) -> None:
        """Send a message. HandoverError if the other process has ended."""
        with self.lock:
            write_header(self.link, meta, tensors or {})
            write_tensors(self.link, tensors or {})

    def hear(self) -> tuple[dict, dict[str, Tensor], int, float]:
        """Receive the next message → (meta, tensors, bytes, seconds of the transfer)."""
        meta, shapes, count = read_header(self.link)
        began = perf_counter()
        tensors = read_tensors(self.link, meta, shapes)
        del meta["sha256"]
        return meta, tensors, count + size(shapes), perf_counter() - began


# --- in this process ------------------------------------------------------------------------------


class PrefillProcess:
    """The parent's side of a prefill process.

    `sizes`: keyword arguments of its Engine. `news` is called with each message: {"done": number},
    {"failed": number}, {"idle": pages}, and finally {"lost": reason} if the process is lost.
    """

    def __init__(self, load: Load, sizes: dict, news: News, silence_s: float = SILENCE_S):
        self.load = load
        self.sizes = sizes
        self.news = news
        self.silence_s = silence_s
        self.alive = False
        self._process: Any = None
        self._words: Words | None = None
        # A thread sends, so that `ask` never waits for a process that hangs.
        self._outbox = ThreadPoolExecutor(1, "nanokv-ask")
        self._reader = threading.Thread(target=self._receive, name="nanokv-prefilled", daemon=True)

    def start(self) -> dict:
        """Start the process and wait until it is ready → {"config", "weights"} of its model."""
        secret = secrets.token_bytes(SECRET)
        try:
            with socket.create_server(("127.0.0.1", 0)) as door:
                port = door.getsockname()[1]
                arguments = self.load, self.sizes, port, secret
                spawn = get_context("spawn")
                self._process = spawn.Process(target=run, args=arguments, daemon=True)
                with signals_are_ours():
                    self._process.start()
                self._words = Words(SocketLink(self._accepted(door, secret), self.silence_s))
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
        """The id of the process."""
        return self._process.pid

    def ask(self, number: int, ids: Sequence[int], salt: str, start: int) -> None:
        """Prefill ids. The result is the rows of ids[start:] and the logits; start < len(ids)."""
        asked = {"prefill": number, "ids": list(ids), "salt": salt, "start": start}
        self._outbox.submit(self._send, asked)

    def cancel(self, number: int) -> None:
        """Cancel a prompt. Its result may still arrive."""
        self._outbox.submit(self._send, {"cancel": number})

    def kill(self) -> None:
        """Kill a process that hangs or sends invalid messages. `news` is not called any more."""
        self.alive = False
        self._process.kill()

    def close(self) -> None:
        """End the process. It has END_S to finish its current step."""
        self.alive = False
        self._outbox.shutdown(wait=False, cancel_futures=True)
        if self._words is not None:
            self._words.link.close()
        if self._process is not None and self._process.pid is not None:
            self._process.join(END_S)
            self._process.kill()
            self._process.join()

    def _accepted(self, door: socket.socket, secret: bytes) -> socket.socket:
        """The connection of the process that was started; any other connection is closed."""
        door.settimeout(0.2)
        until = monotonic() + START_S
        while monotonic() < until:
            with contextlib.suppress(TimeoutError):
                found = door.accept()[0]
                first = torch.zeros(SECRET, dtype=torch.uint8)
                with contextlib.suppress(HandoverError):
                    SocketLink(found, 2.0).read(first)
                if hmac.compare_digest(bytes(first.tolist()), secret):
                    return found
                found.close()
            if not self._process.is_alive():
                raise NanoKVError(
                    f"the prefill process ended before it was ready, with exit code "
                    f"{self._process.exitcode}"
                )
        raise NanoKVError(f"the prefill process did not connect within {START_S:g} seconds")

    def _send(self, meta: dict) -> None:
        assert self._words is not None
        with contextlib.suppress(HandoverError):  # the reading thread gets this error too
            self._words.say(meta)

    def _receive(self) -> None:
        assert self._words is not None
        try:
            while True:
                meta, tensors, count, seconds = self._words.hear()
                if "beat" not in meta:
                    self.news(meta, tensors, count, seconds)
        # Any error of reading or of `news`: the requests that wait must end.
        except Exception as error:
            if self.alive:
                self.kill()
                self.news({"lost": str(error) or type(error).__name__}, {}, 0, 0.0)


def received(meta: dict, tensors: dict[str, Tensor], ids: Sequence[int], asked: float) -> Prefilled:
    """The content of a {"done"} message for these ids."""
    return Prefilled(ids, **tensors, start=meta["start"], reused=meta["reused"], asked=asked)


@contextlib.contextmanager
def signals_are_ours() -> Iterator[None]:
    """Inside, a new process inherits blocked SIGINT and SIGHUP, which the parent handles."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # otherwise the first child starts it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the prefill process -----------------------------------------------------------------------


def run(load: Load, sizes: dict, port: int, secret: bytes) -> None:
    """The main function of the process: load the model, then prefill until the connection ends."""
    link = SocketLink(socket.create_connection(("127.0.0.1", port), START_S))
    link.write(as_bytes(secret))
    words = Words(link)
    threading.Thread(target=beat, args=(words,), name="nanokv-beat", daemon=True).start()
    with contextlib.suppress(HandoverError):  # the parent has ended
        try:
            model, weights = load()
            engine = Engine(model, **sizes)
        except (NanoKVError, CheckpointError) as error:
            return words.say({"error": [str(error), error.hint]})
        words.say({"ready": {"config": model.config.to_dict(), "weights": weights}})
        Prefiller(engine, words).run()
    # Other threads may be inside torch, which would abort if the interpreter ended them there.
    os._exit(0)


def beat(words: Words) -> None:
    """Send a message every BEAT_S. During a transfer it waits; the transfer shows life too."""
    with contextlib.suppress(HandoverError):
        while True:
            words.say({"beat": True})
            threading.Event().wait(BEAT_S)


class Prefiller:
    """Runs the engine, and handles the parent's messages between two steps."""

    def __init__(self, engine: Engine, words: Words):
        self.engine = engine
        self.words = words
        self.asked: dict[int, Request] = {}
        self.inbox: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        # Sends while the next prompt is computed.
        self.outbox = ThreadPoolExecutor(1, "nanokv-send")

    def run(self) -> None:
        """Run until the connection ends."""
        threading.Thread(target=self.receive, name="nanokv-hear", daemon=True).start()
        while True:
            while self.engine.idle or not self.inbox.empty():
                message = self.inbox.get()
                if message is None:
                    return
                self.take(message)
            self.step()

    def receive(self) -> None:
        """Put the messages into the inbox, and None at the end. Runs in a thread."""
        try:
            while True:
                self.words.link.wait()
                self.inbox.put(self.words.hear()[0])
        except HandoverError:
            pass
        finally:
            self.inbox.put(None)

    def take(self, message: dict) -> None:
        """Handle a message: submit a prompt, or cancel one."""
        if "cancel" in message:
            request = self.asked.pop(message["cancel"], None)
            if request is not None:
                self.engine.cancel(request)
                self.send_idle()
            return
        number = message["prefill"]
        prompt = Prompt(message, self.hand_over)
        try:
            self.asked[number] = self.engine.submit(
                message["ids"],
                1,
                salt=message["salt"],
                eos_token_ids=(),
                constrain=prompt.note,
                on_token=prompt.complete,
            )
        except NanoKVError:  # the parent refuses the prompt too, with a message for the client
            self.outbox.submit(self.words.say, {"failed": number})

    def step(self) -> None:
        """Run a step. After an exception all requests fail, because the step would fail again."""
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
        self.send_idle()

    def send_idle(self) -> None:
        """If no request holds pages, send how many pages are free."""
        if self.engine.idle:
            pool = self.engine.pool
            pages = {"pages": len(pool.references), "free": pool.available()}
            self.outbox.submit(self.words.say, {"idle": pages})

    def hand_over(self, message: dict, request: Request, logits: Tensor) -> None:
        """Copy the rows from the pages, which the next prompt may then use, and send them."""
        found = taken(request.cache, request.prompt, message["start"])
        meta = {"done": message["prefill"], "start": found.start, "reused": request.reused_tokens}
        tensors = {"keys": found.keys, "values": found.values, "logits": logits}
        states = {"conv": found.conv, "S": found.S}
        tensors |= {name: tensor for name, tensor in states.items() if tensor is not None}
        self.outbox.submit(self.words.say, meta, tensors)


class Prompt:
    """The engine's callbacks for one request, which keep the logits and send the result."""

    def __init__(self, message: dict, hand_over: Callable[[dict, Request, Tensor], None]):
        self.message = message
        self.hand_over = hand_over

    def note(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """`constrain` of the only token: keeps the logits. The token itself is not used."""
        self.logits = logits
        return logits

    def complete(self, request: Request, step: Step) -> None:
        """`on_token`: the whole prompt is in the pages, which the request still holds."""
        self.hand_over(self.message, request, self.logits)
