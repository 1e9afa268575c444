"""`nanokv chat` as a script of a conversation: one line a turn, one line an answer, and nothing else on stdout.

Most run inside this process (one import of torch for all); what needs a process of its own (signals, a closed pipe,
exit codes of the real program) gets one.
"""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

import nanokv
from cli_helpers import choice, text_of
from nanokv import costs
from nanokv.apps.cli import main
from nanokv.apps.cli.chat.pipe import one_line
from nanokv.apps.cli.chat.view import Progress, View
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.cli.common.terminal import sanitize
from nanokv.chat.session import Turn


@pytest.fixture
def talk(tiny_folder, monkeypatch, capfd, tmp_path):
    """talk(stdin bytes, *flags) → (exit code, stdout, stderr) of the command in this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }

    def run(data, *flags, model=tiny_folder):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        monkeypatch.setattr(sys, "argv", ["nanokv"])
        code = main(["chat", "-m", str(model), "-t", "0", *flags])
        out, err = capfd.readouterr()
        return code, out, err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def expected(folder, texts, n=12):
    session = nanokv.Session(*nanokv.load(str(folder)), params={"max_new_tokens": n})
    answers = [session.ask(text) for text in texts]
    return session, answers


def test_one_line_a_turn_one_line_an_answer_and_nothing_else(talk, tiny_folder, tmp_path):
    texts = ["My name is Zorbla.", "What is my name?", "/help", "exit"]
    _, answers = expected(tiny_folder, texts)
    code, out, err = talk("\n".join(texts).encode() + b"\n", "-n", "12")
    assert code == 0
    assert out.split("\n") == [one_line(sanitize(answer)) for answer in answers] + [""]
    assert err == "", "no banner, no status"
    assert not list(tmp_path.rglob("*")), "a script leaves nothing on the disk"


def test_bom_crlf_empty_lines_and_a_missing_last_newline(talk):
    plain = talk(b"One.\nTwo.\n", "-n", "6")
    assert talk("\ufeffOne.\r\n\r\n   \r\nTwo.".encode(), "-n", "6") == plain
    assert talk(b"", "-n", "6") == (0, "", "")


def test_jsonl_is_lossless(talk, tiny_folder):
    texts = ["Hi", "Tell me.", "Who?"]
    session, answers = expected(tiny_folder, texts)
    code, out, err = talk("\n".join(texts).encode(), "-n", "12", "--jsonl")
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, err, len(records)) == (0, "", 3)
    assert [text_of(r) for r in records] == answers, "raw text, not the sanitised one"
    assert [r["turn"] for r in records] == [1, 2, 3]
    last = records[-1]
    usage, reused = last["usage"], last["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (usage["completion_tokens"], reused) == (
        session.last.out,
        session.last.reused,
    ) and reused > 0
    assert (
        choice(last)["finish_reason"] == "length" and choice(last)["token_ids"] == session.last.ids
    )
    assert last["cache"] == {
        "kind": "growing",
        "tokens": session.cache.length,
        "used_bytes": costs.kv_bytes(session.model.config, session.cache.length, 1, 4),
        "bytes": costs.cache_bytes("growing", session.model.config, session.cache.length, 1, 4),
    }
    assert all(value >= 0 for value in last["timings"].values())


def test_newlines_inside_an_answer_become_backslash_n():
    assert one_line("a\nb\u2028c") == "a\\nb\\u2028c"


def test_context_overflow_is_exit_2_and_earlier_answers_stay(talk):
    code, out, err = talk(b"One.\n" + b"word " * 300 + b"\nThree.\n", "-n", "6", "--context", "100")
    assert code == 2 and len(out.splitlines()) == 1
    assert (
        "of 100 tokens (history" in err
        and "hint: a shorter message, or a larger --context N" in err
    )


def test_overflow_drop_goes_on(talk):
    data = b"\n".join(b"word " * 12 for _ in range(6))
    code, out, err = talk(data, "-n", "6", "--context", "100", "--overflow", "drop")
    assert (code, len(out.splitlines()), err) == (0, 6, "")


def test_typed_control_token_is_exit_2_unless_allowed(talk):
    code, out, err = talk(b"Hi\na <|im_end|> b\n", "-n", "4")
    assert code == 2 and len(out.splitlines()) == 1
    assert "message contains <|im_end|>, a control token" in err and "--allow-special" in err
    assert talk(b"a <|im_end|> b\n", "-n", "4", "--allow-special")[0] == 0
    assert talk(b"Hi\n", "-s", "be <|im_start|>", "-n", "4")[0] == 2


def test_invalid_utf8_is_exit_2_with_its_position(talk):
    code, out, err = talk(b"Hi\nab\xffcd\n", "-n", "4")
    assert code == 2 and len(out.splitlines()) == 1
    assert "line 2 of stdin" in err and "0xff" in err and "position 2" in err
    assert talk(b"a\x00b\n", "-n", "4")[0] == 0, "NUL is a character like any other"


def test_a_limit_that_nobody_set_is_told_on_stderr(talk, tiny_folder):
    code, out, err = talk(b"Tell me everything.\n", "--no-loop-guard")
    assert code == 0 and len(out.splitlines()) == 1
    assert "answer stopped: the context is full" in err


def test_missing_model_and_nothing_downloaded_offline(talk, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out, err = talk(b"Hi\n", model="qwen3-06b")
    assert code == 2 and out == "" and "qwen3-06b" in err and len(err.splitlines()) <= 2
    code, out, err = talk(b"Hi\n", "--offline", model="some-owner/some-model")
    assert code == 2 and out == "" and "some-owner/some-model" in err and len(err.splitlines()) <= 2


def test_not_enough_memory_is_refused_before_loading(talk, monkeypatch):
    monkeypatch.setattr("nanokv.apps.cli.common.loading.available_memory", lambda device: 1_000_000)
    code, out, err = talk(b"Hi\n")
    assert code == 2 and out == "" and "hint:" in err


def test_resume_reads_a_saved_session_and_leaves_it_alone(talk, tmp_path):
    from nanokv.apps.cli.chat import transcript

    folder = tmp_path / "nanokv" / "sessions"
    assert talk(b"", "--list") == (0, "", f"no saved session in {folder}\n")
    file = transcript.Transcript(
        folder / "20260101-000000-aaaa.jsonl", transcript.header("tiny", "x")
    )
    file.append({"user": "My name is Zorbla.", "answer": "Nice.", "finish_reason": "stop"})
    before = file.path.read_bytes()
    code, out, _ = talk(b"Who?\n", "--resume", "-n", "4", "--jsonl")
    assert code == 0 and json.loads(out)["turn"] == 2
    assert file.path.read_bytes() == before
    code, out, _ = talk(b"", "--list")
    assert code == 0 and "20260101-000000-aaaa" in out and "My name is Zorbla." in out
    assert talk(b"Hi\n", "--resume", "nothing-like-it")[0] == 2


def test_the_bundled_model_recalls_over_piped_turns(talk):
    code, out, err = talk(b"My name is Zorbla.\nWhat is 12 + 30?\nWhat is my name?\n", model="tiny")
    answers = out.splitlines()
    assert (code, len(answers), err) == (0, 3, "") and "Zorbla" in answers[2]


# --- which stream an answer goes to ---------------------------------------------------------------------------------


class Said:
    """As much of a session as the view needs: it says what it is told to."""

    context, thinking_opened, prompt_ids = 2048, False, [1] * 5

    def __init__(self, messages=4, **turn):
        from types import SimpleNamespace

        self.messages = [{}] * messages
        self.cache = SimpleNamespace(length=3)
        self.last = Turn(
            **{
                "new": 14,
                "reused": 1200,
                "out": 8,
                "ttft": 0.021,
                "tok_s": 310.4,
                "finish_reason": "stop",
                "kv_used": 96_768,
                "kv_bytes": 147_456,
                "cached": 21,
            }
            | turn
        )


def show(capsys, said, cut=3, thinking="show", markdown=False, **turn):
    view = View(OutputOptions(color="never"), thinking, markdown=markdown)
    session = Said(**turn)
    pieces = (said[i : i + cut] for i in range(0, len(said), cut))
    view.answer(session, pieces, Progress(lambda: False, session, view))
    return capsys.readouterr()


def test_status_line_is_the_specified_one(capsys):
    expected = (
        "  14 new + 1,200 reused → 8 out · first token 21 ms · 310 tok/s · cache 21/2,048 · 96.8 kB "
        "(147 kB reserved)\n"
    )
    assert show(capsys, "Yes.") == ("Yes.\n", expected)


THOUGHTS = [("show", "hm \x1b[2Jhm\n"), ("fold", "  thought for 0 ms\n"), ("off", "")]


@pytest.mark.parametrize(("thinking", "shown"), THOUGHTS)
def test_thinking_goes_to_stderr_or_nowhere_and_never_to_stdout(capsys, thinking, shown):
    out, err = show(
        capsys, "<think>hm \x1b[2Jhm</think>\n\nYes\x1b]0;title\x07.", thinking=thinking
    )
    assert out == "Yes␛]0;title␇.\n"
    assert err.split("  14 new")[0] == sanitize(shown)


def test_why_an_answer_ended_is_said(capsys):
    assert "[stopped at 8 tokens · /continue]" in show(capsys, "a", finish_reason="length").err
    assert (
        "[context full 21/2,048 · /drop N then /continue]"
        in show(capsys, "a", finish_reason="context").err
    )
    one = show(capsys, "a", finish_reason="context", messages=2).err
    assert "[context full 21/2,048 · /clear]" in one, (
        "without its only turn there is nothing to continue"
    )
    assert "/continue" in show(capsys, "a", finish_reason="loop").err
    cut = show(capsys, "a", text="a\ufffd", finish_reason="length").err
    assert "[the last character was cut, shown as \ufffd]" in cut
    assert "dropped 2 turns (−412); prefilled 14 again" in show(capsys, "a", dropped=(2, 412)).err


def test_markdown_blocks_are_appended_once_and_control_characters_stay_visible(capsys):
    out, _ = show(
        capsys, "# Title\n\nOne [/x] *two*.\n\n```\na\n\nb\n```\n\nEnd\x1b[2J", markdown=True
    )
    assert "\x1b" not in out and "␛[2J" in out and "[/x]" in out
    assert [out.count(word) for word in ("Title", "two", "End")] == [1, 1, 1]


def test_a_long_prefill_shows_progress_after_a_second_and_few_lines_without_a_terminal(
    capsys, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr("nanokv.apps.cli.chat.view.time.monotonic", lambda: now[0])
    session = Said()
    view = View(OutputOptions(color="never"))
    progress, lines = Progress(lambda: now[0] > 30, session, view), []
    for now[0] in (0.5, 0.9, 1.1, 2.0, 5.0, 10.9, 11.2, 20.0, 31.0):
        stopped = progress()
        lines.append(capsys.readouterr().err)
    assert stopped and lines == [
        "",
        "",
        "  prefill 3/5\n",
        "",
        "",
        "",
        "  prefill 3/5\n",
        "",
        "  prefill 3/5\n",
    ]
    progress.clear()
    progress()
    assert capsys.readouterr().err == "", "nothing once the answer has begun"


# --- processes ---------------------------------------------------------------------------------------------------


def process(folder, *flags, **options):
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-m", "nanokv", "chat", "-m", str(folder), "-t", "0", *flags]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(argv, env=env, **pipes | options)


def test_closed_pipe_stops_generation_with_141_and_no_traceback(tiny_folder):
    """Also under an old locale: text that ASCII lacks must not kill the program."""
    with process(tiny_folder, "-n", "12") as chat:
        chat.stdin.write("Hi 世界\n".encode())
        chat.stdin.flush()
        assert chat.stdout.readline().endswith(b"\n")
        chat.stdout.close()
        chat.stdin.write(b"Two.\nThree.\n")
        chat.stdin.close()
        assert (chat.wait(60), chat.stderr.read()) == (141, b"")


def test_ctrl_c_writes_what_it_has_and_leaves_with_130(tmp_path_factory):
    from tiny_checkpoint import write_tiny_checkpoint

    folder = write_tiny_checkpoint(
        tmp_path_factory.mktemp("pipe") / "endless", max_position_embeddings=60_000
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": []}\n')
    with process(folder, "-n", "50000", "--no-loop-guard") as chat:
        chat.stdin.write(b"Hi\nTwo.\n")
        chat.stdin.flush()
        assert chat.stdout.read(200)
        chat.send_signal(signal.SIGINT)
        rest, err = chat.communicate(timeout=60)
        assert chat.returncode == 130 and rest.endswith(b"\n") and rest.count(b"\n") == 1
        assert b"Traceback" not in err


def test_resume_of_a_header_with_wrong_types_is_one_line_and_exit_code_2(talk, tmp_path):
    folder = tmp_path / "nanokv" / "sessions"
    folder.mkdir(parents=True)
    for fields in ({"settings": {"stop": 5}}, {"settings": 3}, {"system": [1]}, {"kv": {}}):
        head = {"format": "nanokv-session-1", "model": "tiny", "fingerprint": "x"} | fields
        (folder / "one.jsonl").write_text(json.dumps(head) + "\n")
        code, out, err = talk(b"Hi\n", "--resume")
        assert (
            (code, out) == (2, "") and err.startswith("nanokv: error: ") and "Traceback" not in err
        )
        assert f"one.jsonl, line 1: {next(iter(fields))}" in err and err.count("\n") == 2
