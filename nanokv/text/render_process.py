"""The processes in which chat templates are rendered: a template is a program that comes with somebody else's weights.

jinja2's sandbox keeps it from files and from Python, but bounds neither time nor memory, and a call in C can only be
ended from outside. So render_worker.py renders, and this file starts it, asks it and ends it. A process is kept for the
next render: its start costs 50 ms, a render less than one. Threads that render at the same time have one each. The
processes belong to the one that started them, not to its forks, and end when it ends, however that is.
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
HEAD, LENGTH = struct.Struct(">QdQQ"), struct.Struct(">Q")  # of a request, of an answer: see WORKER
SECONDS = 2.0  # of processor time, so that a busy machine does not refuse an honest template
# Seconds by the clock; Windows has no limit of processor time.
CLOCK = 60.0 if find_spec("resource") else 10.0
MEMORY = 512_000_000  # bytes of address space
OUTPUT = 2_000_000  # characters
PER_BYTE = 20  # more memory and output for each byte of the request
BYTES_A_SECOND = 4_000_000  # and more time: a document of megabytes is no attack by the template
# The clock, and what Python needs to start.
ENVIRONMENT = ("TZ", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
KEPT = 2  # processes that wait for the next render
HOSTILE = "it is broken or hostile"


class Killed(TemplateStopped):
    """By somebody else, while it waited or rendered: no limit here sends SIGKILL but the clock's,
    so another may live.
    """


class RenderProcess:
    """One of them, which renders one template at a time."""

    def __init__(self) -> None:
        folders = dict.fromkeys(
            str(Path(find_spec(name).origin).parents[1]) for name in ("jinja2", "markupsafe")
        )
        command = [sys.executable, "-I", "-S", str(WORKER), *folders]
        own = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        # in a session of its own: Ctrl-C in the terminal is for the parent
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=null, env=own, start_new_session=True
            )
        except OSError as error:
            raise TemplateError(f"no process can be started for chat templates: {error}") from error

    def ask(self, request: bytes, seconds: float, most: int) -> tuple[str, str]:
        """The answer, of at most so many bytes; TemplateError where the process ended instead."""
        timer = threading.Timer(CLOCK + seconds, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
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
        raise stopped("what came back is no answer")

    def _read(self, most: int) -> bytes:
        """b"" where there is no whole answer."""
        head = self.process.stdout.read(LENGTH.size)
        size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
        if size > most:
            raise stopped(f"its answer has {size:,} bytes, more than {most:,}")
        answer = self.process.stdout.read(size)
        return answer if len(answer) == size else b""

    def _end_of(self, seconds: float) -> TemplateError:
        """Why it ended by itself."""
        code = self.process.wait()
        if code == -getattr(signal, "SIGPROF", 0):
            return stopped(f"it ran for more than {seconds:.3g} s")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = f"the process that rendered it ended, {how}"
        return Killed(f"the chat template was stopped: {why}") if code == -9 else stopped(why)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        """Now, whatever it is doing."""
        self.process.kill()
        self.forget()
        self.process.wait()

    def forget(self) -> None:
        """Close the pipes, with which it ends if nobody else holds them. What waits to be written is not."""
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.raw.close()


_all: set[RenderProcess] = set()
_idle: list[RenderProcess] = []


def answer_to(source: str, variables: str = "null", seconds: float = SECONDS) -> str:
    """The text that a template renders from `variables`, a JSON object; from null it is only compiled. TemplateError
    says what went wrong."""
    seconds += len(variables) / BYTES_A_SECOND
    memory, output = (least + PER_BYTE * len(variables) for least in (MEMORY, OUTPUT))
    body = f"[{json.dumps(source)}, {variables}]".encode()
    request = HEAD.pack(len(body), seconds, memory, output) + body
    most = 12 * output + 10_000  # 12 bytes: \\ud83d\\ude00
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
    """What a process answers, which then waits for the next render unless it was stopped."""
    process = take()
    try:
        kind, words = process.ask(request, seconds, most)
    except BaseException:  # Ctrl-C too: its answer is not for the next one
        drop(process)
        raise
    if kind == "stopped":
        drop(process)
    else:
        keep(process)
    return kind, words


def stopped(why: str) -> TemplateStopped:
    """For raise."""
    return TemplateStopped(f"the chat template was stopped: {why}", HOSTILE)


def take() -> RenderProcess:
    """One that waits, else a new one."""
    while (process := waiting()) is not None:
        if process.alive:
            return process
        drop(process)
    process = RenderProcess()
    _all.add(process)
    return process


def waiting() -> RenderProcess | None:
    """One of those that wait, for this thread alone."""
    try:
        return _idle.pop()
    except IndexError:
        return None


def keep(process: RenderProcess) -> None:
    """For the next render."""
    _idle.append(process)
    while len(_idle) > KEPT and (one := waiting()) is not None:
        drop(one)


def drop(process: RenderProcess) -> None:
    """End one and forget it."""
    _all.discard(process)
    process.end()


def start() -> None:
    """Begin to start one, which then waits for the first render; where that fails the render will say so."""
    with contextlib.suppress(TemplateError):
        if not _idle:
            keep(take())


def end_all() -> None:
    """Before Python ends."""
    _idle.clear()
    for process in list(_all):
        drop(process)


def forget_all() -> None:
    """In a fork: they are those of the process that was forked."""
    _idle.clear()
    for process in _all:
        process.forget()
        process.process.returncode = 0  # so that nobody waits for it here
    _all.clear()


atexit.register(end_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_all)
