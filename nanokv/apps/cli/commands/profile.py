"""`nanokv profile`: the time of each part of a prefill and a decode step, next to its minimum.

With --start: the time of each part of a program start.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.arguments import integer
from nanokv.apps.cli.common.loading import load_model, plan_model
from nanokv.apps.cli.common.options import (
    CACHE,
    add_model_arguments,
    cache_options,
    model_options,
    output_options,
)
from nanokv.apps.cli.common.plan import Loaded
from nanokv.apps.cli.common.random_model import RANDOM, load_random
from nanokv.apps.cli.common.text import to_json
from nanokv.errors import NanoKVError

if TYPE_CHECKING:
    from nanokv.lab.bench.profile import Phase

EXAMPLES = (
    "nanokv profile",
    "nanokv profile --weights plain",
    "nanokv profile -m qwen3-0.6b-random --tokens 1024",
    "nanokv profile --start",
)
DESCRIPTION = (
    "Where one prefill and one decode step spend their time, next to the shortest time that this "
    "machine allows. With --start: where `nanokv generate` spends its time from the command to the "
    "first token."
)


def add_arguments(parser: ArgumentParser) -> None:
    """What to measure."""
    parser.add_argument(
        "--tokens", type=integer(1), default=512, metavar="N", help="prompt length (default: 512)"
    )
    parser.add_argument(
        "--weights",
        default="fast",
        choices=("plain", "fast", "int8", "int4"),
        help="as in bench (default: fast)",
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="from the command to the first token, in real processes",
    )
    parser.add_argument(
        "--repeat",
        type=integer(1, 100),
        default=5,
        metavar="N",
        help="runs of --start (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_model_arguments(parser, CACHE)


def run(args: Namespace) -> int:
    """Measure, and print a table for prefill and one for decode; or the table of --start."""
    wanted = model_options(args)
    cache = cache_options(args)
    output = output_options(args)
    if args.start:
        from nanokv.apps.cli.bench.start import run as profile_start

        if wanted.source in RANDOM:
            raise NanoKVError(
                f"--start reads a folder, and {wanted.source} has random weights",
                "nanokv profile --start -m FOLDER",
            )
        plan = plan_model(wanted, cache, output)
        return profile_start(plan, wanted.device, args.weights, args.repeat, args.json)
    if wanted.source in RANDOM:
        loaded = load_random(wanted, cache)
    else:
        loaded = load_model(wanted, cache, output)
    if args.tokens + 16 > loaded.context:
        raise NanoKVError(
            f"--tokens {args.tokens:,} leaves no room to decode: at most {loaded.context - 16:,}"
        )
    found = measure(loaded, args.weights, args.tokens)
    if args.json:
        terminal.write_out(to_json([asdict(phase) for phase in found]) + "\n")
        return 0
    terminal.write_out(
        f"{loaded.name} {loaded.dtype_name} {args.weights} · cache {loaded.cache_name}\n"
    )
    for phase in found:
        terminal.write_out("\n".join(["", phase.name, *table(phase)]) + "\n")
    return 0


def measure(loaded: Loaded, weights: str, tokens: int) -> "list[Phase]":
    """The phases prefill and decode, with the times of their parts."""
    from nanokv.fast import optimize
    from nanokv.lab.bench.profile import phases
    from nanokv.lab.bench.runners import Ours

    model = loaded.model
    if weights == "fast":
        model = optimize(model)
    elif weights != "plain":
        model = optimize(model, weights)
    read = Ours(model, weights, loaded.cache_name, {}, 1, loaded.dtype).weight_bytes
    return phases(model, loaded.cache_name, loaded.cache_options, tokens, read, loaded.dtype)


def table(phase: "Phase") -> list[str]:
    """A row per part, then their sum."""
    rows = [(f"  {part.name}", part.seconds, part.floor, part.work) for part in phase.parts]
    rows.append(("  together", phase.seconds, phase.floor, ""))
    cells = [
        (name, f"{1e3 * seconds:.3f}", f"{1e3 * floor:.3f}", work)
        for name, seconds, floor, work in rows
    ]
    head = ("", "ms", "floor ms", "work")
    return layout.table(head, cells, layout.columns(sys.stdout), left=(0, 3))
