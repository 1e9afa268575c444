"""`--beams K`: from the flags to a beam search, and from what it found to text, JSON and a status line.

Nothing is drawn and nothing streams: which beam wins is known at the end. So flags that shape a draw, cut the stream
or guess ahead are refused, not ignored. What the checkpoint says about temperature does not apply here. In a chat an
answer is the best beam, which appears at once.
"""

import time
from functools import partial
from typing import NamedTuple

from nanokv.apps.cli.common import arguments, loading, terminal
from nanokv.apps.cli.common.arguments import DEFAULT_NEW_TOKENS
from nanokv.apps.cli.common.prompt import answer
from nanokv.decoding import completion
from nanokv.errors import NanoKVError

OFF: dict[str, tuple] = {  # values that say what it does anyway
    "temperature": (0,), "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "seed": (),
}  # fmt: skip


def add_arguments(parser) -> None:
    """The two flags."""
    group = parser.add_argument_group("beam search")
    group.add_argument(
        "--beams", metavar="K", type=arguments.integer(1, 1000), help="keep the K likeliest answers, print the best"
    )
    group.add_argument(
        "--length-penalty",
        metavar="X",
        type=arguments.real(-5, 5),
        help="divide log-probabilities by length^X: above 0 favours long answers (default: 1)",
    )


def check(args) -> None:
    """Refuse flags that contradict each other, before anything is loaded."""
    if args.beams is None:
        if args.length_penalty is not None:
            raise NanoKVError("--length-penalty is part of beam search", "add --beams 4, or leave it out")
        return
    for name in OFF:
        refuse_draw(name, getattr(args, name), "--" + name.replace("_", "-"))
    for flag, value in (("--stop", args.stop), ("--speculate", args.speculate)):
        if value:
            raise NanoKVError(f"{flag} works on a stream of tokens, and beams have none", f"leave out {flag}")


def refuse_draw(name: str, value, flag: str) -> None:
    """A setting that shapes a draw, at a value that would."""
    if name in OFF and value not in (None, *OFF[name]):
        raise NanoKVError(
            f"--beams looks for the likeliest answer and draws nothing: {flag} has no part in it",
            f"leave out {flag}, or leave out --beams",
        )


class Found(NamedTuple):
    """All beams as one completion, likeliest first; the text of the first; was the search cut short?"""

    answer: dict
    text: str
    interrupted: bool


def search(args, loaded, ids: list[int], room: int, should_stop) -> Found:
    """Run it: at most `room` new tokens. Cut short before the first token it finds one answer of none."""
    check_memory(args, loaded, len(ids) + room)
    from nanokv.decoding.beam import Beam, BeamGeneration
    from nanokv.decoding.generation import SamplingParams

    penalty = arguments.resolve_sampling(args, loaded.model.generation_config).repetition_penalty
    start = time.perf_counter()
    make = loaded.leading(partial(BeamGeneration, **options(args)), "find")
    params = SamplingParams(repetition_penalty=penalty)
    generation = make(loaded.model, ids, loaded.make_cache(), params, room, should_stop=should_stop)
    beams = generation.find() or [Beam([], float("nan"))]  # null in JSON
    seconds = time.perf_counter() - start
    ends = [text_and_reason(args, loaded, generation, beam) for beam in beams]
    choices = [
        completion.choice(answer(args, loaded, ids, text), beam.ids, reason, index=i, score=beam.score)
        for i, (beam, (text, reason)) in enumerate(zip(beams, ends, strict=True))
    ]
    found = completion.completion(
        args.model, choices, completion.usage(len(ids), sum(len(beam.ids) for beam in beams)),
        timings=completion.timings(load_s=loaded.load_s, total_s=seconds), cache=completion.cache(generation.cache),
        seed=None,
    )  # fmt: skip
    return Found(found, ends[0][0], generation.finish_reason == "interrupted")


def text_and_reason(args, loaded, generation, beam) -> tuple[str, str]:
    """The text, without the eos token, which may be an ordinary word; and why it ended."""
    out = len(beam.ids)
    if out and beam.ids[-1] in generation.eos_token_ids:
        return loaded.tokenizer.text_of(beam.ids[:-1]), "stop"
    reason = "context" if out < (args.max_new_tokens or DEFAULT_NEW_TOKENS) else "length"
    return loaded.tokenizer.text_of(beam.ids), "interrupted" if out < generation.search.most else reason


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


def generation_type(args, loaded):
    """What makes the Generation of each answer of a chat, after a look at the memory that this one needs."""
    from nanokv.decoding.beam import BeamGeneration

    def make(model, ids, cache, params, max_new_tokens, **more):
        check_memory(args, loaded, cache.length + ids.numel() + max_new_tokens)
        return BeamGeneration(model, ids, cache, params, max_new_tokens, **options(args), **more)

    return loaded.leading(make)


def options(args) -> dict:
    """The two flags, for BeamGeneration."""
    return {"beams": args.beams, "length_penalty": 1.0 if args.length_penalty is None else args.length_penalty}


def check_memory(args, loaded, tokens: int) -> None:
    """The beams' caches must fit beside the weights, which are loaded already; a pool was counted with them."""
    if loaded.cache_options.get("pages"):
        return
    each = loading.cache_memory(loaded, tokens)
    available = loading.available_memory(loaded.device)
    available = None if available is None else available // loaded.ranks.local
    if available is not None and each * (args.beams + 1) > available:
        fit = available // each - 1
        wanted, free = terminal.bytes_text(each * (args.beams + 1)), terminal.bytes_text(available)
        raise NanoKVError(
            f"--beams {args.beams} needs {wanted} for caches of {tokens:,} tokens; {free} are free",
            f"--beams {fit}, or a smaller --max-new-tokens" if fit >= 1 else "a smaller --max-new-tokens",
        )
