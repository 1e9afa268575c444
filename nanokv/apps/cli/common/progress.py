"""One line of progress on stderr, for commands that take long and print little."""

import sys
import time

from nanokv.apps.cli.common import terminal

ON_TERMINAL_S = 0.1  # seconds between two updates of the line
ELSEWHERE_S = 10.0  # seconds between two lines if stderr is no terminal


class ProgressLine:
    """A line that is overwritten on a terminal; elsewhere a line every ten seconds.

    With `quiet` it is never due. Ask `due` before every `show`.
    """

    def __init__(self, quiet: bool):
        self.quiet = quiet
        self.tty = terminal.is_tty(sys.stderr)
        self.every = ELSEWHERE_S
        if self.tty:
            self.every = ON_TERMINAL_S
        self.began = time.monotonic()
        self.shown = self.began

    def due(self) -> bool:
        """True if enough time has passed since the last update; this call then counts as one."""
        now = time.monotonic()
        if self.quiet or now - self.shown < self.every:
            return False
        self.shown = now
        return True

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last update."""
        return self.shown - self.began

    def show(self, text: str) -> None:
        """Write the text, which must be one line."""
        if self.tty:
            terminal.write_err(f"\r{text}\x1b[K")
        else:
            terminal.write_err(f"{text}\n")

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self.tty and not self.quiet:
            terminal.write_err("\r\x1b[K")
