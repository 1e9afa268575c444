"""From the command to the first token: what a start reads, imports and waits for."""

import json
import os
import subprocess
import sys

import pytest
import torch

from cli_helpers import environment
from nanokv.apps.cli import make_parser
from nanokv.apps.cli.commands import generate
from nanokv.apps.cli.common.loading import load_model
from oracle import SHAPES
from small_model import needs_kernels
from weights_loader import CheckpointError, prefetch
from weights_loader.prefetch import Prefetch
from weights_loader.strict import read_object

COUNT = """if True:
    import collections, json, sys
    opened = collections.Counter()
    def hook(event, args):
        if event == "open" and isinstance(args[0], str) and args[0].endswith((".json", ".jinja")):
            opened[args[0].rsplit("/", 1)[1]] += 1
    sys.addaudithook(hook)
    from nanokv.apps.cli import main
    code = main(sys.argv[1:])
    heavy = [name for name in ("transformers", "sympy", "torch._dynamo", "matplotlib") if name in sys.modules]
    print(json.dumps([code, opened, heavy]), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "argv", [["generate", "Hi", "-n", "1"], ["chat", "-n", "1"]], ids=lambda argv: argv[0]
)
def test_a_start_reads_each_file_once_and_imports_no_compiler(tiny_folder, argv):
    """config.json was read 5 times and tokenizer.json 3 times: 11 MB for Qwen3."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *argv, "-m", str(tiny_folder)],
        input=b"Hi\n",
        env=environment(),
        check=True,
        capture_output=True,
        timeout=120,
    )
    code, opened, heavy = json.loads(done.stderr.splitlines()[-1])
    expected = {path.name for path in tiny_folder.glob("*.json")} - {"special_tokens_map.json"}
    assert code == 0 and opened == dict.fromkeys(expected, 1) and heavy == []


# --- weights that are read while torch is imported ------------------------------------------------------------------

FUSED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def folder_of(tmp_path, shape="G2-untied-bias", dtype=torch.float32, **options):
    """A checkpoint as transformers writes it."""
    from oracle import pair

    theirs, _ = pair(**SHAPES[shape])
    theirs.to(dtype).save_pretrained(tmp_path, **options)
    return tmp_path


def loaded(folder, prefetched, dtype=None):
    """The model alone: the folder needs no tokenizer."""
    import weights_loader

    fields = read_object(folder / "config.json")
    return weights_loader.read(folder, fields, dtype, torch.device("cpu"), prefetched)[1]


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("buffers", [1024, 1])
def test_prefetched_tensors_are_those_of_the_file(tmp_path, monkeypatch, options, buffers):
    monkeypatch.setattr(prefetch, "MOST_BUFFERS", buffers)
    folder = folder_of(tmp_path, **options)
    assert len(list(folder.glob("*.safetensors"))) > 1 or not options
    early, mapped = Prefetch(folder, "float32", FUSED), loaded(folder, None)
    found = loaded(folder, early)
    assert found.keys() == mapped.keys() and all(
        torch.equal(found[name], mapped[name]) for name in mapped
    )
    inside = {
        name for name, x in found.items() if x.untyped_storage().nbytes() == len(early.memory)
    }
    assert inside == {name for name in mapped if name.split(".")[-2] in sum(FUSED, ())}


@needs_kernels
def test_fusing_what_was_prefetched_copies_nothing(tiny_folder):
    """q, k and v lie below each other, gate and up too: the fused matrix is the same memory."""
    args = make_parser("generate", generate).parse(
        ["x", "-m", str(tiny_folder), "--dtype", "float32"]
    )
    given = generate.command_options(args)
    found = load_model(given.model, given.cache, given.output)
    for plain, fused in zip(found.plain.layers, found.model.layers, strict=True):
        for matrix, parts in ((fused.qkv, "qkv"), (fused.gate_up, ("gate", "up"))):
            own = [
                getattr(plain.self_attn if len(part) == 1 else plain.mlp, f"{part}_proj").weight
                for part in parts
            ]
            assert matrix.weight.data_ptr() == own[0].data_ptr() and torch.equal(
                matrix.weight, torch.cat(own)
            )
            assert matrix.weight.untyped_storage().nbytes() > 2 * matrix.weight.nbytes, (
                "all of them in one storage"
            )


@pytest.mark.parametrize("change", ["half", "hole", "dtype", "json", "absent"])
def test_what_looks_odd_is_left_to_the_loader(tmp_path, change):
    folder = folder_of(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if change == "half":
        path.write_bytes(data[: len(data) // 2])
    elif change == "hole":
        path.write_bytes(data + b"\0" * 8)
    elif change == "json":
        path.write_bytes(data[:8] + b"[" * length + data[8 + length :])
    elif change == "absent":
        path.unlink()
    early = Prefetch(folder, "bfloat16" if change == "dtype" else "float32", FUSED)
    assert early.places == {} and early.thread is None
    if change == "dtype":
        assert loaded(folder, early).keys() == loaded(folder, None).keys()
    else:
        with pytest.raises(CheckpointError):
            loaded(folder, early)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_among_the_files_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a.safetensors"}}')
    assert Prefetch(tmp_path, "float32", FUSED).places == {}


@pytest.mark.parametrize("how", ["replaced", "written over"])
def test_a_file_that_changed_since_is_not_mixed_with_the_old_one(tmp_path, how):
    folder = folder_of(tmp_path)
    path = folder / "model.safetensors"
    early = Prefetch(folder, "float32", FUSED)
    early.thread.join()
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") :] = bytes(
        len(data) - 8 - int.from_bytes(data[:8], "little")
    )
    if how == "replaced":
        path.unlink()
    path.write_bytes(data)
    assert not any(x.any() for x in loaded(folder, early).values())


def test_a_file_that_ends_too_soon_is_not_half_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(prefetch.os, "preadv", lambda descriptor, views, start: 0)
    folder = folder_of(tmp_path)
    early = Prefetch(folder, "float32", FUSED)
    assert all(
        x.untyped_storage().nbytes() < len(early.memory) for x in loaded(folder, early).values()
    )
    assert early.places == {}


def test_a_short_read_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """One call of the system takes at most 2 GiB."""
    real = prefetch.os.preadv
    monkeypatch.setattr(
        prefetch.os, "preadv", lambda file, views, start: real(file, [views[0][:999]], start)
    )
    folder = folder_of(tmp_path)
    early = Prefetch(folder, "float32", FUSED)
    mapped = loaded(folder, None)
    assert (
        all(torch.equal(x, mapped[name]) for name, x in loaded(folder, early).items())
        and early.places
    )


# --- what a start takes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_profile_start_says_where_the_time_goes(cli, tiny_folder):
    """Each part of the real command, from its process's start to the first token; floors beside three of them."""
    from nanokv.apps.cli.bench.start import FLOORS, PARTS

    code, out, err = cli("profile", "--start", "--repeat", "1", "-m", tiny_folder, "--json")
    assert code == 0, err
    *rows, whole = json.loads(out)
    assert [row["part"] for row in rows] == list(PARTS.values()) and whole["part"] == "together"
    assert all(row["seconds"] > 0 for row in rows)
    assert whole["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
    floors = {name: row["floor_seconds"] for name, row in zip(PARTS, rows, strict=True)}
    assert {name for name, floor in floors.items() if floor > 0} == set(FLOORS)
    assert floors["torch"] > 10 * floors["plan"], "torch is imported, and it is the largest part"


@pytest.mark.slow
def test_profile_start_needs_a_folder_and_tells_what_generate_said(cli, tmp_path):
    code, _, err = cli("profile", "--start", "-m", "qwen3-0.6b-random")
    assert code == 2 and "--start reads a folder" in err
    code, out, err = cli(
        "profile",
        "--start",
        "--repeat",
        "1",
        "-m",
        "tiny",
        "--weights",
        "int4",
        "--dtype",
        "float16",
    )
    assert (code, out) == (
        2,
        "",
    ) and "nanokv generate ended with 2: nanokv: error: there are no kernels" in err
