"""Answers of several ranks: rank 0 decides, for itself and for the others, when an answer begins and when it is over.

    rank 0      make = Leading(ranks, Generation); make(model, ids, cache, params, …)    a Generation like any other
    the others  Following(ranks, model, cache, Generation).answer(job)                   the same one, which nobody sees

Both draw the same tokens from the same logits with the same seed. Only rank 0 knows of stop strings, of a person who
presses Ctrl-C, of a reader that is slow or gone: before every forward it says "go" or "stop", and the others wait for
that word as long as it takes.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanokv.cache import KVCache
from nanokv.cache.saving import fingerprint
from nanokv.checkpoint import Model
from nanokv.decoding.draw import SamplingParams
from nanokv.decoding.generation import Generation, never
from nanokv.errors import CacheError, NanoKVError, ParallelError, UnsupportedError
from nanokv.parallel.group import Ranks

GO = ["go"]
STOP = ["stop"]

USES: dict[str, Callable[[Any], object]] = {"iterate": list, "find": lambda search: search.find()}


class Leading:
    """What makes the Generations of rank 0: `make` makes each, and the others are told when it begins.

    `how` the caller uses them: "iterate", or, of a BeamGeneration, "find".
    """

    def __init__(self, ranks: Ranks, make: Callable[..., Generation], how: str = "iterate"):
        self.ranks = ranks
        self.make = make
        self.how = how
        self.cache: KVCache | None = None

    def __call__(
        self,
        model: Model,
        ids: Any,
        cache: KVCache,
        params: SamplingParams,
        max_new_tokens: int,
        *,
        should_stop: Callable[[], bool] = never,
        history: list[int] | None = None,
    ) -> Generation:
        self.check_shared(cache)
        word = Word(self.ranks, should_stop)
        generation = self.make(
            model, ids, cache, params, max_new_tokens, should_stop=word, history=history
        )
        self.cache = cache
        word.job = {
            "ids": generation.ids,
            "keep": cache.length,
            "params": asdict(params) | {"seed": generation.seed},
            "max_new_tokens": max_new_tokens,
            "history": history,
            "how": self.how,
        }
        return generation

    def check_shared(self, cache: KVCache) -> None:
        """CacheError if only rank 0 has tokens in it."""
        if cache is not self.cache and cache.length:
            raise CacheError(
                f"this cache of {cache.length:,} tokens is on rank 0 only, no other rank has its part",
                "start with an empty cache: the prompt is prefilled again",
            )

    def save(
        self, cache: KVCache, path: str | os.PathLike, ids: list[int], model_fingerprint: str
    ) -> None:
        """KVCache.save on every rank, each into a file of its own (`part_path`). CacheError names a rank that could
        not."""
        self.check_shared(cache)
        self.ranks.hear(["save", {"path": os.path.abspath(path), "keep": cache.length, "ids": ids}])
        refuse(self.ranks.reports(saved(self.ranks, cache, path, ids, model_fingerprint)))

    def load(self, cache: KVCache, path: str | os.PathLike) -> None:
        """`cache` was loaded from `path` here: the other ranks take over theirs. CacheError if one of them cannot, then
        none has."""
        if len(cache.tokens) != cache.length:
            raise CacheError(
                f"{path} holds {cache.length:,} tokens, and ids of {len(cache.tokens):,}"
            )
        self.ranks.hear(["load", {"path": os.path.abspath(path), "ids": cache.tokens}])
        refuse(self.ranks.reports(""))
        self.cache = cache


def part_path(path: str | os.PathLike, rank: int) -> Path:
    """Where a rank saves its part: rank 0 at `path`, the others beside it."""
    if rank == 0:
        return Path(path)
    return Path(f"{path}.rank{rank}")


def saved(
    ranks: Ranks, cache: KVCache, path: str | os.PathLike, ids: list[int], model_fingerprint: str
) -> str:
    """Save this rank's part → "", or why that did not go."""
    try:
        cache.save(part_path(path, ranks.rank), ids, model_fingerprint, (ranks.rank, ranks.size))
    except (NanoKVError, OSError) as error:
        return str(error)
    return ""


def refuse(reports: list[str]) -> None:
    """CacheError with the first report that is none of success."""
    for rank, report in enumerate(reports):
        if report:
            raise CacheError(f"rank {rank} of {len(reports)}: {report}")


class Word:
    """should_stop of a Generation of rank 0: asks the caller's, and tells the others. It has no `raising`: a forward
    that was left between two operators would leave the other ranks in it."""

    def __init__(self, ranks: Ranks, should_stop: Callable[[], bool]):
        self.ranks = ranks
        self.should_stop = should_stop
        self.job: dict | None = None

    def __call__(self) -> bool:
        job = self.job
        if job is not None:
            self.job = None
            self.ranks.hear(["answer", job])
        stop = bool(self.should_stop())
        self.ranks.hear(STOP if stop else GO)
        return stop


class Following:
    """The Generations of another rank, over one cache. `unheard`: what rank 0 said next, when it ended an answer by
    going on to something else."""

    def __init__(self, ranks: Ranks, model: Model, cache: KVCache, make: Callable[..., Generation]):
        self.ranks = ranks
        self.model = model
        self.cache = cache
        self.make = make
        self.unheard: list | None = None

    def answer(self, job: dict) -> None:
        """One answer, as `job` says. What stops rank 0 (a full cache) stops this rank at the same place."""
        self.go_back(job["keep"])
        try:
            generation = self.make(
                self.model,
                torch.tensor([job["ids"]]),
                self.cache,
                SamplingParams(**job["params"]),
                job["max_new_tokens"],
                should_stop=self.should_stop,
                history=job["history"],
            )
            USES[job["how"]](generation)
        except ParallelError:
            raise
        except NanoKVError:
            pass

    def save(self, job: dict) -> None:
        """This rank's part of the cache, as it is on rank 0."""
        self.go_back(job["keep"])
        mark = fingerprint(self.model)
        self.ranks.reports(saved(self.ranks, self.cache, job["path"], job["ids"], mark))

    def load(self, job: dict) -> None:
        """This rank's part of a saved cache takes the place of its cache, if every rank has found its own."""
        cache = self.cache
        path = part_path(job["path"], self.ranks.rank)
        said = ""
        try:
            mark = fingerprint(self.model)
            own = self.ranks.rank, self.ranks.size
            device = self.model.embed_tokens.weight.device
            cache = type(self.cache).load(path, self.model.config, mark, device, own)
            if cache.tokens != job["ids"]:
                said = f"{path} holds another text than the file of rank 0"
        except (NanoKVError, OSError) as error:
            said = str(error)
        if not any(self.ranks.reports(said)):
            self.cache = cache

    def go_back(self, keep: int) -> None:
        """The cache as it is on rank 0."""
        try:
            self.cache.truncate(keep)
        except UnsupportedError:  # a window that has moved on: rank 0 has emptied its own
            self.cache.truncate(0)
        if self.cache.length != keep:
            own = self.cache.length
            raise ParallelError(
                f"the cache of rank {self.ranks.rank} holds {own:,} tokens, that of rank 0 {keep:,}",
                "start all ranks again",
            )

    def should_stop(self) -> bool:
        """Rank 0's word for this forward."""
        word = self.ranks.hear()
        if word not in (GO, STOP):
            self.unheard = word
        return word != GO
