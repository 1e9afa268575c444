"""Run another library's runtime in a separate process (peer.py), controlled over a pipe.

The runtime may be missing, raise, crash or hang; its row then gives the reason, and the other
runners continue. The process computes only while it has a request, so that one runner at a time
uses the machine. It takes its own times. It ends when the bench ends, however the bench ends.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

from nanokv.errors import NanoKVError
from nanokv.lab.bench.runners import Runner

LOADING = 600.0  # seconds that a peer may take to load or quantize its weights
LEAST = 60.0  # seconds that it may take for an answer, at least; see Rotation.measure
PEERS = {  # name → module:function that makes it
    "transformers": "nanokv.lab.bench.peer:transformers",
    "llama.cpp": "nanokv.lab.bench.peer:llama_cpp",
    "generate_batch": "nanokv.lab.bench.peer:generate_batch",
}


class PeerError(NanoKVError):
    """The reason, in one line, why a peer has no figure."""


def never() -> bool:
    return False


def environment() -> dict:
    """Environment of a child process that imports the same modules as this process, and none from
    the current folder."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONSAFEPATH": "1",
    }


class Process:
    """A running peer: `ask` sends a request and waits for the answer.

    Once the process has ended, every request raises the same PeerError. `timeout` replaces both
    limits, LOADING and LEAST, in seconds.
    """

    def __init__(self, make: str, facts: dict, timeout: float | None = None) -> None:
        self.timeout = timeout
        self.should_stop = never
        self.ended = ""
        self.errors = tempfile.TemporaryFile()
        # A new process group: Ctrl-C reaches only the bench, which then ends its peers.
        group = 0 if os.name == "posix" else None
        self.child: Any = subprocess.Popen(  # Any: both pipes exist
            [sys.executable, "-m", "nanokv.lab.bench.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment(),
            process_group=group,
        )
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.setup = {"make": make, "facts": facts}

    def _listen(self) -> None:
        with self.child.stdout as stdout:
            for line in stdout:
                self.answers.put(line)
        self.answers.put(None)

    def start(self) -> list[int]:
        """Wait until the peer is loaded → [weight_bytes, kv_bytes] that its decode step reads."""
        try:
            return self._exchange(self.setup, LOADING)
        except PeerError as error:
            self.ended = self.ended or str(error)
            raise

    def ask(self, seconds: float = LEAST, **question: Any) -> Any:
        """The peer's answer. PeerError if it raises, has ended, or takes longer than `seconds`."""
        return self._exchange(question, seconds)

    def _exchange(self, question: dict, seconds: float) -> Any:
        if self.ended:
            raise PeerError(self.ended)
        with suppress(OSError):  # the peer has ended: `_wait` returns None
            self.child.stdin.write((json.dumps(question) + "\n").encode())
            self.child.stdin.flush()
        line = self._wait(self.timeout or seconds)
        if line is None:
            self.ended = self.ended or self._cause()
            raise PeerError(self.ended)
        found = json.loads(line)
        if "answer" not in found:
            raise PeerError(found.get("error") or self.ended)
        return found["answer"]

    def _wait(self, seconds: float) -> bytes | None:
        """The next line of the peer, or None if it has ended or took too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.should_stop():
                raise KeyboardInterrupt
            try:
                return self.answers.get(timeout=0.1)
            except queue.Empty:
                pass
        self.ended = f"no answer after {seconds:g} s: ended"
        self.child.kill()
        return None

    def _cause(self) -> str:
        """How the process ended, with the last line of its stderr."""
        code = self.child.wait()
        if code >= 0:
            self.errors.seek(0)
            words = self.errors.read()[-300:].decode("utf-8", "replace").strip().splitlines()
            return ": ".join([f"ended with exit code {code}", *words[-1:]])
        name = signal.Signals(-code).name
        if name == "SIGKILL":
            return "ended by SIGKILL, as the system does when memory runs out"
        return f"ended by {name}"

    def end(self) -> None:
        """Kill the process, also in the middle of a request."""
        self.child.kill()
        self.child.wait()
        self.errors.close()
        with suppress(OSError):  # unsent bytes cannot be flushed any more
            self.child.stdin.close()


class Remote(Runner):
    """A runner whose measurements are made by a peer. If the peer could not start, every
    measurement raises PeerError with the reason."""

    patience = LEAST

    def __init__(self, engine: str, weights: str, cache: str, process: Process) -> None:
        self.process = process
        try:
            read, kv = process.start()
        except PeerError:
            read = kv = 0
        super().__init__(engine, weights, cache, 1, read, kv)

    def measure(self, vocab_size: int, context: int, steps: int, seed: int) -> tuple[float, float]:
        prefill, decode = self.process.ask(
            self.patience, vocab_size=vocab_size, context=context, steps=steps, seed=seed
        )
        return prefill, decode
