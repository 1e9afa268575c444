"""Where do two models part? The first layer, the first operation and the first position that differ.

    print(nanokv.debug.first_divergence(a, b, ids))    # None, or: layer 0, rope_k: max |Δ| 1.3 at position 5 (…)

`a` and `b` are nanokv or transformers models, in any mix. Both run once from an empty cache while forward hooks record
what every operation gives; nothing in the model knows of it. `record` and `compare` are the two halves, for use when
only one model fits into memory. Not a profiler: recording keeps every activation, about T·L·(9·C + 6·H·D) values.
"""

from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from nanokv.attention import causal_attention
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
ENDS = {"embed_tokens": -1, "norm": 1, "lm_head": 2}  # before and after all layers
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-9}  # × scale, see Step


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
        return self.operation if self.layer is None else f"layer {self.layer}, {self.operation}"

    def __str__(self):
        where = "" if self.position is None else f" at position {self.position}"
        why = self.note or f"tolerance {self.tolerance:.1e}, values up to {self.scale:.3g}"
        return f"{self.place}: max |Δ| {self.difference:.3g}{where} ({why})"


def first_divergence(a, b, ids, tolerance: float | None = None) -> Step | None:
    """The first operation, in the order of the forward pass, at which `a` and `b` differ; None if there is none.

    ids (B,T) int64, T ≥ 2. `tolerance` is relative to each position's largest value; None takes TOLERANCE of the
    wider rounding of the two dtypes; 0 finds the first operation that is not bit-equal.
    """
    return next((step for step in compare(record(a, ids), record(b, ids), tolerance) if not step.ok), None)


@torch.inference_mode()
def record(model, ids) -> dict:
    """{(layer or None, operation): (B,T,…) tensor on the CPU} of one pass over ids (B,T) from an empty cache.

    Logits of all T positions are among it: T·V values. The model's state and modules are left as they were.
    """
    body = getattr(model, "model", model)  # transformers keeps the layers one level down
    ids = torch.as_tensor(ids, device=body.embed_tokens.weight.device).long()
    found, handles = {}, []
    try:
        for name, module in (("embed_tokens", body.embed_tokens), ("norm", body.norm), ("lm_head", model.lm_head)):
            handles.append(_hook(module, "output", found, (None, name)))
        for i, layer in enumerate(body.layers):
            for operation, place in OPERATIONS.items():
                if place:
                    handles.append(_hook(layer.get_submodule(place[0]), place[1], found, (i, operation)))
        with _QuerySpy() as spy:
            cached = _run_ours(model, ids) if body is model else _run_transformers(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    for i, (key, value) in enumerate(cached):
        found[i, "rope_k"], found[i, "cached_v"] = _token_major(key), _token_major(value)
        if len(spy.queries) == len(cached):  # an attention that calls another kernel is compared by its output only
            found[i, "rope_q"] = _token_major(spy.queries[i])
    return found


def compare(a: dict, b: dict, tolerance: float | None = None) -> list[Step]:
    """Two records → one Step an operation, in the order of the forward pass; a layer that one side lacks counts inf."""
    if tolerance is None:
        tolerance = max(TOLERANCE[side[None, "embed_tokens"].dtype] for side in (a, b))
    layers_a, layers_b = {layer for layer, _ in a}, {layer for layer, _ in b}
    names, last, steps = list(OPERATIONS), len(layers_a | layers_b), []

    def order(key):
        layer, operation = key
        return (last * (ENDS[operation] > 0) + ENDS[operation], 0) if layer is None else (layer, names.index(operation))

    for key in sorted(a.keys() | b.keys(), key=order):
        if key in a and key in b:
            steps.append(_step(*key, a[key], b[key], tolerance))
        elif key[0] not in layers_a & layers_b:
            steps.append(Step(*key, float("inf"), tolerance, 1.0, None, "only one of the models has this layer"))
    return steps


def _step(layer, operation, a, b, tolerance: float) -> Step:
    if a.shape != b.shape:
        note = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        return Step(layer, operation, float("inf"), tolerance, 1.0, None, note)
    a, b = a.double().flatten(2), b.double().flatten(2)  # (B,T,…) → (B,T,N)
    difference = (a - b).abs().amax(-1)  # (B,T)
    scale = b.abs().amax(-1).clamp(min=1.0)  # (B,T)
    ratio = (difference / scale).nan_to_num(nan=float("inf"))
    worst = int(ratio.flatten().argmax())
    size = scale.flatten()[worst].item()
    return Step(layer, operation, difference.flatten()[worst].item(), tolerance * size, size, worst % a.shape[1])


def _hook(module, side: str, found: dict, key):
    """Store a module's first input or its output; returns the handle that removes the hook."""
    if side == "input":
        return module.register_forward_pre_hook(lambda module, args: found.__setitem__(key, args[0].detach().cpu()))
    return module.register_forward_hook(
        lambda module, args, out: found.__setitem__(key, (out[0] if isinstance(out, tuple) else out).detach().cpu())
    )


class _QuerySpy(TorchFunctionMode):
    """Keeps the queries of every attention call: between RoPE and the kernel there is no module to hook."""

    def __init__(self):
        super().__init__()
        self.queries = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") == "scaled_dot_product_attention":
            self.queries.append(args[0])
        return function(*args, **(kwargs or {}))


def _run_ours(model, ids) -> list:
    cache = make_cache("dict", model.config, batch_size=len(ids))
    model.lm_head(model(ids, cache, 0, causal_attention))
    return [(layer["key"], layer["value"]) for layer in cache]


def _run_transformers(model, ids) -> list:
    cache = model(ids, use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def _token_major(x):
    """(B,H,T,D) → (B,T,H,D), on the CPU."""
    return x.transpose(1, 2).detach().cpu()
