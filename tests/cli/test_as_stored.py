"""A GGUF file on the command line: kernels read its blocks as stored, unless a flag asks for numbers."""

import importlib
import json

import pytest

import nanokv
import weights_loader
from gguf_files import write_gguf
from nanokv.apps.cli import COMMANDS, make_parser
from nanokv.apps.cli.common import loading, speculation, speed
from nanokv.apps.cli.common.loading import load_model, weights_memory
from nanokv.costs import kv_bytes, weight_bytes
from nanokv.errors import NanoKVError
from nanokv.fast import blocks, building, native, stored
from nanokv.fast.blocks import Blocks
from nanokv.fast.stored import FastTransformer
from oracle import tiny_reference
from small_model import needs_kernels
from tiny_checkpoint import write_tokenizer

pytestmark = needs_kernels


@pytest.fixture
def make(tmp_path):
    def make(kind="Q8_0", **changes):
        write_tokenizer(tmp_path)
        reference = tiny_reference(vocab_size=320, tie_word_embeddings=False, **changes)
        return write_gguf(tmp_path / "model.gguf", reference, tmp_path, kind)

    return make


def parsed(*argv):
    """The options of `nanokv generate`."""
    module = importlib.import_module(COMMANDS["generate"][0])
    parser = make_parser("generate", module)
    return module.command_options(parser.parse([str(word) for word in argv]))


def loaded_of(given):
    return load_model(given.model, given.cache, given.output)


def kinds(model) -> set[str]:
    return {part.kind for part in model.modules() if isinstance(part, Blocks)}


@pytest.mark.parametrize(
    ("flags", "found", "text"),
    [
        ([], {"Q4_1"}, "fast kernels, weights as stored"),
        (["--fast"], {"Q4_1"}, "fast"),
        (["--dequantize"], set(), "fast kernels"),
        (["--fast", "--dequantize"], set(), "fast"),
        (["--plain"], set(), "plain (--plain)"),
        (["--quantize", "int8"], set(), "fast int8"),
        (["--dtype", "float16"], set(), "plain (no kernels for float16)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_which_flags_keep_the_blocks(make, flags, found, text):
    loaded = loaded_of(parsed("x", "-m", make("Q4_1"), *flags))
    assert kinds(loaded.model) == found and loaded.code.text == text
    assert (loaded.stored is not None) == bool(found)
    assert isinstance(loaded.model, FastTransformer) == text.startswith("fast")


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_file_without_blocks_is_read_as_before(make, kind):
    loaded = loaded_of(parsed("x", "-m", make(kind)))
    assert (
        not kinds(loaded.model) and loaded.code.text == "fast kernels" and loaded.plain is not None
    )


@pytest.mark.parametrize(
    ("flags", "found", "text"),
    [
        ([], {"Q8_0"}, "fast kernels, weights as stored"),
        (["--dequantize"], set(), "plain (no kernels for experts)"),
    ],
)
def test_experts_keep_the_blocks_too(cli, make, flags, found, text):
    path = make(model_type="qwen3_moe", norm_topk_prob=True, moe_intermediate_size=64)
    loaded = loaded_of(parsed("x", "-m", path, *flags))
    assert kinds(loaded.model) == found and loaded.code.text == text
    if found:
        code, out, err = cli("memory", path, "--context", 64, "--json")
        assert code == 0 and json.loads(out)["stored_bytes"] == loaded.stored, err


@pytest.mark.parametrize(
    ("flags", "found"),
    [([], {"Q4_0"}), (["--fast"], {"Q4_0"}), (["--dequantize"], set()), (["--plain"], set())],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_draft_model_keeps_its_blocks(tmp_path, make, flags, found):
    """Beside any target; its memory is counted as it is held."""
    target = tmp_path / "target.gguf"
    make("BF16").rename(target)
    draft = make("Q4_0")
    given = parsed("x", "-m", target, "--speculate", f"draft:{draft}", *flags)
    loaded = loaded_of(given)
    assert kinds(speculation.load_draft(str(draft), loaded)) == found
    itemsize = loaded.dtype.itemsize
    weights = weight_bytes(loaded.config, itemsize)
    held = speculation.memory(given.model.speed, loaded) - kv_bytes(
        loaded.config, loaded.context, 1, itemsize
    )
    assert held < 0.3 * weights if found else held == weights


def test_generate_and_chat_answer(cli, make):
    path = make("Q5_0")
    said = [
        cli("generate", "Once", "-m", path, "-n", 6, "-t", 0, *flags)[:2]
        for flags in ([], ["--fast"])
    ]
    assert said[0] == said[1] and said[0][0] == 0 and said[0][1]
    code, out, err = cli("generate", "Once", "-m", path, "-n", 6, "-t", 0, "--fast")
    assert code == 0 and "fast: Q5_0 weights as stored, native kernels" in err
    code, out, err = cli("chat", "-m", path, "-n", 4, stdin=b"Who are you?\n")
    assert code == 0 and out, err


def test_matrices_without_kernels_are_named(cli, make, monkeypatch):
    monkeypatch.setattr(speed, "BLOCKS", ("Q8_0",))
    assert speed.without_kernels(
        {"a": ("IQ2_S", 1, 4), "b": ("F16", 8, 4), "c": ("Q8_0", 9, 4)}
    ) == {"IQ2_S": 1}
    monkeypatch.setattr(
        speed, "stored_matrices", lambda *_: {"a": ("IQ2_S", 1, 4), "c": ("Q8_0", 9, 4)}
    )
    code, _, err = cli("generate", "Once", "-m", make(), "-n", 2)
    assert code == 0 and "1 of IQ2_S: matrices without kernels, which become bfloat16" in err


def test_the_command_line_knows_the_types_that_have_kernels():
    """It names them without torch."""
    assert set(speed.BLOCKS) == set(blocks.SIZES)


def test_kernels_that_cannot_be_loaded(make, monkeypatch):
    monkeypatch.setattr(native, "built", lambda: False)
    loaded = loaded_of(parsed("x", "-m", make()))
    assert not kinds(loaded.model) and loaded.code.text == "plain (kernels cannot be loaded)"


def test_a_machine_without_kernels_reads_numbers(make, monkeypatch):
    monkeypatch.setattr(building, "state", lambda: building.State(False, "no C++ compiler"))
    loaded = loaded_of(parsed("x", "-m", make()))
    assert not kinds(loaded.model) and loaded.code.text == "plain (no C++ compiler)"


def test_memory_is_counted_as_stored(make, monkeypatch):
    path = make("Q4_0")
    loaded = loaded_of(parsed("x", "-m", path))
    plain = weight_bytes(loaded.config, 2)
    assert 0.27 * plain <= weights_memory(loaded) < 0.3 * plain  # 4.5 of 16 bits
    free = weights_memory(loaded) + loading.cache_memory(loaded) + 1000
    monkeypatch.setattr(loading, "available_memory", lambda device: free)
    loaded_of(parsed("x", "-m", path))
    with pytest.raises(NanoKVError, match="for weights"):
        loaded_of(parsed("x", "-m", path, "--dequantize"))


def test_weights_that_are_no_numbers_are_found(make):
    path = make()
    loaded_of(parsed("x", "-m", path, "--check-finite"))


@pytest.mark.parametrize(
    ("kind", "flags", "stored"),
    [("Q4_0", [], True), ("F32", [], False), ("Q4_0", ["--dtype", "float16"], False)],
)
def test_the_memory_of_both_forms(cli, make, kind, flags, stored):
    path = make(kind)
    code, out, err = cli("memory", path, "--context", 64, "--json", *flags)
    report = json.loads(out)
    assert code == 0, err
    if stored:
        loaded = loaded_of(parsed("x", "-m", path))
        assert report["stored_bytes"] == loaded.stored < 0.3 * report["weights_bytes"]
    else:
        assert report["stored_bytes"] is None
    assert [row["stored_bytes"] for row in report["family"]][1:] == [None] * (
        len(report["family"]) - 1
    )
    assert ("as stored" in cli("memory", path, "--context", 64, *flags)[1]) == stored


def test_together_and_fits_count_the_weights_as_stored(cli, make):
    """Q4_0 by hand: 18 bytes per 32 weights of the matrices, 4 per weight of a norm; q and k have norms too."""
    path = make("Q4_0")
    config = nanokv.Config.from_folder(weights_loader.resolve(path))
    C, D, L = config.hidden_size, config.head_dim, config.num_hidden_layers
    H, Hk = config.num_attention_heads, config.num_key_value_heads
    layer = C * (H + 2 * Hk) * D + H * D * C + 3 * C * config.intermediate_size
    stored = (2 * 320 * C + L * layer) // 32 * 18 + 4 * (L * (2 * C + 2 * D) + C)
    per_token = 2 * L * Hk * D * 2
    weights = 2 * (2 * 320 * C + L * layer + L * (2 * C + 2 * D) + C)
    ask = ("memory", path, "--context", 64, "--batch", 3)
    report = json.loads(cli(*ask, "--fits", f"{weights}B", "--json")[1])
    assert report["stored_bytes"] == stored and report["weights_bytes"] == weights
    assert report["total_bytes"] == stored + 64 * 3 * per_token
    assert report["dequantized_total_bytes"] == weights + 64 * 3 * per_token
    assert report["crossover_tokens"] == stored // per_token
    room = weights - stored
    assert report["fits"] == {
        "bytes": weights,
        "max_batch": room // (64 * per_token),
        "max_context": room // (3 * per_token),
        "dequantized": {"max_batch": 0, "max_context": 0},
    }
    assert report["family"][0]["total_bytes"] == report["total_bytes"]
    out = cli(*ask, "--fits", f"{weights - 1}B")[1]
    flat = " ".join(out.split())
    assert f"together {stored:,} + {64 * 3 * per_token:,} B, as stored" in flat
    assert f"dequantized {weights:,} + {64 * 3 * per_token:,} B" in flat
    assert "hold the weights as stored and" in flat
    assert "Dequantized:" in flat and "does not hold the weights: 1 B (1 B) are missing" in flat
    out = " ".join(cli(*ask, "--fits", f"{stored - 1}B")[1].split())
    assert "does not hold the weights as stored: 1 B (1 B) are missing" in out


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Q4_1", {}),
        ("Q8_0", {"model_type": "qwen3_moe", "norm_topk_prob": True, "moe_intermediate_size": 64}),
        ("Q5_0", {"model_type": "qwen2"}),
    ],
    ids=["qwen3", "experts", "biases"],
)
def test_the_size_as_stored_is_that_of_the_loaded_model(cli, make, kind, changes):
    path = make(kind, **changes)
    model, _ = nanokv.load(path, dtype="bfloat16", read=stored.read)
    report = json.loads(cli("memory", path, "--context", 64, "--json")[1])
    assert report["stored_bytes"] == model.nbytes


def test_a_gpu_has_no_weights_as_stored(cli, make):
    code, out, err = cli("memory", make(), "--context", 64, "--json", "--device", "cuda")
    report = json.loads(out)
    assert code == 0 and report["stored_bytes"] is None, err
    assert report["total_bytes"] == report["dequantized_total_bytes"]
