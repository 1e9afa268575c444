"""`nanokv generate`: answers one prompt; stdout carries the answer and nothing else.

The prompt is one user message in the model's chat template. With --raw, or without a template, the
model continues the text. Status and thoughts go to stderr.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import beams, options, speculation, terminal
from nanokv.apps.cli.common.answer import AnswerWriter, thoughts
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
)
from nanokv.apps.cli.common.plan import Loaded
from nanokv.apps.cli.common.prompt import (
    PromptOptions,
    add_prompt_arguments,
    answer,
    encode,
    form,
    prompt_options,
    read_prompt,
    room,
    templated,
)
from nanokv.apps.cli.common.text import to_json
from nanokv.decoding import completion
from nanokv.parallel.group import ALONE, Ranks
from nanokv.support.clock import stamp
from nanokv.text.thinking import opens_thinking

if TYPE_CHECKING:
    from nanokv.decoding.generation import Generation, TextStream

EXAMPLES = (
    'nanokv generate "What is a KV cache?"',
    "cat notes.txt | nanokv generate -",
    'nanokv generate --raw "Once upon a time" -m Qwen/Qwen3-0.6B-Base',
    'nanokv generate "Who are you?" --json',
)
DESCRIPTION = (
    "Answer a prompt. If the model has a chat template, the prompt (typed, piped or from --file) "
    "is one user message in it. With --raw, or a model without a template, the model continues "
    "the text. The status line says which of the two was done.\n"
    "stdout has only the answer (or one JSON object); status goes to stderr."
)
RANKS = "led"  # the other ranks follow rank 0


@dataclass(frozen=True)
class GenerateOptions:
    """The options of this command."""

    prompt: PromptOptions
    json: bool
    model: ModelOptions
    cache: CacheOptions
    sampling: SamplingOptions
    output: OutputOptions


def add_arguments(parser: ArgumentParser) -> None:
    """Prompt sources, template, output; then the shared flags."""
    add_prompt_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="an OpenAI chat.completion or text_completion"
    )
    options.add_model_arguments(parser, options.CACHE)
    options.add_speed_arguments(parser)
    options.add_sampling_arguments(parser)
    options.add_speculate_argument(parser)
    options.add_beam_arguments(parser)


def command_options(args: Namespace) -> GenerateOptions:
    """The options of the flags of add_arguments; NanoKVError for flags that exclude each other."""
    sampling = options.sampling_options(args, options.beam_options(args))
    prompt = prompt_options(args)
    speed = replace(options.speed_options(args), speculate=args.speculate)
    return GenerateOptions(
        prompt,
        args.json,
        options.model_options(args, speed, prompt.template),
        options.cache_options(args),
        sampling,
        options.output_options(args),
    )


def run(args: Namespace, ranks: Ranks = ALONE) -> int:
    """Load, then stream or search, and report."""
    given = command_options(args)
    prompt = read_prompt(given.prompt, given.output, EXAMPLES[0])
    loaded = load_model(given.model, given.cache, given.output, ranks)
    ids = encode(given.prompt, loaded, prompt)
    stamp("prompt")
    if given.sampling.beams:
        return run_beams(given, loaded, ids)
    return run_stream(given, loaded, ids)


def run_stream(given: GenerateOptions, loaded: Loaded, ids: list[int]) -> int:
    """Stream the answer, or print its JSON at the end."""
    from nanokv.decoding.generation import TextStream

    make_generation = speculation.generation_type(given.model.speculate, loaded)
    speculation.announce_end(given.model.speculate, loaded, given.output)
    cache = loaded.make_cache()
    sampling = given.sampling
    params = sampling.resolve(loaded.model.generation_config)
    most = room(sampling.most, loaded, ids)
    with terminal.Interrupt() as stop:
        generation = make_generation(loaded.model, ids, cache, params, most, should_stop=stop)
        stream = TextStream(generation, loaded.tokenizer, stop=sampling.stop)
        if given.json:
            out: JsonOutput | TextOutput = JsonOutput()
        else:
            out = TextOutput(given.prompt, given.output, loaded, ids)
        for chunk in stream:
            out.put(chunk)
        stamp("token")  # of the one token that `nanokv profile --start` asks for
        out.flush()
    found = result(given, loaded, generation, stream)
    if given.json:
        terminal.write_out(to_json(found) + "\n")
    said = f"{status(found, loaded.context)} · {form(given.prompt, loaded.tokenizer)}"
    terminal.notice(said, given.output)
    stop.finish()
    if found["choices"][0]["stop_reason"] == "interrupted":
        return 130
    return 0


def run_beams(given: GenerateOptions, loaded: Loaded, ids: list[int]) -> int:
    """Search, then print the best beam (--json: all). After Ctrl-C: the best so far, if any."""
    with terminal.Interrupt() as stop:
        found = beams.search(given.sampling, given.prompt, loaded, ids, stop)
    if given.json:
        terminal.write_out(to_json(found.answer) + "\n")
    elif found.answer["choices"][0]["token_ids"]:
        out = TextOutput(given.prompt, given.output, loaded, ids)
        out.put(found.text)
        out.flush()
    terminal.notice(f"{beams.status(found)} · {form(given.prompt, loaded.tokenizer)}", given.output)
    stop.finish()
    return 130 if found.interrupted else 0


# --- the answer -----------------------------------------------------------------------------------


class TextOutput:
    """Streams the answer as text, and ends it with a newline."""

    def __init__(
        self, prompt: PromptOptions, output: OutputOptions, loaded: Loaded, ids: list[int]
    ):
        style = terminal.Style(sys.stderr, output.color)
        self.writer = AnswerWriter(thoughts(prompt.template.thinking, output.quiet), style)
        # The template may have opened <think> at the prompt's end.
        if templated(prompt, loaded.tokenizer):
            self.writer.begin(opens_thinking(loaded.tokenizer, ids))

    def put(self, chunk: str) -> None:
        """One piece of text."""
        self.writer.put(chunk)

    def flush(self) -> None:
        """Write the text that was held back, and the last newline."""
        self.writer.finish()
        if not self.writer.line.endswith("\n"):
            terminal.write_out("\n")


class JsonOutput:
    """Prints nothing during the answer: one JSON object follows at the end."""

    def put(self, chunk: str) -> None:
        """Ignore the piece: the JSON object contains the whole text."""

    def flush(self) -> None:
        """Do nothing: nothing was held back."""


def result(
    given: GenerateOptions, loaded: Loaded, generation: "Generation", stream: "TextStream"
) -> dict:
    """The object that --json prints; the status line is made from it."""
    ids = generation.tokens
    clock = generation.timings
    reason = stream.finish_reason
    assert reason is not None  # the stream has ended
    if reason == "length" and len(ids) < given.sampling.most:
        reason = "context"  # `room` allowed fewer than were asked for
    said = answer(given.prompt, loaded, generation.ids, stream.text)
    logprobs = completion.logprobs(said, ids, generation.logprobs, loaded.tokenizer)
    cached = generation.cached_tokens
    new = generation.prompt_tokens
    return completion.completion(
        loaded.source,
        [completion.choice(said, ids, reason, stream.stop_string, logprobs=logprobs)],
        completion.usage(cached + new, len(ids), cached),
        timings=completion.timings(
            clock.first_token_seconds if ids else None,
            completion.rate(new, clock.prefill_seconds),
            completion.rate(len(ids) - 1, clock.decode_seconds),
            load_s=loaded.load_s,
        ),
        cache=completion.cache(generation.cache),
        seed=completion.seed(generation),
        speculation=generation.speculation,
    )


def status(found: dict, context: int) -> str:
    """14 new + 0 reused → 8 out · first token 21 ms · 310 tok/s · cache 21/2,048 · 96.8 kB"""
    usage = found["usage"]
    speed = found["timings"]
    cache = found["cache"]
    reused = usage["prompt_tokens_details"]["cached_tokens"]
    out = usage["completion_tokens"]
    parts = [f"{usage['prompt_tokens'] - reused:,} new + {reused:,} reused → {out:,} out"]
    if speed["ttft_s"] is not None:
        parts.append(f"first token {terminal.seconds_text(speed['ttft_s'])}")
    if speed["decode_tok_s"]:
        parts.append(f"{speed['decode_tok_s']:,.0f} tok/s")
    parts += speculation.status(found.get("speculation"))
    parts.append(f"cache {cache['tokens']:,}/{context:,}")
    parts.append(terminal.held_text(cache["used_bytes"], cache["bytes"]))
    if found["seed"] is not None:
        parts.append(f"seed {found['seed']}")
    choice = found["choices"][0]
    if choice["finish_reason"] != "stop":
        reasons = {None: f"stopped at {out:,} tokens", "context": "context full"}
        parts.append(reasons.get(choice["stop_reason"], choice["stop_reason"]))
    return "  " + " · ".join(parts)
