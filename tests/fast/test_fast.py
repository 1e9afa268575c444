"""nanokv.optimize: the fast model gives what the plain one gives, on every cache, with the kernels and without them.

fp32 is compared at 1e-5. bf16, int8 and int4 are other numbers; their distance is bounded on the bundled model, by the
log-likelihood of text, and each kernel against the same arithmetic in fp64 over the weights that it really holds.
"""

import copy
import ctypes
import math
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import nanokv
from nanokv.attention import Causal, Decode, causal_attention, causal_mask
from nanokv.cache import BatchCache, PagePool, make_cache
from nanokv.cache.base import NoCache
from nanokv.cache.capabilities import Pages
from nanokv.cache.paged_batch import PagedBatch
from nanokv.config import Yarn
from nanokv.errors import CacheError, ConfigError
from nanokv.fast import building, choice, native, optimize, private, torch_ops, weights
from nanokv.fast import model as fast_model
from nanokv.fast.model import alike, sees_its_row
from nanokv.inference import decode, prefill, prefill_chunks, score, verify_draft
from nanokv.lab.bench.profile import parts_of
from nanokv.lab.study.quality import log_likelihood
from nanokv.model import Transformer
from nanokv.rope import rope_angles
from nanokv.school.training.corpus import conversation
from nanokv.school.training.data import render
from small_model import KERNELS, needs_kernels, small

pytestmark = pytest.mark.sampled


def run(model, ids, cache, steps=24):
    """Logits of a prefill and of `steps` decodes."""
    out = [prefill(model, ids, cache)]
    for i in range(steps):
        out.append(
            decode(model, torch.full((ids.shape[0], 1), (7 * i + 3) % 97), cache, cache.length)
        )
    return torch.stack(out).float()


def gap(a, b):
    return float((a - b).abs().max() / b.abs().max())


@pytest.fixture(params=["kernels", "torch"])
def code(request, monkeypatch):
    """With the native kernels, and with torch's operators alone."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: (None, "torch operators (test)"))
    elif KERNELS is None:
        pytest.skip(native.library()[1])
    return request.param


# --- equal to the plain model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"head_dim": 8},
        {"hidden_size": 72, "head_dim": 20},
    ],
)
def test_fp32_is_equal_on_every_shape(code, changes):
    model, ids = small(**changes)
    expected = run(model, ids, make_cache("dict", model.config))
    assert (
        gap(run(optimize(model), ids, make_cache("static", model.config, capacity=100)), expected)
        <= 1e-5
    )
    assert gap(score(optimize(model), ids), score(model, ids)) <= 1e-5


@pytest.mark.parametrize("name", nanokv.CACHES)
def test_fp32_is_equal_on_every_cache(code, name):
    model, ids = small()
    expected = run(model, ids, make_cache(name, model.config, capacity=100))
    assert (
        gap(run(optimize(model), ids, make_cache(name, model.config, capacity=100)), expected)
        <= 1e-5
    )


def test_more_keys_than_one_task_takes(code):
    """300 keys are two parts of the attention, put together afterwards; pages of 16 lie in any order."""
    model, _ = small()
    ids = torch.randint(97, (2, 300), generator=torch.Generator().manual_seed(1))
    expected = run(model, ids, make_cache("dict", model.config), steps=6)
    for name in ("static", "paged", "dict"):
        cache = make_cache(name, model.config, batch_size=2, capacity=400)
        assert gap(run(optimize(model), ids, cache, steps=6), expected) <= 1e-5


def test_chunks_verify_and_truncate(code):
    model, ids = small()
    fast = optimize(model)
    cache = make_cache("static", model.config, capacity=100)
    assert (
        gap(
            prefill_chunks(fast, ids, cache, chunk=7),
            prefill(model, ids, make_cache("dict", model.config)),
        )
        <= 1e-5
    )
    cache.truncate(20)
    assert gap(verify_draft(fast, ids[:, 20:25], cache, 20), score(model, ids)[:, 20:25]) <= 1e-5
    cache.truncate(22)
    assert gap(decode(fast, ids[:, 22:23], cache, 22), score(model, ids)[:, 22]) <= 1e-5


def test_ragged_rows_in_one_step(code):
    """Rows of lengths 5, 17 and 33 over one pool: each gets what it gets alone, and so does a plain batch."""
    model, ids = small()
    fast = optimize(model)
    pool = make_cache("paged", model.config, page=4).pool
    rows = [make_cache("paged", model.config, pool=pool) for _ in range(3)]
    for row, n in zip(rows, (5, 17, 33), strict=True):
        prefill(fast, ids[:, :n], row)
    batch = PagedBatch(rows, model.config)
    for step in range(6):
        logits = decode(fast, torch.full((3, 1), step), batch, batch.length)
    for row, n in enumerate((5, 17, 33)):
        alone = torch.cat((ids[:, :n], torch.arange(6)[None]), 1)
        assert gap(logits[row], score(model, alone)[0, -1]) <= 1e-5
    dense = BatchCache([make_cache("dict", model.config) for _ in range(2)], model.config)
    for row, n in zip(dense.rows, (3, 9), strict=True):
        prefill(fast, ids[:, :n], row)
    logits = decode(fast, torch.tensor([[1], [1]]), dense, dense.length)
    assert (
        gap(logits[0], score(model, torch.cat((ids[:, :3], torch.tensor([[1]])), 1))[0, -1]) <= 1e-5
    )


def test_generation_beams_engine_and_speculation_run_on_it(code):
    model, ids = small()
    fast, prompt = optimize(model), ids[0].tolist()
    expected = list(nanokv.generate(model, prompt, max_new_tokens=20, eos_token_ids=[]))
    assert list(nanokv.generate(fast, prompt, max_new_tokens=20, eos_token_ids=[])) == expected
    engine = nanokv.Engine(fast, pages=40, page_size=4)
    requests = [engine.submit(prompt[:n], max_new_tokens=8, eos_token_ids=[]) for n in (40, 11, 23)]
    list(engine)
    for request, n in zip(requests, (40, 11, 23), strict=True):
        assert request.tokens == list(
            nanokv.generate(model, prompt[:n], max_new_tokens=8, eos_token_ids=[])
        )


def test_weights_are_shared_with_the_plain_model():
    model, ids = small()
    before = score(model, ids)
    fast = optimize(model)
    layer, plain = fast.layers[1], model.layers[1]
    assert plain.self_attn.q_proj.weight.data_ptr() == layer.qkv.weight.data_ptr()
    assert (
        plain.mlp.up_proj.weight.untyped_storage().data_ptr()
        == layer.gate_up.weight.untyped_storage().data_ptr()
    )
    assert fast.embed_tokens.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert torch.equal(score(model, ids), before)


def test_a_format_that_is_not_there_is_named():
    model, _ = small()
    with pytest.raises(ConfigError, match="'int3'"):
        optimize(model, "int3")
    with pytest.raises(ConfigError, match="float32"):
        optimize(model, "bf16")
    with pytest.raises(ConfigError, match="groups of 32"):
        optimize(small(hidden_size=72)[0], "int8")


# --- addresses: what kernels were told stays true -------------------------------------------------------------------


def test_a_moved_plain_model_leaves_the_fast_one_as_it_is(code):
    """`.to` gives every Parameter other memory; the fast model once held the very same Parameters."""
    model, ids = small()
    fast, expected = optimize(model), run(model, ids, make_cache("dict", model.config))
    assert gap(run(fast, ids, make_cache("static", model.config, capacity=100)), expected) <= 1e-5
    model.to(torch.bfloat16)
    assert gap(run(fast, ids, make_cache("static", model.config, capacity=100)), expected) <= 1e-5


@pytest.mark.parametrize("name", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_optimized_model_keeps_its_dtypes(name, dtype):
    model, ids = small()
    fast = optimize(model, name)
    before = run(fast, ids, make_cache("static", model.config, capacity=100))
    with pytest.raises(ConfigError, match="keeps its dtypes"):
        fast.to(dtype)
    assert torch.equal(
        run(fast.to("cpu"), ids, make_cache("static", model.config, capacity=100)), before
    )


@pytest.mark.parametrize("name", [None, "int8", "int4"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_of_a_model_that_has_run(code, name, copied):
    model, ids = small()
    fast = optimize(model, name)
    expected = run(fast, ids, make_cache("static", model.config, capacity=100))
    other = copied(fast)
    for buffer in fast.buffers():
        buffer.fill_(1)
    assert torch.equal(run(other, ids, make_cache("static", model.config, capacity=100)), expected)


@pytest.mark.parametrize("name", [None, "int4"])
@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_into_a_model_that_has_run(code, name, assign):
    """With assign=True the tensors are others: the kernels must not read where the old ones were."""
    model, ids = small()
    fast, other = optimize(model, name), optimize(small(rms_norm_eps=1e-6)[0], name)
    with torch.no_grad():
        other.layers[0].norm.mul_(1.5)
        other.layers[0].qkv.scale = (
            other.layers[0].qkv.scale if name is None else other.layers[0].qkv.scale * 2
        )
    before = run(fast, ids, make_cache("static", model.config, capacity=100))
    fast.load_state_dict(
        {key: tensor.clone() for key, tensor in other.state_dict().items()}, assign=assign
    )
    after = run(fast, ids, make_cache("static", model.config, capacity=100))
    assert torch.equal(after, run(other, ids, make_cache("static", model.config, capacity=100)))
    assert gap(after, before) > 1e-3


def test_the_plain_model_can_be_trained_afterwards():
    """By an optimizer that was made before: every Parameter is still the same one, and wants its gradient."""
    model, ids = small()
    model.requires_grad_(True)
    held = list(model.parameters())
    with torch.inference_mode():  # whatever mode it is called in
        optimize(model)
    assert all(a is b and a.requires_grad for a, b in zip(held, model.parameters(), strict=True))
    before = score(model, ids)
    hidden = model(ids, NoCache(len(model.layers)), 0, causal_attention)
    model.lm_head(hidden).square().mean().backward()
    torch.optim.SGD(held, lr=0.01).step()
    assert gap(score(model, ids), before) > 1e-3
    fast = optimize(model)
    assert gap(score(fast, ids), score(model, ids)) <= 1e-5 and not any(
        b.requires_grad for b in fast.buffers()
    )


def test_optimizing_twice_and_what_cannot_be_optimized():
    model, ids = small()
    expected = score(model, ids)
    first, second = optimize(model), optimize(model)
    assert gap(score(first, ids), expected) <= 1e-5 and gap(score(second, ids), expected) <= 1e-5
    for wrong in (first, optimize(model, compile=64), torch.nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match="optimized already, or not a Transformer"):
            optimize(wrong)
    for name in (None, "int8"):
        with pytest.raises(ConfigError, match="float16"):
            optimize(small(torch.float16)[0], name)


class Larger(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def replace_class(model):
    model.layers[1].self_attn.q_proj.__class__ = Larger


def replace_forward(model):
    model.layers[1].mlp.forward = lambda x: x


def listen(model):
    model.layers[1].mlp.register_forward_hook(lambda *args: None)


@pytest.mark.parametrize("change", [replace_class, replace_forward, listen])
def test_what_a_caller_put_in_the_place_of_a_part_is_not_left_out_in_silence(change):
    """Only weights are fused: an adapter, or the sum over ranks of a shard, would be gone."""
    model, _ = small()
    change(model)
    with pytest.raises(ConfigError, match=r"layers\.1.* kernels would skip them"):
        optimize(model)


def test_a_model_of_two_dtypes_is_named():
    model, _ = small(tie_word_embeddings=False)
    model.layers[1].bfloat16()
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight is torch\.float32 and layers\.1.* is torch\.bfloat16"
    ):
        optimize(model)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_weights_that_do_not_lie_row_after_row(code, name):
    model, ids = small()
    expected = score(optimize(model, name), ids)
    model, _ = small()
    for weight in model.parameters():
        weight.data = weight.data.t().contiguous().t()
    assert gap(score(optimize(model, name), ids), expected) <= 1e-5


@pytest.mark.parametrize("name", ["static", "growing", "paged"])
def test_steps_inside_and_outside_of_inference_mode(code, name):
    """`decode` is inside of it; whoever calls the model by itself may not be."""
    model, ids = small()
    fast, caches = optimize(model), [make_cache(name, model.config, capacity=64) for _ in range(2)]
    for cache in caches:
        prefill(fast, ids, cache)
    decode(fast, ids[:, :1], caches[0], 40)
    fast(ids[:, :1], caches[1], 40, Decode())
    inside = decode(fast, ids[:, 1:2], caches[1], 41)
    outside = fast.lm_head(fast(ids[:, 1:2], caches[0], 41, Decode()))[:, -1]
    assert [cache.length for cache in caches] == [42, 42] and gap(outside, inside) <= 1e-5


@needs_kernels
@pytest.mark.parametrize("name", ["static", "dict"])
def test_positions_of_other_rows_are_refused(name):
    """Kernels would read behind the last angle."""
    model, _ = small()
    fast, cache = optimize(model), make_cache(name, model.config, capacity=64)
    rope = rope_angles(model.config, torch.tensor([[40], [40]]), torch.float32)
    with pytest.raises(CacheError, match="each of 2 rows, and the tokens have 3"):
        fast.layers[0](torch.zeros(3, 1, model.config.hidden_size), rope, cache[0], Decode())


def test_the_default_dtype_of_torch_does_not_matter(code):
    """Kernels write fp32: a buffer in another default dtype would be too small, or be read as something else."""
    model, ids = small()
    fast, expected = optimize(model), run(model, ids, make_cache("dict", model.config))
    try:
        for dtype in (torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            for name in ("static", "dict"):
                cache = make_cache(name, model.config, capacity=100, dtype=torch.float32)
                assert gap(run(fast, ids, cache), expected) <= 1e-5
    finally:
        torch.set_default_dtype(torch.float32)


@needs_kernels
def test_autocast_does_not_hand_the_kernels_another_dtype():
    """torch's product then gives bf16 where fp32 was asked for; kernels would read past its end."""
    matrix, x = weights.Dense(torch.randn(37, 64)), torch.randn(40, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert matrix.product(x).dtype == torch.float32


# --- fewer bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bound"), [("int8", 0.009), ("int4", 0.1)])
def test_codes_are_as_near_as_their_bits_allow(name, bound):
    weight = torch.randn(64, 288, generator=torch.Generator().manual_seed(0))
    matrix = weights.FORMATS[name](weight)
    assert float((matrix.dense() - weight).abs().mean() / weight.abs().mean()) <= bound
    step = (
        matrix.scale[:, None]
        if name == "int8"
        else matrix.scale.float().repeat_interleave(32, 1)[:, :288]
    )
    assert bool(((matrix.dense() - weight).abs() <= step.abs() * 1.01).all())


def test_bytes_of_the_formats():
    weight = torch.randn(64, 288)
    assert weights.Int8(weight).nbytes == 64 * 288 + 64 * 4
    assert weights.Int4(weight).nbytes == 64 * 320 // 2 + 64 * 10 * 2  # 9 groups, filled up to 10


def test_many_rows_are_multiplied_in_parts_so_that_ctrl_c_is_heard(monkeypatch):
    """At most 2³² products in one call: 2,048 rows of a matrix with 2²¹ weights."""
    parts, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: (parts.append(len(x)), linear(x, *rest))[1])
    matrix = weights.Dense(torch.empty(2048, 1024, device="meta"))
    assert matrix.product(torch.empty(2, 2500, 1024, device="meta")).shape == (2, 2500, 2048)
    assert parts == [2048, 2048, 904]


def test_a_kernel_takes_a_mask_that_shows_each_row_its_own_tokens():
    """Read where they lie; any other mask is left to torch."""
    model, ids = small()
    pool, rows = PagePool(model.config, 16, 4), []
    for n in (3, 7):
        rows.append(make_cache("paged", model.config, pool=pool))
        prefill(model, ids[:1, :n], rows[-1])
    batch, dense = PagedBatch(rows, model.config), BatchCache(rows, model.config)
    mask = batch.mask(1)
    hidden, wider = mask.clone(), F.pad(mask, (1, 0))
    hidden[1, ..., -1 - 7] = False  # its oldest token
    assert sees_its_row(Decode(mask), batch[0]) and sees_its_row(Decode(), batch[0])
    assert not any(sees_its_row(Decode(other), batch[0]) for other in (hidden, wider))
    assert not sees_its_row(Decode(mask), dense[0]) and not sees_its_row(Causal(), batch[0])


def test_a_kernel_reads_a_part_of_a_slab_where_it_lies():
    """A copy of keys and values per step would cost what the kernel saves; only another order of values is copied."""
    slabs = torch.zeros(2, 1, 4, 9, 8)
    part, turned = (
        Pages(*slabs[:, :, :, :5], [5]),
        Pages(*slabs.mT.contiguous().mT[:, :, :, :5], [5]),
    )
    for pages, copied in ((part, False), (turned, True)):
        native.pages_struct(pages)
        for read, given in zip(pages.struct.tensors, (pages.keys, pages.values), strict=True):
            assert (read.data_ptr() != given.data_ptr()) == copied


def test_only_keys_and_values_like_the_new_ones_go_to_a_kernel():
    """It takes rows, heads, width and dtype on trust."""
    new, old = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 9, 8)
    assert alike(new, old, old)
    for other in (old[:1], old[:, :2], old[..., :4], old.bfloat16(), old[:, :, :5]):
        assert not alike(new, old, other) and (other.shape[2] == 5 or not alike(new, other, other))


def test_torch_packs_four_bits_where_it_can():
    """One byte for two codes, in blocks of 16 rows; other matrices keep a byte for each."""
    codes, scale = (
        torch.randint(-8, 8, (48, 64), dtype=torch.int8),
        torch.ones(48, 2, dtype=torch.bfloat16),
    )
    packed, scales = torch_ops.pack_int4(codes, scale)
    if torch_ops.has(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        assert (
            packed.dtype == torch.uint8
            and packed.nbytes == 48 * 64 // 2
            and scales.shape == (2, 48, 2)
        )
    assert torch_ops.pack_int4(codes[:40], scale[:40])[0].nbytes == 40 * 64


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2, 5, 9, 32])
@pytest.mark.parametrize("K", [32, 64, 96, 288])
@pytest.mark.parametrize("N", [37, 48])  # torch packs four bits in blocks of 16 rows
def test_products_with_codes(code, name, rows, K, N):
    """Activations are rounded to 8 bits by the kernels and to bf16 by torch: both within 1.5 % of the largest."""
    matrix = weights.FORMATS[name](torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1))
    assert gap(matrix(x).double(), x.double() @ matrix.dense().double().T) <= 0.015


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 33])
@pytest.mark.parametrize(("N", "K"), [(8, 32), (37, 40), (101, 288), (1, 7)])
def test_products_with_dense_weights(code, dtype, rows, N, K):
    matrix = weights.Dense(
        torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(dtype), torch.ones(N)
    )
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1))
    expected = x.double() @ matrix.weight.double().T + 1
    assert gap(matrix(x).double(), expected) <= (1e-5 if dtype == torch.float32 else 0.01)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(("N", "K"), [(8, 32), (37, 96), (101, 288), (5, 544)])
def test_codes_made_dense_by_the_kernels_are_those_of_torch(monkeypatch, dtype, name, N, K):
    """To the bit, and however many rows are made at a time."""
    monkeypatch.setattr(native, "multiplies_bf16", lambda kernels: True)
    matrix = weights.FORMATS[name](torch.randn(N, K).to(dtype))
    for count in (K, 3 * K, weights.UNPACKED):
        monkeypatch.setattr(weights, "UNPACKED", count)
        parts = [(first, part.clone()) for first, part in matrix.parts()]
        assert len(parts) == -(-N // max(1, count // K))
        assert torch.equal(torch.cat([part for _, part in parts]), matrix.dense())
    x = torch.randn(40, K)
    assert gap(matrix(x), F.linear(x.to(dtype), matrix.dense()).float()) < (
        1e-5 if dtype == torch.float32 else 0.02
    )


@needs_kernels
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(("N", "K"), [(8, 32), (37, 96), (101, 288), (40, 480)])
def test_many_rows_are_products_of_fp32_where_the_processor_has_none_of_bf16(
    monkeypatch, name, N, K
):
    """Neither weights nor activations are rounded then, however many rows of weights are widened at a time."""
    monkeypatch.setattr(native, "multiplies_bf16", lambda kernels: False)
    g = torch.Generator().manual_seed(0)
    matrix = weights.FORMATS[name](torch.randn(N, K, generator=g).bfloat16(), torch.ones(N))
    x, (_, whole) = torch.randn(140, K, generator=g), next(matrix.parts())
    whole = whole.clone()
    assert whole.shape == (N, K) and gap(whole.double(), matrix.dense().double()) <= (
        0 if name == "bf16" else 0.004
    )
    for count in (K, 3 * K, weights.WIDENED):
        monkeypatch.setattr(weights, "WIDENED", count)
        assert gap(matrix.product(x).double(), x.double() @ whole.double().T + 1) <= 1e-6


@needs_kernels
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_a_matrix_that_was_widened_by_the_kernels_is_widened_without_them(monkeypatch, name):
    """The dtype of the product is kept from the first call; the kernels need not be there at the next."""
    monkeypatch.setattr(native, "multiplies_bf16", lambda kernels: False)
    g = torch.Generator().manual_seed(0)
    matrix = weights.FORMATS[name](torch.randn(37, 96, generator=g).bfloat16())
    x = torch.randn(140, 96, generator=g)
    widened = matrix.product(x)
    monkeypatch.setattr(native, "library", lambda: (None, "torch operators (test)"))
    assert gap(matrix.product(x), widened) <= (1e-6 if name == "bf16" else 0.004)


@needs_kernels
@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_a_prefill_in_products_of_fp32_agrees_with_one_in_bf16(monkeypatch, name):
    model, ids = small(torch.bfloat16)
    ids, logits = ids.repeat(1, 200 // ids.shape[1]), []  # more than any kernel takes
    for narrow in (True, False):
        monkeypatch.setattr(native, "multiplies_bf16", lambda kernels, narrow=narrow: narrow)
        fast = optimize(model, name)
        assert fast.layers[0].qkv.product_dtype == (torch.bfloat16 if narrow else torch.float32)
        logits.append(prefill(fast, ids, make_cache("dict", fast.config)))
    assert 0 < gap(logits[0].double(), logits[1].double()) <= 0.03


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 32, 49])
@pytest.mark.parametrize(
    ("N", "K"), [(31, 64), (32, 32), (40, 96), (101, 288), (40, 480), (600, 1024)]
)
def test_products_with_whole_numbers_are_exact(dtype, rows, N, K):
    """No sum reaches 2²⁴: every order of additions and every width of vectors gives the same bits."""
    g = torch.Generator().manual_seed(0)
    w, x = (torch.randint(-9, 10, (n, K), generator=g).float() for n in (N, rows))
    matrix, y = weights.Dense(w.to(dtype), torch.arange(N)), torch.empty(rows, N)
    KERNELS.linear(y.data_ptr(), x.data_ptr(), rows, ctypes.byref(matrix.struct))
    assert torch.equal(y, x @ w.T + torch.arange(N))


@pytest.mark.parametrize("weights_name", [None, "int8", "int4"])
def test_bundled_model_keeps_its_likelihoods(code, weights_name):
    """Mean |Δ log-likelihood| a token of held-out conversations: bf16 0.01, int8 0.03, int4 0.4."""
    plain, tokenizer = nanokv.load("tiny")
    model = optimize(
        nanokv.load("tiny", dtype=torch.bfloat16)[0] if weights_name is None else plain,
        weights_name,
    )
    text = render(conversation(random.Random("fast:0"), 16, held_out=True))
    ids = torch.tensor([tokenizer.encode(text)[:200]])
    cache, out = make_cache("static", plain.config, capacity=200), []
    for i in range(ids.shape[1]):
        out.append(decode(model, ids[:, i : i + 1], cache, i))
    found = log_likelihood(torch.stack(out, 1), ids) - log_likelihood(score(plain, ids), ids)
    assert float(found.abs().mean()) <= {None: 0.01, "int8": 0.03, "int4": 0.4}[weights_name]


def test_int4_takes_the_best_of_its_scales():
    x = torch.randn(50, 4, 32, generator=torch.Generator().manual_seed(2))
    codes, scale = weights.quantize_int4(x)
    error = ((codes.float() - 8) * scale.float()[..., None] - x).square().sum()
    plain = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
    naive = ((x / plain).round().clamp(-8, 7) * plain - x).square().sum()
    assert error < naive
    codes, scale = weights.quantize_int4(torch.tensor([56.0] + [0.0] * 31))
    # 8 · 7 would be as near: the first of equals.
    assert codes.tolist() == [0] + [8] * 31 and scale == -7
    zeros, scale = weights.quantize_int4(torch.zeros(1, 1, 32))
    assert bool((zeros == 8).all()) and scale == 1


# --- kernels ----------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    ("B", "H", "Hk", "T", "S", "D"),
    [
        (1, 4, 2, 70, 70, 64),
        (2, 4, 2, 33, 100, 128),
        (1, 2, 2, 200, 333, 32),
        (1, 3, 1, 5, 64, 16),
        (1, 8, 2, 1, 65, 48),
    ],
)
def test_flash_attention(B, H, Hk, T, S, D):
    if not KERNELS.has_flash(D):
        pytest.skip("this processor does not multiply bf16")
    g = torch.Generator().manual_seed(0)
    q = torch.randn(B, H, T, D, generator=g).bfloat16()
    k, v = (torch.randn(B, Hk, S + 7, D, generator=g).bfloat16()[:, :, :S] for _ in "kv")
    y = torch.empty(B, T, H, D, dtype=torch.bfloat16)
    KERNELS.flash_attention(
        y.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        B,
        H,
        Hk,
        T,
        S,
        D,
        k.stride(0),
        k.stride(1),
    )
    mask = causal_mask(T, S)
    expected = F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask, enable_gqa=True
    )
    assert gap(y.float(), expected.transpose(1, 2)) <= 0.01


@needs_kernels
@pytest.mark.parametrize(
    ("kernel", "other", "chosen"), [(1.0, 0.8, 1), (1.0, 0.95, 0), (1.0, 2.0, 0)]
)
def test_attention_over_tiles_is_measured_once(monkeypatch, kernel, other, chosen):
    """By an injected clock. Long prefills take what was faster, short ones the kernel, and nobody measures without."""
    if not KERNELS.has_flash(32):
        pytest.skip("this processor does not multiply bf16")
    ticks = [tick for seconds in [kernel] * 3 + [other] * 3 for tick in (0, seconds)]
    used, its_choice = [], choice.Choice(lambda: ticks.pop(0))
    monkeypatch.setattr(choice, "attention", lambda: its_choice)
    monkeypatch.setattr(
        fast_model, "flash", lambda kernels, *qkv: (used.append("kernel"), Causal()(*qkv))[1]
    )
    block = optimize(small(torch.bfloat16)[0]).layers[0]
    long, short = (
        [torch.randn(1, heads, T, 32).bfloat16() for heads in (4, 2, 2)] for T in (300, 40)
    )
    monkeypatch.setattr(native, "has_tiles", lambda kernels: False)
    block.attended(KERNELS, Causal(), *long)
    assert used == ["kernel"] and len(ticks) == 12  # no tiles: nothing is measured
    monkeypatch.setattr(native, "has_tiles", lambda kernels: True)
    for calls, qkv in ((0, short), (3, long), (0, long)):
        used.clear()
        block.attended(KERNELS, Causal(), *qkv)
        assert len(used) == calls + (qkv is short or chosen == 0)
    assert not ticks


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("G", [1, 2, 3, 4, 5, 8])
def test_decode_attention_over_scattered_pages(dtype, G):
    """Lengths 1, 16, 17 and 700 in pages of 16, in a random order, among pages full of NaN."""
    Hk, D, page, lengths = 2, 48, 16, [1, 16, 17, 700]
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.full((80, Hk, page, D), torch.nan, dtype=dtype) for _ in "kv")
    table, free, dense = (
        torch.zeros(4, 44, dtype=torch.int32),
        torch.randperm(80, generator=g).tolist(),
        [],
    )
    for b, n in enumerate(lengths):
        k, v = (torch.randn(Hk, n, D, generator=g).to(dtype) for _ in "kv")
        dense.append((k, v))
        for i in range(-(-n // page)):
            table[b, i] = at = free.pop()
            part = slice(i * page, min(n, (i + 1) * page))
            keys[at, :, : part.stop - part.start], values[at, :, : part.stop - part.start] = (
                k[:, part],
                v[:, part],
            )
    pages = Pages(keys, values, lengths, table)
    y, expected = attended(pages, torch.randn(4, Hk * G, D, generator=g), Hk, dtype, dense)
    # Sums in fp32 over the very same bf16 values.
    assert gap(y, expected) <= (1e-5 if dtype == torch.float32 else 2e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("G", "D"), [(1, 48), (3, 64), (4, 20), (9, 16)])
def test_decode_attention_of_adjacent_tokens_of_a_sequence(dtype, G, D):
    """Chunks of 70, 1, 2 and 19 tokens behind 300, 520, 0 and 250: each query sees its sequence up to itself."""
    Hk, page, starts, counts = 2, 16, [300, 520, 0, 250], [70, 1, 2, 19]
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.full((90, Hk, page, D), torch.nan, dtype=dtype) for _ in "kv")
    table, dense, lengths, first = torch.zeros(4, 40, dtype=torch.int32), [], [], 0
    for i, (start, n) in enumerate(zip(starts, counts, strict=True)):
        k, v = (torch.randn(Hk, start + n, D, generator=g).to(dtype) for _ in "kv")
        for at in range(0, start + n, page):
            table[i, at // page] = first
            part = slice(at, min(at + page, start + n))
            keys[first, :, : part.stop - at] = k[:, part]
            values[first, :, : part.stop - at] = v[:, part]
            first += 1
        lengths += range(start + 1, start + n + 1)
        dense += [(k[:, :seen], v[:, :seen]) for seen in range(start + 1, start + n + 1)]
    sequence = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    pages = Pages(keys, values, lengths, table, sequence)
    y, expected = attended(
        pages, torch.randn(sum(counts), Hk * G, D, generator=g), Hk, dtype, dense
    )
    # With bf16 instructions queries and weights are rounded to bf16, as in torch's attention.
    assert gap(y, expected) <= (1e-5 if dtype == torch.float32 else 0.02)


def attended(pages, q, Hk, dtype, dense):
    """(kernel, formula) for queries q (B,H,D); the kernel is reached through a layer whose other parts do nothing."""
    B, H, D = q.shape
    identity = weights.Dense(torch.eye(H * D))
    nothing, down = weights.Dense(torch.zeros(64, H * D)), weights.Dense(torch.zeros(H * D, 32))
    ones = torch.ones(H * D)
    layer = native.Layer(
        nothing.struct,
        identity.struct,
        nothing.struct,
        down.struct,
        *[ones.data_ptr()] * 4,
        H,
        Hk,
        D,
        1e-6,
        native.FORMATS[dtype],
    )
    x, scratch = torch.zeros(B, H * D), q.clone()
    where = ctypes.byref(native.pages_struct(pages))
    KERNELS.after_cache(ctypes.byref(layer), x.data_ptr(), B, scratch.data_ptr(), where)
    rows = []
    for b, (k, v) in enumerate(dense):
        k, v = (t.double().repeat_interleave(H // Hk, 0) for t in (k, v))  # (H,n,D)
        p = torch.softmax(q[b].double()[:, None] @ k.transpose(1, 2) / D**0.5, -1)  # (H,1,n)
        rows.append((p @ v).flatten())
    return x.double(), torch.stack(rows)


@needs_kernels
def test_a_step_asks_torch_for_almost_nothing_whatever_the_context():
    """Two small operators per layer, as many at 200 tokens as at 20; nobody copies, joins or multiplies."""
    called = {(layers, n): operators_of_a_step(layers, n) for layers in (3, 6) for n in (20, 200)}
    for counts in called.values():
        assert not set(counts) & {
            "aten::mm",
            "aten::addmm",
            "aten::bmm",
            "aten::scaled_dot_product_attention",
        }
        assert counts.get("aten::cat", 0) <= 1  # the angles
    totals = {key: sum(counts.values()) for key, counts in called.items()}
    assert totals[3, 20] == totals[3, 200]
    assert totals[6, 20] - totals[3, 20] <= 3 * 2


FAULTS = """
import resource, sys, torch
import nanokv
from nanokv.config import Config
from nanokv.model import Transformer
from nanokv.rope import rope_angles
config = Config(vocab_size=512, hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, max_position_embeddings=2048, torch_dtype="bfloat16")
model, ids = nanokv.optimize(Transformer(config).bfloat16().eval()), torch.zeros(1, 1024, dtype=torch.long)
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    nanokv.prefill(model, ids, nanokv.make_cache("static", config, capacity=1024))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is asked for it")
def test_a_prefill_does_not_ask_the_system_for_its_buffers_again():
    """Two layers of Qwen3-0.6B's shapes, 1,024 tokens: 60 MB of buffers, which would be 15,000 pages every time. The
    least of six counts: the heap still grows in the first ones."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1_000


def operators_of_a_step(layers: int, n: int) -> dict:
    """{operator: calls} of one decode step over n tokens in a static cache; its storage stays where it is."""
    model, ids = small(num_hidden_layers=layers)
    fast, cache = optimize(model), make_cache("static", model.config, capacity=300)
    prefill(fast, ids[:, :1].expand(1, n).contiguous(), cache)
    decode(fast, ids[:, :1], cache, cache.length)
    at = cache[0].keys.data_ptr()
    with torch.profiler.profile() as profiler:
        decode(fast, ids[:, :1], cache, cache.length)
    assert cache[0].keys.data_ptr() == at
    return {
        event.key: event.count
        for event in profiler.key_averages()
        if event.key.startswith("aten::")
    }


@needs_kernels
@pytest.mark.parametrize("name", ["static", "paged"])
def test_times_of_the_kernels_are_told_apart(monkeypatch, name):
    """Of the path that runs without a clock too: one that watches `append` is not taken for another `append`."""
    model, ids = small()
    fast, cache = optimize(model), make_cache(name, model.config, capacity=100)
    prefill(fast, ids, cache)
    monkeypatch.setattr(Transformer, "run_layers", None)  # not one layer at a time
    found = parts_of(lambda: decode(fast, ids[:, :1], cache, cache.length), cache)
    assert found["weights"] > 0 and found["attention"] > 0 and found["cache update"] > 0


@needs_kernels
@pytest.mark.parametrize("name", ["static", "growing", "paged", "prefix"])
def test_a_step_is_one_call_until_somebody_listens(name, monkeypatch):
    """A hook on a block, the embedding or the last norm, a block with another forward, a cache with another
    append: each is asked, and tokens stay."""
    (model, ids), layers = small(), []
    fast, right = optimize(model), Transformer.run_layers
    monkeypatch.setattr(
        Transformer,
        "run_layers",
        lambda self, *args: (layers.append(len(args[2])), right(self, *args))[1],
    )

    def listened(where):
        layers.clear()
        cache = make_cache(name, model.config, capacity=100)
        prefill(fast, ids, cache)
        with where(cache):
            token = decode(fast, ids[:, :1], cache, cache.length)
        return len(layers) - 1, gap(token, decode_plain(model, ids, name))

    @contextmanager
    def nobody(cache):
        yield

    def hook(part):
        @contextmanager
        def heard(cache):
            calls = []
            handle = part.register_forward_hook(lambda *args: calls.append(1))
            yield
            handle.remove()
            assert calls == [1]

        return heard

    @contextmanager
    def forward(cache):
        own = fast.layers[1].forward
        fast.layers[1].forward = lambda *args: own(*args)
        yield
        del fast.layers[1].forward

    @contextmanager
    def append(cache):
        own = cache[1].append
        cache[1].append = lambda *args: own(*args)
        yield

    @contextmanager
    def everywhere(cache):
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
        yield
        handle.remove()

    assert listened(nobody)[0] == 0
    hooks = map(hook, (fast.layers[1], fast.embed_tokens, fast.norm))
    for where in (*hooks, forward, append, everywhere):
        calls, difference = listened(where)
        assert calls == 1 and difference < 2e-5, where.__name__


# Cos and sin have a factor.
STRETCHED = {"yarn": Yarn(factor=4.0, original_max_position_embeddings=128)}


@needs_kernels
@pytest.mark.parametrize(
    "changes", [{}, STRETCHED, {"tie_word_embeddings": False, "attention_bias": True}]
)
@pytest.mark.parametrize("lengths", [[9], [9, 9], [9, 4, 7]])
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_one_call_is_what_module_after_module_gives(monkeypatch, format, lengths, changes):
    """To the bit, for rows of one length and of several, over three steps."""
    model, ids = small(torch.bfloat16, **changes)
    fast, calls, asked = optimize(model, format), [], fast_model.is_one_call

    def three_steps():
        pool = make_cache("paged", model.config, page=4).pool
        rows = [make_cache("paged", model.config, pool=pool) for _ in lengths]
        for row, n in zip(rows, lengths, strict=True):
            prefill(fast, ids[:, :n], row)
        batch = PagedBatch(rows, model.config)
        return [decode(fast, ids[:, i : i + len(rows)].mT, batch, batch.length) for i in range(3)]

    monkeypatch.setattr(
        fast_model, "is_one_call", lambda *args: calls.append(asked(*args)) or calls[-1]
    )
    found = three_steps()
    assert calls == [True] * 3
    monkeypatch.setattr(fast_model, "is_one_call", lambda *args: False)
    assert all(map(torch.equal, found, three_steps()))


@needs_kernels
@pytest.mark.parametrize("id", [-1, 97, 2**40, 50])
def test_an_id_that_the_table_does_not_have_is_refused_before_the_cache_changes(id):
    """By a model that is called by itself: `decode` looks at ids before. The table may have fewer rows than config."""
    model, ids = small(tie_word_embeddings=False)
    if id == 50:
        model.embed_tokens.weight.data, ids = model.embed_tokens.weight[:50].clone(), ids % 50
    fast, cache = optimize(model), make_cache("static", model.config, capacity=64)
    prefill(fast, ids, cache)
    with pytest.raises(IndexError, match="out of range"):
        fast(torch.tensor([[id]]), cache, 40, Decode())
    assert cache.length == 40


def decode_plain(model, ids, name):
    """Logits of one step of the plain model."""
    cache = make_cache(name, model.config, capacity=100)
    prefill(model, ids, cache)
    return decode(model, ids[:, :1], cache, cache.length)


@needs_kernels
def test_gates_far_below_zero_are_closed():
    """silu(−100) is −4e-42. An exponential that ran over once made it −100."""
    gate = torch.tensor(
        [-3e38, -1e4, -1000, -100, -95, -90, -89.5, -89, -88.5, -88, -20, -1, 0, 1, 100, 1e4]
    )
    for dtype, form in ((torch.float32, 0), (torch.bfloat16, 1)):
        both, y = torch.cat((gate, torch.ones(16)))[None].to(dtype), torch.empty(1, 16, dtype=dtype)
        KERNELS.gate_rows(y.data_ptr(), both.data_ptr(), 1, 16, form)
        assert torch.allclose(y[0].float(), F.silu(both[0, :16].float()), rtol=0.01, atol=1e-30)
    gate[8:] = torch.tensor([torch.nan, torch.inf, 88, 88.5, 89, 90, 200, 3e38])
    both, y = torch.cat((gate, torch.ones(16)))[None], torch.empty(1, 16)
    KERNELS.gate_rows(y.data_ptr(), both.data_ptr(), 1, 16, 0)
    assert torch.allclose(y[0], F.silu(gate), rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["fp32", "int8", "int4"])
def test_what_is_no_number_stays_none(code, name, bad):
    """A code of 8 bits has no NaN: the kernels once went on with a number."""
    matrix, x = weights.FORMATS[name](torch.randn(8, 96)), torch.randn(2, 96)
    x[0, 70] = bad
    y = matrix(x)
    assert not y[0].isfinite().any() and y[1].isfinite().all()


@needs_kernels
def test_a_part_of_nothing_but_nan_counts():
    """Key 256 begins a part of its own; when it is NaN so is the answer, as it is for any other key."""
    k, v = torch.randn(1, 2, 257, 16), torch.randn(1, 2, 257, 16)
    k[:, :, 256] = torch.nan
    y, expected = attended(
        Pages(k, v, [257]), torch.randn(1, 4, 16), 2, torch.float32, [(k[0], v[0])]
    )
    assert bool(expected.isnan().all()) and bool(y.isnan().all())


# --- threads, and building ------------------------------------------------------------------------------------------


@needs_kernels
def test_two_models_decode_in_two_threads():
    """No buffer is shared, and each thread has its own times."""
    pairs = [small(num_hidden_layers=layers) for layers in (2, 3)]
    work = [
        (optimize(model), ids, run(model, ids, make_cache("dict", model.config)))
        for model, ids in pairs
    ]
    gaps, clocks = [], []

    def repeat(fast, ids, expected):
        for _ in range(10):
            gaps.append(
                gap(run(fast, ids, make_cache("static", fast.config, capacity=100)), expected)
            )
        clocks.append(ctypes.addressof(KERNELS.times().contents))

    in_threads(*(lambda case=case: repeat(*case) for case in work))
    assert len(gaps) == 20 and max(gaps) <= 1e-5 and len(set(clocks)) == 2


def in_threads(*functions):
    """All at once; each stays alive until all are done."""
    barrier = threading.Barrier(len(functions))
    threads = [threading.Thread(target=lambda f=f: (f(), barrier.wait(60))) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


@needs_kernels
@pytest.mark.skipif(
    KERNELS is not None and not hasattr(KERNELS, "omp_get_max_threads"),
    reason="built without OpenMP",
)
def test_threads_are_as_many_as_torch_was_told():
    """OpenMP keeps the number for each thread; in one that has just begun it is the default."""
    before, found = torch.get_num_threads(), []

    def product():
        found.append(KERNELS.omp_get_max_threads())
        weights.Dense(torch.ones(2, 8))(torch.ones(1, 8))
        found.append(KERNELS.omp_get_max_threads())

    try:
        for wanted in (1, 2):
            torch.set_num_threads(wanted)
            product(), in_threads(product)
            assert found[1::2] == [wanted] * len(found[1::2])
            assert found.pop(0) == wanted  # the thread that was told
            found.clear()
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """library() with nothing built and nothing known. fresh(script) makes a compiler, fresh.runs() counts its runs."""
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path))
    for name in ("NANOKV_KERNELS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    native.library.cache_clear()

    def compiler(script: str) -> Path:
        path = tmp_path / "cxx"
        path.write_text(f"#!/bin/sh\necho run >> {tmp_path}/log\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    compiler.folder, compiler.runs = (
        tmp_path / "nanokv",
        lambda: len((tmp_path / "log").read_text().split()),
    )
    yield compiler
    monkeypatch.undo()
    native.library.cache_clear()


@pytest.mark.slow
@needs_kernels
def test_numbers_next_to_zero_stay_what_they_are(fresh):
    """A library linked with all of -ffast-math sets the processor's mode for whoever loads it: 1e-320 becomes 0."""
    fresh(f'exec {building.find_compiler()[0]} "$@"')
    tiny = math.ldexp(1.0, -1070)
    assert native.library()[0] and fresh.runs() == 1
    assert tiny * 2 > 0 and torch.tensor([1e-40]).mul(2).item() > 0


@pytest.fixture
def copying(fresh):
    """A compiler that hands out the library which is there already, in no time."""
    with pytest.MonkeyPatch.context() as usual:
        usual.delenv("NANOKV_CACHE")
        library = building.obtain(building.find_compiler(), native.load)[1]
    return fresh(f'for last; do :; done; cp {library} "$last"')


@needs_kernels
@pytest.mark.parametrize("kept", [0, 7, 4096, 0.5, 0.99])
def test_half_a_file_is_noticed_before_it_is_mapped(fresh, copying, kept):
    """A short .so that is mapped kills the process with SIGBUS, at every later start."""
    kernels, why = native.library()
    (path,) = fresh.folder.glob("kernels-*.so")
    assert kernels and str(path) in why and path.stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    native.library.cache_clear()
    assert native.library()[0] and fresh.runs() == 1  # found again
    # Another file: this process has mapped the first.
    os.replace(shutil.copy(path, path.with_suffix(".part")), path)
    with path.open("r+b") as file:
        file.truncate(int(kept * len(whole)) if isinstance(kept, float) else kept)
    for _ in range(2):  # built, then found
        native.library.cache_clear()
        assert native.library()[0] and fresh.runs() == 2 and path.read_bytes() == whole


@needs_kernels
def test_another_content_under_the_name_is_not_loaded(fresh, copying):
    fresh.folder.mkdir()
    stem = fresh.folder / f"kernels-{building.build_key(building.find_compiler())}"
    content = b"no library at all" * 99
    wrong, not_a_library = fresh.folder / f"{stem.name}-{'0' * 64}.so", private.named(stem, content)
    wrong.write_bytes(content), not_a_library.write_bytes(content)
    assert native.library()[0] and fresh.runs() == 1
    assert not wrong.exists() and not not_a_library.exists()


def planted(fresh):
    """A file of the right name and content hash, as an attacker would leave it."""
    fresh.folder.mkdir(exist_ok=True)
    path = private.named(
        fresh.folder / f"kernels-{building.build_key(building.find_compiler())}", b"planted"
    )
    path.write_bytes(b"planted")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("folder", 0o777),
        ("folder", 0o770),
        ("folder", 0o1777),
        ("file", 0o602),
        ("file", 0o620),
        ("parent", 0o777),
        ("parent", 0o775),
    ],
)
def test_code_that_others_can_write_is_not_loaded(fresh, monkeypatch, place, mode):
    fresh("exit 0")
    monkeypatch.setenv("NANOKV_CACHE", str(fresh.folder.parent / "parent"))
    fresh.folder = fresh.folder.parent / "parent" / "nanokv"
    fresh.folder.parent.mkdir()
    file = planted(fresh)
    target = {"folder": fresh.folder, "file": file, "parent": fresh.folder.parent}[place]
    target.chmod(mode)
    kernels, why = native.library()
    assert kernels is None and f"can be written by other users: chmod go-w {target}" in why
    assert not (fresh.folder.parents[1] / "log").exists() and file.exists()


def test_a_sticky_parent_as_tmp_is_fine_and_a_link_is_not(fresh, monkeypatch):
    fresh("exit 1")
    fresh.folder.parent.chmod(0o1777)
    file = planted(fresh)
    elsewhere = fresh.folder.parent / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    assert "did not build" in native.library()[1] and not file.is_symlink() and elsewhere.exists()


def test_a_link_to_a_whole_library_is_not_followed(tmp_path):
    """What it leads to can be changed after it was looked at."""
    path = private.named(tmp_path / "kernels-0", b"a library")
    path.write_bytes(b"a library")
    path.chmod(0o600)
    assert private.is_whole(path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        private.is_whole(path)


def test_a_library_is_the_users_alone_whatever_the_compiler_says(tmp_path, monkeypatch):
    def compiler(command, **_):
        target = Path(command[-1])
        target.write_bytes(b"a library")
        target.chmod(0o666)

    monkeypatch.setattr(building.subprocess, "run", compiler)
    path = building.build(["c++"], tmp_path / "kernels-0", 1.0)
    assert path.stat().st_mode & 0o777 == 0o600 and private.is_whole(path)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept_for_the_next_operator(monkeypatch):
    """malloc.h: -3 is what a block may have and still lie in the heap, -1 what is free at its end."""
    said = []
    monkeypatch.setattr(
        native.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *kv: said.append(kv))
    )
    native.keep_freed_memory()
    assert said == [(-3, 2**25), (-1, 2**28)]


def test_what_another_user_owns_is_not_loaded(fresh, monkeypatch):
    fresh("exit 0")
    planted(fresh)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    status = os.stat_result((0o100600, 0, 0, 1, 54321, 0, 0, 0, 0, 0))
    monkeypatch.setattr(private.os, "fstat", lambda descriptor: status)
    monkeypatch.setattr(private, "check_folder", lambda folder: None)
    assert "belongs to another user" in native.library()[1]


def test_a_file_that_is_not_whole_is_closed_again(tmp_path, monkeypatch):
    opened, real = [], os.open
    monkeypatch.setattr(
        os, "open", lambda *arguments: (opened.append(real(*arguments)), opened[-1])[1]
    )
    path = tmp_path / f"kernels-{'0' * 64}.so"
    path.touch(mode=0o600)
    opened.clear()
    assert private.open_checked(path) is None and len(opened) == 1
    with pytest.raises(OSError):
        os.fstat(opened[0])


def test_folders_are_made_for_this_user_alone(tmp_path):
    # Where every user has a group of their own, ~/.cache would be made 0775 and then refused.
    before = os.umask(0o002)
    try:
        private.make_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [place.stat().st_mode & 0o777 for place in (tmp_path / "a", tmp_path / "a" / "b")] == [
        0o700,
        0o700,
    ]


def test_a_compiler_name_with_an_open_quote_is_named(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "g++ 'oops")
    kernels, why = native.library()
    assert kernels is None and 'CXX is "g++ \'oops": No closing quotation' in why


def test_a_compiler_that_hangs_and_one_that_warns_first(fresh, monkeypatch):
    monkeypatch.setattr(building, "TIMEOUT", 0.5)
    fresh("exec sleep 20")
    assert "not done after 0.5 seconds" in native.library()[1]
    fresh("echo 'a.cpp:1: warning: x' >&2; echo 'a.cpp:2: error: no such luck' >&2; exit 1")
    native.library.cache_clear()
    assert "a.cpp:2: error: no such luck" in native.library()[1]
    assert not list(fresh.folder.glob("building-*")) and not private.kept(
        building.stem_of([os.environ["CXX"]])
    )


def test_no_home_and_no_place_to_write_are_named(fresh, monkeypatch):
    fresh("exit 1")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(building.Path, "home", no_home)
    for name in ("NANOKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    kernels, why = native.library()
    assert kernels is None and "set NANOKV_CACHE" in why
    monkeypatch.setenv("NANOKV_CACHE", str(fresh.folder.parent / "cxx"))  # a file
    native.library.cache_clear()
    assert native.library()[0] is None


def test_cxx_may_have_arguments_and_is_not_replaced(fresh, monkeypatch):
    path = fresh('echo error: "$1" >&2; exit 1')
    monkeypatch.setenv("CXX", f"{path} -some-flag")
    assert "error: -some-flag" in native.library()[1]
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.library.cache_clear()
    kernels, why = native.library()
    assert kernels is None and "no C++ compiler" in why


def test_kernels_are_on_or_off(fresh, monkeypatch):
    monkeypatch.setenv("NANOKV_KERNELS", "off")
    assert native.library() == (None, "torch operators (NANOKV_KERNELS=off)")
    native.library.cache_clear()
    monkeypatch.setenv("NANOKV_KERNELS", "0")
    with pytest.raises(ConfigError, match="NANOKV_KERNELS is '0'"):
        native.library()


def test_the_key_names_the_processor_on_arm_too(monkeypatch):
    """There, nothing in /proc/cpuinfo is called flags or model name."""
    arm = "processor : 0\nBogoMIPS : 50.00\nFeatures : fp asimd{}\nCPU implementer : 0x41\nCPU part : 0x{}\n"
    texts, found = [arm.format(*each) for each in (("", "d0c"), (" sve", "d0c"), ("", "d40"))], []
    for text in texts:
        monkeypatch.setattr(building.Path, "read_text", lambda self, text=text: text)
        found.append(building.processor())
    assert len(set(found)) == 3 and "Bogo" not in "".join(found)


# --- torch's own operators: a release that changes one is noticed here -----------------------------------------------


@pytest.mark.parametrize("name", ["_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu"])
def test_low_bit_operators_exist_and_mean_what_they_meant(name, monkeypatch):
    """Each is used, and a plain product in its place gives the same."""
    assert torch_ops.has(torch.ops.aten, name), (
        f"torch {torch.__version__} has no {name}: torch_ops falls back"
    )
    codes = torch.randint(
        -8, 8, (64, 128), dtype=torch.int8, generator=torch.Generator().manual_seed(0)
    )
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(1))
    if "int8" in name:
        scale = torch.rand(64) + 0.5
        expected = x.bfloat16().double() @ (codes * scale[:, None].bfloat16()).double().T
        product, limit = (lambda: torch_ops.linear_int8(x, codes, scale)), 0.01
    else:
        scale = (torch.rand(64, 4) + 0.5).bfloat16()
        expected = (
            x.bfloat16().double() @ (codes.double() * scale.double().repeat_interleave(32, 1)).T
        )
        product, limit = (
            (lambda: torch_ops.linear_int4(x, torch_ops.pack_int4(codes, scale), 32)),
            0.02,
        )
    for used in (True, False):
        with torch.profiler.profile() as profiler:
            assert gap(product().double(), expected) <= limit
        assert used == (f"aten::{name}" in {event.key for event in profiler.key_averages()})
        monkeypatch.setattr(torch_ops, "has", lambda *_: False)


def test_pointwise_operator_of_onednn():
    assert torch_ops.has(torch.ops.mkldnn, "_linear_pointwise")
    x, weight = torch.randn(1, 1, 64), torch.randn(32, 64)
    assert gap(torch_ops.linear(x, weight).double(), x.double() @ weight.double().T) <= 1e-5


# --- without a compiler -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_kernels_everything_else_here_still_holds():
    """The same file once more with the kernels switched off; what needs them says so."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-rs",
            "-k",
            "not without_kernels",
            "-p",
            "no:cacheprovider",
            __file__,
        ],
        env=os.environ | {"NANOKV_KERNELS": "off"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed, skipped = (
        int(re.search(rf"(\d+) {word}", done.stdout)[1]) for word in ("passed", "skipped")
    )
    assert passed > 100 and skipped > 100
    said = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert said and all("NANOKV_KERNELS=off" in line for line in said)


@needs_kernels
@pytest.mark.parametrize("tokens", [5, 40, 140])
def test_a_hook_keeps_what_a_layer_was_given_and_gave(tokens):
    """A block writes over a copy, however many tokens there are."""
    model, _ = small()
    ids, kept = torch.arange(tokens)[None] % model.config.vocab_size, []
    fast = optimize(copy.deepcopy(model))
    for one in (model, fast):
        for layer in one.layers:
            layer.register_forward_hook(lambda _, given, gave: kept.append((given[0], gave)))
        prefill(one, ids, make_cache("dict", model.config))
    half = len(kept) // 2
    for plain, other in zip(kept[:half], kept[half:], strict=True):
        assert all(gap(a, b) < 1e-4 for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: hooked(model), "the model is a Transformer with a custom forward or hooks"),
        (lambda model: biased(model.layers[0].mlp, "down_proj"), "down_proj has a bias"),
        (lambda model: biased(model, "lm_head"), "lm_head has a bias"),
        (lambda model: setattr(model.layers[1].input_layernorm, "eps", 0.5), "has eps 0.5"),
    ],
    ids=["hook", "bias", "bias of the head", "eps"],
)
def test_what_the_config_does_not_say_is_refused(change, words):
    """Kernels go by the config: a part that differs from it would be left out in silence."""
    model, _ = small()
    change(model)
    with pytest.raises(ConfigError, match=words):
        optimize(model)


def hooked(model):
    model.register_forward_hook(lambda *args: None)


def biased(part, name):
    old = getattr(part, name)
    setattr(part, name, torch.nn.Linear(old.in_features, old.out_features, bias=True))


def test_other_angles_are_taken_in_every_step(monkeypatch):
    """A name of the model's file that was replaced: prefill and decode obey it alike, or neither would."""
    model, ids = small()
    fast, ids = optimize(copy.deepcopy(model)), ids[:, :5]
    plain = sys.modules["nanokv.model"]
    monkeypatch.setattr(
        plain, "rope_angles", lambda config, at, dtype: rope_angles(config, 2 * at, dtype)
    )
    found = []
    for this in (model, fast):
        cache = make_cache("static", model.config, capacity=8)
        prefill(this, ids[:, :4], cache)
        found.append(decode(this, ids[:, 4:], cache, 4))
    assert (found[0] - found[1]).abs().max() < 1e-4
