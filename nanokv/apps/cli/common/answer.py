"""Streams one answer: the answer to stdout, the model's thoughts to stderr.

Control characters are made visible. On a terminal, lines break between words. The chat, the pipe
and `nanokv generate` use this writer. `--thinking` has three values. show: write the thoughts,
dim. fold: write one line with the seconds they took. off: ask the model not to think, and write
no thoughts.
"""

import sys
import time

from nanokv.apps.cli.common.terminal import Sanitizer, Style, seconds_text, write_err, write_out
from nanokv.apps.cli.common.wrapping import write_words
from nanokv.text.thinking import ThinkSplitter


def thoughts(thinking: str | None, quiet: bool) -> str:
    """How thoughts are written: show, fold or off. --quiet means off."""
    return "off" if quiet else thinking or "show"


class AnswerWriter:
    """Writes one answer. `show(text)` receives the sanitized text of the answer (None: stdout).

    `thinking` is show, fold or off. `style` is the Style of stderr; it dims the thoughts.
    """

    def __init__(self, thinking: str, style: Style, show=None):
        self.thinking, self.style = thinking, style
        self.show = show or write_words(sys.stdout, write_out)
        self.show_thought = write_words(sys.stderr, lambda text: write_err(self.style.dim(text)))
        self.splitter, self.kind, self.line = None, "", ""
        self.clean, self.dim, self.since = Sanitizer(), Sanitizer(), 0.0

    def begin(self, opened: bool) -> None:
        """Call before the first piece; later calls change nothing.

        `opened`: the prompt ended in <think>, so the answer begins with a thought.
        """
        if self.splitter is None:
            self.splitter, self.since = ThinkSplitter(opened), time.monotonic()

    def put(self, piece: str) -> None:
        """Write one piece of text. Without `begin` the text is a continuation, with no thoughts."""
        self._write(self.splitter.put(piece) if self.splitter else [("answer", piece)])

    def finish(self) -> None:
        """Write the text that was held back.

        Afterwards `line` is the last text of the answer, "" if the answer was empty.
        """
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
