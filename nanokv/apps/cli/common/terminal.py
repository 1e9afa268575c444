"""The terminal: visible control characters, streams, colour per stream, numbers as text, signals.

Model output, file names, config strings and error texts are untrusted: an ESC in them could
retitle the window, move the cursor or hide text. `sanitize` replaces *characters*, never whole
sequences, because a sequence can be split over tokens (ESC is one Qwen token, "[2J" another). JSON
(escaped) and session files keep the raw text.
Standard library only: this file is imported before arguments are parsed.
"""

import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from nanokv.apps.cli.common import layout
from nanokv.errors import NanoKVError
from weights_loader.strict import bounded

if TYPE_CHECKING:
    from types import FrameType

SWALLOW_S = 0.5  # a second Ctrl-C within this time counts as the same press


# --- control characters ---------------------------------------------------------------------------


def _visible() -> dict[int, str]:
    """A table for str.translate.

    C0 becomes control pictures (ESC → ␛), DEL becomes ␡; C1, bidi overrides and surrogates become
    escapes such as `\\x9b`. Bidi marks (U+200E, U+200F, U+061C) stay: Arabic and Hebrew need them,
    and they cannot reorder other text.
    """
    table = {c: chr(0x2400 + c) for c in range(0x20) if chr(c) not in "\n\t"}
    table[0x7F] = "\u2421"
    table |= {c: f"\\x{c:02x}" for c in range(0x80, 0xA0)}
    table |= {c: f"\\u{c:04x}" for c in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
    # A lone surrogate cannot be encoded as UTF-8.
    return table | {c: f"\\u{c:04x}" for c in range(0xD800, 0xE000)}


VISIBLE = _visible()
VISIBLE_LINE = VISIBLE | {ord("\n"): "\u240a", ord("\t"): "\u2409"}
# Line and paragraph separator: some readers split there.
VISIBLE_LINE |= {c: f"\\u{c:04x}" for c in (0x2028, 0x2029)}


def sanitize(text: str) -> str:
    """Text of several lines: \\n and \\t stay, CRLF becomes \\n, other controls become visible."""
    return str(text).replace("\r\n", "\n").translate(VISIBLE)


def sanitize_line(text: str) -> str:
    """One line: like `sanitize`, but \\n and \\t become visible too. For names, errors, notices."""
    return str(text).translate(VISIBLE_LINE)


def message_line(text: str) -> str:
    """One line of a bounded length, for errors, hints, warnings and notices that quote text."""
    return sanitize_line(bounded(str(text)))


class Sanitizer:
    """`sanitize` for a stream. A \\r at the end of a chunk is held back: a \\n may follow it."""

    def __init__(self):
        self._held = ""

    def put(self, text: str) -> str:
        """The sanitized chunk, without a \\r at its end."""
        text = self._held + text
        self._held = ""
        if text.endswith("\r"):
            text = text[:-1]
            self._held = "\r"
        return sanitize(text)

    def flush(self) -> str:
        """The \\r that is still held at the end of the stream, or ""."""
        text = self._held
        self._held = ""
        return sanitize(text)


# --- streams --------------------------------------------------------------------------------------


def prepare_streams() -> None:
    """Write UTF-8 to pipes and files, and the terminal's encoding to a tty.

    A character that the encoding lacks becomes `?` instead of raising UnicodeEncodeError.
    """
    for stream in (sys.stdout, sys.stderr):
        # A stream is None when its descriptor is closed, and a plain buffer in tests.
        if hasattr(stream, "reconfigure"):
            if stream.isatty() or os.environ.get("PYTHONIOENCODING"):
                stream.reconfigure(errors="replace")
            else:
                stream.reconfigure(encoding="utf-8", errors="replace")


def is_tty(stream: TextIO | None) -> bool:
    """Like isatty, but False for a closed or missing stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def is_interactive() -> bool:
    """Whether stdin and stdout are both a terminal; otherwise no prompt is shown."""
    return is_tty(sys.stdin) and is_tty(sys.stdout)


def write_out(text: str) -> None:
    """Write to stdout and flush.

    Raises BrokenPipeError for a closed pipe (exit code 141) and NanoKVError for other failures,
    such as a full disk (exit code 2).
    """
    if sys.stdout is None:
        raise NanoKVError("stdout is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()  # the rest of the buffer cannot be written either
        raise NanoKVError(f"cannot write to stdout: {error.strerror}") from error


def write_err(text: str) -> None:
    """Write to stderr and flush. A closed stderr is ignored: it must not end the program."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        pass


class Output(Protocol):
    """The part of OutputOptions that this file uses; options.py is above it."""

    @property
    def quiet(self) -> bool: ...
    @property
    def color(self) -> str: ...


def notice(text: str, output: Output) -> None:
    """One dim line on stderr, unless --quiet. On a narrow terminal it breaks at ` · `."""
    if output.quiet:
        return
    style = Style(sys.stderr, output.color)
    content = text.lstrip(" ")
    indent = text.removesuffix(content)
    parts = message_line(content).split(" · ")
    wrapped = layout.joined(parts, layout.columns(sys.stderr, None), indent)
    write_err("".join(style.dim(line) + "\n" for line in wrapped.split("\n")))


def warning(text: str) -> None:
    """One line on stderr that --quiet does not hide."""
    write_line(f"nanokv: warning: {message_line(text)}")


def write_line(line: str) -> None:
    """One line to stderr. A pipe or a file gets one line; a terminal breaks it between words."""
    if is_tty(sys.stderr):
        line = layout.paragraph(line, layout.columns(sys.stderr), rest="  ")
    write_err(line + "\n")


@contextmanager
def writing(path: str | Path, need: int | None = None) -> Iterator[None]:
    """A context for writing a file of `need` bytes (None: unknown).

    A full disk or quota becomes a NanoKVError with the folder and its free bytes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = Path(path).absolute().parent
        needs = "" if need is None else f", {bytes_text(need)} are needed"
        free = bytes_text(shutil.disk_usage(folder).free)
        raise NanoKVError(
            f"{path} cannot be written: {error.strerror}: {folder} has {free} free{needs}",
            "free some space on that disk, or choose another place",
        ) from error


def silence_stdout() -> None:
    """Point descriptor 1 at the null device, so that Python's flush at exit cannot fail again."""
    _silence(sys.stdout)


def finish_stderr() -> None:
    """Flush stderr, or discard its buffer if that fails.

    Otherwise Python's flush at exit would fail, for example on a full disk, and exit with 120.
    """
    try:
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (AttributeError, OSError, ValueError):
        pass


# --- colour ---------------------------------------------------------------------------------------


class Style:
    """Bold, dim and ANSI colours for one stream; without colour each method returns its text.

    The first of these that is given decides: --color always|never, NO_COLOR (non-empty,
    no-color.org), FORCE_COLOR, TERM=dumb, isatty.
    """

    CODES = {
        "bold": 1,
        "dim": 2,
        "red": 31,
        "green": 32,
        "yellow": 33,
        "blue": 34,
        "magenta": 35,
        "cyan": 36,
    }

    def __init__(self, stream: TextIO | None, when: str = "auto"):
        self.enabled = use_color(stream, when)

    def __getattr__(self, name: str) -> Callable[[str], str]:
        if name not in Style.CODES:
            raise AttributeError(name)
        if not self.enabled:
            return lambda text: text
        return lambda text: f"\x1b[{Style.CODES[name]}m{text}\x1b[0m"


def use_color(stream: TextIO | None, when: str = "auto") -> bool:
    """Whether this stream gets colour. stdout and stderr are decided separately."""
    if when != "auto":
        return when == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return os.environ.get("TERM") != "dumb" and is_tty(stream)


# --- numbers --------------------------------------------------------------------------------------


def bytes_text(count: float) -> str:
    """Decimal units, three digits: 12 B, 96.8 kB, 1.19 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 999.5 or unit == "PB":
            break
        count /= 1000
    if unit == "B" or count >= 99.95:
        return f"{count:.0f} {unit}"
    if count >= 9.995:
        return f"{count:.1f} {unit}"
    return f"{count:.2f} {unit}"


def held_text(used: int, held: int) -> str:
    """Bytes in use, and the bytes reserved if they are more: 641 kB (1.18 MB reserved)."""
    text = bytes_text(used)
    reserved = bytes_text(held)
    if text == reserved:
        return text
    return f"{text} ({reserved} reserved)"


def seconds_text(seconds: float) -> str:
    """21 ms, 1.24 s, 83 s."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    return f"{seconds:.0f} s"


# --- signals --------------------------------------------------------------------------------------


class Terminated(SystemExit):
    """SIGTERM or SIGHUP: clean up and leave with exit code 143.

    Not an Exception, so that no `except Exception` catches it.
    """

    def __init__(self):
        super().__init__(143)


# When the last signals during an answer came, monotonic seconds: SIGINT; SIGTERM or SIGHUP.
_presses = {"last": -SWALLOW_S, "term": -SWALLOW_S}


def interrupt_at_prompt(signum: int | None, frame: "FrameType | None") -> None:
    """The handler of SIGINT outside an answer: raises KeyboardInterrupt.

    A signal within SWALLOW_S of the one that stopped an answer is ignored as the same press.
    """
    now = time.monotonic()
    if now - _presses["last"] >= SWALLOW_S:
        raise KeyboardInterrupt


def _terminate(signum: int, frame: "FrameType | None") -> None:
    # A repeated signal must not interrupt the saving.
    if time.monotonic() - _presses["term"] >= SWALLOW_S:
        raise Terminated


def install_signals() -> None:
    """Install the handlers of SIGINT, SIGTERM and SIGHUP.

    A signal that the parent process ignores (nohup) stays ignored.
    """
    for name, handler in (
        ("SIGINT", interrupt_at_prompt),
        ("SIGTERM", _terminate),
        ("SIGHUP", _terminate),
    ):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def release_interrupt() -> bool:
    """Restore the system's handling of Ctrl-C, which ends the process at once.

    Returns False, and changes nothing, where our handler is not installed: in a notebook, in a
    test, under nohup.
    """
    ours = signal.getsignal(signal.SIGINT) is interrupt_at_prompt
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return ours


@contextmanager
def loading() -> Iterator[None]:
    """A context for imports and the reading of weights, where there is nothing to save.

    Inside it the system ends the process at Ctrl-C (a shell reports 130). A Python handler would
    run only after torch's libraries are loaded, and its KeyboardInterrupt would be raised inside
    an import: it could end in a traceback, become another exception, be swallowed by a callback,
    or reach C++, which aborts.
    """
    ours = release_interrupt()
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, interrupt_at_prompt)


class Interrupt:
    """A context for one answer: a signal sets a flag, and calling the object returns it.

    The flag is read between tokens and prefill chunks. Inside `raising` a signal acts sooner.
    """

    def __init__(self):
        self.requested = False
        self.terminated = False
        self._seen = self._raise = False
        self._before: dict = {}

    def __call__(self) -> bool:
        self._seen = self.requested
        return self.requested

    @contextmanager
    def raising(self) -> Iterator[None]:
        """A context for one forward, whose caller restores the cache afterwards.

        Inside it a signal raises KeyboardInterrupt, between two operators. Elsewhere it raises
        nothing, so that printing, saving and counting are never interrupted.
        """
        self._raise = True
        try:
            if self.requested and not self._seen:  # it came after the flag was last read
                raise KeyboardInterrupt
            yield
        finally:
            self._raise = False

    def __enter__(self) -> Self:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: "FrameType | None") -> None:
        now = time.monotonic()
        if signum == signal.SIGINT:
            if now - _presses["last"] < SWALLOW_S:
                return
            _presses["last"] = now
        else:
            self.terminated = True
            _presses["term"] = now
        self.requested = True
        if self._raise:
            raise KeyboardInterrupt

    def finish(self) -> None:
        """Call after the partial answer is saved: raises Terminated if SIGTERM or SIGHUP came."""
        if self.terminated:
            raise Terminated
