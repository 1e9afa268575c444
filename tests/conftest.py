"""Fixtures that every test file may use: published Qwen3 files (never part of the repository) and a tiny checkpoint."""

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from cli_helpers import FakeStdin
from sampling import pytest_collection_modifyitems  # noqa: F401  (a hook)

# A background job or nohup ignores these, and children would inherit the deafness that tests then take for a fault.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (getattr(signal, "SIGHUP", None), signal.SIG_DFL),
):
    if number is not None and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# The kernels are built once, before the first test, and each command finds them: tests see what a user with a compiler
# sees. No command starts a compiler by itself; a test of that sets NANOKV_KERNELS=on and a NANOKV_CACHE of its own.
os.environ.setdefault("NANOKV_KERNELS", "explicit")

# Answers are compared with those of a CPU: where nobody says a device, a model would go to the GPU of this machine.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# Triton runs its kernels on the CPU, program by program; read when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# jsonschema would compile a grammar of addresses, for a format that no schema here has: 2 s of each process.
sys.modules.setdefault("rfc3987_syntax", None)

# Pytest-xdist sets it in its processes: what is printed would be fitted to that.
os.environ.pop("COLUMNS", None)

BROWSER_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--force-device-scale-factor=1",
)


def pytest_configure(config):
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        from every_test_ran import EveryTestRan

        config.pluginmanager.register(EveryTestRan())


def pytest_collection_finish():
    """torch, transformers and 7,000 items stay to the end: the garbage collector need not look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """One of several processes takes turns with the others."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    from taking_turns import turn

    with turn(alone=item.get_closest_marker("serial") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def _environment_stays():
    """Commands that run inside the test process may set HF_HUB_OFFLINE; the next test must not see it."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_built():
    from nanokv.fast import building, private

    if building.mode() != "off" and (compiler := building.find_compiler()):
        # Then everything runs on torch's operators.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            building.obtain(compiler, private.is_whole)


@pytest.fixture
def cli(monkeypatch, capsys):
    """cli(*argv, stdin=b"…") → (exit code, stdout, stderr) of main in this process."""
    from nanokv.apps.cli import main

    for name in ("NANOKV_MODEL", "NANOKV_THREADS", "NANOKV_DEBUG", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*argv, stdin=b"", tty=False):
        monkeypatch.setattr("sys.stdin", FakeStdin(stdin, tty))
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="session", autouse=True)
def _notebooks_are_solved_once(pytestconfig, tmp_path_factory):
    """By all processes together."""
    if hasattr(pytestconfig, "workerinput"):
        from solved_notebooks import SHARED

        SHARED.append(tmp_path_factory.getbasetemp().parent)


@pytest.fixture(scope="session")
def qwen3_files() -> Path:
    """Folder with the published Qwen3 configs and tokenizer: $NANOKV_QWEN3, else ../shared/qwen3."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "qwen3"
    folder = Path(os.environ.get("NANOKV_QWEN3") or beside)
    if not folder.is_dir():
        pytest.skip(f"the published Qwen3 files are not in {folder} (set NANOKV_QWEN3)")
    return folder


@pytest.fixture(scope="session")
def api() -> dict:
    """OpenAI's description of its API, as JSON Schema: $NANOKV_OPENAI, else ../shared/openai/openapi-subset.json."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "openai" / "openapi-subset.json"
    path = Path(os.environ.get("NANOKV_OPENAI") or beside)
    if not path.is_file():
        pytest.skip(f"OpenAI's API description is not at {path} (set NANOKV_OPENAI)")
    from api_schema import with_null

    return with_null(json.loads(path.read_text()))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny random Qwen3 checkpoint, written once a session. Read only: copy it before changing a file."""
    from tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-random")


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    """Its model and tokenizer."""
    import nanokv

    return nanokv.load(tiny_folder)


@pytest.fixture
def nothing_is_left(request):
    """After each test: no request, no place and no page of a shared server is taken."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        server.wait(lambda: server.free)


@pytest.fixture(scope="module")
def server(loaded):
    """A server of it that answers over HTTP, in this process."""
    from serving import Serving

    with Serving(*loaded) as server:
        yield server


@pytest.fixture
def scripted(monkeypatch, loaded):
    """scripted(text): the model says this text, whatever its logits are. Or a function of the prompt's text."""

    import torch

    tokenizer = loaded[1]

    def script(text):
        @cache
        def ids(prompt: tuple[int, ...]) -> list[int]:
            said = text if isinstance(text, str) else text(tokenizer.decode(list(prompt)))
            return [*tokenizer.encode(said), tokenizer.eos_token_id]

        def draw(logits, values, generator, prompt, tokens):
            return torch.tensor([ids(tuple(prompt))[len(tokens)]])

        monkeypatch.setattr("nanokv.decoding.draw.draw", draw)

    return script


@pytest.fixture(scope="session")
def endless_folder(tiny_folder, tmp_path_factory) -> Path:
    """The same weights with no eos id and 100,000 positions: it never stops by itself, for tests that interrupt it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "endless"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}) + "\n")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (folder / "config.json").write_text(json.dumps(config) + "\n")
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A real Chromium without a window, for the pages that nanokv writes."""
    browser = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    control = shutil.which("chromedriver")
    if not browser or not control:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    from selenium import webdriver

    from waiting import goes_on_when_drawn

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*BROWSER_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    os.environ["SE_OFFLINE"] = "true"
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(control))
    goes_on_when_drawn(driver)
    yield driver
    driver.quit()


@pytest.fixture(params=["kernels", "torch"])
def code(request, monkeypatch):
    """With the native kernels, and with torch's operators alone."""
    from nanokv.fast import native

    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: (None, "torch operators (test)"))
    elif native.library()[0] is None:
        pytest.skip(f"no native kernels here: {native.library()[1]}")
    return request.param
