"""`nanokv trace`: records a run, tensor by tensor, and writes it as one offline HTML page.

stdout gets only the path of the page. With --fault the page also holds the same run with one of the
bugs of nanokv.lab.faults, and opens at the first number that differs.
"""

import webbrowser
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import arguments, options, terminal
from nanokv.apps.cli.common.arguments import integer
from nanokv.apps.cli.common.files import add_page, ask_to_replace, check_place, replace
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.options import CacheOptions, ModelOptions, OutputOptions
from nanokv.apps.cli.common.plan import Loaded
from nanokv.apps.cli.common.prompt import (
    PromptOptions,
    add_prompt_arguments,
    encode,
    messages,
    prompt_options,
    read_prompt,
    templated,
)
from nanokv.config import Config
from nanokv.errors import ContextError, NanoKVError

if TYPE_CHECKING:
    from nanokv.lab import trace
    from nanokv.lab.faults.catalogue import Fault

EXAMPLES = (
    'nanokv trace "What is a KV cache?" --open',
    'nanokv trace --prompt "What is a KV cache?" -n 40 -o trace.html --layers 0,5',
    'nanokv trace "Reverse: moon, kettle, blorf" --fault start_pos_restarts -o fault.html',
)
DESCRIPTION = (
    "Record a greedy run and write one self-contained HTML page, with a tour. stdout gets only its "
    "path."
)
# Attention weights grow with the square of the tokens: 512 make about 15 MB for the bundled model.
MOST_TOKENS = 512
NEW_TOKENS = 48
USUAL = "trace.html"  # the default file name
# Scenarios of nanokv.lab.faults that a trace of one prompt can show.
SCENARIOS = ("solo", "long", "two_requests")
ANOTHER = "Count from one to five."  # the earlier request of the scenario two_requests


@dataclass(frozen=True)
class TraceOptions:
    """The options of this command."""

    prompt: PromptOptions
    out: Path
    new_tokens: int
    layers: str | None
    fault: str | None
    repeat: int
    uncached: bool
    model: ModelOptions
    cache: CacheOptions
    output: OutputOptions


def add_arguments(parser: ArgumentParser) -> None:
    """The prompt flags of generate, the page, then the model flags."""
    add_prompt_arguments(parser)
    group = add_page(parser, USUAL)
    group.add_argument(
        "-n",
        "--max-new-tokens",
        metavar="N",
        type=integer(1, 100_000_000),
        default=NEW_TOKENS,
        help=f"stop after this many tokens (default: {NEW_TOKENS})",
    )
    group.add_argument(
        "--layers",
        metavar="I,J",
        help="keep cache and attention of these layers only (default: all)",
    )
    group.add_argument(
        "--fault",
        metavar="NAME",
        help="record the run again with this bug, and show the difference",
    )
    group.add_argument(
        "--repeat",
        metavar="N",
        type=integer(1, 100),
        default=3,
        help="time every step N times and take the median (default: 3)",
    )
    group.add_argument(
        "--no-uncached",
        action="store_true",
        help="do not time the run without a cache, which is slow",
    )
    options.add_model_arguments(parser)


def command_options(args: Namespace) -> TraceOptions:
    """The options of the flags of add_arguments."""
    prompt = prompt_options(args)
    model = options.model_options(args, template=prompt.template)
    return TraceOptions(
        prompt,
        args.out,
        args.max_new_tokens,
        args.layers,
        args.fault,
        args.repeat,
        not args.no_uncached,
        model,
        options.cache_options(args),
        options.output_options(args),
    )


def run(args: Namespace) -> int:
    """Check, record, time, write."""
    given = command_options(args)
    check_place(given.out, USUAL)
    ask_to_replace(args.force, given.out)
    if given.cache.name != "dict":
        raise NanoKVError(
            f"--cache {given.cache.name}: only the dict cache can be traced", "leave out --cache"
        )
    prompt = read_prompt(given.prompt, given.output, EXAMPLES[0])
    fault = find_fault(given.fault)
    loaded = load_model(given.model, given.cache, given.output)
    layers = choose_layers(given.layers, loaded.config)
    ids = encode(given.prompt, loaded, prompt)
    check_size(given, loaded, len(ids), len(layers))
    page = make_page(given, loaded, prompt, ids, layers, fault)
    replace(given.out, page)
    terminal.write_out(f"{given.out}\n")
    if args.open and not webbrowser.open(given.out.resolve().as_uri()):
        terminal.warning("no browser could be started")
    return 0


def make_page(
    given: TraceOptions,
    loaded: Loaded,
    prompt: str,
    ids: list[int],
    layers: list[int],
    fault: "Fault | None",
) -> str:
    """Record the run, record it with the fault, time the steps, build the page."""
    from nanokv.lab import trace

    model = loaded.model
    right = trace.record(model, ids, given.new_tokens, layers)
    wrong = None
    if fault is not None:
        wrong = record_fault(loaded, ids, given.new_tokens, layers, fault)
    terminal.notice(
        f"recorded {len(ids):,} + {len(right.steps):,} tokens, timing the steps", given.output
    )
    costs = trace.measure(model, right, given.repeat, uncached=given.uncached)
    page = trace.build(
        model,
        loaded.tokenizer,
        right,
        costs,
        name=loaded.name,
        prompt=prompt,
        roles=roles(given.prompt, loaded, prompt, ids),
        fault=wrong,
        threads=loaded.threads,
    )
    terminal.notice(terminal.bytes_text(len(page)), given.output)
    return page


def roles(options: PromptOptions, loaded: Loaded, prompt: str, ids: list[int]) -> list[str]:
    """A letter per token of the prompt: the role of its message, or p without a template."""
    if not templated(options, loaded.tokenizer):
        return ["p"] * len(ids)
    from nanokv.chat.history import token_roles

    return [letter for letter, _ in token_roles(loaded.tokenizer, ids, messages(options, prompt))]


# --- faults ---------------------------------------------------------------------------------------


def find_fault(name: str | None) -> "Fault | None":
    """The fault of this name; NanoKVError if a run of one prompt cannot show it."""
    if name is None:
        return None
    from nanokv.lab.faults import FAULTS

    possible = [fault.name for fault in FAULTS.values() if fault.scenario in SCENARIOS]
    if name not in FAULTS:
        hint = f"one of {', '.join(possible)}"
        if close := arguments.nearest(name, possible):
            hint = f"did you mean {close}?"
        raise NanoKVError(f"no fault is called {name!r}", hint)
    if name not in possible:
        raise NanoKVError(
            f"{name} shows only in another situation ({FAULTS[name].scenario}); "
            "a trace is one prompt in one prefill",
            f"one of {', '.join(possible)}",
        )
    return FAULTS[name]


def record_fault(
    loaded: Loaded, ids: list[int], new: int, layers: list[int], fault: "Fault"
) -> "trace.Fault":
    """Record the same run with the fault, after another request if the fault needs one."""
    from nanokv.decoding.generation import generate
    from nanokv.lab import faults, trace

    with faults.inject(fault.name):
        if fault.scenario == "two_requests":
            list(generate(loaded.model, loaded.tokenizer.encode(ANOTHER), max_new_tokens=8))
        run = trace.record(loaded.model, ids, new, layers, may_fail=True)
    if not run.steps:
        raise NanoKVError(
            f"{fault.name} broke the first step, so there is nothing to show: {run.stopped}"
        )
    return trace.Fault(fault.name, f"{fault.title}. {fault.cause} Met in {fault.thread}.", run)


# --- checks before any work -----------------------------------------------------------------------


def choose_layers(text: str | None, config: Config) -> list[int]:
    """`0,5` → [0, 5]; None → all layers."""
    many = config.num_hidden_layers
    if text is None:
        return list(range(many))
    parts = [part.strip() for part in text.split(",")]
    wrong = [
        part for part in parts if not part.isascii() or not part.isdigit() or int(part) >= many
    ]
    if wrong:
        raise NanoKVError(
            f"--layers {text}: {wrong[0]!r} is not a layer from 0 to {many - 1}", "--layers 0"
        )
    return sorted({int(part) for part in parts})


def check_size(given: TraceOptions, loaded: Loaded, prompt: int, layers: int) -> None:
    """NanoKVError if the run exceeds the context, or the page would be too large for a browser."""
    from nanokv.lab.trace import page_bytes

    new = given.new_tokens
    total = prompt + new
    if total > MOST_TOKENS:
        runs = 2 if given.fault else 1
        size = terminal.bytes_text(page_bytes(loaded.config, prompt, new, layers, runs))
        fewer = MOST_TOKENS - prompt
        raise NanoKVError(
            f"{prompt:,} + {new:,} tokens would be a page of about {size}; "
            f"a trace has at most {MOST_TOKENS} tokens",
            f"-n {fewer}" if fewer > 0 else "a shorter prompt",
        )
    if total - 1 > loaded.context:  # the last token is never fed
        raise ContextError(
            f"{prompt:,} + {new:,} tokens do not fit into the context of {loaded.context:,}",
            "a smaller -n",
        )
