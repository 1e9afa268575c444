"""The process that has imported torch and forks for each command of a test (warm.py asks it).

It imports only what others have written: what nanokv itself does from its first line on happens in the child. A
request is one message: JSON, with the files that become the child's stdin, stdout and stderr, and a pipe on which its
end is told.
"""

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import termios

# What the commands import of others, but for what reads the environment as it is imported (huggingface_hub).
IMPORTED = (
    "torch",
    "safetensors.torch",
    "tokenizers",
    "jinja2.sandbox",
    "rich.console",
    "prompt_toolkit.shortcuts",
    "pydantic",
    "starlette.applications",
    "uvicorn",
    "concurrent.futures",
    "sqlite3",
    "ctypes",
)


def main():
    """Fork for each request; the children come back from here and run their command."""
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    asked = socket.socket(fileno=int(sys.argv[1]))
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = {}
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == woken:
                    os.read(woken, 4096)
                    tell_ends(told)
                elif (request := receive(asked)) is None:
                    return None
                elif child := fork(request, told, asked):
                    return child


def receive(asked) -> dict | None:
    """One request with its files, or None where nobody asks any more."""
    message, files, _, _ = socket.recv_fds(asked, 1 << 20, 4)
    if not message:
        return None
    return json.loads(message) | {"files": files}


def fork(request: dict, told: dict, asked) -> dict | None:
    """In the parent: None, the pid is told. In the child: the request."""
    *streams, status = request["files"]
    pid = os.fork()
    if pid:
        for file in streams:
            os.close(file)
        told[pid] = status
        asked.send(str(pid).encode())
        return None
    become(request, streams)
    return request


def tell_ends(told: dict):
    """Write the status of each child that has ended to its pipe."""
    for pid in list(told):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pipe = told.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, str(status).encode())
            os.close(pipe)


def become(request: dict, streams: list[int]):
    """What exec() and the start of the interpreter would do: signals, session, files, environment, sys."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["session"] or request["terminal"]:
        os.setsid()
    if request["terminal"]:
        fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
    # The lowest first would close one that is still needed.
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 64) for file in streams]
    for number, file in enumerate(high):
        os.dup2(file, number)
    os.closerange(3, max(high) + 1)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    # `python -m` puts the current folder first; this program's own folder stands there now.
    sys.path[0] = request["cwd"]
    sys.argv = ["-m", *request["argv"]]
    sys.orig_argv = [sys.executable, "-m", "nanokv", *request["argv"]]
    sys.stdin = text_file(0, "r", "strict")
    sys.stdout = text_file(1, "w", "strict")
    sys.stderr = text_file(2, "w", "backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def text_file(number: int, mode: str, errors: str) -> io.TextIOWrapper:
    """stdin, stdout or stderr as the interpreter opens them."""
    unbuffered = "PYTHONUNBUFFERED" in os.environ and mode == "w"
    raw = open(number, mode + "b", buffering=0 if unbuffered else -1, closefd=False)
    at_once = number == 2 or os.isatty(number)
    file = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=at_once, write_through=unbuffered)
    file.mode = mode
    return file


if __name__ == "__main__" and main():
    runpy.run_module("nanokv", run_name="__main__", alter_sys=True)
