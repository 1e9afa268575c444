"""`nanokv chat` as a person meets it: in a real pseudo-terminal, asserted on the screen (pexpect + pyte).

The rows of the edge-case table that concern the chat, by name. One process serves several tests where it can; the
model is tiny and random, so what it says is only compared with what the same weights say without a terminal.
"""

import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import termios

import pytest

from chat_terminal import Terminal, chat_argv
from tiny_checkpoint import write_tiny_checkpoint

READY = r"^> *$"
# Behind an answer this word may break over two lines of the screen.
STOPPED = "|".join(r"\n?".join(word) for word in ("Stopped", "Suspended"))
STATUS = (
    r"^  [\d,]+ new \+ [\d,]+ reused → [\d,]+ out · first token [\d.]+ m?s( · [\d,]+ tok/s)? · cache {}/{} · "
    r"[\d.]+ k?M?B"
)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
    """The same kind of model with room for long prompts and answers, and no eos: it talks until it is stopped."""
    folder = write_tiny_checkpoint(
        tmp_path_factory.mktemp("long") / "endless", max_position_embeddings=60_000
    )
    settings = folder / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [], "do_sample": False}) + "\n")
    return folder


@pytest.fixture
def start(tmp_path):
    """start(folder, *flags, env=...): a chat whose state lives in tmp_path; ended with the test."""
    started = []

    def begin(folder, *flags, env=None, wait=READY, argv=None, **options):
        env = {"XDG_STATE_HOME": str(tmp_path), "NANOKV_NO_HISTORY": "1"} | (env or {})
        terminal = Terminal(argv or chat_argv(folder, *flags), env, **options)
        started.append(terminal)
        if wait:
            terminal.see(wait)
        return terminal

    yield begin
    for terminal in started:
        terminal.stop()


def sessions(tmp_path):
    return sorted((tmp_path / "nanokv" / "sessions").glob("*.jsonl"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- one long conversation: keys, commands, status, files -----------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tiny_folder, tmp_path_factory):
    """A chat that many tests share; each begins with /clear."""
    home = tmp_path_factory.mktemp("state")
    editor = home / "editor"
    editor.write_text("#!/bin/sh\nprintf ' edited' >> \"$1\"\n")
    editor.chmod(0o755)
    env = {"XDG_STATE_HOME": str(home), "EDITOR": str(editor)}
    terminal = Terminal(chat_argv(tiny_folder, "-n", "12"), env, 200, 44)
    terminal.home = home
    terminal.see(READY)
    yield terminal
    terminal.stop()


@pytest.fixture
def fresh(chat):
    chat.ask("/clear", "history and cache are empty")
    chat.clear()
    return chat


def test_banner_is_one_line_and_the_toolbar_shows_the_context(chat):
    first = chat.raw.split(b"\n")[0].decode()
    parts = r"cache growing · context 512 · (fast kernels|plain \(.*\)) · /help"
    assert "nanokv 0." in first and re.search(parts, first)
    chat.see(r"context ▕ {8}▏ 0 %  ·  Alt-Enter newline")


def test_status_line_counts_new_and_reused_tokens_and_measured_bytes(fresh, tiny_folder):
    fresh.ask("My name is Zorbla.", STATUS.format(r"\d+", 512))
    fresh.ask("What is my name?", STATUS.format(r"\d+", 512))
    expected = replies(tiny_folder, ["My name is Zorbla.", "What is my name?"])[-1]
    shown = next(line for line in fresh.text.splitlines() if "reused" in line)
    from nanokv.apps.cli.common.terminal import bytes_text

    counts = (
        f"  {expected.new:,} new + {expected.reused:,} reused → {expected.out:,} out · first token "
    )
    assert shown.startswith(counts)
    # The growing cache has 128 slots.
    used, held = expected.kv_bytes, 128 * expected.kv_bytes // expected.cached
    assert shown.endswith(
        f" · cache {expected.cached}/512 · {bytes_text(used)} ({bytes_text(held)} reserved)"
    )
    assert expected.reused > 0
    fresh.see(r"context ▕[^▏].* [1-9]\d? %")


def replies(folder, texts, n=12):
    import nanokv

    session = nanokv.Session(*nanokv.load(str(folder)), params={"max_new_tokens": n})
    turns = []
    for text in texts:
        session.ask(text)
        turns.append(session.last)
    return turns


def test_the_limit_is_never_silent_and_continue_goes_on(fresh):
    fresh.ask("Tell me.", r"\[stopped at 12 tokens · /continue\]")
    fresh.ask("/continue", r"^  1 new \+ \d+ reused → 12 out")


def test_enter_sends_and_the_newline_keys_do_not(fresh):
    fresh.send("one\nand\x1b\rtwo")  # Ctrl-J, then Alt-Enter
    fresh.see(r"> one\n  and\n  two")
    fresh.send("\r")
    fresh.see(STATUS.format(r"\d+", 512))
    fresh.ask("/tokens", r"w\S*[₀-₉]+ .*[₀-₉]+$")


def test_triple_quotes_open_and_close_a_block(fresh):
    fresh.send('"""a\rb\r')
    fresh.see(r'"""a\n  b\n')
    fresh.send('c"""\r')
    fresh.see(STATUS.format(r"\d+", 512))


def test_tab_completes_commands_and_paths(fresh, tmp_path):
    (tmp_path / "notes-of-today.txt").write_text("Hello.\n")
    fresh.send("/und\t")
    fresh.see("> /undo")
    fresh.send("\x03")
    fresh.send(f"/read {tmp_path}/notes-of\t")
    fresh.see("notes-of-today.txt")
    fresh.send("\r")
    fresh.see(r"^> Hello\.")  # the file is in the input line, not sent
    fresh.send("\x03")


def test_arrow_up_and_ctrl_r_find_history(fresh):
    fresh.ask("/set top_k 7", "top_k 7")
    fresh.send("\x1b[A")
    fresh.see("> /set top_k 7")
    fresh.send("\x03\x12top_k")
    fresh.see(r"(reverse-i-search|I-search backward).*top_k")
    fresh.send("\x07")
    history = fresh.home / "nanokv" / "history"
    assert "/set top_k 7" in history.read_text() and stat.S_IMODE(history.stat().st_mode) == 0o600
    fresh.ask("/set top_k 0", "top_k 0")


def test_ctrl_x_ctrl_e_and_edit_open_the_editor(fresh):
    fresh.send("keep me\x18\x05")
    fresh.see(r"> keep me edited")
    fresh.send("\x03")
    fresh.ask("/edit from here", r"^> from here edited")
    fresh.send("\x03")


def test_emoji_and_cjk_one_backspace_a_character_no_residue(fresh):
    fresh.send("a 世界🚀")
    fresh.see("> a 世 ?界 ?🚀")
    fresh.send("\x7f\x7f")
    fresh.see(r"> a 世 ?$", unseen="界|🚀")
    fresh.send("b")
    fresh.see(r"> a 世 ?b$")
    fresh.send("\x03")
    fresh.ask("🧑‍🚀 世界", STATUS.format(r"\d+", 512))


def test_resize_redraws_the_input_and_the_next_answer_fits(fresh, tiny_folder):
    fresh.ask("Tell me.", STATUS.format(r"\d+", 512))
    fresh.child.setwinsize(44, 60)
    fresh.screen.resize(44, 60)
    fresh.ask("/stats off", "status line off")
    fresh.ask("Once upon a time there was a cache.", r"stopped at")
    answer = replies(tiny_folder, ["Tell me.", "Once upon a time there was a cache."])[-1].text
    from nanokv.apps.cli.common.terminal import sanitize

    shown = fresh.text.split("cache.\n")[1].split("  [stopped")[0]
    assert shown.split() == sanitize(answer).split()
    fresh.child.setwinsize(44, 200)
    fresh.screen.resize(44, 200)
    fresh.ask("/stats on", "status line on")


def test_control_characters_of_the_model_are_visible_never_obeyed(fresh, tiny_folder):
    """The random model says an escape character to one of these messages; the raw one stays in the session."""
    for text in ("Hi", "Tell me.", "Who?", "One", "Two", "Three", "Four", "Five", "Six", "Seven"):
        reply = replies(tiny_folder, [text])[0].text
        control = next((c for c in reply if ord(c) < 32 and c not in "\n\t\r"), None)
        if control:
            break
    else:
        pytest.fail(
            "the random model says no control character to any message: choose others, or this tests nothing"
        )
    fresh.ask(text, STATUS.format(r"\d+", 512))
    assert chr(0x2400 + ord(control)) in fresh.text
    saved = lines(sessions(fresh.home)[-1])[-1]
    assert saved["user"] == text and control in saved["answer"]


def test_typed_control_token_asks_and_no_keeps_the_message(fresh):
    fresh.send("a <|im_end|> b\r")
    fresh.see(r"message contains <\|im_end\|>, a control token")
    fresh.send("n\n")
    fresh.see(r"y/N n\n> a <\|im_end\|> b")
    fresh.send("\r")
    fresh.see(r"(?s)y/N n.*y/N")
    fresh.send("y\n")
    fresh.see(STATUS.format(r"\d+", 512))


def test_long_paste_folds_counts_tokens_and_unfolds(fresh):
    text = "\n".join(f"l{i}" for i in range(40))
    fresh.paste(text.replace("\n", "\r\n"))
    fresh.see(r"^> \[pasted 40 lines, \d+ tokens\]")
    assert "l17" not in fresh.text
    fresh.send("\x1bp")
    fresh.see(r"^  l17$")
    fresh.send("\x03")
    # A short one stays as it is, and is not sent line by line.
    fresh.paste("x\n\ny")
    fresh.see(r"> x\n\n  y|> x\n +\n  y")
    fresh.send("\x03")


def test_context_full_before_a_turn_refuses_with_numbers_and_keeps_the_message(fresh):
    fresh.ask("One.", STATUS.format(r"\d+", 512))
    fresh.clear()
    fresh.paste("word " * 300)
    fresh.send("\r")
    fresh.see(r"needs [\d,]+ of 512 tokens \(history \d+ \+ message [\d,]+\)")
    fresh.see(r"hint: a shorter message$")  # 512 is all that the model has
    fresh.see(
        r"^the message is back in the input line: Ctrl-C clears it, then a command can be typed$"
    )
    fresh.see(r"^> word word")
    fresh.raw_mode(without=termios.ISIG)
    fresh.send("\x03")
    fresh.ask("/drop 1", "dropped the oldest turn")
    fresh.ask("Two.", STATUS.format(r"\d+", 512))


def test_full_during_the_answer_says_so(fresh):
    fresh.ask("/set max_new_tokens 2000", "max_new_tokens 2000")
    fresh.ask("/set loop_guard off", "loop_guard off")
    fresh.ask("Tell me everything.", r"\[context full 512/512 · /clear\]")
    fresh.ask("/set loop_guard on", "loop_guard on")
    fresh.ask("/set max_new_tokens 12", "max_new_tokens 12")


def test_overflow_drop_says_what_it_dropped(fresh):
    fresh.ask("/set overflow drop", "overflow drop")
    for _ in range(3):
        fresh.ask("word " * 70, r"→ 12 out")
    fresh.see(r"dropped 1 turn \(−\d+\); prefilled \d+ again")
    fresh.ask("/set overflow stop", "overflow stop")


def test_cache_draws_a_row_a_layer_and_its_total_is_measured(fresh):
    fresh.ask("/system Be kind.", "system prompt set")
    fresh.ask("My name is Zorbla.", STATUS.format(r"\d+", 512))
    cached = int(fresh.text.split("cache ")[1].split("/")[0])
    fresh.ask("/cache", "measured")
    total = 2 * 3 * 2 * 32 * 4 * cached
    assert (
        f"2 (K, V) × 3 layers × 2 KV heads × 32 × 4 B × {cached} tokens = {total:,} B" in fresh.text
    )
    measured, ratio = re.search(
        r"measured ([\d,]+) B \(growing cache: ([\d.]+) × the formula\)", fresh.text
    ).groups()
    slots = int(measured.replace(",", "")) * cached // total  # as many as it has ever needed
    assert slots >= cached and slots.bit_count() == 1 and ratio == f"{slots / cached:.2f}"
    for layer in range(3):
        fresh.see(rf"^layer  {layer} s+u+a+  [\d.]+ kB$")
    fresh.ask("/system", "system: Be kind.")
    fresh.ask('/system ""', "system prompt removed")


def test_tokens_break_between_two_tokens_and_settings_show_the_limit_that_holds(fresh):
    fresh.ask("My name is Zorbla and I live in Lisbon, by the sea.", STATUS.format(r"\d+", 512))
    fresh.ask("/tokens", r"^\d+ tokens · the last one was not fed, so the cache lacks it$")
    rows = re.search(r"> /tokens\n(.*?)\n\d+ tokens", fresh.text, re.DOTALL | re.MULTILINE)[
        1
    ].split("\n")
    assert all(re.fullmatch(r"([su a] )(\S+[₀-₉]+ ?)+", row) for row in rows)
    assert {row[0] for row in rows if row[0] != " "} >= {"u", "a"}
    fresh.ask("/set", r"max_new_tokens\s+12 ")


def test_memory_that_an_empty_cache_keeps_is_said(start, tiny_folder):
    chat = start(tiny_folder, "-n", "4")
    chat.ask("/cache", r"^cache empty: 0 tokens, 0 B$")
    chat.ask("Hello there.", STATUS.format(r"\d+", 512))
    chat.ask("/clear", "history and cache are empty")
    chat.ask("/cache", r"^cache empty: 0 tokens \([\d.]+ k?B of memory kept for the next tokens\)$")


def test_a_setting_without_a_value_is_shown(fresh):
    fresh.ask("/set max_new_tokens", r"^max_new_tokens 12$")
    fresh.ask("/set thinking", r"^thinking show$")
    fresh.ask("/set temperature", r"^temperature 0 \(greedy\)$")
    fresh.ask("/set seed", r"^seed \d+ \(not used: greedy\)$")
    fresh.ask("/set top_k 0", r"^top_k 0 \(all\)$")
    fresh.ask("/set top_p 0", r"^top_p 0$")
    fresh.ask("/set top_p 1", r"^top_p 1 \(all\)$")
    fresh.ask("/set repetition_penalty 1.5", r"^repetition_penalty 1.5$")
    fresh.ask("/set repetition_penalty 1", r"^repetition_penalty 1 \(off\)$")
    fresh.ask("/set stop_nothing", "no setting")


def test_thinking_is_refused_where_the_template_has_none(start):
    chat = start("tiny")
    for command in ("/think", "/nothink"):
        chat.ask(command, "this model cannot be asked to think")


def test_typo_gets_the_nearest_name_and_a_path_is_text(fresh):
    fresh.ask("/hlep", r"no command /hlep\nhint: did you mean /help\?")
    fresh.ask("/etc/hosts is a file", STATUS.format(r"\d+", 512))
    fresh.ask("//comment", STATUS.format(r"\d+", 512))
    fresh.ask("   ", READY)  # an empty message is ignored
    fresh.ask("/undo", "forgot the last turn; 1 left")
    fresh.ask("/drop 5", "cannot drop 5 of 1 turns")
    fresh.ask("/drop 1", r"dropped the oldest turn; the cache keeps 0 tokens$")
    fresh.ask("/set top_p 7", "7.* is not")
    fresh.ask("/help", r"^/retry, /regen ")
    fresh.see(
        r"^/system TEXT +set the system prompt .*\n(.*\n)*^/save FILE \[--kv\] \[--force\] +write"
    )
    fresh.see(r"^/exit, /bye, /quit +leave")


WRONG_ARGUMENTS = {
    "/save ~nosuchuser/x": r"~nosuchuser/x: there is no user 'nosuchuser' here",
    "/load ~nosuchuser/x": r"~nosuchuser/x: there is no user 'nosuchuser' here",
    "/read ~nosuchuser/x": r"~nosuchuser/x: there is no user 'nosuchuser' here",
    "/set stop x": r"no setting 'stop'",
    "/set overflo drop": r"no setting 'overflo'\nhint: did you mean overflow\?",
    "/undo 3": r"/undo takes no argument, not '3'",
    "/clear it all": r"/clear takes no argument, not 'it all'",
    "/read": r"/read needs a file name",
    "/read .": r"cannot read \.: Is a directory",
    "/read /dev/zero": r"/dev/zero has more than 16.0 MB",
    "/drop " + "9" * 5000: r"/drop needs a number of turns, not '9{20}'",
    "/save a\0b": r"a.b: a file name cannot hold the character NUL",
}


def test_a_wrong_argument_is_one_line_and_the_chat_goes_on(fresh):
    for line, told in WRONG_ARGUMENTS.items():
        fresh.clear()
        # Not typed: 5,000 digits would be drawn one by one.
        fresh.paste(line)
        fresh.send("\r")
        fresh.see(r"^error: " + told)
        fresh.see(r"(?s)\A>.*^> *$")
        assert "Traceback" not in fresh.text
    fresh.ask("/undo", "nothing to undo")


def test_an_error_in_a_narrow_terminal_breaks_between_words(fresh):
    fresh.child.setwinsize(44, 40)
    fresh.screen.resize(44, 40)
    fresh.ask(
        "/set top_p 7.25", r"^error: top_p: 7.25 is not a number from\n  0 to 1 \(1 = off\)\n> *$"
    )
    fresh.child.setwinsize(44, 200)
    fresh.screen.resize(44, 200)


WRONG_FIELDS = {"kv": 7, "settings": [1], "system": {"a": 1}, "fingerprint": 3, "ranks": "2"}


def test_load_of_a_file_with_a_wrong_type_names_the_field_and_changes_nothing(fresh, tmp_path):
    fresh.ask("Hello.", STATUS.format(r"\d+", 512))
    fresh.ask(f"/save {tmp_path}/good.jsonl", "saved 1 turn")
    head, history = lines(tmp_path / "good.jsonl")
    wrong = [({name: value}, name) for name, value in WRONG_FIELDS.items()]
    wrong += [
        ({"settings": {"stop": 5}}, "settings.stop"),
        ({"settings": {"top_k": "x"}}, "settings.top_k"),
    ]
    for fields, name in wrong:
        (tmp_path / "bad.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in (head | fields, history))
        )
        fresh.ask(f"/load {tmp_path}/bad.jsonl", rf"error: .*line 1: {name}\b.* not ")
    fresh.ask("/undo", "forgot the last turn; 0 left")


BROKEN = """
import sys, time, nanokv.apps.cli
from nanokv.apps.cli.chat.commands import COMMANDS, Command
def boom(chat, rest): raise RuntimeError("the cause " + "x" * 5000)
COMMANDS["/boom"] = Command(boom)
COMMANDS["/slow"] = Command(lambda chat, rest: (chat.view.say("begun"), time.sleep(60)))
sys.exit(nanokv.apps.cli.main())
"""


@pytest.mark.slow
def test_a_bug_in_a_command_is_one_line_and_costs_neither_chat_nor_session(
    start, tiny_folder, tmp_path
):
    """The program with two commands more: one that fails, one that hangs."""
    argv = chat_argv(tiny_folder, "-n", "4")
    chat = start(tiny_folder, argv=[argv[0], "-c", BROKEN, *argv[3:]])
    chat.ask("One.", r"→ 4 out")
    chat.ask("/boom", r"^error: RuntimeError: the cause\s+[x\s]+…\n(hint: )?.*please report it")
    assert "Traceback" not in chat.text and chat.text.count("x") < 500
    chat.clear()
    chat.send("/slow\r")
    chat.see("begun")
    chat.send("\x03")
    chat.see("interrupted")
    chat.see(READY)
    chat.ask("Two.", r"→ 4 out")
    assert [line["user"] for line in lines(sessions(tmp_path)[0])[1:]] == ["One.", "Two."]
    assert chat.leave("/exit\r") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "editor, told",
    [
        ("vi 'unbalanced", r"cannot start the editor .*: No closing quotation"),
        ("nosuch-editor", r"cannot start the editor .*: No such file or directory"),
        ("false", r"the editor 'false' ended with exit code 1: message unchanged"),
    ],
)
def test_an_editor_that_fails_is_an_error_and_costs_no_text(start, tiny_folder, editor, told):
    """By the command and by the keys, which opened another editor, or printed a traceback of prompt_toolkit."""
    chat = start(tiny_folder, env={"EDITOR": editor})
    for typed in ("/edit a long thought\r", "a long thought\x18\x05"):
        chat.send(typed)
        chat.see(rf"error: {told}\nhint: set EDITOR\n> a long thought$")
        chat.send("\x03")
        chat.see(READY)
        chat.clear()
    assert chat.leave("\x04") == 0


def test_retry_keeps_history_alternating(fresh):
    fresh.ask("Tell me.", STATUS.format(r"\d+", 512))
    fresh.ask("/retry", r"^  1 new \+ \d+ reused → 12 out")
    fresh.ask("/undo", "0 left")


def test_save_and_load_with_cache_and_refusal_of_another_models(fresh, tmp_path):
    fresh.ask("My name is Zorbla.", STATUS.format(r"\d+", 512))
    cached = int(fresh.text.split("cache ")[1].split("/")[0])
    file = tmp_path / "talk.jsonl"
    fresh.ask(f"/save {file} --kv", rf"saved 1 turn to .*cache of {cached} tokens")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    fresh.ask("/clear", "empty")
    fresh.ask(f"/load {file}", rf"loaded 1 turn · cache of {cached} tokens")
    # Without its cache every token would be new.
    fresh.ask("/retry", r"^  1 new \+ [1-9]\d reused")
    mine = lines(file)[0]["fingerprint"]
    file.write_text(file.read_text().replace(mine, "0123456789abcdef"))
    fresh.ask("/clear", "empty")
    fresh.ask(
        f"/load {file}", rf"loaded 1 turn · cache refused: .*0123456789abcdef, this is {mine}"
    )
    fresh.ask("Hello.", STATUS.format(r"\d+", 512))
    (tmp_path / "broken.jsonl").write_text("{}\n")
    fresh.ask(f"/load {tmp_path}/broken.jsonl", "is not a nanokv session")
    fresh.ask(
        "/save /dev/full",
        r"session not saved: no space \(need [\d.]+ k?B\).*\nhint: choose another file",
    )
    fresh.ask(
        "/save /proc/x",
        r"session not saved: No such file or directory \(/proc/x\)\nhint: choose another file",
    )
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode), "a device must never be replaced by a file"


@pytest.mark.slow
def test_two_ranks_save_their_parts_of_the_cache_and_take_them_over_again(
    start, tiny_folder, tmp_path
):
    flags, file = ("-n", "12", "-t", "0", "--tensor-parallel", "2"), tmp_path / "talk.jsonl"
    first = start(tiny_folder, *flags, columns=200)
    first.ask("My name is Zorbla.", STATUS.format(r"\d+", 512))
    cached = int(first.text.split("cache ")[1].split("/")[0])
    first.ask(
        f"/save {file} --kv", rf"saved 1 turn .*cache of {cached} tokens .*the parts of 1 more rank"
    )
    first.ask(f"/save {file} --kv --force", "saved 1 turn")
    first.send("\x04")
    second = start(tiny_folder, *flags, columns=200)
    second.ask(f"/load {file}", rf"loaded 1 turn · cache of {cached} tokens")
    second.ask("/retry", r"^  1 new \+ [1-9]\d reused")
    second.send("\x04")
    alone = start(tiny_folder, "-n", "12", columns=200)
    alone.ask(
        f"/load {file}",
        "loaded 1 turn · cache refused: it was saved by 2 ranks, this is one process",
    )
    alone.ask("Hello.", STATUS.format(r"\d+", 512))


def test_save_asks_before_it_replaces_a_file(fresh, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    fresh.clear()
    # The second line is no answer to the question.
    fresh.send(f"/save {file}\r/set top_k 5\r")
    fresh.see(r"notes\.txt would be replaced\. Go on\? y/N *$")
    fresh.send("n\n")
    fresh.see(r"notes\.txt would be replaced; nothing was written\nhint: --force, or another name")
    fresh.see(r"^> /set top_k 5$")
    assert file.read_text() == "mine"
    fresh.send("\x03")
    fresh.clear()
    fresh.send(f"/save {file}\r")
    fresh.see(r"Go on\? y/N *$")
    fresh.send("y\n")
    fresh.see(r"saved 0 turns to")
    assert lines(file)[0]["format"] == "nanokv-session-1"
    fresh.ask(f"/save {file} --force", r"saved 0 turns to")


def test_ctrl_d_leaves_with_the_session_on_disk(chat):
    """Last test of the shared chat."""
    chat.ask("Bye then.", STATUS.format(r"\d+", 512))
    assert chat.leave("\x04") == 0
    assert re.search(r"session saved · nanokv chat -m \S+ .*--resume", chat.text)
    (path,) = sessions(chat.home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    last = lines(path)[-1]
    assert (
        last["user"] == "Bye then." and last["settings"]["max_new_tokens"] == 12 and "seed" in last
    )


# --- Ctrl-C, signals, resume ------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_half_answer_and_the_chat_and_resume_goes_on(start, long_folder, tmp_path):
    chat = start(long_folder, "-n", "50000", "--no-loop-guard")
    chat.send("Tell me everything.\r")
    chat.see(r"everything\.\n.{60}")  # the answer is on its way
    chat.send("\x03")
    waited = chat.see(r"\[interrupted · /continue or /retry\]")
    assert waited < 1.0, f"Ctrl-C was answered after {waited:.2f} s"
    # The second half of a double press: swallowed.
    chat.send("\x03")
    chat.see(READY)
    assert "Ctrl-C again" not in chat.text
    (path,) = sessions(tmp_path)
    saved = lines(path)[-1]
    assert saved["finish_reason"] == "interrupted" and len(saved["answer"]) > 20

    chat.clear()
    chat.send("some text")
    chat.see("> some text")
    pause(chat, 0.5)
    chat.send("\x03")  # clears the text
    chat.see(READY, unseen="some text")
    chat.send("\x03")
    chat.see("Ctrl-C again or Ctrl-D to leave")
    assert chat.leave("\x03") == 130
    assert "session saved" in chat.text

    with open(path, "a") as file:
        file.write('{"user": "torn')  # the machine died while it wrote
    again = start(long_folder, "--resume", "-n", "8")
    again.see(r"the last line was torn, 14 bytes dropped")
    again.see(rf"resumed {path.stem} · 1 turn")
    again.see(r"^> Tell me everything\.\n(.+\n)*.*\[interrupted · /continue or /retry\]")
    again.see(READY)
    again.ask("/continue", r"→ 8 out")
    assert again.leave("\x04") == 0
    assert path.read_text().count("torn") == 0 and "history" in lines(path)[-1]
    assert len(lines(path)[-1]["history"][1]["content"]) > len(saved["answer"].rstrip("\ufffd"))


def pause(chat, seconds):
    """Let half a second go by, because the program measures it: reads the screen meanwhile."""
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chat.pump(0.05)


def test_ctrl_c_during_a_long_prefill_answers_and_takes_the_message_back(start, long_folder):
    chat = start(long_folder, "-n", "8")
    chat.paste("\n".join("word " * 12 for _ in range(900)))
    chat.see(r"\[pasted 900 lines, [\d,]+ tokens\]")
    chat.send("\r")
    chat.see(r"prefill [\d,]+/[\d,]+")  # shown after a second
    chat.send("\x03")
    waited = chat.see(r"stopped before the first token")
    assert waited < 2.0, f"Ctrl-C was answered after {waited:.2f} s"
    chat.see(r"^> \[pasted 900 lines")
    assert not [line for line in chat.text.splitlines() if line.startswith("  word")], (
        "a paste is never echoed twice"
    )


def test_sigterm_during_an_answer_saves_it_and_restores_the_terminal(start, long_folder, tmp_path):
    chat = start(long_folder, "-n", "50000", "--no-loop-guard", wait=None)
    before = termios.tcgetattr(chat.child.child_fd)
    chat.see(READY)
    chat.send("Tell me everything.\r")
    chat.see(r"everything\.\n.{60}")
    chat.signal(signal.SIGTERM)
    while chat.pump():
        pass
    assert termios.tcgetattr(chat.child.child_fd)[:4] == before[:4]
    assert chat.leave() == 143
    assert lines(sessions(tmp_path)[0])[-1]["finish_reason"] == "interrupted"


def test_hang_up_at_the_prompt_and_ctrl_z_with_fg(start, tiny_folder, tmp_path):
    """Under a shell with job control: Ctrl-Z stops, fg draws the prompt again, SIGHUP leaves with 143."""
    shell = Terminal(
        ["bash", "--norc", "--noprofile", "-i"], {"XDG_STATE_HOME": str(tmp_path), "PS1": "shell$ "}
    )
    try:
        shell.see(r"shell\$")
        shell.send(" ".join(chat_argv(tiny_folder, "-n", "4")) + "\r")
        shell.see(READY)
        shell.ask("One.", r"→ 4 out")
        shell.send("half a line")
        shell.see("> half a line")
        shell.send("\x1a")
        shell.see(STOPPED)
        shell.send("clear; fg; echo code=$?\r")
        shell.see("> half a line", unseen=STOPPED)
        pid = int(next(p for p in children(shell.child.pid)))
        os.kill(pid, signal.SIGHUP)
        shell.see(r"code=143")
    finally:
        shell.stop()
    assert lines(sessions(tmp_path)[0])[-1]["user"] == "One."


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()


def test_ctrl_c_while_loading_leaves_with_130(start, tiny_folder):
    chat = start(tiny_folder, wait=r"nanokv 0\.")  # the banner comes before torch is imported
    chat.send("\x03")
    assert chat.leave() == 130
    assert "Traceback" not in chat.text


# --- typed ahead ------------------------------------------------------------------------------------------------------


@pytest.fixture
def talker(start, long_folder):
    """A chat whose every answer has 600 tokens, a second or more, and an answer on its way."""
    chat = start(long_folder, "-n", "600", "--no-loop-guard")
    chat.send("Tell me everything.\r")
    chat.see(r"everything\.\n.{60}")
    return chat


def users(tmp_path):
    return [line["user"] for line in lines(sessions(tmp_path)[0])[1:]]


def test_lines_typed_ahead_are_sent_one_after_the_other_and_commands_are_commands(talker, tmp_path):
    """Echoed into the answer, Enter as a newline, two lines as one message, /cache as a message: all of that was so."""
    talker.send("the second\r/set top_k 7\rhalf a thi")
    talker.see(r"(?s)> the second\n.*→ 600 out.*\n> /set top_k 7\ntop_k 7\n> half a thi$")
    first = talker.raw.index(b"reused")  # the status line of the first answer
    for typed in (b"the second", b"/set top_k 7", b"half a thi"):
        assert typed not in talker.raw[:first], "typed text was echoed into the answer"
    talker.send("rd\r")
    talker.see(r"(?s)> half a third\n.*→ 600 out")
    talker.see(READY)
    assert users(tmp_path) == ["Tell me everything.", "the second", "half a third"]


@pytest.mark.slow
def test_a_paste_during_an_answer_is_one_message_and_editing_keys_work(talker, tmp_path):
    talker.paste("one\r\ntwo\r\n")
    talker.send("threee\x7f\r")
    talker.see(r"(?s)> one\n  two\n  three\n.*→ 600 out")
    talker.see(READY)
    assert users(tmp_path) == ["Tell me everything.", "one\ntwo\nthree"]


def test_ctrl_c_sends_nothing_that_was_typed_ahead(talker, tmp_path):
    talker.send("the second\r/clear\rthird\r")
    talker.send("\x03")
    talker.see(r"\[interrupted · /continue or /retry\]")
    # In the prompt, to be sent or taken away by hand.
    talker.see(r"^> the second\n  /clear\n  third$")
    pause(talker, 0.6)
    assert users(tmp_path) == ["Tell me everything."]
    # A command is not sent to the model as text by the way.
    talker.send("\r")
    talker.see(r"line 2 is /clear, a command\. Send it to the model as text\? y/N *$")
    talker.send("n\n")
    talker.see(r"y/N n\n> the second\n  /clear\n  third$")
    assert users(tmp_path) == ["Tell me everything."]
    talker.send("\x03")
    talker.see(r"y/N n\n> *$")
    talker.ask("/undo", "forgot the last turn; 0 left")


def test_typed_ahead_answers_no_question_and_is_held_while_a_message_is_back(talker, tmp_path):
    talker.send("a <|im_end|> b\ry\r")
    talker.see(r"message contains <\|im_end\|>, a control token\. Send it as one\? y/N *$")
    pause(talker, 0.3)
    assert users(tmp_path) == ["Tell me everything."]
    talker.send("n\n")
    talker.see(r"y/N n\n> a <\|im_end\|> b\n  y$")
    pause(talker, 0.3)
    assert users(tmp_path) == ["Tell me everything."]


@pytest.mark.slow
def test_an_error_sends_nothing_that_was_typed_ahead(talker, tmp_path):
    talker.send("/nosuch\rmore\r")
    talker.see(r"(?s)no command /nosuch\n.*> more$")
    pause(talker, 0.3)
    assert users(tmp_path) == ["Tell me everything."]
    # The Enter after "more" is kept: two lines, not "moreof it".
    talker.send("of it")
    talker.see(r"> more\n  of it$")


def test_typing_while_the_model_loads_is_kept(start, tiny_folder, tmp_path):
    chat = start(tiny_folder, "-n", "4", wait=None)
    chat.send("One.\r")  # before the program has even begun
    chat.see(r"nanokv 0\.")
    chat.send("Two.\r/set top_k 3\r")
    chat.see(r"(?s)> One\..*→ 4 out.*> Two\..*→ 4 out.*> /set top_k 3\ntop_k 3\n>")
    assert users(tmp_path) == ["One.", "Two."]


def modes(chat):
    """Input, output, control and local flags, as `stty` shows them."""
    return termios.tcgetattr(chat.child.child_fd)[:4]


COOKED = termios.ECHO | termios.ICANON


@pytest.mark.slow
def test_the_terminal_is_as_before_after_every_way_out(start, tiny_folder):
    argv = chat_argv(tiny_folder, "-n", "4")
    program = BROKEN.replace("raise RuntimeError", "raise BaseException")
    for leave, code in (("/exit\r", 0), ("\x04", 0), ("/boom\r", 1)):
        chat = start(tiny_folder, wait=None, argv=[argv[0], "-c", program, *argv[3:]])
        before = modes(chat)
        chat.see(READY)
        assert not modes(chat)[3] & COOKED and before[3] & COOKED == COOKED
        chat.ask("One.", "→ 4 out")
        chat.send(leave)
        while chat.pump():
            pass
        assert modes(chat) == before, leave
        assert chat.raw.rfind(b"\x1b[?2004l") > chat.raw.rfind(b"\x1b[?2004h"), (
            "pastes are still marked"
        )
        assert chat.leave() == code


@pytest.mark.slow
def test_an_editor_gets_the_terminal_as_the_shell_had_it_and_gives_it_back(
    start, tiny_folder, tmp_path
):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nstty -a > "$0.modes"\n')
    editor.chmod(0o755)
    chat = start(tiny_folder, "-n", "4", env={"EDITOR": str(editor)})
    chat.send("/edit text\r")
    chat.see(r"> text$")
    during = (tmp_path / "editor.modes").read_text().split()
    assert {"icanon", "echo", "isig", "icrnl"} <= set(during)
    assert not modes(chat)[3] & COOKED


@pytest.fixture
def shell(tmp_path):
    """dash: a shell that leaves the terminal's modes to its programs (bash repairs them, and would hide a mistake)."""
    if not shutil.which("dash"):
        pytest.skip("no dash here")
    env = {"XDG_STATE_HOME": str(tmp_path), "PS1": "shell$ ", "NANOKV_NO_HISTORY": "1"}
    shell = Terminal(["dash", "-i"], env)
    shell.see(r"shell\$")
    yield shell
    shell.stop()


def test_ctrl_z_during_an_answer_hands_the_terminal_back_and_fg_takes_it_again(
    shell, long_folder, tmp_path
):
    before = modes(shell)
    shell.send(" ".join(chat_argv(long_folder, "-n", "600", "--no-loop-guard")) + "\r")
    shell.see(READY)
    shell.send("Tell me everything.\r")
    shell.see(r"everything\.\n.{60}")
    shell.send("ahead")
    shell.send("\x1a")
    shell.see(STOPPED)
    assert modes(shell) == before
    shell.send("clear; fg\r")
    shell.see(r"(?s)\A.*-m nanokv chat", unseen=STOPPED)
    while modes(shell)[3] & COOKED:
        shell.pump()
    shell.send(" more")
    shell.see(r"(?s)→ 600 out.*^> ahead more$")
    assert b"ahead" not in shell.raw[: shell.raw.index(b"reused")], (
        "typed text was echoed into the answer"
    )
    shell.send("\x1a")  # at the prompt
    shell.see(STOPPED)
    assert modes(shell) == before
    shell.send("clear; fg; echo code=$?\r")
    shell.see("> ahead more", unseen=STOPPED)
    shell.send("\x03\x04")
    shell.see(r"code=0")
    assert modes(shell) == before


STOPPED_WHILE_READING = """
import select, signal
from nanokv.apps.cli.chat.keyboard import open_keyboard

with open_keyboard() as keyboard:
    read_keys = keyboard.input.read_keys

    def stopped():
        taken = read_keys()
        print("half", flush=True)
        select.select([keyboard.fd], [], [])
        signal.raise_signal(signal.SIGTSTP)
        keyboard.input.read_keys = read_keys
        return taken

    keyboard.input.read_keys = stopped
    print("reads", flush=True)
    while True:
        keyboard.poll()
"""


def test_ctrl_z_while_keys_are_read_leaves_none_of_them_to_the_shell(shell, tmp_path):
    """The keyboard stopped at once, and what it had not read yet became the beginning of the next command line."""
    (tmp_path / "reads.py").write_text(STOPPED_WHILE_READING)
    shell.send(f"{sys.executable} {tmp_path / 'reads.py'}\r")
    shell.see("^reads *$")  # the command may break before reads.py
    shell.send("typed ")
    shell.see("^half")
    shell.send("ahead")
    shell.see(STOPPED)
    shell.send("echo a clean line\r")
    shell.see(r"^(shell\$ )?a clean line")
    assert "not found" not in shell.text


@pytest.mark.slow
def test_an_answer_goes_on_in_the_background_and_its_prompt_waits_for_fg(
    shell, long_folder, tmp_path
):
    before = modes(shell)
    shell.send(" ".join(chat_argv(long_folder, "-n", "600", "--no-loop-guard")) + "\r")
    shell.see(READY)
    shell.send("Tell me everything.\r")
    shell.see(r"everything\.\n.{60}")
    shell.send("\x1a")
    shell.see(STOPPED)
    shell.send("clear; bg\r")
    shell.see(r"→ 600 out")
    assert modes(shell) == before, "a job in the background changed the shell's terminal"
    shell.send("echo still a shell\r")
    shell.see(r"^still a shell|[^o] still a shell")
    shell.send("clear; fg\r")
    shell.see(READY)
    while modes(shell)[3] & COOKED:
        shell.pump()
    shell.send("/undo\r")
    shell.see("forgot the last turn; 0 left")
    shell.see(READY)
    shell.send("\x04")
    shell.see(r"^shell\$ *$")
    assert modes(shell) == before


# --- plain terminals, loops, full disks -------------------------------------------------------------------------------


def test_dumb_terminal_gets_no_escape_at_all(start, tiny_folder):
    chat = start(tiny_folder, "-n", "8", env={"TERM": "dumb", "NO_COLOR": "1"}, wait=r"^> ?")
    chat.raw_mode()
    chat.send("My name is Zorbla.\r")
    chat.see(r"→ 8 out")
    chat.raw_mode()
    chat.send("/cache\r")
    chat.see(r"^layer  2 u+a+ ")
    chat.raw_mode()
    assert chat.leave("\x04") == 0
    assert b"\x1b" not in chat.raw


def test_ctrl_c_in_a_dumb_terminal_clears_the_line_and_leaves_as_in_any_other(
    start, tiny_folder, tmp_path
):
    """It came back as a text that nobody saw, before what was typed next; two presses never left."""
    chat = start(tiny_folder, "-n", "4", env={"TERM": "dumb"}, wait=r"^> ?")
    chat.raw_mode(without=termios.ISIG)
    chat.send("taken back")
    chat.see("> taken back")
    chat.send("\x03")
    chat.see(r"> taken back\n> *$")
    chat.raw_mode(without=termios.ISIG)
    chat.send("One.\r")
    chat.see(r"→ 4 out.*\n> *$")
    chat.raw_mode(without=termios.ISIG)
    chat.send("\x03")
    chat.see("Ctrl-C again or Ctrl-D to leave\n> *$")
    chat.raw_mode(without=termios.ISIG)
    assert chat.leave("\x03") == 130
    assert users(tmp_path) == ["One."]


def test_no_color_has_no_colour_and_the_letters_carry_the_meaning(start, tiny_folder):
    import re

    chat = start(tiny_folder, "-n", "8", env={"NO_COLOR": "1"})
    chat.ask("My name is Zorbla.", r"→ 8 out")
    chat.ask("/cache", r"^layer  2 u+a+ ")
    assert not re.findall(rb"\x1b\[(?:\d+;)*(?:2|3\d|4\d|9\d|10\d|38;[\d;]+|48;[\d;]+)m", chat.raw)


def test_a_repetition_loop_is_stopped_with_a_notice(start, long_folder):
    """The endless random model falls into a loop by itself; --no-loop-guard is what the tests above need."""
    chat = start(long_folder, "-n", "20000")
    chat.send("Tell me everything.\r")
    chat.see(r"\[stopped: the same tokens 20 times in a row · /continue\]", deadline=90)


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))


def test_full_disk_costs_no_old_turn_and_the_chat_goes_on(start, tiny_folder, tmp_path):
    chat = start(
        tiny_folder, "-n", "8", preexec=limit_file_size, env={"PYTHONDONTWRITEBYTECODE": "1"}
    )
    chat.ask("One.", r"→ 8 out")
    (path,) = sessions(tmp_path)
    assert len(lines(path)) == 2
    chat.ask("A longer message. " * 20, r"session not saved: no space \(need [\d.]+ k?B\)")
    assert len(lines(path)) == 2, "every line on the disk is whole"
    chat.ask("Three.", r"session not saved: no space")
    assert len(lines(path)) == 2 and sys.platform
