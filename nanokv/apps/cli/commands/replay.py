"""`nanokv replay`: how much of a trace's prompts a prefix cache would have saved, without a model.

The simulation is in nanokv/lab/replay. Every row of the table is one index, page size and memory;
every column a policy of eviction.
"""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.arguments import integer, nearest, real
from nanokv.apps.cli.common.options import output_options
from nanokv.apps.cli.common.text import to_json
from nanokv.errors import NanoKVError
from nanokv.lab.replay import (
    INDEXES,
    POLICIES,
    BlockTrace,
    Prices,
    Replay,
    Result,
    Setup,
    prices,
    read,
)
from nanokv.lab.replay.traces import BLOCK, Trace

if TYPE_CHECKING:
    from nanokv.text.tokenizer import Tokenizer

EXAMPLES = (
    "nanokv replay conversation_trace.jsonl",
    "nanokv replay trace.jsonl.gz --index flat,hash,radix --policy lru,fifo,belady",
    "nanokv replay chats.jsonl -m tiny --page 1,16,64 --tokens 10000,all",
)
DESCRIPTION = (
    "Replay the requests of a JSONL file against a prefix cache that exists on paper only: how "
    "much of the prompts it would have had, by memory, page size, index and policy of eviction. A "
    'line is {"hash_ids": […], "input_length": N}, the form of Mooncake\'s traces, '
    '{"tokens": […]} or {"messages": […]}; the file may be gzipped.'
)
PAGES = (1_000, 10_000, 50_000, None)
PAGE = 16  # tokens; of a trace of tokens


@dataclass(frozen=True)
class ReplayOptions:
    """The options of this command."""

    file: Path
    block: int
    model: str | None
    indexes: list[str]
    policies: list[str]
    page: list[int]  # empty: the trace's own
    tokens: list[int | None] | None  # memory; None: of PAGES
    waiting: int
    snapshot: int
    weight: int
    prices: Prices
    json: bool


def add_arguments(parser: ArgumentParser) -> None:
    """The trace, the server, the prices."""
    parser.add_argument("file", metavar="TRACE", type=Path, help="the requests, one per line")
    parser.add_argument(
        "--block", metavar="N", type=integer(1), default=BLOCK, help=f"tokens per id ({BLOCK})"
    )
    parser.add_argument("-m", "--model", metavar="NAME", help="whose tokenizer reads messages")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--index",
        type=names(INDEXES),
        default=["flat"],
        help=f"one or more of {', '.join(INDEXES)}, comma-separated (default: flat)",
    )
    server.add_argument(
        "--policy",
        type=names(POLICIES),
        help=f"one or more of {', '.join(POLICIES)}, comma-separated (default: lru,belady)",
    )
    server.add_argument(
        "--page", type=several(1), default=[], help=f"tokens per page ({PAGE}; of ids: a block)"
    )
    server.add_argument(
        "--tokens",
        type=several(1),
        help="memory in tokens, rounded down to pages, or all (1,000, 10,000 and 50,000 pages, "
        "all)",
    )
    server.add_argument(
        "--waiting",
        metavar="N",
        type=integer(1, 4096),
        default=1,
        help="of N waiting requests the one with the longest cached prefix is next (1: as they "
        "came)",
    )
    server.add_argument(
        "--snapshot",
        metavar="N",
        type=integer(1),
        default=0,
        help="a recurrent model: its state is kept every N tokens, and a prompt is reused up to a "
        "kept state",
    )
    server.add_argument(
        "--weight",
        metavar="N",
        type=integer(0),
        default=0,
        help="a snapshot takes as many bytes as the keys and values of N tokens (0)",
    )
    add_price_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def add_price_arguments(parser: ArgumentParser) -> None:
    """Dollars per million tokens."""
    group = parser.add_argument_group("prices", f"$ per million tokens: {prices.DATED}")
    usual = Prices()
    for flag, value, about in (
        ("--price", usual.input, "a prompt token without a cache"),
        ("--price-cached", usual.cached, "a reused token"),
        ("--price-write", usual.write, "a token that is put into the cache"),
    ):
        group.add_argument(
            flag, metavar="X", type=real(0), default=value, help=f"{about} ({value:.2f})"
        )


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of `known`, separated by commas."""

    def convert(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                close = nearest(name, known)
                hint = f"; did you mean {close}?" if close else ""
                raise ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}{hint}")
        return list(dict.fromkeys(text.split(",")))

    return convert


def several(low: int) -> Callable[[str], list[int | None]]:
    """An argparse type: whole numbers, separated by commas; None for `all`."""
    number = integer(low)

    def convert(text: str) -> list[int | None]:
        parts = dict.fromkeys(text.split(","))
        return [None if part == "all" else number(part) for part in parts]

    return convert


def replay_options(args: Namespace) -> ReplayOptions:
    """The options of the flags of add_arguments."""
    usual = ["lru", "belady"] if args.waiting == 1 else ["lru"]
    if None in args.page:
        raise NanoKVError("--page all", "pages of a number of tokens: --page 16")
    if args.weight and not args.snapshot:
        raise NanoKVError("--weight is the size of a snapshot", "--snapshot N keeps snapshots")
    return ReplayOptions(
        args.file,
        args.block,
        args.model,
        args.index,
        args.policy or usual,
        args.page,
        args.tokens,
        args.waiting,
        args.snapshot,
        args.weight,
        Prices(args.price, args.price_cached, args.price_write),
        args.json,
    )


def run(args: Namespace) -> int:
    """Read the trace, run every setup, print the table."""
    given = replay_options(args)
    trace = read(given.file, given.block, encoder(given.model))
    run_one = Replay(trace)
    rows = [[run_one(setup) for setup in row] for row in setups(given, trace)]
    if given.json:
        terminal.write_out(to_json(report(given, trace, rows)) + "\n")
        return 0
    style = terminal.Style(sys.stdout, output_options(args).color)
    terminal.write_out(text(given, trace, rows, style, layout.columns(sys.stdout)))
    return 0


class Talks:
    """Messages to token ids, by the chat template and the tokenizer of a model."""

    def __init__(self, tokenizer: "Tokenizer"):
        self.tokenizer = tokenizer

    def __call__(self, messages: list[dict], tools: list[dict] | None) -> list[int]:
        return self.tokenizer.encode(self.tokenizer.render(messages, tools))


def encoder(model: str | None) -> Talks | None:
    """The tokenizer of a model, if one is named."""
    if model is None:
        return None
    import weights_loader
    from nanokv.text.tokenizer import Tokenizer

    return Talks(Tokenizer.from_folder(weights_loader.resolve(model)))


def setups(given: ReplayOptions, trace: Trace) -> Iterator[list[Setup]]:
    """The rows of the table: the setups of one index, page size and memory."""
    own = trace.block if isinstance(trace, BlockTrace) else PAGE
    for index in given.indexes:
        for page in given.page or [own]:
            memory = list(PAGES)
            if given.tokens is not None:
                memory = [None if n is None else n // page for n in given.tokens]
            for pages in dict.fromkeys(memory):  # two memories may be as many pages
                row = Setup(
                    page,
                    pages,
                    index,
                    window=given.waiting,
                    snapshot=given.snapshot,
                    weight=given.weight,
                )
                if row.capacity == 0:
                    raise too_small(row)
                yield [replace(row, policy=policy) for policy in given.policies]


def too_small(setup: Setup) -> NanoKVError:
    """The error for a memory without room for one page."""
    what = f"one page of {setup.page:,} tokens"
    needed = setup.page
    if setup.snapshot:
        what += f" and its part of a snapshot of {setup.weight:,} tokens every {setup.snapshot:,}"
        needed *= -(-(setup.snapshot + setup.weight) // setup.snapshot)
    return NanoKVError(f"a memory without room for {what}", f"--tokens {needed}, or more")


# --- text -----------------------------------------------------------------------------------------


def text(
    given: ReplayOptions,
    trace: Trace,
    rows: list[list[Result]],
    style: terminal.Style,
    width: int,
) -> str:
    """What was replayed, and the table of hit rates."""
    first = rows[0][0]
    cost = given.prices.without(first)
    about = [
        "1 request" if first.requests == 1 else f"{first.requests:,} requests",
        f"{first.tokens:,} prompt tokens",
        f"${cost:,.2f} without reuse",
    ]
    if given.waiting > 1:
        about.append(f"longest cached prefix of {given.waiting:,} first")
    if given.snapshot:
        about.append(f"a snapshot every {given.snapshot:,} tokens")
    note = f"reused, % of the prompts' {trace.unit}; $ with {given.policies[0]}: {prices.DATED}"
    if given.prices != Prices():
        note = f"reused, % of the prompts' {trace.unit}; $ with {given.policies[0]}"
    head = ["index", "page", "pages", "tokens", *given.policies, "$"]
    cells = [row_cells(given, trace, row) for row in rows]
    lines = [layout.joined(about, width), style.dim(layout.paragraph(note, width)), ""]
    return "\n".join([*lines, *layout.table(head, cells, width)]) + "\n"


def row_cells(given: ReplayOptions, trace: Trace, row: list[Result]) -> list[str]:
    setup = row[0].setup
    held = ["all", "all"]
    if setup.pages is not None:
        held = [f"{setup.pages:,}", f"{setup.pages * setup.page:,}"]
    rates = [f"{100 * rate(trace, result):.1f}" for result in row]
    return [
        setup.index,
        f"{setup.page:,}",
        *held,
        *rates,
        f"{given.prices.with_cache(row[0]):,.2f}",
    ]


def rate(trace: Trace, result: Result) -> float:
    """The hit rate in the trace's own unit."""
    return result.rate if trace.unit == "pages" else result.token_rate


def report(given: ReplayOptions, trace: Trace, rows: list[list[Result]]) -> dict:
    """The same numbers as `text`, and the counts behind them."""
    return {
        "trace": str(given.file),
        "requests": rows[0][0].requests,
        "unit": trace.unit,
        "prices": asdict(given.prices),
        "runs": [
            asdict(result)
            | {"rate": result.rate, "token_rate": result.token_rate}
            | {
                "cost": given.prices.with_cache(result),
                "cost_without": given.prices.without(result),
            }
            for row in rows
            for result in row
        ],
    }
