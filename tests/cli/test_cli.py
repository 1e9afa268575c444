"""The real command: flags, streams, exit codes, `generate` and `env`.

What needs no operating system runs in this process through main(argv), which shares one torch import; pipes, signals
and full disks run as subprocesses.
"""

import hashlib
import importlib
import json
import os
import pty
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys

import pytest

import nanokv
from cli_helpers import choice, command, environment, errors_in, run_cli, spawn_cli, text_of
from nanokv.apps.cli import ABOUT, COMMANDS, main, make_parser
from nanokv.apps.cli.chat import commands as chat_commands
from nanokv.apps.cli.commands import generate
from nanokv.apps.cli.common import arguments, options, prompt
from nanokv.apps.cli.common.text import read_prompt_bytes
from nanokv.cache.options import KINDS
from nanokv.errors import NanoKVError

PROMPT = "My name is Zorbla."


@pytest.fixture
def edited(tiny_folder, tmp_path):
    """edited("config.json", field=value) → a copy of the tiny checkpoint with those fields changed."""

    def edit(name, **fields):
        folder = tmp_path / "edited"
        shutil.copytree(tiny_folder, folder, dirs_exist_ok=True)
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))
        return folder

    return edit


# --- help, flags, commands: no model ------------------------------------------------------------------------------


def test_the_help_begins_with_what_nanokv_is_and_how_it_is_called(cli):
    code, out, _ = cli("--help")
    first, usage, examples, *_ = out.split("\n\n")
    assert code == 0 and " ".join(first.split()) == ABOUT and "KV cache" in ABOUT
    assert usage == "usage: nanokv COMMAND [flags]" and examples.startswith(
        "examples:\n  nanokv chat\n"
    )
    assert out.splitlines()[-3] == "exit codes:" and len(out.splitlines()[-1]) < 80


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("smollm2.ggf", "did you mean ./smollm2.gguf?"),
        ("./smolm2.gguf", "did you mean ./smollm2.gguf?"),
        ("smollm", "did you mean ./smollm2.gguf?"),
        ("mymodle", "did you mean ./mymodel?"),
        ("./sub/Deap.gguf", "did you mean ./sub/deep.gguf?"),
        ("{here}/mymodl", "did you mean {here}/mymodel?"),
        ("smollm2-135", "did you mean smollm2-135m?"),
        ("qwen3:0.6b", "did you mean Qwen/Qwen3-0.6B?"),
        ("notamodel", "nanokv models lists names; for example tiny, Qwen/Qwen3-0.6B"),
        ("./xyzzy", "check the path: there is no such folder"),
        ("nowhere/mymodle", None),
    ],
)
def test_models_on_this_disk_come_first_among_what_was_meant(
    cli, tmp_path, monkeypatch, typed, hint
):
    """A folder without config.json and other files are no models, however near their names are."""
    for name in (
        "smollm2.gguf",
        "mymodel/config.json",
        "sub/deep.gguf",
        "notamodels/x",
        "smollm2.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    code, _, err = cli("generate", "x", "--offline", "-m", typed.format(here=tmp_path))
    assert code == 2 and (hint is None or errors_in(err)[1] == hint.format(here=tmp_path))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("dynamic", "'dict'"),
        ("DynamicCache", "'dict'"),
        ("q8_0", "quantized:bits=8"),
        ("sliding_window", "'sliding'"),
        ("offloaded_static", "'offloaded'"),
        ("pagd", "did you mean 'paged'?"),
        ("StaticCache", "'static'"),
    ],
)
def test_caches_of_other_programs_lead_to_ours(cli, name, hint):
    code, _, err = cli("generate", "x", "--cache", name)
    assert (
        code == 2
        and errors_in(err)[0].startswith(f"no cache is called {name!r}")
        and hint in errors_in(err)[1]
    )
    for named in re.findall(r"'([a-z]+)[:']", errors_in(err)[1]):
        assert named in KINDS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_examples_and_ends_with_exit_codes(cli, name):
    code, out, err = cli(name, "--help")
    assert (code, err) == (0, "")
    lines = out.replace(" \\\n", " ").splitlines()  # a long example goes on after a backslash
    assert lines[0] == "examples:" and all("nanokv" in line for line in lines[1 : lines.index("")])
    end = lines[lines.index("exit codes:") :]
    assert len(end) <= 4 and all(number in " ".join(end) for number in ("130", "141", "143"))


def test_help_is_fast_and_imports_no_torch():
    """torch costs two seconds; nobody waits that long for --help."""
    code = "import sys; from nanokv.apps.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    heavy = {
        "torch",
        "numpy",
        "rich",
        "prompt_toolkit",
        "transformers",
        "huggingface_hub",
        "tokenizers",
        "safetensors",
        "pydantic",
        "starlette",
    }
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, env=environment(), check=True
        )
        assert not heavy & set(done.stderr.decode().split()), words
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_cli("generate", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3  # CPU seconds: what a user waits for when nothing else runs


def test_version(cli):
    assert cli("--version") == cli("generate", "--version")
    assert re.fullmatch(r"nanokv \d+\.\d+\.\d+\n", cli("--version")[1])


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (["chta"], "no command 'chta'", "nanokv chat"),
        (["zzzz"], "no command 'zzzz'", "generate"),
        (
            ["generate", "x", "-m", "/no/such/folder"],
            'no model "/no/such/folder"',
            "check the path",
        ),
        (["-q"], "-q before a command", "nanokv chat -q"),
        (["generate", "x", "--temprature", "1"], "no flag --temprature", "--temperature"),
        (["generate", "x", "--max-new-token=3"], "no flag --max-new-token", "--max-new-tokens"),
        # Argparse would take it for that.
        (["generate", "x", "--tempe", "1"], "no flag --tempe", "--temperature?"),
        (["generate", "Once", "upon"], "unexpected argument 'upon'", "quotes"),
        (
            ["generate", "x", "-t", "-1"],
            "--temperature: -1 is not 0 (always the likeliest token) or a number",
            "",
        ),
        (
            ["generate", "x", "-t", "warm"],
            "'warm' is not 0 (always the likeliest token) or a number",
            "",
        ),
        (["generate", "x", "--top-p", "1.1"], "--top-p: 1.1 is not a number from 0 to 1", ""),
        (["generate", "x", "--top-p", "nan"], "--top-p: nan", ""),
        (["generate", "x", "--top-k", "1.5"], "--top-k: '1.5' is not an integer", ""),
        (["generate", "x", "--repetition-penalty", "inf"], "--repetition-penalty: inf", ""),
        (["generate", "x", "-n", "0"], "--max-new-tokens: 0 is not an integer ≥ 1", ""),
        (
            ["generate", "x", "--seed", str(2**64)],
            f"--seed: {2**64} is not an integer from -2^63 to 2^64 - 1",
            "",
        ),
        (["generate", "x", "--threads", "0"], "--threads: 0", ""),
        (["generate", "x", "--context", "1"], "--context: 1", ""),
        (["generate", "x", "--stop", ""], "--stop", ""),
        (["generate", "x", "--cache", "dict:size"], "--cache", ""),
        (["generate", "x", "--device", "tpu"], "--device 'tpu'", "auto"),
        (["generate", "x", "--color", "red"], "--color", ""),
        (["generate", "x", "-p", "y"], "given twice", ""),
        (["generate", "a\udcffb"], "byte 0xff at position 1", "--file"),
        (["generate", "x", "-m", "a\x1b[2Jb"], "[2Jb", ""),
    ],
)
def test_bad_command_lines_answer_in_two_lines_with_exit_2(cli, argv, message, hint):
    code, out, err = cli(*argv)
    shown, advice = errors_in(err)
    assert (code, out) == (2, "") and message in shown and hint in advice
    assert "\x1b" not in err


def test_a_model_that_is_nowhere_is_named(tmp_path):
    """As a subprocess: --offline is read by huggingface_hub once, when it is imported."""
    done = run_cli("generate", "x", "-m", "qwen3-06b", "--offline", env={"HF_HOME": str(tmp_path)})
    message, hint = errors_in(done.stderr.decode())
    assert (
        done.returncode == 2
        and done.stdout == b""
        and "qwen3-06b" in message
        and "Qwen/Qwen3-0.6B" in hint
    )


def test_environment_is_checked_like_flags(cli, monkeypatch, tiny_folder):
    monkeypatch.setenv("NANOKV_THREADS", "many")
    code, _, err = cli("generate", "x", "-m", tiny_folder)
    assert code == 2 and "NANOKV_THREADS: 'many' is not a whole number from 1 to 4,096" in err


def test_settings_of_the_chat_use_the_same_checks():
    assert arguments.parse_setting("top-p", "0.5") == 0.5
    with pytest.raises(NanoKVError, match=r"1\.5 is not a number from 0 to 1"):
        arguments.parse_setting("top_p", "1.5")
    with pytest.raises(NanoKVError) as unknown:
        arguments.parse_setting("temprature", "1")
    assert unknown.value.hint == "did you mean temperature?"


def test_upper_and_lower_case_are_the_same_in_commands_of_the_chat():
    assert chat_commands.parse("/Cache") == ("/cache", "") and chat_commands.parse("/?") == (
        "/?",
        "",
    )
    assert chat_commands.parse("QUIT") == chat_commands.parse(" Exit ") == ("/exit", "")
    assert chat_commands.parse("Quit smoking") is None


def test_a_command_of_the_chat_is_one_line_unless_it_takes_a_text():
    assert chat_commands.parse("/drop 3") == ("/drop", "3")
    assert chat_commands.parse("/drop 3\nhello") is None, "hello would be lost"
    assert chat_commands.parse("/system Be kind.\nBe short.") == ("/system", "Be kind.\nBe short.")
    assert chat_commands.command_line("hello\n /drop 3 \n/undo") == (2, "/drop")
    assert chat_commands.command_line("/usr/bin\n//cache\nand /cache") is None


@pytest.mark.parametrize("flag", [["--color", "always"], ["--color=always"]])
def test_color_flag_applies_to_errors_too(cli, flag):
    """Also to a command line that cannot be parsed, and a prompt that says "always" is not that flag."""
    assert "\x1b[31merror:\x1b[0m" in cli("generate", "x", "--bad", *flag)[2]
    assert "\x1b" not in cli("generate", "always", "--bad")[2]


def test_our_own_bugs_exit_1_and_ask_for_a_report(cli, monkeypatch):
    monkeypatch.setattr("nanokv.apps.cli.commands.env.versions", lambda: 1 / 0)
    code, _, err = cli("env")
    assert (
        code == 1
        and errors_in(err)[0] == "ZeroDivisionError: division by zero"
        and "please report" in err
    )
    code, _, err = cli("env", "--debug")
    assert code == 1 and "Traceback" in err and "1 / 0" in err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (MemoryError(), 2, "out of memory"),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            ),
            2,
            "out of memory",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "a\x1bb"),
            2,
            "a␛b: No such file or directory",
        ),
        (PermissionError(13, "Permission denied", "/x"), 2, "/x: Permission denied"),
        (ConnectionRefusedError(111, "Connection refused"), 2, "Connection refused"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
        (NanoKVError("two\nlines", "and\ta hint"), 2, "two␊lines"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_every_kind_of_failure_has_its_exit_code(cli, monkeypatch, error, code, text):
    def fail():
        raise error

    monkeypatch.setattr("nanokv.apps.cli.commands.env.versions", fail)
    monkeypatch.setattr(
        "nanokv.apps.cli.common.terminal.silence_stdout", lambda: None
    )  # it would close pytest's own stdout
    got, _, err = cli("env")
    assert got == code and text in err and "Traceback" not in err
    assert len(err.splitlines()) <= 2


# --- prompts ------------------------------------------------------------------------------------------------------


def test_prompt_bytes():
    """BOM dropped, CRLF → LF, NUL kept, and a bad byte is named with its place instead of becoming U+FFFD."""
    assert read_prompt_bytes(b"\xef\xbb\xbfa\r\nb\x00\rc", "stdin") == "a\nb\x00\rc"
    with pytest.raises(NanoKVError, match=r"notes\.txt is not UTF-8: byte 0xff at position 3"):
        read_prompt_bytes(b"abc\xff", "notes.txt")
    with pytest.raises(NanoKVError) as utf16:
        read_prompt_bytes("hi".encode("utf-16"), "notes.txt")
    assert "UTF-16" in utf16.value.hint


@pytest.mark.parametrize("argv", [[], ["-"]])
def test_a_terminal_without_prompt_is_an_error_with_an_example(cli, argv):
    """It must not sit there waiting for input that nobody knows about."""
    code, out, err = cli("generate", *argv, tty=True)
    message, hint = errors_in(err)
    assert (code, out, message) == (
        2,
        "",
        "no prompt",
    ) and 'nanokv generate "What is a KV cache?", or' in hint


@pytest.mark.parametrize(
    ("argv", "stdin"),
    [
        ([""], b""),
        (["-"], b""),
        (["-"], b"\xef\xbb\xbf"),
        (["--chat", " "], b"\n"),
        ([], b""),
        ([" "], b"\n"),
        (["--raw", ""], b""),
    ],
)
def test_empty_prompts_are_refused(cli, argv, stdin):
    code, _, err = cli("generate", *argv, stdin=stdin)
    assert code == 2 and errors_in(err)[0] == "the prompt is empty"


def test_unreadable_prompts(cli, tmp_path):
    code, _, err = cli("generate", "--file", tmp_path / "none.txt")
    assert code == 2 and "none.txt: No such file or directory" in errors_in(err)[0]
    assert "stdin is not UTF-8: byte 0xfe at position 2" in cli("generate", "-", stdin=b"ab\xfe")[2]


def test_a_silent_pipe_is_mentioned(monkeypatch):
    """A script that inherits an open pipe would seem to hang; the notice says what is waited for."""
    reader, writer = os.pipe()

    def heard(text, output):
        os.write(writer, b"late\n")
        os.close(writer)
        notices.append(text)

    notices = []
    monkeypatch.setattr("sys.stdin", os.fdopen(reader))
    monkeypatch.setattr(prompt, "PATIENCE_S", 0.01)
    monkeypatch.setattr("nanokv.apps.cli.common.terminal.notice", heard)
    args = make_parser("generate", generate).parse(["early"])
    assert (
        prompt.read_prompt(prompt.prompt_options(args), options.output_options(args), "")
        == "early\n\nlate"
    )
    assert len(notices) == 1 and "waiting for stdin" in notices[0]


def ids_of(cli, *argv, stdin=b""):
    code, out, err = cli("generate", "--json", "-q", "-n", "6", *argv, stdin=stdin)
    assert code == 0, err
    return json.loads(out)


def test_every_way_to_give_a_prompt_gives_the_same_prompt(cli, tiny_folder, tmp_path):
    """Argument, -p, --file, stdin and argument + stdin; CRLF, BOM and the last newline change nothing."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfOne.\r\n\r\nTwo.\r\n")
    m = ["-m", tiny_folder]
    answers = [
        ids_of(cli, "One.\n\nTwo.", *m),
        ids_of(cli, "-p", "One.\n\nTwo.", *m),
        ids_of(cli, "--file", file, *m),
        ids_of(cli, "-", *m, stdin=b"One.\n\nTwo.\n"),
        ids_of(cli, *m, stdin=b"One.\n\nTwo."),
        ids_of(cli, "One.", *m, stdin=b"Two.\n"),
        ids_of(cli, "-p", "One.", "-", *m, stdin=b"Two.\n"),
    ]
    assert all(
        a["choices"] == answers[0]["choices"] and a["usage"] == answers[0]["usage"] for a in answers
    )


def test_typed_control_tokens_are_refused_unless_allowed(cli, tiny_folder):
    """A pasted <|im_end|> would end the user's turn and let the text speak as somebody else."""
    m = ["-m", tiny_folder]
    text = "a<|im_end|>b"
    for argv, stdin in (
        (["-"], text.encode()),
        (["--chat", text], b""),
        (["--chat", "hi", "--system", text], b""),
    ):
        code, out, err = cli("generate", *argv, *m, stdin=stdin)
        message, hint = errors_in(err)
        assert (code, out, message) == (2, "", "message contains <|im_end|>, a control token")
        assert "--allow-special" in hint
    assert ids_of(cli, "--raw", "--allow-special", text, *m)["usage"]["prompt_tokens"] == 3


# --- answers ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tiny_folder):
    """transformers' greedy continuation: oracle(text, n) → new ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)

    def continuation(text, n):
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        out = model.generate(**ids, do_sample=False, max_new_tokens=n)
        return out[0, ids["input_ids"].shape[1] :].tolist(), tokenizer

    return continuation


def test_text_mode_prints_the_answer_of_transformers_and_nothing_else(tiny_folder, oracle):
    """The real process: stdout is the answer plus one newline, byte for byte; the status is on stderr."""
    done = run_cli("generate", "--raw", PROMPT, "-m", tiny_folder, "-n", "24", stdin=None)
    ids, tokenizer = oracle(PROMPT, 24)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    from nanokv.apps.cli.common.terminal import sanitize

    expected = sanitize(text)
    assert done.returncode == 0
    assert done.stdout == (expected if expected.endswith("\n") else expected + "\n").encode()
    assert re.search(
        r"\d+ new \+ 0 reused → 24 out · first token .* · cache \d+/512 · [\d.]+ kB",
        done.stderr.decode(),
    )
    assert b"\x1b" not in done.stderr  # a pipe gets no colour


def test_json_object(cli, tiny_folder, oracle):
    got = ids_of(cli, "--raw", PROMPT, "-m", tiny_folder)
    assert all(value > 0 for value in got["timings"].values())
    ids, tokenizer = oracle(PROMPT, 6)
    logprobs = choice(got)["logprobs"]["token_logprobs"]
    assert choice(got)["token_ids"] == ids and len(logprobs) == 6 and all(x < 0 for x in logprobs)
    assert choice(got)["finish_reason"] == "length" and text_of(got) == tokenizer.decode(
        ids, skip_special_tokens=True
    )
    used = got["usage"]["prompt_tokens"] + 5  # the last token is never fed
    assert used <= 16  # the fewest slots
    each = 2 * 3 * 2 * 32 * 4
    assert got["cache"] == {
        "kind": "growing",
        "tokens": used,
        "used_bytes": used * each,
        "bytes": 16 * each,
    }
    assert (
        got["seed"] is None
        and ids_of(cli, PROMPT, "-m", tiny_folder, "-t", "1", "--seed", "7")["seed"] == 7
    )


def test_a_drawn_seed_is_printed_and_repeats_the_run(cli, tiny_folder):
    argv = [PROMPT, "-m", tiny_folder, "-t", "1.5", "-n", "12"]
    code, first, err = cli("generate", *argv)
    seed = re.search(r"seed (\d+)", err)[1]
    assert code == 0 and cli("generate", *argv, "--seed", seed, "-q") == (0, first, "")
    assert cli("generate", *argv, "--seed", int(seed) + 1, "-q")[1] != first


def test_chat_applies_the_template_with_system_and_thinking(cli, tiny_folder, oracle):
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    got = ids_of(cli, "--chat", "hi", "--system", "Be brief.", "-m", tiny_folder)
    assert choice(got)["token_ids"] == oracle(rendered, 6)[0]
    got = ids_of(cli, "--chat", "hi", "-s", "Be brief.", "--thinking", "off", "-m", tiny_folder)
    assert choice(got)["token_ids"] == oracle(rendered + "<think>\n\n</think>\n\n", 6)[0]
    code, _, err = cli("generate", "--raw", "hi", "-s", "Be brief.", "-m", tiny_folder)
    assert code == 2 and "--raw" in errors_in(err)[1]


def test_a_model_with_a_template_gets_the_prompt_as_a_message(cli, edited, oracle, tmp_path):
    """However the prompt comes: typed, -p, piped, from a file. --raw continues the text; --chat says the default."""
    folder, file = edited("config.json"), tmp_path / "hi.txt"
    file.write_text("hi\n")
    message = oracle("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", 6)[0]
    ways = (["hi"], ["-p", "hi"], ["-"], ["--file", file], ["hi", "--chat"])

    def answered(argv, *flags):
        found = ids_of(cli, *argv, *flags, "-m", folder, stdin=b"hi\n" if argv == ["-"] else b"")
        return choice(found)["token_ids"]

    assert [answered(argv) for argv in ways] == [message] * len(ways)
    assert [answered(argv, "--raw") for argv in ways[:4]] == [oracle("hi", 6)[0]] * 4
    for flags, said in (([], "chat template"), (["--raw"], "raw text")):
        for beams in ([], ["--beams", "2"]):
            assert (
                cli("generate", "hi", "-n", "2", "-m", folder, *flags, *beams)[2]
                .rstrip()
                .endswith(f" · {said}")
            )
    code, _, err = cli("generate", "hi", "--raw", "--chat", "-m", folder)
    assert code == 2 and "not allowed with" in err


def test_a_model_without_a_template_continues_the_text(cli, edited, oracle):
    folder = edited("tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert ids_of(cli, "hi", "-m", folder)["choices"][0]["token_ids"] == oracle("hi", 6)[0]
    assert cli("generate", "hi", "-n", "2", "-m", folder)[2].rstrip().endswith(" · raw text")
    for flags, hint in ((["-s", "Be brief."], "has none, or leave --system out"), (["--chat"], "")):
        code, out, err = cli("generate", "hi", "-m", folder, *flags)
        assert (
            (code, out) == (2, "")
            and "chat template" in errors_in(err)[0]
            and hint in errors_in(err)[1]
        )


def test_a_template_is_chosen_by_name_or_file(cli, edited, tiny_folder, oracle, tmp_path):
    named = {"default": "d{{ messages[0].content }}", "tool_use": "t{{ messages[0].content }}"}
    folder = edited(
        "tokenizer_config.json",
        chat_template=[{"name": name, "template": text} for name, text in named.items()],
    )
    (tmp_path / "own.jinja").write_text("f{{ messages[0].content }}")
    (tmp_path / "tool_use").write_text("a name comes before a file")
    for given, text in (None, "dhi"), ("tool_use", "thi"), (tmp_path / "own.jinja", "fhi"):
        found = ids_of(cli, "hi", "-m", folder, *(("--chat-template", given) if given else ()))
        assert found["choices"][0]["token_ids"] == oracle(text, 6)[0]
    base = edited("tokenizer_config.json", chat_template=None)
    found = ids_of(cli, "hi", "-m", base, "--chat-template", tmp_path / "own.jinja")
    assert found["choices"][0]["token_ids"] == oracle("fhi", 6)[0]


def test_a_template_that_is_not_there_or_not_used_is_told(cli, edited, tiny_folder, tmp_path):
    (tmp_path / "broken").write_text("\n{% for %}")
    for flags, message, hint in (
        (
            ["rag"],
            '--chat-template "rag" is neither a file nor a template of this model',
            'it has "default"',
        ),
        (
            [str(tmp_path / "broken")],
            "the chat template is not valid jinja2, line 2: Expected an expression",
            "",
        ),
        (
            ["default", "--raw"],
            "--chat-template needs a chat template",
            "leave out --raw, or leave --chat",
        ),
    ):
        code, out, err = cli("generate", "hi", "-m", tiny_folder, "--chat-template", *flags)
        assert (
            (code, out) == (2, "")
            and errors_in(err)[0].startswith(message)
            and hint in errors_in(err)[1]
        )
    only = edited("tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "x"}])
    code, _, err = cli("generate", "hi", "-m", only)
    assert (
        code == 2 and '"tool_use"' in errors_in(err)[0] and "--chat-template" in errors_in(err)[1]
    )


def test_stop_string_ends_the_answer_before_it(cli, tiny_folder):
    whole = ids_of(cli, PROMPT, "-m", tiny_folder, "-n", "40")["choices"][0]["message"]["content"]
    cut = next(i for i in range(3, len(whole) - 2) if whole.find(whole[i : i + 2]) == i)
    got = ids_of(
        cli,
        PROMPT,
        "-m",
        tiny_folder,
        "-n",
        "40",
        "--stop",
        "never",
        "--stop",
        whole[cut : cut + 2],
    )
    assert choice(got)["finish_reason"] == "stop" and text_of(got) == whole[:cut]
    assert choice(got)["stop_reason"] == whole[cut : cut + 2]


def test_a_stop_string_may_be_a_control_token(cli, edited):
    """Here <|im_start|>, which random weights write now and then, and which ends nothing by itself."""
    argv = [
        "--raw",
        PROMPT,
        "-n",
        40,
        "-m",
        edited("generation_config.json", eos_token_id=[]),
        "--temperature",
        3,
    ]
    for seed in range(30):
        whole = choice(ids_of(cli, *argv, "--seed", seed))["token_ids"]
        if 1 in whole[2:-2]:
            break
    found = ids_of(cli, *argv, "--seed", seed, "--stop", "<|im_start|>")
    assert choice(found)["token_ids"] == whole[: whole.index(1) + 1]
    assert choice(found)["stop_reason"] == "<|im_start|>" and "<|" not in text_of(found)


def test_eos_ends_the_answer(cli, edited, oracle):
    third = oracle(PROMPT, 3)[0][2]
    got = ids_of(
        cli, "--raw", PROMPT, "-m", edited("generation_config.json", eos_token_id=[0, third])
    )
    ids = choice(got)["token_ids"]
    assert choice(got)["finish_reason"] == "stop" and ids[-1] == third and len(ids) <= 3


def test_context_limits(cli, tiny_folder):
    """A full context ends the answer and says so; a prompt that does not fit is refused before any work."""
    got = ids_of(cli, "--raw", PROMPT, "-m", tiny_folder, "--context", "16", "-n", "300")
    used = got["usage"]["total_tokens"] - 1
    assert (choice(got)["finish_reason"], choice(got)["stop_reason"], used) == (
        "length",
        "context",
        16,
    )
    code, out, err = cli("generate", "name " * 30, "-m", tiny_folder, "--context", "16")
    message, hint = errors_in(err)
    assert (code, out) == (2, "") and re.fullmatch(
        r"the prompt has \d+ tokens, the context 16", message
    )
    assert "--context 512" in hint
    code, _, err = cli("generate", "x", "-m", tiny_folder, "--context", "513")
    assert code == 2 and "--context 513 is more than the model's 512" in err


def test_unknown_caches_are_told_with_the_list(cli, tiny_folder):
    code, _, err = cli("generate", "x", "-m", tiny_folder, "--cache", "dcit")
    message, hint = errors_in(err)
    assert code == 2 and "dcit" in message and "dict" in message and "dict" in hint
    code, _, err = cli("generate", "x", "-m", tiny_folder, "--cache", "dict:size=3")
    assert code == 2 and "size" in errors_in(err)[0]


def test_too_little_memory_is_refused_with_three_numbers_and_a_context_that_fits(cli, edited):
    folder = edited("config.json", max_position_embeddings=90_000_000)
    code, out, err = cli("generate", "x", "-m", folder)
    message, hint = errors_in(err)
    assert (code, out) == (2, "")
    pattern = r"needs ([\d.]+ kB) for weights \+ ([\d.]+ GB) for the cache .*; ([\d.]+ GB) are free"
    numbers = re.search(pattern, message)
    assert numbers and numbers[2] == "138 GB"  # 90,000,000 × 2 × 3 layers × 2 KV heads × 32 × 4 B
    fitting = re.match(r"--context (\d+)", hint)[1]
    assert "--dtype bfloat16 --context" in hint
    assert 0 < int(fitting) * 1536 < float(numbers[3].split()[0]) * 1.01e9
    assert ids_of(cli, "x", "-m", folder, "--context", str(int(fitting) // 2))["choices"][0][
        "token_ids"
    ]


def memory_refusal(cli, monkeypatch, available, *argv):
    """(message, hint) of a run with so many bytes free, or None if it was let through."""
    monkeypatch.setattr("nanokv.apps.cli.common.loading.available_memory", lambda device: available)
    code, _, err = cli("generate", "x", "-q", "-n", "1", *argv)
    assert code in (0, 2), err
    return errors_in(err) if code else None


def test_weights_and_cache_must_fit_together_to_the_byte(cli, monkeypatch, tiny_folder):
    from nanokv.config import Config
    from nanokv.costs import kv_bytes, weight_bytes

    config = Config.from_folder(tiny_folder)
    needed = weight_bytes(config, 4) + kv_bytes(config, 512, 1, 4)
    message, hint = memory_refusal(cli, monkeypatch, needed - 1, "-m", tiny_folder)
    assert "needs" in message and hint.startswith("--context 448 or --dtype bfloat16")
    assert memory_refusal(cli, monkeypatch, needed, "-m", tiny_folder) is None
    assert memory_refusal(
        cli, monkeypatch, weight_bytes(config, 4), "-m", tiny_folder, "--context", "2"
    )


@pytest.mark.parametrize(
    "flags",
    [
        ["--cache", "sliding:window=8"],
        ["--cache", "quantized:bits=4"],
        ["--cache", "batch:of=sliding:window=8"],
        ["--cache", "offloaded"],
        ["--cache", "paged:pages=2"],
        ["--context", "64"],
    ],
)
def test_a_cache_that_takes_less_is_not_refused(cli, monkeypatch, tiny_folder, flags):
    """The weights and half of what an exact cache of the whole context takes are free."""
    from nanokv.config import Config
    from nanokv.costs import kv_bytes, weight_bytes

    config = Config.from_folder(tiny_folder)
    available = weight_bytes(config, 4) + kv_bytes(config, 512, 1, 4) * 3 // 4
    assert memory_refusal(cli, monkeypatch, available, "-m", tiny_folder, *flags) is None
    for other in ("dict", "static", "growing", "paged", "offloaded:to=host"):
        assert memory_refusal(cli, monkeypatch, available, "-m", tiny_folder, "--cache", other), (
            other
        )


def test_a_pool_is_counted_as_a_whole(cli, monkeypatch, tiny_folder):
    """2 × 3 layers × 2 KV heads × 32 × 4 B are 1,536 B per token; a pool takes its bytes with the first of them."""
    argv = ("-m", tiny_folder, "--cache")
    message, hint = memory_refusal(cli, monkeypatch, 20_000_000, *argv, "paged:pages=500000000")
    assert "12.3 TB for a pool of 500,000,000 pages" in message and "20.0 MB are free" in message
    flag, value = hint.split(" or ")[0].split()
    assert flag == "--cache" and re.fullmatch(r"paged:pages=\d+", value)
    assert memory_refusal(cli, monkeypatch, 20_000_000, *argv, value) is None
    pages = int(value.split("=")[1])
    assert memory_refusal(cli, monkeypatch, 20_000_000, *argv, f"paged:pages={pages + 1}")
    message, _ = memory_refusal(
        cli, monkeypatch, 20_000_000, *argv, f"batch:of=prefix:page=8:pages={2 * pages + 2}"
    )
    assert "for a pool of" in message
    assert "no context fits" in memory_refusal(cli, monkeypatch, 1_000, *argv, "paged:pages=5")[1]


def test_who_guesses_is_counted_before_anything_is_loaded(cli, monkeypatch, tiny_folder):
    from nanokv.config import Config
    from nanokv.costs import kv_bytes, weight_bytes

    config = Config.from_folder(tiny_folder)
    one = weight_bytes(config, 4) + kv_bytes(config, 512, 1, 4)
    loads = []
    load = importlib.import_module("nanokv.loading").load_folder
    monkeypatch.setattr(
        "nanokv.loading.load_folder",
        lambda *args, **options: (loads.append(1), load(*args, **options))[1],
    )
    draft = ("-m", tiny_folder, "--speculate", f"draft:{tiny_folder}")
    message, hint = memory_refusal(cli, monkeypatch, 2 * one - 1, *draft)
    assert re.search(
        r"for weights \+ 786 kB for the cache of 512 tokens \+ ([\d.]+ [kM]B) for --speculate",
        message,
    )
    assert "--context" in hint and not loads
    assert memory_refusal(cli, monkeypatch, 2 * one, *draft) is None and len(loads) == 2
    assert memory_refusal(cli, monkeypatch, one, *draft)[1] == "leave out --speculate"
    # One of three layers has a cache of its own.
    early = ("-m", tiny_folder, "--speculate", "early-exit:1")
    assert memory_refusal(cli, monkeypatch, one + kv_bytes(config, 512, 1, 4) // 3 - 1, *early)
    assert memory_refusal(cli, monkeypatch, one + kv_bytes(config, 512, 1, 4) // 3, *early) is None
    assert memory_refusal(cli, monkeypatch, one, "-m", tiny_folder, "--speculate", "ngram") is None


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "matching", "norms"])
def test_guesses_over_a_cache_that_takes_none_back_are_refused(cli, tiny_folder, policy):
    """norms does, until its budget is full."""
    cache = f"evicting:policy={policy}:budget=64"
    argv = ("generate", "hi", "-m", tiny_folder, "-n", 2, "--speculate", "ngram", "--cache", cache)
    code, _, err = cli(*argv)
    if policy == "norms":
        assert code == 0
        return
    assert code == 2 and f"--speculate has no effect with --cache {cache}: " in err
    assert "hint: leave --speculate out, or take --cache growing" in err


ENDS = "guesses only while the cache holds fewer than {} tokens · {} then drops some"


@pytest.mark.parametrize(
    ("cache", "most"),
    [
        ("evicting:policy=window:budget=64", 64),
        ("evicting:policy=norms:budget=64", 64),
        ("sliding:window=32:sinks=4", 35),
        ("evicting:policy=norms:budget=512", None),  # the whole context: nothing is dropped
        ("evicting:policy=quest:budget=64", None),  # all entries stay
        ("quantized", None),  # takes back any newest block
        ("growing", None),
    ],
)
def test_where_guesses_end_is_said_at_the_start(cli, tiny_folder, cache, most):
    argv = ("generate", "hi", "-m", tiny_folder, "-n", 2, "--cache", cache)
    code, _, err = cli(*argv, "--speculate", "ngram")
    assert code == 0
    assert (ENDS.format(most, cache) in err.splitlines()[0]) == (most is not None)
    assert ("guesses only" in err) == (most is not None)
    assert "guesses only" not in cli(*argv, "--speculate", "ngram", "--quiet")[2]
    assert "guesses only" not in cli(*argv)[2]


def test_where_guesses_end_is_said_in_a_chat(cli, tiny_folder):
    cache = "evicting:policy=window:budget=64"
    argv = ("chat", "-m", tiny_folder, "-n", 2, "--cache", cache, "--speculate", "ngram")
    code, _, err = cli(*argv, stdin=b"hi\n")
    assert code == 0 and err.count(ENDS.format(64, cache)) == 1


@pytest.mark.parametrize(
    ("stored", "flag", "itemsize"),
    [("float16", "auto", 4), ("bfloat16", "auto", 2), ("float32", "bfloat16", 2)],
)
def test_dtype_auto(cli, tiny_folder, tmp_path, stored, flag, itemsize):
    """float16 runs as float32 on a CPU (it has no fast fp16 GEMM); bfloat16 stays; seen in the cache's bytes."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_folder, tmp_path / stored)
    weights = {
        k: t.to(getattr(torch, stored)) for k, t in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": stored}
    (folder / "config.json").write_text(json.dumps(config))
    got = ids_of(cli, PROMPT, "-m", folder, "--dtype", flag, "--device", "cpu", "--cache", "dict")
    assert got["cache"]["bytes"] == (got["usage"]["prompt_tokens"] + 5) * 2 * 3 * 2 * 32 * itemsize


def test_control_characters_of_the_model_are_visible_in_text_and_escaped_in_json(
    cli, tiny_folder, tmp_path
):
    """The checkpoint's vocabulary is changed so that the model's first token is ESC and its second is DEL."""
    first, second = ids_of(cli, PROMPT, "-m", tiny_folder)["choices"][0]["token_ids"][:2]
    assert first != second
    folder = shutil.copytree(tiny_folder, tmp_path / "escape")
    fields = json.loads((folder / "tokenizer.json").read_text())
    vocab = fields["model"]["vocab"]
    for id, name in ((first, "ě"), (second, "ġ")):  # GPT-2's stand-ins for the bytes 1b and 7f
        holder = next(token for token, number in vocab.items() if number == id)
        vocab[holder], vocab[name] = vocab[name], id
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    got = ids_of(cli, PROMPT, "-m", folder)
    assert text_of(got).startswith("\x1b\x7f"), "the swap must not change the prompt's own ids"
    _, out, _ = cli("generate", "--json", PROMPT, "-m", folder, "-n", "2")
    assert "\x1b" not in out and "\x7f" not in out and "\\u001b\\u007f" in out
    assert cli("generate", PROMPT, "-m", folder, "-n", "2", "-q") == (0, "␛␡\n", "")


THOUGHTS = [
    (None, "\nhmm␛\n\n"),
    ("show", "\nhmm␛\n\n"),
    ("fold", "  thought for 0 ms\n"),
    ("off", ""),
]


@pytest.mark.parametrize(("thinking", "thoughts"), THOUGHTS)
def test_thinking_goes_to_stderr(capsys, thinking, thoughts):
    """`nanokv generate … > answer.txt` must hold the answer only."""
    import types

    from nanokv.apps.cli.commands.generate import TextOutput

    asked = prompt.PromptOptions(chat=True, template=options.TemplateOptions(thinking=thinking))
    loaded = types.SimpleNamespace(
        tokenizer=types.SimpleNamespace(decode=lambda ids: "<|im_start|>assistant\n")
    )
    out = TextOutput(asked, options.OutputOptions(color="never"), loaded, [1])
    for chunk in ("<thi", "nk>\nhmm\x1b", "\n</th", "ink>\n\nFour", ".\x07"):
        out.put(chunk)
    out.flush()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("Four.␇\n", thoughts)


@pytest.mark.parametrize(
    "module", ["chat.repl", "chat.pipe", "commands.generate", "commands.batch"]
)
def test_the_banner_need_not_wait_for_torch(module):
    """torch takes seconds to import, and Ctrl-C is heard there only inside of terminal.loading()."""
    code = f"import sys, nanokv.apps.cli.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("command", ["chat", "generate", "batch", "trace"])
def test_thinking_has_the_same_values_in_every_command(command):
    """on and off of 0.1.0's generate are still accepted."""
    from nanokv.apps.cli import COMMANDS, make_parser

    parser = make_parser(command, importlib.import_module(COMMANDS[command][0]))
    needed = {"batch": ["prompts.jsonl"], "generate": ["hi"], "trace": ["hi"]}.get(command, [])
    given = {
        word: parser.parse_args([*needed, "--thinking", word])
        for word in ("show", "fold", "off", "on")
    }
    assert [args.thinking for args in given.values()] == ["show", "fold", "off", "show"]
    said = [options.template_options(args).values() for args in given.values()]
    assert said == [{"enable_thinking": word != "off"} for word in given]
    assert options.template_options(parser.parse_args(needed)).values() == {}


# --- the operating system -----------------------------------------------------------------------------------------


def closed_pipe() -> int:
    """The writing end of a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_help_into_a_closed_pipe_and_a_full_disk():
    writer = closed_pipe()
    done = run_cli("--help", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    with open("/dev/full", "wb") as full:
        done = run_cli("env", "--help", stdout=full)
    assert (
        done.returncode == 2 and b"cannot write to stdout: No space left on device" in done.stderr
    )
    assert len(done.stderr.splitlines()) <= 2


def test_output_that_is_still_buffered_at_the_end():
    """print() without a flush fails only when Python leaves: exit code 120 and "Exception ignored", unless caught."""
    code = (
        "import sys; from nanokv.apps.cli import main; from nanokv.apps.cli.commands import env; "
        "env.run = lambda args: print('x'); sys.exit(main())"
    )
    with open("/dev/full", "wb") as full:
        for output, expected, text in (
            (closed_pipe(), 141, b""),
            (full, 2, b"No space left on device"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", code, "env"],
                stdout=output,
                stderr=subprocess.PIPE,
                env=environment(),
                check=False,
            )
            assert (
                done.returncode == expected
                and text in done.stderr
                and b"ignored" not in done.stderr
            )


def test_a_reader_that_leaves_stops_the_generation(endless_folder):
    """`nanokv generate … | head -c 10` ends at once with 141 and no traceback, not after 90,000 tokens."""
    process = spawn_cli(
        "generate", PROMPT, "-m", endless_folder, "-n", "90000", "--context", "99000"
    )
    assert len(process.stdout.read(10)) == 10
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141 and err == b""


def test_the_banner_is_on_the_screen_before_torch_is_imported(tiny_folder):
    """Two seconds of silence look like a hang; the plan needs config.json and arithmetic only."""
    code = """if True:
        import sys
        from nanokv.apps.cli import make_parser
        from nanokv.apps.cli.commands import chat
        from nanokv.apps.cli.common.loading import load_model
        def announce(plan):
            print(*plan.banner(), "torch" in sys.modules, sep=" · ")
            raise SystemExit(7)
        given = chat.command_options(make_parser("chat", chat).parse(sys.argv[1:]))
        load_model(given.model, given.cache, given.output, announce=announce)
    """
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "-m",
            str(tiny_folder),
            "--device",
            "cpu",
            "--context",
            "300",
            "--plain",
        ],
        capture_output=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 7, done.stderr
    shape = r"nanokv [\d.]+ · tiny-random 0\.2 M fp32 · 1 thread · cache growing · context 300 · plain \(--plain\)"
    assert re.fullmatch(shape + r" · False\n", done.stdout.decode())


def test_a_full_disk_is_an_error(tiny_folder):
    with open("/dev/full", "wb") as full:
        done = run_cli("generate", PROMPT, "-m", tiny_folder, "-n", "4", stdout=full)
    assert done.returncode == 2 and done.stderr.startswith(
        b"nanokv: error: cannot write to stdout: No space left"
    )
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_half_answer(endless_folder, number, code):
    """What was generated is printed and ends with a newline; the exit code tells scripts that it is not whole."""
    process = spawn_cli("generate", PROMPT, "-m", endless_folder, "-n", "90000")
    first = process.stdout.read(40)
    process.send_signal(number)
    process.send_signal(number)  # a nervous second press changes nothing
    rest, err = process.communicate(timeout=60)  # 90,000 tokens would take many minutes
    assert process.returncode == code
    assert (first + rest).endswith(b"\n") and b"Traceback" not in err and b"interrupted" in err


def test_interrupted_json_is_whole(cli, monkeypatch, endless_folder):
    """--json prints its one object also when interrupted, with the reason; the prompt itself can be the long part."""
    from nanokv.apps.cli.commands.generate import JsonOutput

    chunks = []

    def put(self, chunk):
        chunks.append(chunk)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(JsonOutput, "put", put)
    code, out, _ = cli("generate", PROMPT, "-m", endless_folder, "-n", "90000", "--json")
    got = json.loads(out)
    (found,) = got["choices"]
    assert (code, found["finish_reason"], found["stop_reason"]) == (130, "length", "interrupted")
    assert 0 < len(found["token_ids"]) == len(found["logprobs"]["content"])
    # No token after the flag; what was held back comes out.
    assert len(chunks) <= 2 and text_of(got) == "".join(chunks)


def test_interrupted_prefill_says_so(cli, monkeypatch, endless_folder):
    """Ctrl-C between two prefill chunks: no token yet, still a whole object and no division by zero."""
    from nanokv import inference

    def prefill(*args, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return inference.prefill(*args, **options)

    monkeypatch.setattr("nanokv.decoding.generation.prefill", prefill)
    monkeypatch.setattr("nanokv.apps.cli.common.terminal.SWALLOW_S", 0)
    code, out, err = cli("generate", "name " * 600, "-m", endless_folder, "--json")
    got = json.loads(out)
    assert (code, choice(got)["stop_reason"], choice(got)["token_ids"]) == (130, "interrupted", [])
    assert (
        got["cache"]["bytes"] < got["usage"]["prompt_tokens"] * 1536
        and got["timings"]["ttft_s"] is None
    )
    assert "0 out" in err


def test_ctrl_c_during_a_download_ends_it(tmp_path):
    """A server that accepts and then says nothing: the moment when people press Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        env = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
            "NO_PROXY": "*",
        }
        process = spawn_cli("generate", "x", "-m", "somebody/something", env=env)
        connection, _ = server.accept()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        connection.close()
    # What a shell calls 130.
    assert (process.returncode, out) == (-signal.SIGINT, b"") and b"Traceback" not in err


def test_a_real_terminal_without_prompt_and_colour_on_its_stderr():
    """stdin and stderr are a pty here: exit 2 at once, the error in colour, and none with NO_COLOR."""
    for env, colour in (({}, True), ({"NO_COLOR": "1"}, False)):
        parent, child = pty.openpty()
        process = subprocess.Popen(
            command("generate"),
            stdin=child,
            stdout=subprocess.PIPE,
            stderr=child,
            env=environment(env),
        )
        os.close(child)
        assert process.communicate(timeout=60)[0] == b"" and process.returncode == 2
        shown = read_all(parent)
        assert b"no prompt" in shown and (b"\x1b[" in shown) is colour


def read_all(descriptor: int) -> bytes:
    """Everything that a pty still holds after its other end was closed."""
    parts = []
    while select.select([descriptor], [], [], 1)[0]:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(descriptor)
    return b"".join(parts)


def test_invalid_bytes_in_an_argument_exit_2_with_the_position():
    done = run_cli("generate", b"abc\xffdef")
    assert (
        done.returncode == 2
        and b"byte 0xff at position 3" in done.stderr
        and len(done.stderr.splitlines()) == 2
    )


def test_utf8_goes_into_pipes_whatever_the_locale():
    """A Latin-1 or C locale must neither crash on `·` nor write mojibake into a file."""
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "NANOKV_NO_HISTORY": "1"}
    done = run_cli("--help", env=env)
    assert done.returncode == 0 and "0 done · 1 our bug" in done.stdout.decode("utf-8")
    done = run_cli("zz", env=env)
    assert done.returncode == 2 and done.stderr.decode("utf-8").startswith(
        "nanokv: error: no command 'zz'"
    )


# --- env ----------------------------------------------------------------------------------------------------------


def test_env_names_values_and_origins_but_no_secrets(cli, monkeypatch):
    monkeypatch.setenv("NANOKV_MODEL", "Qwen/Qwen3-0.6B")
    monkeypatch.setenv("NANOKV_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:pass@hub.example")
    monkeypatch.setenv("HF_HOME", "/data/\x1b[2J")
    code, out, err = cli("env")
    assert (code, err) == (0, "")
    assert re.search(r"model +Qwen/Qwen3-0.6B +\(NANOKV_MODEL\)", out)
    assert re.search(r"threads +3 +\(NANOKV_THREADS\)", out)
    assert "hf_verysecret" not in out and re.search(r"HF_TOKEN +set", out)
    assert "pass" not in out and "hub.example" in out and "\x1b" not in out
    fields = json.loads(cli("env", "--json", "-m", "tiny")[1])
    assert fields["settings"]["model"] == ["tiny", "flag"] and "torch" in fields["versions"]


def test_env_shows_which_tokens_end_an_answer_and_who_says_so(cli, edited, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))

    def ends(model):
        return json.loads(cli("env", "--json", "-m", model)[1])["ends of an answer"]

    folder = edited("generation_config.json", eos_token_id=[300, 0])
    found = ends(folder)
    assert [id for id, _ in found.values()] == ["300", "0", "2"]
    assert found["<|im_end|>"] == [
        "2",
        "config.json, tokenizer's eos_token, known text, chat template",
    ]
    assert found["<|endoftext|>"] == ["0", "generation_config.json, known text"]
    assert re.search(
        r"ends of an answer\n(.+\n)+.*<\|im_end\|> +2 +\(config.json", cli("env", "-m", folder)[1]
    )
    assert ends(edited("generation_config.json", eos_token_id=[])) == {
        "none": ["", "answers end at their length"]
    }
    assert ends("Qwen/Qwen3-0.6B")["unknown"][0] == "not on this disk"
    (folder / "tokenizer.json").write_text("{")
    assert ends(folder)["unknown"][0] == "cannot be read"


def test_env_shows_the_ends_of_a_model_that_a_package_carries(cli, tmp_path, monkeypatch):
    from gguf_files import write_gguf
    from oracle import tiny_reference
    from real_model import fake_distribution
    from tiny_checkpoint import write_tokenizer
    from weights_loader import installed

    for variable in ("HF_HOME", "NANOKV_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    write_tokenizer(tmp_path)
    reference = tiny_reference(model_type="llama", head_dim=None, vocab_size=320)
    data = write_gguf(tmp_path / "model.gguf", reference, tmp_path).read_bytes()
    absent = json.loads(cli("env", "--json", "-m", "smollm2")[1])["ends of an answer"]
    assert absent["unknown"][0] == "not on this disk"
    package = installed.PACKAGES["smollm2"]._replace(
        nbytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )
    monkeypatch.setitem(installed.PACKAGES, "smollm2", package)
    monkeypatch.syspath_prepend(fake_distribution(tmp_path / "site", data))
    for name in ("smollm2", "SmolLM2"):
        found = json.loads(cli("env", "--json", "-m", name)[1])["ends of an answer"]
        assert found["<|im_end|>"][0] == "2" and "unknown" not in found


@pytest.mark.parametrize("flags", [["-m", "tinny"], ["--cache", "pagd"]])
def test_a_hint_is_printed_once(cli, flags):
    """Also below a traceback, which would end with it in a program."""
    for debug in ([], ["--debug"]):
        err = cli("env", *flags, *debug)[2]
        assert err.count("hint: ") == 1 and err.splitlines()[-1].startswith("hint: did you mean")
        assert ("Traceback" in err) == bool(debug)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tinny", "did you mean tiny?"),
        ("./nothing", "check the path: there is no such folder"),
        ("a b/c", None),
        ("nothing.gguf", "check the path: there is no such file"),
        ("", None),
    ],
)
def test_env_says_what_is_wrong_with_a_name_that_no_model_has(
    cli, tmp_path, monkeypatch, name, hint
):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code, out, err = cli("env", "-m", name)
    message, told = errors_in(err)
    assert (code, out) == (2, "") and message.startswith(f'no model "{name}"')
    assert hint is None or told == hint


@pytest.mark.parametrize(
    "name", ["qwen3-0.6b", "Qwen/Qwen3-0.6B", "owner/name:file.gguf", "smollm2"]
)
def test_env_of_a_model_that_would_be_fetched_asks_nobody(cli, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", None)
    code, out, _ = cli("env", "--json", "-m", name)
    assert code == 0 and json.loads(out)["ends of an answer"]["unknown"][0] == "not on this disk"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cache", "nosuch"], "no cache is called 'nosuch'"),
        (["--cache", "paged:pags=3"], "has no option pags"),
        (["--device", "tpu"], "--device 'tpu' is not auto, cpu"),
    ],
)
def test_env_says_what_is_wrong_with_a_setting(cli, flags, message):
    code, out, err = cli("env", *flags)
    assert (code, out) == (2, "") and message in errors_in(err)[0]


def test_env_shows_every_variable_that_is_read(cli):
    """Looked for in the sources and the Makefile, so that a new one is noticed."""
    from pathlib import Path

    root = Path(nanokv.__file__).parents[1]
    text = "\n".join(
        p.read_text()
        for place in ("nanokv", "weights_loader")
        for p in (root / place).rglob("*.py")
    )
    found = set(
        re.findall(r"""(?:environ(?:\.get\(|\[)|environment\()\s*["']([A-Z_]+)["']""", text)
    )
    found |= set(
        re.findall(
            r"\$([A-Z][A-Z_]+)\b", (root / "nanokv/apps/cli/common/arguments.py").read_text()
        )
    )
    shown = json.loads(cli("env", "--json")[1])
    assert (
        {"CXX", "NANOKV_KERNELS", "NANOKV_CACHE", "XDG_CACHE_HOME"}
        <= found
        <= set(shown["environment"])
    )
    taken = set(re.findall(r"^([A-Z]+) *\?=", (root / "Makefile").read_text(), re.MULTILINE))
    assert taken and taken == set(shown["environment of make"])


def test_env_names_the_folder_of_the_kernels(cli, monkeypatch, tmp_path):
    from nanokv.fast import building

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    for name, origin in (("x", "XDG_CACHE_HOME"), ("k", "NANOKV_CACHE")):
        monkeypatch.setenv(origin, str(tmp_path / name))
        assert json.loads(cli("env", "--json")[1])["paths"]["kernels"] == [
            str(building.folder()),
            origin,
        ]


def test_ctrl_c_inside_an_import_is_ctrl_c_all_the_same(monkeypatch, capsys):
    """torch turns it into a RuntimeError on its way out; that is no bug of ours to report."""

    def import_torch(words):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr("nanokv.apps.cli.dispatch", import_torch)
    assert main(["generate", "hi"]) == 130
    assert "bug" not in capsys.readouterr().err


# --- what people type who know other programs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--foo", None),
        ("--colour", "--color"),
        ("--tempature", "--temperature"),
        ("--top_k", "--top-k"),
        ("--max-new-token", "--max-new-tokens"),
        ("--quantise", "--quantize"),
        ("--ctx", "--context"),
        ("--n-ctx", "--context"),
        ("--num-predict", "--max-new-tokens"),
        ("--max-length", "--max-new-tokens"),
        ("--xyzzy", None),
        ("--threads-count", "--threads"),
        ("--Seed", "--seed"),
        ("-c", "--context"),
        ("-ngl", "--device"),
        ("--n-gpu-layers", "--device"),
        ("-ctk", "--cache"),
        ("-V", "--version"),
        ("-f", "--file"),
        ("-cnv", "--chat"),
        ("--repeat-penalty", "--repetition-penalty"),
        ("-np", None),
    ],
)
def test_the_suggested_flag_is_the_one_that_was_meant(cli, typed, meant):
    """Dashes are not compared: with them --foo was as near to --color as a slip of the finger."""
    code, _, err = cli("generate", "x", typed, "1")
    message, hint = errors_in(err)
    assert (code, message) == (2, f"no flag {typed}")
    assert hint == (f"did you mean {meant}?" if meant else "nanokv generate --help")


def test_flags_of_other_programs_are_accepted_and_checked_like_ours():
    args = make_parser("generate", generate).parse(
        ["x", "--temp", "0.5", "--ctx-size=64", "--n-predict", "3"]
    )
    assert (args.temperature, args.context, args.max_new_tokens) == (0.5, 64, 3)
    assert make_parser("generate", generate).parse(["x", "--max-tokens", "4"]).max_new_tokens == 4
    with pytest.raises(
        NanoKVError, match=r"--temperature: -9 is not 0 .* or a number from 1e-30 to 1,000,000"
    ):
        make_parser("generate", generate).parse(["x", "--temp", "-9"])
    # Not where it would mean nothing.
    with pytest.raises(NanoKVError, match=r"no flag --n-predict"):
        make_parser(
            "bench", __import__("nanokv.apps.cli.commands.bench", fromlist=["bench"])
        ).parse(["--n-predict", "4"])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--stream", "by default"),
        ("-no-cnv", "--raw"),
        ("--no-cnv", "--raw"),
        ("--no_stream", "--json"),
        ("--trust-remote-code", "no code"),
    ],
)
def test_a_flag_that_is_not_needed_here_is_told_why(cli, typed, told):
    code, _, err = cli("generate", "x", typed)
    message, hint = errors_in(err)
    assert (code, message) == (2, f"no flag {typed}") and told in hint


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run", "nanokv chat -m MODEL"),
        ("list", "nanokv models"),
        ("version", "nanokv --version"),
        ("-V", "nanokv --version"),
        ("perplexity", "nanokv bench"),
        ("quantize", "--quantize int8"),
        ("server", "nanokv serve"),
        ("rm", "nanokv models"),
        ("ps", "nanokv models"),
        ("ls", "nanokv models"),
        ("pull", "nanokv chat -m Qwen/Qwen3-0.6B"),
        ("chatt", "did you mean nanokv chat?"),
    ],
)
def test_commands_of_other_programs_lead_to_ours(cli, name, told):
    code, _, err = cli(name, "qwen3")
    message, hint = errors_in(err)
    assert (code, message) == (2, f"no command {name!r}") and told in hint
    named = re.findall(r"nanokv ([a-z]+)", hint)
    assert [word for word in named if word not in COMMANDS] == []


@pytest.mark.parametrize(
    ("typed", "parsed", "hint"),
    [
        ("/?", ("/?", ""), None),
        ("/HELP", ("/help", ""), None),
        ("/Set TOP_K 5", ("/set", "TOP_K 5"), None),
        ("/ cache", ("/ cache", ""), "did you mean /cache?"),
        ("/", ("/", ""), "/help lists them"),
        ("/model qwen", ("/model", "qwen"), "nanokv chat -m NAME"),
        ("/chace", ("/chace", ""), "did you mean /cache?"),
        ("/temperature 1", ("/temperature", "1"), "did you mean /set temperature?"),
        ("/foo", ("/foo", ""), "/help lists them"),
        ("/ is a slash", None, None),
        ("//cache", None, None),
    ],
)
def test_slash_commands_as_people_type_them(typed, parsed, hint):
    assert chat_commands.parse(typed) == parsed
    if hint:
        with pytest.raises(NanoKVError, match="no command") as error:
            chat_commands.run(None, *parsed)
        assert hint in error.value.hint
    elif parsed:
        assert parsed[0] in chat_commands.COMMANDS


@pytest.mark.parametrize(
    ("rest", "hint"),
    [
        ("parameter temperature 0.7", "did you mean /set temperature 0.7?"),
        ("parameter top-k 5", "did you mean /set top_k 5?"),
        ("parameter temprature 1", "did you mean temperature?"),
        ("parameter num_ctx 4096", "nanokv chat --context 4096"),
        ("num_ctx 4096", "nanokv chat --context 4096"),
        ("parameter repeat_penalty 1.1", "/set repetition_penalty 1.1"),
        ("parameter num_predict 9", "max_new_tokens 9"),
        ('system "Be brief."', "/system Be brief."),
        ("nothink", "/nothink"),
        ("think", "/think"),
        ("verbose", "/stats on"),
        ("parameter", "one of temperature"),
        ("parameter xyzzy 1", "one of temperature"),
    ],
)
def test_settings_as_ollama_has_them_lead_to_ours(rest, hint):
    with pytest.raises(NanoKVError, match="no setting") as error:
        chat_commands.run(None, "/set", rest)
    assert hint in error.value.hint and "{" not in error.value.hint


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "nanokv chat --resume"),
        (["-m", "smollm2"], "nanokv chat -m smollm2 --resume"),
        (
            ["-m", "./my model.gguf", "--cache", "quantized:bits=4", "--resume", "x"],
            "nanokv chat -m './my model.gguf' --cache quantized:bits=4 --resume",
        ),
        (
            [
                "--context=64",
                "--quantize",
                "int8",
                "--overflow",
                "drop",
                "--plain",
                "--speculate",
                "ngram:3",
                "-q",
            ],
            "nanokv chat --context 64 --plain --quantize int8 --speculate ngram:3 --overflow drop --resume",
        ),
        (["-t", "0.7", "-s", "Be brief.", "--stats", "off"], "nanokv chat --resume"),
    ],
)
def test_the_command_that_resumes_a_chat_names_what_its_session_does_not_hold(
    monkeypatch, flags, told
):
    """The command loads the same model, whatever NANOKV_MODEL is when it is typed."""
    from nanokv.apps.cli.chat.resume import resuming
    from nanokv.apps.cli.commands import chat

    monkeypatch.delenv("NANOKV_MODEL", raising=False)

    def resuming_with(words):
        return resuming(chat.command_options(make_parser("chat", chat).parse(words)))

    found = resuming_with(flags)
    assert found.startswith("nanokv chat ") and found.endswith(told)
    assert resuming_with(shlex.split(found)[2:]) == found
    monkeypatch.setenv("NANOKV_MODEL", "smollm2")
    assert resuming_with([]) == "nanokv chat -m smollm2 --resume"
    assert resuming_with(["-m", "tiny"]) == "nanokv chat -m tiny --resume"


def test_a_command_among_other_lines_is_found_in_any_case():
    assert chat_commands.command_line("hello\n/CACHE") == (2, "/cache")


@pytest.mark.parametrize(
    ("name", "example"), [("/read", "/read notes.txt"), ("/save", "/save"), ("/load", "/load")]
)
def test_a_bare_file_command_asks_for_the_name(name, example):
    with pytest.raises(NanoKVError, match=f"{name} needs a file name") as error:
        chat_commands.run(None, name, "")
    assert example in error.value.hint


def test_a_full_context_offers_no_more_turns_than_there_are(tiny_folder):
    session = nanokv.Session(
        *nanokv.load(str(tiny_folder)), params={"max_new_tokens": 2}, context=120
    )
    hints = []
    for count in (1, 2):
        session.ask("name " * 10)
        with pytest.raises(NanoKVError, match="needs") as error:
            session.ask("name " * 90)
        hints.append((count, re.findall(r"/drop (\d+)", error.value.hint)))
    assert hints == [(1, ["1"]), (2, ["2"])]
