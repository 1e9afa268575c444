"""The terminal of `nanokv chat` between two prompts: what is typed while the model loads or answers is kept.

At its own prompt prompt_toolkit reads every key. Between two prompts this file does: no echo, no line editing by the
kernel, keys go into prompt_toolkit's type-ahead store, and the next prompt takes them out. Enter is Enter there: two
lines typed ahead are two messages, sent one after the other, and a command is a command. After Ctrl-C, an error, or
with a message back in the input line, `hold` makes newlines of those Enters: the text stands in the prompt, unsent.
ISIG stays on, so Ctrl-C is a signal here; only the terminal's foreground process group touches the modes.
"""

import contextlib
import os
import select
import signal
import sys

from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

try:
    import termios
except ImportError:  # Windows
    termios = None

LFLAG = 3  # index of the local flags in what tcgetattr returns
# Keys that would do something by themselves in a prompt.
LEAVING = (Keys.ControlC, Keys.ControlD, Keys.ControlZ)


def open_keyboard():
    """A context manager around the whole chat."""
    return Keyboard() if termios is None else PosixKeyboard()


class Keyboard:
    """Windows: its console keeps unread keys by itself and echoes none of them; nothing has to be done."""

    def __init__(self):
        self.input = create_input()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def poll(self):
        """Keep what has been typed so far; called between tokens and before anything else reads the terminal."""

    def prompt(self):
        """Around prompt_toolkit's prompt."""
        return contextlib.nullcontext()

    def lend(self):
        """Around a question or an editor: the terminal as the shell had it."""
        return contextlib.nullcontext()

    def hold(self, draft=""):
        """The next prompt shows what was typed ahead, below `draft` if there is one, and sends nothing by itself."""
        self.poll()
        keys = [key for key in get_typeahead(self.input) if key.key not in LEAVING]
        newline = KeyPress(Keys.ControlJ, "\n")
        keys = [newline if key.key == Keys.Enter else key for key in keys]
        store_typeahead(self.input, [newline, *keys] if keys and draft else keys)


class PosixKeyboard(Keyboard):
    """The modes of a Unix terminal: the shell's, prompt_toolkit's, and ours between two prompts."""

    def __init__(self):
        super().__init__()
        self.fd, self.front, self.handlers = self.input.fileno(), True, {}
        self.reading, self.stopping = False, None  # a signal to stop that came while keys were read

    def __enter__(self):
        self.shell = termios.tcgetattr(self.fd)
        with self.input.raw_mode():
            self.raw, self.own = termios.tcgetattr(self.fd), termios.tcgetattr(self.fd)
        # NOFLSH: Ctrl-C does not throw away what was typed before it.
        self.own[LFLAG] |= termios.ISIG | termios.NOFLSH
        for number, handler in (
            (signal.SIGTSTP, self._stop),
            (signal.SIGQUIT, self._stop),
            (signal.SIGCONT, self._on),
        ):
            if signal.getsignal(number) != signal.SIG_IGN:
                self.handlers[number] = signal.signal(number, handler)
                # A tcsetattr that waited in the background goes on.
                signal.siginterrupt(number, False)
        self._take()
        self.poll()
        # Typed before this: the kernel had made newlines of the Enters.
        keys = get_typeahead(self.input)
        store_typeahead(
            self.input, [KeyPress(Keys.Enter) if key.key == Keys.ControlJ else key for key in keys]
        )
        return self

    def __exit__(self, *exception):
        self._give_back()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def poll(self):
        front, before = self._in_front(), self.front
        self.front = front
        if front and not before:  # `fg` of a job that ran in the background sends no signal
            self._take()
        self.reading = True
        try:
            while front and not self.input.closed and select.select([self.fd], [], [], 0)[0]:
                store_typeahead(self.input, self.input.read_keys())
        finally:
            self.reading = False
        if self.stopping is not None:
            number, self.stopping = self.stopping, None
            self._stop(number, None)

    @contextlib.contextmanager
    def prompt(self):
        self.poll()
        store_typeahead(self.input, self.input.flush_keys())  # an Escape on its own
        self.mode = self.raw
        try:
            yield
        finally:
            self._take()

    @contextlib.contextmanager
    def lend(self):
        self.poll()
        self._give_back()
        try:
            yield
        finally:
            self._take()

    # --- modes ------------------------------------------------------------------------------------

    def _in_front(self) -> bool:
        """A background job that touches the terminal is stopped by the kernel."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # hung up
            return False

    def _set(self, mode, paste=b""):
        """The modes, and whether the terminal marks pastes. Not through sys.stdout: a signal handler may be here."""
        if self._in_front():
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self.fd, termios.TCSANOW, mode)
                os.write(sys.stdout.fileno(), paste if os.environ.get("TERM") != "dumb" else b"")

    def _take(self):
        self.mode = self.own
        self._set(self.own, b"\x1b[?2004h")  # a paste during an answer is one message as well

    def _give_back(self):
        self.mode = None
        self._set(self.shell, b"\x1b[?2004l")

    # --- signals ----------------------------------------------------------------------------------

    def _stop(self, number, frame):
        """Ctrl-Z, Ctrl-\\: the shell's modes first, then what the signal does to every other program."""
        # The parser of keys cannot be entered twice: `poll` stops when it has read them all.
        if self.reading:
            self.stopping = number
            return
        mode = self.mode
        if mode is self.own:  # what is left in the kernel would go to the shell
            self.poll()
        if mode is not None:
            self._give_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._stop)  # here again: `fg` or `bg`
        signal.siginterrupt(number, False)
        if mode is not None:
            self._resume(mode)

    def _on(self, number, frame):
        """SIGCONT after a SIGSTOP, which gave no time to do anything."""
        if self.mode is not None:
            self._resume(self.mode)

    def _resume(self, mode):
        if mode is self.own:
            self._take()
        else:
            self.mode = mode
            self._set(mode)
