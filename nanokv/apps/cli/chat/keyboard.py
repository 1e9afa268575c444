"""The terminal of `nanokv chat` between two prompts: typed keys are kept for the next.

At its prompt prompt_toolkit reads the keys. While the model loads or answers, this module does: the
terminal neither echoes nor edits lines, and keys go into prompt_toolkit's type-ahead store, from
which the next prompt takes them. Enter keeps its meaning: two lines typed ahead are two messages,
sent one after the other, and a command is a command. After Ctrl-C, an error, or with a message back
in the input line, `hold` turns these Enters into newlines, so that nothing is sent by itself. ISIG
stays on, so Ctrl-C is a signal here. Only the foreground process group sets the terminal's modes.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from prompt_toolkit.input import create_input
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]  # the module does not exist there

LFLAG = 3  # index of the local flags in the list that tcgetattr returns
# Keys that would leave or suspend the chat at the next prompt.
LEAVING = (Keys.ControlC, Keys.ControlD, Keys.ControlZ)


def open_keyboard() -> "Keyboard":
    """The keyboard for this system, a context manager around the whole chat."""
    if termios is None:
        return Keyboard()
    return PosixKeyboard()


class Keyboard:
    """Windows, whose console keeps unread keys without an echo: nothing needs to be done."""

    def __init__(self) -> None:
        self.input = create_input()

    def __enter__(self) -> "Keyboard":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def poll(self) -> None:
        """Keep the keys typed so far; called between tokens and before others read the terminal."""

    def prompt(self) -> AbstractContextManager[None]:
        """Around prompt_toolkit's prompt."""
        return contextlib.nullcontext()

    def lend(self) -> AbstractContextManager[None]:
        """Around a question or an editor, which get the terminal as the shell had it."""
        return contextlib.nullcontext()

    def hold(self, draft: str = "") -> None:
        """Show the keys typed ahead at the next prompt, below `draft`, without sending them."""
        self.poll()
        newline = KeyPress(Keys.ControlJ, "\n")
        keys = []
        for key in get_typeahead(self.input):
            if key.key == Keys.Enter:
                keys.append(newline)
            elif key.key not in LEAVING:
                keys.append(key)
        if keys and draft:
            keys.insert(0, newline)
        store_typeahead(self.input, keys)


class PosixKeyboard(Keyboard):
    """The modes of a Unix terminal: the shell's, prompt_toolkit's, the chat's between prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = self.input.fileno()
        self.front = True
        self.handlers: dict[int, Any] = {}
        self.reading = False
        self.stopping: int | None = None  # a stop signal that arrived while keys were read
        self.mode: list | None = None  # the mode in force; None: the shell's

    def __enter__(self) -> "PosixKeyboard":
        self.shell = termios.tcgetattr(self.fd)
        with self.input.raw_mode():
            self.raw = termios.tcgetattr(self.fd)
            self.own = termios.tcgetattr(self.fd)
        # NOFLSH: Ctrl-C does not discard the keys typed before it.
        self.own[LFLAG] |= termios.ISIG | termios.NOFLSH
        for number, handler in (
            (signal.SIGTSTP, self._stop),
            (signal.SIGQUIT, self._stop),
            (signal.SIGCONT, self._on),
        ):
            if signal.getsignal(number) != signal.SIG_IGN:
                self.handlers[number] = signal.signal(number, handler)
                # Restart a tcsetattr that waited while the job was in the background.
                signal.siginterrupt(number, False)
        self._take()
        self.poll()
        # Keys typed before this point: the kernel has turned their Enters into newlines.
        keys = get_typeahead(self.input)
        for i, key in enumerate(keys):
            if key.key == Keys.ControlJ:
                keys[i] = KeyPress(Keys.Enter)
        store_typeahead(self.input, keys)
        return self

    def __exit__(self, *exception: object) -> None:
        self._give_back()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def poll(self) -> None:
        before = self.front
        front = self._in_front()
        self.front = front
        if front and not before:  # the shell sends no signal for `fg` of a job that was running
            self._take()
        self.reading = True
        try:
            while front and not self.input.closed and select.select([self.fd], [], [], 0)[0]:
                store_typeahead(self.input, self.input.read_keys())
        finally:
            self.reading = False
        if self.stopping is not None:
            number = self.stopping
            self.stopping = None
            self._stop(number, None)

    @contextlib.contextmanager
    def prompt(self) -> Iterator[None]:
        self.poll()
        store_typeahead(self.input, self.input.flush_keys())  # a single Escape
        self.mode = self.raw
        try:
            yield
        finally:
            self._take()

    @contextlib.contextmanager
    def lend(self) -> Iterator[None]:
        self.poll()
        self._give_back()
        try:
            yield
        finally:
            self._take()

    # --- modes ------------------------------------------------------------------------------------

    def _in_front(self) -> bool:
        """Whether this process is in the foreground; others are stopped on terminal access."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # the terminal has hung up
            return False

    def _set(self, mode: list, paste: bytes = b"") -> None:
        """Set the terminal's mode, and whether it marks pastes.

        This may run in a signal handler, so sys.stdout's buffer is not used.
        """
        if not self._in_front():
            return
        if os.environ.get("TERM") == "dumb":
            paste = b""
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self.fd, termios.TCSANOW, mode)
            os.write(sys.stdout.fileno(), paste)

    def _take(self) -> None:
        self.mode = self.own
        # Pastes are marked, so that a paste during an answer becomes one message.
        self._set(self.own, b"\x1b[?2004h")

    def _give_back(self) -> None:
        self.mode = None
        self._set(self.shell, b"\x1b[?2004l")

    # --- signals ----------------------------------------------------------------------------------

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z or Ctrl-\\: restore the shell's mode, then stop as other programs do."""
        # The key parser is not reentrant: `poll` stops the process once it has read all keys.
        if self.reading:
            self.stopping = number
            return
        mode = self.mode
        if mode is self.own:  # otherwise the shell would get the keys that the kernel holds
            self.poll()
        if mode is not None:
            self._give_back()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._stop)  # continued by `fg` or `bg`
        signal.siginterrupt(number, False)
        if mode is not None:
            self._resume(mode)

    def _on(self, number: int, frame: FrameType | None) -> None:
        """Restore the mode on SIGCONT after a SIGSTOP, which a process cannot catch."""
        if self.mode is not None:
            self._resume(self.mode)

    def _resume(self, mode: list) -> None:
        if mode is self.own:
            self._take()
        else:
            self.mode = mode
            self._set(mode)
