"""Where the parts meet: every model × every cache and its options × every kind of batch, with the kernels and without.

A new model, cache, kind of batch or kernel joins by an entry in MODELS, CACHES_TRIED or SITUATIONS. The truth for a
cache that keeps exact values is the plain model over the dict cache, each row alone; for a cache that rounds or forgets
it is the plain model over the same cache; for quantized weights it is a plain model that holds the same numbers. Each
tolerance is shown to be tight: with the oldest visible key of every query hidden, the same comparison fails.
`make test` tries every situation over every cache, on a model drawn by a fixed seed; `make check` on more, and
`make night` on all models.
"""

import pytest
import torch

import nanokv
import nanokv.attention
from matrix import (
    CACHES_TRIED,
    MODELS,
    NO_KERNELS,
    ONE_ORDER,
    SITUATIONS,
    candidate,
    compare,
    copied,
    distance,
    fast,
    ids_of,
    new,
    plain,
    refused,
    same_numbers,
    tolerance,
    truth,
)
from nanokv.attention import causal_attention
from nanokv.cache import CACHES
from nanokv.fast import optimize
from nanokv.inference import decode, prefill, verify_draft
from nanokv.model import Qwen3
from oracle import random_ids
from ranks import Ranks
from small_model import needs_kernels

pytestmark = pytest.mark.sampled


def check(model: str, situation: str):
    wrong = compare(model, situation, CACHES_TRIED)
    assert not wrong, "\n".join([f"{len(wrong)} of {len(CACHES_TRIED)} caches:", *wrong])


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("model", [name for name in MODELS if name.split()[0] in NO_KERNELS])
def test_all_caches(model, situation):
    check(model, situation)


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("model", [name for name in MODELS if name.split()[0] not in NO_KERNELS])
def test_all_caches_on_fused_weights(model, situation, code):
    check(model, situation)


@needs_kernels
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("model", ONE_ORDER)
def test_all_caches_with_one_order_of_sums(model, situation):
    """Without kernels there is none: batch_invariant refuses."""
    check(model, situation)


@pytest.fixture(scope="module")
def processes():
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name != "two ranks"])
def test_all_caches_on_two_ranks(situation, processes):
    """Each layer split over two processes; dense layers and experts, biases, a head of its own. Positions that are
    split over ranks that are threads would mix the sums of both threads."""
    name, wrong = "plain moe", []
    for spec in (spec for spec in CACHES_TRIED if not refused(situation, spec)):
        first, second = map(
            torch.tensor, processes.call("matrix", model=name, situation=situation, spec=spec)
        )
        (right, planted), allowed = truth(name, situation, spec), tolerance(name, spec)
        if not torch.equal(first, second) or not distance(first, right) <= allowed < distance(
            first, planted
        ):
            wrong.append(
                f"{spec}: {distance(first, right):.1e} from the truth, {allowed} is allowed"
            )
    assert wrong == []


def test_every_cache_and_every_model_is_in_the_matrix():
    assert {spec.partition(":")[0] for spec in CACHES_TRIED} == set(CACHES)
    with pytest.raises(nanokv.errors.ConfigError, match="one of: fp32, int8, int4"):
        optimize(copied(torch.float32), "?")
    with pytest.raises(nanokv.errors.ConfigError, match="one of: bf16, int8, int4"):
        optimize(copied(torch.bfloat16), "?")


def test_the_numbers_of_a_dequantized_model_are_those_that_the_fast_one_holds():
    """Without this the comparison of quantized weights would compare nothing: fp32 weights survive the way exactly."""
    assert isinstance(same_numbers("fp32"), Qwen3)
    mine, theirs = same_numbers("fp32").state_dict(), plain().state_dict()
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in mine
    )
    for name in ("bf16", "int8", "int4"):
        weight = same_numbers(name).state_dict()["layers.1.mlp.down_proj.weight"]
        assert (
            0
            < distance(weight, theirs["layers.1.mlp.down_proj.weight"])
            < (0.1 if name == "int4" else 0.01)
        )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("attend", [causal_attention, lambda q, k, v: causal_attention(q, k, v)])
def test_causal_attention_is_causal_over_a_cache_without_a_mask(model, attend):
    """As the function that it always was, and inside one of the caller's own: T < S needs no mask from outside."""
    tried, ids = candidate(model, 1), ids_of(1)
    mine, theirs = new(tried.config, "dict"), new(tried.config, "dict")
    for cache in (mine, theirs):
        prefill(tried, ids[:, :7], cache)
    with torch.inference_mode():
        got = tried.lm_head(tried(ids[:, 7:12], mine, 7, attend))
    allowed = 1e-6
    rounded = model.startswith("int")
    if model.startswith("bf16"):  # red at 1e-6 only on a processor without bf16
        rounded = not torch.cpu._is_avx512_bf16_supported()
    if rounded and any(tried.config.windows):
        # A window is masked in two forms, and 8 bits or bf16 round a last bit to a step.
        allowed = MODELS[model]
    assert distance(got, verify_draft(tried, ids[:, 7:12], theirs, 7)) <= allowed


# --- what a kernel must not take on trust ---------------------------------------------------------------------------


def steps_of(new, rows=2):
    """run(model): a prompt that the kernels for many rows take, then two steps."""

    def run(model):
        ids, cache = random_ids(5, rows, 42), new()
        out = [prefill(model, ids[:, :40], cache)]
        return torch.cat(
            [*out, *(decode(model, ids[:, t : t + 1], cache, cache.length) for t in (40, 41))]
        ).float()

    return run


def keys_as(change):
    """A cache whose layers return change(keys), change(values)."""

    class Own(nanokv.cache.DictCache):
        def append(self, k, v):
            return tuple(change(x) for x in super().append(k, v))

    return nanokv.cache.KVCache(
        (Own() for _ in range(plain().config.num_hidden_layers)), plain().config
    )


RETURNED = {
    "every head of its own": lambda x: x.repeat_interleave(2, 1),
    "one row for all": lambda x: x[:1],
    "one head for all": lambda x: x[:, :1],
    "other strides": lambda x: x.transpose(1, 2).clone().transpose(1, 2),
}


@pytest.mark.parametrize("model", ["fp32", "bf16"])
@pytest.mark.parametrize("change", RETURNED.values(), ids=RETURNED)
def test_keys_of_another_shape_are_attended_to_as_torch_does(model, change, code):
    run = steps_of(lambda: keys_as(change))
    assert distance(run(fast(model)), run(plain())) <= MODELS[model]


@pytest.mark.parametrize("rows", [1, 2])  # 2: so many rows that the prefill kernels take part
def test_keys_of_another_dtype_are_refused_as_torch_does(rows):
    with pytest.raises(RuntimeError, match="same dtype"):
        steps_of(lambda: keys_as(lambda x: x.float()), rows)(fast("bf16"))


@pytest.mark.parametrize("model", ["fp32", "compiled"])
@pytest.mark.parametrize("spec", ["static", "growing", "paged"])
@pytest.mark.parametrize("of", ["an object", "a class"])
def test_an_append_that_was_replaced_later_is_called(model, spec, of, monkeypatch, code):
    """As a wrapper that counts, prints or breaks something on purpose does it."""

    def new_cache():
        cache = new(plain().config, spec, 2)
        for layer in cache if of == "an object" else ():
            layer.append = lambda k, v, right=layer.append: right(k, 1.5 * v)
        return cache

    run, undisturbed = steps_of(new_cache), steps_of(lambda: new(plain().config, spec, 2))(plain())
    if of == "a class":
        kind = type(new(plain().config, spec)[0])
        monkeypatch.setattr(
            kind, "append", lambda self, k, v, right=kind.append: right(self, k, 1.5 * v)
        )
    right = run(plain())
    assert distance(run(candidate(model, 2)), right) <= MODELS[model] < distance(undisturbed, right)


@pytest.mark.parametrize("model", ["fp32", "compiled"])
def test_a_cache_that_only_looks_like_one(model, code):
    class Layer:
        def __init__(self):
            self.inner = nanokv.cache.DictCache()

        def append(self, k, v):
            return self.inner.append(k, v)

        length = property(lambda self: self.inner.length)

    class Cache(list):
        config, name, capacity, batch_size = None, "own", None, 2
        length = property(lambda self: self[0].length)

        def mask(self, T):
            return nanokv.attention.causal_mask(T, self.length + T)

    own = lambda: [Layer() for _ in range(plain().config.num_hidden_layers)]  # noqa: E731
    for layers in (own, lambda: new(plain().config, "static", 2)):
        run = steps_of(lambda layers=layers: Cache(layers()))
        assert distance(run(candidate(model, 2)), run(plain())) <= MODELS[model]


def step_with(model, mask, spec="static"):
    ids, cache = random_ids(5, 2, 11), new(plain().config, spec, 2)
    prefill(model, ids[:, :10], cache)
    with torch.inference_mode():
        return model.lm_head(model(ids[:, 10:], cache, 10, nanokv.attention.Decode(mask)))[
            :, -1
        ].float()


@pytest.mark.parametrize("model", ["fp32", "bf16", "compiled"])
@pytest.mark.parametrize("spec", ["static", "paged"])
def test_each_head_may_have_a_mask_of_its_own(model, spec, code):
    mask = torch.ones(1, 2, 2, 11, dtype=torch.bool)  # (1,Hk,G,S)
    mask[:, :, 1, :5] = False
    mask[:, 1, :, 8] = False
    right = step_with(plain(), mask, spec)
    assert distance(step_with(candidate(model, 2), mask, spec), right) <= MODELS[model]
    assert distance(step_with(plain(), None, spec), right) > 0.1


@pytest.mark.parametrize(
    "mask",
    [torch.arange(12).ge(1).expand(2, 1, 1, 12), torch.ones(2, 1, 1, 11).long()],
    ids=["of another width", "of integers"],
)
@pytest.mark.parametrize("model", ["plain", "fp32", "bf16"])
def test_a_mask_that_torch_refuses_is_refused_by_all(model, mask, code):
    with pytest.raises(RuntimeError, match=r"must match|attn_mask dtype"):
        step_with(candidate(model, 2), mask)


# --- seeds ----------------------------------------------------------------------------------------------------------


def drawn(model, seed: int):
    settings = {
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": seed,
        "max_new_tokens": 24,
        "eos_token_ids": [],
    }
    return list(nanokv.generate(model, random_ids(8, 1, 9)[0].tolist(), **settings))


def test_a_seed_draws_the_same_tokens_from_the_plain_and_the_fast_model_in_fp32(code):
    """Logits differ by rounding alone, so a draw could differ only if it fell between two roundings."""
    assert [drawn(fast("fp32"), seed) for seed in range(12)] == [
        drawn(plain(), seed) for seed in range(12)
    ]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_a_seed_draws_other_tokens_from_other_weights(weights, code):
    """As nanokv.optimize says: a seed is repeatable on one model, not across formats of weights."""
    assert any(drawn(fast(weights), seed) != drawn(plain(), seed) for seed in range(12))
    assert drawn(fast(weights), 1) == drawn(fast(weights), 1)
