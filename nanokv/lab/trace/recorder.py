"""Record a greedy run: keys and values, attention weights and logits of every step.

The run is an unchanged `decoding.generation.Generation` over the dict cache. Forward hooks and a
torch function mode record it from outside, as in study.debug, so its numbers are those of any
other run. Keys and values are the arguments of the attention kernel: the contents of the cache,
or what a fault passes instead. A fused kernel does not return the weights, so they are computed
again from its queries, keys and mask; `error` is the difference between their output and the
kernel's. `measure` times the same run with nothing attached.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nanokv.cache import make_cache
from nanokv.decoding.generation import EosIds, Generation, SamplingParams
from nanokv.inference import score
from nanokv.lab.study.debug import only_plain_blocks
from nanokv.model import Transformer
from nanokv.rope import rope_angles


@dataclass
class Step:
    """One forward pass: the prefill of T tokens, or the decode of one. Tensors are fp32 on the
    CPU."""

    fed: list[int]  # the T ids of the pass
    start_pos: int  # the model's argument
    cos: torch.Tensor  # (T,D/2), one per pair of dimensions
    sin: torch.Tensor  # (T,D/2)
    logits: torch.Tensor  # (V,), after the last of the T tokens
    chosen: int  # the id with the highest logit
    nbytes: int  # bytes of the whole cache after the step
    # layer → (H,T,S); no entry if the layer called another kernel
    attention: dict[int, torch.Tensor] = field(default_factory=dict)
    error: float = 0.0  # max |attention · V − the kernel's output| over the layers

    @property
    def kind(self) -> str:
        return "prefill" if len(self.fed) > 1 or self.start_pos == 0 else "decode"


class CacheLog:
    """The keys and values that one layer's attention read at every step, stored as the rows that
    are new or have changed.

    In a run without a fault, a row never changes once it is written, so N tokens cost N rows and
    not N²/2.
    """

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []  # each (n,2,Hk,D): keys and values of n positions
        # per step: (number of rows read, positions of its rows in `rows`)
        self.steps: list[tuple[int, list[int]]] = []
        self._before: torch.Tensor | None = None  # (S,2,Hk,D)

    def note(self, now: torch.Tensor) -> None:
        """Add the rows (S,2,Hk,D) of one more step."""
        changed = torch.ones(len(now), dtype=torch.bool)
        if self._before is not None:
            shared = min(len(now), len(self._before))
            a = now[:shared]
            b = self._before[:shared]
            both_nan = a.isnan() & b.isnan()
            changed[:shared] = ((a != b) & ~both_nan).flatten(1).any(1)
        self.rows.append(now[changed])
        self.steps.append((len(now), changed.nonzero().flatten().tolist()))
        self._before = now

    def history(self) -> Iterator[torch.Tensor]:
        """Yields the rows read at each step, (S,2,Hk,D)."""
        held = torch.zeros(0)
        for rows, (length, changed) in zip(self.rows, self.steps, strict=True):
            now = rows.new_zeros(length, *rows.shape[1:])
            if len(held):
                now[: len(held)] = held[:length]
            now[changed] = rows
            yield (held := now)

    def at(self, step: int) -> torch.Tensor:
        """The rows read at one step, (S,2,Hk,D)."""
        return next(islice(self.history(), step, None))


@dataclass
class Run:
    """A recorded run. `layers` are the indices of the layers whose cache and attention are
    recorded; Step.nbytes counts all layers."""

    ids: list[int]  # the prompt
    layers: list[int]
    steps: list[Step] = field(default_factory=list)
    caches: dict[int, CacheLog] = field(default_factory=dict)
    stopped: str = ""  # the error that ended the run; "" if it reached its end

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer; the last token was chosen but never fed."""
        return self.ids + [step.chosen for step in self.steps]


def record(
    model: Transformer,
    ids: Sequence[int],
    max_new_tokens: int = 32,
    layers: Iterable[int] | None = None,
    eos_token_ids: EosIds = None,
    may_fail: bool = False,
) -> Run:
    """Run `ids` (a list) and up to max_new_tokens greedy tokens through the model, and record it.

    layers: indices of the layers whose cache and attention are recorded; by default all.
    may_fail: an exception ends the run and is put into `.stopped`, for a model with a fault.

    Memory: about 4·(S·L·2·Hk·D + L·H·S²/2 + steps·V) bytes for S tokens.
    """
    if layers is None:
        layers = range(model.config.num_hidden_layers)
    layers = list(layers)
    cache = make_cache("dict", model.config)
    run = Run(list(ids), layers, caches={layer: CacheLog() for layer in layers})
    generation = Generation(
        model, ids, cache, SamplingParams(), max_new_tokens, eos_token_ids, chunk=len(ids)
    )
    with Watch(model, layers) as watch:
        while True:
            try:
                chosen = next(generation, None)
            except Exception as error:
                if not may_fail:
                    raise
                run.stopped = f"{type(error).__name__}: {error}"
                break
            if chosen is None:
                break
            for layer, log in run.caches.items():
                log.note(watch.read.get(layer, torch.zeros(0)))
            run.steps.append(Step(**watch.seen, chosen=chosen.token, nbytes=cache.nbytes))
    return run


class Watch(TorchFunctionMode):
    """Records while a model runs: `seen` has the Step fields of the newest forward pass, and
    `read` its keys and values per layer.

    Layers are numbered in the order of their calls, because a fault may call the same layer twice.
    """

    def __init__(self, model: Transformer, layers: Iterable[int]) -> None:
        only_plain_blocks(model.config, "the recorder of a trace")
        super().__init__()
        self.layers = set(layers)
        self.layer = -1
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            model.lm_head.register_forward_hook(self._logits),
            *(block.register_forward_pre_hook(self._next_layer) for block in model.layers),
        ]

    def __exit__(self, *error: Any) -> Any:
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*error)

    def _begin(self, model: Any, args: Any) -> None:
        tokens, _, start_pos, _ = args
        self.layer = -1
        self.read: dict[int, torch.Tensor] = {}  # layer → (S,2,Hk,D)
        self.seen = {
            "fed": tokens[0].tolist(),
            "start_pos": int(start_pos),
            "attention": {},
            "error": 0.0,
        }

    def _next_layer(self, block: Any, args: Any) -> None:
        self.layer += 1
        if self.layer == 0:
            # dimensions i and i + D/2 have the same angle
            for name, x in zip(("cos", "sin"), args[1], strict=True):  # (T,D)
                self.seen[name] = x[..., : x.shape[-1] // 2].float().cpu()

    def _logits(self, head: Any, args: Any, out: torch.Tensor) -> None:
        self.seen["logits"] = out.reshape(-1, out.shape[-1])[-1].float().cpu()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if (
            getattr(function, "__name__", "") == "scaled_dot_product_attention"
            and self.layer in self.layers
        ):
            self._attention(out, *args, **(kwargs or {}))
        return out

    def _attention(
        self, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> None:
        weights, error = attention_weights(out, q, k, v, **options)
        T = len(self.seen["fed"])
        weights = weights.reshape(-1, T, weights.shape[-1])  # (H,T,S)
        self.seen["attention"][self.layer] = weights.cpu()
        self.seen["error"] = max(self.seen["error"], error)
        rows = torch.stack((k[0], v[0])).float().cpu()  # (2,Hk,S,D), a copy
        self.read[self.layer] = rows.permute(2, 0, 1, 3)  # (S,2,Hk,D)


def attention_weights(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, float]:
    """(softmax(q kᵀ · scale) of the batch's first row, max |its product with v − the kernel's
    `out`|).

    q (B,h,r,D), k and v (B,Hk,S,D) → (h,r,S). decode_attention groups heads, with h = Hk and r =
    G, so that (Hk,G,S) is (H,1,S).
    """
    with torch._C.DisableTorchFunction():
        q, k, v, out = (x[0].float() for x in (q, k, v, out))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))  # (h,S,D)
        if scale is None:
            scale = 1 / math.sqrt(q.shape[-1])
        scores = q @ k.mT * scale  # (h,r,S)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dim() == 4:
            attn_mask = attn_mask[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        return weights, (weights @ v - out).abs().max().item()


@torch.inference_mode()
def angle_positions(model: Transformer, step: Step) -> list[int]:
    """The T positions that belong to the recorded cos and sin (T,D/2): the nearest of
    0 … 2·(start_pos + T) − 1."""
    candidates = torch.arange(2 * (step.start_pos + len(step.fed)))
    half = step.cos.shape[-1]
    cos, sin = rope_angles(model.config, candidates, torch.float32)  # (N,D) ×2
    known = torch.cat((cos[:, :half], sin[:, :half]), 1)  # (N,D)
    near = torch.cdist(torch.cat((step.cos, step.sin), 1), known)  # (T,N)
    return near.argmin(1).tolist()


@dataclass
class Costs:
    """Median seconds of each step of a run."""

    repeat: int
    cached: list[float]
    uncached: list[float]  # `score` of all tokens so far; empty if it was not measured
    difference: float = 0.0  # max |Δ logits| between cached and uncached


def measure(model: Transformer, run: Run, repeat: int = 3, uncached: bool = True) -> Costs:
    """Time the steps of a run with a cache, and without one, where every step computes all tokens
    again.

    Nothing is attached to the model here. A first pass of each kind is a warm-up and is not
    counted.
    """

    def with_cache():
        cache = make_cache("dict", model.config)
        seconds = []
        steps = Generation(
            model, run.ids, cache, SamplingParams(), len(run.steps), [], chunk=len(run.ids)
        )
        for _ in run.steps:
            began = perf_counter()
            next(steps)
            seconds.append(perf_counter() - began)
        return seconds

    def without(n):
        tokens = torch.tensor([run.tokens[: len(run.ids) + n]])
        began = perf_counter()
        logits = score(model, tokens)[0, -1]  # (V,)
        int(logits.argmax())  # waits for the GPU
        return perf_counter() - began, logits.float().cpu()

    with_cache()
    rounds = [with_cache() for _ in range(repeat)]
    costs = Costs(repeat, [median(times) for times in zip(*rounds, strict=True)], [])
    if not uncached or not run.steps:
        return costs
    without(0)
    for n, step in enumerate(run.steps):
        seconds, logits = zip(*(without(n) for _ in range(repeat)), strict=True)
        costs.uncached.append(median(seconds))
        difference = (logits[0] - step.logits).abs().max().item()
        costs.difference = max(costs.difference, difference)
    return costs
