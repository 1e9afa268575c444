"""Where do two models part? The first layer, the first operation and the first position that differ.

    print(nanokv.debug.first_divergence(a, b, ids))    # None, or: layer 0, rope_k: max |Δ| 1.3 at position 5 (…)

`a` and `b` are nanokv or transformers models, in any mix. Both run once from an empty cache while forward hooks record
what every operation gives; nothing in the model knows of it. `record` and `compare` are the two halves, for use when
only one model fits into memory. `watch` records every forward pass of a block, cached ones too, so that a run with a
cache can be compared layer by layer and token by token with one without. Not a profiler: recording keeps every
activation, about T·L·(9·C + 6·H·D) values.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode

from nanokv.attention import Causal
from nanokv.cache import make_cache

# Operations of a layer in the order of the forward pass → (module, whether its input or its output is that value).
# rope_q is what attention is called with; rope_k and cached_v are read from the cache after the pass.
OPERATIONS = {
    "input_layernorm": ("input_layernorm", "output"),
    "q_proj": ("self_attn.q_proj", "output"),
    "k_proj": ("self_attn.k_proj", "output"),
    "v_proj": ("self_attn.v_proj", "output"),
    "q_norm": ("self_attn.q_norm", "output"),
    "k_norm": ("self_attn.k_norm", "output"),
    "rope_k": None,
    "rope_q": None,
    "cached_v": None,
    "attention": ("self_attn.o_proj", "input"),
    "o_proj": ("self_attn.o_proj", "output"),
    "attention_residual": ("post_attention_layernorm", "input"),
    "post_attention_layernorm": ("post_attention_layernorm", "output"),
    "gate_proj": ("mlp.gate_proj", "output"),
    "up_proj": ("mlp.up_proj", "output"),
    "swiglu": ("mlp.down_proj", "input"),
    "down_proj": ("mlp.down_proj", "output"),
    "mlp_residual": ("", "output"),  # the layer's output
}
# Of a layer that has a router, in the place of gate_proj … down_proj.
EXPERTS = {"experts": ("mlp", "output")}
ENDS = {"embed_tokens": -1, "norm": 1, "lm_head": 2}  # before and after all layers
# × scale, see Step.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-9}


@dataclass(frozen=True)
class Step:
    """One operation of two models, at the position where they differ most in relation to the tolerance.

    `scale` is the largest |b| of that position, at least 1; `tolerance` is absolute: the dtype's figure × scale.
    (Per position, because a trained model's first token can be a thousand times larger than the others.)
    """

    layer: int | None  # None: embed_tokens, norm and lm_head belong to no layer
    operation: str
    difference: float  # max |a − b| there; nan or inf if a value or a whole layer is missing
    tolerance: float
    scale: float
    position: int | None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Within tolerance; nan never is."""
        return self.difference <= self.tolerance

    @property
    def place(self) -> str:
        """`layer 3, q_norm` or `lm_head`."""
        if self.layer is None:
            return self.operation
        return f"layer {self.layer}, {self.operation}"

    def __str__(self):
        where = "" if self.position is None else f" at position {self.position}"
        why = self.note or f"tolerance {self.tolerance:.1e}, values up to {self.scale:.3g}"
        return f"{self.place}: max |Δ| {self.difference:.3g}{where} ({why})"


def first_divergence(a, b, ids, tolerance: float | None = None) -> Step | None:
    """The first operation, in the order of the forward pass, at which `a` and `b` differ; None if there is none.

    ids (B,T) int64, T ≥ 2. `tolerance` is relative to each position's largest value; None takes TOLERANCE of the
    wider rounding of the two dtypes; 0 finds the first operation that is not bit-equal.
    """
    steps = compare(record(a, ids), record(b, ids), tolerance)
    return next((step for step in steps if not step.ok), None)


@torch.inference_mode()
def record(model, ids) -> dict:
    """{(layer or None, operation): (B,T,…) tensor on the CPU} of one pass over ids (B,T) from an empty cache.

    Logits of all T positions are among it: T·V values. The model's state and modules are left as they were.
    """
    body = _body(model)
    ids = torch.as_tensor(ids, device=body.embed_tokens.weight.device).long()
    found = {}
    with _hooks(model, found.__setitem__), _QuerySpy() as spy:
        run = _run_ours if body is model else _run_transformers
        cached = run(model, ids)
    for i, (key, value) in enumerate(cached):
        found[i, "rope_k"] = _token_major(key)
        found[i, "cached_v"] = _token_major(value)
        # An attention that calls another kernel is compared by its output only.
        if len(spy.queries) == len(cached):
            found[i, "rope_q"] = _token_major(spy.queries[i])
    return found


@dataclass
class Pass:
    """One forward pass: `values` as `record` gives them, of the T tokens (B,T) that were fed from `start` on.

    rope_k and cached_v are the last T keys and values that attention was called with, rope_q its queries. Logits are
    there for as many of the last positions as lm_head was asked for.
    """

    start: int | torch.Tensor  # start_pos as the model was told: (B,) where rows differ
    tokens: torch.Tensor  # (B,T)
    values: dict = field(default_factory=dict)
    calls: int = 0  # of attention so far


@contextmanager
def watch(model):
    """A list that gets a Pass for every forward pass of a nanokv model inside the block, cached or not.

    What was computed before an exception is there too. The model's modules are left as they were.
    """
    passes = []

    def begin(module, args):
        tokens, _, start, _ = args
        passes.append(Pass(start, tokens))

    def keep(key, value):
        if value.dim() == 2:
            value = value[:, None]  # (B,V) → (B,1,V)
        passes[-1].values[key] = value

    def attention(q, k, v):
        now = passes[-1]
        T = now.tokens.shape[1]
        seen = {
            "rope_q": q.reshape(len(q), -1, T, q.shape[-1]),
            "rope_k": k[:, :, -T:],
            "cached_v": v[:, :, -T:],
        }
        now.values |= {(now.calls, name): _token_major(x) for name, x in seen.items()}
        now.calls += 1

    handle = model.register_forward_pre_hook(begin)
    try:
        with _hooks(model, keep), _AttentionSpy(attention):
            yield passes
    finally:
        handle.remove()


def compare(a: dict, b: dict, tolerance: float | None = None) -> list[Step]:
    """Two records → one Step an operation, in the order of the forward pass; a layer that one side lacks counts inf."""
    if tolerance is None:
        tolerance = max(TOLERANCE[side[None, "embed_tokens"].dtype] for side in (a, b))
    layers_a = {layer for layer, _ in a}
    layers_b = {layer for layer, _ in b}
    last = len(layers_a | layers_b)
    names = list(OPERATIONS)
    names[-1:-1] = EXPERTS

    def order(key):
        layer, operation = key
        if layer is not None:
            return layer, names.index(operation)
        if ENDS[operation] < 0:
            return ENDS[operation], 0
        return last + ENDS[operation], 0

    steps = []
    for key in sorted(a.keys() | b.keys(), key=order):
        layer, operation = key
        if key in a and key in b:
            steps.append(_step(layer, operation, a[key], b[key], tolerance))
        elif layer not in layers_a & layers_b:
            note = "only one of the models has this layer"
            steps.append(Step(layer, operation, float("inf"), tolerance, 1.0, None, note))
    return steps


def earliest(a: dict, b: dict, step: Step) -> tuple[int, int] | None:
    """(position, row) at which two records first differ in this step's operation; step.position is the worst one.

    None where there is nothing to compare: other shapes, or a layer that one side lacks.
    """
    key = step.layer, step.operation
    if key not in a or key not in b or a[key].shape != b[key].shape:
        return None
    _, _, ratio = _ratio(a[key], b[key])  # (B,T)
    above = (ratio > step.tolerance / step.scale).T.nonzero().tolist()  # by position
    if not above:
        return None
    position, row = above[0]
    return position, row


def _step(layer, operation, a, b, tolerance: float) -> Step:
    if a.shape != b.shape:
        note = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        return Step(layer, operation, float("inf"), tolerance, 1.0, None, note)
    difference, scale, ratio = _ratio(a, b)
    worst = int(ratio.flatten().argmax())
    size = scale.flatten()[worst].item()
    delta = difference.flatten()[worst].item()
    return Step(layer, operation, delta, tolerance * size, size, worst % a.shape[1])


def _ratio(a, b):
    """|a − b| and the scale of b, each (B,T), and the one divided by the other; what is no number is infinitely off."""
    a = a.double().flatten(2)  # (B,T,…) → (B,T,N)
    b = b.double().flatten(2)
    difference = (a - b).abs().amax(-1)  # (B,T)
    scale = b.abs().amax(-1).clamp(min=1.0)  # (B,T)
    return difference, scale, (difference / scale).nan_to_num(nan=float("inf"))


def _body(model):
    """The module that has the layers: transformers keeps it one level down."""
    return getattr(model, "model", model)


@contextmanager
def _hooks(model, keep):
    """While inside, keep((layer or None, operation), value) is called for all that has a module; then all hooks go."""
    body = _body(model)
    ends = {"embed_tokens": body.embed_tokens, "norm": body.norm, "lm_head": model.lm_head}
    handles = []
    try:
        for name, module in ends.items():
            handles.append(_hook(module, "output", keep, (None, name)))
        for i, layer in enumerate(body.layers):
            modules = dict(layer.named_modules())
            operations = OPERATIONS
            if "mlp.experts" in modules:
                operations = OPERATIONS | EXPERTS
            for operation, place in operations.items():
                if place is None:
                    continue
                path, side = place
                if path in modules:  # a family may lack a norm
                    handles.append(_hook(modules[path], side, keep, (i, operation)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(module, side: str, keep, key):
    """Keep a module's first input or its output; returns the handle that removes the hook."""

    def before(module, args):
        keep(key, args[0].detach().cpu())

    def after(module, args, out):
        if isinstance(out, tuple):
            out = out[0]
        keep(key, out.detach().cpu())

    if side == "input":
        return module.register_forward_pre_hook(before)
    return module.register_forward_hook(after)


class _AttentionSpy(TorchFunctionMode):
    """Calls see(q, k, v) for every attention call: between RoPE and the kernel there is no module to hook."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "scaled_dot_product_attention":
            self.see(*args[:3])
        return function(*args, **(kwargs or {}))


class _QuerySpy(_AttentionSpy):
    """Keeps the queries of every attention call."""

    def __init__(self):
        self.queries = []
        super().__init__(lambda q, k, v: self.queries.append(q))


def _run_ours(model, ids) -> list:
    cache = make_cache("dict", model.config, batch_size=len(ids))
    model.lm_head(model(ids, cache, 0, Causal()))
    return [(layer["key"], layer["value"]) for layer in cache]


def _run_transformers(model, ids) -> list:
    cache = model(ids, use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def _token_major(x):
    """(B,H,T,D) → (B,T,H,D), on the CPU."""
    return x.transpose(1, 2).detach().cpu()
