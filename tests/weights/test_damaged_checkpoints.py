"""500 seeded damages to a checkpoint: each load ends in an error with a name, or in the model that transformers loads.

The rest, a bare TypeError, a hang, gigabytes, other logits than transformers', is what a stranger's file or a bad disk
would turn into a wrong answer. `DAMAGES` are functions (folder, random) → None that change one thing. Seed n picks
damage n % len(DAMAGES), so that every kind comes equally often. Forty of them belong to the quick tests.
"""

import json
import random
import resource
import shutil
import struct
import sys
import time
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import nanokv
from nanokv.errors import NanoKVError
from oracle import gap
from weights_loader import CheckpointError

CASES, QUICK = 500, 40
SECONDS, BYTES = 5.0, 500e6
IDS = torch.tensor([[5, 60, 7, 200, 31, 9]])
TEXT = "The cache holds aaaaaaaaaaaaaaaa 世界 3.14 <|im_end|>"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
ODD = (  # values in place of any other
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    10**9,
    10**30,
    -(10**30),
    1.5,
    1e-30,
    1e300,
    "",
    "x",
    "0",
    "\x9b\u202e\x00",
    "a" * 10_000,
    [],
    {},
    [[]],
    {"a": 1},
    [0],
    "NaN",
    ["full_attention"],
)
RAW = (
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"1" * 6000,
    b"[" * 3000,
    b'"\xff"',
    b'"\\ud800"',
    b"",
    b"[1,]",
    b"{'a': 1}",
)


# --- what can be damaged ----------------------------------------------------------------------------------------------


def flip_bits(folder, rng, name):
    data = bytearray((folder / name).read_bytes())
    for _ in range(rng.choice((1, 1, 2, 16))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (folder / name).write_bytes(data)


def flip_header(folder, rng):
    data = bytearray((folder / WEIGHTS).read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
    (folder / WEIGHTS).write_bytes(data)


def truncate(folder, rng, name):
    data = (folder / name).read_bytes()
    cut = rng.choice((0, 1, 7, 8, 9, rng.randrange(len(data)), len(data) - 1))
    (folder / name).write_bytes(data[:cut])


def extend(folder, rng, name):
    with open(folder / name, "ab") as file:
        file.write(rng.choice((b"\0", b" ", b"\n", b"x" * 100, b"{}", b"\0" * 4096)))


def overwrite(folder, rng, name):
    """A block of zeros or noise, as a bad sector leaves it."""
    data = bytearray((folder / name).read_bytes())
    start, length = rng.randrange(len(data)), rng.choice((16, 512, 4096))
    data[start : start + length] = rng.choice((bytes(length), rng.randbytes(length)))[
        : len(data) - start
    ]
    (folder / name).write_bytes(data)


def replace_file(folder, rng, name):
    """Gone, a folder, a link to nowhere, another file of the same folder, another encoding."""
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    kind = rng.randrange(6)
    if kind == 1:
        (folder / name).mkdir()
    elif kind == 2:
        (folder / name).symlink_to("nowhere")
    elif kind == 3:
        shutil.copy(folder / rng.choice([n for n in JSON_FILES if n != name]), folder / name)
    elif kind == 4:
        (folder / name).write_bytes(data.decode("latin-1").encode("utf-16"))
    elif kind == 5:
        (folder / name).write_bytes(b"\xef\xbb\xbf" + data)


# --- tensors ----------------------------------------------------------------------------------------------------------


def tensors_changed(folder, rng):
    """One tensor missing, extra, twice, swapped, of another shape or dtype; the file itself is a good one."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    one, other = rng.sample(names, 2)
    kind = rng.randrange(10)
    if kind == 0:
        del tensors[one]
    elif kind == 1:
        tensors[
            rng.choice(
                (
                    "model.layers.3.mlp.up_proj.weight",
                    "x",
                    "lm_head.bias",
                    "model.rotary_emb.inv_freq",
                    "model.layers.0.self_attn.rotary_emb.inv_freq",
                    "\x9b",
                )
            )
        ] = torch.ones(4)
    elif kind == 2:
        tensors[one], tensors[other] = tensors[other], tensors[one]
    elif kind == 3:
        tensors[one] = tensors[one].flatten()
    elif kind == 4:
        tensors[one] = tensors[one].to(
            rng.choice((torch.int8, torch.int64, torch.bool, torch.float64))
        )
    elif kind == 5:
        tensors[one] = tensors[one].to(rng.choice((torch.bfloat16, torch.float16)))
    elif kind == 6:
        tensors[one] = tensors[one].unsqueeze(0)
    elif kind == 7:
        tensors[one] = tensors[one][:-1].clone()
    elif kind == 8:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * rng.choice(
            (1.0, 0.5)
        )
    else:
        tensors[one.removeprefix("model.")] = tensors.pop(one)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def header_lies(folder, rng):
    """The header says another dtype, shape, place or name than the bytes have."""
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.sample(names, 2)
    kind = rng.randrange(10)
    if kind == 0:
        header[one]["dtype"] = rng.choice(
            ("F64", "I8", "BF16", "f32", "", None, 3, ["F32"], "F8_E4M3")
        )
    elif kind == 1:
        header[one]["shape"] = rng.choice(
            ([], [0], [2**62, 4], [-1], [1.0], "x", None, [10**40], [1] * 2000, [[1]])
        )
    elif kind == 2:
        header[one]["data_offsets"] = rng.choice(
            ([0, 0], [0], [-4, 0], [0, 10**18], [0, 10**39], None, "x", [4, 0])
        )
    elif kind == 3:
        header[one]["data_offsets"] = header[other]["data_offsets"]
    elif kind == 4:
        header[one]["extra"] = 1
    elif kind == 5:
        header["__metadata__"] = rng.choice(
            (None, 3, [], {"a": 1}, {"format": "tf"}, "x", {"a": "b" * 10_000})
        )
    elif kind == 6:
        header[one] = rng.choice(ODD)
    elif kind == 7:
        header[one], header[other] = header[other], header[one]
    elif kind == 8:
        header[one.upper()] = header.pop(one)
    else:
        header[one]["shape"] = header[one]["shape"][::-1]
    write_header(folder, json.dumps(header).encode(), data[8 + length :])


def header_broken(folder, rng):
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, values = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(6)
    if kind == 0:
        lie = rng.choice((0, 1, 2**63, 2**64 - 1, length + 1))
        return (folder / WEIGHTS).write_bytes(struct.pack("<Q", lie) + data[8:])
    first = header.index(b'"', 2)
    changed = {
        1: header.decode().encode(rng.choice(("utf-16", "utf-32"))),
        2: header[:1] + header[1:].rstrip()[:-1] + b"," + header[1:],  # every name twice
        3: b" " * 8 + header,
        4: header[:first] + rng.choice(RAW) + header[first:],
        5: rng.choice((b"{}", b"[]", b"null", b"", b"{" * 5000)),
    }[kind]
    write_header(folder, changed, values)


def write_header(folder, header: bytes, values: bytes):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + values)


def shards_damaged(folder, rng):
    """Two shards and an index that says something else."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, files = (
        sorted(tensors),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    )
    half = len(names) // 2
    placed = {name: files[i >= half] for i, name in enumerate(names)}
    for file in files:
        save_file(
            {name: tensors[name] for name in names if placed[name] == file},
            folder / file,
            {"format": "pt"},
        )
    index = {"metadata": {"total_size": 1}, "weight_map": dict(placed)}
    one, kind = rng.choice(names), rng.randrange(9)
    if kind == 0:
        places = ("../x.safetensors", "/etc/passwd", "x.bin", "", "a/b.safetensors", 3, None)
        index["weight_map"][one] = rng.choice(places)
    elif kind == 1:
        del index["weight_map"][one]
    elif kind == 2:
        index["weight_map"][one] = files[placed[one] == files[0]]
    elif kind == 3:
        index["weight_map"]["model.extra.weight"] = files[0]
    elif kind == 4:
        (folder / rng.choice(files)).unlink()
    elif kind == 5:
        index["weight_map"] = rng.choice((None, [], {}, "x", 3))
    elif kind == 6:
        flip_bits(folder, rng, rng.choice(files))
    elif kind == 7:
        index["metadata"] = rng.choice(ODD)
    (folder / INDEX).write_text(json.dumps(index))
    if kind == 8:
        flip_bits(folder, rng, INDEX)


# --- JSON -------------------------------------------------------------------------------------------------------------


def json_value(folder, rng, name):
    """One value somewhere in the file becomes an odd one, or goes, or a field joins."""
    fields = json.loads((folder / name).read_text())
    places = list(walk(fields))
    place, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0 and isinstance(place, dict):
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        joins = ("x", "num_experts", "dropout", "normalizer", "head_dim", "rope_scaling", "")
        place[rng.choice(joins)] = rng.choice(ODD)
    else:
        place[key] = rng.choice(ODD)
    (folder / name).write_text(json.dumps(fields))


def walk(value):
    """(container, key) of every place; of the long lists in a vocabulary only a few."""
    keys = list(value if isinstance(value, dict) else range(len(value)))
    for key in keys if len(keys) < 100 else keys[:3]:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from walk(value[key])


def json_text(folder, rng, name):
    """Bytes that no JSON writer writes, in place of a value, and names that stand twice."""
    data = (folder / name).read_bytes()
    colons = [i for i, byte in enumerate(data[:3000]) if byte == ord(":")]
    at = rng.choice(colons) + 1
    end = min(i for i in (data.find(b",", at), data.find(b"}", at), len(data)) if i > 0)
    if rng.random() < 0.3:
        data = data.replace(b"{", b'{"model_type": "qwen3", "model_type": "qwen3",', 1)
    else:
        data = data[:at] + rng.choice(RAW) + data[end:]
    (folder / name).write_bytes(data)


def steps(folder, rng):
    """A pipeline in tokenizer.json that nobody publishes."""
    fields = json.loads((folder / "tokenizer.json").read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": rng.choice(("(a+)+$|x", "(?:", "", ".*.*.*x", "(?<=a)+"))},
        "behavior": rng.choice(("Isolated", "x")),
        "invert": False,
    }
    replace = {
        "type": "Replace",
        "pattern": {"String": rng.choice(("", "a"))},
        "content": "a" * 300,
    }
    bytes_step = fields["pre_tokenizer"]
    part, value = rng.choice(
        (
            ("pre_tokenizer", split),
            ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [split, bytes_step]}),
            ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [bytes_step] * 30}),
            ("pre_tokenizer", None),
            ("pre_tokenizer", bytes_step | {"add_prefix_space": 3}),
            ("normalizer", {"type": "NFC"}),
            ("normalizer", {"type": "Sequence", "normalizers": [replace] * 9}),
            ("normalizer", {"type": "Precompiled"}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
            ("decoder", None),
            ("decoder", {"type": "Sequence", "decoders": []}),
            ("post_processor", {"type": "BertProcessing"}),
            (
                "truncation",
                {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            ),
            (
                "padding",
                {
                    "strategy": {"Fixed": 10**9},
                    "direction": "Left",
                    "pad_to_multiple_of": 10**9,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "x",
                },
            ),
            ("added_tokens", [{"id": 0, "content": "a" * 100_000}]),
            ("added_tokens", [{"id": -1}]),
            ("model", {"type": "BPE"}),
            ("added_tokens", [fields["added_tokens"][0] | {"id": 10**6}]),
            ("version", "9.9"),
        )
    )
    fields[part] = value
    (folder / "tokenizer.json").write_text(json.dumps(fields))


def of(change, name):
    def damage(folder, rng):
        change(folder, rng, name)

    damage.__name__ = f"{change.__name__} {name}"
    return damage


DAMAGES = [
    *(
        of(change, name)
        for change in (flip_bits, truncate, overwrite, replace_file, json_value, json_text)
        for name in JSON_FILES
    ),
    *(of(json_value, "config.json") for _ in range(3)),
    *(of(json_value, "tokenizer.json") for _ in range(2)),
    *(of(change, WEIGHTS) for change in (flip_bits, truncate, extend, overwrite, replace_file)),
    of(extend, "config.json"),
    flip_header,
    flip_header,
    tensors_changed,
    tensors_changed,
    tensors_changed,
    header_lies,
    header_lies,
    header_lies,
    header_broken,
    header_broken,
    shards_damaged,
    shards_damaged,
    shards_damaged,
    steps,
    steps,
    steps,
]


# --- what must come out -----------------------------------------------------------------------------------------------


def damaged(tiny_folder, folder, seed):
    """A copy of the checkpoint with damage number `seed` → what was done."""
    rng = random.Random(f"damage {seed}")
    damage = DAMAGES[seed % len(DAMAGES)]
    shutil.copytree(tiny_folder, folder)
    damage(folder, rng)
    return damage.__name__


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(tiny_folder, folder, seed) -> str:
    """ "refused", or "equal": loaded, and transformers has the same logits."""
    what = damaged(tiny_folder, folder, seed)
    began, before = time.perf_counter(), peak_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, tokenizer = nanokv.load(folder)
            ids = tokenizer.encode(TEXT)
            text = tokenizer.decode(ids)
            ours = nanokv.score(model, IDS)
    except (NanoKVError, CheckpointError) as error:
        assert 0 < len(str(error)) < 3000, what
        return "refused"
    finally:
        seconds, more = time.perf_counter() - began, peak_bytes() - before
        assert seconds < SECONDS and more < BYTES, (what, seconds, more)
    compare(folder, what, ours, ids, text)
    return "equal"


def compare(folder, what, ours, ids, text):
    """Loaded: then transformers must load it too, with the same logits (NaN at the same places) and the same ids."""
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        reference, info = Qwen3ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:
        if "expected float, got int" in str(error):  # "rms_norm_eps": 1 is a number to us
            return
        raise
    # tie_word_embeddings false and no head: we tie and warn, transformers draws a random one.
    if info["missing_keys"]:
        assert set(info["missing_keys"]) == {"lm_head.weight"}, what
        return
    reference.eval()
    with torch.inference_mode():
        theirs = reference(IDS).logits
    assert torch.equal(ours.isnan(), theirs.isnan()), what
    size = max(1.0, theirs.nan_to_num().abs().max().item())
    assert gap(ours.nan_to_num(), theirs.nan_to_num()) <= 1e-5 * size, what
    backend = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert ids == backend(TEXT, add_special_tokens=False)["input_ids"], what
    assert text == backend.decode(ids, clean_up_tokenization_spaces=False), what


@pytest.mark.parametrize("seed", random.Random(0).sample(range(CASES), QUICK))
def test_a_damaged_checkpoint_is_refused_by_name_or_harmless(tiny_folder, tmp_path, seed):
    assert check(tiny_folder, tmp_path / "damaged", seed) in ("refused", "equal")


@pytest.mark.slow
def test_five_hundred_damaged_checkpoints(tiny_folder, tmp_path):
    """Of these, some must be harmless and most refused: else the damages miss, or the loader refuses everything."""
    results, wrong = [], []
    for seed in range(CASES):
        folder = tmp_path / str(seed)
        try:
            results.append(check(tiny_folder, folder, seed))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of Rust code too
            name = DAMAGES[seed % len(DAMAGES)].__name__
            wrong.append(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:300]}")
        shutil.rmtree(folder, ignore_errors=True)
    assert wrong == []
    assert results.count("equal") > CASES * 0.1 and results.count("refused") > CASES * 0.5


def test_the_check_can_fail(tiny_folder, tmp_path, monkeypatch):
    """An error without a name, other values, too much time: each is noticed on a checkpoint that is whole."""
    import nanokv.loading

    module = sys.modules[__name__]

    monkeypatch.setattr(module, "DAMAGES", [lambda folder, rng: None])
    assert check(tiny_folder, tmp_path / "whole", 0) == "equal"
    score = nanokv.score
    for name, (place, value, error) in {
        "bare": (nanokv.loading, ("build", lambda *args: {}["x"]), KeyError),
        "other": (nanokv, ("score", lambda *args: score(*args) + 1e-3), AssertionError),
        "slow": (module, ("SECONDS", 0.0), AssertionError),
        "large": (module, ("BYTES", -1.0), AssertionError),
    }.items():
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr(place, *value)
            check(tiny_folder, tmp_path / name, 0)
