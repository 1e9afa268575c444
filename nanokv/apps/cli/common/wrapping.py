"""Breaks a streamed answer between words on a terminal; a pipe gets the text unchanged.

Each piece is written at once. A word that grows past the edge is erased from its line and written
again on the next line, as ollama does. The last column stays empty, because terminals disagree on
the cursor's position after it. Lines of a fenced code block, and a word that is wider than the
terminal, are broken by the terminal, so that they can be copied whole.
"""

import os
import unicodedata
from collections.abc import Callable
from functools import partial
from typing import TextIO

from nanokv.apps.cli.common import layout
from nanokv.apps.cli.common.terminal import is_tty

JOINER = "\u200d"  # joins the emoji before and after it into one glyph
TAB = 8  # columns
FENCE = "```"  # opens and closes a block of code


def write_words(stream: TextIO, write: Callable[[str], None]) -> Callable[[str], None]:
    """A WordWrap around `write`; `write` itself where the cursor of the stream cannot be moved."""
    if not is_tty(stream) or os.environ.get("TERM") == "dumb":
        return write
    return WordWrap(write, partial(layout.columns, stream))


class WordWrap:
    """`wrap(piece)` writes one piece. A new object assumes a cursor at the left edge.

    `columns()` is called for every piece, because the terminal may be resized. The cursor's line
    holds `line` cells, then `word`, which is `cells` wide; `shown` of its characters are written.
    Blanks are written together with the next word, and dropped at a line break.
    """

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int]):
        import wcwidth  # 16 ms, only for terminals

        self.write = write
        self.columns = columns
        self.width_of = wcwidth.wcwidth
        self.width = columns()
        self.line = 0
        self.blanks = ""
        self.out: list[str] = []  # the output of this piece
        self.word = ""
        self.cells = 0
        self.shown = 0
        self.long = False  # the word is wider than the terminal, so the terminal breaks it
        self.start = ""  # the first characters of this line of the text
        self.fenced = False  # inside a code block

    def __call__(self, piece: str) -> None:
        width = self.columns()
        if width != self.width:  # the terminal was resized and has broken its lines again
            self._end_word()
            self.width = width
            self.line %= width
        for character in piece:
            self._put(character)
        self._write_word()
        self.write("".join(self.out))
        self.out = []

    def _put(self, character: str) -> None:
        if character == "\n":
            self._end_line()
        elif self.fenced:
            self.out.append(character)
        elif character in " \t":
            self._end_word()
            self.blanks += character
        elif not self.word or self._begins(character):
            self._end_word()
            self._begin(character)
        else:
            self._grow(character)
        if len(self.start) < len(FENCE) and not character.isspace():
            self.start += character

    def _begins(self, character: str) -> bool:
        """May a line begin here without a blank? Chinese and Japanese text has no blanks."""
        closing = unicodedata.category(character) in ("Pe", "Pf", "Po")
        attached = closing or not self._cells(character)
        wide = 2 in (self._cells(self.word[-1]), self._cells(character))
        return wide and not attached and self.word[-1] != JOINER

    def _begin(self, character: str) -> None:
        """The first character of a word: after the blanks, or on a new line."""
        behind = self.line
        for blank in self.blanks:
            if blank == "\t":
                behind += TAB - behind % TAB
            else:
                behind += 1
        cells = self._cells(character)
        if self.line and behind + cells >= self.width:
            self._break()
        else:
            self.out.append(self.blanks)
            self.line = behind
        self.blanks = ""
        self.word = character
        self.cells = cells

    def _grow(self, character: str) -> None:
        """One more character of the word. A word that no longer fits moves to the next line."""
        cells = self._cells(character)
        if self.line + self.cells + cells >= self.width and not self.long:
            if self.line:
                self._move_word()
            else:
                self._write_word()
                self.line = self.cells
                self.cells = 0
                self.long = True
        if self.long:
            self.out.append(character)
            self.line += cells
        else:
            self.word += character
            self.cells += cells

    def _move_word(self) -> None:
        """Erase the characters of the word that are written, and begin a new line."""
        written = self._cells(self.word[: self.shown])
        if written:
            self.out.append(f"\x1b[{written}D\x1b[K")
        self._break()
        self.shown = 0

    def _break(self) -> None:
        self.out.append("\n")
        self.line = 0

    def _write_word(self) -> None:
        self.out.append(self.word[self.shown :])
        self.shown = len(self.word)

    def _end_word(self) -> None:
        self._write_word()
        self.line += self.cells
        if self.long:
            self.line = self.line % self.width or self.width
        self.word = ""
        self.cells = 0
        self.shown = 0
        self.long = False

    def _end_line(self) -> None:
        self._end_word()
        self._break()
        self.blanks = ""
        self.fenced ^= self.start == FENCE
        self.start = ""

    def _cells(self, text: str) -> int:
        return sum(max(0, self.width_of(character)) for character in text)
