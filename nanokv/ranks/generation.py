"""Answers on several ranks: rank 0 decides for all ranks when an answer begins and ends.

    rank 0       make = Leading(ranks, Generation); make(model, ids, cache, params, …)
    other ranks  Following(ranks, model, cache, Generation).answer(job)

Every rank runs the same Generation and draws the same tokens from the same logits with the same
seed; the output of the other ranks is dropped. Only rank 0 handles stop strings, Ctrl-C, and
clients that are slow or gone. Before every forward rank 0 sends "go" or "stop", and the other
ranks wait for this message without a timeout.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nanokv.cache import KVCache
from nanokv.cache.saving import fingerprint
from nanokv.checkpoint import Model, PretrainedModel
from nanokv.decoding.draw import SamplingParams
from nanokv.decoding.generation import Generation, never
from nanokv.errors import CacheError, NanoKVError, ParallelError, UnsupportedError
from nanokv.parallel.group import Ranks

GO = ["go"]
STOP = ["stop"]

USES: dict[str, Callable[[Any], object]] = {"iterate": list, "find": lambda search: search.find()}


class Leading:
    """Makes the Generations of rank 0 with `make`, and has the other ranks run the same ones.

    `how`: how the caller runs a Generation, a key of USES: "iterate", or "find" for a
    BeamGeneration.
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
        """CacheError if the cache holds tokens on rank 0 only."""
        if cache is not self.cache and cache.length:
            raise CacheError(
                f"this cache of {cache.length:,} tokens is on rank 0 only, "
                "no other rank has its part",
                "start with an empty cache: the prompt is prefilled again",
            )

    def save(
        self, cache: KVCache, path: str | os.PathLike, ids: list[int], model_fingerprint: str
    ) -> None:
        """KVCache.save on every rank, each to a separate file (`part_path`).

        CacheError naming a rank that failed.
        """
        self.check_shared(cache)
        self.ranks.hear(["save", {"path": os.path.abspath(path), "keep": cache.length, "ids": ids}])
        refuse(self.ranks.reports(saved(self.ranks, cache, path, ids, model_fingerprint)))

    def load(self, cache: KVCache, path: str | os.PathLike) -> None:
        """After rank 0 has loaded `cache` from `path`: load the parts of the other ranks.

        CacheError if a rank fails; then no other rank keeps what it has loaded.
        """
        if len(cache.tokens) != cache.length:
            raise CacheError(
                f"{path} holds {cache.length:,} tokens, and ids of {len(cache.tokens):,}"
            )
        self.ranks.hear(["load", {"path": os.path.abspath(path), "ids": cache.tokens}])
        refuse(self.ranks.reports(""))
        self.cache = cache


def part_path(path: str | os.PathLike, rank: int) -> Path:
    """The file of a rank's part: `path` for rank 0, PATH.rankN beside it for the others."""
    if rank == 0:
        return Path(path)
    return Path(f"{path}.rank{rank}")


def saved(
    ranks: Ranks, cache: KVCache, path: str | os.PathLike, ids: list[int], model_fingerprint: str
) -> str:
    """Save this rank's part → "", or the error text."""
    try:
        cache.save(part_path(path, ranks.rank), ids, model_fingerprint, (ranks.rank, ranks.size))
    except (NanoKVError, OSError) as error:
        return str(error)
    return ""


def refuse(reports: list[str]) -> None:
    """CacheError with the first report that is not empty."""
    for rank, report in enumerate(reports):
        if report:
            raise CacheError(f"rank {rank} of {len(reports)}: {report}")


class Word:
    """should_stop of a Generation of rank 0: calls the caller's, and sends the result to all ranks.

    It has no `raising`, which would interrupt a forward between two operators: the other ranks
    would wait in theirs.
    """

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
    """The Generations of another rank, over one cache.

    `unheard`: the message with which rank 0 ended an answer, if it was the start of another job.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: PretrainedModel,
        cache: KVCache,
        make: Callable[..., Generation],
    ):
        self.ranks = ranks
        self.model = model
        self.cache = cache
        self.make = make
        self.unheard: list | None = None

    def answer(self, job: dict) -> None:
        """Run one answer as `job` describes.

        An error that ends the answer on rank 0, such as a full cache, ends it here at the same
        place.
        """
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
        """Save this rank's part of the cache, truncated to the length on rank 0."""
        self.go_back(job["keep"])
        mark = fingerprint(self.model)
        self.ranks.reports(saved(self.ranks, self.cache, job["path"], job["ids"], mark))

    def load(self, job: dict) -> None:
        """Replace this rank's cache by its part of a saved cache, if all ranks can load theirs."""
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
        """Truncate the cache to its length on rank 0. ParallelError if the lengths then differ."""
        try:
            self.cache.truncate(keep)
        except UnsupportedError:  # a sliding window has moved on; rank 0 has emptied its cache
            self.cache.truncate(0)
        if self.cache.length != keep:
            own = self.cache.length
            raise ParallelError(
                f"the cache of rank {self.ranks.rank} holds {own:,} tokens, "
                f"that of rank 0 {keep:,}",
                "start all ranks again",
            )

    def should_stop(self) -> bool:
        """Receive the message of rank 0 for this forward → whether to stop."""
        word = self.ranks.hear()
        if word not in (GO, STOP):
            self.unheard = word
        return word != GO
