"""`nanokv generate`: one prompt in, its continuation on stdout and nothing else there.

The prompt is one user message in the model's own chat template; with --raw, or where there is no template, the model
continues the text as it is. Status and thinking go to stderr.
"""

import math

from nanokv.cli import arguments, beams, speculation, terminal
from nanokv.cli.answer import AnswerWriter
from nanokv.cli.arguments import DEFAULT_NEW_TOKENS
from nanokv.cli.loading import Loaded, load_model
from nanokv.cli.prompt import add_prompt_arguments, encode, form, read_prompt, room, templated
from nanokv.cli.text import to_json
from nanokv.text.thinking import inside_thinking

EXAMPLES = (
    'nanokv generate "What is a KV cache?"',
    "cat notes.txt | nanokv generate -",
    'nanokv generate --raw "Once upon a time" -m Qwen/Qwen3-0.6B-Base',
    'nanokv generate "Who are you?" --json',
)
DESCRIPTION = (
    "Answer a prompt. Where the model has a chat template, the prompt (typed, piped or from --file) is one user "
    "message in it; --raw, or a model without a template, continues the text as it is. The status line says which.\n"
    "stdout carries the answer (or one JSON object) only; status goes to stderr."
)


def add_arguments(parser) -> None:
    """Prompt sources, template, output; then the shared flags."""
    add_prompt_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments.add_model_arguments(parser)
    arguments.add_speed_arguments(parser)
    arguments.add_sampling_arguments(parser)
    speculation.add_argument(parser)
    beams.add_arguments(parser)


def run(args) -> int:
    """Load, stream, report."""
    beams.check(args)
    prompt = read_prompt(args, EXAMPLES[0])
    loaded = load_model(args)
    ids = encode(args, loaded, prompt)
    if args.beams:
        return run_beams(args, loaded, ids)
    from nanokv.decoding.generation import TextStream

    make_generation = speculation.generation_type(args.speculate, loaded)
    cache = loaded.make_cache()
    params = arguments.resolve_sampling(args, loaded.model.generation_config)
    with terminal.Interrupt() as stop:
        generation = make_generation(
            loaded.model, ids, cache, params, room(args, loaded, ids), should_stop=stop, chunk=loaded.prefill_chunk
        )
        stream = TextStream(generation, loaded.tokenizer, stop=args.stop)
        out = JsonOutput() if args.json else TextOutput(args, loaded, ids)
        for chunk in stream:
            out.put(chunk)
        out.flush()
    result = Result(args, loaded, generation, stream, cache.nbytes)
    if args.json:
        terminal.write_out(to_json(result.as_dict()) + "\n")
    terminal.notice(f"{result.status()} · {form(args, loaded.tokenizer)}", args)
    stop.finish()
    return 130 if result.finish_reason == "interrupted" else 0


def run_beams(args, loaded: Loaded, ids: list[int]) -> int:
    """Nothing to stream: search, then print the best (--json: all); after Ctrl-C the best so far, if there is one."""
    with terminal.Interrupt() as stop:
        found = beams.search(args, loaded, ids, room(args, loaded, ids), stop)
    if args.json:
        terminal.write_out(to_json(found.as_dict()) + "\n")
    elif found.beams:
        out = TextOutput(args, loaded, ids)
        out.put(found.text)
        out.flush()
    terminal.notice(f"{found.status()} · {form(args, loaded.tokenizer)}", args)
    stop.finish()
    return 130 if found.interrupted else 0


# --- the answer ---------------------------------------------------------------------------------------------------


class TextOutput:
    """The answer as it comes, and the newline that ends every answer."""

    def __init__(self, args, loaded: Loaded, ids: list[int]):
        self.writer = AnswerWriter(args)
        if templated(args, loaded.tokenizer):  # the template may have opened <think> at the prompt's end
            self.writer.begin(inside_thinking(loaded.tokenizer.decode(ids[-8:]), ""))

    def put(self, chunk: str) -> None:
        """One piece of text."""
        self.writer.put(chunk)

    def flush(self) -> None:
        """What was held back."""
        self.writer.finish()
        if not self.writer.line.endswith("\n"):
            terminal.write_out("\n")


class JsonOutput:
    """Prints nothing while the answer grows: the one object comes at the end."""

    def put(self, chunk: str) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""


class Result:
    """What happened, as the JSON object and as the status line."""

    def __init__(self, args, loaded: Loaded, generation, stream, cache_bytes: int):
        self.args, self.loaded, self.generation, self.stream = args, loaded, generation, stream
        self.cache_bytes = cache_bytes
        reason = stream.finish_reason
        if reason == "length" and len(generation.tokens) < (args.max_new_tokens or DEFAULT_NEW_TOKENS):
            reason = "context"  # `room` allowed fewer than were asked for
        self.finish_reason = {"stop_string": "stop"}.get(reason, reason)

    def seed(self) -> int | None:
        """The seed that repeats this run; None where nothing was drawn."""
        return self.generation.seed if self.generation.params.temperature > 0 else self.args.seed

    def rates(self) -> dict:
        """Seconds and tokens per second; None where nothing was measured."""
        t, new = self.generation.timings, len(self.generation.tokens)
        return {
            "load_s": round(self.loaded.load_s, 4),
            "ttft_s": round(t.first_token_seconds, 6) if new else None,
            "prefill_tok_s": _rate(self.generation.prompt_tokens, t.prefill_seconds),
            "decode_tok_s": _rate(new - 1, t.decode_seconds),
        }

    def as_dict(self) -> dict:
        """The object that --json prints."""
        generation = self.generation
        return {
            "model": self.args.model,
            "prompt_tokens": generation.cached_tokens + generation.prompt_tokens,
            "cached_tokens": generation.cached_tokens,
            "ids": list(generation.tokens),
            "text": self.stream.text,
            "logprobs": [x if math.isfinite(x) else None for x in generation.logprobs],
            "finish_reason": self.finish_reason,
            "timings": self.rates(),
            "cache": {"kind": self.loaded.cache_name, "bytes": self.cache_bytes},
            "seed": self.seed(),
        } | ({"speculation": generation.speculation} if generation.speculation else {})

    def status(self) -> str:
        """14 new + 0 reused → 8 out · first token 21 ms · 310 tok/s · cache 21/2,048 · 96.8 kB"""
        generation, rates = self.generation, self.rates()
        used = generation.cache.length
        new, reused, out = generation.prompt_tokens, generation.cached_tokens, len(generation.tokens)
        parts = [f"{new:,} new + {reused:,} reused → {out:,} out"]
        parts += [f"first token {terminal.seconds_text(rates['ttft_s'])}"] if rates["ttft_s"] is not None else []
        parts += [f"{rates['decode_tok_s']:,.0f} tok/s"] if rates["decode_tok_s"] else []
        parts += speculation.status(generation.speculation)
        parts += [f"cache {used:,}/{self.loaded.context:,}", terminal.bytes_text(self.cache_bytes)]
        parts += [f"seed {self.seed()}"] if self.seed() is not None else []
        why = {"length": f"stopped at {out:,} tokens", "context": "context full"}
        parts += [why.get(self.finish_reason, self.finish_reason)] if self.finish_reason != "stop" else []
        return "  " + " · ".join(parts)


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if tokens > 0 and seconds > 0 else None
