"""What reaches a terminal: control characters, colour, interrupts. No model is loaded here."""

import io
import os
import re
import signal
import time
import types

import pytest

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.cli.common.terminal import (
    Interrupt,
    Sanitizer,
    Style,
    Terminated,
    bytes_text,
    sanitize,
    sanitize_line,
    seconds_text,
)

BIDI = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
DANGEROUS = [c for c in [*range(0x20), 0x7F, *range(0x80, 0xA0), *BIDI] if chr(c) not in "\n\t"]


@pytest.mark.parametrize("code", DANGEROUS, ids=lambda c: f"U+{c:04X}")
def test_every_dangerous_character_becomes_visible(code):
    """A C1 CSI (U+009B) works like ESC [ on some terminals; a bidi override makes text read backwards."""
    shown = sanitize(f"a{chr(code)}b")
    assert shown[0] == "a" and shown[-1] == "b" and len(shown) > 2
    assert not any(ord(c) in DANGEROUS for c in shown)
    assert sanitize_line(chr(code)) == shown[1:-1]


def test_escape_is_the_control_picture_and_its_sequence_stays_as_text():
    assert sanitize("\x1b[31mred\x1b]0;title\x07") == "␛[31mred␛]0;title␇"
    assert sanitize("\x9b2J\u202e") == "\\x9b2J\\u202e"


def test_ordinary_text_is_untouched():
    """Newline, tab, emoji with ZWJ, CJK, combining marks, and the bidi *marks* that Arabic needs."""
    text = "a\tb\nπ 漢字 🧑\u200d🚀 e\u0301 \u0633\u200f \u00a0"
    assert sanitize(text) == text
    assert sanitize_line("a\tb\n") == "a␉b␊"


def test_lone_surrogates_can_be_printed():
    """An argument with byte 0xff holds U+DCFF, which no encoding accepts."""
    sanitize("\udcff").encode("utf-8")


def test_stream_filter_equals_the_whole_filter_for_every_split():
    """ESC is one token and [2J another; CRLF may be cut in the middle."""
    text = "one\r\ntwo\rthree\x1b[2J\r\r\nend\r"
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            stream = Sanitizer()
            parts = [
                stream.put(text[:i]),
                stream.put(text[i:j]),
                stream.put(text[j:]),
                stream.flush(),
            ]
            assert "".join(parts) == sanitize(text)
    assert sanitize(text) == "one\ntwo␍three␛[2J␍\nend␍"


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "when", "on_tty", "on_pipe"),
    [
        ({}, "auto", True, False),
        ({"NO_COLOR": "1"}, "auto", False, False),
        ({"NO_COLOR": ""}, "auto", True, False),  # empty = not set, as no-color.org asks
        ({"FORCE_COLOR": "1"}, "auto", True, True),
        ({"FORCE_COLOR": "0"}, "auto", True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "auto", False, False),
        ({"TERM": "dumb"}, "auto", False, False),
        ({"NO_COLOR": "1"}, "always", True, True),
        ({"FORCE_COLOR": "1"}, "never", False, False),
    ],
)
def test_colour_is_decided_per_stream(monkeypatch, variables, when, on_tty, on_pipe):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Style(Tty(), when).enabled is on_tty
    assert Style(io.StringIO(), when).enabled is on_pipe


def test_styles_are_dim_bold_and_the_sixteen_colours_only():
    """256-colour or RGB text is unreadable on somebody's background."""
    on, off = Style(Tty(), "always"), Style(Tty(), "never")
    assert on.dim("x") == "\x1b[2mx\x1b[0m" and on.red("x") == "\x1b[31mx\x1b[0m"
    assert off.dim("x") == off.red("x") == "x"
    assert all(code < 10 or 30 <= code <= 37 for code in Style.CODES.values())
    with pytest.raises(AttributeError):
        on.blink("x")


def test_notices_are_one_sanitised_line_and_quiet_hides_them(capsys):
    terminal.notice("a\x1b[2J\nb", OutputOptions(color="never"))
    terminal.notice("not this", OutputOptions(quiet=True))
    assert capsys.readouterr().err == "a␛[2J␊b\n"


@pytest.mark.parametrize("tty", [True, False])
def test_errors_break_between_words_on_a_terminal_and_nowhere_else(monkeypatch, capsys, tty):
    from nanokv.apps.cli.common.ways_out import show_error

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty, raising=False)
    message, hint = "word " * 20 + "end", "some other text " * 6 + "end"
    show_error(message, hint, when="always")
    terminal.warning(message)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 if not tty else max(map(layout.cells, lines)) <= 40 and len(lines) > 8
    joined = " ".join(" ".join(lines).split())
    plain = re.sub("\x1b\\[\\d+m", "", joined)
    assert plain == f"nanokv: error: {message} hint: {hint} nanokv: warning: {message}"


def test_closed_streams_do_not_crash(monkeypatch):
    """`nanokv … 2>&-` leaves sys.stderr None; a closed file object raises ValueError from isatty."""
    monkeypatch.setattr("sys.stderr", None)
    terminal.write_err("nobody reads this")
    closed = io.StringIO()
    closed.close()
    assert terminal.is_tty(None) is False and terminal.is_tty(closed) is False


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (96_768, "96.8 kB"),
        (999_999, "1.00 MB"),
        (114_688, "115 kB"),
        (1_192_099_840, "1.19 GB"),
        (15.03e9, "15.0 GB"),
    ],
)
def test_byte_counts_are_decimal_with_three_digits(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0212, "21 ms"), (0.9996, "1.00 s"), (1.237, "1.24 s"), (83.4, "83 s")]
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.fixture
def fresh_presses(monkeypatch):
    """No Ctrl-C was pressed yet, and the clock stands still until a test moves it."""
    clock = types.SimpleNamespace(now=1000.0)
    monkeypatch.setattr(terminal, "_presses", {"last": -terminal.SWALLOW_S})
    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def press(number=signal.SIGINT):
    """Send a signal to ourselves; Python runs the handler before the next bytecodes of this thread."""
    os.kill(os.getpid(), number)
    time.sleep(0)


def test_ctrl_c_sets_a_flag_and_raises_nothing(fresh_presses):
    """An exception inside a forward would leave the cache's layers at different lengths."""
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as stop:
        assert not stop() and not stop.requested
        press()
        assert stop() and stop.requested and not stop.terminated
        stop.finish()  # nothing to do: only SIGTERM leaves
    assert signal.getsignal(signal.SIGINT) == before


def test_inside_raising_a_press_raises_as_well(fresh_presses):
    """Only there, so that what is printed or saved is whole; one that came since the flag was read is not forgotten."""
    with Interrupt() as stop:
        with pytest.raises(KeyboardInterrupt), stop.raising():
            press()
        assert stop()
        with stop.raising():  # the best beam so far is still fed: the flag was read
            pass
        fresh_presses.now += 1
        press()  # raises nothing
    with Interrupt() as stop:
        fresh_presses.now += 1
        assert not stop()
        press()
        with pytest.raises(KeyboardInterrupt), stop.raising():
            raise AssertionError("the forward was begun")


def test_while_loading_ctrl_c_is_the_systems_own(fresh_presses):
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, terminal.interrupt_at_prompt)
        with terminal.loading(), terminal.loading():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is terminal.interrupt_at_prompt
        signal.signal(signal.SIGINT, signal.default_int_handler)  # somebody else's program
        with terminal.loading():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_second_press_within_half_a_second_is_swallowed(fresh_presses):
    """A nervous double Ctrl-C stops the answer, not the chat; later presses count again."""
    with Interrupt():
        press()
    fresh_presses.now += 0.4
    terminal.interrupt_at_prompt(signal.SIGINT, None)
    with Interrupt() as stop:
        press()
        assert not stop.requested
    fresh_presses.now += 0.2
    with pytest.raises(KeyboardInterrupt):
        terminal.interrupt_at_prompt(signal.SIGINT, None)


def test_sigterm_lets_the_half_answer_be_saved_first(fresh_presses):
    saved = []
    with pytest.raises(Terminated) as leaving:
        with Interrupt() as stop:
            press(signal.SIGTERM)
            assert stop.requested and stop.terminated
        saved.append("half answer")
        stop.finish()
    assert saved == ["half answer"] and leaving.value.code == 143
    assert not isinstance(leaving.value, Exception)  # `except Exception` must not eat it


def test_ignored_signals_stay_ignored(fresh_presses):
    """nohup and `cmd &` in a script set SIG_IGN; taking the signal over would undo that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt() as stop:
            press()
            assert not stop.requested
    finally:
        signal.signal(signal.SIGINT, before)
