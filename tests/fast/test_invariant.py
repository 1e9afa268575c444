"""A row has the same bits alone and among others, for every number of rows, chunk, cache and thread count.

test_instructions.py runs the tests of kernels again with those for other processors.
"""

import itertools

import pytest
import torch

import nanokv
from blocks import matrix, widths
from nanokv.cache import make_cache
from nanokv.engine import Engine
from nanokv.engine.packed import prefill_packed
from nanokv.errors import CacheError, ConfigError
from nanokv.fast import batch_invariant, optimize
from nanokv.fast.blocks import SIZES, stacked
from nanokv.fast.invariant import Head
from nanokv.fast.stored import assembled
from nanokv.fast.weights import FORMATS, Dense
from nanokv.inference import decode, prefill, prefill_chunks, score, verify_draft
from small_model import needs_kernels, small

pytestmark = needs_kernels

LENGTH = 90  # of a prompt: two blocks of rows, six runs of attention
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32)


def ids_of(rows, T=LENGTH):
    """(rows,T): the first row is the same for every number of rows."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(97, (1, T), generator=generator)
    return torch.cat((first, torch.randint(97, (rows - 1, T), generator=generator)))


def fast_model(weights):
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    # G = 3: a run of 16 keys is three groups of five and one more.
    plain, _ = small(dtype, num_attention_heads=6, hidden_size=192, intermediate_size=160)
    return optimize(plain, weights)


def logits_of(model, rows, chunk=LENGTH, kind="growing", steps=3):
    """(steps + 1, V): those of the first row after the prompt and after each step."""
    ids = ids_of(rows, LENGTH + steps)
    cache = make_cache(kind, model.config, rows)
    out = [prefill_chunks(model, ids[:, :LENGTH], cache, 0, chunk)[0]]
    for t in range(LENGTH, LENGTH + steps):
        out.append(decode(model, ids[:, t : t + 1], cache, cache.length)[0])
    return torch.stack(out)


@pytest.mark.parametrize("K", [192, 100])  # 100: no whole steps of bf16 products
@pytest.mark.parametrize("format", FORMATS)
def test_invariant_products(format, K):
    if format in ("int8", "int4") and K % 32:
        return
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    weight = torch.randn(75, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    same_for_any_number_of_rows(FORMATS[format](weight, bias=torch.arange(75.0)))


@pytest.mark.parametrize("type_", SIZES)
def test_invariant_products_with_blocks(type_):
    for K in widths(type_):
        same_for_any_number_of_rows(matrix(type_, 37, K, torch.bfloat16))


def test_invariant_products_with_matrices_below_each_other():
    parts = [matrix(type_, N, 256, torch.bfloat16) for type_, N in (("Q4_K", 40), ("Q6_K", 8))]
    same_for_any_number_of_rows(stacked(parts))
    same_for_any_number_of_rows(stacked([*parts, Dense(torch.randn(33, 256).bfloat16())]))


def same_for_any_number_of_rows(matrix):
    x = torch.randn(70, matrix.K, generator=torch.Generator().manual_seed(2))
    head = Head(matrix)
    alone = torch.cat([head(row) for row in x.split(1)])
    for rows in (*ROWS, 64, 70):
        assert torch.equal(head(x[:rows]), alone[:rows])
        assert torch.equal(head(x[-rows:]), alone[-rows:])
    expected = x.double() @ matrix.dense().double().T + (0 if matrix.bias is None else matrix.bias)
    assert (alone - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("weights", FORMATS)
def test_invariant_rows_are_equal_on_every_number_of_rows_and_chunks(weights):
    model = batch_invariant(fast_model(weights))
    alone = logits_of(model, 1)
    for rows in (2, 3, 4, 5, 8, 9, 32):
        assert torch.equal(logits_of(model, rows), alone)
    for chunk in (1, 7, 64):
        assert torch.equal(logits_of(model, 2, chunk), alone)
    ids = ids_of(3, LENGTH + 3)
    assert torch.equal(score(model, ids)[0, LENGTH - 1 :], alone)


def test_the_ordinary_model_is_not_invariant():
    """Otherwise these tests could not fail."""
    model = fast_model("bf16")
    if nanokv.fast.native.multiplies_bf16(nanokv.fast.native.kernels()):
        assert not torch.equal(logits_of(model, 9), logits_of(model, 1))
    assert not torch.equal(logits_of(model, 1, 7), logits_of(model, 1))


@pytest.mark.parametrize(
    "kind", ["dict", "static", "paged", "paged:page=32", "prefix", "offloaded"]
)
def test_invariant_caches(kind):
    model = batch_invariant(fast_model("bf16"))
    alone = logits_of(model, 1)
    for rows, chunk in ((1, 7), (3, LENGTH), (9, 64)):
        assert torch.equal(logits_of(model, rows, chunk, kind), alone)


def test_invariant_threads():
    model, before = batch_invariant(fast_model("bf16")), torch.get_num_threads()
    alone = logits_of(model, 1)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(logits_of(model, 5, 64, "paged"), alone)
    finally:
        torch.set_num_threads(before)


def test_invariant_ragged_and_packed_rows():
    """Prompts of 1 to 90 tokens together, with pages and without, then steps over rows of different lengths."""
    model, ids = batch_invariant(fast_model("bf16")), ids_of(5, LENGTH + 2)
    lengths = (LENGTH, 1, 16, 33, 47)
    alone = []
    for row, n in zip(ids, lengths, strict=True):
        cache = make_cache("dict", model.config)
        out = [prefill(model, row[None, :n], cache)]
        out += [decode(model, row[None, n + t : n + t + 1], cache, n + t) for t in range(2)]
        alone.append(torch.cat(out))
    prompts = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
    batch = make_cache("batch", model.config, 5, of="paged")
    for caches in batch.rows, [make_cache("growing", model.config) for _ in prompts]:
        logits = prefill_packed(model, prompts, caches, [0] * 5)
        assert torch.equal(logits, torch.stack([out[0] for out in alone]))
    for t in range(2):
        newest = torch.stack([row[n + t : n + t + 1] for row, n in zip(ids, lengths, strict=True)])
        logits = decode(model, newest, batch, batch.length)
        assert torch.equal(logits, torch.stack([out[t + 1] for out in alone]))


def test_invariant_drafts_are_checked_with_the_bits_of_decode():
    model, ids = batch_invariant(fast_model("bf16")), ids_of(1, LENGTH + 3)
    cache = make_cache("growing", model.config)
    first = prefill(model, ids[:, :LENGTH], cache)
    checked = verify_draft(model, ids[:, LENGTH:], cache, LENGTH)[0]
    assert torch.equal(torch.cat((first, checked)), logits_of(model, 1))


@pytest.mark.parametrize("kinds", [["Q4_0", "Q8_0"], ["Q5_1", "Q4_1", "Q5_0"]])
def test_invariant_blocks_of_a_gguf_file(kinds):
    import gguf

    plain, _ = small(torch.bfloat16)
    state, blocks, turn = dict(plain.state_dict()), {}, itertools.cycle(kinds)
    for name in [name for name, tensor in state.items() if tensor.dim() == 2]:
        kind, numbers = next(turn), state.pop(name).float().numpy()
        rows = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
        blocks[name.removesuffix(".weight") + ".weight"] = kind, torch.from_numpy(rows)
    model = batch_invariant(assembled(plain.config, state, blocks, torch.bfloat16))
    alone = logits_of(model, 1)
    for rows, chunk in ((3, LENGTH), (9, 7), (32, 64)):
        assert torch.equal(logits_of(model, rows, chunk), alone)


def answers(model, prompts, **sizes):
    """(ids, raw logits of each step) of each (prompt, seed), and the metrics, of one engine."""
    engine, seen = Engine(model, **sizes), [[] for _ in prompts]

    def keep(i):
        return lambda logits, tokens: seen[i].append(logits.clone()) or logits

    requests = [
        engine.submit(prompt, 40, 0.8, seed=seed, eos_token_ids=[], constrain=keep(i))
        for i, (prompt, seed) in enumerate(prompts)
    ]
    engine.run()
    found = [(own.tokens, torch.cat(s)) for own, s in zip(requests, seen, strict=True)]
    return found, engine.metrics


def test_invariant_engine_with_reuse_and_preemption():
    """Alone, together, in steps of 7 tokens, with a prefix that is reused, and in a pool that is too small."""
    model = batch_invariant(fast_model("bf16"))
    beginning = ids_of(1, 40)[0].tolist()
    prompts = [(beginning + row[: 3 + 5 * i].tolist(), i) for i, row in enumerate(ids_of(6, 60))]
    alone = [answers(model, [one])[0][0] for one in prompts]
    preempted = reused = 0
    for sizes in ({}, {"step_tokens": 7}, {"pages": 9}, {"max_running": 2}, {"page_size": 32}):
        got, metrics = answers(model, prompts, **sizes)
        preempted += metrics.preemptions
        reused += metrics.reused_tokens
        for (tokens, logits), (its, right) in zip(got, alone, strict=True):
            assert tokens == its and torch.equal(logits, right)
    assert preempted and reused


def test_what_cannot_be_invariant_is_refused():
    plain, ids = small(torch.bfloat16)
    with pytest.raises(ConfigError, match="Transformer cannot be batch-invariant"):
        batch_invariant(plain)
    fast = optimize(plain)
    handle = fast.layers[1].register_forward_hook(lambda *given: None)
    with pytest.raises(ConfigError, match="hooks"):
        batch_invariant(fast)
    handle.remove()
    model = batch_invariant(fast)
    for kind in ("quantized", "sliding:window=8", "evicting:budget=8"):
        with pytest.raises(CacheError, match="not batch-invariant"):
            prefill(model, ids, make_cache(kind, model.config))
    with pytest.raises(CacheError, match="pages of 24 tokens"):
        prefill(model, ids, make_cache("paged:page=24", model.config))
    with pytest.raises(CacheError, match="no mask"):
        nanokv.generate_padded(model, [[1, 2, 3], [4]], max_new_tokens=2)
    assert nanokv.generate_ragged(model, [[1, 2, 3], [4]], max_new_tokens=2)


def test_invariant_model_of_an_invariant_model():
    fast = fast_model("bf16")
    model = batch_invariant(batch_invariant(fast))
    assert torch.equal(logits_of(model, 3), logits_of(batch_invariant(fast), 1))
    assert model.nbytes == fast.nbytes and model.weights == "bf16"
