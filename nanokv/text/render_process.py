"""The processes that render chat templates.

A template is an untrusted program that comes with the weights. jinja2's sandbox keeps it from files
and from Python objects, but limits neither time nor memory, and a call in C can only be stopped
from outside. So render_worker.py renders, and this module starts, calls and stops its processes.

A process is kept for the next render: a start takes 50 ms, a render less than 1 ms. Threads that
render at the same time use separate processes. The processes belong to the process that started
them, not to its forks, and end with it, even if it is killed.
"""

import atexit
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from nanokv.errors import TemplateError, TemplateStopped

WORKER = Path(__file__).with_name("render_worker.py")
HEAD = struct.Struct(">QdQQ")  # before a request, see render_worker.py
LENGTH = struct.Struct(">Q")  # before an answer
SECONDS = 2.0  # of processor time, so that a busy machine does not stop an honest template
# Seconds of wall time. Windows has no limit of processor time.
CLOCK = 60.0 if find_spec("resource") else 10.0
MEMORY = 512_000_000  # bytes of address space
OUTPUT = 2_000_000  # characters
PER_BYTE = 20  # additional bytes of memory and characters of output per byte of the request
BYTES_A_SECOND = 4_000_000  # additional time: the user may send a document of megabytes
# The time zone, and the variables that Python needs to start.
ENVIRONMENT = ("TZ", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
KEPT = 2  # idle processes kept for the next render
HOSTILE = "it is broken or hostile"


class Killed(TemplateStopped):
    """The process was killed from outside, while idle or rendering. A new process may succeed.

    Of the limits here only the wall clock sends SIGKILL, and that is reported separately.
    """


class RenderProcess:
    """A worker process. It renders one template at a time."""

    def __init__(self) -> None:
        folders = dict.fromkeys(map(folder_of, ("jinja2", "markupsafe")))
        command = [sys.executable, "-I", "-S", str(WORKER), *folders]
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # so that Ctrl-C in the terminal reaches only the parent
            )
        except OSError as error:
            raise TemplateError(f"no process can be started for chat templates: {error}") from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests = self.process.stdin
        self.answers = self.process.stdout

    def ask(self, request: bytes, seconds: float, most: int) -> tuple[str, str]:
        """(kind, text) of the answer, which has at most `most` bytes.

        Raises TemplateError if the process ended without an answer.
        """
        timer = threading.Timer(CLOCK + seconds, self.process.kill)
        timer.start()
        try:
            self.requests.write(request)
            self.requests.flush()
            answer = self._read(most)
        except OSError:  # the pipe is broken
            answer = b""
        finally:
            late = timer.finished.is_set()
            timer.cancel()
        if not answer and late:
            raise stopped(f"it ran for more than {CLOCK + seconds:.3g} s")
        if not answer:
            raise self._end_of(seconds)
        with contextlib.suppress(ValueError, RecursionError):
            kind, words = json.loads(answer)
            return str(kind), str(words)
        raise stopped("it sent no valid answer")

    def _read(self, most: int) -> bytes:
        """The answer; b"" if the process ended before it was complete."""
        head = self.answers.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return b""
        (size,) = LENGTH.unpack(head)
        if size > most:
            raise stopped(f"its answer has {size:,} bytes, more than {most:,}")
        answer = self.answers.read(size)
        if len(answer) < size:
            return b""
        return answer

    def _end_of(self, seconds: float) -> TemplateError:
        """The error for a process that ended without an answer."""
        code = self.process.wait()
        if code == -getattr(signal, "SIGPROF", 0):
            return stopped(f"it ran for more than {seconds:.3g} s")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = f"the process that rendered it ended, {how}"
        if code == -9:
            return Killed(f"the chat template was stopped: {why}")
        return stopped(why)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Kill the process at once."""
        self.process.kill()
        self.forget()
        self.process.wait()

    def forget(self) -> None:
        """Close the pipes without flushing.

        The process ends when no other process holds them open.
        """
        for pipe in (self.requests, self.answers):
            pipe.raw.close()  # type: ignore[attr-defined]  # Popen's pipes are buffered


def folder_of(package: str) -> str:
    """The folder from which a package is imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise TemplateError(f"chat templates need {package}, which is not installed")
    return str(Path(spec.origin).parents[1])


_all: set[RenderProcess] = set()
_idle: list[RenderProcess] = []


def answer_to(source: str, variables: str = "null", seconds: float = SECONDS) -> str:
    """The text that a template renders from `variables`, the JSON text of an object.

    With "null" the template is only compiled. Raises TemplateError.
    """
    seconds += len(variables) / BYTES_A_SECOND
    memory = MEMORY + PER_BYTE * len(variables)
    output = OUTPUT + PER_BYTE * len(variables)
    body = f"[{json.dumps(source)}, {variables}]".encode()
    request = HEAD.pack(len(body), seconds, memory, output) + body
    most = 12 * output + 10_000  # JSON writes a character in up to 12 bytes: \\ud83d\\ude00
    try:
        kind, words = asked(request, seconds, most)
    except Killed:
        kind, words = asked(request, seconds, most)
    if kind == "stopped":
        raise stopped(words)
    if kind == "error":
        raise TemplateError(f"the chat template {words}")
    return words


def asked(request: bytes, seconds: float, most: int) -> tuple[str, str]:
    """(kind, text) from a process, which is then kept unless the template was stopped."""
    process = take()
    try:
        kind, words = process.ask(request, seconds, most)
    except BaseException:  # Ctrl-C too: the pending answer must not reach the next request
        drop(process)
        raise
    if kind == "stopped":
        drop(process)
    else:
        keep(process)
    return kind, words


def stopped(why: str) -> TemplateStopped:
    """The error for a template that exceeded a limit or broke the protocol."""
    return TemplateStopped(f"the chat template was stopped: {why}", HOSTILE)


def take() -> RenderProcess:
    """An idle process, else a new one."""
    while (process := waiting()) is not None:
        if process.alive:
            return process
        drop(process)
    process = RenderProcess()
    _all.add(process)
    return process


def waiting() -> RenderProcess | None:
    """Take an idle process out of the list, for this thread alone; None if there is none."""
    try:
        return _idle.pop()
    except IndexError:
        return None


def keep(process: RenderProcess) -> None:
    """Keep the process for the next render, and end idle processes beyond KEPT."""
    _idle.append(process)
    while len(_idle) > KEPT and (one := waiting()) is not None:
        drop(one)


def drop(process: RenderProcess) -> None:
    """End the process and remove it."""
    _all.discard(process)
    process.end()


def start() -> None:
    """Start a process for the first render, without waiting for it.

    If that fails, the first render raises the error.
    """
    with contextlib.suppress(TemplateError):
        if not _idle:
            keep(take())


def end_all() -> None:
    """End all processes before Python exits."""
    _idle.clear()
    for process in list(_all):
        drop(process)


def forget_all() -> None:
    """Drop all processes in a fork: they belong to the parent."""
    _idle.clear()
    for process in _all:
        process.forget()
        process.process.returncode = 0  # so that Popen does not wait for it here
    _all.clear()


atexit.register(end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_all)
