"""config.json and the tensors may disagree on whether the head is tied: every command follows the tensors.

`nanokv.load` accepts all four; the command line once built its cache from the file's word and refused its own cache.
"""

import io
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import nanokv
from nanokv.apps.cli import main

# Name: (tie_word_embeddings in config.json, lm_head.weight in the file) → is the model tied?
CASES = {
    "absent, no head": (None, None, True),
    "absent, another head": (None, "another", False),
    "false, no head": (False, None, True),
    "false, an equal head": (False, "equal", True),
    "true, another head": (True, "another", False),
}
COMMANDS = {
    "chat": "chat -m FOLDER -n 3 -t 0",
    "generate": "generate -m FOLDER -p Once -n 3 -t 0",
    "generate, static": "generate -m FOLDER -p Once -n 3 -t 0 --cache static --fast",
    "batch": "batch OUT/in.jsonl -m FOLDER -n 3 -t 0",
    "trace": "trace -m FOLDER -p Once -n 2 --repeat 1 -o OUT/page.html",
    "bench": "bench -m FOLDER --contexts 8 --steps 2 --repeat 1 --weights plain",
    "profile": "profile -m FOLDER --tokens 8",
    "verify": "verify FOLDER --alone",
    "memory": "memory FOLDER --check --context 64",
}
QUICK = ("chat", "generate", "batch")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]


@pytest.fixture(scope="module")
def folders(tiny_folder, tmp_path_factory):
    """One checkpoint for each case, from the same tied weights."""
    place = tmp_path_factory.mktemp("heads")
    for name, (flag, head, _) in CASES.items():
        folder = place / name.replace(" ", "-").replace(",", "")
        shutil.copytree(tiny_folder, folder)
        fields = json.loads((folder / "config.json").read_text())
        fields = {
            key: value
            for key, value in (fields | {"tie_word_embeddings": flag}).items()
            if value is not None
        }
        (folder / "config.json").write_text(json.dumps(fields))
        tensors = load_file(folder / "model.safetensors")
        assert "lm_head.weight" not in tensors
        embedding = tensors["model.embed_tokens.weight"]
        if head:
            tensors["lm_head.weight"] = (
                embedding.clone() if head == "equal" else embedding.flip(0).contiguous()
            )
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.mark.filterwarnings("ignore::weights_loader.CheckpointWarning")
@pytest.mark.parametrize("command", ALL)
@pytest.mark.parametrize("name", CASES)
def test_every_command_follows_the_tensors(name, command, folders, tmp_path, monkeypatch, capsys):
    folder = folders / name.replace(" ", "-").replace(",", "")
    model = nanokv.load(folder)[0]
    assert model.config.tie_word_embeddings is CASES[name][2]
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once"}\n')
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once\n" if command == "chat" else b""))
    )
    words = [
        word.replace("FOLDER", str(folder)).replace("OUT", str(tmp_path))
        for word in COMMANDS[command].split()
    ]
    code = main(words)
    out, err = capsys.readouterr()
    assert code == 0, err
    if command == "batch":
        ids = nanokv.load(folder)[1].encode("Once")
        logits = nanokv.score(model, torch.tensor([ids]))
        drawn = json.loads(out)["choices"][0]["token_ids"][0]
        assert drawn == int(logits[0, -1].argmax()), "the head of the tensors was not used"
