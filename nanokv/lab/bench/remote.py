"""A runtime in a process of its own (peer.py), asked over a pipe: it may be missing, raise, crash or hang. Then it is a
row that says so, and all others go on.

The process computes only while it is asked, so in the rotation one at a time has the machine. It measures with its own
clock. It ends with this one, whatever ends this one.
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

from nanokv.errors import NanoKVError
from nanokv.lab.bench.runners import Runner

LOADING = 600.0  # seconds that a peer may take to load its weights, or to quantize them
LEAST = 60.0  # and at least to answer; see Rotation.patience
PEERS = {  # name → what makes it, module:function
    "transformers": "nanokv.lab.bench.peer:transformers",
    "llama.cpp": "nanokv.lab.bench.peer:llama_cpp",
    "generate_batch": "nanokv.lab.bench.peer:generate_batch",
}


class PeerError(NanoKVError):
    """Why a peer has no figure: one line."""


def never() -> bool:
    return False


def environment() -> dict:
    """A child imports what this process imports, and nothing from the folder in which it was started."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONSAFEPATH": "1",
    }


class Process:
    """One peer: `ask` sends a question and waits for the answer. After the first PeerError of a dead one every question
    raises it again. `timeout`: seconds that replace both limits."""

    def __init__(self, make: str, facts: dict, timeout: float | None = None):
        self.timeout = timeout
        self.should_stop = never
        self.ended = ""
        self.errors = tempfile.TemporaryFile()
        # Ctrl-C is for the bench, which ends its peers.
        group = {}
        if os.name == "posix":
            group = {"process_group": 0}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "nanokv.lab.bench.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment(),
            **group,
        )
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.setup = {"make": make, "facts": facts}

    def _listen(self):
        with self.child.stdout as stdout:
            for line in stdout:
                self.answers.put(line)
        self.answers.put(None)

    def start(self):
        """Wait until it is loaded → what a step of it reads, (weight_bytes, kv_bytes)."""
        try:
            return self._exchange(self.setup, LOADING)
        except PeerError as error:
            self.ended = self.ended or str(error)
            raise

    def ask(self, seconds: float = LEAST, **question):
        """The answer. PeerError if it raised, has ended, or does not answer within `seconds`."""
        return self._exchange(question, seconds)

    def _exchange(self, question: dict, seconds: float):
        if self.ended:
            raise PeerError(self.ended)
        with suppress(OSError):  # it has ended, which `_wait` finds out
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

    def _wait(self, seconds: float):
        """A line, or None if there will be none."""
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
        """How it ended, and its last words if it had any."""
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
        """Whatever it is doing."""
        self.child.kill()
        self.child.wait()
        self.errors.close()
        with suppress(OSError):  # what was written last never reached it
            self.child.stdin.close()


class Remote(Runner):
    """A runner whose measurements are made by a peer; of one that could not begin each of them says why."""

    patience = LEAST

    def __init__(self, engine: str, weights: str, cache: str, process: Process):
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
