"""GGUF files of SmolLM3, OLMo 3, Gemma 3, gpt-oss, LFM2 and Qwen3.5: read, written, compared with transformers and,
where it is installed, with llama.cpp, and what is refused by name."""

import math
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import gguf_files
import nanokv
import weights_loader
from gguf_files import write_gguf
from nanokv.config import Config
from nanokv.errors import ConfigError, NanoKVError
from nanokv.export import export_gguf, unreadable_elsewhere
from nanokv.fast import stored
from nanokv.inference import score
from oracle import (
    HYBRID,
    LAYERED,
    build,
    gap,
    random_ids,
    reference_logits,
    tiny_config,
    tiny_reference,
)
from tiny_checkpoint import write_tokenizer
from weights_loader import CheckpointError, names
from weights_loader.gguf_file import read_gguf
from weights_loader.gguf_forms import Exponential, Tiled
from weights_loader.gguf_types import TYPES, types
from weights_loader.gguf_writing import places
from weights_loader.strict import read_object

BASES = LAYERED["olmo3-G2"]["rope_parameters"]
ONE_BASE = dict.fromkeys(BASES, BASES["full_attention"])
SIZES = {"vocab_size": 320}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPES = {  # what llama.cpp computes: its patterns, one base for OLMo 3, scores over the root of D
    "smollm3": SIZES | LAYERED["smollm3-G2"],
    "olmo3": SIZES | LAYERED["olmo3-G2"] | {"rope_parameters": ONE_BASE, "head_dim": 16},
    "olmo3-yarn": SIZES | LAYERED["olmo3-G1-yarn"] | {"tie_word_embeddings": False, "head_dim": 16},
    "gemma3": SIZES | LAYERED["gemma3-G2"],
    "gptoss": SIZES | LAYERED["gptoss-G2"],
    "gemma3-all": SIZES | LAYERED["gemma3-G4-scaled"] | {"query_pre_attn_scalar": 32},
    "lfm2": SIZES | HYBRID["lfm2-G2"] | {"head_dim": 16},
    "lfm2-untied": SIZES
    | HYBRID["lfm2-G4-bias"]
    | {"head_dim": 16, "conv_bias": False, "rope_parameters": YARN},
    "qwen35": SIZES | HYBRID["qwen35-G2"] | {"linear_value_head_dim": 16},
    "qwen35-own": SIZES
    | HYBRID["qwen35-G4-own"]
    | {
        "attention_bias": False,
        "rope_parameters": YARN | {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONVERTED = [name for name in SHAPES if name != "gemma3-all"]  # it has a pattern of its own


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))


def converted(name, tmp_path, changes=(), kind="F32"):
    """(transformers model, its file as llama.cpp's converter arranges it)."""
    reference = tiny_reference(**SHAPES[name])
    write_tokenizer(tmp_path)
    return reference, write_gguf(tmp_path / "theirs.gguf", reference, tmp_path, kind, changes)


def written(shape, tmp_path, type_name="f32"):
    """(transformers model, its file as nanokv writes it)."""
    reference = tiny_reference(**shape)
    reference.save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    fields = read_object(tmp_path / "folder" / "config.json")
    export_gguf(tmp_path / "folder", fields, tmp_path / "model.gguf", type_name, "")
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
    rounded = ("norm.weight", "A_log") if name.startswith(("gemma", "qwen35")) else ()
    for key, tensor in model.state_dict().items():  # 1 + w and −exp(A_log) are rounded to fp32
        assert gap(state[key], tensor) <= (1.2e-7 if key.endswith(rounded) else 0), key
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
    more than 1, another RoPE base by more than 0.1 (Gemma 3: by 1). It rounds the bounds of gpt-oss's YaRN, which moves
    them by 1."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed (pip install nanokv[bench])"
    )
    _, path = written(SHAPES[name], tmp_path)
    model, _ = nanokv.load(path)
    if name == "gptoss":
        rounded = replace(model.config, yarn=replace(model.config.yarn, truncate=True))
        model = build(rounded, model.state_dict())
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
        ("gptoss", "gpt-oss.attention.sliding_window", None, "without attention.sliding_window"),
        ("gptoss", "gpt-oss.attention.sliding_window", 0, "without attention.sliding_window"),
        ("gptoss", "gpt-oss.attention.sliding_window_pattern", [True] * 5, "reads a whole number"),
        ("gptoss", "gpt-oss.rope.freq_base_swa", 1e4, "one base for all layers, 150000"),
        ("gptoss", "gpt-oss.expert_feed_forward_length", 64, "config.json asks for"),
        ("gptoss", "gpt-oss.expert_count", 5, "config.json asks for"),
        ("gptoss", "gpt-oss.expert_used_count", 7, "num_experts_per_tok 7 is more"),
        ("gptoss", "gpt-oss.expert_weights_scale", 2.5, "expert_weights_scale"),
        ("gptoss", "gpt-oss.rope.scaling.type", "linear", "linear"),
        ("lfm2", "lfm2.shortconv.l_cache", None, "l_cache is"),
        ("lfm2", "lfm2.attention.head_count_kv", [0, 0, 2, 0, 1], "one number was expected"),
        ("lfm2", "lfm2.attention.head_count_kv", [0, 0, 2, 0], "layer_types has 4"),
        ("lfm2", "lfm2.attention.head_count_kv", [0] * 5, "one number was expected"),
        ("lfm2", "lfm2.attention.sliding_window", 7, "sliding_window"),
        ("lfm2", "lfm2.expert_count", 8, "mixture of experts"),
        ("qwen35", "qwen35.ssm.group_count", "x", 'group_count is "x"'),
        ("qwen35", "qwen35.ssm.inner_size", 65, "no multiple of ssm.time_step_rank 4"),
        ("qwen35", "qwen35.ssm.time_step_rank", 16, "shape"),
        ("qwen35", "qwen35.full_attention_interval", 0, "full_attention_interval is"),
        ("qwen35", "qwen35.full_attention_interval", 3, "does not ask for"),
        ("qwen35", "qwen35.attention.recurrent_layers", [True], "layer_types has 1"),
        ("qwen35", "qwen35.rope.dimension_count", None, "dimension_count is"),
        ("qwen35", "qwen35.rope.dimension_count", 64, "heads have 32"),
        ("qwen35", "qwen35.nextn_predict_layers", 1, "nextn_predict_layers"),
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
        (LAYERED["gptoss-G1-full"], "layer_types"),
        (
            SHAPES["gptoss"]
            | {"rope_parameters": SHAPES["gptoss"]["rope_parameters"] | {"truncate": True}},
            "truncate true",
        ),
        (HYBRID["lfm2-G4-bias"], "conv_bias"),
        (HYBRID["qwen35-G4-own"], "attention_bias"),
        (HYBRID["lfm2-G2"] | {"rope_parameters": LLAMA3}, "rope_type"),
    ],
)
def test_what_a_file_has_no_key_for_is_refused(shape, words, tmp_path):
    with pytest.raises(CheckpointError, match=words) as caught:
        written(SIZES | shape, tmp_path)
    assert "folder" in caught.value.hint and not (tmp_path / "model.gguf").exists()


# --- gpt-oss --------------------------------------------------------------------------------------


def theirs_of(path):
    """Name → (type, fp32 values) of a file, by the `gguf` package."""
    return {
        tensor.name: (
            tensor.tensor_type.name,
            gguf.quants.dequantize(tensor.data, tensor.tensor_type),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_experts_of_every_type_are_the_numbers_of_the_package(kind, tmp_path):
    _, path = converted("gptoss", tmp_path, kind=kind)
    theirs = theirs_of(path)
    assert theirs["blk.1.ffn_up_exps.weight"][0] == kind
    _, state = weights_loader.load(path, dtype=torch.float32)
    for part, columns in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
        for theirs_end, ours_end in ((".weight", ""), (".bias", "_bias")):
            numbers = theirs[f"blk.1.ffn_{part}_exps{theirs_end}"][1]  # (E,width,C) or (E,width)
            ours = state[f"layers.1.mlp.experts.gate_up_proj{ours_end}"][..., columns].numpy()
            assert np.array_equal(ours, np.moveaxis(numbers, 1, -1))
    down = theirs["blk.1.ffn_down_exps.weight"][1]
    assert np.array_equal(state["layers.1.mlp.experts.down_proj"].numpy(), np.moveaxis(down, 1, -1))
    down_bias = theirs["blk.1.ffn_down_exps.bias"][1]
    assert np.array_equal(state["layers.1.mlp.experts.down_proj_bias"].numpy(), down_bias)


@pytest.mark.parametrize(("type_name", "usual"), [("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_a_written_file_has_biases_and_routers_in_fp32(type_name, usual, tmp_path):
    """llama.cpp adds biases of experts in fp32 only."""
    _, path = written(SHAPES["gptoss"], tmp_path, type_name)
    for name, (type_, _) in theirs_of(path).items():
        plain = name.endswith(".bias") or "norm" in name or "sinks" in name or "gate_inp" in name
        assert type_ == ("F32" if plain else usual), name


def test_a_part_of_the_experts(tmp_path):
    """Some of the experts are those of the whole tensor."""
    _, path = converted("gptoss", tmp_path, kind="Q8_0")
    entries = weights_loader.shards.read_entries(weights_loader.resolve(path))
    cpu = torch.device("cpu")
    for leaf in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        entry = entries[f"model.layers.0.mlp.experts.{leaf}"]
        whole = weights_loader.shards.materialize(entry, None, cpu)
        part = weights_loader.shards.materialize(entry.rows(2, 5), None, cpu)
        assert torch.equal(part, whole[2:5]), leaf


def test_mxfp4_is_refused_by_name(tmp_path):
    _, path = converted("gptoss", tmp_path, kind="MXFP4")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_exps.weight.* MXFP4") as caught:
        nanokv.load(path)
    assert "bf16" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found.pop("blk.1.ffn_up_exps.weight"), "ffn_up_exps.weight.* is missing"),
        (lambda found: found.pop("blk.1.ffn_down_exps.bias"), "ffn_down_exps.bias.* is missing"),
        (lambda found: found.pop("blk.1.attn_sinks.weight"), "sinks"),
        (
            lambda found: found.update(
                {"blk.1.ffn_up_exps.bias": found["blk.1.ffn_up_exps.bias"][:, :64].copy()}
            ),
            r"ffn_up_exps.bias.* has shape \[6, 64\]",
        ),
        (
            lambda found: found.update(
                {"blk.1.ffn_down_exps.weight": found["blk.1.ffn_down_exps.bias"]}
            ),
            "3 sizes as of",
        ),
        (
            lambda found: found.update({"blk.1.ffn_gate_up_exps.weight": found["output.weight"]}),
            "ffn_gate_up_exps.weight.* has no place",
        ),
    ],
)
def test_experts_that_are_not_whole_are_refused_by_name(change, words, tmp_path, monkeypatch):
    right = gguf_files.arrays

    def damaged(reference):
        found = right(reference)
        change(found)
        return found

    monkeypatch.setattr(gguf_files, "arrays", damaged)
    _, path = converted("gptoss", tmp_path)
    with pytest.raises(CheckpointError, match=words):
        nanokv.load(path)


def test_names_of_tensors_are_those_of_the_package():
    """Of every layer; the package names gate and up apart, and knows no tensor of both."""
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 5)
    config = tiny_config(**SHAPES["gptoss"]).to_dict()
    for place in places(config, names.expected(config)):
        (source, *_) = place.sources
        part = place.name.split(".")[2] if "exps" in place.name else ""
        whole = source.replace("gate_up_proj", "gate_proj" if "gate" in part else "up_proj")
        stem = whole.removesuffix("_bias").removesuffix(".bias").removesuffix(".weight")
        assert theirs.get_name(stem) == place.name.rpartition(".")[0], source


@pytest.mark.parametrize("every", [2, 3])
def test_a_whole_number_sets_the_windows_of_gpt_oss(every, tmp_path):
    """As in llama.cpp, whose default is 2."""
    key = "gpt-oss.attention.sliding_window_pattern"
    _, path = converted("gptoss", tmp_path, [(key, every)])
    model, _ = nanokv.load(path)
    assert model.config.windows == tuple(7 if (i + 1) % every else None for i in range(5))


def test_no_kernel_computes_their_blocks(tmp_path):
    _, path = converted("smollm3", tmp_path)
    with pytest.raises(ConfigError, match="SmolLM3 has layers of its own kinds"):
        nanokv.load(path, dtype=torch.float32, read=stored.read)


@pytest.mark.parametrize("name", ["lfm2", "lfm2-untied"])
def test_transformers_reads_the_same_tensors_of_lfm2(name, tmp_path):
    """By its GGUF reader. It has no table for Qwen3.5."""
    reference, path = written(SHAPES[name], tmp_path)
    parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)
    state = reference.state_dict()
    if reference.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    assert state.keys() <= parsed["tensors"].keys()
    assert all(torch.equal(parsed["tensors"][key], tensor) for key, tensor in state.items())
    layers = [i for i, kind in enumerate(reference.config.layer_types) if kind == "full_attention"]
    assert parsed["config"]["full_attn_idxs"] == layers
    assert parsed["config"]["conv_L_cache"] == reference.config.conv_L_cache


@pytest.mark.parametrize("type_name", ["bf16", "f16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("name", ["lfm2", "qwen35"])
def test_values_of_each_type_are_those_that_the_gguf_package_reads(name, type_name, tmp_path):
    """A second file, of the numbers that came back, holds the numbers of the first."""
    reference = tiny_reference(**SHAPES[name])
    reference.save_pretrained(tmp_path / "folder")
    write_tokenizer(tmp_path / "folder")
    fields = read_object(tmp_path / "folder" / "config.json")
    first = tmp_path / "first.gguf"
    export_gguf(tmp_path / "folder", fields, first, type_name, "")
    model, _ = nanokv.load(first, dtype=torch.float32)
    model.save(tmp_path / "again", nanokv.load(first)[1])
    fields = read_object(tmp_path / "again" / "config.json")
    export_gguf(tmp_path / "again", fields, tmp_path / "again.gguf", "f32", "")
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(str(tmp_path / "again.gguf")).tensors}
    types = set()
    for tensor in gguf.GGUFReader(str(first)).tensors:
        types.add(tensor.tensor_type.name)
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.allclose(ours[tensor.name].data, numbers, rtol=2e-7, atol=2e-7), tensor.name
        if "conv1d" in tensor.name or "shortconv.conv" in tensor.name:
            assert tensor.tensor_type.name == "F32"
    assert len(types) > 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"head_dim": 32}, "64 dimensions together, here 128"),
        ({"tie_word_embeddings": True}, "not tied"),
    ],
)
def test_a_file_of_olmo_that_llama_cpp_refuses_is_named(changes, words):
    """OLMo 3: llama.cpp's olmo2 has heads of C / H dimensions and a head of its own."""
    fields = tiny_config(**SHAPES["olmo3"]).to_dict() | changes
    found = unreadable_elsewhere(Config.from_dict(fields))
    assert words in found and bool(words) == bool(found)


def test_a_tied_gpt_oss_is_named_too():
    config = Config.from_dict(tiny_config(**SHAPES["gptoss"]).to_dict())
    assert unreadable_elsewhere(config) == ""
    assert "gpt-oss has a head that is not tied" in unreadable_elsewhere(
        replace(config, tie_word_embeddings=True)
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [("lfm2-G2", "64 dimensions together, here 128"), ("qwen35-G2", "linear_key_head_dim 16")],
)
def test_sizes_of_heads_that_llama_cpp_has_not_are_named(name, words):
    config = Config.from_dict(tiny_config(**HYBRID[name]).to_dict())
    assert words in unreadable_elsewhere(config)


@pytest.mark.parametrize(
    ("attention", "expected"),
    [([2, 5, 8, 10, 12, 14], {8, 14}), (range(16), {0, 1, 4, 7, 10, 13, 14, 15})],
)
def test_q4_k_m_has_more_bits_for_the_values_of_the_layers_that_llama_cpp_chooses(
    attention, expected
):
    """What its llama_model_quantize chose for LFM2 of 16 layers, which has values in six, and for Qwen3.5."""
    names = {
        f"blk.{i}.{'attn_qkv' if len(attention) == 16 and (i + 1) % 4 else 'attn_v'}.weight": i
        for i in attention
    }
    found = types(TYPES["q4_k_m"], dict.fromkeys(names, (256, 256)), 16)
    assert {i for name, i in names.items() if found[name] == "Q6_K"} == expected


@pytest.mark.parametrize("order", [Tiled(2, 6), Tiled(3, 6, 4, first=5), Tiled(2, 4, 3, dim=1)])
def test_value_heads_change_places_and_come_back(order):
    """Row h of the model is row (h mod (H/Hk))·Hk + h // (H/Hk) of the file, by arithmetic."""
    shape = [7, 7]
    shape[order.dim] = order.first + order.H * order.width
    x = torch.arange(shape[0] * shape[1]).view(shape).float()
    y = order.stored(x)
    each = order.H // order.Hk
    for head in range(order.H):
        there = head % each * order.Hk + head // each
        place = [order.first + place * order.width for place in (head, there)]
        theirs, ours = (
            values.narrow(order.dim, at, order.width)
            for values, at in zip((x, y), place, strict=True)
        )
        assert torch.equal(theirs, ours)
    assert torch.equal(y.narrow(order.dim, 0, order.first), x.narrow(order.dim, 0, order.first))
    assert torch.equal(order.read(y, ""), x)


def test_a_decay_that_grows_is_refused():
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_a.*0\.5"):
        Exponential().read(torch.tensor([-1.0, 0.5]), "blk.0.ssm_a")
