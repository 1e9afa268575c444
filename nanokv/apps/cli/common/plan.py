"""A plan of what will be loaded and how, and the result: a plan with its model.

loading.py makes both. speed.py and speculation.py decide parts of a plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanokv import __version__
from nanokv.cache.options import kind_text
from nanokv.config import Config
from nanokv.costs import parameters
from nanokv.costs.memory import SHORT
from nanokv.parallel.group import ALONE, Ranks

if TYPE_CHECKING:
    import torch

    from nanokv.cache.base import KVCache
    from nanokv.decoding.generation import Generation
    from nanokv.engine import Engine
    from nanokv.model import Transformer

    MakeGeneration = Callable[..., Generation]
    Made = TypeVar("Made", bound=Generation)


@dataclass(frozen=True)
class Choice:
    """The code that runs the model. `text` is shown in the banner."""

    fast: bool
    text: str = ""  # "" for commands without these flags
    requested: bool = False  # with --fast or --quantize
    quantize: str | None = None
    as_stored: bool = False  # the weights stay in the blocks of a GGUF file
    blocks: bool = False  # those of a draft model stay too, if it is a GGUF file
    invariant: bool = False  # rows do not depend on other rows


@dataclass(frozen=True)
class Plan:
    """What will be loaded and how; made before torch is imported."""

    source: str  # as typed after -m
    name: str  # for display
    folder: Path
    config: Config
    dtype_name: str  # a key of SHORT
    threads: int
    device: str
    context: int
    cache_name: str
    cache_options: dict
    fields: dict = field(default_factory=dict, kw_only=True)  # the content of config.json
    code: Choice = field(default=Choice(False), kw_only=True)
    # Bytes of the weights if they stay in the blocks of a GGUF file; else None.
    stored: int | None = field(default=None, kw_only=True)
    # With several ranks, `config` describes one rank's part once the model is loaded.
    ranks: Ranks = field(default=ALONE, kw_only=True)

    def banner(self) -> list[str]:
        """The parts of the banner.

        nanokv 0.2.0 · tiny 3.1 M fp32 · 2 threads · cache dict · context 2,048 · fast kernels
        """
        where = self.device
        if self.device == "cpu":
            where = threads_text(self.threads)
        shown = {key: value for key, value in self.cache_options.items() if key == "index"}
        parts = [
            f"nanokv {__version__}",
            f"{self.name} {count_text(parameters(self.config))} {SHORT[self.dtype_name]}",
            where,
            f"cache {kind_text(self.cache_name, shown)}",
            f"context {self.context:,}",
        ]
        if self.code.text:
            parts.append(self.code.text)
        return parts


@dataclass(frozen=True)
class Loaded(Plan):
    """A plan with the loaded model and tokenizer."""

    model: "Transformer"
    tokenizer: Any  # a Tokenizer; None for random weights, whose commands use none
    dtype: "torch.dtype"
    load_s: float
    # The plain model, whose weights are views of the fused ones in `model`. None if `model` is
    # plain or quantized.
    plain: "Transformer | None" = None

    def make_cache(self) -> "KVCache":
        """An empty cache of the kind of --cache, with room for the whole context."""
        return make_cache(self, self.dtype)

    def make_engine(
        self,
        pages: int,
        page: int,
        step_tokens: int | None,
        running: int,
        paced: bool,
        prefix: str,
    ) -> "Engine":
        """An Engine for this model. `paced`: prompts leave room for the streams beside them."""
        if self.ranks.size > 1:
            from nanokv.ranks.engine import LeadingEngine

            return LeadingEngine(
                self.ranks, self.model, pages, page, step_tokens, running, paced, prefix
            )
        from nanokv.engine import Engine

        return Engine(self.model, pages, page, step_tokens, running, paced=paced, prefix=prefix)

    def leading(self, make: "Callable[..., Made]", how: str = "iterate") -> "Callable[..., Made]":
        """`make`, a function that makes Generations; on rank 0 of several, one that leads the others.

        `how`: the way in which the Generations are used; see Leading.
        """
        if self.ranks.size == 1 or self.ranks.rank:
            return make
        from nanokv.ranks.generation import Leading

        return Leading(self.ranks, make, how)  # type: ignore[return-value]  # it returns make's

    def fingerprints(self) -> list[str]:
        """Fingerprints of these weights: files get the first, and any of them is accepted in files.

        Kernels give the same answers as the plain model, so either can continue work that the other
        began. Version 0.1.0 wrote the fingerprint of the fused weights with --fast.
        """
        from nanokv.cache.saving import fingerprint

        return [fingerprint(model) for model in (self.plain, self.model) if model is not None]


def make_cache(plan: Plan, dtype: "torch.dtype") -> "KVCache":
    """An empty cache of the plan's kind, with room for the whole context."""
    from nanokv import cache

    return cache.make_cache(
        plan.cache_name,
        plan.config,
        batch_size=1,
        capacity=plan.context,
        dtype=dtype,
        device=plan.device,
        **plan.cache_options,
    )


def threads_text(count: int) -> str:
    """1 thread, 2 threads."""
    return "1 thread" if count == 1 else f"{count} threads"


def count_text(count: int) -> str:
    """3.1 M, 596 M, 1.7 B."""
    value = count / 1e6
    unit = "M"
    if count >= 999.5e6:
        value = count / 1e9
        unit = "B"
    if value < 99.95:
        return f"{value:.1f} {unit}"
    return f"{value:.0f} {unit}"
