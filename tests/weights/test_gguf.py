"""GGUF files: config, weights, tokenizer and template from the file's own metadata. The oracle of the weights is
transformers' own GGUF reader; that of tokenizers and templates is llama.cpp (test_smollm2.py).
"""

import json
import math
import os
import struct
import unicodedata
from pathlib import Path

import gguf
import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, CohereTokenizer, GPT2Tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import gguf_files
import nanokv
import weights_loader
from gguf_files import SHAPES, write_gguf
from nanokv.errors import NanoKVError
from nanokv.inference import score
from nanokv.text import endings
from oracle import gap, random_ids, reference_logits, tiny_reference
from tiny_checkpoint import write_tokenizer
from weights_loader import CheckpointError, gguf_rules
from weights_loader.gguf_file import GgufFile, plain_texts, read_gguf
from weights_loader.gguf_tokenizer import tokenizer_files
from weights_loader.pooling import read_pooling

# What the gguf package can write.
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make(tmp_path):
    """make(shape, kind, changes) → (transformers model, path of its file)."""

    def make(shape="llama", kind="F32", changes=(), tokenizer=True):
        reference = tiny_reference(**SHAPES[shape])
        write_tokenizer(tmp_path)
        return reference, write_gguf(
            tmp_path / "model.gguf", reference, tmp_path if tokenizer else None, kind, changes
        )

    return make


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_of_each_family_gives_the_logits_of_the_one_that_was_written(shape, make):
    reference, path = make(shape)
    model, _ = nanokv.load(path)
    ids = random_ids(1, 2, 40, 320)
    assert gap(score(model, ids), reference_logits(reference, ids)) <= 1e-5
    assert model.config.tie_word_embeddings == reference.config.tie_word_embeddings


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_gives_the_numbers_that_transformers_reads(kind, make):
    reference, path = make("llama", kind)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)[
        "tensors"
    ]
    _, ours = weights_loader.load(path, dtype=torch.float32)
    state = {name.removeprefix("model."): tensor for name, tensor in theirs.items()}
    assert ours.keys() == state.keys()
    assert all(torch.equal(ours[name], state[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "stored"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")],
)
def test_the_dtype_that_a_chat_takes(kind, stored, make):
    _, path = make("qwen3", kind)
    config, _ = weights_loader.load(path)
    assert config["torch_dtype"] == stored


def test_plain_numbers_are_mapped_and_not_copied(make):
    """Rows that are not permuted lie in the file as they are needed."""
    _, path = make("qwen3", "BF16")
    entries = weights_loader.shards.read_entries(weights_loader.resolve(path))
    assert {entry.as_stored for name, entry in entries.items() if "norm" not in name} == {True}
    _, path = make("llama", "BF16")
    entries = weights_loader.shards.read_entries(weights_loader.resolve(path))
    copied = {name.split(".")[-2] for name, entry in entries.items() if not entry.as_stored}
    assert copied == {"q_proj", "k_proj"}


def test_a_large_matrix_is_read_in_pieces(make, monkeypatch):
    _, path = make("llama", "Q8_0")
    _, whole = weights_loader.load(path, dtype=torch.float32)
    monkeypatch.setattr(weights_loader.shards, "CHUNK", 4_096)
    _, pieces = weights_loader.load(path, dtype=torch.float32)
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


# --- tokenizer, template, stop ids ------------------------------------------------------------------------------------


def test_tokenizer_and_template_are_those_that_were_written(make, tmp_path):
    _, path = make()
    _, tokenizer = nanokv.load(path)
    own = nanokv.Tokenizer.from_folder(tmp_path)
    for text in ("My name is Zorbla.", "a  2 12\n\n\t x", "<|im_start|>user", "héllo 🙂", ""):
        assert tokenizer.encode(text) == own.encode(text)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(messages) == own.render(messages)
    assert tokenizer.control_ids == own.control_ids and tokenizer.eos_token == "<|im_end|>"


def test_all_templates_of_a_file(make):
    """Named ones stand in keys of their own, a list of their names beside them."""
    named = (
        ("tokenizer.chat_template.tool_use", "t{{ tools }}"),
        ("tokenizer.chat_template.rag", "r"),
    )
    _, path = make(changes=[*named, ("tokenizer.chat_templates", ["tool_use", "rag"])])
    _, tokenizer = nanokv.load(path)
    assert list(tokenizer.chat_templates) == ["default", "tool_use", "rag"]
    messages = [{"role": "user", "content": "hi"}]
    assert (
        tokenizer.render(messages, [{"a": 1}]) == "t[{'a': 1}]"
        and tokenizer.render(messages, None, False) != "r"
    )
    assert tokenizer.render(messages, chat_template="rag") == "r"
    _, path = make(changes=[*named, ("tokenizer.chat_template", None)])
    assert list(nanokv.load(path)[1].chat_templates) == ["tool_use", "rag"]


BOS = ("tokenizer.ggml.bos_token_id", 1)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ([BOS, ("tokenizer.ggml.add_bos_token", True)], [1]),
        ([BOS, ("tokenizer.ggml.add_bos_token", False)], []),
        ([BOS], []),
        ([BOS, ("tokenizer.ggml.pre", "llama-bpe")], [1]),
        ([("tokenizer.ggml.pre", "llama-bpe")], []),
    ],
)
def test_bos_comes_as_the_file_says_and_never_twice(changes, first, make):
    """Where the file is silent, as Llama 3's rule has it; a chat template brings its own."""
    _, path = make(changes=changes)
    _, tokenizer = nanokv.load(path)
    ids = tokenizer.encode("My name")
    assert ids[0] != 1 and tokenizer.encode("My name", add_special_tokens=True) == [*first, *ids]
    typed = tokenizer.encode("<|im_start|>My name", add_special_tokens=True)
    assert typed == [1, *ids]


@pytest.mark.parametrize(
    ("number", "pooling", "last"),
    [(3, "last", [2]), (1, "mean", [2]), (0, None, []), (None, None, [])],
)
def test_an_embedding_model_names_its_pooling_and_ends_its_texts(number, pooling, last, make):
    """As Qwen3-Embedding's files do. Of another model add_eos_token is not read: it would end each prompt."""
    changes = [("llama.pooling_type", number), ("tokenizer.ggml.add_eos_token", True)]
    _, path = make(changes=changes)
    assert read_pooling(weights_loader.resolve(path)) == pooling
    _, tokenizer = nanokv.load(path)
    ids = tokenizer.encode("My name")
    assert tokenizer.encode("My name", add_special_tokens=True) == [*ids, *last]


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ((), {2, 0}),  # <|im_end|> is named, <|endoftext|> is known
        ([("tokenizer.ggml.eot_token_id", 1)], {0, 1, 2}),
        ([("tokenizer.ggml.eom_token_id", 300)], {0, 2, 300}),
        ([("tokenizer.ggml.eos_token_id", None)], {0, 2}),
        ([("tokenizer.ggml.eos_token_id", 300)], {0, 2, 300}),
        ([("tokenizer.ggml.fim_pad_token_id", 301)], {0, 2, 301}),
    ],
)
def test_the_ends_are_those_that_the_file_names_and_those_that_are_known(changes, ends, make):
    _, path = make(changes=changes)
    model, _ = nanokv.load(path)
    assert set(model.generation_config.eos_token_ids) == ends


def test_the_sampling_defaults_of_a_file(make):
    """Fields of generation_config.json; a file without them is greedy."""
    keys = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05}
    _, path = make(changes=[(f"general.sampling.{key}", value) for key, value in keys.items()])
    found = nanokv.load(path)[0].generation_config
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert found.repetition_penalty == 1.05 and found.eos_token_ids == (2, 0)
    _, path = make()
    assert nanokv.load(path)[0].generation_config.temperature == 0


@pytest.mark.parametrize("kind", [1, 3, 4, 5], ids=["NORMAL", "CONTROL", "USER_DEFINED", "UNUSED"])
@pytest.mark.parametrize("eos", [0, 2], ids=["eos of the base", "eos right"])
def test_an_end_is_one_whatever_its_type(kind, eos, make, tmp_path):
    """As llama.cpp corrects it: the type of a token with the text of a control token is CONTROL."""
    write_tokenizer(tmp_path)
    types = gguf_files.tokenizer(tmp_path)["tokenizer.ggml.token_type"]
    _, path = make(
        changes=[
            ("tokenizer.ggml.token_type", [*types[:2], kind, *types[3:]]),
            ("tokenizer.ggml.eos_token_id", eos),
        ]
    )
    model, tokenizer = nanokv.load(path)
    assert set(model.generation_config.eos_token_ids) == {0, 2} and {0, 2} <= tokenizer.control_ids
    assert tokenizer.encode("a<|im_end|>")[-1] == 2 and tokenizer.text_of([2]) == ""


def test_the_small_files_are_made_once_and_anew_for_another_file(make, tmp_path):
    _, path = make()
    folder = weights_loader.resolve(path)
    made = (folder / "config.json").stat().st_mtime_ns
    assert (
        weights_loader.resolve(path) == folder
        and (folder / "config.json").stat().st_mtime_ns == made
    )
    make(changes=[("llama.context_length", 64)])
    assert weights_loader.resolve(path) != folder
    os.remove(path)
    with pytest.raises(CheckpointError, match="is gone"):
        weights_loader.load(folder)


def test_without_a_folder_that_can_be_written(make, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "file"))
    _, path = make()
    assert nanokv.load(path)[0].config.model_type == "llama"


# --- refused by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("split.count", 3, "one of 3 files"),
        ("tokenizer.ggml.model", "t5", "byte-level BPE"),
        ("tokenizer.ggml.model", "llama", "add_space_prefix"),
        ("tokenizer.ggml.pre", "kimi-k2", "kimi-k2"),
        ("tokenizer.ggml.pre", "default", "default"),
        ("tokenizer.ggml.pre", None, "tokenizer.ggml.pre"),
        ("llama.attention.sliding_window", 4096, "sliding_window"),
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.logit_scale", 0.5, "logit_scale"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count"),
        ("llama.attention.value_length", 64, "value_length"),
        ("llama.rope.scaling.type", "linear", "linear"),
        ("llama.rope.scaling.factor", 2.0, "linear.*2.0"),
        ("llama.rope.scale_linear", 2.0, "linear.*2.0"),
        ("llama.rope.scaling.type", "longrope", "longrope"),
        ("llama.rope.scaling.attn_factor", 0.9, "attn_factor 0.9"),
        ("llama.rope.scaling.yarn_attn_factor", 0.9, "attn_factor 0.9"),
        ("llama.rope.scaling.attn_factor", 1, "numbers"),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier"),
        ("llama.rope.scaling.yarn_ext_factor", 0.5, "yarn_ext_factor"),
        ("llama.attention.causal", False, "causal"),
        ("llama.attention.scale", 0.5, "attention.scale"),
        ("llama.expert_weights_scale", 2.5, "expert_weights_scale"),
        ("llama.expert_gating_func", 2, "expert_gating_func"),
        ("llama.expert_shared_count", 1, "expert_shared_count"),
        ("llama.attn_logit_softcapping", 50.0, "softcapping"),
        ("llama.nextn_predict_layers", 1, "nextn"),
        ("llama.use_parallel_residual", True, "use_parallel_residual"),
        ("llama.something_new", 1, "something_new"),
        ("llama.vocab_size", 7, "vocab_size"),
        ("llama.attention.head_count", [4, 4, 4], "head_count"),
        ("llama.context_length", None, "max_position_embeddings is missing"),
        ("llama.block_count", 4, "tensors are missing"),
        ("llama.block_count", 2, "does not ask for"),
        ("llama.embedding_length", 32, "has shape"),
        ("tokenizer.ggml.eos_token_id", 999, "999"),
        ("tokenizer.ggml.tokens", ["a", "b", "c"], "token types"),
        ("tokenizer.ggml.merges", ["q z"], "merge"),
        ("tokenizer.ggml.token_type", None, "token_type"),
        ("tokenizer.chat_template", 7, "chat_template"),
        ("tokenizer.chat_template.rag", 7, r"chat_template\.rag"),
        ("tokenizer.ggml.add_bos_token", 1, "add_bos_token"),
        ("general.alignment", 12, "general.alignment"),
        ("general.sampling.temp", "hot", r"general\.sampling\.temp"),
    ],
)
def test_what_is_not_implemented_or_contradicts_itself_is_refused_by_name(key, value, words, make):
    changes = [("llama.rope.scaling.factor", 2.0)] if value == "linear" else []
    _, path = make(changes=[*changes, (key, value)])
    with pytest.raises((CheckpointError, NanoKVError), match=words) as caught:
        nanokv.load(path)
    assert "\n" not in str(caught.value)


READ_BY_NOBODY = [
    ("llama.pooling_type", 3),
    ("llama.attention.causal", True),
    ("llama.tensor_data_layout", "Meta AI original pth"),
    ("llama.classifier.output_labels", ["yes", "no"]),
    ("llama.decoder_start_token_id", 1),
    ("llama.expert_count", 0),
    ("llama.expert_used_count", 0),
    ("llama.expert_weights_scale", 1.0),
    ("llama.expert_weights_norm", True),
    ("llama.expert_gating_func", 1),
    ("llama.expert_shared_count", 0),
    ("llama.attention.sliding_window", 0),
    ("llama.leading_dense_block_count", 0),
    ("llama.nextn_predict_layers", 0),
    ("llama.logit_scale", 0.0),
    ("llama.attn_logit_softcapping", 0.0),
    ("llama.attention.scale", 0.0),
    ("llama.use_parallel_residual", False),
    ("llama.rope.scaling.type", "none"),
    ("llama.rope.scaling.factor", 1.0),
    ("llama.rope.scaling.finetuned", True),
    ("llama.rope.scaling.attn_factor", 1.0),
    ("llama.rope.scaling.yarn_ext_factor", 1.0),
    ("general.anything", [1, 2]),
    ("quantize.imatrix.file", "x.dat"),
    ("general.quantization_version", 2),
    ("mradermacher.quantize_version", "2"),
]


def test_keys_that_generation_does_not_read_change_nothing(make):
    reference, path = make(changes=READ_BY_NOBODY)
    ids = random_ids(1, 2, 40, 320)
    assert gap(score(nanokv.load(path)[0], ids), reference_logits(reference, ids)) <= 1e-5


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ([], None),
        ([("qwen3.rope.scaling.attn_factor", 0.8782488562869419)], 1.0),
        ([("qwen3.rope.scaling.yarn_attn_factor", 0.8782488562869419)], 1.0),
        ([("qwen3.rope.scaling.attn_factor", 0.5)], 0.5 * (0.1 * math.log(4) + 1)),
        (
            [
                ("qwen3.rope.scaling.yarn_beta_fast", 16.0),
                ("qwen3.rope.scaling.yarn_beta_slow", 2.0),
            ],
            None,
        ),
    ],
)
def test_yarn_of_a_file_is_yarn_of_a_config(changes, factor, make):
    """attn_factor multiplies 0.1 ln 4 + 1, as in llama.cpp; the context is factor × original."""
    reference, path = make("yarn", changes=changes)
    betas = {"beta_fast": 16.0, "beta_slow": 2.0} if factor is None and changes else {}
    rope = (
        reference.config.rope_parameters | ({"attention_factor": factor} if factor else {}) | betas
    )
    told = AutoModelForCausalLM.from_config(
        type(reference.config)(**reference.config.to_dict() | {"rope_parameters": dict(rope)})
    ).eval()
    told.load_state_dict(reference.state_dict())
    model, _ = nanokv.load(path)
    assert model.config.max_position_embeddings == 512
    ids = random_ids(1, 2, 300, 320)
    assert gap(score(model, ids), reference_logits(told, ids)) <= 1e-5


# --- which file is one ------------------------------------------------------------------------------------------------


def test_a_file_is_known_by_its_first_bytes(make, tmp_path):
    """ollama's blobs have no suffix; a link may have any name."""
    _, path = make("qwen3")
    expected = nanokv.load(path)[0].state_dict()
    blob = tmp_path / "blobs" / ("sha256-" + "0123456789abcdef" * 4)
    blob.parent.mkdir()
    path.rename(blob)
    (tmp_path / "link.bin").symlink_to(blob)
    for place in (blob, tmp_path / "link.bin"):
        model, tokenizer = nanokv.load(place)
        assert all(
            torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items()
        )
        assert tokenizer.render([{"role": "user", "content": "hi"}])
        assert weights_loader.config_file(place).name == "config.json"


def test_a_folder_with_one_file_stands_for_it(make, tmp_path):
    _, path = make("qwen3")
    folder = tmp_path / "folder"
    folder.mkdir()
    path.rename(folder / "a.gguf")
    (folder / "mmproj-a.gguf").write_bytes(b"GGUF")
    assert nanokv.load(folder)[0].config.model_type == "qwen3"
    (folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError, match=r"no config\.json: it has a\.gguf, b\.gguf"
    ) as caught:
        nanokv.load(folder)
    assert str(folder / "a.gguf") in caught.value.hint


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "notes.txt"])
def test_another_file_is_refused_and_its_folder_named(name, tmp_path):
    (tmp_path / name).write_bytes(bytes(64))
    with pytest.raises(
        CheckpointError, match=f"{name} is a file, not a model folder, and no GGUF file"
    ) as caught:
        nanokv.load(tmp_path / name)
    assert "config.json" in caught.value.hint
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        nanokv.load(tmp_path / name)
    assert caught.value.hint == f"the model is its folder: {tmp_path}"


def test_a_file_of_that_name_that_is_none(tmp_path):
    (tmp_path / "x.gguf").write_bytes(bytes(64))
    with pytest.raises(CheckpointError, match=r"x\.gguf is no GGUF file"):
        nanokv.load(tmp_path / "x.gguf")


def test_what_stands_behind_the_colon_of_a_hub_name():
    with pytest.raises(CheckpointError, match=r'"owner/name:Q4_K_M"') as caught:
        weights_loader.resolve("owner/name:Q4_K_M")
    assert caught.value.hint == "owner/name:FILE.gguf"


# --- how a text is cut ------------------------------------------------------------------------------------------------

TEXTS = [
    "Hello world  twice\n\n \t x",
    "I'll SAY'S it's we'VE 12 345678 ²٣ 1st",
    "def f(x):\n    return x**2  # 'comment'\r\n",
    "e\u0301 \u00e9 naïve CamelCaseWORDS 世界你好 हिन्दी में שלום 🙂🧑",
    "a/b/c// ...\n//\n!?\n",
    "\r\n  \n x\u3000y\u00a0z",
]


@pytest.mark.parametrize("name", gguf_rules.RULES)
def test_every_rule_is_one_that_a_tokenizer_json_may_have(name, make):
    _, path = make(changes=[("tokenizer.ggml.pre", name)])
    _, tokenizer = nanokv.load(path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == (
            unicodedata.normalize("NFC", text) if gguf_rules.RULES[name].nfc else text
        )


def cuts(steps, text: str) -> list[str]:
    """The pieces of a text, their bytes as printable characters."""
    steps = {"type": "Sequence", "pretokenizers": list(steps)}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    fields = {"version": "1.0", "added_tokens": [], "pre_tokenizer": steps, "model": model}
    library = tokenizers.Tokenizer.from_str(json.dumps(fields))
    return [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text)]


def test_rules_are_those_of_transformers():
    """Its own table of names and regexes; and the classes of GPT-2 and Command-R for the rules that have none."""
    for name, regex in GGUF_PRE_TOKENIZER_SPLITS.items():
        assert gguf_rules.RULES[name].steps == (
            gguf_rules.split(regex),
            gguf_rules.byte_level(False),
        ), name
    for name, tokenizer in (("gpt-2", GPT2Tokenizer()), ("command-r", CohereTokenizer())):
        theirs = tokenizer.backend_tokenizer.pre_tokenizer
        for text in TEXTS:
            expected = [piece for piece, _ in theirs.pre_tokenize_str(text)]
            assert cuts(gguf_rules.RULES[name].steps, text) == expected


def test_rules_by_hand():
    """What tells the rules apart: digits, contractions, capitals, marks, line ends after signs."""

    def texts(name, text):
        return [
            piece.replace("Ġ", " ").replace("Ċ", "\n")
            for piece in cuts(gguf_rules.RULES[name].steps, text)
        ]

    assert texts("gpt-2", "12345 I'll") == ["12345", " I", "'ll"]
    assert texts("starcoder", "12345 I'LL") == ["1", "2", "3", "4", "5", " I", "'", "LL"]
    assert texts("deepseek-r1-qwen", "12345 I'LL") == ["1", "2", "3", "4", "5", " I", "'LL"]
    assert texts("pixtral", "12345 I'LL") == ["123", "45", " I", "'LL"]
    assert texts("gpt-4o", "12345 CamelCase I'LL") == ["123", "45", " Camel", "Case", " I'LL"]
    assert texts("tekken", "123 CamelCase") == ["1", "2", "3", " Camel", "Case"]
    assert texts("qwen2", "x;\n") == ["x", ";\n"] and texts("seed-coder", "x;\n") == [
        "x",
        ";",
        "\n",
    ]
    assert len(texts("qwen35", "में")) == 1 and len(texts("qwen2", "में")) > 1


def test_another_architecture(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r'general\.architecture is "gemma2"'):
        nanokv.load(tmp_path / "x.gguf")


def test_factors_that_are_not_those_of_llama_3(make, monkeypatch):
    import gguf_files

    right = gguf_files.rope_factors
    monkeypatch.setattr(gguf_files, "rope_factors", lambda reference: right(reference)[::-1].copy())
    _, path = make("llama-3.1")
    with pytest.raises(CheckpointError, match=r"does not follow Llama 3\.1's rule"):
        nanokv.load(path)


def test_a_type_that_nobody_turns_into_numbers(make):
    _, path = make("qwen3", "Q8_0")
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    assert struct.unpack_from("<I", data, at) == (8,)
    struct.pack_into("<I", data, at, 9)  # Q8_1, 36 bytes a block
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        nanokv.load(path)


# --- hostile headers --------------------------------------------------------------------------------------------------


def small(*parts) -> bytes:
    """A header of one key."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"".join(parts)


KEY = struct.pack("<Q", 1) + b"k"
HOSTILE = {
    "nothing": b"",
    "another format": b"PK\3\4" + bytes(40),
    "cut after the magic": b"GGUF\3\0\0\0",
    "version 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "2**60 tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    "2**60 keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
    "a key of 2**60 bytes": small(struct.pack("<Q", 1 << 60)),
    "a key that ends late": small(struct.pack("<Q", 900)),
    "a text of 2**60 bytes": small(KEY, struct.pack("<IQ", 8, 1 << 60)),
    "a text that is no UTF-8": small(KEY, struct.pack("<IQ", 8, 2), b"\xff\xfe"),
    "a list of 2**60 numbers": small(KEY, struct.pack("<IIQ", 9, 4, 1 << 60)),
    "a list of 2**20 texts": small(KEY, struct.pack("<IIQ", 9, 8, 1 << 20)),
    "a list of lists": small(KEY, struct.pack("<IIQ", 9, 9, 1), bytes(40)),
    "an unknown type": small(KEY, struct.pack("<I", 77), bytes(40)),
    "a key twice": b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (KEY + struct.pack("<II", 4, 1)),
    "a tensor of nine dimensions": b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + KEY
    + struct.pack("<I", 9)
    + bytes(90),
    "a tensor of 2**256 values": b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + KEY
    + struct.pack("<I4QIQ", 4, *[(1 << 64) - 1] * 4, 0, 0),
    "an unknown tensor type": b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + KEY
    + struct.pack("<IQIQ", 1, 4, 999, 0),
    "a tensor of no values": b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + KEY
    + struct.pack("<IQIQ", 1, 0, 0, 0),
    "half a block": b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + KEY
    + struct.pack("<IQIQ", 1, 40, 8, 0)
    + bytes(64),
    "an offset that is not aligned": b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + KEY
    + struct.pack("<IQIQ", 1, 4, 0, 7)
    + bytes(99),
    "a tensor beyond the end": b"GGUF"
    + struct.pack("<IQQ", 3, 1, 0)
    + KEY
    + struct.pack("<IQIQ", 1, 4096, 0, 0),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_are_refused_in_one_line(data, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert len(message) < 400 and message.isprintable()


def test_every_cut_of_a_whole_file_is_refused(make):
    """At each byte of the header, and in the weights."""
    _, path = make(tokenizer=False)
    data = path.read_bytes()
    header = read_gguf(path).header
    for end in [*range(0, header, 7), header + 1, len(data) - 5_000]:
        Path(path).write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            read_gguf(path)


def test_what_the_library_reads_is_what_was_written(make):
    """Against gguf.GGUFReader: every key, and where each tensor lies."""
    _, path = make("qwen3", "Q4_0")
    ours, theirs = read_gguf(path), gguf.GGUFReader(str(path))
    keys = {
        name: field.contents()
        for name, field in theirs.fields.items()
        if not name.startswith("GGUF.")
    }
    assert ours.metadata == keys
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.start, info.nbytes, list(info.shape)) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.shape.tolist()[::-1],
        )
    assert json.loads((weights_loader.resolve(path) / "gguf.json").read_text())["path"] == str(path)


@pytest.mark.slow
def test_the_published_qwen_tokenizer_survives_the_way_through_gguf(qwen3_files, tmp_path):
    """Vocabulary, merges and `pre: qwen2`, as llama.cpp's converter writes them: transformers' recorded ids."""
    folder = qwen3_files / "tokenizer"
    fields = json.loads((folder / "tokenizer.json").read_text())
    ids = fields["model"]["vocab"] | {
        token["content"]: token["id"] for token in fields["added_tokens"]
    }
    kinds = {token["id"]: 3 if token["special"] else 4 for token in fields["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    merges = [
        " ".join(pair) if isinstance(pair, list) else pair for pair in fields["model"]["merges"]
    ]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(id, 1) for id in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }
    found = GgufFile(tmp_path / "qwen.gguf", metadata, {}, 0)
    for name, content in tokenizer_files(found).items():
        (tmp_path / name).write_text(json.dumps(content))
    ours, published = nanokv.Tokenizer.from_folder(tmp_path), nanokv.Tokenizer.from_folder(folder)
    cases = json.loads((folder / "encode_cases.json").read_text())
    texts = [case["text"] if isinstance(case, dict) else case[0] for case in cases]
    assert len(texts) > 20
    for text in texts:
        assert ours.encode(text) == published.encode(text), text
    code = {
        token: id for token, id in ids.items() if token.startswith(("<|fim_", "<|repo_", "<|file_"))
    }
    assert ours.control_ids == published.control_ids | set(code.values()) and len(code) == 6
    named = [end.text for end in endings.ends(ours)]
    assert named == ["<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"]
    assert "</s>" in fields["model"]["vocab"] and "</s>" not in ours.special_tokens, (
        "a word that merges make stays one"
    )


# --- lists of texts, read all at once ---------------------------------------------------------------------------------

SHORT = 4_000 * [b"x"]  # the longest texts are found beside many others
LISTS = {  # name → texts as bytes; whether `plain_texts` finds them
    "tokens": ([b"a", "\u0120the".encode(), b"hello"], True),
    "one": ([b"x"], True),
    "lengths around a byte": ([bytes([65]) * n for n in (255, 256, 257, 511, 512)] + SHORT, True),
    "the longest plain text": ([b"a" * 65_535, *SHORT], True),
    "longer": ([b"a" * 65_536, *SHORT], False),
    "longer than usual": ([b"a" * 99, b"b"], False),
    "an empty text": ([b"a", b"", b"b"], True),
    "an empty text at the end": ([b"a", b"b", b""], True),
    "two empty texts": ([b"a", b"", b"", b"b"], False),
    "nothing": ([], False),
    "a zero byte": ([b"a\0b", b"c"], False),
    "a zero byte at the end": ([b"a\0", b"c"], False),
    "a text with a length inside": ([b"a\5\0\0\0\0\0\0\0hello", *SHORT], False),
    "zero bytes at the beginning": ([b"\0\0\0\0\0\0a", *SHORT], False),
}


@pytest.mark.parametrize(("texts", "plain"), LISTS.values(), ids=LISTS)
def test_a_list_of_texts_is_read_at_once_only_if_that_gives_the_same(texts, plain, tmp_path):
    """The list is followed by another key, which must begin where the list ends."""
    data = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    path = tmp_path / "x.gguf"
    path.write_bytes(
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 2)
        + KEY
        + struct.pack("<IIQ", 9, 8, len(texts))
        + data
        + struct.pack("<Q", 3)
        + b"end"
        + struct.pack("<II", 4, 77)
        + bytes(64)
    )
    assert read_gguf(path).metadata == {"k": [text.decode() for text in texts], "end": 77}
    found = plain_texts(path, path.read_bytes(), 24 + 9 + 16, len(texts))
    assert (found is not None) == plain


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b"\xc4", b"\xa0"], ids=["wrong", "cut", "second half"]
)
def test_a_token_that_is_no_utf_8_is_refused(bad, make):
    """The bytes of a character cannot be divided between two tokens: \xc4 and \xa0 are one."""
    _, path = make()
    found = read_gguf(path)
    texts = found.metadata["tokenizer.ggml.tokens"]
    long = max((text for text in texts if text.isascii()), key=len).encode()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\0" + long, b"\0" + bad + long[len(bad) :], 1))
    with pytest.raises(CheckpointError, match="not UTF-8"):
        nanokv.load(path)
