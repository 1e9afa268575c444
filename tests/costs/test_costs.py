"""The arithmetic of nanokv.costs against published sizes, the modules themselves, and the bytes of a cache."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanokv import costs
from nanokv.attention import causal_attention
from nanokv.cache import NoCache, make_cache
from nanokv.config import Config
from nanokv.inference import decode, prefill
from nanokv.model import Qwen3
from oracle import SHAPES, pair, random_ids

# Parameters, bf16 KV bytes per token, GiB of KV at 32,768 tokens; billions as on the model cards.
TABLE = {
    "0.6B": (596_049_920, 114_688, 3.5, 0.596),
    "1.7B": (1_720_574_976, 114_688, 3.5, 1.721),
    "4B": (4_022_468_096, 147_456, 4.5, 4.022),
    "8B": (8_190_735_360, 147_456, 4.5, 8.191),
    "14B": (14_768_307_200, 163_840, 5.0, 14.768),
    "32B": (32_762_123_264, 262_144, 8.0, 32.762),
}

CONFIGS = st.builds(
    lambda Hk, G, **sizes: Config(num_attention_heads=Hk * G, num_key_value_heads=Hk, **sizes),
    Hk=st.integers(1, 4),
    G=st.integers(1, 4),
    vocab_size=st.integers(1, 99),
    hidden_size=st.integers(1, 40),
    intermediate_size=st.integers(1, 50),
    num_hidden_layers=st.integers(1, 4),
    max_position_embeddings=st.just(64),
    head_dim=st.integers(1, 16).map(lambda half: 2 * half),
    attention_bias=st.booleans(),
    tie_word_embeddings=st.booleans(),
)


@pytest.mark.parametrize("size", TABLE)
def test_the_published_family(qwen3_files, size):
    config = Config.from_folder(qwen3_files / size)
    parameters, kv_bytes, gib, billions = TABLE[size]
    assert costs.parameters(config) == parameters
    assert round(parameters / 1e9, 3) == billions
    assert costs.kv_bytes_per_token(config, 2) == kv_bytes
    assert costs.kv_bytes(config, 32768, 1, 2) == gib * 2**30
    assert costs.weight_bytes(config, 2) == 2 * parameters


def test_0_6b_by_hand(qwen3_files):
    """The stored file holds the tied head a second time: 751,632,384 values."""
    config = Config.from_folder(qwen3_files / "0.6B")
    attention = 1024 * 2048 * 2 + 1024 * 1024 * 2 + 2 * 128
    assert costs.attention_parameters(config) == attention
    layer = attention + 3 * 1024 * 3072 + 2 * 1024
    assert costs.layer_parameters(config) == layer
    assert costs.parameters(config) == 151936 * 1024 + 28 * layer + 1024 == 596_049_920
    assert costs.parameters(config) + 151936 * 1024 == 751_632_384
    assert costs.kv_bytes_per_token(config, 2) == 2 * 28 * 8 * 128 * 2
    assert costs.kv_bytes(config, 4096, 1, 2) == 469_762_048


@given(CONFIGS)
@settings(max_examples=60, deadline=None)
def test_parameters_equal_the_modules_of_any_config(config):
    with torch.device("meta"):
        model = Qwen3(config)
    # A tied head counts once.
    assert costs.parameters(config) == sum(p.numel() for p in model.parameters())
    layer = model.layers[0]
    assert costs.layer_parameters(config) == sum(p.numel() for p in layer.parameters())
    assert costs.attention_parameters(config) == sum(
        p.numel() for p in layer.self_attn.parameters()
    )


@given(
    CONFIGS, st.integers(1, 5), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16])
)
@settings(max_examples=40, deadline=None)
def test_kv_bytes_equal_a_filled_cache_of_any_config(config, tokens, batch, dtype):
    cache = make_cache("dict", config, batch_size=batch, dtype=dtype)
    for layer in cache:
        k = torch.zeros(batch, config.num_key_value_heads, tokens, config.head_dim, dtype=dtype)
        layer.append(k, k.clone())
    assert cache.nbytes == costs.kv_bytes(config, tokens, batch, dtype.itemsize)
    assert cache.nbytes == batch * tokens * costs.kv_bytes_per_token(config, dtype.itemsize)


def count_flops(function):
    """2 FLOPs a multiply-add of every matrix product, as PyTorch counts them; attention is left out."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function()
    by_operation = {str(k): v for k, v in counter.get_flop_counts()["Global"].items()}
    attention = sum(v for k, v in by_operation.items() if "scaled_dot_product" in k)
    return sum(by_operation.values()) - attention


@pytest.mark.parametrize("shape", ["G1-untied", "G2-tied", "G3-yarn"])
def test_flops_of_the_matrices_equal_what_pytorch_counts(shape):
    """Prefill of T tokens and one decode; attention's part is left out on both sides (a context of 0 tokens)."""
    _, model = pair(**SHAPES[shape])
    config, cache = model.config, make_cache("dict", model.config)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    counted = count_flops(lambda: prefill(model, random_ids(0, 1, 10), cache))
    assert counted == costs.prefill_flops(config, 10) - attention * 55
    counted = count_flops(lambda: decode(model, random_ids(1, 1, 1), cache, start_pos=10))
    assert (
        counted == costs.decode_flops(config, 11) - attention * 11 == costs.decode_flops(config, 0)
    )


@given(CONFIGS, st.integers(1, 20), st.integers(0, 20))
@settings(max_examples=50, deadline=None)
def test_prefill_is_the_sum_of_its_decodes_but_for_the_head(config, tokens, start):
    """T decodes do T heads, a prefill one; layers and attention cost the same either way."""
    head = 2 * config.vocab_size * config.hidden_size
    each = [costs.decode_flops(config, start + t + 1) - head for t in range(tokens)]
    assert costs.prefill_flops(config, tokens, start) == sum(each) + head


def test_item_sizes():
    for name, size in costs.ITEMSIZE.items():
        assert getattr(torch, name).itemsize == size


def test_the_null_cache_costs_nothing():
    _, model = pair()
    cache = NoCache(3)
    model(random_ids(2, 1, 4), cache, 0, causal_attention)
    assert cache.nbytes == 0


def test_free_memory_is_known_to_the_library_without_torch():
    """It was in the command line only. Here the smallest of three limits counts, and what is unknown does not."""
    code = (
        "import sys, resource\nfrom nanokv.costs.free_memory import available_memory, free_address_space\n"
        "before = available_memory('cpu')\nassert free_address_space() is None and (before is None or before > 0)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "assert 0 < free_address_space() < 2**30 and available_memory('cpu') <= free_address_space()\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_free_memory_of_a_gpu_is_what_nobody_has_and_what_torch_keeps_unused(monkeypatch):
    from nanokv.costs.free_memory import available_memory

    for name, number in (
        ("mem_get_info", (70, 100)),
        ("memory_reserved", 20),
        ("memory_allocated", 5),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, number=number: number)
    assert available_memory("cuda:0") == 85


def test_a_forward_holds_no_more_than_was_counted():
    """All that is alive at the end of gate and up, counted by shapes of Qwen3-0.6B in bf16."""
    from nanokv.costs.memory import FAMILY

    config = FAMILY["Qwen/Qwen3-0.6B"]
    at_mlp = 2 * (3 * config.intermediate_size + 2 * config.hidden_size)
    H, Hk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    at_attention = (2 + 4) * (H + Hk) * D + 2 * Hk * D + 2 * 2 * config.hidden_size
    assert max(at_mlp, at_attention) <= costs.forward_bytes(config, 2) <= 4 * at_mlp
