"""`--beams K`: from the flags to a beam search, and from what it found to text, JSON and a status line.

Nothing is drawn and nothing streams: which beam wins is known at the end. So flags that shape a draw, cut the stream
or guess ahead are refused, not ignored. What the checkpoint says about temperature does not apply here. In a chat an
answer is the best beam, which appears at once.
"""

import time

from nanokv.cli import arguments, loading, terminal
from nanokv.cli.arguments import DEFAULT_NEW_TOKENS
from nanokv.errors import NanoKVError

OFF = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": None}  # values that say what it does anyway


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
    if name in OFF and value not in (None, OFF[name]):
        raise NanoKVError(
            f"--beams looks for the likeliest answer and draws nothing: {flag} has no part in it",
            f"leave out {flag}, or leave out --beams",
        )


def search(args, loaded, ids: list[int], room: int, should_stop) -> "Found":
    """Run it: at most `room` new tokens."""
    check_memory(args, loaded, len(ids) + room)
    from nanokv.decoding.beam import BeamGeneration
    from nanokv.decoding.generation import SamplingParams

    penalty = arguments.resolve_sampling(args, loaded.model.generation_config).repetition_penalty
    start = time.perf_counter()
    generation = BeamGeneration(
        loaded.model, ids, loaded.make_cache(), SamplingParams(repetition_penalty=penalty), room,
        should_stop=should_stop, chunk=loaded.prefill_chunk, **options(args),
    )  # fmt: skip
    return Found(args, loaded, generation, generation.find(), time.perf_counter() - start)


def generation_type(args, loaded):
    """What makes the Generation of each answer of a chat, after a look at the memory that this one needs."""
    from nanokv.decoding.beam import BeamGeneration

    def make(model, ids, cache, params, max_new_tokens, **more):
        check_memory(args, loaded, cache.length + ids.numel() + max_new_tokens)
        return BeamGeneration(model, ids, cache, params, max_new_tokens, **options(args), **more)

    return make


def options(args) -> dict:
    """The two flags, for BeamGeneration."""
    return {"beams": args.beams, "length_penalty": 1.0 if args.length_penalty is None else args.length_penalty}


def check_memory(args, loaded, tokens: int) -> None:
    """The beams' caches must fit beside the weights, which are loaded already; a pool was counted with them."""
    if loaded.cache_options.get("pages"):
        return
    each = loading.cache_memory(loaded, tokens)
    available = loading.available_memory(loaded.device)
    if available is not None and each * (args.beams + 1) > available:
        fit = available // each - 1
        wanted, free = terminal.bytes_text(each * (args.beams + 1)), terminal.bytes_text(available)
        raise NanoKVError(
            f"--beams {args.beams} needs {wanted} for caches of {tokens:,} tokens; {free} are free",
            f"--beams {fit}, or a smaller --max-new-tokens" if fit >= 1 else "a smaller --max-new-tokens",
        )


class Found:
    """All beams, best first, as the JSON object and as the status line."""

    def __init__(self, args, loaded, generation, found, seconds: float):
        self.args, self.loaded, self.generation, self.seconds = args, loaded, generation, seconds
        self.prompt, self.interrupted = generation.ids, generation.finish_reason == "interrupted"
        self.beams = [self.describe(beam) for beam in found]

    @property
    def text(self) -> str:
        """The best answer."""
        return self.beams[0]["text"]

    def describe(self, beam) -> dict:
        """Ids, text without the eos token, score, and why it ended."""
        ended, out = beam.ids[-1] in self.generation.eos_token_ids, len(beam.ids)
        reason = "context" if out < (self.args.max_new_tokens or DEFAULT_NEW_TOKENS) else "length"
        reason = "interrupted" if out < self.generation.search.most else reason
        text = self.loaded.tokenizer.text_of(beam.ids[:-1] if ended else beam.ids)
        return {"ids": beam.ids, "text": text, "score": beam.score, "finish_reason": "stop" if ended else reason}

    def as_dict(self) -> dict:
        """The object that --json prints: the best answer where generate has its own, then all of them."""
        nothing = {"ids": [], "text": "", "score": None, "finish_reason": "interrupted"}
        best = self.beams[0] if self.beams else nothing
        return {"model": self.args.model, "prompt_tokens": len(self.prompt)} | best | {
            "beams": self.beams,
            "timings": {"load_s": round(self.loaded.load_s, 4), "total_s": round(self.seconds, 6)},
            "cache": {"kind": self.loaded.cache_name},
        }  # fmt: skip

    def status(self) -> str:
        """14 prompt → 8 out · best of 4 beams, score -1.234 · 310 ms"""
        best = self.as_dict()
        parts = [f"{len(self.prompt):,} prompt → {len(best['ids']):,} out"]
        if self.beams:
            parts += [f"best of {len(self.beams)} beam{'s' * (len(self.beams) > 1)}, score {best['score']:.3f}"]
        parts += [terminal.seconds_text(self.seconds)]
        parts += ["interrupted"] if self.interrupted else []
        parts += [best["finish_reason"]] if best["finish_reason"] not in ("stop", "interrupted") else []
        return "  " + " · ".join(parts)
