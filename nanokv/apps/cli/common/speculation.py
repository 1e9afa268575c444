"""`--speculate`: makes the Draft that the flag names, and the text of the status line.

options.py parses the flag. This file loads draft models and checks numbers against the model. At
temperature 0 the answer is the same as without the flag. When sampling, the same seed gives
another draw from the same distribution.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import speed
from nanokv.apps.cli.common.options import OutputOptions, SpeedOptions
from nanokv.apps.cli.common.plan import Loaded, Plan
from nanokv.apps.cli.common.terminal import notice, sanitize_line
from nanokv.cache.options import kind_text
from nanokv.config import Config
from nanokv.costs import ITEMSIZE, kv_bytes, weight_bytes
from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from nanokv.decoding.generation import Generation
    from nanokv.model import Transformer

DROPPING = ("sliding", "evicting")  # kinds of cache that take nothing back once they are full


def generation_type(
    how: tuple[str, int | str] | None, loaded: Loaded
) -> "Callable[..., Generation]":
    """The callable that makes a Generation: the class, or Speculation with the wanted draft."""
    from nanokv.decoding import speculative
    from nanokv.decoding.generation import Generation

    if how is None:
        return loaded.leading(Generation)
    check_cache(loaded)
    kind, value = how
    draft: speculative.Draft
    if kind == "ngram":
        draft = speculative.PromptLookup(int(value))
    elif kind == "early-exit":
        draft = speculative.EarlyExit(loaded.model, int(value))
    else:
        draft = speculative.DraftModel(load_draft(str(value), loaded))
    return loaded.leading(partial(speculative.Speculation, draft=draft))


def check_cache(plan: Plan) -> None:
    """NanoKVError for a cache that takes no token back: no guess could be checked."""
    if max_rollback(plan) == 0:
        raise NanoKVError(
            f"--speculate has no effect with --cache {kind_text(plan.cache_name, plan.cache_options)}: "
            "this cache cannot take back a wrong guess",
            "leave --speculate out, or take --cache growing",
        )


def announce_end(how: tuple[str, int | str] | None, plan: Plan, output: OutputOptions) -> None:
    """A notice if guesses end within the context, because the cache drops tokens from then on."""
    kind = plan.cache_options.get("of", plan.cache_name)
    if how is None or kind not in DROPPING:
        return
    most = max_rollback(plan)
    if most is None or most >= plan.context:
        return
    notice(
        f"--speculate guesses only while the cache holds fewer than {most:,} tokens · "
        f"{kind_text(plan.cache_name, plan.cache_options)} then drops some, and takes no guess back",
        output,
    )


def max_rollback(plan: Plan) -> int | None:
    """The most tokens that the plan's cache can take back while it is empty; None: any number."""
    from nanokv.cache import make_cache

    cache = make_cache(plan.cache_name, plan.config, capacity=64, **plan.cache_options)
    return cache.sizes.max_rollback


def memory(wanted: SpeedOptions, plan: Plan) -> int:
    """Bytes of speculation beside the model: a draft model's weights, and the draft's cache."""
    if wanted.speculate is None:
        return 0
    kind, value = wanted.speculate
    itemsize = ITEMSIZE[plan.dtype_name]
    if kind == "draft":
        import weights_loader

        folder = weights_loader.resolve(str(value))
        config = Config.from_folder(folder)
        weights = weight_bytes(config, itemsize)
        matrices = speed.stored_matrices(replace(plan, folder=folder, config=config), wanted)
        if matrices:
            weights = speed.stored_bytes(matrices, config, itemsize)
    elif kind == "early-exit":
        layers = min(int(value), plan.config.num_hidden_layers)
        config = replace(plan.config, num_hidden_layers=layers)
        weights = 0
    else:  # ngram needs neither weights nor a cache
        return 0
    tokens = min(plan.context, config.max_position_embeddings)
    return weights + kv_bytes(config, tokens, 1, itemsize)


def load_draft(source: str, loaded: Loaded) -> "Transformer":
    """Load the draft model, as stored if it is a GGUF file with blocks and the target has kernels.

    Its vocabulary size and special tokens must equal the target's.
    """
    import weights_loader
    from nanokv.fast import optimize, stored
    from nanokv.loading import load

    read = None
    if loaded.code.blocks and speed.blocks_in(weights_loader.resolve(source)):
        read = stored.read
    model, tokenizer = load(source, dtype=loaded.dtype, device=loaded.device, read=read)
    target = loaded.tokenizer
    if (
        tokenizer.vocab_size != target.vocab_size
        or tokenizer.special_tokens != target.special_tokens
    ):
        raise NanoKVError(
            f"--speculate draft:{sanitize_line(source)} has another vocabulary "
            f"({tokenizer.vocab_size:,} tokens) than the model ({target.vocab_size:,} tokens)",
            "a smaller checkpoint of the same family, or --speculate ngram",
        )
    if loaded.code.fast and read is None and not model.config.experts:
        return optimize(model)
    return model


def status(summary: dict | None) -> list[str]:
    """[`31 of 40 guesses right (78%), 31 forwards saved`], or [] without speculation."""
    if not summary:
        return []
    right = f"{summary['accepted']:,} of {summary['proposed']:,} guesses right"
    rate = f"{summary['acceptance_rate']:.0%}"
    return [f"{right} ({rate}), {summary['forwards_saved']:,} forwards saved"]
