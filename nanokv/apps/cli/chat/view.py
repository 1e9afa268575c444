"""What an answer looks like: text on stdout as it comes, thinking dim on stderr, one dim status line after it.

Lines of an answer break between words (wrapping.py); nothing else that stands on the screen is drawn
again. Every character goes through the sanitizer. A prefill that takes longer than a second shows its
progress, on stderr.
"""

import os
import sys
import time
from contextlib import nullcontext

from nanokv.apps.cli.common import layout, speculation
from nanokv.apps.cli.common.answer import AnswerWriter, thoughts
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.cli.common.terminal import (
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

LONGEST_PROBLEM = 400  # characters of an error line
LONGEST_RECALL = 12  # lines of a message, or of an answer, that a resumed chat shows again


def status(turn, context, width=None) -> str:
    """`  14 new + 0 reused → 8 out · first token 21 ms · 310 tok/s · cache 21/2,048 · 96.8 kB`

    Behind the bytes of the tokens stand those of the whole cache, where it keeps more: (147 kB reserved).
    In a terminal that is too narrow the cache stands on a line of its own.
    """
    parts = [f"{turn.new:,} new + {turn.reused:,} reused → {turn.out:,} out"]
    parts += [f"first token {seconds_text(turn.ttft)}"] if turn.out else []
    parts += [f"{turn.tok_s:,.0f} tok/s"] if turn.tok_s else []
    parts += speculation.status(turn.speculation)
    parts += [f"cache {turn.cached:,}/{context:,} · {held_text(turn.kv_used, turn.kv_bytes)}"]
    return layout.joined(parts, width, "  ")


def ending(turn, session) -> str:
    """Why the answer ended, where that was not the model's own wish; "" otherwise."""
    if not turn.out:
        return "[stopped before the first token; what was read stays in the cache]"
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
    """Prints for the person at the prompt. `thinking`, `stats` and `markdown` may change during the chat."""

    def __init__(
        self,
        output: OutputOptions,
        thinking: str | None = None,
        stats: str = "on",
        markdown: bool = False,
    ):
        self.out, self.err = Style(sys.stdout, output.color), Style(sys.stderr, output.color)
        self.quiet, self.thinking, self.stats = output.quiet, thinking or "show", stats
        self.markdown = "on" if markdown else "off"

    def say(self, text):
        """One or more dim lines on stderr: status, hints, replies of commands. A terminal gets no broken words."""
        width = self.width()
        lines = [part for line in text.split("\n") for part in _lines(line, width)]
        write_err("".join(self.err.dim(line) + "\n" for line in lines))

    def recall(self, system, exchange):
        """Where a resumed chat was: the system prompt on one line, the last message and its answer."""
        if system:
            line = sanitize_line(f"system: {system}")
            room = (self.width() or 80) - 2
            self.say(line if layout.cells(line) <= room else line[: room - 1] + "…")
        for message in exchange:
            mark = "> " if message["role"] == "user" else ""
            opened = "</think>" in message["content"].split("<think>")[0]
            said = message["content"] if mark else split_thinking(message["content"], opened)[1]
            self.say(excerpt(mark + sanitize(said), self.width()))
            if message.get("interrupted"):
                self.say("  [interrupted · /continue or /retry]")

    def width(self):
        """Columns of the terminal that stderr is; None for a pipe or a file, where a line stays whole."""
        return layout.columns(sys.stderr, None)

    def problem(self, error):
        """An error that the chat survives: one line, and one for the hint. Our own bugs are named by their type."""
        message, hint = describe(error) or (
            f"{type(error).__name__}: {error}",
            f"{REPORT}; the chat goes on",
        )
        cut = "…" * (len(message) > LONGEST_PROBLEM)
        write_line(self.err.red("error: ") + sanitize_line(message[:LONGEST_PROBLEM] + cut))
        if hint:
            self.say(f"hint: {sanitize_line(hint[:LONGEST_PROBLEM])}")

    def answer(self, session, pieces, progress):
        """Stream one answer; returns when it ended or was interrupted. The generator is always closed."""
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
            pieces.close()
        self._after(session)

    def _after(self, session):
        turn = session.last
        turns, tokens = turn.dropped
        if turns:
            self.say(
                f"  dropped {turns:,} turn{'s' * (turns > 1)} (−{tokens:,}); prefilled {turn.new:,} again"
            )
        if note := ending(turn, session):
            self.say(f"  {note}")
        if self.stats == "on" and not self.quiet:
            self.say(status(turn, session.context, self.width()))


def excerpt(text, width) -> str:
    """The beginning of a text as it would be shown, and how much there is more."""
    lines = [part for line in text.split("\n") for part in _lines(line, width)]
    if len(lines) <= LONGEST_RECALL + 1:
        return "\n".join(lines)
    return "\n".join([*lines[:LONGEST_RECALL], f"… {len(lines) - LONGEST_RECALL:,} more lines"])


def _lines(line, width):
    text = line.lstrip(" ")
    indent = line[: len(line) - len(text)]
    return layout.paragraph(text, width, indent, indent + "  ").split("\n")


class Markdown:
    """`show` of a writer: finished blocks are formatted and appended; nothing on the screen is ever drawn again."""

    def __init__(self, colors: bool):
        self.colors, self.block = colors, ""

    def __call__(self, text):
        self.block += text
        while (cut := block_end(self.block)) > 0:
            self.render(self.block[:cut])
            self.block = self.block[cut:]

    def finish(self):
        """The last block."""
        self.render(self.block)
        self.block = ""

    def render(self, block):
        from rich.console import Console
        from rich.markdown import Markdown as Formatted

        if text := block.strip("\n"):
            color = None if self.colors else True
            Console(file=sys.stdout, no_color=color, force_terminal=self.colors).print(
                Formatted(text)
            )
            sys.stdout.flush()


def block_end(text) -> int:
    """Where the first finished Markdown block ends: after an empty line outside a fence; 0 = not yet."""
    position, fenced = 0, False
    for line in text.splitlines(keepends=True):
        position += len(line)
        if line.lstrip().startswith("```"):
            fenced = not fenced
        if not line.strip() and line.endswith("\n") and not fenced:
            return position
    return 0


class Progress:
    """Callable that stands between generation and the interrupt: asks for a stop, and shows a long prefill."""

    def __init__(self, stop, session, view):
        self.stop, self.session, self.view = stop, session, view
        self.raising = getattr(stop, "raising", nullcontext)  # Ctrl-C inside a forward
        self.next, self.width, self.done = time.monotonic() + 1.0, 0, False
        self.moves = is_tty(sys.stderr) and os.environ.get("TERM") != "dumb"

    def __call__(self) -> bool:
        now = time.monotonic()
        if now >= self.next and not self.done and not self.view.quiet:
            self.next = now + (0.1 if self.moves else 10.0)
            read, prompt = self.session.cache.length, len(self.session.prompt_ids)
            text = (
                f"  prefill {read:,}/{prompt:,}" if read < prompt else "  looking for the best beam"
            )
            write_err(("\r" + self.view.err.dim(text)) if self.moves else text + "\n")
            self.width = len(text) if self.moves else 0
        return self.stop()

    def clear(self):
        """Take the progress line away before the first word."""
        if self.width:
            write_err("\r" + " " * self.width + "\r")
        self.width, self.done = 0, True
