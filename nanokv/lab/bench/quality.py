"""The quality that a weight format or a cache costs, beside the bytes that it saves."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nanokv.cache import KVCache, make_cache
from nanokv.cache.options import draws
from nanokv.checkpoint import Model
from nanokv.costs.formulas import kv_bytes
from nanokv.inference import score
from nanokv.lab.bench.recall import Talk, recalled
from nanokv.lab.bench.runners import Ours
from nanokv.lab.study.quality import log_likelihood, log_likelihood_through

LONGEST_TALK = 512  # tokens
SEEDS = (0, 1, 2)  # of a cache that draws a rotation, unless its name says which


@dataclass(frozen=True)
class Text:
    """What the models read: ids (1,T), and talks for recall.py."""

    ids: Tensor
    talks: Sequence[Talk] = ()


def changes(plain: Model, models: dict, text: Text, caches: dict) -> Iterator[dict]:
    """One row per model of `models` (name → model) and cache of `caches` (label → (name, options)).
    Without caches each model reads the text in one pass.

    bytes: of the weights that a decode step reads
    and the fields of `figures`. For a cache that draws: those of the seed with the median
    perplexity, and of all seeds `perplexities` and `known`, facts at both questions, sorted.
    """
    truth = log_likelihood(score(plain, text.ids), text.ids)  # (1,T−1)
    for name, model in models.items():
        read = Ours(model, name, "dict", {}, 1, plain.embed_tokens.weight.dtype).weight_bytes
        for label, kind in (caches or {None: None}).items():
            found = [figures(model, text, truth, one) for one in seeded(kind)]
            found.sort(key=lambda row: row["perplexity"])
            row = {"weights": name, "cache": label, "bytes": read} | found[len(found) // 2]
            if len(found) > 1:
                row["perplexities"] = [each["perplexity"] for each in found]
            if len(found) > 1 and text.talks:
                row["known"] = sorted(each["first"] + each["second"] for each in found)
            yield row


def seeded(kind: tuple[str, dict] | None) -> list[tuple[str, dict] | None]:
    """The cache once, or once per seed of SEEDS if it draws and `kind` names no seed."""
    if kind is None or "seed" in kind[1] or not draws(*kind):
        return [kind]
    name, options = kind
    return [(name, options | {"seed": seed}) for seed in SEEDS]


def figures(model: Model, text: Text, truth: Tensor, kind: tuple[str, dict] | None) -> dict:
    """The figures of one model over one cache, or without a cache.

    mean_change, bias: change of log p of each token against `truth`, in nats; the mean of its
        absolute value, and its mean
    perplexity
    kv_bytes_per_token: of the cache after the whole text
    cpu_ms_per_token: processor time of all threads while the text was read through the cache
    share: of the bytes that an exact cache takes for the text
    and the fields of `recall` if there are talks; these with a cache only
    """
    began = time.process_time()
    if kind is None:
        found = log_likelihood(score(model, text.ids), text.ids)
        cost: dict = {"kv_bytes_per_token": None}
    else:
        cache = new_cache(model, text, kind)
        found = log_likelihood_through(model, text.ids, cache)
        fed = text.ids.shape[1] - 1
        spent = time.process_time() - began
        cost = {"kv_bytes_per_token": cache.nbytes / fed, "cpu_ms_per_token": 1e3 * spent / fed}
        cost["share"] = share(model, cache)
        if text.talks:
            cost |= recall(model, text, kind)
    change = found - truth
    return {
        **cost,
        "mean_change": float(change.abs().mean()),
        "bias": float(change.mean()),
        "perplexity": math.exp(-float(found.mean())),
    }


def recall(model: Model, text: Text, kind: tuple[str, dict]) -> dict:
    """first, second: talks in which the model knows the fact at that question
    recall_share: of the bytes that an exact cache takes for a talk, the mean
    """
    first, second, caches = recalled(model, text.talks, partial(new_cache, model, text, kind))
    shares = [share(model, cache) for cache in caches]
    return {"recall_share": sum(shares) / len(shares), "first": first, "second": second}


def share(model: Model, cache: KVCache) -> float:
    """Bytes of the cache, by those of an exact one with as many tokens."""
    itemsize = model.embed_tokens.weight.element_size()
    return cache.nbytes / kv_bytes(model.config, cache.length, 1, itemsize)


def new_cache(model: Model, text: Text, kind: tuple[str, dict]) -> KVCache:
    """An empty cache for the text, or for a talk."""
    name, options = kind
    capacity = max(text.ids.shape[1], LONGEST_TALK * bool(text.talks))
    return make_cache(name, model.config, capacity=capacity, device=text.ids.device, **options)
