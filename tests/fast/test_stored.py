"""A GGUF file whose weights stay as stored: the numbers of the dequantized model, in less memory."""

import functools

import gguf
import pytest
import torch

import nanokv
import weights_loader
from gguf_files import SHAPES, write_gguf
from nanokv.cache import make_cache
from nanokv.errors import ConfigError
from nanokv.fast import native, optimize
from nanokv.fast.blocks import Blocks, Stacked
from nanokv.fast.experts import ExpertBlock
from nanokv.fast.stored import read
from nanokv.fast.weights import Dense
from nanokv.inference import decode, prefill
from oracle import random_ids, tiny_reference
from small_model import needs_kernels
from tiny_checkpoint import write_tokenizer

# With fewer experts per token, rounded activations would choose others where the router nearly had a tie.
SHAPES = SHAPES | {"moe-all": SHAPES["moe"] | {"num_experts_per_tok": 6}}
FAMILIES = ["qwen3", "qwen3-tied", "qwen2", "llama", "moe-all"]
TYPES = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]  # that the gguf package can write


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path):
    """write(shape, type) → path of the file."""

    def write(shape="llama", kind="Q8_0"):
        write_tokenizer(tmp_path)
        return write_gguf(tmp_path / "model.gguf", tiny_reference(**SHAPES[shape]), tmp_path, kind)

    return write


def distance(a, b) -> float:
    return float((a - b).norm() / b.norm())


def logits(model):
    """Of a prompt of each of two rows, and of three steps."""
    ids = random_ids(1, 2, 14, 320)
    cache = make_cache("static", model.config, 2, 20)
    found = [prefill(model, ids[:, :11], cache)]
    found += [decode(model, ids[:, t : t + 1], cache, t) for t in (11, 12, 13)]
    return torch.stack(found)


def mlps(mine, its):
    """(of a layer of the fast model, of the plain one), or one pair per expert, after the router."""
    if not isinstance(mine, ExpertBlock):
        return [(mine, its.mlp)]
    assert torch.equal(mine.mlp.gate.dense(), its.mlp.gate.weight)
    return zip(mine.mlp.experts, its.mlp.experts, strict=True)


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("kind", TYPES)
def test_every_family_holds_the_numbers_of_the_dequantized_model(write, shape, kind):
    """To the bit: rows of q and k that llama.cpp permuted are in their order. Logits differ by rounded activations."""
    path = write(shape, kind)
    plain, _ = nanokv.load(path, dtype=torch.float32)
    fast, _ = nanokv.load(path, dtype=torch.float32, read=read)
    assert fast.weights == kind
    assert fast.config == plain.config and fast.generation_config == plain.generation_config
    for mine, its in zip(fast.layers, plain.layers, strict=True):
        attention = its.self_attn
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        assert torch.equal(mine.qkv.dense(), torch.cat(qkv))
        assert torch.equal(mine.o.dense(), attention.o_proj.weight)
        for fused, parts in mlps(mine, its):
            assert torch.equal(
                fused.gate_up.dense(), torch.cat([parts.gate_proj.weight, parts.up_proj.weight])
            )
            assert torch.equal(fused.down.dense(), parts.down_proj.weight)
    assert torch.equal(fast.lm_head.dense(), plain.lm_head.weight)
    assert (fast.lm_head is fast.embed_tokens.table) == (shape == "qwen3-tied")
    assert distance(logits(fast), logits(plain)) <= 0.03


def test_a_token_goes_through_the_experts_that_the_plain_model_chooses(write, monkeypatch):
    """Without kernels nothing is rounded on the way to the router."""
    path = write("moe", "Q4_0")
    plain, _ = nanokv.load(path, dtype=torch.float32)
    monkeypatch.setattr(native, "library", lambda: (None, "torch operators (test)"))
    fast, _ = nanokv.load(path, dtype=torch.float32, read=read)
    assert distance(logits(fast), logits(plain)) <= 1e-5
    assert not fast.any_threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cache_has_the_dtype_of_the_model(write, dtype):
    path = write("qwen3", "Q4_1")
    fast, _ = nanokv.load(path, dtype=dtype, read=read)
    cache = make_cache("dict", fast.config)
    prefill(fast, random_ids(1, 1, 5, 320), cache)
    assert cache[0]["key"].dtype == dtype
    plain, _ = nanokv.load(path, dtype=dtype)
    assert distance(logits(fast), logits(plain)) <= (0.03 if dtype == torch.float32 else 0.05)


def test_types_may_be_mixed_and_those_without_kernels_become_dense(write, monkeypatch):
    """As in files of 4 bits, whose values of attention often have 6."""
    path, quantize, turn = write("qwen2", "Q8_0"), gguf.quants.quantize, iter(range(10_000))
    kinds = [gguf.GGMLQuantizationType[kind] for kind in ("Q4_0", "Q8_0", "BF16")]

    class Writer(gguf.GGUFWriter):
        def add_tensor(self, name, array, raw_dtype=None):
            if raw_dtype is not None:
                raw_dtype = kinds[next(turn) % 3]
                array = quantize(gguf.quants.dequantize(array, kinds[1]), raw_dtype)
            super().add_tensor(name, array, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf, "GGUFWriter", Writer)
    path = write("qwen2", "Q8_0")
    fast, _ = nanokv.load(path, dtype=torch.float32, read=read)
    plain, _ = nanokv.load(path, dtype=torch.float32)
    parts = {type(part) for part in fast.modules()}
    assert {Blocks, Stacked, Dense} <= parts and set(fast.weights.split(" and ")) == {
        "Q4_0",
        "Q8_0",
    }
    assert distance(logits(fast), logits(plain)) <= 0.03


def test_the_weights_are_the_mapped_file(write):
    """Its bytes are not copied, but for the rows of q and k that are put in order."""
    path = write("llama", "Q4_1")
    fast, _ = nanokv.load(path, read=read)
    sizes = {name: nbytes for name, (_, nbytes, _) in stored(path).items()}
    held = sum(part.weight.nbytes for part in fast.modules() if isinstance(part, Blocks))
    assert held == sum(sizes.values())
    maps = [line.split() for line in open("/proc/self/maps") if str(path) in line]
    mapped = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    inside = [
        name
        for name, part in fast.named_modules()
        if isinstance(part, Blocks)
        and any(low <= part.weight.data_ptr() < high for low, high in mapped)
    ]
    copied = {name for name, part in fast.named_modules() if isinstance(part, Blocks)} - {*inside}
    layers = range(fast.config.num_hidden_layers)
    assert copied == {f"layers.{i}.qkv.stack.{j}" for i in layers for j in (0, 1)}


def stored(path):
    return weights_loader.stored_matrices(weights_loader.resolve(path))


@needs_kernels
def test_a_step_is_one_call(write, monkeypatch):
    fast, _ = nanokv.load(write("llama", "Q4_0"), read=read)
    right, calls = native.kernels().forward_step, []

    class Counted:
        def __getattr__(self, name):
            if name == "forward_step":
                return lambda *args: calls.append(1) or right(*args)
            return getattr(native.library()[0], name)

    counted = Counted()
    monkeypatch.setattr(native, "kernels", lambda: counted)
    logits(fast)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("shape", "kind", "arguments", "message"),
    [
        ("qwen3", "Q8_0", {"dtype": "float16"}, "bfloat16 or float32, not for torch.float16"),
    ],
)
def test_what_has_no_kernels_is_refused(write, shape, kind, arguments, message):
    with pytest.raises(ConfigError, match=message):
        nanokv.load(write(shape, kind), read=read, **arguments)


def test_only_a_gguf_file_has_blocks():
    with pytest.raises(ConfigError, match="is no GGUF file"):
        nanokv.load("tiny", read=read)


def test_it_is_optimized_already(write):
    fast, _ = nanokv.load(write(), read=read)
    with pytest.raises(ConfigError, match="optimized already"):
        optimize(fast)


def test_a_block_that_is_no_number_is_found(write):
    path = write("qwen3", "Q8_0")
    info = weights_loader.gguf_file.read_gguf(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[info.start : info.start + 2] = b"\x00\x7e"  # NaN in fp16
    path.write_bytes(data)
    nanokv.load(path, read=read)
    with pytest.raises(weights_loader.CheckpointError, match=r"gate_up\.stack\.1 \(Q8_0\)"):
        nanokv.load(path, read=functools.partial(read, check_finite=True))
    with pytest.raises(ConfigError, match="only that reader knows"):
        nanokv.load(path, read=read, check_finite=True)


def test_a_file_that_ends_early_is_refused(write):
    path = write("qwen3", "Q4_0")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(weights_loader.CheckpointError, match=r"ends at byte"):
        nanokv.load(path, read=read)
