"""`nanokv bench`: the table of nanokv/bench.py, with a bar on a terminal, JSON on request, and a word about noise."""

import json
import os
import sys

from nanokv.cli import terminal
from nanokv.cli.arguments import add_model_arguments, integer
from nanokv.cli.loading import load_model
from nanokv.errors import NanoKVError

EXAMPLES = ("nanokv bench", "nanokv bench --contexts 128,512,1024 --repeat 7", "nanokv bench --json > bench.json")
DESCRIPTION = "Prefill and decode speed of a model here, beside the memory bandwidth measured in the same run."
NOISY = 0.15  # spread of the decode times from which on the table says so


def add_arguments(parser) -> None:
    """What to measure."""
    parser.add_argument("--contexts", default="128,1024", metavar="N,N", help="cached tokens (default: %(default)s)")
    parser.add_argument("--repeat", type=integer(1), default=5, help="rounds; medians are shown (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_model_arguments(parser)


def run(args) -> int:
    """Measure, then print what was finished; Ctrl-C prints the rounds that are done and leaves with 130."""
    contexts = parse_contexts(args.contexts)
    loaded = load_model(args)
    from nanokv.bench import STEPS, measure, read_bandwidth, summarize

    longest = loaded.context - STEPS
    if max(contexts) > longest:
        raise NanoKVError(f"--contexts {max(contexts):,} leaves no room for {STEPS} steps: at most {longest:,}")
    samples = []
    with terminal.Interrupt() as stop:
        bandwidth = read_bandwidth()
        for sample in measure(loaded.model, loaded.cache_name, contexts, args.repeat):
            samples.append(sample)
            progress(len(samples), args.repeat * len(contexts), args)
            if stop.requested:
                break
    rows = summarize(loaded.model, loaded.cache_name, samples, bandwidth)
    (print_json if args.json else print_table)(loaded, rows, bandwidth)
    stop.finish()
    return 130 if stop.requested else 0


def parse_contexts(text: str) -> list[int]:
    """"128,1024" → [128, 1024]."""
    try:
        contexts = [int(part) for part in text.split(",")]
    except ValueError:
        contexts = []
    if not contexts or min(contexts) < 1:
        raise NanoKVError(f"--contexts {text!r} is not a list of numbers ≥ 1", hint="--contexts 128,1024")
    return contexts


def progress(done: int, total: int, args) -> None:
    """One line that is written over, on a terminal only."""
    if terminal.is_tty(sys.stderr) and not args.quiet:
        bar = "#" * (20 * done // total)
        terminal.write_err(f"\r[{bar:<20}] {done}/{total}" + ("\n" if done == total else ""))


def print_json(loaded, rows, bandwidth) -> None:
    """Raw figures: seconds and bytes."""
    table = [vars(row) | {"gigabytes_per_second": row.gigabytes_per_second, "share": row.share} for row in rows]
    report = {"model": loaded.name, "dtype": loaded.dtype_name, "threads": loaded.threads, "bandwidth": bandwidth}
    terminal.write_out(json.dumps(report | {"rows": table}) + "\n")


def print_table(loaded, rows, bandwidth) -> None:
    """tok/s never without GB/s and the share of the limit."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    machine = f"{loaded.threads} threads · read bandwidth {bandwidth / 1e9:.1f} GB/s (measured now)"
    head = f"{loaded.name} {loaded.dtype_name} · {machine}"
    noisy = max((row.spread for row in rows), default=0) > NOISY
    noise = f" · noisy: load {load:.1f}, spread ±{max(row.spread for row in rows) / 2:.0%}" if noisy else ""
    terminal.write_out(head + noise + "\n")
    columns = ("cache", "context", "prefill tok/s", "decode tok/s", "ms/token", "GB/s", "% of limit")
    terminal.write_out("{:<10}{:>8}{:>15}{:>14}{:>10}{:>8}{:>12}\n".format(*columns))
    for row in rows:
        terminal.write_out(
            f"{row.cache:<10}{row.context:>8,}{row.context / row.prefill_s:>15,.0f}{1 / row.decode_s:>14,.1f}"
            f"{row.decode_s * 1e3:>10.2f}{row.gigabytes_per_second:>8.2f}{row.share:>12.1%}\n"
        )
