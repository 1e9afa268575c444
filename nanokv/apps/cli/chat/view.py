"""The display of an answer: text on stdout, thinking dim on stderr, then one dim status line.

Lines of an answer break between words (wrapping.py), which redraws a word; nothing else on the
screen is redrawn. Every character passes the sanitizer. A prefill of more than a second shows its
progress on stderr.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, speculation
from nanokv.apps.cli.common.answer import AnswerWriter, thoughts
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.cli.common.terminal import (
    Interrupt,
    Style,
    held_text,
    is_tty,
    sanitize,
    sanitize_line,
    seconds_text,
    write_err,
    write_line,
    write_out,
)
from nanokv.apps.cli.common.ways_out import REPORT, describe
from nanokv.text.thinking import split_thinking

if TYPE_CHECKING:
    from nanokv.chat.session import Session, Turn

LONGEST_PROBLEM = 400  # characters of an error line
LONGEST_RECALL = 12  # lines of a message or an answer that a resumed chat shows


def status(turn: "Turn", context: int, width: int | None = None) -> str:
    """`  14 new + 0 reused → 8 out · first token 21 ms · 310 tok/s · cache 21/2,048 · 96.8 kB`

    The bytes are those of the tokens. If the whole cache takes more, that size follows: (147 kB
    reserved). In a narrow terminal the cache gets a separate line.
    """
    parts = [f"{turn.new:,} new + {turn.reused:,} reused → {turn.out:,} out"]
    if turn.out:
        parts.append(f"first token {seconds_text(turn.ttft)}")
    if turn.tok_s:
        parts.append(f"{turn.tok_s:,.0f} tok/s")
    parts += speculation.status(turn.speculation)
    parts.append(f"cache {turn.cached:,}/{context:,} · {held_text(turn.kv_used, turn.kv_bytes)}")
    return layout.joined(parts, width, "  ")


def ending(turn: "Turn", session: "Session") -> str:
    """Why the answer ended; "" if the model ended it."""
    if not turn.out:
        return "[stopped before the first token; the tokens read so far stay in the cache]"
    room = "/drop N then /continue" if len(session.messages) > 2 else "/clear"
    text = {
        "length": f"[stopped at {turn.out:,} tokens · /continue]",
        "context": f"[context full {turn.cached:,}/{session.context:,} · {room}]",
        "interrupted": "[interrupted · /continue or /retry]",
        "loop": "[stopped: the same tokens 20 times in a row · /continue]",
    }.get(turn.finish_reason, "")
    if turn.text.endswith("\ufffd"):
        text += " [the last character was cut, shown as \ufffd]"
    return text.strip()


class View:
    """Prints for the user. `thinking`, `stats` and `markdown` may change during the chat."""

    def __init__(
        self,
        output: OutputOptions,
        thinking: str | None = None,
        stats: str = "on",
        markdown: bool = False,
    ):
        self.out = Style(sys.stdout, output.color)
        self.err = Style(sys.stderr, output.color)
        self.quiet = output.quiet
        self.thinking = thinking or "show"
        self.stats = stats
        self.markdown = "on" if markdown else "off"

    def say(self, text: str) -> None:
        """Dim lines on stderr: status, hints, replies of commands. Lines break between words."""
        width = self.width()
        lines = [part for line in text.split("\n") for part in _lines(line, width)]
        write_err("".join(self.err.dim(line) + "\n" for line in lines))

    def recall(self, system: str | None, exchange: list[dict]) -> None:
        """Show the end of a resumed chat: the system prompt, the last message, and its answer."""
        if system:
            line = sanitize_line(f"system: {system}")
            room = (self.width() or 80) - 2
            if layout.cells(line) > room:
                line = line[: room - 1] + "…"
            self.say(line)
        for message in exchange:
            text = message["content"]
            if message["role"] == "user":
                text = "> " + sanitize(text)
            else:
                opened = "</think>" in text.split("<think>")[0]
                _, answer = split_thinking(text, opened)
                text = sanitize(answer)
            self.say(excerpt(text, self.width()))
            if message.get("interrupted"):
                self.say("  [interrupted · /continue or /retry]")

    def width(self) -> int | None:
        """Columns of the terminal on stderr; None for a pipe or a file, where lines stay whole."""
        return layout.columns(sys.stderr, None)

    def problem(self, error: Exception) -> None:
        """Show an error after which the chat goes on, and its hint. A bug is named by its type."""
        message, hint = describe(error) or (
            f"{type(error).__name__}: {error}",
            f"{REPORT}; the chat goes on",
        )
        if len(message) > LONGEST_PROBLEM:
            message = message[:LONGEST_PROBLEM] + "…"
        write_line(self.err.red("error: ") + sanitize_line(message))
        if hint:
            self.say(f"hint: {sanitize_line(hint[:LONGEST_PROBLEM])}")

    def answer(self, session: "Session", pieces: Iterator[str], progress: "Progress") -> None:
        """Stream one answer until it ends or is interrupted, and close its generator."""
        formatted = Markdown(self.out.enabled) if self.markdown == "on" else None
        writer = AnswerWriter(thoughts(self.thinking, self.quiet), self.err, formatted)
        try:
            for piece in pieces:
                progress.clear()
                writer.begin(session.thinking_opened)
                writer.put(piece)
            progress.clear()
            writer.finish()
            if formatted:
                formatted.finish()
            elif writer.line and not writer.line.endswith("\n"):
                write_out("\n")
        finally:
            pieces.close()  # type: ignore[attr-defined]  # Session's iterators are generators
        self._after(session)

    def _after(self, session: "Session") -> None:
        turn = session.last
        assert turn is not None
        turns, tokens = turn.dropped
        if turns:
            plural = "s" if turns > 1 else ""
            self.say(
                f"  dropped {turns:,} turn{plural} (−{tokens:,}); prefilled {turn.new:,} again"
            )
        if note := ending(turn, session):
            self.say(f"  {note}")
        if self.stats == "on" and not self.quiet:
            self.say(status(turn, session.context, self.width()))


def excerpt(text: str, width: int | None) -> str:
    """The first lines of a text, and the number of lines left out."""
    lines = [part for line in text.split("\n") for part in _lines(line, width)]
    if len(lines) <= LONGEST_RECALL + 1:
        return "\n".join(lines)
    return "\n".join([*lines[:LONGEST_RECALL], f"… {len(lines) - LONGEST_RECALL:,} more lines"])


def _lines(line: str, width: int | None) -> list[str]:
    text = line.lstrip(" ")
    indent = line[: len(line) - len(text)]
    return layout.paragraph(text, width, indent, indent + "  ").split("\n")


class Markdown:
    """Formats finished Markdown blocks of an answer and appends them; nothing is redrawn."""

    def __init__(self, colors: bool):
        self.colors = colors
        self.block = ""

    def __call__(self, text: str) -> None:
        self.block += text
        while (cut := block_end(self.block)) > 0:
            self.render(self.block[:cut])
            self.block = self.block[cut:]

    def finish(self) -> None:
        """Show the last block."""
        self.render(self.block)
        self.block = ""

    def render(self, block: str) -> None:
        from rich.console import Console
        from rich.markdown import Markdown as Formatted

        if text := block.strip("\n"):
            color = None if self.colors else True
            Console(file=sys.stdout, no_color=color, force_terminal=self.colors).print(
                Formatted(text)
            )
            sys.stdout.flush()


def block_end(text: str) -> int:
    """The end of the first finished Markdown block: an empty line outside a fence; 0 if none."""
    position = 0
    fenced = False
    for line in text.splitlines(keepends=True):
        position += len(line)
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if not line.strip() and line.endswith("\n") and not fenced:
            return position
    return 0


class Progress:
    """Asks between tokens whether to stop, and shows the progress of a long prefill."""

    def __init__(self, stop: Interrupt, session: "Session", view: View):
        self.stop = stop
        self.session = session
        self.view = view
        self.raising = getattr(stop, "raising", nullcontext)  # lets Ctrl-C end a forward
        self.next = time.monotonic() + 1.0  # time of the next update
        self.width = 0  # columns of the line on the screen
        self.done = False
        self.moves = is_tty(sys.stderr) and os.environ.get("TERM") != "dumb"

    def __call__(self) -> bool:
        now = time.monotonic()
        if now >= self.next and not self.done and not self.view.quiet:
            self.next = now + (0.1 if self.moves else 10.0)
            self._show()
        return self.stop()

    def _show(self) -> None:
        """Write the progress, over the line before it where the terminal can do that."""
        read = self.session.cache.length
        prompt = len(self.session.prompt_ids)
        text = f"  prefill {read:,}/{prompt:,}"
        if read >= prompt:
            text = "  searching for the best beam"
        if self.moves:
            write_err("\r" + self.view.err.dim(text))
            self.width = len(text)
        else:
            write_err(text + "\n")
            self.width = 0

    def clear(self) -> None:
        """Remove the progress line before the first word."""
        if self.width:
            write_err("\r" + " " * self.width + "\r")
        self.width = 0
        self.done = True
