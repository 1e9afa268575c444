"""`--beams K`: from the flags to a beam search, and from what it found to text, JSON and a status line.

Nothing is drawn and nothing streams: which beam wins is known at the end. So flags that shape a draw, cut the stream
or guess ahead are refused, not ignored. What the checkpoint says about temperature does not apply here.
"""

import time

from nanokv.cli import arguments, loading, terminal
from nanokv.costs import ITEMSIZE, kv_bytes_per_token
from nanokv.errors import NanoKVError

OFF = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}  # the values that say what beam search does anyway


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
    given = ["--" + name.replace("_", "-") for name, off in OFF.items() if getattr(args, name) not in (None, off)]
    if given:
        raise NanoKVError(
            f"--beams looks for the likeliest answer and draws nothing: {given[0]} has no part in it",
            f"leave out {given[0]}, or leave out --beams",
        )
    for flag, value in (("--stop", args.stop), ("--speculate", args.speculate)):
        if value:
            raise NanoKVError(f"{flag} works on a stream of tokens, and beams have none", f"leave out {flag}")


def search(args, loaded, ids: list[int], room: int) -> "Found":
    """Run it: at most `room` new tokens."""
    check_memory(args, loaded, len(ids) + room)
    from nanokv.beam import beam_search

    start = time.perf_counter()
    found = beam_search(
        loaded.model, ids, args.beams, room,
        num_return=args.beams, cache=loaded.make_cache(), chunk=loaded.prefill_chunk,
        length_penalty=1.0 if args.length_penalty is None else args.length_penalty,
        repetition_penalty=arguments.resolve_sampling(args, loaded.model.generation_config).repetition_penalty,
    )  # fmt: skip
    return Found(args, loaded, ids, room, found, time.perf_counter() - start)


def check_memory(args, loaded, tokens: int) -> None:
    """The beams' caches must fit beside the weights, which are loaded already."""
    each = kv_bytes_per_token(loaded.config, ITEMSIZE[loaded.dtype_name]) * tokens
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

    def __init__(self, args, loaded, ids, room: int, found, seconds: float):
        self.args, self.loaded, self.prompt, self.room, self.seconds = args, loaded, ids, room, seconds
        self.beams = [self.describe(beam) for beam in found]

    @property
    def text(self) -> str:
        """The best answer."""
        return self.beams[0]["text"]

    def describe(self, beam) -> dict:
        """Ids, text without the eos token, score, and why it ended."""
        ended = beam.ids[-1] in self.loaded.model.generation_config.eos_token_ids
        full = "context" if self.room < (self.args.max_new_tokens or self.room) else "length"
        text = self.loaded.tokenizer.text_of(beam.ids[:-1] if ended else beam.ids)
        return {"ids": beam.ids, "text": text, "score": beam.score, "finish_reason": "stop" if ended else full}

    def as_dict(self) -> dict:
        """The object that --json prints: the best answer where generate has its own, then all of them."""
        return {"model": self.args.model, "prompt_tokens": len(self.prompt)} | self.beams[0] | {
            "beams": self.beams,
            "timings": {"load_s": round(self.loaded.load_s, 4), "total_s": round(self.seconds, 6)},
            "cache": {"kind": self.loaded.cache_name},
        }  # fmt: skip

    def status(self) -> str:
        """14 prompt → 8 out · best of 4 beams, score -1.234 · 310 ms"""
        best = self.beams[0]
        parts = [f"{len(self.prompt):,} prompt → {len(best['ids']):,} out"]
        parts += [f"best of {len(self.beams)} beam{'s' * (len(self.beams) > 1)}, score {best['score']:.3f}"]
        parts += [terminal.seconds_text(self.seconds)]
        parts += [best["finish_reason"]] if best["finish_reason"] != "stop" else []
        return "  " + " · ".join(parts)
