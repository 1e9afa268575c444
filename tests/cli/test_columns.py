"""What is printed fits terminals of 80, 60 and 40 columns: lines break between words or at a separator, nowhere else.

The layout itself, every help page, the tables, and the chat on a real screen whose width changes.
"""

import random
import re
import subprocess
import sys
import textwrap
import types

import pyte
import pytest

from chat_terminal import Terminal, chat_argv
from nanokv.apps.cli import COMMANDS, main
from nanokv.apps.cli.chat.view import status
from nanokv.apps.cli.commands import bench
from nanokv.apps.cli.common import layout, wrapping
from nanokv.apps.cli.common.answer import AnswerWriter
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.cli.common.terminal import Style

WIDTHS = (80, 60, 40)


@pytest.fixture
def printed(monkeypatch, capsys):
    """printed(width, *argv) → stdout of the command in a terminal of that width."""

    def run(width, *argv):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([str(word) for word in argv]) == 0
        return capsys.readouterr().out

    return run


def too_wide(text, width):
    """Lines wider than the terminal, but for a single word (a path) that no break could mend."""
    return [
        line for line in text.splitlines() if layout.cells(line) > width and len(line.split()) > 1
    ]


def words(text):
    """What is read, without the marks of a break."""
    return [word for word in text.split() if word not in ("·", "\\")]


# --- the layout -----------------------------------------------------------------------------------------------------


def test_words_stay_whole():
    text = "--max-new-tokens is a/very/long/path/that/has/no/blank/anywhere/in/it, and state-of-the-art stays"
    for width in (20, 40, 60):
        shown = layout.paragraph(text, width, "  ", "    ")
        assert shown.split() == text.split() and too_wide(shown, width) == []
        assert shown.startswith("  --max") and all(
            line.startswith("    ") for line in shown.splitlines()[1:]
        )
    assert layout.paragraph(text, None) == text


def test_cells_count_what_a_terminal_shows():
    assert layout.cells("日本") == 4 and layout.cells("e\u0301") == 1 and layout.cells("a · b") == 5
    assert layout.paragraph("日本 日本 日本 日本 日本", 20).splitlines() == [
        "日本 日本 日本 日本",
        "日本",
    ]


def test_lines_break_at_the_separator_and_drop_it():
    parts = ["14 new + 105 reused → 8 out", "first token 21 ms", "1,310 tok/s"]
    assert layout.joined(parts, None, "  ") == "  " + " · ".join(parts)
    assert layout.joined(parts, 40, "  ").splitlines() == [
        "  14 new + 105 reused → 8 out",
        "  first token 21 ms · 1,310 tok/s",
    ]
    long = layout.joined(["one part of many words", "b"], 20, "  ")
    assert long.splitlines() == ["  one part of many", "  words", "  b"]


def test_a_command_line_can_be_copied_from_a_narrow_terminal(tmp_path):
    """A backslash ends each line but the last, no quoted text is broken: the shell sees the same words."""
    import subprocess

    line = """printf '%s|' nanokv generate "What is a KV cache?" --chat -n 40 -o trace.html --layers 0,5 'a  b'"""
    for width in (20, 40, 60):
        shown = layout.shell(line, width)
        assert len(shown.splitlines()) > 1
        same = [
            subprocess.run(["sh", "-c", text], capture_output=True, check=True).stdout
            for text in (line, shown)
        ]
        assert same[0] == same[1]


def test_a_table_becomes_records_where_it_does_not_fit():
    head, rows = (
        ("", "prefill tok/s", "GB/s"),
        [("tiny dict", "3,100", "9.5"), ("tiny paged", "900", "")],
    )
    assert layout.table(head, rows, 80) == [
        "            prefill tok/s  GB/s",
        "tiny dict           3,100   9.5",
        "tiny paged            900",
    ]
    assert layout.table(head, rows, 30)[0].split() == ["prefill"]
    assert layout.table(head, rows, 20) == [
        "tiny dict",
        "    prefill tok/s\n    3,100\n    GB/s 9.5",
        "tiny paged",
        "    prefill tok/s\n    900",
    ]


def test_the_width_of_a_pipe(monkeypatch, tmp_path):
    """A file has 80 columns for tables and no limit for a status line, which programs read line by line."""
    monkeypatch.delenv("COLUMNS", raising=False)
    with (tmp_path / "file").open("w") as file:
        assert layout.columns(file) == 80 and layout.columns(file, None) is None
    assert layout.columns(None) == 80
    monkeypatch.setenv("COLUMNS", "3")
    assert layout.columns(None) == layout.NARROWEST


# --- help and tables ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits(printed, name):
    argv = [*filter(None, [name]), "--help"]
    whole = printed(100, *argv)
    for width in WIDTHS:
        shown = printed(width, *argv)
        assert too_wide(shown, width) == [] and max(map(len, shown.splitlines())) > width / 2
        assert words(shown) == words(whole)


MEMORY = (
    ["tiny"],
    ["Qwen/Qwen3-0.6B", "--context", "32768", "--batch", "4"],
    ["tiny", "--cache", "quantized:k_bits=8:v_bits=4", "--fits", "24GiB"],
)


@pytest.mark.parametrize("argv", MEMORY, ids=" ".join)
def test_memory_fits_and_says_the_same(printed, argv):
    whole = printed(200, "memory", *argv)
    numbers = re.compile(r"[\d,.]+ (?:[KMG]i?B|B)\b")
    for width in WIDTHS:
        shown = printed(width, "memory", *argv)
        assert too_wide(shown, width) == []
        assert sorted(numbers.findall(shown)) == sorted(numbers.findall(whole))
    table = next(line for line in printed(80, "memory", *argv).splitlines() if line.startswith("▸"))
    assert len(re.findall(r"[KMG]i?B", table)) == 3, "at 80 columns it is a table"


def test_env_fits(printed, monkeypatch):
    monkeypatch.setattr(
        "nanokv.apps.cli.commands.env.available_memory", lambda device: 22_600_000_000
    )
    whole = printed(200, "env")
    for width in WIDTHS:
        shown = printed(width, "env")
        assert too_wide(shown, width) == []
        shown = re.sub(rf"(?m)(COLUMNS\s+){width}$", r"\g<1>200", shown)
        assert words(shown) == words(whole)


def bench_row(context):
    figures = {"prefill_tok_s": 7951.2, "decode_tok_s": 316.7, "gigabytes_per_second": 3.96}
    runner = types.SimpleNamespace(label="nanokv fast dict")
    numbers = {
        "context": context,
        "spread": 0.3,
        "decode_s": 0.00316,
        "bytes": 12_500_000,
        "share": 0.22,
    }
    return types.SimpleNamespace(runner=runner, figures=lambda: figures, **numbers)


def test_bench_fits(monkeypatch, capsys):
    head = (
        "tiny float32 · 2 threads · read bandwidth 18.0 GB/s · products 96 GFLOP/s (measured now)"
    )
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        noise = {"decode_spread": 0.3, "bandwidth_spread": 0.5, "other_cores": 1.1}
        bench.print_table(
            head,
            [bench_row(128), bench_row(1024)],
            noise,
            "native kernels (c++, /cache/kernels.so)",
            5_300_000_000,
        )
        shown = capsys.readouterr().out
        assert too_wide(shown, width) == []
        assert (
            shown.count("nanokv fast dict") == 2
            and shown.count("7,951") == 2
            and shown.count("22.0%") == 2
        )
        assert ("nanokv fast dict      128" in shown) is (width == 80), "a table where it fits"


COURSE = (["claims"], ["mistakes", "05"], ["seal", "05.q1", "b"])


@pytest.mark.parametrize("argv", COURSE, ids=" ".join)
def test_the_course_fits_and_says_the_same(printed, argv):
    """A pipe gets a claim in three lines and the mistakes in Markdown, as before; a terminal whole words."""
    whole = set(words(printed(500, "course", *argv)))
    for width in WIDTHS:
        shown = printed(width, "course", *argv)
        assert too_wide(shown, width) == [] and set(words(shown)) == whole


def test_the_tally_of_a_class_fits(monkeypatch, capsys, tmp_path):
    from nanokv.school.course import grading

    rows = [
        {
            "file": f"{name}.ipynb",
            "score": 0,
            "of": 1,
            "error": "",
            "05.1": f"wrong: {name} {name} {name}",
        }
        for name in ("last token fed", "prompt every step", "prompt is free")
    ]
    monkeypatch.setattr(grading, "grade", lambda *args: iter(rows))
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert (
            main(["course", "grade", "submissions", "-o", str(tmp_path / "results.csv"), "--force"])
            == 0
        )
        shown = capsys.readouterr()
        assert (
            too_wide(shown.out, width) == too_wide(shown.err, width) == []
            and shown.out.count("wrong:") == 3
        )


def test_verify_fits(monkeypatch):
    """A report with each kind of row: the layer that differs, what was skipped and why, config fields."""
    from nanokv.apps.cli.commands.verify import as_text
    from nanokv.apps.cli.common.terminal import Style
    from nanokv.lab.study.debug import Step
    from nanokv.lab.verify.checks import Check

    bad = [Step(i, "rope_k", 10.0**-i, 1e-2, 1.0, 7) for i in range(3)]
    steps = [Step(None, "embed_tokens", 0.0, 1e-5, 1.0, 0), *bad]
    checks = [
        Check(
            "cached = uncached, keys and values",
            "ok",
            "likewise, worst layer 2, cached_v",
            2.8e-6,
            8e-5,
        ),
        Check(
            "hidden states",
            "differs",
            "3 prompts, 110 operations, worst layer 0, rope_k",
            1.0,
            1e-2,
        ),
        Check(
            "published figures",
            "skipped",
            "none are known for this model, only for Qwen/Qwen3-0.6B",
        ),
    ]
    hints = {"tie_word_embeddings": (False, True)}
    report = types.SimpleNamespace(
        name="tiny",
        dtype="float32",
        reference="transformers 5.23.0",
        checks=checks,
        steps=steps,
        first=steps[1],
        first_unequal=steps[1],
        equal=False,
        hints=hints,
    )
    whole = as_text(report, Style(None, "never"))
    for width in WIDTHS:
        plain, painted = (as_text(report, Style(None, when), width) for when in ("never", "always"))
        assert too_wide(plain, width) == [] and set(words(plain)) == set(words(whole))
        assert re.sub(r"\x1b\[\d+m", "", painted) == plain
    assert len(as_text(report, Style(None, "never"), 80).splitlines()) > len(whole.splitlines())


def test_the_evaluation_fits(monkeypatch, capsys, tiny_folder):
    from nanokv.school.training import evaluate

    fault = {
        "fault": "start_pos restarted at 0",
        "recalled": 0.5,
        "same answer": 0.25,
        "max |Δlogit|": 1.5,
    }
    said = [
        (
            "What is a KV cache?",
            "A KV cache stores the keys and values of all past tokens, word for word. " * 2,
        )
    ]
    results = [
        evaluate.Result(task, [0.5, 0.25], {"1 + 2 digits": (3, 4)}, []) for task in evaluate.TASKS
    ]
    monkeypatch.setattr(evaluate, "evaluate", lambda *args: iter(results))
    monkeypatch.setattr(evaluate, "broken_recall", lambda *args: [fault])
    monkeypatch.setattr(evaluate, "examples", lambda *args: said)
    shown = {}
    for width in (200, *WIDTHS):
        monkeypatch.setenv("COLUMNS", str(width))
        assert (
            main(
                ["train", "--evaluate", "--model", str(tiny_folder), "--cases", "1", "--seeds", "2"]
            )
            == 1
        )
        shown[width] = capsys.readouterr().out
        assert too_wide(shown[width], width) == [] and set(words(shown[width])) == set(
            words(shown[200])
        )
    rows = [line.split() for line in shown[60].splitlines()]
    assert ["recall", "37.5%", "25.0%", "97%"] in rows, "a table at 60 columns"


# --- answers ----------------------------------------------------------------------------------------------------------


def on_screen(text, width, seed=0):
    """The lines of a terminal to which the text came in pieces that a seed cuts, and what was written."""
    screen, written, cut = pyte.Screen(width, 60), [], random.Random(seed)
    stream = pyte.Stream(screen)

    def write(data):
        written.append(data)
        # Pyte drops the rest of a chunk at a joiner.
        stream.feed(data.replace("\n", "\r\n").replace("\u200d", ""))

    wrap = wrapping.WordWrap(write, lambda: screen.columns)
    while text:
        piece, text = text[: (size := cut.randint(1, 9))], text[size:]
        wrap(piece)
    return [line.rstrip() for line in screen.display if line.strip()], "".join(written)


PROSE = (
    "Linearly: every new token adds the same number of bytes in every layer, and each attention layer keeps its own. "
    "Only one palace stands; they are read in state-of-the-art order.\nA second  line (with a bracket), and the end."
)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(20))
def test_an_answer_breaks_between_words_however_its_pieces_come(width, seed):
    options = {"break_long_words": False, "break_on_hyphens": False}
    lines = PROSE.replace("  ", " \xa0").split("\n")
    wanted = [part for line in lines for part in textwrap.wrap(line, width - 1, **options)]
    shown, _ = on_screen(PROSE, width, seed)
    assert shown == [line.replace("\xa0", " ").rstrip() for line in wanted]


@pytest.mark.parametrize("seed", range(20))
def test_what_has_no_blanks_breaks_where_it_may(seed):
    """Chinese between two characters but before no closing one; a long word and code at the edge, as a whole."""
    chinese = "世界上有许多语言模型，它们都使用缓存。"
    assert on_screen(chinese, 30, seed)[0] == [chinese[:14], chinese[14:]]
    shown, _ = on_screen("缓" * 19 + "。token", 40, seed)
    assert shown == ["缓" * 18, "缓。token"]
    assert on_screen("a " + "x" * 45 + " end", 40, seed)[0] == ["a", "x" * 40, "x" * 5 + " end"]
    code = "```\n" + "if x: " * 12 + "\n```\n" + "words " * 8
    shown, written = on_screen(code, 40, seed)
    assert shown == [
        "```",
        ("if x: " * 12)[:40].rstrip(),
        ("if x: " * 12)[40:].rstrip(),
        "```",
        "words words words words words words",
        "words words",
    ]
    assert "if x: " * 12 in written  # can be copied as one line
    astronaut = "\U0001f9d1\u200d\U0001f680"
    assert astronaut in on_screen("e\u0301" * 30 + " " + astronaut * 4, 40, seed)[1]


def test_a_word_in_flight_is_shown_and_taken_back_only_where_it_grows_past_the_edge():
    written = []
    wrap = wrapping.WordWrap(written.append, lambda: 12)
    for piece in ("Hello", " wor", "ld", "s", " a", "\tb"):
        wrap(piece)
    assert written == ["Hello", " wor", "ld", "\x1b[5D\x1b[K\nworlds", " a", "\nb"]


def test_an_answer_follows_the_width_of_the_terminal():
    written, width = [], iter([20, 20, 40, 40, 20])
    wrap = wrapping.WordWrap(written.append, lambda: next(width))
    for piece in ("one two three", " four five six seven", " eighty nine", " ten"):
        wrap(piece)
    assert written == ["one two three", " four five six seven", " \neighty nine", " ten"]


def test_thoughts_break_between_words_too(monkeypatch, capsys):
    """On the other stream, dim; the thought ends its line, so the answer begins at the left edge."""
    monkeypatch.setattr(wrapping, "is_tty", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    writer = AnswerWriter("show", Style(sys.stderr, "always"))
    writer.begin(True)
    for piece in re.findall(r"(?s).{1,5}", PROSE + "</think>" + PROSE):
        writer.put(piece)
    writer.finish()
    for text in capsys.readouterr():
        screen = pyte.Screen(40, 40)
        pyte.Stream(screen).feed(text.replace("\n", "\r\n"))
        assert [line.rstrip() for line in screen.display if line.strip()] == on_screen(PROSE, 40)[0]
    assert screen.cursor.x == 0


def test_a_pipe_gets_an_answer_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # of the shell's terminal
    with open(tmp_path / "out", "w") as file:
        assert wrapping.write_words(file, print) is print


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 60])
def test_a_chat_and_a_generate_break_their_answers_between_words(width, tmp_path):
    """The same answer on the screen and through a pipe; after /retry and Ctrl-C the words are whole too."""
    question = "What does a KV cache keep, and why is it correct?"
    words = [sys.executable, "-m", "nanokv", "generate", question, "-m", "tiny", "-t", "0", "-q"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert len(said) > 80, "the answer is too short to tell anything"
    env = {"XDG_STATE_HOME": str(tmp_path), "NANOKV_NO_HISTORY": "1"}
    expected = textwrap.fill(said.strip(), width - 1, break_on_hyphens=False)
    generate = Terminal(words, env, width, 30)
    generate.leave()
    assert generate.text == expected
    chat = Terminal(chat_argv("tiny", "--stats", "off"), env, width, 30)
    try:
        chat.see(r"^> *$")
        for line in (question, "/retry"):
            chat.ask(line, re.escape(expected))
    finally:
        chat.stop()


# --- the chat -------------------------------------------------------------------------------------------------------


def test_the_status_line_breaks_before_the_cache():
    turn = types.SimpleNamespace(
        new=14,
        reused=105,
        out=8,
        ttft=0.021,
        tok_s=1310.4,
        cached=121,
        kv_used=557_568,
        kv_bytes=589_824,
        speculation=None,
    )
    assert status(turn, 2048, 80).splitlines() == [
        "  14 new + 105 reused → 8 out · first token 21 ms · 1,310 tok/s",
        "  cache 121/2,048 · 558 kB (590 kB reserved)",
    ]
    assert "\n" not in status(turn, 2048) and len(status(turn, 2048, 120).splitlines()) == 1
    turn.kv_bytes = turn.kv_used
    assert status(turn, 2048).endswith(" · cache 121/2,048 · 558 kB")  # nothing is reserved


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (
            100,
            [
                "nanokv 0.2.0 · tiny 3.1 M fp32 · 16 threads · cache growing · context 2,048 · fast kernels · /help"
            ],
        ),
        (
            80,
            [
                "nanokv 0.2.0 · tiny 3.1 M fp32 · 16 threads · cache growing · context 2,048",
                "fast kernels · /help",
            ],
        ),
        (
            60,
            [
                "nanokv 0.2.0 · tiny 3.1 M fp32 · 16 threads · cache growing",
                "context 2,048 · fast kernels · /help",
            ],
        ),
        (
            40,
            [
                "nanokv 0.2.0 · tiny 3.1 M fp32",
                "16 threads · cache growing",
                "context 2,048 · fast kernels · /help",
            ],
        ),
    ],
)
def test_the_banner_of_the_bundled_model_breaks_between_its_parts(columns, lines):
    from dataclasses import replace

    from nanokv.apps.cli.common.loading import plan_model
    from nanokv.apps.cli.common.options import CACHE, CacheOptions, ModelOptions
    from nanokv.apps.cli.common.plan import Choice

    plan = plan_model(ModelOptions(threads=16), CacheOptions(CACHE), OutputOptions())
    plan = replace(plan, code=Choice(True, "fast kernels"))
    assert layout.joined([*plan.banner(), "/help"], columns).split("\n") == lines


def resize(chat, width, lines=60):
    chat.child.setwinsize(lines, width)
    chat.screen.resize(lines, width)
    chat.clear()


def test_no_word_is_broken_on_the_screen(tiny_folder, tmp_path):
    """Banner, status line, /help and /cache at 40, 60 and 80 columns: each word of them stands whole on the screen."""
    from nanokv.apps.cli.chat.commands import COMMANDS as SLASH
    from nanokv.apps.cli.chat.commands import KEYS

    env = {"XDG_STATE_HOME": str(tmp_path), "NANOKV_NO_HISTORY": "1"}
    chat = Terminal(chat_argv(tiny_folder, "-n", "4", "--threads", "1", "--plain"), env, 40, 60)
    try:
        chat.see(r"^> *$")
        begin = " ".join(words(chat.text.split(">")[0]))
        assert begin.endswith(
            "tiny-random 0.2 M fp32 1 thread cache growing context 512 plain (--plain) /help"
        )
        for width in (40, 60, 80):
            resize(chat, width)
            chat.ask("My name is Zorbla.", "first token")
            last = re.sub(r"(?s).*?(\d+ new)", r"\1", chat.text.split("context ▕")[0])
            assert re.search(
                r"\d+ new \+ \d+ reused → 4 out first token [\d.]+ m?s .*cache \d+/512 [\d.]+ k?B",
                " ".join(words(last)),
            )
            chat.ask("/help", "Ctrl-D leave")
            shown = " ".join(words(chat.text))
            texts = [text for command in SLASH.values() for text in (command.takes, command.text)]
            assert [text for text in (*texts, *KEYS) if " ".join(text.split()) not in shown] == []
            chat.ask("/cache", r"measured|tokens =")
            shown = " ".join(words(chat.text))
            assert "of 512 tokens 1 cell =" in shown and "KV heads × 32 × 4 B ×" in shown
            assert re.search(r"= [\d,]+ B measured [\d,]+ B", shown) and re.search(
                r"layer 2 [ua]+ [\d.]+ kB", shown
            )
    finally:
        chat.stop()


def test_a_resumed_chat_shows_where_it_was(capsys, monkeypatch):
    """The system prompt on one line, the last exchange without its thinking, long texts by their beginning."""
    from nanokv.apps.cli.chat.view import LONGEST_RECALL, View

    monkeypatch.setenv("COLUMNS", "40")
    view = View(OutputOptions(color="never"))
    answer = {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nHello\x1b[2J Zorbla.",
        "interrupted": True,
    }
    view.recall(
        "Be brief.\nBe kind. " * 9, [{"role": "user", "content": "My name is Zorbla. " * 3}, answer]
    )
    shown = capsys.readouterr().err.splitlines()
    assert (
        shown[0].startswith("system: Be brief.␊Be kind.")
        and shown[0].endswith("…")
        and len(shown[0]) <= 40
    )
    assert shown[1:] == [
        "> My name is Zorbla. My name is Zorbla.",
        "  My name is Zorbla.",
        "Hello␛[2J Zorbla.",
        "  [interrupted · /continue or /retry]",
    ]
    view.recall(None, [{"role": "user", "content": "line\n" * 500}])
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == LONGEST_RECALL + 1 and shown[-1] == "… 489 more lines"
