"""What tests/test_matrix.py combines: MODELS, CACHES_TRIED and SITUATIONS, and the truth for each.

A situation is a function of a model and a maker of caches; it gives the logits that are compared.
"""

import contextlib
import functools
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import gguf
import pytest
import torch

import nanokv
import nanokv.attention
import plain_kernels
from nanokv.attention import causal_attention, decode_attention
from nanokv.cache import BatchCache, make_cache
from nanokv.cache.batch import width
from nanokv.cache.padded import PaddedCache
from nanokv.cache.paged import PagedCache
from nanokv.cache.paged_batch import PagedBatch
from nanokv.engine.packed import prefill_packed
from nanokv.errors import CacheError, UnsupportedError
from nanokv.fast import batch_invariant, optimize
from nanokv.fast.compiled import Compiled
from nanokv.fast.experts import ExpertBlock
from nanokv.fast.products import Product, ProductTransformer, StackProducts
from nanokv.fast.stored import assembled
from nanokv.inference import decode, prefill, prefill_chunks, verify_draft
from nanokv.loading import build, skeleton
from nanokv.parallel import context
from nanokv.parallel.context import ContextCache
from nanokv.parallel.merge import Split
from nanokv.remote.handover import receive, send
from nanokv.remote.link import SocketLink
from oracle import HYBRID, LAYERED, SHAPES, pair, random_ids, sharing
from thread_ranks import on_ranks

# Slots, tokens of a prompt, tokens of prompts of different lengths.
CAPACITY, PROMPT, SHORT = 48, 11, (3, 11, 7)
CACHES_TRIED = {
    "dict": {},
    "static": {},
    "growing": {},
    "paged": {},
    "paged:page=3": {"page": 3},
    "prefix": {},
    "prefix:page=4": {"page": 4, "salt": "s"},
    "prefix:index=radix": {"page": 3, "index": "radix"},
    "sliding": {},
    "sliding:window=6": {"window": 6},
    "sliding:window=6:sinks=2": {"window": 6, "sinks": 2},
    "quantized": {"residual": 2, "group": 4},
    "quantized:bits=4": {"bits": 4, "residual": 4, "group": 4},
    "quantized:bits=2:rotate=hadamard": {
        "bits": 2,
        "rotate": "hadamard",
        "residual": 8,
        "group": 2,
    },
    "quantized:k_bits=8:v_bits=4": {"k_bits": 8, "v_bits": 4, "residual": 4, "group": 4},
    "quantized:bits=3:keys=lloyd:values=lloyd": {
        "bits": 3,
        "keys": "lloyd",
        "values": "lloyd",
        "first": 2,
        "residual": 2,
        "group": 4,
    },
    "quantized:bits=4:keys=token:values=channel": {
        "bits": 4,
        "keys": "token",
        "values": "channel",
        "outliers": 2,
        "v_rotate": "hadamard",
        "residual": 4,
        "group": 4,
    },
    # Without norms: keys of Qwen3 are almost equally long, so that rounding would choose between them.
    "evicting:budget=6:sinks=2": {"budget": 6, "sinks": 2},
    "evicting:policy=h2o:budget=8": {"policy": "h2o", "budget": 8},
    "evicting:policy=snapkv:budget=8": {"policy": "snapkv", "budget": 8, "recent": 3},
    "evicting:policy=matching:budget=8": {"policy": "matching", "budget": 8},
    "evicting:policy=quest:budget=8": {"policy": "quest", "budget": 8, "page": 3},
    "offloaded": {},
    "offloaded:to=host": {"to": "host"},
    "batch": {},
    "batch:of=static": {"of": "static"},
    "batch:of=paged": {"of": "paged", "page": 3},
    "batch:of=prefix": {"of": "prefix"},
    "batch:of=sliding": {"of": "sliding", "window": 6},
    "batch:of=quantized": {"of": "quantized", "residual": 2, "group": 4},
    "batch:of=evicting:budget=6": {"of": "evicting", "budget": 6},
    "batch:of=growing": {"of": "growing"},
    "batch:of=offloaded": {"of": "offloaded"},
}
LOSSY = ("window=6", "quantized", "of=sliding", "budget=")
WATCHES = ("h2o", "snapkv", "matching", "quest")  # policies with an attention of their own


def lossy(spec: str) -> bool:
    return any(word in spec for word in LOSSY)


def new(config, spec: str, rows: int = 1):
    return make_cache(spec.partition(":")[0], config, rows, CAPACITY, **CACHES_TRIED[spec])


# --- the models: each with the plain fp32 model that holds the same numbers -----------------------------------------


FAMILIES = {
    "": SHAPES["G2-untied-bias"],
    "llama": SHAPES["llama-G4-rope-bias"],
    "qwen2": SHAPES["qwen2-G2"],
    "moe": SHAPES["moe-every-2nd"],
    "smollm3": LAYERED["smollm3-G2"],
    "olmo3": LAYERED["olmo3-G2"],
    "gemma3": LAYERED["gemma3-G2"],
    "qwen35": HYBRID["qwen35-G2"],
    "lfm2": HYBRID["lfm2-G2"],
    "gptoss": LAYERED["gptoss-G2"],
    "cla": SHAPES["G2-untied-bias"] | {"num_hidden_layers": 5},
    # All experts: rounded activations would let the router choose others where it nearly had a tie.
    "moe-all": SHAPES["moe-every-2nd"] | {"moe_intermediate_size": 64, "num_experts_per_tok": 6},
}


@functools.cache
def plain(family: str = ""):
    """3 or 4 layers; widths that come in groups of 32. Qwen3's: G = 2, biases, untied."""
    model = pair(**FAMILIES[family])[1]
    return sharing(model) if family == "cla" else model


def dequantized(fast):
    """A plain model on the weights that `fast` really holds, in fp32."""
    if isinstance(fast, ProductTransformer):
        return dequantized_products(fast)
    H, Hk, D = fast.layers[0].heads
    state = {
        "embed_tokens.weight": fast.embed_tokens.table.dense(),
        "lm_head.weight": fast.lm_head.dense(),
        "norm.weight": fast.norm.weight,
    }
    for i, layer in enumerate(fast.layers):
        sizes, names = (H * D, Hk * D, Hk * D), ("q_proj", "k_proj", "v_proj")
        for kind, fused in (("weight", layer.qkv.dense()), ("bias", bias_of(layer.qkv))):
            for name, part in zip(
                names, [None] * 3 if fused is None else fused.split(sizes), strict=True
            ):
                state[f"layers.{i}.self_attn.{name}.{kind}"] = part
        state[f"layers.{i}.self_attn.o_proj.weight"] = layer.o.dense()
        state[f"layers.{i}.self_attn.o_proj.bias"] = layer.o.bias
        for name, weight in dequantized_mlp(layer).items():
            state[f"layers.{i}.mlp.{name}.weight"] = weight
        norms = {
            "input_layernorm": layer.norm,
            "post_attention_layernorm": layer.mlp_norm,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
        }
        state |= {f"layers.{i}.{name}.weight": weight for name, weight in norms.items()}
    there = {name: tensor for name, tensor in state.items() if tensor is not None}
    return build(fast.config, {name: tensor.float().clone() for name, tensor in there.items()})


def dequantized_products(fast):
    """The same for a model with blocks of its family: its parameters, and what its products hold."""
    state = dict(fast.named_parameters()) | {"lm_head.weight": fast.lm_head.dense()}
    for name, part in fast.named_modules():
        if isinstance(part, Product):
            state |= {f"{name}.weight": part.matrix.dense(), f"{name}.bias": part.matrix.bias}
        if isinstance(part, StackProducts):
            for kind in ("gate_up", "down"):
                experts = [each.matrix for each in getattr(part, kind)]
                state[f"{name}.{kind}_proj"] = torch.stack([each.dense().mT for each in experts])
                state[f"{name}.{kind}_proj_bias"] = torch.stack([each.bias for each in experts])
    names = skeleton(fast.config).state_dict()
    return build(fast.config, {name: state[name].detach().float().clone() for name in names})


def dequantized_mlp(layer) -> dict:
    """Name → weight, of a dense MLP, or of the router and all experts."""
    parts, found = {"": layer}, {}
    if isinstance(layer, ExpertBlock):
        parts = {f"experts.{e}.": expert for e, expert in enumerate(layer.mlp.experts)}
        found["gate"] = layer.mlp.gate.dense()
    for prefix, part in parts.items():
        gate, up = part.gate_up.dense().chunk(2)
        found |= {f"{prefix}gate_proj": gate, f"{prefix}up_proj": up}
        found[f"{prefix}down_proj"] = part.down.dense()
    return found


def bias_of(matrix):
    """Of all rows, or None."""
    biases = [part.bias for part in getattr(matrix, "stack", [matrix])]
    return None if biases[0] is None else torch.cat(biases)


def copied(dtype, family: str = ""):
    """The plain model once more: optimize makes views of the weights that it is given."""
    model = plain(family)
    return build(
        model.config, {name: x.to(dtype).clone() for name, x in model.state_dict().items()}
    )


def as_stored(types: list[str], family: str):
    """The fast model over the blocks of a GGUF file: one type after the other, so q, k and v have several."""
    model, turn = plain(family), itertools.cycle(types)
    state, blocks = dict(model.state_dict()), {}
    # A router stays in fp32, as in every GGUF file.
    matrices = [name for name, tensor in state.items() if tensor.dim() == 2]
    for name in [name for name in matrices if not name.endswith("mlp.gate.weight")]:
        kind, numbers = next(turn), state.pop(name).numpy()
        rows = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
        blocks[name] = kind, torch.from_numpy(rows)
    return assembled(model.config, state, blocks, torch.float32)


@functools.cache
def fast(name: str):
    weights, _, family = name.partition(" ")
    if weights.startswith("Q"):
        return as_stored(weights.split("+"), family)
    if weights == "invariant":
        return batch_invariant(optimize(copied(torch.bfloat16, family)))
    return optimize(copied(torch.bfloat16 if weights == "bf16" else torch.float32, family), weights)


@functools.cache
def compiled(family: str, rows: int):
    return Compiled(plain(family), CAPACITY, batch_size=rows, backend="eager")


@functools.cache
def on_gpu(name: str):
    """The model of a GPU, here: kernels in torch's operators, and a step that is called where it would be replayed."""
    pytest.importorskip("triton", reason="no Triton here: pip install triton")
    from nanokv.fast.gpu.model import recorded

    weights, _, family = name.partition(" ")
    model = recorded(copied(torch.bfloat16 if weights == "gpu-bf16" else torch.float32, family))
    model.forward = plain_kernels.around(model.forward)
    return model


@functools.cache
def same_numbers(name: str):
    weights, _, family = name.partition(" ")
    if weights == "gpu-bf16":
        return copied(torch.bfloat16, family).float()
    return (
        plain(family)
        if weights in NO_KERNELS
        else dequantized(fast(name.replace("invariant", "bf16")))
    )


# name → largest distance from the truth (see `distance`). bf16 rounds keys, values and queries to 8 bits; products of
# few rows by int8 and int4 weights round activations to 8 bits, and to bf16 where no kernel is.
NO_KERNELS = {"plain": 1e-5, "compiled": 1e-5, "gpu": 1e-5, "gpu-bf16": 0.03}
MODELS = (
    NO_KERNELS
    | {"fp32": 1e-5, "bf16": 0.015, "int8": 0.03, "int4": 0.03, "Q4_1+Q8_0+Q5_0": 0.03}
    | {
        "plain llama": 1e-5,
        "fp32 llama": 1e-5,
        "int8 llama": 0.03,
        "Q8_0 llama": 0.03,
        "Q5_1+Q4_0 qwen2": 0.025,
        "compiled qwen2": 1e-5,
        "fp32 qwen2": 1e-5,
        "bf16 qwen2": 0.015,
        "plain moe": 1e-5,
        "plain smollm3": 1e-5,
        "plain olmo3": 1e-5,
        "plain gemma3": 1e-5,
        "plain qwen35": 1e-5,
        "plain lfm2": 1e-5,
        "plain gptoss": 1e-5,
        "plain cla": 1e-5,
        "fp32 smollm3": 1e-5,
        "int8 smollm3": 0.03,
        "fp32 olmo3": 1e-5,
        "bf16 olmo3": 0.03,
        "fp32 gemma3": 1e-5,
        "int4 gemma3": 0.03,
        "fp32 qwen35": 1e-5,
        "fp32 lfm2": 1e-5,
        "fp32 gptoss": 1e-5,
        "fp32 cla": 1e-5,
        "Q8_0+Q5_0 moe-all": 0.025,
        "gpu llama": 1e-5,
        "gpu qwen2": 1e-5,
    }
)
ONE_ORDER = {"invariant": 0.015, "invariant llama": 0.015}  # in bf16; kernels alone
# A key that is rounded otherwise may get the next code of a quantized cache.
STEP = {"8": 0.01, "4": 0.03, "3": 0.1, "2": 0.06}


def tolerance(model: str, spec: str) -> float:
    """A code of another rounding moves fp32 logits rarely, those of other formats often."""
    allowed = (MODELS | ONE_ORDER)[model]
    if "matching" in spec:  # a least squares problem amplifies rounding
        return allowed + 2e-3
    if "quantized" not in spec:
        return allowed
    lowest = min((digit for digit in STEP if f"bits={digit}" in spec), default="8")
    return allowed + (STEP[lowest] if allowed > 1e-5 else 1e-3)


def tried(name: str, spec: str) -> bool:
    """Scores of a model that rounds may choose another entry or page, which changes more than any tolerance."""
    return (MODELS | ONE_ORDER)[name] <= 1e-5 or not any(policy in spec for policy in WATCHES)


def candidate(name: str, rows: int):
    weights, _, family = name.partition(" ")
    if weights == "plain":
        return plain(family)
    if weights.startswith("gpu"):
        return on_gpu(name)
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
    if cache.sizes.max_rollback is None or cache.sizes.max_rollback >= 3:
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
    prompts = torch.stack(
        [torch.cat((ids[b, :0].new_zeros(pads[b]), ids[b, :n])) for b, n in enumerate(SHORT)]
    )
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
    out = [
        prefill(model, ids[b : b + 1, :n], row)
        for b, (row, n) in enumerate(zip(rows, SHORT, strict=True))
    ]
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
    out = [
        prefill_packed(model, [ids[b, :n].tolist() for b, n in enumerate(first)], caches, [0, 0, 0])
    ]
    parts = [ids[b, n : n + m].tolist() for b, (n, m) in enumerate(zip(first, second, strict=True))]
    out.append(prefill_packed(model, parts, caches, list(first)))
    batch, ends = (
        together(caches, model.config),
        [n + m for n, m in zip(first, second, strict=True)],
    )
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
    out.append(
        verify_draft(model, ids[:, PROMPT + 2 : PROMPT + 4], cache, cache.length).flatten(0, 1)
    )
    return torch.cat(out)


def across(cache):
    """The cache at the other end of a connection."""
    # A secret, which is not sent.
    salt = {"salt": cache.made.options["salt"]} if "salt" in cache.made.options else {}
    with contextlib.ExitStack() as stack:
        sender, receiver = (
            SocketLink(end, 5.0) for end in map(stack.enter_context, socket.socketpair())
        )
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
            mask = super().mask(T)
            S = width(self._widest, T, mask)
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

    def append(self, k, v):
        return super(type(self), self).append(k, 1.5 * v)

    kinds = {kind: type("Louder", (kind,), {"append": append}) for kind in set(map(type, cache))}
    for layer in cache:
        layer.__class__ = kinds[type(layer)]
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
    return on_ranks(
        2, lambda group: chunks(model, lambda rows: ContextCache(new(rows), group, page=3))
    )[1]


def caches_of_rows(new):
    """Three caches of one row; paged ones share a pool, as in the engine."""
    first = new(1)
    if not isinstance(first, PagedCache):
        return [first, new(1), new(1)]
    return [make_cache(first.made.name, first.config, pool=first.pool) for _ in range(3)]


def together(rows, config):
    paged = isinstance(rows[0], PagedCache)
    return PagedBatch(rows, config) if paged else BatchCache(rows, config)


SITUATIONS = {  # name → (run, rows)
    "one row": (one_row, 1),
    "several rows": (rows_together, 3),
    "chunks": (chunks, 1),
    "long prompt": (long_prompt, 2),
    "padded": (padded, 3),
    "ragged": (ragged, 3),
    "packed": (packed, 3),
    "handed over": (handed_over, 3),
    "own mask": (own_mask, 1),
    "own attend": (own_attend, 1),
    "own cache": (own_cache, 1),
    "split": (split, 3),
    "two ranks": (two_ranks, 1),
}
# Their truth is torch's attention over all keys at once.
UNSPLIT = {"split": "padded", "two ranks": "chunks"}

IN_ONE_PROCESS = SITUATIONS | {"handed over": (continued, 3)}


WITHOUT_STATES = ("sliding", "evicting", "offloaded")
WINDOWED = ("olmo3", "gemma3", "gptoss")  # families whose layers have windows
DROPS = ("sliding", "evicting")  # caches that choose positions themselves
DROPS_ROWS = ("batch:of=sliding", "batch:of=evicting")


def refused(situation: str, spec: str, model: str = "") -> bool:
    """What a combination cannot do, by a typed error: entries would be padding, a rank's share would not be exact."""
    if model.startswith("invariant") and refused_by_invariant(situation, spec):
        return True
    if model.partition(" ")[2] in ("qwen35", "lfm2") and (
        situation == "two ranks" or any(kind in spec for kind in WITHOUT_STATES)
    ):
        return True
    if model.partition(" ")[2] in WINDOWED and (
        situation == "two ranks" or spec.startswith(DROPS) or spec.startswith(DROPS_ROWS)
    ):
        return True
    if model.endswith(" cla") and any(policy in spec for policy in WATCHES):
        return True
    if situation == "two ranks":
        return spec.partition(":")[0] not in context.KINDS
    if situation in ("padded", "split"):
        return "sinks" in spec or spec.startswith("evicting")
    # Their own attention is not part of a batch of rows, and no other attention shows them queries.
    # (Quest over another attention reads all pages.)
    watches = any(policy in spec for policy in WATCHES)
    if situation == "own attend":
        return watches and "quest" not in spec
    return situation in ("ragged", "packed") and watches


def refused_by_invariant(situation: str, spec: str) -> bool:
    """One order of sums has no masks, no other attention, and keys as they were appended, 16 at a time.

    `ragged` has a draft for rows of different lengths, `packed` a step over them.
    """
    if situation in ("padded", "ragged", "own mask", "own attend", "split", "two ranks"):
        return True
    if (
        any(kind in spec for kind in ("quantized", "sliding", "evicting"))
        or CACHES_TRIED[spec].get("page", 16) % 16
    ):
        return True
    return situation == "packed" and spec.partition(":")[0] not in ("paged", "prefix")


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
        def scaled_dot_product_attention(
            q, k, v, attn_mask=None, is_causal=False, enable_gqa=False
        ):
            T, S = q.shape[2], k.shape[2]
            mask = torch.ones(T, S, dtype=torch.bool) if attn_mask is None else attn_mask
            mask = (mask.tril() if is_causal else mask).expand(*mask.shape[:-2], T, S)
            seen = mask if mask.dtype == torch.bool else mask.isfinite()
            oldest = seen & (seen.cumsum(-1) == 1) & (seen.sum(-1, keepdim=True) > 1)
            hidden = False if mask.dtype == torch.bool else -torch.inf
            mask = mask.masked_fill(oldest, hidden)
            return right(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

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
    for spec in (spec for spec in specs if tried(name, spec)):
        try:
            got = run(candidate(name, SITUATIONS[situation][1]), situation, spec)
        except (CacheError, UnsupportedError) as error:
            if not refused(situation, spec, name):
                wrong.append(f"{spec}: {error}")
            continue
        if refused(situation, spec, name):
            wrong.append(f"{spec}: was not refused")
            continue
        (right, planted), allowed = truth(name, situation, spec), tolerance(name, spec)
        if not distance(got, right) <= allowed:
            wrong.append(f"{spec}: {distance(got, right):.1e} from the truth, {allowed} is allowed")
        if distance(got, planted) <= allowed:
            wrong.append(f"{spec}: a mask bug of one position is within the tolerance")
    return wrong
