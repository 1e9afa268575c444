"""The quality that a weight format or a cache costs, beside the bytes that it saves."""

import math
from collections.abc import Iterator

from torch import Tensor

from nanokv.cache import make_cache
from nanokv.checkpoint import Model
from nanokv.inference import score
from nanokv.lab.bench.runners import Ours
from nanokv.lab.study.quality import log_likelihood, log_likelihood_through


def changes(plain: Model, models: dict, ids: Tensor, caches: dict) -> Iterator[dict]:
    """One row per model of `models` (name → model) and cache of `caches` (label → (name, options)),
    over the text ids (1,T). Without caches each model reads the text in one pass.

    mean_change, bias: change of log p of each token against `plain` in one pass, in nats; the mean
        of its absolute value, and its mean
    perplexity
    bytes: of the weights that a decode step reads
    kv_bytes_per_token: of the cache after the whole text
    """
    truth = log_likelihood(score(plain, ids), ids)  # (1,T−1)
    for name, model in models.items():
        read = Ours(model, name, "dict", {}, 1, plain.embed_tokens.weight.dtype).weight_bytes
        for label, kind in (caches or {None: None}).items():
            found, held = likelihood(model, ids, kind)
            change = found - truth
            yield {
                "weights": name,
                "cache": label,
                "bytes": read,
                "kv_bytes_per_token": held,
                "mean_change": float(change.abs().mean()),
                "bias": float(change.mean()),
                "perplexity": math.exp(-float(found.mean())),
            }


def likelihood(
    model: Model, ids: Tensor, kind: tuple[str, dict] | None
) -> tuple[Tensor, float | None]:
    """(log p of each token after the first (1,T−1), bytes of the cache per token or None without a
    cache)."""
    if kind is None:
        return log_likelihood(score(model, ids), ids), None
    name, options = kind
    cache = make_cache(name, model.config, capacity=ids.shape[1], device=ids.device, **options)
    found = log_likelihood_through(model, ids, cache)
    return found, cache.nbytes / (ids.shape[1] - 1)
