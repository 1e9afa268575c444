"""A greedy run with every step's tensors: what went into the cache, who looked where, which logits came out.

The run is `decoding.generation.Generation` on the dict cache, unchanged. Forward hooks and a torch function mode look
on from outside, as study.debug does: nothing in the model knows of them, and its numbers are those of any other run.
Keys and values are those that the attention kernel was given: what the cache holds, and, in a run that was broken on
purpose, whatever it hands out instead. Weights are not what a fused kernel returns, so they are computed from the very
queries, keys and mask that it was called with; `error` says how far they are from the output that it gave.
Not a profiler: `measure` times the same run with nothing attached.
"""

import math
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from time import perf_counter

import torch
from torch.overrides import TorchFunctionMode

from nanokv.cache import make_cache
from nanokv.decoding.generation import Generation, SamplingParams
from nanokv.inference import score
from nanokv.rope import rope_angles


@dataclass
class Step:
    """One forward pass: the prefill of T tokens, or the decode of one. Tensors are fp32 on the CPU."""

    fed: list[int]  # T ids that went in
    start_pos: int  # what the model was called with
    cos: torch.Tensor  # (T,D/2), one for each pair of dimensions
    sin: torch.Tensor  # (T,D/2)
    logits: torch.Tensor  # (V,), after the last of the T tokens
    chosen: int  # the id that the logits gave
    nbytes: int  # of the whole cache, measured after the step
    # Layer → (H,T,S); no entry: another kernel ran.
    attention: dict[int, torch.Tensor] = field(default_factory=dict)
    error: float = 0.0  # max |attention · V − the kernel's output| over the layers

    @property
    def kind(self) -> str:
        return "prefill" if len(self.fed) > 1 or self.start_pos == 0 else "decode"


class CacheLog:
    """What one layer's attention read at every step, kept as the rows that were new or had changed.

    In a run without a fault a row never changes once it is written, so N tokens cost N rows and not N²/2.
    """

    def __init__(self):
        self.rows: list[torch.Tensor] = []  # each (n,2,Hk,D): keys and values of n positions
        # (rows read, those of them that are the next in `rows`).
        self.steps: list[tuple[int, list[int]]] = []
        self._before = None  # (S,2,Hk,D)

    def note(self, now: torch.Tensor):
        """The rows (S,2,Hk,D) of one more step."""
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

    def history(self):
        """What was read at each step, (S,2,Hk,D) each."""
        held = torch.zeros(0)
        for rows, (length, changed) in zip(self.rows, self.steps, strict=True):
            now = rows.new_zeros(length, *rows.shape[1:])
            if len(held):
                now[: len(held)] = held[:length]
            now[changed] = rows
            yield (held := now)

    def at(self, step: int) -> torch.Tensor:
        """(S,2,Hk,D) as it was at a step."""
        return next(islice(self.history(), step, None))


@dataclass
class Run:
    """A recorded run. `layers`: the indices whose cache and attention were kept; bytes are those of all layers."""

    ids: list[int]  # the prompt
    layers: list[int]
    steps: list[Step] = field(default_factory=list)
    caches: dict[int, CacheLog] = field(default_factory=dict)
    stopped: str = ""  # why it broke off; "" for a run that reached its end

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer; the last token was chosen and never fed."""
        return self.ids + [step.chosen for step in self.steps]


def record(model, ids, max_new_tokens=32, layers=None, eos_token_ids=None, may_fail=False) -> Run:
    """Run `ids` (a list) and up to max_new_tokens greedy tokens through the model, keeping what happens.

    layers: indices whose cache and attention are kept, None = all. may_fail: an exception in the run ends it and is
    told in `.stopped`, for a model that was broken on purpose.
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
    """Looks on while a model runs: `seen` has the Step fields of the newest forward pass, `read` its keys and values.

    Layers are counted as they are called, because a fault may call the same one twice.
    """

    def __init__(self, model, layers):
        super().__init__()
        self.layers = set(layers)
        self.layer = -1
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            model.lm_head.register_forward_hook(self._logits),
            *(block.register_forward_pre_hook(self._next_layer) for block in model.layers),
        ]

    def __exit__(self, *error):
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*error)

    def _begin(self, model, args):
        tokens, _, start_pos, _ = args
        self.layer = -1
        self.read = {}  # layer → (S,2,Hk,D)
        self.seen = {
            "fed": tokens[0].tolist(),
            "start_pos": int(start_pos),
            "attention": {},
            "error": 0.0,
        }

    def _next_layer(self, block, args):
        self.layer += 1
        if self.layer == 0:
            # The same pair in i and i + D/2.
            for name, x in zip(("cos", "sin"), args[1], strict=True):  # (T,D)
                self.seen[name] = x[..., : x.shape[-1] // 2].float().cpu()

    def _logits(self, head, args, out):
        self.seen["logits"] = out.reshape(-1, out.shape[-1])[-1].float().cpu()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if (
            getattr(function, "__name__", "") == "scaled_dot_product_attention"
            and self.layer in self.layers
        ):
            self._attention(out, *args, **(kwargs or {}))
        return out

    def _attention(self, out, q, k, v, **options):
        weights, error = attention_weights(out, q, k, v, **options)
        T = len(self.seen["fed"])
        weights = weights.reshape(-1, T, weights.shape[-1])  # (H,T,S)
        self.seen["attention"][self.layer] = weights.cpu()
        self.seen["error"] = max(self.seen["error"], error)
        # A copy.
        rows = torch.stack((k[0], v[0])).float().cpu()  # (2,Hk,S,D)
        self.read[self.layer] = rows.permute(2, 0, 1, 3)  # (S,2,Hk,D)


def attention_weights(
    out, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """softmax(q kᵀ · scale) of the first row of a batch, and how far its product with v is from the kernel's `out`.

    q (B,h,r,D), k and v (B,Hk,S,D) → (h,r,S). decode_attention groups heads, h = Hk and r = G: (Hk,G,S) is (H,1,S).
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
def angle_positions(model, step: Step) -> list[int]:
    """The positions whose angles the recorded cos and sin (T,D/2) are: the nearest of 0 … 2·(start_pos + T)."""
    candidates = torch.arange(2 * (step.start_pos + len(step.fed)))
    half = step.cos.shape[-1]
    cos, sin = rope_angles(model.config, candidates, torch.float32)  # (N,D) ×2
    known = torch.cat((cos[:, :half], sin[:, :half]), 1)  # (N,D)
    near = torch.cdist(torch.cat((step.cos, step.sin), 1), known)  # (T,N)
    return near.argmin(1).tolist()


@dataclass
class Costs:
    """Medians in seconds, one for each step of a run."""

    repeat: int
    cached: list[float]
    uncached: list[float]  # `score` of everything so far; empty when it was not measured
    difference: float = 0.0  # max |Δ logits| between the two


def measure(model, run: Run, repeat=3, uncached=True) -> Costs:
    """Time the steps of a run with a cache, and recomputing everything at every step without one.

    Nothing is attached to the model here. A first pass of each kind warms up and is thrown away.
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
        int(logits.argmax())  # a GPU is done by then
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
