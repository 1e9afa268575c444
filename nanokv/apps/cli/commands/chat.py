"""`nanokv chat`: flags, and the choice between the two ways to hold a conversation.

A person at both ends gets the prompt (chat_repl.py); anything else is a script of a conversation, one line per turn
(chat_pipe.py). This file is imported before arguments are parsed: no torch, no prompt_toolkit.
"""

import sys

from nanokv.apps.cli.common import answer, beams, layout, speculation
from nanokv.apps.cli.common.arguments import (
    CACHE,
    add_model_arguments,
    add_sampling_arguments,
    add_speed_arguments,
    add_system_argument,
    add_template_argument,
)
from nanokv.apps.cli.common.terminal import is_interactive, loading, sanitize_line, write_err, write_out

EXAMPLES = (
    "nanokv chat",
    "nanokv chat -m Qwen/Qwen3-0.6B --thinking fold",
    "printf 'Hi\\nWho are you?\\n' | nanokv chat",
)
DESCRIPTION = (
    "Talk with a model; its KV cache lives across turns and is shown after every answer. Piped stdin: one line is one "
    "turn, one line is one answer; there a line /help is a message too. A whole document as one prompt is the job of "
    "`nanokv generate`.\n"
    "What is typed while an answer comes is kept and carried out line by line after it; Ctrl-C stops the answer and "
    "leaves what was typed in the input line, unsent."
)
RANKS = "led"  # the others do what rank 0 tells them


def add_arguments(parser):
    """Flags of chat beyond the general ones."""
    add_model_arguments(parser, CACHE)
    add_speed_arguments(parser)
    add_sampling_arguments(parser)
    add_system_argument(parser)
    group = parser.add_argument_group("chat")
    speculation.add_argument(group)
    beams.add_arguments(parser)
    group.add_argument("--resume", metavar="ID", nargs="?", const="", help="go on with the last session, or with ID")
    group.add_argument("--list", action="store_true", help="saved sessions, newest first")
    group.add_argument("--no-save", action="store_true", help="keep this conversation off the disk")
    group.add_argument("--overflow", choices=("stop", "drop"), default="stop",
                       help="context full: refuse with numbers (default), or drop the oldest turns")
    add_template_argument(group)
    answer.add_thinking_argument(group)
    group.add_argument("--stats", choices=("on", "off"), default="on",
                       help="the line after each answer, in a terminal (default on)")
    group.add_argument("--markdown", action="store_true", help="format finished blocks of an answer")
    group.add_argument("--jsonl", "--json", action="store_true", help="an OpenAI chat.completion per turn, lossless")
    group.add_argument("--allow-special", action="store_true", help="typed control tokens become control tokens")
    group.add_argument("--no-loop-guard", action="store_true", help="do not stop an answer that repeats itself")


def run(args) -> int:
    """Exit code of the command."""
    beams.check(args)
    if args.list:
        return list_sessions()
    with loading():
        if is_interactive() and not args.jsonl:
            from nanokv.apps.cli.chat.repl import run as talk
        else:
            from nanokv.apps.cli.chat.pipe import run as talk
    return talk(args)


def list_sessions() -> int:
    """Table of saved sessions on stdout."""
    import time

    from nanokv.apps.cli.chat.transcript import listing, state_folder

    folder = state_folder() / "sessions"
    rows = listing(folder)
    if not rows:
        write_err(f"no saved session in {sanitize_line(str(folder))}\n")
    for name, modified, turns, model, words in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified))
        name, model, words = map(sanitize_line, (name, model, words[:50]))
        line = f"{name}  {when}  {turns:>3} turn{'s' if turns != 1 else ' '}  {model}  {words}"
        write_out(layout.paragraph(line, layout.columns(sys.stdout, None), rest="    ") + "\n")
    return 0
