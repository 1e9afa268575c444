"""The quality that a weight format or a cache costs, beside the bytes that it saves."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nanokv.cache import KVCache, make_cache
from nanokv.cache.options import draws
from nanokv.checkpoint import Model
from nanokv.costs.formulas import kv_bytes_per_token
from nanokv.inference import score
from nanokv.lab.bench.recall import asked_with_the_facts, recalled
from nanokv.lab.bench.runners import Ours
from nanokv.lab.bench.talks import Talks
from nanokv.lab.study.quality import log_likelihood, log_likelihood_through
from nanokv.text.tokenizer import Tokenizer

LONGEST_TALK = 1024  # tokens
SEEDS = (0, 1, 2)  # of a cache that draws a rotation, unless its name says which


@dataclass(frozen=True)
class Text:
    """What the models read: ids (1,T); and if `facts` is not 0, that many facts for recall.py, or
    `talks`."""

    ids: Tensor
    tokenizer: Tokenizer
    facts: int = 0
    talks: Talks | None = None


def changes(plain: Model, models: dict, text: Text, caches: dict) -> Iterator[dict]:
    """One row per model of `models` (name → model) and cache of `caches` (label → (name, options)).
    Without caches each model reads the text in one pass.

    bytes: of the weights that a decode step reads
    and the fields of `figures`. For a cache that draws: those of the seed with the median
    perplexity, and `perplexities` of all seeds.
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
    and the fields of `recall` if there are facts; these with a cache only
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
            cost |= recall_of_talks(model, text, text.talks, kind)
        elif text.facts:
            cost |= recall(model, text, kind)
    change = found - truth
    return {
        **cost,
        "mean_change": float(change.abs().mean()),
        "bias": float(change.mean()),
        "perplexity": math.exp(-float(found.mean())),
    }


def recall(model: Model, text: Text, kind: tuple[str, dict]) -> dict:
    """recalled: of the facts, read in small parts; first, second: of the facts, by a question that
    was read with them, and by the next one
    recall_share: of the bytes that an exact cache takes for the facts
    """
    cache = new_cache(model, text, kind)
    found: dict = {"recalled": recalled(model, text.tokenizer, cache, text.facts)}
    found["recall_share"] = share(model, cache)
    new = partial(new_cache, model, text, kind)
    found["first"], found["second"] = asked_with_the_facts(model, text.tokenizer, new, text.facts)
    return found


def recall_of_talks(model: Model, text: Text, talks: Talks, kind: tuple[str, dict]) -> dict:
    """The fields of `recall` but for the first: of conversations."""
    first, second, caches = talks.asked(model, partial(new_cache, model, text, kind))
    shares = [share(model, cache) for cache in caches]
    return {"recall_share": sum(shares) / len(shares), "first": first, "second": second}


def share(model: Model, cache: KVCache) -> float:
    """Bytes of the cache, by those of an exact one with as many tokens."""
    itemsize = model.embed_tokens.weight.element_size()
    return cache.nbytes / (cache.length * kv_bytes_per_token(model.config, itemsize))


def new_cache(model: Model, text: Text, kind: tuple[str, dict]) -> KVCache:
    """An empty cache for the text, or for the facts."""
    name, options = kind
    capacity = max(text.ids.shape[1], 64 * text.facts, LONGEST_TALK * bool(text.talks))
    return make_cache(name, model.config, capacity=capacity, device=text.ids.device, **options)
