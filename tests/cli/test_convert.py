"""`nanokv convert`: a GGUF file, or any model, as a Hugging Face folder with the same numbers and answers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nanokv
from gguf_files import write_gguf
from nanokv.apps.cli import main
from nanokv.inference import score
from oracle import gap, random_ids, reference_logits, tiny_reference
from tiny_checkpoint import write_tokenizer


@pytest.fixture
def gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))
    write_tokenizer(tmp_path)
    reference = tiny_reference(model_type="llama", head_dim=None, vocab_size=320)
    return write_gguf(tmp_path / "model.gguf", reference, tmp_path, "Q8_0")


@pytest.fixture
def convert(capsys, monkeypatch):
    """convert(*arguments) → (exit code, stdout, stderr)."""
    monkeypatch.setattr("sys.stdin", open("/dev/null"))

    def convert(*argv):
        code = main(["convert", *map(str, argv)])
        return code, *capsys.readouterr()

    return convert


def test_transformers_opens_the_folder_and_gives_our_logits(convert, gguf_file, tmp_path):
    out = tmp_path / "new"
    assert convert(gguf_file, out, "--dtype", "fp32") == (
        0,
        f"{out}\n",
        "Llama, 452 kB in float32\n",
    )
    model, tokenizer = nanokv.load(gguf_file, dtype=torch.float32)
    reference, ids = AutoModelForCausalLM.from_pretrained(out).eval(), random_ids(1, 2, 30, 320)
    assert gap(score(model, ids), reference_logits(reference, ids)) <= 1e-5
    again = nanokv.Tokenizer.from_folder(out)
    assert again.encode("My name is Zorbla.") == tokenizer.encode("My name is Zorbla.")
    assert again.chat_template == tokenizer.chat_template


def test_all_templates_are_kept_and_none_of_the_model_that_was_here(convert, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))
    write_tokenizer(tmp_path)
    reference = tiny_reference(model_type="llama", head_dim=None, vocab_size=320)
    changes = [("tokenizer.chat_template.tool_use", "t")]
    named = write_gguf(tmp_path / "named.gguf", reference, tmp_path, changes=changes)
    out = tmp_path / "new"
    (out / "additional_chat_templates").mkdir(parents=True)
    (out / "additional_chat_templates" / "rag.jinja").write_text("of another model")
    (out / "config.json").write_text("{}")
    assert convert(named, out)[0] == 2 and convert(named, out, "--force")[0] == 0
    templates = nanokv.Tokenizer.from_folder(out).chat_templates
    assert list(templates) == ["default", "tool_use"] and templates["tool_use"] == "t"
    assert AutoTokenizer.from_pretrained(out).chat_template == templates


@pytest.mark.parametrize(("source", "dtype"), [("tiny", "bfloat16"), ("gguf", "bfloat16")])
def test_the_default_is_what_is_stored(source, dtype, convert, gguf_file, tmp_path):
    out = tmp_path / "new"
    code, _, _ = convert(gguf_file if source == "gguf" else source, out)
    assert code == 0 and json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    assert nanokv.load(out, dtype=None)[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("name", ["out.gguf", "out.GGUF"])
def test_a_folder_is_not_called_like_a_gguf_file(convert, gguf_file, tmp_path, name):
    code, out, err = convert(gguf_file, tmp_path / name)
    assert (code, out) == (2, "") and "the result is a folder" in err
    assert f"hint: nanokv convert {gguf_file} {tmp_path / 'out'}\n" in err
    assert not (tmp_path / name).exists()


def test_nothing_is_replaced_unasked(convert, gguf_file, tmp_path):
    out = tmp_path / "new"
    assert convert(gguf_file, out)[0] == 0
    before = (out / "model.safetensors").read_bytes()
    code, _, err = convert("tiny", out)
    assert code == 2 and "would be replaced" in err and "--force" in err
    assert (out / "model.safetensors").read_bytes() == before
    assert convert("tiny", out, "--force")[0] == 0
    assert nanokv.load(out)[0].config.model_type == "qwen3"


@pytest.mark.parametrize("source", ["missing.gguf", "./missing.gguf"])
def test_a_file_that_is_not_there(source, convert, tmp_path):
    code, _, err = convert(source, tmp_path / "new")
    assert (
        code == 2
        and "check the path: there is no such file" in err
        and not (tmp_path / "new").exists()
    )
