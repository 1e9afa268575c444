"""`nanokv reuse`: what a change of a conversation costs.

nanokv/lab/replay/changes.py has the changes, served.py sends them through an engine.
"""

import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.arguments import Parser, environment, integer
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    output_options,
)
from nanokv.apps.cli.common.text import to_json
from nanokv.lab.replay.changes import (
    RECORDED,
    Requests,
    Talk,
    Writer,
    changes_of,
    read_talk,
    reused,
)

if TYPE_CHECKING:
    from nanokv.model import Transformer
    from nanokv.text.tokenizer import Tokenizer

EXAMPLES = (
    "nanokv reuse",
    "nanokv reuse --time 5",
    "nanokv reuse talk.json -m Qwen/Qwen3-0.6B --page 64",
)
DESCRIPTION = (
    "What a change of a conversation costs: the tokens of the next prompt that a prefix cache has, "
    "and those that are computed again, after the tools have changed, a clock, a turn in the "
    "middle, after a compaction, and where the template drops thoughts. A talk is a JSON file: "
    '{"messages": […], "tools": […], "summary": "…"}.'
)
INDEXES = ("hash", "radix")
START = "(nothing held)"


@dataclass(frozen=True)
class ReuseOptions:
    """The options of this command."""

    talks: list[Path]
    model: ModelOptions
    page: int
    repeat: int  # 0: no times
    json: bool
    output: OutputOptions


def add_arguments(parser: Parser) -> None:
    """The talks, the model, the page."""
    recorded = sorted(RECORDED.glob("*.json"))
    names = " and ".join(path.stem for path in recorded)
    parser.add_argument(
        "talks",
        nargs="*",
        metavar="TALK",
        type=Path,
        default=recorded,
        help=f"files with a conversation each (default: two of our own, {names})",
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default=environment("NANOKV_MODEL") or "tiny",
        help="whose template and tokenizer write the prompts; only --time needs its weights "
        "(default: $NANOKV_MODEL, else tiny)",
    )
    parser.add_argument(
        "--page", metavar="N", type=integer(1), default=16, help="tokens per page (16)"
    )
    parser.add_argument(
        "--time",
        metavar="N",
        type=integer(1, 1000),
        default=0,
        help="also the milliseconds to the first token, through an engine with each index: the "
        "median of N rounds",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def command_options(args: Namespace) -> ReuseOptions:
    """The options of the flags of add_arguments."""
    return ReuseOptions(
        args.talks,
        ModelOptions(args.model),
        args.page,
        args.time,
        args.json,
        output_options(args),
    )


@dataclass(frozen=True)
class Row:
    """One change of one talk."""

    change: str
    prompt: int  # tokens
    reused: dict[str, int]  # by index
    ms: dict[str, float]  # by index; empty without --time

    @property
    def computed(self) -> int:
        return self.prompt - self.reused[INDEXES[0]]


def run(args: Namespace) -> int:
    """A table per talk."""
    given = command_options(args)
    talks = {path.stem: read_talk(path) for path in given.talks}
    if given.repeat:
        loaded = load_model(given.model, CacheOptions(), given.output)
        writer = Writer(loaded.tokenizer)
        found = {name: timed(given, loaded.model, writer, talk) for name, talk in talks.items()}
    else:
        writer = Writer(tokenizer_of(given.model.source))
        found = {name: counted(given, writer, talk) for name, talk in talks.items()}
    if given.json:
        terminal.write_out(to_json(report(given, found)) + "\n")
        return 0
    tables = [table(name, rows, layout.columns(sys.stdout)) for name, rows in found.items()]
    terminal.write_out("\n\n".join(tables) + "\n")
    return 0


def tokenizer_of(model: str) -> "Tokenizer":
    """The tokenizer and the chat template of a model, without its weights."""
    import weights_loader
    from nanokv.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(weights_loader.resolve(model))


def requests_of(writer: Writer, talk: Talk) -> dict[str, Requests]:
    """The requests of every change, and first the prompt that finds nothing."""
    changes = changes_of(talk)
    found = {name: writer.requests(change, talk) for name, change in changes.items()}
    return {START: next(iter(found.values()))._replace(held=[])} | found


def counted(given: ReuseOptions, writer: Writer, talk: Talk) -> list[Row]:
    """The rows of a talk, from the tokens alone."""
    rows = []
    for name, one in requests_of(writer, talk).items():
        tokens = {index: reused(one, given.page, index) for index in INDEXES}
        rows.append(Row(name, len(one.prompt), tokens, {}))
    return rows


def timed(given: ReuseOptions, model: "Transformer", writer: Writer, talk: Talk) -> list[Row]:
    """The rows of a talk, from an engine with each index."""
    from nanokv.lab.replay.served import measure

    requests = requests_of(writer, talk)
    found = measure(model, requests, given.page, INDEXES, given.repeat)
    rows = []
    for name, one in requests.items():
        tokens = {index: served.reused for index, served in found[name].items()}
        ms = {index: 1e3 * served.median for index, served in found[name].items()}
        rows.append(Row(name, len(one.prompt), tokens, ms))
    return rows


def table(name: str, rows: list[Row], width: int) -> str:
    """The rows of one talk. Both indexes find the same tokens; their times are beside each other."""
    times = [index for index in INDEXES if index in rows[0].ms]
    head = ["change", "prompt", "reused", "computed", "computed %", *(f"{i} ms" for i in times)]
    cells = []
    for row in rows:
        found = "/".join(f"{n:,}" for n in dict.fromkeys(row.reused.values()))
        share = f"{100 * row.computed / row.prompt:.1f}"
        ms = [f"{row.ms[index]:.1f}" for index in times]
        cells.append([row.change, f"{row.prompt:,}", found, f"{row.computed:,}", share, *ms])
    return "\n".join([terminal.sanitize_line(name), *layout.table(head, cells, width)])


def report(given: ReuseOptions, found: dict[str, list[Row]]) -> dict:
    """The JSON object of --json."""
    talks = {
        name: [asdict(row) | {"computed": row.computed} for row in rows]
        for name, rows in found.items()
    }
    return {"model": given.model.source, "page": given.page, "talks": talks}
