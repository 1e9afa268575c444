"""`nanokv live`: writes one HTML page that runs the bundled model and shows its KV cache.

stdout carries the path of the page and nothing else.
"""

import webbrowser
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path

from nanokv.apps.cli.common import options, terminal
from nanokv.apps.cli.common.files import add_page, ask_to_replace, check_place, replace
from nanokv.apps.cli.common.options import OutputOptions

EXAMPLES = ("nanokv live --open", "nanokv live -o live.html")
DESCRIPTION = (
    "Write one page in which the bundled model answers, without a server or a network. The page "
    "shows its KV cache token by token, the same answer without a cache, and the effect of one "
    "change. stdout has only the page's path."
)
USUAL = "live.html"


@dataclass(frozen=True)
class LiveOptions:
    """The options of this command."""

    out: Path
    show: bool
    output: OutputOptions


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of a page."""
    add_page(parser, USUAL)


def command_options(args: Namespace) -> LiveOptions:
    """The options of the flags of add_arguments."""
    return LiveOptions(args.out, args.open, options.output_options(args))


def run(args: Namespace) -> int:
    """Check, build, write."""
    given = command_options(args)
    check_place(given.out, USUAL)
    ask_to_replace(args.force, given.out)
    from nanokv.lab import live

    page = live.build()
    replace(given.out, page)
    terminal.write_out(f"{given.out}\n")
    terminal.notice(terminal.bytes_text(len(page)), given.output)
    if given.show and not webbrowser.open(given.out.resolve().as_uri()):
        terminal.warning("no browser could be started")
    return 0
