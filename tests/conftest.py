"""Fixtures that every test file may use: published Qwen3 files (never part of the repository) and a tiny checkpoint."""

import os
import signal
from pathlib import Path

import pytest

# A background job or nohup ignores these, and children would inherit the deafness that tests then take for a fault.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (getattr(signal, "SIGHUP", None), signal.SIG_DFL)):
    if number is not None and signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)



@pytest.fixture(autouse=True)
def _environment_stays():
    """Commands that run inside the test process may set HF_HUB_OFFLINE; the next test must not see it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def qwen3_files() -> Path:
    """Folder with the published Qwen3 configs and tokenizer: $NANOKV_QWEN3, else ../shared/qwen3."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "qwen3"
    folder = Path(os.environ.get("NANOKV_QWEN3") or beside)
    if not folder.is_dir():
        pytest.skip(f"the published Qwen3 files are not in {folder} (set NANOKV_QWEN3)")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """A tiny random Qwen3 checkpoint, written once a session. Read only: copy it before changing a file."""
    from tiny_checkpoint import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny-random")


@pytest.fixture(scope="session")
def endless_folder(tiny_folder, tmp_path_factory) -> Path:
    """The same weights with no eos id and 100,000 positions: it never stops by itself, for tests that interrupt it."""
    import json
    import shutil

    folder = tmp_path_factory.mktemp("checkpoints") / "endless"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}) + "\n")
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 100_000}
    (folder / "config.json").write_text(json.dumps(config) + "\n")
    return folder
