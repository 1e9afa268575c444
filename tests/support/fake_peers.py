"""Peers that misbehave, in a process of their own as the real ones are. Tests put their names into remote.PEERS."""

import ctypes
import importlib
import os
import signal
import time
from pathlib import Path


class Fake:
    """`good` questions go well; `ends` is what happens at the next. Its process is in the file $FAKE_PEER then."""

    weight_bytes, kv_bytes = 1000, 10

    def __init__(self, ends, good: int = 4):
        self.ends, self.left = ends, good

    def measure(self, **question):
        """(seconds of a prefill, of a step), or (seconds, tokens)."""
        if self.left == 0:
            if "FAKE_PEER" in os.environ:
                Path(os.environ["FAKE_PEER"]).write_text(str(os.getpid()))
            self.ends()
        self.left -= 1
        return [0.5, 0.25] if question else [0.5, 15]


def crashing(**facts):
    return Fake(lambda: os.kill(os.getpid(), signal.SIGILL))


def killed(**facts):
    return Fake(lambda: os.kill(os.getpid(), signal.SIGKILL))


def leaving(**facts):
    def leave():
        print("the library says so", flush=True)  # stdout is the bench's own
        os._exit(3)

    return Fake(leave)


def hanging(**facts):
    return Fake(lambda: time.sleep(600))


def hanging_with_the_lock(**facts):
    return Fake(lambda: ctypes.PyDLL(None).sleep(600))  # no other thread of Python runs


def raising(**facts):
    def fail():
        raise RuntimeError("no room for\nthis tensor")

    return Fake(fail)


def missing(**facts):
    importlib.import_module("no_such_library")


def crashing_at_once(**facts):
    os.kill(os.getpid(), signal.SIGSEGV)


def hanging_batch(**facts):
    return Fake(lambda: time.sleep(600), good=2)
