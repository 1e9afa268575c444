"""`nanokv chat`: starts the interactive chat or the scripted one.

If stdin and stdout are terminals, the interactive prompt runs (chat/repl.py). Otherwise stdin is a
script with one line per turn (chat/pipe.py). This file is imported before arguments are parsed:
no torch, no prompt_toolkit.
"""

import sys
from argparse import Namespace

from nanokv.apps.cli.chat.options import add_arguments, command_options
from nanokv.apps.cli.common import layout
from nanokv.apps.cli.common.terminal import (
    is_interactive,
    loading,
    sanitize_line,
    write_err,
    write_out,
)
from nanokv.parallel.group import ALONE, Ranks

EXAMPLES = (
    "nanokv chat",
    "nanokv chat -m Qwen/Qwen3-0.6B --thinking fold",
    "printf 'Hi\\nWho are you?\\n' | nanokv chat",
)
DESCRIPTION = (
    "Talk with a model. Its KV cache is kept across turns and shown after every answer. With piped "
    "stdin each line is one turn and each answer is one line; a line /help is then a message too. "
    "For a whole document as one prompt use `nanokv generate`.\n"
    "Lines typed during an answer run one by one after it. Ctrl-C stops the answer and keeps the "
    "typed text in the input line, unsent."
)
__all__ = ["add_arguments", "command_options", "run"]
RANKS = "led"  # the other ranks follow rank 0


def run(args: Namespace, ranks: Ranks = ALONE) -> int:
    """Run the chat that fits the streams, or list the sessions; returns the exit code."""
    given = command_options(args)
    if args.list:
        return list_sessions()
    with loading():
        if is_interactive() and not given.jsonl:
            from nanokv.apps.cli.chat.repl import run as talk
        else:
            from nanokv.apps.cli.chat.pipe import run as talk
    return talk(given, ranks)


def list_sessions() -> int:
    """Print the saved sessions on stdout, one per line."""
    import time

    from nanokv.apps.cli.chat.transcript import listing, state_folder

    folder = state_folder() / "sessions"
    rows = listing(folder)
    if not rows:
        write_err(f"no saved session in {sanitize_line(str(folder))}\n")
    width = layout.columns(sys.stdout, None)
    for name, modified, turns, model, words in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified))
        unit = "turns" if turns != 1 else "turn "
        line = f"{name}  {when}  {turns:>3} {unit}  {model}  {words[:50]}"
        write_out(layout.paragraph(sanitize_line(line), width, rest="    ") + "\n")
    return 0
