"""Streams one answer: the answer to stdout, the model's thoughts to stderr.

Control characters are made visible. On a terminal, lines break between words. The chat, the pipe
and `nanokv generate` use this writer. `--thinking` has three values. show: write the thoughts,
dim. fold: write one line with the seconds they took. off: ask the model not to think, and write
no thoughts.
"""

import sys
import time
from collections.abc import Callable, Iterable

from nanokv.apps.cli.common.terminal import Sanitizer, Style, seconds_text, write_err, write_out
from nanokv.apps.cli.common.wrapping import write_words
from nanokv.text.thinking import ThinkSplitter


def thoughts(thinking: str | None, quiet: bool) -> str:
    """How thoughts are written: show, fold or off. --quiet means off."""
    if quiet:
        return "off"
    return thinking or "show"


class AnswerWriter:
    """Writes one answer. `show(text)` receives the sanitized text of the answer (None: stdout).

    `thinking` is show, fold or off. `style` is the Style of stderr; it dims the thoughts.
    """

    def __init__(self, thinking: str, style: Style, show: Callable[[str], None] | None = None):
        self.thinking = thinking
        self.style = style
        self.show = show or write_words(sys.stdout, write_out)
        self.show_thought = write_words(sys.stderr, lambda text: write_err(self.style.dim(text)))
        self.splitter: ThinkSplitter | None = None
        self.kind = ""  # of the last piece: "answer" or "think"
        self.line = ""  # the last text of the answer
        self.clean = Sanitizer()  # for the answer
        self.dim = Sanitizer()  # for thoughts
        self.since = 0.0  # when the answer began, monotonic seconds

    def begin(self, opened: bool) -> None:
        """Call before the first piece; later calls change nothing.

        `opened`: the prompt ended in <think>, so the answer begins with a thought.
        """
        if self.splitter is None:
            self.splitter = ThinkSplitter(opened)
            self.since = time.monotonic()

    def put(self, piece: str) -> None:
        """Write one piece of text. Without `begin` the text is a continuation, with no thoughts."""
        if self.splitter is None:
            self._write([("answer", piece)])
        else:
            self._write(self.splitter.put(piece))

    def finish(self) -> None:
        """Write the text that was held back.

        Afterwards `line` is the last text of the answer, "" if the answer was empty.
        """
        if self.splitter is not None:
            self._write(self.splitter.flush())
        if self.kind == "think":
            self._end_thought()
        self._show(self.clean.flush())

    def _write(self, pieces: Iterable[tuple[str, str]]) -> None:
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
            seconds = seconds_text(time.monotonic() - self.since)
            write_err(self.style.dim(f"  thought for {seconds}") + "\n")
