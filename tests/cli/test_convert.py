"""`nanokv convert`: any model as a Hugging Face folder or as a GGUF file, with the same numbers and answers."""

import errno
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


@pytest.mark.parametrize(("width", "told"), [(64, True), (128, False)])
def test_a_file_that_llama_cpp_would_refuse_is_named(convert, tmp_path, width, told):
    """Its qwen2 has no place for heads that are together wider than the model: 4 of 32 here."""
    tiny_reference(model_type="qwen2", vocab_size=320, hidden_size=width).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    code, _, err = convert(tmp_path, tmp_path / "out.gguf")
    line = "in its qwen2 4 heads have 64 dimensions together, here 128; nanokv opens it"
    assert code == 0 and (line in err) == told, err


@pytest.mark.parametrize(("source", "dtype"), [("tiny", "bfloat16"), ("gguf", "bfloat16")])
def test_the_default_is_what_is_stored(source, dtype, convert, gguf_file, tmp_path):
    out = tmp_path / "new"
    code, _, _ = convert(gguf_file if source == "gguf" else source, out)
    assert code == 0 and json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    assert nanokv.load(out, dtype=None)[0].dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("name", "flags", "line"),
    [
        ("out.gguf", (), "Llama, 235 kB in bf16"),
        ("out.GGUF", ("--type", "Q8_0"), "Llama, 130 kB in q8_0"),
        ("out.gguf", ("--type", "fp32"), "Llama, 461 kB in f32"),
    ],
)
def test_a_target_named_gguf_is_one_file(convert, gguf_file, tmp_path, name, flags, line):
    out = tmp_path / name
    code, said, err = convert(gguf_file, out, *flags)
    note, last = err.splitlines()
    assert (code, said, last) == (0, f"{out}\n", line)
    assert note == "model.gguf is quantized already (Q8_0): what it lost stays lost"
    (model, tokenizer), (again, theirs) = nanokv.load(gguf_file), nanokv.load(out)
    ids = tokenizer.encode("My name is Zorbla.")
    assert theirs.encode("My name is Zorbla.") == ids
    assert theirs.chat_templates == tokenizer.chat_templates
    ids = torch.tensor([ids])
    assert gap(score(again.float(), ids), score(model.float(), ids)) <= 0.05
    assert sorted(path.name for path in tmp_path.glob("*out*")) == [name]


def test_the_bundled_model_as_a_file_and_back(convert, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))
    file, folder = tmp_path / "tiny.gguf", tmp_path / "tiny"
    assert convert("tiny", file) == (0, f"{file}\n", "Qwen3, 6.17 MB in bf16\n")
    assert convert(file, folder)[0] == 0
    ours, again = nanokv.load("tiny", dtype=None)[0], nanokv.load(folder, dtype=None)[0]
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in ours.state_dict().items())


@pytest.mark.parametrize(
    ("target", "flags", "message", "hint"),
    [
        ("x.gguf", ("--type", "q4_k"), "'q4_k' is not one of bf16, ", "did you mean q4_k_m?"),
        ("x.gguf", ("--type", "q3"), "'q3' is not one of bf16, ", "--help"),
        ("x.gguf", ("--dtype", "fp16"), "--dtype float16 is for a folder", "x.gguf --type f16"),
        ("x", ("--type", "q8_0"), "--type q8_0 is for a GGUF file", "x.gguf --type q8_0"),
        ("no/x.gguf", (), "there is no folder ", "mkdir -p "),
        ("here.gguf", ("--force",), "is a folder; a GGUF file cannot replace it", "another name"),
    ],
)
def test_what_does_not_go_together(convert, tmp_path, target, flags, message, hint):
    (tmp_path / "here.gguf").mkdir()
    code, out, err = convert("tiny", tmp_path / target, *flags)
    assert (code, out) == (2, "") and message in err and hint in err
    assert [path.name for path in tmp_path.iterdir()] == ["here.gguf"]


def test_a_file_is_not_replaced_unasked(convert, tmp_path):
    out = tmp_path / "x.gguf"
    out.write_bytes(b"before")
    code, _, err = convert("tiny", out)
    assert code == 2 and "would be replaced" in err and "--force" in err
    assert out.read_bytes() == b"before"
    assert convert("tiny", out, "--force", "--type", "q4_0")[0] == 0
    assert nanokv.load(out)[0].config.model_type == "qwen3"


def test_a_full_disk(convert, tmp_path, monkeypatch):
    """One line with the free bytes; neither the file nor a part of it stays."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("weights_loader.gguf_writing.encode", full)
    code, _, err = convert("tiny", tmp_path / "x.gguf")
    assert code == 2 and "No space left on device" in err and " free" in err
    assert list(tmp_path.iterdir()) == []


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
