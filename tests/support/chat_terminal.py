"""A person at a terminal, for tests: `nanokv chat` in a real pseudo-terminal, its screen kept by pyte.

`see(text)` waits until the screen shows the text, with a deadline and no sleeps; `raw` is every byte that came.
Cursor position requests are answered as a terminal does, so prompt_toolkit draws its toolbar.
"""

import errno
import os
import re
import signal
import sys
import termios
import time

import pexpect
import pyte
from pexpect.fdpexpect import fdspawn

import warm
from cli_helpers import HOME


class Forked(fdspawn):
    """pexpect.spawn for a command that warm.py forks: the same members, as far as tests use them."""

    def __init__(self, argv, env: dict, dimensions: tuple[int, int]):
        master, slave = os.openpty()
        termios.tcsetwinsize(slave, dimensions)
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = warm.start(argv, env, terminal=True, **streams)
        os.close(slave)
        super().__init__(master, timeout=60)
        self.pid = self.process.pid
        self.exitstatus = self.signalstatus = None

    def setwinsize(self, rows: int, columns: int):
        termios.tcsetwinsize(self.child_fd, (rows, columns))

    def read_nonblocking(self, size: int, timeout: float) -> bytes:
        try:
            return super().read_nonblocking(size, timeout)
        except OSError as error:
            # Linux tells the end of a terminal so.
            if error.errno == errno.EIO:
                raise pexpect.EOF("the program has ended") from None
            raise

    def isalive(self) -> bool:
        code = self.process.poll()
        if code is None:
            return True
        if code < 0:
            self.signalstatus = -code
        else:
            self.exitstatus = code
        return False

    def kill(self, number: int):
        self.process.send_signal(number)

    def close(self, force: bool = False):
        super().close()
        if force:
            self.process.kill()
            self.process.wait()
        self.isalive()


class Screen(pyte.Screen):
    """Renders the lines that have changed: a wait looks at the screen whenever something comes."""

    def __init__(self, columns: int, lines: int):
        self.rendered = {}
        super().__init__(columns, lines)

    def texts(self) -> list[str]:
        """The lines without the spaces at their ends."""
        for y in self.dirty:
            self.rendered[y] = self.line(y).rstrip()
        self.dirty.clear()
        return [self.rendered[y] for y in range(self.lines)]

    def line(self, y: int) -> str:
        characters = [self.buffer[y][x].data for x in range(self.columns)]
        # Behind a wide character stands a place that holds nothing.
        return "".join(characters)


class Terminal:
    """One running program and its screen."""

    def __init__(self, argv, env=None, columns=110, lines=40, preexec=None):
        drop = ("NANOKV_", "NO_COLOR", "FORCE_COLOR", "PROMPT_", "COLUMNS", "VISUAL")
        base = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        base |= {
            "TERM": "xterm-256color",
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": HOME,
        }
        env = base | (env or {})
        if preexec is None and warm.can_fork(argv, env, {}):
            self.child = Forked(argv, env, (lines, columns))
        else:
            self.child = pexpect.spawn(
                argv[0],
                list(argv[1:]),
                env=env,
                dimensions=(lines, columns),
                timeout=60,
                preexec_fn=preexec,
            )
        self.child.delaybeforesend = None
        self.screen = Screen(columns, lines)
        self.screen.write_process_input = lambda data: self.child.send(data)
        self.stream, self.raw = pyte.ByteStream(self.screen), b""

    def pump(self, seconds=0.05):
        """Take what has come; False at the end of the program."""
        try:
            data = self.child.read_nonblocking(1 << 16, seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        # Pyte drops the rest of a chunk at a joiner.
        self.stream.feed(data.replace("\u200d".encode(), b""))
        return True

    @property
    def text(self):
        return "\n".join(self.screen.texts()).rstrip("\n")

    def see(self, wanted, deadline=60.0, unseen=None):
        """Wait until the screen matches the regular expression (and no longer matches `unseen`); seconds waited."""
        began = time.monotonic()
        alive = True
        while not self.shows(wanted) or (unseen and self.shows(unseen)):
            if not alive or time.monotonic() - began > deadline:
                state = "running" if alive else "ended"
                raise AssertionError(
                    f"not on the screen of the {state} program: {wanted}\n{self.text}"
                )
            alive = self.pump()
        return time.monotonic() - began

    def shows(self, wanted):
        return re.search(wanted, self.text, re.MULTILINE) is not None

    def raw_mode(self, deadline=60.0, without=termios.ICANON):
        """Wait until the program reads keys itself; before that the terminal would turn Enter into Ctrl-J.

        Without ISIG as well it is at its prompt: there Ctrl-C is a key, elsewhere a signal.
        """
        end = time.monotonic() + deadline
        while termios.tcgetattr(self.child.child_fd)[3] & without:
            assert self.pump() and time.monotonic() < end, f"no prompt:\n{self.text}"

    def send(self, text):
        self.child.send(text)

    def ask(self, message, wanted=r"^> *$", deadline=60.0):
        """Type a line on an empty screen, wait for what it should show, then for the next prompt below it."""
        self.clear()
        self.send(message + "\r")
        self.see(wanted, deadline)
        self.see(r"(?s)\A>.*^>", deadline)

    def clear(self):
        """Empty the screen with Ctrl-L, so that what is seen next is new."""
        self.send("\x0c")
        self.see(r"\A> *$", deadline=20)

    def paste(self, text):
        self.send("\x1b[200~" + text + "\x1b[201~")

    def signal(self, number):
        os.kill(self.child.pid, number)

    def leave(self, keys="", deadline=30.0):
        """Send keys, wait for the end; the exit code (128 + n for a death by signal n)."""
        if keys:
            self.send(keys)
        began = time.monotonic()
        while self.pump() and time.monotonic() - began < deadline:
            pass
        # close() would send it a SIGHUP.
        while self.child.isalive() and time.monotonic() - began < deadline:
            time.sleep(0.01)
        self.child.close(force=False)
        return (
            self.child.exitstatus
            if self.child.exitstatus is not None
            else 128 + self.child.signalstatus
        )

    def stop(self):
        if self.child.isalive():
            self.child.kill(signal.SIGKILL)
        self.child.close(force=True)


def chat_argv(model, *flags):
    return [sys.executable, "-m", "nanokv", "chat", "-m", str(model), "-t", "0", *flags]
