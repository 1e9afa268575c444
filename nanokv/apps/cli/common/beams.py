"""`--beams K`: runs a beam search, and turns its result into text, JSON and a status line.

Beam search neither samples nor streams: the best beam is known only at the end. Flags for sampling,
stop strings and speculation are therefore refused (options.py), and the checkpoint's temperature
does not apply. In a chat, the answer is the best beam and appears as a whole.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nanokv.apps.cli.common import loading, terminal
from nanokv.apps.cli.common.options import BeamOptions, SamplingOptions
from nanokv.apps.cli.common.plan import Loaded
from nanokv.apps.cli.common.prompt import PromptOptions, answer, room
from nanokv.decoding import completion
from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from torch import Tensor

    from nanokv.apps.cli.common.plan import MakeGeneration
    from nanokv.cache.base import KVCache
    from nanokv.decoding.beam import Beam, BeamGeneration
    from nanokv.decoding.draw import SamplingParams
    from nanokv.model import Transformer


class Found(NamedTuple):
    """All beams as one completion, likeliest first; the text of the first; was it interrupted?"""

    answer: dict
    text: str
    interrupted: bool


def search(
    sampling: SamplingOptions,
    prompt: PromptOptions,
    loaded: Loaded,
    ids: list[int],
    should_stop: Callable[[], bool],
) -> Found:
    """Run the search. If interrupted before the first token, the result is one empty answer."""
    assert sampling.beams is not None  # this is called only with --beams
    most = room(sampling.most, loaded, ids)
    check_memory(sampling.beams, loaded, len(ids) + most)
    from nanokv.decoding.beam import Beam, BeamGeneration
    from nanokv.decoding.generation import SamplingParams

    penalty = sampling.resolve(loaded.model.generation_config).repetition_penalty
    start = time.perf_counter()
    make = loaded.leading(partial(BeamGeneration, **keywords(sampling.beams)), "find")
    params = SamplingParams(repetition_penalty=penalty)
    generation = make(loaded.model, ids, loaded.make_cache(), params, most, should_stop=should_stop)
    beams = generation.find() or [Beam([], float("nan"))]  # null in JSON
    seconds = time.perf_counter() - start
    ends = [text_and_reason(sampling.most, loaded, generation, beam) for beam in beams]
    choices = []
    for i, (beam, (text, reason)) in enumerate(zip(beams, ends, strict=True)):
        message = answer(prompt, loaded, ids, text)
        choices.append(completion.choice(message, beam.ids, reason, index=i, score=beam.score))
    found = completion.completion(
        loaded.source,
        choices,
        completion.usage(len(ids), sum(len(beam.ids) for beam in beams)),
        timings=completion.timings(load_s=loaded.load_s, total_s=seconds),
        cache=completion.cache(generation.cache),
        seed=None,
    )
    return Found(found, ends[0][0], generation.finish_reason == "interrupted")


def text_and_reason(
    wanted: int, loaded: Loaded, generation: "BeamGeneration", beam: "Beam"
) -> tuple[str, str]:
    """The text of a beam without its eos token, and the reason why it ended.

    The eos token is cut by id, because its text may be an ordinary word.
    """
    out = len(beam.ids)
    if out and beam.ids[-1] in generation.eos_token_ids:
        return loaded.tokenizer.text_of(beam.ids[:-1]), "stop"
    text = loaded.tokenizer.text_of(beam.ids)
    if out < generation.search.most:
        return text, "interrupted"
    if out < wanted:
        return text, "context"
    return text, "length"


def status(found: Found) -> str:
    """14 prompt → 8 out · best of 4 beams, score -1.234 · 310 ms"""
    beams = found.answer["choices"]
    best = beams[0]
    out = len(best["token_ids"])
    parts = [f"{found.answer['usage']['prompt_tokens']:,} prompt → {out:,} out"]
    if out:
        plural = "s" if len(beams) > 1 else ""
        parts.append(f"best of {len(beams)} beam{plural}, score {best['score']:.3f}")
    parts.append(terminal.seconds_text(found.answer["timings"]["total_s"]))
    if found.interrupted:
        parts.append("interrupted")
    if best["finish_reason"] == "length":
        parts.append(best["stop_reason"] or "length")
    return "  " + " · ".join(parts)


def generation_type(options: BeamOptions, loaded: Loaded) -> "MakeGeneration":
    """The callable that makes the Generation of one answer in a chat; it checks memory first."""
    from nanokv.decoding.beam import BeamGeneration

    def make(
        model: "Transformer",
        ids: "Tensor",
        cache: "KVCache",
        params: "SamplingParams",
        max_new_tokens: int,
        **more: Any,
    ) -> "BeamGeneration":
        check_memory(options, loaded, cache.length + ids.numel() + max_new_tokens)
        return BeamGeneration(
            model, ids, cache, params, max_new_tokens, **keywords(options), **more
        )

    return loaded.leading(make)


def keywords(options: BeamOptions) -> dict:
    """The keyword arguments of BeamGeneration."""
    return {"beams": options.count, "length_penalty": options.length_penalty}


def check_memory(options: BeamOptions, loaded: Loaded, tokens: int) -> None:
    """NanoKVError if the beams' caches do not fit beside the weights, which are already loaded.

    A page pool of a given size was counted together with the weights.
    """
    if loaded.cache_options.get("pages"):
        return
    available = loading.available_memory(loaded.device)
    if available is None:
        return
    available //= loaded.ranks.local
    each = loading.cache_memory(loaded, tokens)
    needed = each * (options.count + 1)
    if needed <= available:
        return
    hint = "a smaller --max-new-tokens"
    fit = available // each - 1
    if fit >= 1:
        hint = f"--beams {fit}, or {hint}"
    raise NanoKVError(
        f"--beams {options.count} needs {terminal.bytes_text(needed)} for caches of {tokens:,} "
        f"tokens; {terminal.bytes_text(available)} are free",
        hint,
    )
