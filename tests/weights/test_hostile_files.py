"""Files written by a stranger: JSON that is too large, too deep or says a name twice, tokenizers that never end.

Each is refused with an error that names the file and the numbers, before it costs time or memory.
"""

import gc
import json
import os
import struct
import time
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nanokv
from nanokv.config import Config, GenerationConfig
from nanokv.errors import (
    CacheError,
    ConfigError,
    NanoKVError,
    SessionError,
    TokenizerError,
    foreign,
)
from nanokv.fast import private
from nanokv.text.tokenizer import Tokenizer
from nanokv.text.tokenizer_file import REGEXES, read_backend
from weights_loader import CheckpointError, check_tokenizer, strict
from weights_loader.shards import read_header


class Panic(BaseException):
    """Stands for pyo3_runtime.PanicException, which cannot be made from Python."""


Panic.__name__ = "PanicException"


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_a_repeated_key_is_found_in_linear_time(tmp_path):
    """It was searched for with list.count per key: 40,000 keys in a header ran past 15 s."""
    text = "{" + ",".join(f'"k{i}": 1' for i in range(200_000)) + ', "k199999": 2}'
    began = time.thread_time()
    with pytest.raises(ValueError, match='key "k199999" appears twice'):
        strict.loads(text)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 66 + "]" * 66, "nested more than 64 levels"),
        ('{"a":' * 900 + "1" + "}" * 900, "more than 64 levels"),
        ("[" * 200_000, "nested more than 64 levels"),
        ("1" * 41, "an integer of 41 digits"),
        ("-" + "9" * 5000, "an integer of 5,001 digits"),
        ("1e999", "1e999 is no finite number"),
        ("[" + "[]," * 2_000_001 + "1]", "2,000,002 lists and objects, at most 2,000,000"),
        (b"\xff\xfe{\0}\0", "codec can't decode"),
        (b"\xef\xbb\xbf{}", "BOM"),
        ("", "Expecting value"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_json_that_no_honest_file_holds(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        strict.loads(text)
    assert len(str(caught.value)) < 300


NUMBERS = st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(VALUES)
def test_honest_json_is_read_as_json_reads_it(value):
    text = json.dumps(value)
    assert strict.loads(text) == json.loads(text) == strict.loads(text.encode())


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_json_is_read(collects):
    """It would find none, and take as long as reading; afterwards the collector is as it was, after an error too."""
    began, was = [], gc.isenabled()
    text = json.dumps([["Ġa", "b"]] * 50_000)
    (gc.enable if collects else gc.disable)()
    gc.callbacks.append(lambda phase, info: began.append(phase))
    try:
        assert len(strict.loads(text)) == 50_000 and gc.isenabled() is collects
        assert began.count("start") <= 3  # of over 70, and these after the end
        with pytest.raises(ValueError, match="Expecting value"):
            strict.loads("[1, x]")
        assert gc.isenabled() is collects
    finally:
        gc.callbacks.pop()
        (gc.enable if was else gc.disable)()


def test_the_deepest_json_that_is_read():
    assert strict.loads("[" * 64 + "]" * 64) is not None
    assert strict.loads("null") is None


@pytest.mark.parametrize(
    "name", [name for name in strict.LIMITS if name.endswith((".json", ".jinja"))]
)
def test_every_file_of_a_model_has_a_limit(tmp_path, name, monkeypatch):
    monkeypatch.setitem(strict.LIMITS, name, 100)
    (tmp_path / name).write_text('{"a": "' + "x" * 92 + '"}')
    with pytest.raises(CheckpointError, match=rf"{name} has 101 bytes; at most 100"):
        strict.read_object(tmp_path / name)
    (tmp_path / name).write_text('{"a": "' + "x" * 91 + '"}')
    assert strict.read_object(tmp_path / name)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_of_300_megabytes_is_not_read(tmp_path, name):
    with open(tmp_path / name, "wb") as file:
        file.truncate(300_000_000)
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=r"300,000,000 bytes; at most 1,000,000"):
        (Config if name == "config.json" else GenerationConfig).from_folder(tmp_path)
    assert time.perf_counter() - began < 1


def test_a_session_has_limits_too(tmp_path, monkeypatch):
    from nanokv.apps.cli.chat.transcript import read

    path = tmp_path / "s.jsonl"
    head = json.dumps({"format": "nanokv-session-1"}) + "\n"
    path.write_text(head + "[" * 5000 + "\n" + head)
    with pytest.raises(SessionError, match="line 2: not a line of a session"):
        read(path)
    monkeypatch.setitem(strict.LIMITS, "session", 30)
    with pytest.raises(SessionError, match="at most 30 are read"):
        read(path)


def test_a_cache_file_with_a_right_checksum_and_wrong_facts(tmp_path):
    """The checksum has no secret: a stranger's file can carry a right one."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from nanokv.cache import KVCache, saving

    model, _ = nanokv.load("tiny")
    cache = nanokv.make_cache("dict", model.config)
    nanokv.prefill(model, torch.tensor([[5, 6, 7]]), cache, 0)
    cache.save(tmp_path / "c", tokens=[5, 6, 7])
    with safe_open(tmp_path / "c", framework="pt") as file:
        meta, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    wrong = [
        ("rows", "abc"),
        ("rows", "2"),
        ("rows", "1000000000000"),
        ("rows", "null"),
        ("length", "[[[["),
        ("options", "[]"),
        ("options", '{"a": 1}'),
        ("cache", "nothing"),
        ("tokens", '{"a": 1}'),
        ("tokens", '[1, "x", 2]'),
        ("capacity", '"9"'),
        ("salted", "{"),
        ("config", "[1]"),
        ("length", "1" * 5000),
    ]
    for field, value in wrong:
        changed = meta | {field: value}
        save_file(
            tensors, tmp_path / "d", metadata=changed | {"sha256": saving.digest(changed, tensors)}
        )
        with pytest.raises(NanoKVError):
            KVCache.load(tmp_path / "d", model.config)
    for rows in ("0", "65537"):
        changed = meta | {"rows": rows}
        save_file(
            tensors, tmp_path / "d", metadata=changed | {"sha256": saving.digest(changed, tensors)}
        )
        with pytest.raises(CacheError, match=f"says {rows} rows; 1 to 65,536 are read"):
            KVCache.load(tmp_path / "d", model.config)
    for less in ("rows", "tokens", "cache"):
        changed = {key: text for key, text in meta.items() if key != less}
        save_file(
            tensors, tmp_path / "d", metadata=changed | {"sha256": saving.digest(changed, tensors)}
        )
        with pytest.raises(NanoKVError):
            KVCache.load(tmp_path / "d", model.config)
    for key in ("layers.0.key", "layers.1.value"):
        other = {k: torch.zeros(1, 1, 2) if k == key else t for k, t in tensors.items()}
        save_file(other, tmp_path / "d", metadata=meta | {"sha256": saving.digest(meta, other)})
        with pytest.raises(NanoKVError):
            KVCache.load(tmp_path / "d", model.config)


@pytest.mark.parametrize(
    ("kind", "options", "pages"), [("paged", {}, 5_000_000), ("batch", {"of": "paged"}, 3_000_000)]
)
def test_a_cache_file_does_not_say_how_much_memory_is_taken(tmp_path, kind, options, pages):
    """A pool's lists cost 40 bytes per page, used or not: 1e9 pages in a file of 4 kB ended the process."""
    model, _ = nanokv.load("tiny")
    cache = nanokv.make_cache(kind, model.config, 2, pages=20, **options)
    nanokv.prefill(model, [[5, 6, 7]] * 2, cache, 0)
    for part in (*getattr(cache, "rows", ()), cache):
        part.made = replace(part.made, options=part.made.options | {"pages": pages})
    cache.save(tmp_path / "c")
    with pytest.raises(CacheError, match=f"says {pages:,} pages, 2 rows; at most 4,194,304"):
        type(cache).load(tmp_path / "c", model.config)
    assert type(cache).load(tmp_path / "c", model.config, pages=30).length == 3


# --- foreign code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason", [Panic("Onig: retry-limit"), Exception("plain"), RuntimeError("x" * 3_000_000)]
)
def test_whatever_a_library_raises_gets_a_name(reason):
    """A panic of Rust code is a BaseException: `except Exception` lets it through, and the user sees exit code 1."""
    call = foreign("text cannot be encoded", TokenizerError)
    with pytest.raises(TokenizerError, match="text cannot be encoded: ") as caught, call:
        raise reason
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "reason", [KeyboardInterrupt(), SystemExit(3), MemoryError(), ConfigError("ours")]
)
def test_what_is_no_failure_of_the_library_passes(reason):
    with pytest.raises(type(reason)), foreign("text cannot be encoded", TokenizerError):
        raise reason


def test_a_real_panic_gets_a_name(small):
    """A Tokenizer can also be made of a backend that was not read from a file."""
    backend = tokenizers.Tokenizer.from_str(small.to_str())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex("(a+)+$|x"), "isolated"
    )
    with pytest.raises(
        TokenizerError, match=r"text of 61 characters cannot be encoded: .*retry-limit"
    ):
        Tokenizer(backend).encode("a" * 60 + "b")


# --- tokenizer.json ---------------------------------------------------------------------------------------------------


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def template(single):
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


@pytest.fixture(scope="module")
def small(tiny_folder):
    return tokenizers.Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))


@pytest.fixture
def write(tiny_folder, tmp_path):
    """write(**parts) → path of a tokenizer.json with these parts replaced; a dotted name goes one level down."""

    def change(**parts):
        fields = json.loads((tiny_folder / "tokenizer.json").read_text())
        for name, value in parts.items():
            place, _, inner = name.partition("__")
            (fields[place] if inner else fields)[inner or place] = value
        (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
        return tmp_path / "tokenizer.json"

    return change


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 200}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [SPLIT | {"pattern": {"Regex": "(a+)+$|x"}}, BYTES],
                }
            },
            r'regex of 8 characters: "\(a\+\)\+\$\|x"',
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [SPLIT | {"pattern": {"Regex": "a|" * 50_000}}, BYTES],
                }
            },
            "regex of 100,000 characters",
        ),
        ({"pre_tokenizer": SPLIT | {"pattern": {"String": ""}}}, "unknown regex"),
        ({"pre_tokenizer": SPLIT | {"pattern": 3}}, "unknown regex"),
        ({"pre_tokenizer": None}, "0 ByteLevel steps"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES, BYTES]}},
            "2 ByteLevel steps",
        ),
        (
            {"pre_tokenizer": {"type": "Metaspace"}},
            '"Metaspace" is not accepted: ByteLevel, Digits',
        ),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 9}},
            "9 steps, at most 8",
        ),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 9}},
            '"Replace" is not accepted: NFC, NFD',
        ),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}},
            '"Precompiled" is not accepted',
        ),
        ({"normalizer": {"type": "Sequence", "normalizers": [None]}}, '"None" is not accepted'),
        ({"normalizer": {"type": "Sequence"}}, '"Sequence" is not accepted'),
        ({"normalizer": []}, "is not accepted"),
        ({"normalizer": {"type": ["NFC"]}}, "is not accepted"),
        ({"post_processor": {"type": "BertProcessing"}}, '"BertProcessing" is not accepted'),
        *(
            ({"post_processor": template(single)}, "names the text")
            for single in (
                [TEXT] * 10_000,
                [TEXT] * 2,
                [],
                "$A",
                [{"Sequence": {"id": "B", "type_id": 0}}],
            )
        ),
        ({"model__continuing_subword_prefix": "x" * 1_000_000}, "byte-level BPE has none"),
        ({"model__end_of_word_suffix": "</w>"}, 'end_of_word_suffix is "</w>"'),
        ({"model__dropout": 0.9}, 'dropout is "0.9"'),
        ({"model__dropout": True}, 'dropout is "True"'),
        ({"model": []}, 'model "None", only BPE'),
        ({"decoder": "ByteLevel"}, 'decoder "None", only ByteLevel'),
        ({"added_tokens": [{"content": f"<{i}>"} for i in range(10_001)]}, "at most 10,000 tokens"),
        (
            {"added_tokens": [{"content": "x" * 1001}]},
            "its content must have 1 to 1,000 characters",
        ),
        ({"added_tokens": [3]}, "its content must have"),
        ({"model__merges": [["a", "nowhere"]]}, "cannot be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tokenizer_that_could_run_for_ever_is_refused(write, parts, words):
    began = time.thread_time()
    with pytest.raises(TokenizerError, match=words) as caught:
        read_backend(write(**parts))
    assert "tokenizer.json" in str(caught.value) and len(str(caught.value)) < 600
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": None},
        {"normalizer": {"type": "NFKC"}},
        {"model__dropout": None},
        {"model__dropout": 0.0},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "NFC"}]}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [SPLIT | {"pattern": {"String": " "}}, BYTES],
            }
        },
        {"post_processor": BYTES},
        {"post_processor": template([TEXT])},
        {"model__continuing_subword_prefix": "", "model__end_of_word_suffix": None},
    ],
    ids=str,
)
def test_what_published_tokenizers_use_is_read(write, parts):
    path = write(**parts)
    ids = read_backend(path)[0].encode("The cache 42").ids
    assert ids == tokenizers.Tokenizer.from_file(str(path)).encode("The cache 42").ids != []


def growth(regex: str, text: str) -> float:
    """How many times as long 8 times as much text takes: about 8 if the time is linear, 64 if it is quadratic.

    It is processor time of this thread, and the best of six: other processes do not count.
    """
    splitting = tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")

    def seconds(length: int) -> float:
        part = (text * length)[:length] + "\0"
        times = []
        for _ in range(6):
            began = time.thread_time()
            splitting.pre_tokenize_str(part)
            times.append(time.thread_time() - began)
        return min(times)

    return seconds(8 * SOME) / seconds(SOME)


SOME = 1_000  # characters; a quadratic regex takes a fraction of a second for 8 times as many
LINEAR = 24  # a growth between 8 and 64


@pytest.mark.parametrize("family", REGEXES)
def test_every_known_regex_is_linear_on_bad_text(write, family):
    """Text that makes a regex try again: long runs of one class, mixed runs, spaces without an end."""
    steps = [SPLIT | {"pattern": {"Regex": REGEXES[family]}}, BYTES | {"use_regex": False}]
    read_backend(write(pre_tokenizer={"type": "Sequence", "pretokenizers": steps}))
    for text in ("a", " ", "1", "\n", ".", "Aa", "a1", " \n", "a'", "é", "\u0301", "'s"):
        assert growth(REGEXES[family], text) < LINEAR, text


def test_a_regex_that_is_not_linear_is_found():
    """It searches from each space to the last one."""
    assert growth(" +x|.", " ") > LINEAR


def test_the_regexes_are_those_of_transformers():
    """The reference's own table of the families, so that a slip of the pen would show."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping as table

    assert set(table.GGUF_PRE_TOKENIZER_SPLITS.values()) <= set(REGEXES.values())


def test_ids_of_the_vocabulary_must_be_whole_numbers(write):
    with pytest.raises(CheckpointError, match="malformed"):
        check_tokenizer(write(model__vocab={"a": "1"}), 300)


def test_a_header_of_countless_empty_tensors_is_refused(tmp_path):
    """300,000 of them took 11 s and 500 MB of memory for a file of 20 MB."""
    header = {
        f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(50_001)
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="has 50,001 tensors; at most 50,000"):
        read_header(tmp_path / "model.safetensors")


def test_a_pipe_in_the_place_of_a_kernel_file_does_not_block(tmp_path):
    path = tmp_path / f"kernels-{'0' * 64}.so"
    os.mkfifo(path, 0o600)
    assert private.open_checked(path) is None
