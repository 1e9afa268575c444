"""`nanokv blend`: reuse of a text that is not a prefix, its errors by layer and what it forgets.

nanokv/lab/study/blend.py joins and computes, nanokv/lab/bench/blend.py measures.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from nanokv.apps.cli.common import layout, terminal
from nanokv.apps.cli.common.arguments import environment, integer, real
from nanokv.apps.cli.common.loading import load_model
from nanokv.apps.cli.common.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    output_options,
)
from nanokv.apps.cli.common.text import to_json

if TYPE_CHECKING:
    from nanokv.lab.bench.blend import Row

EXAMPLES = (
    "nanokv blend",
    "nanokv blend --share 40",
    "nanokv blend -m smollm2 --talks 3",
)
DESCRIPTION = (
    "Reuse of a text that is not a prefix: parts of a talk are read alone, their keys are rotated "
    "to the new positions, and a share of the tokens is computed again (CacheBlend, EPIC). Prints "
    "the error of keys and values against a full prefill (`key 5`: of the keys in layer 5), and how "
    "many of the told facts the model still knows."
)
TITLES = {
    "whole": "parts that are cut between the facts",
    "cut": "parts that are cut inside each fact, before its value",
}


@dataclass(frozen=True)
class BlendOptions:
    """The options of this command."""

    model: ModelOptions
    share: float  # 0 to 1
    talks: int
    json: bool
    output: OutputOptions


def add_arguments(parser: ArgumentParser) -> None:
    """The model, the share, the number of talks."""
    parser.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default=environment("NANOKV_MODEL") or "tiny",
        help="a chat model; it is computed on the CPU in fp32 (default: $NANOKV_MODEL, else tiny)",
    )
    parser.add_argument(
        "--share",
        metavar="P",
        type=real(0, 100),
        default=15.0,
        help="percent of the tokens behind the first part that are computed again, in the rows most "
        "changed, first of each part and evenly (15)",
    )
    parser.add_argument(
        "--talks",
        metavar="N",
        type=integer(1, 1000),
        default=5,
        help="talks of six facts each (5)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def command_options(args: Namespace) -> BlendOptions:
    """The options of the flags of add_arguments."""
    model = ModelOptions(args.model, dtype="float32", device="cpu")
    return BlendOptions(model, args.share / 100, args.talks, args.json, output_options(args))


def run(args: Namespace) -> int:
    """A table for each way to cut."""
    given = command_options(args)
    loaded = load_model(given.model, CacheOptions(), given.output)
    from nanokv.lab.bench.blend import rows  # imports torch, which --help must not

    found = list(rows(loaded.model, loaded.tokenizer, given.share, given.talks))
    if given.json:
        whole = {"model": given.model.source, "share": given.share, "talks": given.talks}
        terminal.write_out(to_json(whole | {"rows": [asdict(row) for row in found]}) + "\n")
        return 0
    width = layout.columns(sys.stdout)
    tables = []
    for cut, title in TITLES.items():
        shown = [row for row in found if row.cut == cut]
        tables.append("\n".join([title, *table(shown, width)]))
    terminal.write_out("\n\n".join(tables) + "\n")
    return 0


def table(rows: "list[Row]", width: int) -> list[str]:
    """A row per way: errors in %, of four layers at most."""
    last = len(rows[0].keys) - 1
    layers = sorted({0, 1, last // 2, last})
    head = ["", "computed %", *(f"key {i}" for i in layers), f"value {last}", "known", "nats"]
    cells = []
    for row in rows:
        keys = [f"{100 * row.keys[i]:.1f}" for i in layers]
        known = f"{row.known}/{row.asked}"
        cells.append(
            [
                row.way,
                f"{100 * row.computed:.1f}",
                *keys,
                f"{100 * row.values[last]:.1f}",
                known,
                f"{row.nats:.2f}",
            ]
        )
    return layout.table(head, cells, width)
