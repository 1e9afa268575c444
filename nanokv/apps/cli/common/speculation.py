"""`--speculate`: makes the Draft that the flag names, and the text of the status line.

options.py parses the flag. This file loads draft models and checks numbers against the model. At
temperature 0 the answer is the same as without the flag. When sampling, the same seed gives
another draw from the same distribution.
"""

from dataclasses import replace
from functools import partial

from nanokv.apps.cli.common.terminal import sanitize_line
from nanokv.config import Config
from nanokv.costs import ITEMSIZE, kv_bytes, weight_bytes
from nanokv.errors import NanoKVError


def generation_type(how, loaded):
    """The callable that makes a Generation: the class, or Speculation with the wanted draft."""
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
    """Bytes of speculation beside the model: a draft model's weights, and the draft's cache."""
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
    """Load the draft model. Its vocabulary size and special tokens must equal the target's."""
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
    """[`31 of 40 guesses right (78%), 31 forwards saved`], or [] without speculation."""
    if not summary:
        return []
    right = f"{summary['accepted']:,} of {summary['proposed']:,} guesses right ({summary['acceptance_rate']:.0%})"
    return [f"{right}, {summary['forwards_saved']:,} forwards saved"]
