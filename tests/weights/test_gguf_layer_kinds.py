"""GGUF files of SmolLM3, OLMo 3 and Gemma 3: read, written, compared with transformers and, where it is installed, with
llama.cpp, and what is refused by name."""

import math

import numpy as np
import pytest
import torch

import nanokv
import weights_loader
from gguf_files import write_gguf
from nanokv.config import Config
from nanokv.errors import ConfigError, NanoKVError
from nanokv.export import export_gguf, unreadable_elsewhere
from nanokv.fast import stored
from nanokv.inference import score
from oracle import LAYERED, gap, random_ids, reference_logits, tiny_config, tiny_reference
from tiny_checkpoint import write_tokenizer
from weights_loader import CheckpointError
from weights_loader.gguf_file import read_gguf
from weights_loader.strict import read_object

BASES = LAYERED["olmo3-G2"]["rope_parameters"]
ONE_BASE = dict.fromkeys(BASES, BASES["full_attention"])
SIZES = {"vocab_size": 320}
SHAPES = {  # what llama.cpp computes: its patterns, one base for OLMo 3, scores over the root of D
    "smollm3": SIZES | LAYERED["smollm3-G2"],
    "olmo3": SIZES | LAYERED["olmo3-G2"] | {"rope_parameters": ONE_BASE, "head_dim": 16},
    "olmo3-yarn": SIZES | LAYERED["olmo3-G1-yarn"] | {"tie_word_embeddings": False, "head_dim": 16},
    "gemma3": SIZES | LAYERED["gemma3-G2"],
    "gemma3-all": SIZES | LAYERED["gemma3-G4-scaled"] | {"query_pre_attn_scalar": 32},
}
CONVERTED = ["smollm3", "olmo3", "olmo3-yarn", "gemma3"]  # the other has a pattern of its own


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))


def converted(name, tmp_path, changes=()):
    """(transformers model, its file as llama.cpp's converter arranges it)."""
    reference = tiny_reference(**SHAPES[name])
    write_tokenizer(tmp_path)
    return reference, write_gguf(tmp_path / "theirs.gguf", reference, tmp_path, "F32", changes)


def written(shape, tmp_path):
    """(transformers model, its file as nanokv writes it)."""
    reference = tiny_reference(**shape)
    reference.save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    fields = read_object(tmp_path / "folder" / "config.json")
    export_gguf(tmp_path / "folder", fields, tmp_path / "model.gguf", "f32", "")
    return reference, tmp_path / "model.gguf"


@pytest.mark.parametrize("name", CONVERTED)
def test_a_file_of_the_converter_gives_the_logits_of_transformers(name, tmp_path):
    reference, path = converted(name, tmp_path)
    model, _ = nanokv.load(path)
    ids = random_ids(1, 2, 40, 320)
    assert gap(score(model, ids), reference_logits(reference, ids)) <= 3e-5


@pytest.mark.parametrize("name", SHAPES)
def test_config_and_weights_come_back(name, tmp_path):
    reference, path = written(SHAPES[name], tmp_path)
    model, _ = nanokv.load(tmp_path / "folder")
    again, _ = nanokv.load(path)
    assert again.config == model.config
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():  # 1 + w of a norm is rounded to fp32
        assert gap(state[key], tensor) <= (1.2e-7 if name.startswith("gemma") else 0), key
    ids = random_ids(1, 2, 40, 320)
    assert gap(score(again, ids), reference_logits(reference, ids)) <= 3e-5


@pytest.mark.parametrize("name", CONVERTED)
def test_written_keys_and_tensors_are_those_of_the_converter(name, tmp_path):
    _, path = converted(name, tmp_path)
    theirs = read_gguf(path)
    _, path = written(SHAPES[name], tmp_path)
    ours = read_gguf(path)
    assert {key: info.shape for key, info in ours.tensors.items()} == {
        key: info.shape for key, info in theirs.tensors.items()
    }
    for key, info in theirs.tensors.items():
        place = ours.tensors[key]
        count = math.prod(info.shape)
        values = (
            np.fromfile(file.path, "<f4", count, offset=at.start)
            for file, at in ((ours, place), (theirs, info))
        )
        assert np.array_equal(*values), key
    prefix = theirs.metadata["general.architecture"] + "."
    for key, value in theirs.metadata.items():
        if key.startswith(prefix):
            assert ours.metadata[key] == value, key


@pytest.mark.parametrize("name", [*CONVERTED, "gemma3-all"])
def test_llama_cpp_has_the_same_probabilities(name, tmp_path):
    """Where it is installed. Its cache is in fp16, and so is its table of GELU. A window longer by one changes them by
    more than 1, another RoPE base by more than 0.1 (Gemma 3: by 1)."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed (pip install nanokv[bench])"
    )
    _, path = written(SHAPES[name], tmp_path)
    model, _ = nanokv.load(path)
    ids = random_ids(1, 1, 40, 320)
    llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    llama.eval(ids[0].tolist())
    theirs = torch.tensor(np.array(llama.scores[:40])).log_softmax(-1)
    assert gap(score(model, ids)[0].log_softmax(-1), theirs) <= (0.1 if "gemma" in name else 0.01)


def test_a_bf16_norm_comes_back_to_the_bit(tmp_path):
    """1 + w is stored in fp32, so that w, with the 8 bits of bf16, survives."""
    reference = tiny_reference(**SHAPES["gemma3"]).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for name, weight in reference.named_parameters():
        if "norm" in name:
            weight.data.normal_(0, 0.3, generator=generator)
    reference.save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    fields = read_object(tmp_path / "folder" / "config.json")
    export_gguf(tmp_path / "folder", fields, tmp_path / "model.gguf", "bf16", "")
    _, state = weights_loader.load(tmp_path / "model.gguf", dtype=torch.bfloat16)
    for name, weight in reference.named_parameters():
        assert torch.equal(state[name.removeprefix("model.")], weight), name


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("olmo3", "olmo2.attention.sliding_window", None, "OLMo 2"),
        ("olmo3", "olmo2.attention.sliding_window", 0, "OLMo 2"),
        ("olmo3", "olmo2.rope.freq_base_swa", 1e4, "one base for all layers"),
        ("olmo3", "olmo2.attention.sliding_window_pattern", [True] * 4, "layer_types has 4"),
        ("olmo3", "olmo2.attention.sliding_window_pattern", 0, 'sliding_window_pattern is "0"'),
        ("olmo3", "olmo2.attention.clamp_kqv", 8.0, "clamp_kqv"),
        ("gemma3", "gemma3.final_logit_softcapping", 30.0, "final_logit_softcapping"),
        ("gemma3", "gemma3.attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        ("gemma3", "gemma3.rope.scaling.factor", 8.0, "linear"),
        ("gemma3", "gemma3.rope.scaling.type", "yarn", "yarn|YaRN"),
        ("gemma3", "gemma3.attention.sliding_window", "x", "sliding_window is"),
        ("smollm3", "smollm3.attention.sliding_window", 7, "sliding_window"),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(name, key, value, words, tmp_path):
    _, path = converted(name, tmp_path, [(key, value)])
    with pytest.raises((CheckpointError, NanoKVError), match=words):
        nanokv.load(path)


def test_a_gemma_without_a_window_sees_all_positions(tmp_path):
    """As in llama.cpp, which then has one RoPE base."""
    _, path = converted("gemma3", tmp_path, [("gemma3.attention.sliding_window", None)])
    model, _ = nanokv.load(path)
    assert not any(model.config.windows)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (LAYERED["smollm3-own"], "no_rope_layers|attention_bias"),
        (LAYERED["smollm3-own"] | {"attention_bias": False}, "no_rope_layers"),
        (LAYERED["olmo3-G2"], "one base for all layers"),
        (SHAPES["olmo3"] | {"layer_types": ["full_attention"] * 5}, "layer_types"),
        (LAYERED["gemma3-G4-scaled"], "query_pre_attn_scalar"),
    ],
)
def test_what_a_file_has_no_key_for_is_refused(shape, words, tmp_path):
    with pytest.raises(CheckpointError, match=words) as caught:
        written(SIZES | shape, tmp_path)
    assert "folder" in caught.value.hint and not (tmp_path / "model.gguf").exists()


def test_no_kernel_computes_their_blocks(tmp_path):
    _, path = converted("smollm3", tmp_path)
    with pytest.raises(ConfigError, match="SmolLM3 has layers of its own kinds"):
        nanokv.load(path, dtype=torch.float32, read=stored.read)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"head_dim": 32}, "64 dimensions together, here 128"),
        ({"tie_word_embeddings": True}, "not tied"),
    ],
)
def test_a_file_that_llama_cpp_refuses_is_named(changes, words):
    """OLMo 3: llama.cpp's olmo2 has heads of C / H dimensions and a head of its own."""
    fields = tiny_config(**SHAPES["olmo3"]).to_dict() | changes
    found = unreadable_elsewhere(Config.from_dict(fields))
    assert words in found and bool(words) == bool(found)
