"""Find where two models diverge: the first layer, operation and position that differ.

    print(nanokv.debug.first_divergence(a, b, ids))
    # None, or: layer 0, rope_k: max |Δ| 1.3 at position 5 (…)

`a` and `b` are nanokv or transformers models, in any combination. Both run once from an empty cache
while forward hooks record the result of every operation; the models are not changed. `record` and
`compare` are the two halves, for use when only one model fits into memory. `watch` records every
forward pass inside a `with` block, with or without a cache, so that a cached run can be compared
with an uncached one layer by layer and token by token. Recording keeps every activation, about
T·L·(9·C + 6·H·D) values, so it is unsuitable for profiling.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from nanokv.attention import Causal
from nanokv.cache import make_cache
from nanokv.config import Config
from nanokv.errors import UnsupportedError
from nanokv.model import Transformer
from nanokv.text.ids import Rows

# Operations of a layer in the order of the forward pass → (module, whether the value is its input
# or its output). No module computes the three values that are None: rope_q is the argument of
# attention, rope_k and cached_v are read from the cache after the pass.
OPERATIONS: dict[str, tuple[str, str] | None] = {
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
# In a layer with a router, instead of gate_proj … down_proj.
EXPERTS: dict[str, tuple[str, str] | None] = {"experts": ("mlp", "output")}
ENDS = {"embed_tokens": -1, "norm": 1, "lm_head": 2}  # before and after all layers
# Relative to Step.scale.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float64: 1e-9}


Key = tuple[int | None, str]  # (layer or None, operation)
Keep = Callable[[Key, Tensor], None]


@dataclass(frozen=True)
class Step:
    """One operation of two models, at the position whose difference is largest relative to its
    scale.

    `scale` is the largest |b| at that position, at least 1. `tolerance` is absolute: the dtype's
    TOLERANCE × scale. The scale is per position, because the values of a trained model's first
    token can be a thousand times larger than the others.
    """

    layer: int | None  # None: embed_tokens, norm and lm_head belong to no layer
    operation: str
    difference: float  # max |a − b| at the position; nan or inf if a value or a layer is missing
    tolerance: float
    scale: float
    position: int | None
    note: str = ""

    @property
    def ok(self) -> bool:
        """True if the difference is within tolerance; False for nan."""
        return self.difference <= self.tolerance

    @property
    def place(self) -> str:
        """`layer 3, q_norm` or `lm_head`."""
        if self.layer is None:
            return self.operation
        return f"layer {self.layer}, {self.operation}"

    def __str__(self) -> str:
        where = "" if self.position is None else f" at position {self.position}"
        why = self.note or f"tolerance {self.tolerance:.1e}, values up to {self.scale:.3g}"
        return f"{self.place}: max |Δ| {self.difference:.3g}{where} ({why})"


def first_divergence(a: Any, b: Any, ids: Rows, tolerance: float | None = None) -> Step | None:
    """The first operation, in the order of the forward pass, at which `a` and `b` differ, or None.

    ids (B,T) int64, T ≥ 2. `tolerance` is relative to each position's largest value; by default
    it is the larger TOLERANCE of the two dtypes. 0 finds the first operation that is not
    bit-equal.
    """
    steps = compare(record(a, ids), record(b, ids), tolerance)
    return next((step for step in steps if not step.ok), None)


def only_plain_blocks(config: Config, what: str) -> None:
    """UnsupportedError for a family with layers of its own: windows, sinks and states.

    The instruments know the operations of model.py's blocks, and show no others.
    """
    if config.family.own_parts:
        raise UnsupportedError(
            f"{what} knows the blocks of model.py alone, and {config.family.title} has its own",
            hint="nanokv.inference.score and transformers' logits can be compared directly",
        )


@torch.inference_mode()
def record(model: Any, ids: Rows) -> dict[Key, Tensor]:
    """One pass over ids (B,T) from an empty cache → {(layer or None, operation): (B,T,…) on the
    CPU}.

    This includes the logits of all T positions, T·V values per row. The model is left unchanged.
    """
    body = _body(model)
    if body is model:
        only_plain_blocks(model.config, "the recorder")
    ids = torch.as_tensor(ids, device=body.embed_tokens.weight.device).long()
    found: dict[Key, Tensor] = {}
    with _hooks(model, found.__setitem__), _QuerySpy() as spy:
        run = _run_ours if body is model else _run_transformers
        cached = run(model, ids)
    for i, (key, value) in enumerate(cached):
        found[i, "rope_k"] = _token_major(key)
        found[i, "cached_v"] = _token_major(value)
        # Attention that does not call scaled_dot_product_attention is compared by its output only.
        if len(spy.queries) == len(cached):
            found[i, "rope_q"] = _token_major(spy.queries[i])
    return found


@dataclass
class Pass:
    """One forward pass: `values` as `record` returns them, for the T tokens (B,T) fed from
    `start` on.

    rope_k and cached_v are the last T keys and values that attention was called with, and rope_q
    are its queries. Logits cover only the last positions, those for which the caller applied
    lm_head.
    """

    start: int | torch.Tensor  # the model's argument start_pos: (B,) if rows differ
    tokens: torch.Tensor  # (B,T)
    values: dict[Key, Tensor] = field(default_factory=dict)
    calls: int = 0  # calls of attention so far


@contextmanager
def watch(model: Transformer) -> Iterator[list[Pass]]:
    """Yields a list to which every forward pass of a nanokv model inside the block appends a Pass.

    A pass that raises is kept with the values computed before. The model is left unchanged.
    """
    passes = []
    attending = [i for i, layer in enumerate(model.layers) if hasattr(layer, "self_attn")]
    number = dict(enumerate(attending))  # the n-th call of attention → the layer

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
        layer = number.get(now.calls, now.calls)
        now.values |= {(layer, name): _token_major(x) for name, x in seen.items()}
        now.calls += 1

    handle = model.register_forward_pre_hook(begin)
    try:
        with _hooks(model, keep), _AttentionSpy(attention):
            yield passes
    finally:
        handle.remove()


def compare(
    a: dict[Key, Tensor], b: dict[Key, Tensor], tolerance: float | None = None
) -> list[Step]:
    """Two records → one Step per operation, in the order of the forward pass. A layer that only one
    side has gets difference inf."""
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


def earliest(a: dict[Key, Tensor], b: dict[Key, Tensor], step: Step) -> tuple[int, int] | None:
    """(position, row) at which two records first differ in this step's operation.

    (step.position is the one at which they differ most.)
    None if there is nothing to compare: the shapes differ, or one side lacks the layer.
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


def _step(layer: int | None, operation: str, a: Tensor, b: Tensor, tolerance: float) -> Step:
    if a.shape != b.shape:
        note = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        return Step(layer, operation, float("inf"), tolerance, 1.0, None, note)
    difference, scale, ratio = _ratio(a, b)
    worst = int(ratio.flatten().argmax())
    size = scale.flatten()[worst].item()
    delta = difference.flatten()[worst].item()
    return Step(layer, operation, delta, tolerance * size, size, worst % a.shape[1])


def _ratio(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(|a − b|, scale of b, their ratio), each (B,T). nan becomes a ratio of inf."""
    a = a.double().flatten(2)  # (B,T,…) → (B,T,N)
    b = b.double().flatten(2)
    difference = (a - b).abs().amax(-1)  # (B,T)
    scale = b.abs().amax(-1).clamp(min=1.0)  # (B,T)
    return difference, scale, (difference / scale).nan_to_num(nan=float("inf"))


def _body(model: Any) -> Any:
    """The module with the layers: in transformers it is `model.model`."""
    return getattr(model, "model", model)


@contextmanager
def _hooks(model: Any, keep: Keep) -> Iterator[None]:
    """Inside the block, call keep((layer or None, operation), value) for every operation that has a
    module. The hooks are removed at its end."""
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


def _hook(module: nn.Module, side: str, keep: Keep, key: Key) -> RemovableHandle:
    """Hook a module's first input or its output; returns the handle that removes the hook."""

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
    """Calls see(q, k, v) for every attention call, because there is no module to hook between RoPE
    and the kernel."""

    def __init__(self, see: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.see = see

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") == "scaled_dot_product_attention":
            self.see(*args[:3])
        return function(*args, **(kwargs or {}))


class _QuerySpy(_AttentionSpy):
    """Collects the queries of every attention call."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        super().__init__(lambda q, k, v: self.queries.append(q))


def _run_ours(model: Transformer, ids: Tensor) -> list[Any]:
    cache = make_cache("dict", model.config, batch_size=len(ids))
    model.lm_head(model(ids, cache, 0, Causal()))
    layers: Iterable[Any] = cache  # DictCaches
    return [(layer["key"], layer["value"]) for layer in layers]


def _run_transformers(model: Any, ids: Tensor) -> list[Any]:
    cache = model(ids, use_cache=True).past_key_values
    return [(layer.keys, layer.values) for layer in cache.layers]


def _token_major(x: Tensor) -> Tensor:
    """(B,H,T,D) → (B,T,H,D), on the CPU."""
    return x.transpose(1, 2).detach().cpu()
