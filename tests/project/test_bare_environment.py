"""A user's environment that lacks what programs take for granted: streams, a home folder, memory, sane variables.

Every command answers with at most two lines and exit code 2, or does its work; never with "this is a bug".
"""

import os
import shutil
import subprocess

import pytest

from cli_helpers import command, environment
from nanokv.apps.cli.common import loading
from nanokv.apps.cli.common.ways_out import describe
from nanokv.errors import NanoKVError

COMMANDS = {  # each as short as it can be; FOLDER is a random model, OUT an empty folder
    "help": "--help",
    "env": "env",
    "memory": "memory",
    "models": "models",
    "replay": "replay TRACE",
    "reuse": "reuse",
    "blend": "blend --talks 1",
    "chat --list": "chat --list",
    "course claims": "course claims",
    "generate": "generate -p Once -m FOLDER -n 2 -t 0",
    "generate json": "generate -p Once -m FOLDER -n 2 -t 0 --json",
    "chat": "chat -m FOLDER -n 2 -t 0",
    "chat jsonl": "chat -m FOLDER -n 2 -t 0 --jsonl",
    "batch": "batch - -m FOLDER -n 2 -t 0",
    "trace": "trace -p Once -m FOLDER -n 1 --no-uncached --repeat 1 -o OUT/page.html",
    "live": "live -o OUT/page.html",
    "bench": "bench -m FOLDER --contexts 8 --steps 1 --repeat 1 --weights plain",
    "profile": "profile -m FOLDER --tokens 8",
    "verify": "verify FOLDER --alone",
    "convert": "convert FOLDER OUT/new",
}
QUIET = ("help", "memory", "batch")  # run in `make test`, the others in `make check`
ALL = [name if name in QUIET else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
READERS = ("chat", "chat jsonl", "batch")
INPUT = {"batch": b'{"prompt": "Once"}\n'}
NOBODY = 54321  # a user id that no system knows


def run(name, folder, tmp_path, redirect="", env=None, wrap=(), limit=""):
    """The command through bash, so that the redirection is a user's own: `>&-`, `2>/dev/full`."""
    words = [
        word.replace("FOLDER", str(folder))
        .replace("OUT", str(tmp_path))
        .replace("TRACE", str(tmp_path / "trace.jsonl"))
        for word in COMMANDS[name].split()
    ]
    line = f"{limit} exec {' '.join([*wrap, *command(*words)])} {redirect}"
    env = environment({"XDG_STATE_HOME": str(tmp_path)} | (env or {}))
    env = {key: value for key, value in env.items() if value is not None}
    sessions = tmp_path / "nanokv" / "sessions"
    sessions.mkdir(parents=True, exist_ok=True)
    # Something for chat --list to print.
    (sessions / "one.jsonl").write_text('{"format": "nanokv-session-1"}\n')
    (tmp_path / "trace.jsonl").write_text('{"tokens": [1, 2]}\n')  # for replay
    stdin = INPUT.get(name, b"Once\n" if name in READERS else b"")
    done = subprocess.run(
        ["bash", "-c", line], input=stdin, env=env, capture_output=True, timeout=300, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def assert_refused(code, err, *told):
    assert code == 2 and "this is a bug" not in err and "Traceback" not in err, err
    assert "nanokv: error: " in err and all(text in err for text in told), err


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_stdout_closed_or_full_is_exit_code_2(name, tiny_folder, tmp_path):
    code, _, err = run(name, tiny_folder, tmp_path, ">&-")
    assert_refused(code, err, "stdout is closed")
    again = "--force" if name in ("trace", "live", "convert") else ""
    code, _, err = run(name, tiny_folder, tmp_path, f">/dev/full {again}")
    assert_refused(code, err, "No space left on device")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_nobody_reads_changes_nothing(name, redirect, tiny_folder, tmp_path):
    code, out, _ = run(name, tiny_folder, tmp_path, redirect)
    assert code == 0 and out


@pytest.mark.parametrize("name", ALL)
def test_a_closed_stdin_is_named_by_whoever_reads_it(name, tiny_folder, tmp_path):
    code, out, err = run(name, tiny_folder, tmp_path, "<&-")
    if name in READERS:
        assert_refused(code, err, "stdin is closed", "hint: ")
    else:
        assert code == 0 and out


def test_a_dash_asks_for_a_stdin_that_is_there(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(COMMANDS, "dash", "generate - -m FOLDER -n 2")
    code, _, err = run("dash", tiny_folder, tmp_path, "<&-")
    assert_refused(code, err, "stdin is closed")


@pytest.mark.parametrize(
    "name", ["env", "memory", pytest.param("generate", marks=pytest.mark.slow), "chat --list"]
)
def test_a_user_without_a_home(name, tmp_path, monkeypatch):
    """Raw text, without a chat template: where root's own folder holds Python, nobody can start no process of it."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv to become nobody")
    monkeypatch.setitem(COMMANDS, "generate", "generate --raw -p Once -m FOLDER -n 2 -t 0")
    wrap = ("setpriv", f"--reuid={NOBODY}", "--clear-groups")
    env = {"HOME": None, "XDG_STATE_HOME": None}
    code, out, err = run(name, "tiny", tmp_path, env=env, wrap=wrap)
    if name == "chat --list":
        assert_refused(code, err, "the home folder is unknown", "hint: set HOME")
    else:
        assert code == 0 and out, err


@pytest.mark.parametrize("value", ["²", "x", "0", "-1", "9" * 5000])
def test_a_wrong_number_of_threads_is_an_error(value, monkeypatch):
    monkeypatch.delenv("NANOKV_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(
        NanoKVError, match=r"OMP_NUM_THREADS: .* is not a number of threads"
    ) as error:
        loading.thread_count()
    assert error.value.hint == "unset OMP_NUM_THREADS" and len(str(error.value)) < 120


def test_a_list_of_threads_means_its_first(monkeypatch):
    monkeypatch.delenv("NANOKV_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert loading.thread_count() == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no set of cores")
def test_a_small_model_has_no_more_threads_than_it_can_use(monkeypatch):
    monkeypatch.delenv("NANOKV_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert loading.thread_count() == 16 == loading.thread_count(1, 1_200_000_000)
    assert [loading.thread_count(1, weights) for weights in (1000, 6_100_000, 12_200_000)] == [
        1,
        3,
        6,
    ]
    assert loading.thread_count(2, 1_200_000_000) == 1
    monkeypatch.setenv("NANOKV_THREADS", "8")  # who says a number has it
    assert loading.thread_count(1, 1000) == 8


@pytest.mark.parametrize(
    "kilobytes", [100_000, 300_000, pytest.param(450_000, marks=pytest.mark.slow)]
)
def test_an_address_space_too_small_for_torch_is_told_before_it_aborts(
    kilobytes, tiny_folder, tmp_path
):
    """At 300 MB torch raised ImportError ("this is a bug"), at 450 MB its libraries aborted the process."""
    code, out, err = run("generate", tiny_folder, tmp_path, limit=f"ulimit -v {kilobytes};")
    assert_refused(
        code, err, "torch takes about 600 MB of address space", "hint: ulimit -v unlimited"
    )
    assert out == "" and err.count("\n") == 2


def test_an_import_that_fails_is_the_installations_fault_unless_it_is_ours():
    full = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    assert describe(full) == (f"an import failed: {full}", "more memory: ulimit -v unlimited")
    assert (
        describe(ImportError("libcudnn.so.9: cannot open shared object file"))[1]
        == "install it again with pip"
    )
    assert (
        describe(ImportError("cannot import name 'x' from 'nanokv.cache'", name="nanokv.cache"))
        is None
    )
