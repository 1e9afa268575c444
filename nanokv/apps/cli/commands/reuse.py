"""`nanokv reuse`: what a change of a conversation costs.

nanokv/lab/replay/changes.py has the changes, served.py sends them through an engine.
"""

import sys
from argparse import Namespace
from collections import Counter
from dataclasses import asdict, dataclass
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
from nanokv.config import Config
from nanokv.errors import ConfigError, NanoKVError
from nanokv.lab.replay.changes import (
    Requests,
    Talk,
    Writer,
    bundled,
    changes_of,
    left_out,
    read_talk,
    reused,
    talk_file,
)
from weights_loader.strict import read_object

if TYPE_CHECKING:
    from nanokv.model import Transformer
    from nanokv.text.tokenizer import Tokenizer

EXAMPLES = (
    "nanokv reuse",
    "nanokv reuse agent --time 5",
    "nanokv reuse talk.json -m Qwen/Qwen3-0.6B --page 64",
)
DESCRIPTION = (
    "What a change of a conversation costs: the tokens of the next prompt that a prefix cache has, "
    "and those that are computed again, after the tools have changed, a clock, a turn in the "
    "middle, after a compaction, and where the template drops thoughts. A talk is a JSON file: "
    '{"messages": […], "tools": […], "summary": "…"}. It contains an answer and ends with a '
    "message that is not answered yet."
)
INDEXES = ("hash", "radix")
START = "(nothing held)"


@dataclass(frozen=True)
class ReuseOptions:
    """The options of this command."""

    talks: list[str]  # bundled names, or paths
    model: ModelOptions
    page: int
    repeat: int  # 0: no times
    json: bool
    output: OutputOptions


def add_arguments(parser: Parser) -> None:
    """The talks, the model, the page."""
    names = list(bundled())
    parser.add_argument(
        "talks",
        nargs="*",
        metavar="TALK",
        default=names,
        help=f"files with a conversation each, or bundled ones by name: {', '.join(names)} "
        "(default: all bundled ones)",
    )
    parser.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default=environment("NANOKV_MODEL") or "tiny",
        help="whose template and tokenizer write the prompts; without --time, a folder without "
        "weights is enough "
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
    names = named(given.talks)
    talks = {name: read_talk(talk_file(talk)) for name, talk in names.items()}
    model = None
    if given.repeat:
        loaded = load_model(given.model, CacheOptions(), given.output)
        model, writer = loaded.model, Writer(loaded.tokenizer)
    else:
        writer = Writer(tokenizer_of(given.model.source))
        warn_of_states(given.model.source)
    found = {name: rows_of(given, model, writer, names[name], talk) for name, talk in talks.items()}
    if given.json:
        terminal.write_out(to_json(report(given, found)) + "\n")
        return 0
    width = layout.columns(sys.stdout)
    tables = [
        "\n".join(table(name, found[name], width) + missing(talk, width))
        for name, talk in talks.items()
    ]
    terminal.write_out("\n\n".join(tables) + "\n")
    return 0


def named(talks: list[str]) -> dict[str, str]:
    """The talks by their name in the output: the stem, or what was given where stems are equal."""
    stems = {given: talk_file(given).stem for given in talks}
    count = Counter(stems.values())
    return {stem if count[stem] == 1 else given: given for given, stem in stems.items()}


def rows_of(
    given: ReuseOptions, model: "Transformer | None", writer: Writer, file: str, talk: Talk
) -> list[Row]:
    """The rows of a talk. An error names its file."""
    try:
        if model is None:
            return counted(given, writer, talk)
        return timed(given, model, writer, talk)
    except NanoKVError as error:
        raise NanoKVError(f"{file}: {error}", error.hint) from None


def tokenizer_of(model: str) -> "Tokenizer":
    """The tokenizer and the chat template of a model, without its weights."""
    import weights_loader
    from nanokv.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(weights_loader.resolve(model))


def warn_of_states(model: str) -> None:
    """The tokens alone do not say where an engine has the states of a model.

    No warning about models that nanokv cannot run, which have no engine here.
    """
    import weights_loader

    try:
        config = Config.from_dict(read_object(weights_loader.config_file(model), ConfigError))
    except ConfigError:
        return
    if config.states:
        terminal.warning(
            f"{config.states} layers of {config.family.title} have {config.state_name}, so an "
            "engine reuses less than this: it resumes at snapshots. --time N counts the tokens"
        )


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


def table(name: str, rows: list[Row], width: int) -> list[str]:
    """The rows of one talk. Both indexes find the same tokens; their times are beside each other."""
    times = [index for index in INDEXES if index in rows[0].ms]
    head = ["change", "prompt", "reused", "computed", "computed %", *(f"{i} ms" for i in times)]
    cells = []
    for row in rows:
        found = "/".join(f"{n:,}" for n in dict.fromkeys(row.reused.values()))
        share = f"{100 * row.computed / row.prompt:.1f}"
        ms = [f"{row.ms[index]:.1f}" for index in times]
        cells.append([row.change, f"{row.prompt:,}", found, f"{row.computed:,}", share, *ms])
    return [terminal.sanitize_line(name), *layout.table(head, cells, width)]


def missing(talk: Talk, width: int) -> list[str]:
    """The changes that this talk cannot have, as lines below the table."""
    reasons = [f"{name} ({reason})" for name, reason in left_out(talk).items()]
    if not reasons:
        return []
    return [layout.paragraph(f"left out: {', '.join(reasons)}", width)]


def report(given: ReuseOptions, found: dict[str, list[Row]]) -> dict:
    """The JSON object of --json."""
    talks = {
        name: [asdict(row) | {"computed": row.computed} for row in rows]
        for name, rows in found.items()
    }
    return {"model": given.model.source, "page": given.page, "talks": talks}
