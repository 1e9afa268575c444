"""Measure what a quantized cache costs in quality: the error of keys and values, and the change of
the log-likelihood.

Every key and value is quantized and dequantized before attention reads it, in one pass over the
text. This is the worst case, because the real cache keeps the newest tokens exact. `change` is
the difference in log-likelihood of each token of the text, in nats: its mean shows whether the
model got worse, its mean absolute value how far the predictions moved. Published for comparison:
q8_0 changes perplexity by 0.005 (llama.cpp PR 7412), K8V4 changes it by 0.005 nats (mlx-lm PR
1550).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanokv.attention import Causal
from nanokv.cache import KVCache
from nanokv.cache.base import NoCache
from nanokv.cache.codes import dequantize, hadamard, quantize
from nanokv.checkpoint import Model
from nanokv.inference import score, verify_draft


@dataclass(frozen=True)
class Scheme:
    """How to quantize. `k_scale`: keys have one scale per "channel" (of `group` tokens) or per
    "token"; values have one scale per token."""

    k_bits: int = 8
    v_bits: int = 8
    k_scale: str = "channel"
    rotate: bool = False
    group: int = 32
    # To study outliers: channels in which keys are made `factor` times larger before quantizing,
    # and scaled back afterwards.
    outliers: tuple[int, ...] = ()
    factor: float = 20.0

    def keys(self, k: Tensor) -> Tensor:
        """(B,Hk,T,D) → the same after quantizing and dequantizing."""
        D = k.shape[-1]
        planted = torch.ones(D, device=k.device)
        planted[list(self.outliers)] = self.factor
        turn = torch.eye(D, device=k.device)
        if self.rotate:
            turn = hadamard(D, k.device)
        x = (k.float() * planted) @ turn
        if self.k_scale == "channel":
            blocks = x.split(self.group, dim=2)  # the last one may be shorter
            x = torch.cat([dequantize(*quantize(block, self.k_bits, dim=2)) for block in blocks], 2)
        else:
            x = dequantize(*quantize(x, self.k_bits, dim=3))
        return ((x @ turn) / planted).to(k.dtype)

    def values(self, v: Tensor) -> Tensor:
        """(B,Hk,T,D) → the same after quantizing and dequantizing."""
        return dequantize(*quantize(v, self.v_bits, dim=3)).to(v.dtype)


@dataclass(frozen=True)
class Quality:
    """Relative root mean square errors, one per layer, and the change of each token's
    log-likelihood."""

    keys: tuple[float, ...]
    values: tuple[float, ...]
    change: torch.Tensor  # (B,T−1) nats

    @property
    def mean(self) -> float:
        """In nats per token; below zero, the text became less likely."""
        return self.change.mean().item()

    @property
    def mean_abs(self) -> float:
        return self.change.abs().mean().item()


class _Rounding(NoCache):
    """Stores no tokens: `append` returns what a quantized cache would return, and records the
    error."""

    def __init__(self, num_layers: int, scheme: Scheme) -> None:
        super().__init__(num_layers)
        self.errors: list[tuple[float, float]] = []
        for layer in self:
            layer.append = lambda k, v: self.rounded(k, v, scheme)  # type: ignore[method-assign]

    def rounded(self, k: Tensor, v: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
        keys = scheme.keys(k)
        values = scheme.values(v)
        self.errors.append((relative_error(keys, k), relative_error(values, v)))
        return keys, values


def measure(model: Model, ids: Tensor, scheme: Scheme) -> Quality:
    """The quality of a scheme over ids (B,T), a text that the model was not trained on."""
    cache = _Rounding(model.config.num_kv_layers, scheme)
    with torch.inference_mode():
        hidden = model(ids, cache, 0, Causal())
        change = log_likelihood(model.lm_head(hidden), ids) - log_likelihood(score(model, ids), ids)
    keys, values = zip(*cache.errors, strict=True)
    return Quality(keys, values, change)


def measure_cache(model: Model, ids: Tensor, cache: KVCache, chunk: int = 8) -> Tensor:
    """(B,T−1) nats: the change of log-likelihood for a real cache, fed `chunk` tokens at a time."""
    return log_likelihood_through(model, ids, cache, chunk) - log_likelihood(score(model, ids), ids)


def log_likelihood_through(model: Model, ids: Tensor, cache: KVCache, chunk: int = 8) -> Tensor:
    """(B,T) → (B,T−1): log p of each token after the first, computed through an empty cache `chunk`
    tokens at a time.

    With small chunks, most of the keys and values that attention reads come from the cache. Only
    the logits of one chunk are in memory at a time.
    """
    fed = ids[:, :-1]  # the last token is predicted, never fed
    parts = []
    for start in range(0, fed.shape[1], chunk):
        part = fed[:, start : start + chunk]  # (B,t)
        logits = verify_draft(model, part, cache, start)  # (B,t,V)
        targets = ids[:, start + 1 : start + 1 + part.shape[1], None]  # (B,t,1)
        parts.append(logits.float().log_softmax(-1).gather(2, targets)[..., 0])
    return torch.cat(parts, 1)


def log_likelihood(logits: Tensor, ids: Tensor) -> Tensor:
    """(B,T,V) and (B,T) → (B,T−1): log p of each token after the first."""
    return logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def relative_error(new: Tensor, old: Tensor) -> float:
    """Root mean square of the difference, divided by that of the original."""
    return ((new.float() - old.float()).pow(2).mean() / old.float().pow(2).mean()).sqrt().item()
