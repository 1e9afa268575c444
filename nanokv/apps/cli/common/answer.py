"""Writes an answer as it comes: the answer to stdout, what the model thinks to stderr, control characters made visible.
On a terminal both break between words.

For the chat, for a pipe and for `nanokv generate`. `--thinking` says what becomes of the thoughts: show them, dim; fold
them into one line that says how long they took; off: the model is asked not to think, and nothing is written.
"""

import sys
import time

from nanokv.apps.cli.common.terminal import Sanitizer, Style, seconds_text, write_err, write_out
from nanokv.apps.cli.common.wrapping import write_words
from nanokv.text.thinking import ThinkSplitter


def thoughts(thinking: str | None, quiet: bool) -> str:
    """What becomes of them: --quiet writes none."""
    return "off" if quiet else thinking or "show"


class AnswerWriter:
    """One answer on its way to the two streams; `show(text)` gets its clean text (None: stdout).

    `thinking` is show, fold or off; thoughts are dimmed by `style`, that of stderr.
    """

    def __init__(self, thinking: str, style: Style, show=None):
        self.thinking, self.style = thinking, style
        self.show = show or write_words(sys.stdout, write_out)
        self.show_thought = write_words(sys.stderr, lambda text: write_err(self.style.dim(text)))
        self.splitter, self.kind, self.line = None, "", ""
        self.clean, self.dim, self.since = Sanitizer(), Sanitizer(), 0.0

    def begin(self, opened: bool) -> None:
        """Before the first piece. `opened`: the prompt itself ended in <think>. Later calls change nothing."""
        if self.splitter is None:
            self.splitter, self.since = ThinkSplitter(opened), time.monotonic()

    def put(self, piece: str) -> None:
        """One piece of text; without `begin` it is no answer to a message, and has no thoughts."""
        self._write(self.splitter.put(piece) if self.splitter else [("answer", piece)])

    def finish(self) -> None:
        """What was held back. `line` is then the last text of the answer, "" if there was none."""
        self._write(self.splitter.flush() if self.splitter else [])
        if self.kind == "think":
            self._end_thought()
        self._show(self.clean.flush())

    def _write(self, pieces) -> None:
        for kind, text in pieces:
            if (self.kind, kind) == ("think", "answer"):
                self._end_thought()
            self.kind = kind
            if kind == "answer":
                self._show(self.clean.put(text))
            elif self.thinking == "show":
                self.show_thought(self.dim.put(text))

    def _show(self, text: str) -> None:
        if text:
            self.line = text
            self.show(text)

    def _end_thought(self) -> None:
        if self.thinking == "show":
            write_err(self.style.dim(self.dim.flush()) + "\n")
        elif self.thinking == "fold":
            write_err(
                self.style.dim(f"  thought for {seconds_text(time.monotonic() - self.since)}")
                + "\n"
            )
