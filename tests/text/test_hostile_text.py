"""Text of strangers on its way to a terminal: a model that answers with control characters, files named with them,
errors that quote megabytes. No command may print a character that steers a terminal or reorders text.
"""

import errno
import io
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_helpers import text_of
from nanokv.apps.cli import main
from nanokv.apps.cli.chat import transcript
from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.options import OutputOptions
from nanokv.apps.cli.common.text import to_json
from nanokv.apps.cli.common.ways_out import show_error
from nanokv.errors import NanoKVError, SessionError
from weights_loader import CheckpointError
from weights_loader.strict import LONGEST_MESSAGE

EVIL = "\x9b31m\x7f\u202eabc\u2066\x1b]0;title\x07\u2028\x85"
STEERS = {
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *map(chr, range(0x202A, 0x202F)),
    *map(chr, range(0x2066, 0x206A)),
} - {"\n", "\t"}
SPLITS = {"\u2028", "\u2029"}  # some readers end a line there


def steering(text: str) -> set:
    return STEERS & set(text)


@pytest.fixture(scope="module")
def evil_folder(tiny_folder, tmp_path_factory):
    """A model that always answers with EVIL: with a final norm of zero all logits are 0, and the first id wins."""
    folder = tmp_path_factory.mktemp("evil") / f"evil{EVIL.replace('/', '')}"
    shutil.copytree(tiny_folder, folder)
    fields = json.loads((folder / "tokenizer.json").read_text())
    first = next(token for token in fields["added_tokens"] if token["id"] == 0)
    old = first["content"]
    first |= {"content": EVIL, "special": False}
    vocab = fields["model"]["vocab"]
    vocab[EVIL] = vocab.pop(old)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2], EVIL: EVIL}))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def run(evil_folder, capsys, monkeypatch, tmp_path):
    """run(command, …, stdin=b"") → (exit code, stdout, stderr) with that model."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def call(*argv, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main([*argv, "-m", str(evil_folder)])
        return code, *capsys.readouterr()

    return call


REQUEST = json.dumps({"prompt": "Hi", "max_new_tokens": 3}).encode()
BAD_LINES = (
    b'{"prompt": "Hi", "\xc2\x9b31m\xe2\x80\xae": 1}\n{"prompt": ["\x7f", "'
    + b"x" * 100_000
    + b'"]}\n'
)
JSON_COMMANDS = {
    "chat": (["chat", "--jsonl", "-n", "3"], b"Hi\n"),
    "generate": (["generate", "Hi", "-n", "3", "--json"], b""),
    "beams": (["generate", "Hi", "-n", "3", "--json", "--beams", "2"], b""),
    "batch": (["batch", "-"], REQUEST),
    "memory": (["memory", "--json"], b""),
    "env": (["env", "--json"], b""),
    "profile": (["profile", "--json", "--tokens", "8", "--weights", "plain"], b""),
}
TEXT_COMMANDS = {
    "chat": (["chat", "-n", "3"], b"Hi\n"),
    "generate": (["generate", "Hi", "-n", "3", "--raw"], b""),
    "generate as a message": (["generate", "Hi", "-n", "3"], b""),
    "beams": (["generate", "Hi", "-n", "3", "--beams", "2"], b""),
    "memory": (["memory"], b""),
    "env": (["env"], b""),
    "profile": (["profile", "--tokens", "8", "--weights", "plain"], b""),
    "bench": (
        ["bench", "--contexts", "8", "--steps", "2", "--repeat", "1", "--weights", "plain"],
        b"",
    ),
    "verify": (["verify", "--alone"], b""),
}


@pytest.mark.parametrize("name", JSON_COMMANDS)
def test_json_on_a_line_steers_no_terminal(run, name):
    """chat --jsonl printed U+009B, DEL, U+202E and U+2028 as they are."""
    argv, stdin = JSON_COMMANDS[name]
    code, out, err = run(*argv, stdin=stdin)
    assert code == 0, err
    assert not (STEERS | SPLITS) & set(out) and not (STEERS | SPLITS) & set(err)
    assert out.count("\n") == 1
    found = json.loads(out)
    if name in ("chat", "generate", "batch"):
        assert text_of(found) == EVIL * 3


@pytest.mark.parametrize("name", TEXT_COMMANDS)
def test_text_steers_no_terminal(run, name):
    argv, stdin = TEXT_COMMANDS[name]
    code, out, err = run(*argv, stdin=stdin)
    assert code in (0, 1) if name == "verify" else code == 0, err
    assert steering(out) == steering(err) == set()
    if name in ("chat", "generate", "generate as a message"):
        assert "\\x9b31m␡\\u202eabc\\u2066␛]0;title␇" in out


def test_a_list_of_models_steers_no_terminal(evil_folder, tmp_path, monkeypatch, capsys):
    """What a config in the cache says is printed as a reason, and the folder's own name is a stranger's too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "\x1b[2Jhub"))
    root = tmp_path / "\x1b[2Jhub" / "models--org--evil"
    folder = root / "snapshots" / ("a" * 40)
    shutil.copytree(evil_folder, folder)
    (root / "refs").mkdir()
    (root / "blobs").mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": EVIL}))
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "org/evil" in out and steering(out) == set()
    assert main(["models", "--json"]) == 0
    assert not (STEERS | SPLITS) & set(capsys.readouterr().out)


def test_warnings_and_errors_of_files_steer_no_terminal(run, evil_folder, tmp_path, capsys):
    code, _, err = run("generate", "Hi", "-n", "1", "--top-k", EVIL)
    assert code == 2 and steering(err) == set()
    code, out, err = run("batch", "-", stdin=BAD_LINES)
    assert code == 2 and not (STEERS | SPLITS) & set(out) and steering(err) == set()
    assert all(len(line) < 3000 for line in out.splitlines())
    template = "{{ raise_exception('" + EVIL + "') }}"
    changes = {
        "config.json": {EVIL: EVIL * 1000},
        "tokenizer.json": {"normalizer": {"type": EVIL}},
        "tokenizer_config.json": {"chat_template": template},
    }
    for name, text in changes.items():
        folder = tmp_path / (name + EVIL.replace("/", ""))
        shutil.copytree(evil_folder, folder)
        fields = json.loads((folder / name).read_text()) | text
        (folder / name).write_text(json.dumps(fields))
        code = main(["generate", "Hi", "--chat", "-n", "1", "-m", str(folder)])
        err = capsys.readouterr().err
        assert code == 2 and steering(err) == set() and len(err.splitlines()) <= 3, err


def test_a_trace_holds_no_raw_control_character(run, tmp_path):
    code, out, err = run(
        "trace", "Hi", "-n", "2", "--no-uncached", "--repeat", "1", "-o", str(tmp_path / "t.html")
    )
    assert code == 0 and steering(out + err) == set(), err
    assert not (STEERS | SPLITS) & set((tmp_path / "t.html").read_text())


def test_a_saved_conversation_steers_no_terminal(run, tmp_path):
    folder = tmp_path / "state" / "nanokv" / "sessions"
    folder.mkdir(parents=True)
    head = transcript.header(EVIL, EVIL)
    turn = {"user": EVIL, "answer": EVIL}
    (folder / f"20260101-{EVIL.replace('/', '')}.jsonl").write_text(
        json.dumps(head) + "\n" + json.dumps(turn) + "\n"
    )
    code, out, err = run("chat", "--list")
    assert code == 0 and "20260101" in out and not (STEERS | SPLITS) & set(out + err)
    code, out, err = run("chat", "--resume", "--jsonl", "-n", "2", stdin=b"Hi\n")
    assert not (STEERS | SPLITS) & set(out + err), err


# --- one writer -------------------------------------------------------------------------------------------------------


def test_json_is_readable_and_lossless():
    text = "π 漢字 🧑\u200d🚀 e\u0301 Grüße שלום"
    assert to_json(text) == f'"{text}"'
    codes = [*range(0x250), *range(0x600, 0x620), *range(0x2000, 0x2070), 0xFEFF, 0xD800, 0x1F600]
    everything = "".join(map(chr, codes))
    written = to_json({everything: [everything]})
    assert json.loads(written) == {everything: [everything]}
    assert not (STEERS | SPLITS | {"\ufeff", "\ud800", "\u200e"}) & set(written)
    written.encode("utf-8")  # a lone surrogate could not be


def test_json_has_no_nan():
    assert (
        to_json({"a": [float("nan"), 1.5, (float("inf"),)], "b": "NaN"})
        == '{"a": [null, 1.5, [null]], "b": "NaN"}'
    )


# --- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [NanoKVError, SessionError, CheckpointError])
def test_an_error_is_as_long_as_can_be_read(kind):
    """One was 2.9 MB long: it quoted the file."""
    error = kind("begin " + "x" * 3_000_000 + " end")
    assert len(str(error)) < LONGEST_MESSAGE + 60
    assert str(error).startswith("begin xxx") and str(error).endswith("xxx end")
    assert "2,998,010 characters left out" in str(error)
    assert str(kind("y" * LONGEST_MESSAGE)) == "y" * LONGEST_MESSAGE


def test_lines_on_stderr_are_cut_in_one_place(capsys):
    plain = OutputOptions(color="never")
    for call in (
        lambda text: show_error(text, text),
        terminal.warning,
        lambda text: terminal.notice(text, plain),
    ):
        call("z" * 1_000_000 + EVIL)
        lines = capsys.readouterr().err.splitlines()
        assert lines and all(
            len(line) < LONGEST_MESSAGE + 200 and not (STEERS | SPLITS) & set(line)
            for line in lines
        )


def test_a_foreign_error_is_cut_too(capsys, monkeypatch):
    def fail(words):
        raise OSError(5, "m" * 1_000_000, "f" * 1_000_000)

    monkeypatch.setattr("nanokv.apps.cli.dispatch", fail)
    assert main(["env"]) == 2 and len(capsys.readouterr().err) < LONGEST_MESSAGE + 200


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_with_what_is_needed(tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        NanoKVError,
        match=rf"/x cannot be written: No space left on device: {tmp_path} has .* free, 7",
    ):
        with terminal.writing(tmp_path / "x", 7000):
            full()
    with pytest.raises(PermissionError), terminal.writing(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "no")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SessionError, match=rf"no space \(need \d+ B\) in {tmp_path} \(.* free\)"):
        transcript.write_whole(tmp_path / "s.jsonl", [{"a": 1}])
    import nanokv

    model, _ = nanokv.load("tiny")
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, torch.tensor([[5, 6, 7]]), cache, 0)
    with pytest.raises(
        OSError, match=rf"No space left on device; it needs [\d,]+ bytes, {tmp_path} has"
    ) as caught:
        cache.save(tmp_path / "cache")
    assert caught.value.filename == str(tmp_path / "cache")
