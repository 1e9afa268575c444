"""`nanokv generate`: one prompt in, its continuation on stdout and nothing else there.

The prompt is an argument, a file, stdin, or an argument followed by stdin. Without --chat the model continues the raw
text; with --chat the text is one user message in the model's own template. Status and thinking go to stderr.
One trailing newline of a file or of stdin is dropped, as the shell's $(…) does, so `echo hi | nanokv generate -`
and `nanokv generate hi` are the same prompt.
"""

import json
import math
import sys
from pathlib import Path

from nanokv.cli import arguments, beams, speculation, terminal
from nanokv.cli.arguments import DEFAULT_NEW_TOKENS
from nanokv.cli.loading import Loaded, load_model
from nanokv.cli.text import clean, read_prompt_bytes, refuse_special
from nanokv.errors import ContextError, NanoKVError

EXAMPLES = (
    'nanokv generate "What is a KV cache?" --chat',
    "cat notes.txt | nanokv generate -",
    'nanokv generate --chat "Who are you?" --json',
)
DESCRIPTION = "Continue a prompt. stdout carries the answer (or one JSON object) only; status goes to stderr."
PATIENCE_S = 2.0  # a stdin that stays silent for this long is mentioned


def add_arguments(parser) -> None:
    """Prompt sources, template, output; then the shared flags."""
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="the text; - reads stdin; piped stdin is put after it, with a blank line between",
    )
    group = parser.add_argument_group("prompt")
    group.add_argument("-p", "--prompt", dest="prompt_flag", metavar="TEXT", help="the same as PROMPT")
    group.add_argument("--file", metavar="FILE", type=Path, help="read the prompt from FILE (after PROMPT, if both)")
    group.add_argument("--chat", action="store_true", help="send it as a message in the model's chat template")
    arguments.add_system_argument(group)
    group.add_argument("--thinking", choices=("on", "off"), help="with --chat: enable_thinking of the template")
    group.add_argument(
        "--allow-special", action="store_true", help="control tokens spelled out in the prompt are meant"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    arguments.add_model_arguments(parser)
    arguments.add_speed_arguments(parser)
    arguments.add_sampling_arguments(parser)
    speculation.add_argument(parser)
    beams.add_arguments(parser)


def run(args) -> int:
    """Load, stream, report."""
    beams.check(args)
    prompt = read_prompt(args)
    loaded = load_model(args)
    ids = encode(args, loaded, prompt)
    if args.beams:
        return run_beams(args, loaded, ids)
    from nanokv.generation import SamplingParams, TextStream

    make_generation = speculation.generation_type(args.speculate, loaded)
    cache = loaded.make_cache()
    params = SamplingParams(**arguments.resolve_sampling(args, loaded.model.generation_config).options())
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
    terminal.notice(result.status(), args)
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
    terminal.notice(found.status(), args)
    stop.finish()
    return 130 if found.interrupted else 0


# --- the prompt ---------------------------------------------------------------------------------------------------


def read_prompt(args) -> str:
    """Argument, file and stdin, in that order, a blank line between; NanoKVError when there is no prompt."""
    if args.prompt not in (None, "-") and args.prompt_flag is not None:
        raise NanoKVError("the prompt is given twice: as an argument and with -p", "leave one of them out")
    text = args.prompt if args.prompt_flag is None else args.prompt_flag
    wants_stdin = args.prompt == "-"
    parts = [] if text in (None, "-") else [clean(text)]
    if args.file is not None:
        parts.append(read_prompt_bytes(args.file.read_bytes(), terminal.sanitize_line(args.file)).removesuffix("\n"))
    piped = sys.stdin is not None and not terminal.is_tty(sys.stdin)
    if piped and (wants_stdin or args.file is None):
        parts.append(read_stdin(args).removesuffix("\n"))
    if not parts:
        example = 'nanokv generate "What is a KV cache?" --chat, or: cat notes.txt | nanokv generate -'
        raise NanoKVError("no prompt", example)
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt or (args.chat and not prompt.strip()):
        raise NanoKVError("the prompt is empty", 'nanokv generate "What is a KV cache?" --chat')
    return prompt


def read_stdin(args) -> str:
    """All of stdin. A pipe that stays silent is mentioned, because it looks like a hang."""
    try:
        import select

        if not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
            terminal.notice("waiting for stdin (with no input to add: nanokv generate … < /dev/null)", args)
    except (OSError, ValueError):  # Windows selects sockets only
        pass
    return read_prompt_bytes(sys.stdin.buffer.read(), "stdin")


def encode(args, loaded: Loaded, prompt: str) -> list[int]:
    """Prompt → ids, through the template with --chat. Typed control tokens are refused before anything is rendered."""
    tokenizer = loaded.tokenizer
    for text in (prompt, args.system or ""):
        refuse_special(text, tokenizer, args.allow_special)
    if not args.chat:
        for flag, given in (("--system", args.system), ("--thinking", args.thinking)):
            if given:
                raise NanoKVError(f"{flag} is part of a chat template", f"add --chat, or leave {flag} out")
        return tokenizer.encode(prompt)
    messages = [{"role": "system", "content": clean(args.system)}] if args.system else []
    messages.append({"role": "user", "content": prompt})
    options = {"enable_thinking": args.thinking == "on"} if args.thinking else {}
    return tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True, **options))


def room(args, loaded: Loaded, ids: list[int]) -> int:
    """How many tokens may follow; refuses a prompt that leaves none, before any work."""
    left = loaded.context - len(ids) + 1  # the last token is never fed: it needs no place in the cache
    if left < 1:
        limit = loaded.config.max_position_embeddings
        hint = f"--context {limit} allows more" if loaded.context < limit else "shorten the prompt"
        raise ContextError(f"the prompt has {len(ids):,} tokens, the context {loaded.context:,}", hint)
    return min(args.max_new_tokens or DEFAULT_NEW_TOKENS, left)


# --- the answer ---------------------------------------------------------------------------------------------------


class TextOutput:
    """Streams the answer to stdout, control characters made visible; with --chat, thinking goes to stderr, dim."""

    def __init__(self, args, loaded: Loaded, ids: list[int]):
        self.clean = terminal.Sanitizer()
        self.style = terminal.Style(sys.stderr, args.color)
        self.quiet, self.last, self.thought = args.quiet, "", ""
        self.split = _think_splitter(loaded.tokenizer.decode(ids[-8:])) if args.chat else None

    def put(self, chunk: str) -> None:
        """One piece of text."""
        for kind, text in self.split.put(chunk) if self.split else [("answer", chunk)]:
            self._write(kind, text)

    def flush(self) -> None:
        """What was held back, and the newline that ends every answer."""
        for kind, text in self.split.flush() if self.split else []:
            self._write(kind, text)
        self._write("answer", "", self.clean.flush())
        if self.last != "\n":
            terminal.write_out("\n")

    def _write(self, kind: str, text: str, tail: str = "") -> None:
        if kind == "answer":
            if self.thought:  # both streams may be the same terminal
                terminal.write_err("\n" if self.thought.endswith("\n") else "\n\n")
                self.thought = ""
            text = self.clean.put(text) + tail
            self.last = text[-1:] or self.last
            if text:
                terminal.write_out(text)
        elif not self.quiet:
            self.thought = text
            terminal.write_err(self.style.dim(terminal.sanitize(text)))


def _think_splitter(prompt_end: str):
    """Reads `<think>…</think>` out of a stream; the template itself may have opened it at the prompt's end."""
    from nanokv.prefix import ThinkSplitter

    return ThinkSplitter(prompt_end.rstrip().endswith("<think>"))


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


def to_json(value) -> str:
    """One line of ASCII: control characters, DEL included, only as escapes."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False).replace("\x7f", "\\u007f")
