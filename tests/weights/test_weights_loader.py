"""weights_loader on folders: the name map against transformers, what is refused and how, tying, memory and time.

Bad checkpoints are made by writing bytes, not by the safetensors package, which would refuse to.
"""

import copy
import functools
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import weights_loader
from weights_loader import CheckpointError, families, names, shards

pytestmark = pytest.mark.sampled

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
UP = "model.layers.1.mlp.up_proj.weight"


def make_tensors(config, dtype=torch.float32, head=False):
    """Random values for everything that the config asks for; lm_head only on request."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        name: shape
        for name, shape in names.expected(config).items()
        if head or name != "lm_head.weight"
    }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def write(folder, config=CONFIG, tensors=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(make_tensors(config) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, config=CONFIG, tensors=None):
    """Two shards by hand: the second half of the names is in model-2.safetensors."""
    tensors = make_tensors(config) if tensors is None else tensors
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {
        name: f"model-{1 + (2 * i >= len(tensors))}.safetensors" for i, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def read_raw(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_raw(path, header, values, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + values)


def refused(folder, *words):
    """load raises one CheckpointError in one line that holds all the words; no tensor was made before it."""
    made = []
    original = shards.materialize
    shards.materialize = lambda *arguments: made.append(arguments) or original(*arguments)
    try:
        with pytest.raises(CheckpointError) as caught:
            weights_loader.load(folder)
    finally:
        shards.materialize = original
    message = str(caught.value)
    assert "\n" not in message and not made
    for word in words:
        assert word in message, message
    return caught.value


# --- what a good checkpoint gives


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_names_and_shapes_are_those_of_transformers(tied, bias, tmp_path):
    """Oracle: the checkpoint that transformers writes, one file and ten shards; every value arrives bit for bit."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    fields = {name: CONFIG[name] for name in names.SIZES} | {
        "tie_word_embeddings": tied,
        "attention_bias": bias,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**fields))
    for folder, size in ((tmp_path / "one", "1GB"), (tmp_path / "many", "5KB")):
        model.save_pretrained(folder, max_shard_size=size)
        config, state = weights_loader.load(folder)
        oracle = {names.to_nanokv(name): value for name, value in model.state_dict().items()}
        if tied:
            del oracle["lm_head.weight"]
        assert set(state) == set(oracle) and config["tie_word_embeddings"] is tied
        assert all(torch.equal(state[name], oracle[name]) for name in oracle)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3


@pytest.mark.parametrize("size", ["0.6B", "1.7B", "4B", "8B", "14B", "32B"])
def test_published_configs_give_transformers_parameters(size, qwen3_files):
    """Oracle: transformers' own model on the meta device, for every published dense size."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(qwen3_files / size))
    config = json.loads((qwen3_files / size / "config.json").read_text())
    assert names.expected(config) == {
        name: tuple(value.shape) for name, value in model.state_dict().items()
    }


def test_the_name_map_is_invertible():
    for name in names.expected(CONFIG | {"attention_bias": True}):
        assert names.to_hugging_face(names.to_nanokv(name)) == name
    lfm2 = CONFIG | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    for name in names.expected(lfm2):
        assert names.to_hugging_face(names.to_nanokv(name, "lfm2"), "lfm2") == name


def test_defaults_are_those_of_transformers():
    """A silent config means 32 KV heads of width 128, whatever the hidden size; null means one KV head a head."""
    from transformers import Qwen3Config

    config = {**CONFIG, "num_attention_heads": 64}
    del config["head_dim"], config["num_key_value_heads"]
    oracle = Qwen3Config(**config)
    assert names.sizes(config)["num_key_value_heads"] == oracle.num_key_value_heads == 32
    assert names.sizes(config)["head_dim"] == oracle.head_dim == 128
    assert names.sizes(config | {"num_key_value_heads": None})["num_key_value_heads"] == 64


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(stored, wanted, tmp_path, monkeypatch):
    """Conversions go through 64-byte pieces here, so that a piece border inside a tensor is tested."""
    monkeypatch.setattr(shards, "CHUNK", 64)
    tensors = make_tensors(CONFIG, stored)
    _, state = weights_loader.load(write(tmp_path, tensors=tensors), dtype=wanted)
    for name, value in tensors.items():
        assert torch.equal(state[names.to_nanokv(name)], value.to(wanted or stored))
        assert state[names.to_nanokv(name)].dtype == (wanted or stored)


def test_a_value_too_large_for_float16_is_refused(tmp_path):
    """bfloat16 reaches 3e38, float16 65,504: a silent inf would be a silent wrong answer."""
    tensors = make_tensors(CONFIG, torch.bfloat16)
    tensors[UP][3, 4] = 70000.0
    folder = write(tmp_path, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"up_proj.*float16.*70144.*65,504"):
        weights_loader.load(folder, dtype=torch.float16)


def test_dtype_must_be_floating_point(tmp_path):
    for wrong in ("int8", "float3", torch.int8, 32):
        with pytest.raises(CheckpointError, match="is not a floating-point"):
            weights_loader.load(write(tmp_path), dtype=wrong)


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path):
    """The mapping is private: training or a test that pokes a weight must not change the checkpoint."""
    folder = write(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").chmod(0o444)
    _, state = weights_loader.load(folder)
    state["norm.weight"].zero_()
    assert (folder / "model.safetensors").read_bytes() == before
    assert not torch.equal(weights_loader.load(folder)[1]["norm.weight"], state["norm.weight"])


def test_there_may_be_more_tensors_than_files_that_may_be_open(tmp_path, monkeypatch):
    """As in every mixture of experts: 18,867 tensors in Qwen3-30B-A3B, and 1,024 files is the usual limit. Tensors of
    one window of the file share a mapping; one that crosses a window's end has its own."""
    resource = pytest.importorskip("resource", reason="no limit of open files to lower")
    monkeypatch.setattr(shards, "WINDOW", 1 << 16)
    monkeypatch.setattr(shards, "MOST_MAPPINGS", 50)
    config = CONFIG | {"num_hidden_layers": 40}
    tensors = make_tensors(config)
    write(tmp_path, config, tensors)
    limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 60, limits[1]))
    try:
        _, state = weights_loader.load(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(state) > 400
    assert all(torch.equal(state[names.to_nanokv(name)], it) for name, it in tensors.items())


@pytest.mark.parametrize("size", [0, 1000])
def test_a_file_that_is_cut_while_it_is_loaded_is_refused(tmp_path, size):
    entries = shards.read_entries(write(tmp_path))
    os.truncate(entries["model.norm.weight"].path, size)
    with pytest.raises(CheckpointError, match=f"has {size:,} bytes .* cut while"):
        entries["model.norm.weight"].view()


def test_values_at_an_odd_byte_are_copied_right(tmp_path):
    """The format does not promise alignment: a header of odd length shifts every value."""
    folder = write(tmp_path)
    header, values = read_raw(folder / "model.safetensors")
    text = json.dumps(header).encode()
    write_raw(folder / "model.safetensors", text + b" " * (8 - len(text) % 8 + 1), values)
    _, state = weights_loader.load(folder)
    assert torch.equal(state["norm.weight"], make_tensors(CONFIG)["model.norm.weight"])


def test_old_inv_freq_buffers_are_ignored(tmp_path):
    tensors = make_tensors(CONFIG)
    expected = set(weights_loader.load(write(tmp_path, tensors=tensors))[1])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    tensors["model.rotary_emb.inv_freq"] = torch.ones(3)
    assert set(weights_loader.load(write(tmp_path, tensors=tensors))[1]) == expected


def test_a_backbone_that_was_saved_alone_lacks_a_prefix(tmp_path):
    """Qwen3-Embedding: "layers.0…" for "model.layers.0…"; buffers of old versions too, and a head if there is one."""
    tensors = make_tensors(CONFIG)
    expected = weights_loader.load(write(tmp_path, tensors=tensors))[1]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    bare["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    for more in ({}, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}):
        found = weights_loader.load(write(tmp_path, tensors=bare | more))[1]
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in found
        )
    shards_of_it = write_shards(tmp_path / "shards", tensors=bare)
    assert weights_loader.load(shards_of_it)[1].keys() == expected.keys()


def test_names_with_and_without_the_prefix_are_not_mixed(tmp_path):
    tensors = make_tensors(CONFIG)
    bare = {name.removeprefix("model."): tensor.clone() for name, tensor in tensors.items()}
    error = refused(write(tmp_path, tensors=tensors | bare), "24 tensors", "embed_tokens.weight")
    assert "mixed" in error.hint
    half = dict(tensors)
    half["norm.weight"] = half.pop("model.norm.weight")
    assert "mixed" in refused(write(tmp_path, tensors=half), "1 tensors", "norm.weight").hint


# --- the output head


@pytest.mark.parametrize("says", [True, False])
def test_an_equal_head_is_tied_and_dropped(says, tmp_path, monkeypatch):
    """The published 0.6B stores lm_head although it is tied: keeping it would cost V·C values for nothing."""
    monkeypatch.setattr(shards, "CHUNK", 64)
    tensors = make_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config, state = weights_loader.load(
            write(tmp_path, CONFIG | {"tie_word_embeddings": says}, tensors)
        )
    assert "lm_head.weight" not in state and config["tie_word_embeddings"] is True


def test_a_different_head_is_kept_with_a_warning(tmp_path, monkeypatch):
    """One value differs, in the last piece that is compared: transformers does not tie either."""
    monkeypatch.setattr(shards, "CHUNK", 64)
    tensors = make_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.warns(weights_loader.CheckpointWarning, match="lm_head.weight differs"):
        config, state = weights_loader.load(write(tmp_path, tensors=tensors))
    assert (
        torch.equal(state["lm_head.weight"], tensors["lm_head.weight"])
        and config["tie_word_embeddings"] is False
    )


def test_an_untied_config_without_a_head_is_tied_with_a_warning(tmp_path):
    with pytest.warns(weights_loader.CheckpointWarning, match="no lm_head.weight"):
        config, state = weights_loader.load(
            write(tmp_path, CONFIG | {"tie_word_embeddings": False})
        )
    assert config["tie_word_embeddings"] is True and "lm_head.weight" not in state


def test_code_that_a_checkpoint_names_is_not_run_and_that_is_said_once(tmp_path):
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    with pytest.warns(
        weights_loader.CheckpointWarning, match=r"auto_map.*not run.*plain Qwen3"
    ) as caught:
        weights_loader.load(write(tmp_path, CONFIG | code))
    assert len(caught) == 1


# --- folders and files


def test_an_empty_folder(tmp_path):
    assert "config.json" in refused(tmp_path, str(tmp_path), "no config.json", "it is empty").hint


def test_a_folder_without_config_says_what_it_has(tmp_path):
    folder = write(tmp_path)
    (folder / "config.json").unlink()
    refused(folder, "no config.json", "it has model.safetensors")


def test_a_file_instead_of_a_folder(tmp_path):
    refused(write(tmp_path) / "model.safetensors", "is a file, not a model folder")


def test_no_weights(tmp_path):
    folder = write(tmp_path)
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json")


def test_a_pickle_is_never_opened(tmp_path):
    """pickle runs code when it is read. The file here would create a witness."""
    folder = write(tmp_path)
    (folder / "model.safetensors").unlink()
    witness = tmp_path / "witness"
    (folder / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {witness}'\ntR.".encode())
    refused(folder, "pytorch_model.bin is a pickle")
    # Nor under the right name.
    os.rename(folder / "pytorch_model.bin", folder / "model.safetensors")
    refused(folder, "model.safetensors", "does not fit")
    assert not witness.exists()


def test_a_revision_of_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match=r'revision "v2" was given.*local folder'):
        weights_loader.load(write(tmp_path), revision="v2")


@pytest.mark.parametrize("kept", [0, 3, 8, 100, -1, -1000])
def test_a_truncated_file(kept, tmp_path):
    """At every depth: nothing at all, inside the length, inside the header, inside the values."""
    path = write(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    error = refused(tmp_path, "model.safetensors", f"{len(data[:kept]):,}")
    assert "fetch it again" in error.hint


@pytest.fixture
def ordinary_folder():
    """A folder that anybody may enter, in a test that runs as nobody if it began as root, who may read everything."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        user = os.geteuid()
        yield Path(folder), lambda: os.seteuid(user or 65534)
        os.seteuid(user)


def test_a_file_that_may_not_be_read(ordinary_folder):
    folder, drop_rights = ordinary_folder
    (write(folder) / "model.safetensors").chmod(0)
    drop_rights()
    refused(folder, "model.safetensors", "Permission denied")


def test_trailing_bytes(tmp_path):
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    refused(tmp_path, "describes", "the file has")


@pytest.mark.parametrize("length", [10**6, 2**63 + 5, 2**64 - 1])
def test_a_header_longer_than_the_file(length, tmp_path):
    path = write(tmp_path) / "model.safetensors"
    header, values = read_raw(path)
    write_raw(path, header, values, length)
    refused(
        tmp_path,
        "model.safetensors",
        f"{length:,} bytes does not fit in a file of {path.stat().st_size:,}",
    )


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"not json", "not valid JSON"),
        (b"[1]", "not an object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": NaN}', "NaN is no finite number"),
        (b'{"a": 1, "a": 2}', '"a" appears twice'),
        (b"[" * 100000, "nested more than 64 levels"),
        ("{}".encode("utf-16"), "not valid JSON"),
        (b'{"__metadata__": 3}', "__metadata__ is 3"),
        (b'{"a": ' + b"1" * 5000 + b"}", "an integer of 5,000 digits"),
    ],
)
def test_a_broken_header(header, words, tmp_path):
    write_raw(write(tmp_path) / "model.safetensors", header, b"")
    refused(tmp_path, "header of", "model.safetensors", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F8_E4M3"}, ['"F8_E4M3"', "BF16, F16, F32"]),
        ({"dtype": "I64"}, ['"I64"']),
        ({"dtype": None}, ['"None"']),
        ({"dtype": ["F32"]}, ["F32"]),
        ({"dtype": "BF16"}, ["takes 768 bytes", "span 1,536"]),
        ({"shape": [24, 17]}, ["[24, 17]", "1,632", "1,536"]),
        ({"shape": [24, -16]}, ["[24, -16]"]),
        ({"shape": [24.0, 16]}, ["[24.0, 16]"]),
        ({"shape": "24x16"}, ["24x16"]),
        ({"shape": [2**62, 2**62, 4]}, ["span 1,536"]),
        ({"data_offsets": [0]}, ["[begin, end]"]),
        ({"data_offsets": [-8, 1528]}, ["[begin, end]"]),
        ({"data_offsets": [1536, 0]}, ["span -1,536"]),
        ({"extra": 1}, ["expected dtype, shape and data_offsets"]),
    ],
)
def test_a_tensor_that_is_described_wrongly(change, words, tmp_path):
    path = write(tmp_path) / "model.safetensors"
    header, values = read_raw(path)
    header[UP] |= change
    write_raw(path, header, values)
    refused(tmp_path, "model.safetensors", UP, *words)


def test_a_tensor_that_is_not_an_object(tmp_path):
    path = write(tmp_path) / "model.safetensors"
    header, values = read_raw(path)
    write_raw(path, header | {UP: [1, 2]}, values)
    refused(tmp_path, "model.safetensors", UP, "found [1, 2]")


def test_overlap_and_hole(tmp_path):
    """Two tensors over the same bytes, or bytes of nobody: no writer makes them, so something is wrong."""
    path = write(tmp_path) / "model.safetensors"
    header, values = read_raw(path)
    order = sorted(
        (n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )
    overlap = copy.deepcopy(header)
    overlap[order[1]]["data_offsets"] = [offset - 4 for offset in header[order[1]]["data_offsets"]]
    write_raw(path, overlap, values)
    refused(tmp_path, "overlaps", "begins at byte", order[1])
    hole = copy.deepcopy(header)
    for name in order[3:]:
        hole[name]["data_offsets"] = [offset + 4 for offset in hole[name]["data_offsets"]]
    write_raw(path, hole, values + b"1234")
    refused(tmp_path, "leaves a hole", order[3])


# --- against the config


def test_wrong_shape(tmp_path):
    tensors = make_tensors(CONFIG)
    tensors[UP] = torch.zeros(25, 16)
    refused(write(tmp_path, tensors=tensors), "model.safetensors", UP, "[25, 16]", "[24, 16]")


def test_transposed_is_wrong_too(tmp_path):
    tensors = make_tensors(CONFIG)
    tensors[UP] = tensors[UP].T.contiguous()
    refused(write(tmp_path, tensors=tensors), UP, "[16, 24]", "[24, 16]")


@pytest.mark.parametrize("gone", [UP, "model.embed_tokens.weight", "model.norm.weight"])
def test_missing_tensor(gone, tmp_path):
    tensors = make_tensors(CONFIG)
    del tensors[gone]
    refused(write(tmp_path, tensors=tensors), "1 of 25 tensors are missing", gone)


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.2.mlp.up_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "x\x1b[31m",
        "x\x9b31m\u202e",
    ],
)
def test_extra_tensor(extra, tmp_path):
    """A layer too many is a config of another model; a control sequence in a name must not reach the terminal."""
    tensors = make_tensors(CONFIG) | {extra: torch.zeros(24, 16)}
    error = refused(write(tmp_path, tensors=tensors), "model.safetensors", "1 tensors", "[24, 16]")
    assert str(error).isprintable() and json.dumps(extra) in str(error)


def test_a_long_name_is_cut(tmp_path):
    tensors = make_tensors(CONFIG) | {"x" * 100_000: torch.zeros(1)}
    assert len(str(refused(write(tmp_path, tensors=tensors), "1 tensors"))) < 500


def test_bias_must_be_announced(tmp_path):
    tensors = make_tensors(CONFIG | {"attention_bias": True})
    refused(write(tmp_path, tensors=tensors), "8 tensors", "bias")
    refused(
        write(tmp_path, CONFIG | {"attention_bias": True}, make_tensors(CONFIG)), "8 of 33", "bias"
    )
    refused(
        write(tmp_path, CONFIG | {"attention_bias": "no"}, make_tensors(CONFIG)),
        "attention_bias",
        '"no"',
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"text"', '{"vocab_size": NaN}', '{"a": 1, "a": 1}', "\x00"]
)
def test_config_that_is_not_an_object(text, tmp_path):
    folder = write(tmp_path)
    (folder / "config.json").write_text(text)
    refused(folder, "config.json")


@pytest.mark.parametrize(
    "field", sorted(set(names.SIZES) - set(families.FAMILIES["qwen3"].defaults))
)
def test_config_lacks_a_field(field, tmp_path):
    config = {name: value for name, value in CONFIG.items() if name != field}
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "config.json", f"{field} is missing")


@pytest.mark.parametrize("value", [0, -1, 10**12, 10**30, 1.0, 1.5, "16", None, True, [16], {}])
@pytest.mark.parametrize("field", sorted(names.SIZES))
def test_config_with_absurd_sizes(field, value, tmp_path):
    """Refused by arithmetic, before a list of 10**12 layers or a terabyte can exist."""
    if field == "num_key_value_heads" and value is None:
        return  # null has a meaning here
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps(CONFIG | {field: value}))
    refused(folder, "config.json", f"{field} is {repr(value)[:40]}", "1 to")


def test_heads_must_divide(tmp_path):
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 3}))
    refused(folder, "num_attention_heads 4", "num_key_value_heads 3")


def test_another_architecture(tmp_path):
    folder = write(tmp_path)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "mistral"}))
    refused(folder, '"mistral"')


# --- shards


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_index_names_a_missing_shard(tmp_path):
    folder = write_shards(tmp_path)
    (folder / "model-2.safetensors").unlink()
    refused(folder, "1 of 2 weight files", "model-2.safetensors")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}"] + ['{"weight_map": ' + x for x in ("[]}", "{}}", '{"a": 1}}')]
)
def test_index_that_is_broken(text, tmp_path):
    folder = write_shards(tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json")


@pytest.mark.parametrize(
    "shard",
    [
        "../model-2.safetensors",
        "/tmp/model-2.safetensors",
        "sub/../../x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "x\0.safetensors",
        "..",
        "",
        "x.bin",
        "sub/model-2.safetensors",
    ],
)
def test_a_shard_that_leaves_the_folder(shard, tmp_path):
    """A readable, perfectly good file lies at the other end: the name alone must be refused."""
    folder = write_shards(tmp_path / "model")
    shutil.copy(folder / "model-2.safetensors", tmp_path / "model-2.safetensors")
    change_index(folder, lambda weight_map: weight_map.update({UP: shard}))
    refused(folder, "index.json", UP, "same folder")


def test_index_and_shards_disagree(tmp_path):
    folder = write_shards(tmp_path)
    change_index(folder, lambda weight_map: weight_map.update({UP: "model-1.safetensors"}))
    refused(folder, "model-2.safetensors holds", UP, "puts in model-1.safetensors")
    folder = write_shards(tmp_path)
    change_index(
        folder, lambda weight_map: weight_map.update({"model.ghost": "model-2.safetensors"})
    )
    refused(folder, "model-2.safetensors lacks", "model.ghost")
    folder = write_shards(tmp_path)
    change_index(
        folder, lambda weight_map: weight_map.update({"lm_head.weight": "model-2.safetensors"})
    )
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "model-2.safetensors lacks", "lm_head.weight")


@pytest.mark.parametrize("left_out", [UP, "lm_head.weight"])
def test_what_the_shards_hold_counts_and_not_what_the_index_lists(left_out, tmp_path):
    """As in transformers, which takes the shards' names from the index and their tensors from the shards."""
    tensors = make_tensors(CONFIG)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    folder = write_shards(tmp_path, tensors=tensors)
    change_index(folder, lambda weight_map: weight_map.pop(left_out))
    config, state = weights_loader.load(folder)
    assert config["tie_word_embeddings"] is True and "lm_head.weight" not in state
    assert len(state) == len(tensors) - 1
    assert torch.equal(state[UP.removeprefix("model.")], tensors[UP])


def test_a_tied_head_that_only_the_index_knows(tmp_path):
    folder = write_shards(tmp_path)
    change_index(
        folder, lambda weight_map: weight_map.update({"lm_head.weight": "model-2.safetensors"})
    )
    config, state = weights_loader.load(folder)
    assert config["tie_word_embeddings"] is True and "lm_head.weight" not in state


def test_a_tensor_in_two_shards(tmp_path):
    folder = write_shards(tmp_path)
    first = load_file(folder / "model-1.safetensors")
    save_file(first | {UP: torch.zeros(24, 16)}, folder / "model-1.safetensors")
    change_index(folder, lambda weight_map: weight_map.update({UP: "model-1.safetensors"}))
    refused(folder, UP, "model-1.safetensors", "model-2.safetensors")


def test_symlinks(tmp_path):
    """A link that the owner made (as the hub's cache does) is followed; a dangling or circular one is missing."""
    folder = write_shards(tmp_path / "model")
    blob = tmp_path / "blobs"
    blob.mkdir()
    shard = folder / "model-2.safetensors"
    shard.rename(blob / "2")
    shard.symlink_to("../blobs/2")
    assert torch.equal(
        weights_loader.load(folder)[1][names.to_nanokv(UP)], make_tensors(CONFIG)[UP]
    )
    for target in ("nowhere", "model-2.safetensors", "."):
        shard.unlink()
        shard.symlink_to(target)
        refused(folder, "missing or not regular files: model-2.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_does_not_hang_the_loader(name, tmp_path):
    folder = write(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    # Not a regular file: as good as absent here, nanokv.text.tokenizer complains.
    if name == "tokenizer.json":
        assert weights_loader.load(folder)
    else:
        refused(folder, name)


# --- tokenizer


def tokenizer(last_vocab, last_added):
    return {
        "model": {"type": "BPE", "vocab": {"a": 0, "z": last_vocab}},
        "added_tokens": [{"id": last_added, "content": "<|im_end|>"}],
    }


@pytest.mark.parametrize(
    ("ids", "token"), [((31, 5), '"z" has id 31'), ((5, 40), '"<|im_end|>" has id 40')]
)
def test_tokenizer_beyond_the_embedding(ids, token, tmp_path):
    """Such an id would fail deep inside the first forward; ids up to vocab_size - 1 are fine."""
    folder = write(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(30, 30)))
    weights_loader.load(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(*ids)))
    refused(folder, "tokenizer.json", token, "31 rows")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": 1},
        {"model": {"vocab": {"a": "b"}}},
        {"model": {"vocab": [1]}},
        {"model": {"vocab": {}}, "added_tokens": [{"id": 1}]},
    ],
)
def test_tokenizer_that_is_malformed(fields, tmp_path):
    folder = write(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    refused(folder, "tokenizer.json", "malformed")


def test_the_published_tokenizer_fits_its_embedding(qwen3_files):
    path = qwen3_files / "tokenizer" / "tokenizer.json"
    weights_loader.check_tokenizer(path, 151936)
    weights_loader.check_tokenizer(path, 151669)
    with pytest.raises(CheckpointError, match="151,668"):
        weights_loader.check_tokenizer(path, 151668)


# --- memory and time

MEASURE = """
import json, sys, time, torch
sys.path.insert(0, sys.argv[1])
from weights_loader import load, shards

def smaps():  # bytes: RSS is what `top` shows, anonymous is what nobody can take back
    fields = dict(line.split()[:2] for line in open("/proc/self/smaps_rollup").readlines()[1:])
    return {name: int(fields[name + ":"]) * 1024 for name in ("Rss", "Pss", "Anonymous")}

def peak():  # VmHWM counts mapped file pages too
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024

torch.zeros(8, dtype=torch.bfloat16).float()
import safetensors.torch, mmap
open("/proc/self/clear_refs", "w").write("5")  # resets VmHWM
before, base = smaps(), peak()
dtype = {"None": None, "float32": torch.float32}[sys.argv[3]]
start = time.perf_counter()
config, state = load(sys.argv[2], dtype=dtype)
loaded = time.perf_counter() - start
at_load = peak()
total = sum(float(t.view(-1)[::16].sum()) for t in state.values())  # touches every page
own = sum(t.numel() * t.element_size() for t in state.values())
after = smaps()
print(json.dumps({"own": own, "base": base, "peak_load": at_load, "peak": peak(), "seconds": loaded, "total": total,
                  "before": before, "after": after}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """large(head) → a folder that is written once."""
    return functools.cache(lambda head: write_large(tmp_path_factory.mktemp("large"), head))


def write_large(folder, head):
    """About 200 MB of bf16, its embedding the largest tensor, as in the published 0.6B (which stores an equal head)."""
    config = CONFIG | {
        "vocab_size": 20000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    shapes = {
        name: shape for name, shape in names.expected(config).items() if head or name != names.HEAD
    }
    write(
        folder,
        config,
        {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()},
    )
    assert (folder / "model.safetensors").stat().st_size > 195e6
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["None", "float32"])
def test_peak_memory_is_the_models_own_size(dtype, large, capsys):
    """Peak resident memory, mapped file pages included, stays within 5 % of the loaded tensors' bytes.

    Measured in a process of its own as VmHWM, reset after the imports. Counting only private memory would hide a
    source file that stays mapped beside its fp32 copy (+ 50 %); counting it is what `top` shows.
    """
    command = [sys.executable, "-c", MEASURE, str(ROOT), str(large(True)), dtype]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    seen = json.loads(done.stdout)
    extra = (seen["peak"] - seen["base"] - seen["own"]) / seen["own"]
    anonymous = seen["after"]["Anonymous"] - seen["before"]["Anonymous"]
    with capsys.disabled():
        print(
            f"\n  dtype {dtype}: tensors {seen['own'] / 1e6:.0f} MB, peak above start "
            f"{(seen['peak'] - seen['base']) / 1e6:.0f} MB (extra {extra:+.1%}), private {anonymous / 1e6:.0f} MB, "
            f"load {seen['seconds'] * 1e3:.0f} ms"
        )
    assert seen["peak"] - seen["base"] > 0.95 * seen["own"], "the measurement did not see the model"
    assert extra <= 0.05
    if dtype == "None":
        assert anonymous < 0.05 * seen["own"], (
            "an unconverted load must be views of the file, not copies"
        )
    else:
        assert anonymous > 0.95 * seen["own"]


TIME = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
import safetensors.torch
from weights_loader import load

def touch(state):
    return sum(float(t.view(-1)[::16].sum()) for t in state.values())

ours, theirs = [], []
for _ in range(5):  # interleaved; the first round warms the page cache
    start = time.perf_counter()
    touch(load(sys.argv[2])[1])
    ours.append(time.perf_counter() - start)
    start = time.perf_counter()
    touch(safetensors.torch.load_file(sys.argv[2] + "/model.safetensors"))
    theirs.append(time.perf_counter() - start)
print(min(ours[1:]), min(theirs[1:]))
"""


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize(("head", "limit"), [(False, 2), (True, 4)])
def test_time_against_safetensors(head, limit, large, capsys):
    """Load and touch every page, best of four rounds, against the reference reader on the same file.

    Generous limits, for noisy machines. A stored head costs one more pass over 2·V·C values: it is compared, not kept.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TIME, str(ROOT), str(large(head))],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=True,
    )
    ours, theirs = map(float, done.stdout.split())
    with capsys.disabled():
        print(
            f"\n  head stored {head}: load + touch {ours * 1e3:.0f} ms, safetensors.torch.load_file "
            f"{theirs * 1e3:.0f} ms, ratio {ours / theirs:.2f}"
        )
    assert ours < limit * theirs + 0.05


def test_importing_the_loader_does_not_import_torch():
    """Names, folders and downloads need none: `--help` and a missing model must answer at once."""
    code = "import sys, weights_loader, weights_loader.download; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_loader_imports_nothing_of_nanokv():
    for path in (ROOT / "weights_loader").glob("*.py"):
        assert "import nanokv" not in path.read_text() and "from nanokv" not in path.read_text()
