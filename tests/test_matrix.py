"""Where the parts meet: every model × every cache and its options × every kind of batch, with the kernels and without.

A new model, cache, kind of batch or kernel joins by an entry in MODELS, CACHES_TRIED or SITUATIONS. The truth for a
cache that keeps exact values is the plain model over the dict cache, each row alone; for a cache that rounds or forgets
it is the plain model over the same cache; for quantized weights it is a plain model that holds the same numbers. Each
tolerance is shown to be tight: with the oldest visible key of every query hidden, the same comparison fails.
`make test` tries every situation over every cache, on a model drawn by a fixed seed; `make check` on all models.
"""

import contextlib
import functools
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import nanokv
import nanokv.attention
from nanokv.attention import Split, causal_attention, decode_attention
from nanokv.cache import CACHES, BatchCache, make_cache
from nanokv.cache.padded import PaddedCache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.engine.packed import prefill_packed
from nanokv.errors import CacheError, UnsupportedError
from nanokv.fast import native, optimize
from nanokv.fast.compiled import Compiled
from nanokv.inference import decode, prefill, prefill_chunks, verify_draft
from nanokv.loading import build
from nanokv.model import Qwen3
from nanokv.parallel import context
from nanokv.parallel.context import ContextCache
from nanokv.remote.handover import receive, send
from nanokv.remote.link import SocketLink
from oracle import SHAPES, pair, random_ids
from ranks import Ranks
from thread_ranks import on_ranks

pytestmark = pytest.mark.sampled

CAPACITY, PROMPT, SHORT = 48, 11, (3, 11, 7)  # slots, tokens of a prompt, tokens of prompts of different lengths
CACHES_TRIED = {
    "dict": {}, "static": {}, "growing": {}, "paged": {}, "paged:page=3": {"page": 3}, "prefix": {},
    "prefix:page=4": {"page": 4, "salt": "s"}, "sliding": {}, "sliding:window=6": {"window": 6},
    "sliding:window=6:sinks=2": {"window": 6, "sinks": 2}, "quantized": {"residual": 2, "group": 4},
    "quantized:bits=4": {"bits": 4, "residual": 4, "group": 4},
    "quantized:bits=2:rotate=hadamard": {"bits": 2, "rotate": "hadamard", "residual": 8, "group": 2},
    "quantized:k_bits=8:v_bits=4": {"k_bits": 8, "v_bits": 4, "residual": 4, "group": 4},
    "offloaded": {}, "offloaded:to=host": {"to": "host"}, "batch": {}, "batch:of=static": {"of": "static"},
    "batch:of=paged": {"of": "paged", "page": 3}, "batch:of=prefix": {"of": "prefix"},
    "batch:of=sliding": {"of": "sliding", "window": 6},
    "batch:of=quantized": {"of": "quantized", "residual": 2, "group": 4},
    "batch:of=growing": {"of": "growing"}, "batch:of=offloaded": {"of": "offloaded"},
}  # fmt: skip
LOSSY = ("window=6", "quantized", "of=sliding")


def lossy(spec: str) -> bool:
    return any(word in spec for word in LOSSY)


def new(config, spec: str, rows: int = 1):
    return make_cache(spec.partition(":")[0], config, rows, CAPACITY, **CACHES_TRIED[spec])


# --- the models: each with the plain fp32 model that holds the same numbers -----------------------------------------


FAMILIES = {"": "G2-untied-bias", "llama": "llama-G4-rope-bias", "qwen2": "qwen2-G2", "moe": "moe-every-2nd"}


@functools.cache
def plain(family: str = ""):
    """3 or 4 layers; widths that come in groups of 32. Qwen3's: G = 2, biases, untied."""
    return pair(**SHAPES[FAMILIES[family]])[1]


def dequantized(fast):
    """A plain model on the weights that `fast` really holds, in fp32."""
    H, Hk, D = fast.layers[0].heads
    state = {"embed_tokens.weight": fast.embed_tokens.table.dense(), "lm_head.weight": fast.lm_head.dense(),
             "norm.weight": fast.norm.weight}  # fmt: skip
    for i, layer in enumerate(fast.layers):
        sizes, names = (H * D, Hk * D, Hk * D), ("q_proj", "k_proj", "v_proj")
        for kind, fused in (("weight", layer.qkv.dense()), ("bias", layer.qkv.bias)):
            for name, part in zip(names, [None] * 3 if fused is None else fused.split(sizes), strict=True):
                state[f"layers.{i}.self_attn.{name}.{kind}"] = part
        state[f"layers.{i}.self_attn.o_proj.weight"] = layer.o.dense()
        state[f"layers.{i}.self_attn.o_proj.bias"] = layer.o.bias
        gate, up = layer.gate_up.dense().chunk(2)
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": layer.down.dense()}
        state |= {f"layers.{i}.mlp.{name}.weight": weight for name, weight in mlp.items()}
        norms = {"input_layernorm": layer.norm, "post_attention_layernorm": layer.mlp_norm,
                 "self_attn.q_norm": layer.q_norm, "self_attn.k_norm": layer.k_norm}  # fmt: skip
        state |= {f"layers.{i}.{name}.weight": weight for name, weight in norms.items()}
    there = {name: tensor for name, tensor in state.items() if tensor is not None}
    return build(fast.config, {name: tensor.float().clone() for name, tensor in there.items()})


def copied(dtype, family: str = ""):
    """The plain model once more: optimize makes views of the weights that it is given."""
    model = plain(family)
    return build(model.config, {name: x.to(dtype).clone() for name, x in model.state_dict().items()})


@functools.cache
def fast(name: str):
    weights, _, family = name.partition(" ")
    return optimize(copied(torch.bfloat16 if weights == "bf16" else torch.float32, family), weights)


@functools.cache
def compiled(family: str, rows: int):
    return Compiled(plain(family), CAPACITY, batch_size=rows, backend="eager")


@functools.cache
def same_numbers(name: str):
    weights, _, family = name.partition(" ")
    return plain(family) if weights in NO_KERNELS else dequantized(fast(name))


# name → largest distance from the truth (see `distance`). bf16 rounds keys, values and queries to 8 bits; products of
# few rows by int8 and int4 weights round activations to 8 bits, and to bf16 where no kernel is.
NO_KERNELS = {"plain": 1e-5, "compiled": 1e-5}
MODELS = NO_KERNELS | {"fp32": 1e-5, "bf16": 0.015, "int8": 0.03, "int4": 0.03} | {
    "plain llama": 1e-5, "fp32 llama": 1e-5, "int8 llama": 0.03, "compiled qwen2": 1e-5, "fp32 qwen2": 1e-5,
    "bf16 qwen2": 0.015, "plain moe": 1e-5,
}  # fmt: skip
STEP = {"8": 0.01, "4": 0.03, "2": 0.06}  # a key that is rounded otherwise may get the next code of a quantized cache


def tolerance(model: str, spec: str) -> float:
    """A code of another rounding moves fp32 logits rarely, those of other formats often."""
    if "quantized" not in spec:
        return MODELS[model]
    lowest = min((digit for digit in STEP if f"bits={digit}" in spec), default="8")
    return MODELS[model] + (STEP[lowest] if MODELS[model] > 1e-5 else 1e-3)


def candidate(name: str, rows: int):
    weights, _, family = name.partition(" ")
    if weights == "plain":
        return plain(family)
    return compiled(family, rows) if weights == "compiled" else fast(name)


# --- the situations: run(model, new(rows) → cache) → logits ---------------------------------------------------------


def ids_of(rows: int):
    return random_ids(3, rows, PROMPT + 8)


def one_row(model, new):
    """A prompt, then tokens one by one."""
    return rows_together(model, new, rows=1)


def rows_together(model, new, rows=3):
    """Equal lengths; beams change places half-way."""
    ids, cache = ids_of(rows), new(rows)
    out = [prefill(model, ids[:, :PROMPT], cache)]
    for t in range(PROMPT, PROMPT + 2):
        out.append(decode(model, ids[:, t : t + 1], cache, cache.length))
    cache.reorder(list(range(rows))[::-1])
    out.append(decode(model, ids.flip(0)[:, PROMPT + 2 : PROMPT + 3], cache, cache.length))
    return torch.cat(out)


def chunks(model, new):
    """Chunk after chunk, a draft that is checked and taken back, then on."""
    ids, cache = ids_of(1), new(1)
    out = [prefill_chunks(model, ids[:, :PROMPT], cache, chunk=4)]
    out.append(decode(model, ids[:, PROMPT : PROMPT + 1], cache, cache.length))
    if cache.max_rollback is None or cache.max_rollback >= 3:
        out.append(verify_draft(model, ids[:, PROMPT + 4 : PROMPT + 7], cache, cache.length)[0])
        cache.truncate(PROMPT + 1)
    out.append(verify_draft(model, ids[:, PROMPT + 1 : PROMPT + 4], cache, cache.length)[0])
    return torch.cat(out)


def long_prompt(model, new):
    """More rows of activations than the decode kernels take: 36 tokens, in two chunks, then a step."""
    ids, cache = random_ids(4, 2, 40), new(2)
    out = [prefill(model, ids[:, :17], cache), prefill(model, ids[:, 17:39], cache, cache.length)]
    return torch.cat([*out, decode(model, ids[:, 39:], cache, cache.length)])


def padded(model, new):
    """Prompts of different lengths in one rectangle; one row leaves half-way."""
    ids, pads = ids_of(3), [PROMPT - n for n in SHORT]
    cache = PaddedCache(new(3), pads)
    prompts = torch.stack([torch.cat((ids[b, :0].new_zeros(pads[b]), ids[b, :n])) for b, n in enumerate(SHORT)])
    out = [prefill_chunks(model, prompts, cache, start_pos=cache.length, chunk=6)]
    following = torch.stack([ids[b, n : n + 4] for b, n in enumerate(SHORT)])  # (3,4)
    for t in range(2):
        out.append(decode(model, following[:, t : t + 1], cache, cache.length))
    cache.reorder([0, 2])
    out.append(decode(model, following[[0, 2], 2:3], cache, cache.length))
    return torch.cat(out)


def ragged(model, new):
    """A cache for each row, prefilled alone, decoded together, and a draft of two tokens for each."""
    ids, rows = ids_of(3), caches_of_rows(new)
    out = [prefill(model, ids[b : b + 1, :n], row) for b, (row, n) in enumerate(zip(rows, SHORT, strict=True))]
    following = torch.stack([ids[b, n : n + 4] for b, n in enumerate(SHORT)])  # (3,4)
    batch = together(rows, model.config)
    for t in range(2):
        out.append(decode(model, following[:, t : t + 1], batch, batch.length))
    out.append(verify_draft(model, following[:, 2:], batch, batch.length).flatten(0, 1))
    return torch.cat(out)


def packed(model, new):
    """Several prompts in one forward, in two chunks; 42 rows in all, so the kernels for many rows take part."""
    ids, caches = random_ids(6, 3, 30), caches_of_rows(new)
    first, second = (3, 11, 7), (9, 2, 10)
    out = [prefill_packed(model, [ids[b, :n].tolist() for b, n in enumerate(first)], caches, [0, 0, 0])]
    parts = [ids[b, n : n + m].tolist() for b, (n, m) in enumerate(zip(first, second, strict=True))]
    out.append(prefill_packed(model, parts, caches, list(first)))
    batch, ends = together(caches, model.config), [n + m for n, m in zip(first, second, strict=True)]
    newest = torch.stack([ids[b, n : n + 1] for b, n in enumerate(ends)])
    return torch.cat([*out, decode(model, newest, batch, batch.length)])


def handed_over(model, new):
    """Prefilled, sent over a connection, and continued in the cache that arrives."""
    return continued(model, new, across)


def continued(model, new, way=lambda cache: cache):
    """A prompt in chunks, then steps and a draft in the cache that `way(cache)` gives."""
    ids, cache = ids_of(3), new(3)
    out = [prefill_chunks(model, ids[:, :PROMPT], cache, chunk=4)]
    cache = way(cache)
    for t in range(PROMPT, PROMPT + 2):
        out.append(decode(model, ids[:, t : t + 1], cache, cache.length))
    out.append(verify_draft(model, ids[:, PROMPT + 2 : PROMPT + 4], cache, cache.length).flatten(0, 1))
    return torch.cat(out)


def across(cache):
    """The cache at the other end of a connection."""
    salt = {"salt": cache.options["salt"]} if "salt" in cache.options else {}  # a secret, which is not sent
    with contextlib.ExitStack() as stack:
        sender, receiver = (SocketLink(end, 5.0) for end in map(stack.enter_context, socket.socketpair()))
        sending = stack.enter_context(ThreadPoolExecutor(1)).submit(send, sender, cache)
        arrived, _ = receive(receiver, cache.config, **salt)
        sending.result()
    cache.truncate(0)  # what was sent must not be what is read
    return arrived


def own_mask(model, new):
    """A cache whose mask hides the third newest key from the newest query; 36 tokens at first."""
    ids, cache = random_ids(5, 1, 42), new(1)

    class Hides(type(cache)):
        def mask(self, T):
            mask, S = super().mask(T), self[0].width(T)
            mask = torch.ones(T, S, dtype=torch.bool) if mask is None else mask.clone()
            mask[..., -1, -3] = False
            return mask

    cache.__class__ = Hides
    out = [prefill(model, ids[:, :36], cache)]
    for t in range(36, 39):
        out.append(decode(model, ids[:, t : t + 1], cache, cache.length))
    return torch.cat([*out, verify_draft(model, ids[:, 39:], cache, cache.length)[0]])


def own_attend(model, new):
    """A function of the caller's own instead of attention: flatter scores; then one that has only a docstring's word
    for being causal, over a cache."""
    ids, cache = random_ids(5, 1, 42), new(1)
    out = []
    with torch.inference_mode():
        for start, end, attend in (
            (0, 36, lambda q, k, v: causal_attention(0.5 * q, k, v)),
            (36, 37, lambda q, k, v: decode_attention(0.5 * q, k, v)),
            (37, 38, lambda q, k, v: decode_attention(q, k, -v)),
            (38, 41, causal_attention),
        ):
            out.append(model.lm_head(model(ids[:, start:end], cache, start, attend))[0])
    return torch.cat(out)


def own_cache(model, new):
    """A layer class with an `append` of its own over each kind: it stores other values than it is given."""
    ids, cache = random_ids(5, 1, 42), new(1)

    class Louder(type(cache[0])):
        def append(self, k, v):
            return super().append(k, 1.5 * v)

    for layer in cache:
        layer.__class__ = Louder
    out = [prefill(model, ids[:, :36], cache)]
    for t in range(36, 39):
        out.append(decode(model, ids[:, t : t + 1], cache, cache.length))
    return torch.cat(out)


class SplitKeys:
    """A model whose attention takes the keys in three parts, whatever the caller passes."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, cache, start_pos, attend):
        return self.model(tokens, cache, start_pos, Split(cache.mask(tokens.shape[1]), 3))


def split(model, new):
    """`padded`, whose masks differ by row, with split keys."""
    return padded(SplitKeys(model), new)


def two_ranks(model, new):
    """`chunks` over two ranks, in pages of 3 positions; the share of each is a cache of this kind."""
    return on_ranks(2, lambda group: chunks(model, lambda rows: ContextCache(new(rows), group, page=3)))[1]


def caches_of_rows(new):
    """Three caches of one row; paged ones share a pool, as in the engine."""
    first = new(1)
    pool = getattr(first, "pool", None)
    if pool is None:
        return [first, new(1), new(1)]
    return [make_cache(first.name, first.config, pool=pool) for _ in range(3)]


def together(rows, config):
    return PagedBatch(rows, config) if hasattr(rows[0], "pool") else BatchCache(rows, config)


SITUATIONS = {  # name → (run, rows)
    "one row": (one_row, 1), "several rows": (rows_together, 3), "chunks": (chunks, 1), "long prompt": (long_prompt, 2),
    "padded": (padded, 3), "ragged": (ragged, 3), "packed": (packed, 3),
    "handed over": (handed_over, 3), "own mask": (own_mask, 1), "own attend": (own_attend, 1),
    "own cache": (own_cache, 1), "split": (split, 3), "two ranks": (two_ranks, 1),
}  # fmt: skip
UNSPLIT = {"split": "padded", "two ranks": "chunks"}  # their truth is torch's attention over all keys at once

IN_ONE_PROCESS = SITUATIONS | {"handed over": (continued, 3)}


def refused(situation: str, spec: str) -> bool:
    """What a combination cannot do, by a typed error: sinks would be padding, a rank's share would not be exact."""
    if situation == "two ranks":
        return spec.partition(":")[0] not in context.KINDS
    return situation in ("padded", "split") and "sinks" in spec


# --- the truth ------------------------------------------------------------------------------------------------------


def run(model, situation: str, spec: str, works=SITUATIONS):
    work, _ = works[situation]
    return work(model, lambda rows: new(model.config, spec, rows)).float()


@contextmanager
def oldest_key_hidden():
    """A mask bug of one position: every query that sees more than one key does not see its oldest."""
    right = nanokv.attention.F.scaled_dot_product_attention

    class Wrong:
        @staticmethod
        def scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
            T, S = q.shape[2], k.shape[2]
            mask = torch.ones(T, S, dtype=torch.bool) if attn_mask is None else attn_mask
            mask = (mask.tril() if is_causal else mask).expand(*mask.shape[:-2], T, S)
            oldest = mask & (mask.cumsum(-1) == 1) & (mask.sum(-1, keepdim=True) > 1)
            return right(q, k, v, attn_mask=mask & ~oldest, enable_gqa=enable_gqa)

    nanokv.attention.F = Wrong
    try:
        yield
    finally:
        nanokv.attention.F = torch.nn.functional


@functools.cache
def truth(numbers: str, situation: str, spec: str):
    """(logits, logits with a mask bug of one position) of the plain model with these numbers."""
    model, spec = same_numbers(numbers), spec if lossy(spec) else "dict"
    situation = UNSPLIT.get(situation, situation)
    right = run(model, situation, spec, IN_ONE_PROCESS)
    with oldest_key_hidden():
        return right, run(model, situation, spec, IN_ONE_PROCESS)


def distance(a, b) -> float:
    """Length of the difference of all logits, as a share of their length."""
    return float((a - b).norm() / b.norm())


def compare(name: str, situation: str, specs) -> list[str]:
    """What is wrong, a line for each combination."""
    wrong = []
    for spec in specs:
        try:
            got = run(candidate(name, SITUATIONS[situation][1]), situation, spec)
        except (CacheError, UnsupportedError) as error:
            if not refused(situation, spec):
                wrong.append(f"{spec}: {error}")
            continue
        if refused(situation, spec):
            wrong.append(f"{spec}: was not refused")
            continue
        (right, planted), allowed = truth(name, situation, spec), tolerance(name, spec)
        if not distance(got, right) <= allowed:
            wrong.append(f"{spec}: {distance(got, right):.1e} from the truth, {allowed} is allowed")
        if distance(got, planted) <= allowed:
            wrong.append(f"{spec}: a mask bug of one position is within the tolerance")
    return wrong


@pytest.fixture(params=["kernels", "torch"])
def code(request, monkeypatch):
    """With the native kernels, and with torch's operators alone."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: (None, "torch operators (test)"))
    elif native.library()[0] is None:
        pytest.skip(f"no native kernels here: {native.library()[1]}")
    return request.param


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
        first, second = map(torch.tensor, processes.call("matrix", model=name, situation=situation, spec=spec))
        (right, planted), allowed = truth(name, situation, spec), tolerance(name, spec)
        if not torch.equal(first, second) or not distance(first, right) <= allowed < distance(first, planted):
            wrong.append(f"{spec}: {distance(first, right):.1e} from the truth, {allowed} is allowed")
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
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    for name in ("bf16", "int8", "int4"):
        weight = same_numbers(name).state_dict()["layers.1.mlp.down_proj.weight"]
        assert 0 < distance(weight, theirs["layers.1.mlp.down_proj.weight"]) < (0.1 if name == "int4" else 0.01)


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
    assert distance(got, verify_draft(tried, ids[:, 7:12], theirs, 7)) <= 1e-6


# --- what a kernel must not take on trust ---------------------------------------------------------------------------


def steps_of(new, rows=2):
    """run(model): a prompt that the kernels for many rows take, then two steps."""

    def run(model):
        ids, cache = random_ids(5, rows, 42), new()
        out = [prefill(model, ids[:, :40], cache)]
        return torch.cat([*out, *(decode(model, ids[:, t : t + 1], cache, cache.length) for t in (40, 41))]).float()

    return run


def keys_as(change):
    """A cache whose layers return change(keys), change(values)."""

    class Own(nanokv.cache.DictCache):
        def append(self, k, v):
            return tuple(change(x) for x in super().append(k, v))

    return nanokv.cache.KVCache((Own() for _ in range(plain().config.num_hidden_layers)), plain().config)


RETURNED = {
    "every head of its own": lambda x: x.repeat_interleave(2, 1), "one row for all": lambda x: x[:1],
    "one head for all": lambda x: x[:, :1], "other strides": lambda x: x.transpose(1, 2).clone().transpose(1, 2),
}  # fmt: skip


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
        monkeypatch.setattr(kind, "append", lambda self, k, v, right=kind.append: right(self, k, 1.5 * v))
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
        return model.lm_head(model(ids[:, 10:], cache, 10, nanokv.attention.Decode(mask)))[:, -1].float()


@pytest.mark.parametrize("model", ["fp32", "bf16", "compiled"])
@pytest.mark.parametrize("spec", ["static", "paged"])
def test_each_head_may_have_a_mask_of_its_own(model, spec, code):
    mask = torch.ones(1, 2, 2, 11, dtype=torch.bool)  # (1,Hk,G,S)
    mask[:, :, 1, :5] = False
    mask[:, 1, :, 8] = False
    right = step_with(plain(), mask, spec)
    assert distance(step_with(candidate(model, 2), mask, spec), right) <= MODELS[model]
    assert distance(step_with(plain(), None, spec), right) > 0.1


@pytest.mark.parametrize("mask", [torch.arange(12).ge(1).expand(2, 1, 1, 12), torch.ones(2, 1, 1, 11).long()],
                         ids=["of another width", "of integers"])  # fmt: skip
@pytest.mark.parametrize("model", ["plain", "fp32", "bf16"])
def test_a_mask_that_torch_refuses_is_refused_by_all(model, mask, code):
    with pytest.raises(RuntimeError, match=r"must match|attn_mask dtype"):
        step_with(candidate(model, 2), mask)


# --- seeds ----------------------------------------------------------------------------------------------------------


def drawn(model, seed: int):
    settings = {"temperature": 1.0, "top_p": 0.95, "seed": seed, "max_new_tokens": 24, "eos_token_ids": []}
    return list(nanokv.generate(model, random_ids(8, 1, 9)[0].tolist(), **settings))


def test_a_seed_draws_the_same_tokens_from_the_plain_and_the_fast_model_in_fp32(code):
    """Logits differ by rounding alone, so a draw could differ only if it fell between two roundings."""
    assert [drawn(fast("fp32"), seed) for seed in range(12)] == [drawn(plain(), seed) for seed in range(12)]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_a_seed_draws_other_tokens_from_other_weights(weights, code):
    """As nanokv.optimize says: a seed is repeatable on one model, not across formats of weights."""
    assert [drawn(fast(weights), seed) for seed in range(12)] != [drawn(plain(), seed) for seed in range(12)]
    assert drawn(fast(weights), 1) == drawn(fast(weights), 1)
