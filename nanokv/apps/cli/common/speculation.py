"""`--speculate`: from the value of the flag to a Draft, and from what it saved to words.

The flag is read in options.py; models are loaded, and numbers checked against the model, here. At
temperature 0 the answer is the one without the flag; when sampling, a seed gives another draw of the same distribution.
"""

from dataclasses import replace
from functools import partial

from nanokv.apps.cli.common.terminal import sanitize_line
from nanokv.config import Config
from nanokv.costs import ITEMSIZE, kv_bytes, weight_bytes
from nanokv.errors import NanoKVError


def generation_type(how, loaded):
    """What makes a Generation: the class itself, or one that guesses as --speculate said."""
    from nanokv.decoding import speculative
    from nanokv.decoding.generation import Generation

    if how is None:
        return loaded.leading(Generation)
    kind, value = how
    make = {
        "ngram": lambda: speculative.PromptLookup(value),
        "early-exit": lambda: speculative.EarlyExit(loaded.model, value),
        "draft": lambda: speculative.DraftModel(load_draft(value, loaded)),
    }[kind]
    return loaded.leading(partial(speculative.Speculation, draft=make()))


def memory(how, plan) -> int:
    """Bytes that guessing takes beside the model: a draft's weights, and the cache of whoever guesses."""
    kind, value = how or (None, None)
    if kind not in ("draft", "early-exit"):
        return 0
    itemsize, weights = ITEMSIZE[plan.dtype_name], 0
    if kind == "draft":
        import weights_loader

        config = Config.from_folder(weights_loader.resolve(value))
        weights = weight_bytes(config, itemsize)
    else:
        config = replace(plan.config, num_hidden_layers=min(value, plan.config.num_hidden_layers))
    return weights + kv_bytes(
        config, min(plan.context, config.max_position_embeddings), 1, itemsize
    )


def load_draft(source: str, loaded):
    """The model that guesses; its words must be the target's, in number and in the special ones."""
    from nanokv.fast import optimize
    from nanokv.loading import load

    model, tokenizer = load(source, dtype=loaded.dtype, device=loaded.device)
    mine, theirs = loaded.tokenizer, tokenizer
    if (mine.vocab_size, mine.special_tokens) != (theirs.vocab_size, theirs.special_tokens):
        raise NanoKVError(
            f"--speculate draft:{sanitize_line(source)} has another vocabulary ({theirs.vocab_size:,} tokens) "
            f"than the model ({mine.vocab_size:,} tokens)",
            "a smaller checkpoint of the same family, or --speculate ngram",
        )
    return optimize(model) if loaded.code.fast and not model.config.experts else model


def status(summary: dict) -> list[str]:
    """[`31 of 40 guesses right (78%), 31 forwards saved`], or nothing where nothing was guessed."""
    if not summary:
        return []
    right = f"{summary['accepted']:,} of {summary['proposed']:,} guesses right ({summary['acceptance_rate']:.0%})"
    return [f"{right}, {summary['forwards_saved']:,} forwards saved"]
