"""`--beams K`: from the options to a beam search, and from what it found to text, JSON and a status line.

Nothing is drawn and nothing streams: which beam wins is known at the end. So flags that shape a draw, cut the stream
or guess ahead are refused (options.py), not ignored. What the checkpoint says about temperature does not apply here.
In a chat an answer is the best beam, which appears at once.
"""

import time
from functools import partial
from typing import NamedTuple

from nanokv.apps.cli.common import loading, terminal
from nanokv.apps.cli.common.options import BeamOptions, SamplingOptions
from nanokv.apps.cli.common.prompt import PromptOptions, answer, room
from nanokv.decoding import completion
from nanokv.errors import NanoKVError


class Found(NamedTuple):
    """All beams as one completion, likeliest first; the text of the first; was the search cut short?"""

    answer: dict
    text: str
    interrupted: bool


def search(
    sampling: SamplingOptions, prompt: PromptOptions, loaded, ids: list[int], should_stop
) -> Found:
    """Run it. Cut short before the first token it finds one answer of none."""
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
    choices = [
        completion.choice(
            answer(prompt, loaded, ids, text), beam.ids, reason, index=i, score=beam.score
        )
        for i, (beam, (text, reason)) in enumerate(zip(beams, ends, strict=True))
    ]
    found = completion.completion(
        loaded.source,
        choices,
        completion.usage(len(ids), sum(len(beam.ids) for beam in beams)),
        timings=completion.timings(load_s=loaded.load_s, total_s=seconds),
        cache=completion.cache(generation.cache),
        seed=None,
    )
    return Found(found, ends[0][0], generation.finish_reason == "interrupted")


def text_and_reason(wanted: int, loaded, generation, beam) -> tuple[str, str]:
    """The text, without the eos token, which may be an ordinary word; and why it ended."""
    out = len(beam.ids)
    if out and beam.ids[-1] in generation.eos_token_ids:
        return loaded.tokenizer.text_of(beam.ids[:-1]), "stop"
    reason = "context" if out < wanted else "length"
    return loaded.tokenizer.text_of(
        beam.ids
    ), "interrupted" if out < generation.search.most else reason


def status(found: Found) -> str:
    """14 prompt → 8 out · best of 4 beams, score -1.234 · 310 ms"""
    beams, best = found.answer["choices"], found.answer["choices"][0]
    out = len(best["token_ids"])
    parts = [f"{found.answer['usage']['prompt_tokens']:,} prompt → {out:,} out"]
    if out:
        parts += [f"best of {len(beams)} beam{'s' * (len(beams) > 1)}, score {best['score']:.3f}"]
    parts += [terminal.seconds_text(found.answer["timings"]["total_s"])]
    parts += ["interrupted"] if found.interrupted else []
    parts += [best["stop_reason"] or "length"] if best["finish_reason"] == "length" else []
    return "  " + " · ".join(parts)


def generation_type(options: BeamOptions, loaded):
    """What makes the Generation of each answer of a chat, after a look at the memory that this one needs."""
    from nanokv.decoding.beam import BeamGeneration

    def make(model, ids, cache, params, max_new_tokens, **more):
        check_memory(options, loaded, cache.length + ids.numel() + max_new_tokens)
        return BeamGeneration(
            model, ids, cache, params, max_new_tokens, **keywords(options), **more
        )

    return loaded.leading(make)


def keywords(options: BeamOptions) -> dict:
    """For BeamGeneration."""
    return {"beams": options.count, "length_penalty": options.length_penalty}


def check_memory(options: BeamOptions, loaded, tokens: int) -> None:
    """The beams' caches must fit beside the weights, which are loaded already; a pool was counted with them."""
    if loaded.cache_options.get("pages"):
        return
    each = loading.cache_memory(loaded, tokens)
    available = loading.available_memory(loaded.device)
    available = None if available is None else available // loaded.ranks.local
    if available is not None and each * (options.count + 1) > available:
        fit = available // each - 1
        wanted, free = (
            terminal.bytes_text(each * (options.count + 1)),
            terminal.bytes_text(available),
        )
        raise NanoKVError(
            f"--beams {options.count} needs {wanted} for caches of {tokens:,} tokens; {free} are free",
            f"--beams {fit}, or a smaller --max-new-tokens"
            if fit >= 1
            else "a smaller --max-new-tokens",
        )
