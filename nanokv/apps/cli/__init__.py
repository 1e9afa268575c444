"""The entry point of the command line: find the command, parse its flags, return an exit code.

A command is one module with `add_arguments(parser)` and `run(args) -> int`. Only the module of the
command that runs is imported.
Exit codes: 0 done, 1 our bug, 2 user or environment, 130 Ctrl-C, 141 closed pipe, 143 SIGTERM.
An error is at most two lines on stderr. This file does not import torch, so `--help` is fast.
"""

import importlib
import sys
import warnings
from types import ModuleType

from nanokv.apps.cli.common import layout, ranks, terminal
from nanokv.apps.cli.common.arguments import (
    Parser,
    examples_text,
    exit_codes_text,
    help_width,
    nearest,
)
from nanokv.apps.cli.common.options import add_common_arguments
from nanokv.apps.cli.common.text import check_argument
from nanokv.apps.cli.common.ways_out import finish, report
from nanokv.errors import NanoKVError

COMMANDS = {  # name → (module, one line for the help)
    "chat": ("nanokv.apps.cli.commands.chat", "talk with a model and see its cache"),
    "generate": (
        "nanokv.apps.cli.commands.generate",
        "answer or continue a prompt, a file or stdin",
    ),
    "batch": ("nanokv.apps.cli.commands.batch", "answer many prompts of a JSONL file together"),
    "serve": ("nanokv.apps.cli.commands.serve", "serve OpenAI's API over HTTP"),
    "models": (
        "nanokv.apps.cli.commands.models",
        "list the models on this machine, with the argument for each",
    ),
    "memory": (
        "nanokv.apps.cli.commands.memory",
        "weights and cache of a model in bytes, from its config alone",
    ),
    "replay": (
        "nanokv.apps.cli.commands.replay",
        "what a prefix cache would save on a trace of requests, without a model",
    ),
    "reuse": (
        "nanokv.apps.cli.commands.reuse",
        "what a change of a conversation costs: tokens reused, and computed again",
    ),
    "blend": (
        "nanokv.apps.cli.commands.blend",
        "reuse text that is not a prefix: the errors, and what is forgotten",
    ),
    "bench": (
        "nanokv.apps.cli.commands.bench",
        "prefill and decode speed here, beside the memory bandwidth",
    ),
    "profile": (
        "nanokv.apps.cli.commands.profile",
        "where a prefill and a decode step spend their time",
    ),
    "trace": ("nanokv.apps.cli.commands.trace", "record a run and write it as one HTML page"),
    "live": (
        "nanokv.apps.cli.commands.live",
        "write a page that runs the bundled model in a browser and shows its cache",
    ),
    "train": ("nanokv.apps.cli.commands.train", "train the bundled model from nothing"),
    "convert": (
        "nanokv.apps.cli.commands.convert",
        "write any model as a Hugging Face folder or as a GGUF file",
    ),
    "verify": (
        "nanokv.apps.cli.commands.verify",
        "compare a checkpoint with transformers, layer by layer",
    ),
    "course": (
        "nanokv.apps.cli.commands.course",
        "the notebooks: build, execute, render, grade; the claims of the articles",
    ),
    "env": (
        "nanokv.apps.cli.commands.env",
        "show the settings that apply and where they come from",
    ),
}
ABOUT = (
    "nanokv: language models from scratch in PyTorch, with a KV cache that you can see and talk to."
)
EXAMPLES = (
    "nanokv chat",
    'nanokv generate "What is a KV cache?"',
    "nanokv chat -m Qwen/Qwen3-0.6B",
)
_PULL = "a model is downloaded when it is first used: nanokv chat -m Qwen/Qwen3-0.6B"
_SERVE = "nanokv serve answers over HTTP, as llama-server and OpenAI's API do"
_DISK = "nanokv models shows where models lie; hf cache rm deletes one"
_VERSION = "nanokv --version, or nanokv env for the versions of all packages"
_LIST = "nanokv models lists what is here and what can be loaded"
ELSEWHERE = {  # a command of another program → the hint that names ours
    "run": "nanokv chat -m MODEL talks with it; nanokv generate PROMPT answers once",
    "pull": _PULL,
    "download": _PULL,
    "list": _LIST,
    "ls": _LIST,
    "show": "nanokv memory MODEL, or nanokv models",
    "complete": "nanokv generate PROMPT",
    "version": _VERSION,
    "-V": _VERSION,
    "-v": _VERSION,
    "rm": _DISK,
    "server": _SERVE,
    "api": _SERVE,
    "ps": "nanokv models lists what is here; nothing runs in the background",
    "cli": "nanokv chat, or nanokv generate PROMPT",
    "perplexity": "nanokv bench --quality compares quantized weights and caches with exact ones",
    "quantize": "--quantize int8 or int4 with nanokv chat, generate, batch, serve; writes no file",
    "llama-bench": "nanokv bench",
    "tokenize": "in Python: nanokv.load(NAME)[1].encode(TEXT)",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code.

    Without argv this is the program itself, which also sets up its streams and signals.
    """
    if argv is None:
        argv = sys.argv[1:]
        prepare_process(argv)
    words = list(argv)
    try:
        code = finish(dispatch(words))
    # Also KeyboardInterrupt and SystemExit: each has an exit code.
    except BaseException as error:
        terminal.release_interrupt()
        code = finish(report(error, words))
        ranks.let_rank_0_speak()
    terminal.release_interrupt()
    terminal.finish_stderr()
    return code


def prepare_process(words: list[str]) -> None:
    """Set up streams, signals and warnings for a process that runs only this program."""
    ranks.hide_followers(words)
    terminal.prepare_streams()
    terminal.install_signals()
    warnings.showwarning = lambda message, *where, **more: terminal.warning(message)


def dispatch(words: list[str]) -> int:
    """Find the command, build its parser and no other, run it."""
    for i, word in enumerate(words):
        check_argument(word, f"argument {i + 1}")
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        terminal.write_out(overview())
        return 0
    if words[0] == "--version":
        terminal.write_out(version())
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise unknown_command(name)
    with terminal.loading():
        module = importlib.import_module(COMMANDS[name][0])
    args = make_parser(name, module).parse(rest)
    return ranks.run(module, args, words) or 0


def make_parser(name: str, module: ModuleType) -> Parser:
    """The command's parser: its flags and the general ones, after examples, before exit codes."""
    about = getattr(module, "DESCRIPTION", COMMANDS[name][1])
    parser = Parser(prog=f"nanokv {name}", description=about)
    parser.examples = getattr(module, "EXAMPLES", ())
    module.add_arguments(parser)
    group = add_common_arguments(parser)
    group.add_argument(
        "--version", action="version", version=version().strip(), help="print the version"
    )
    parser.accept_aliases()
    return parser


def overview() -> str:
    """The text of `nanokv --help`."""
    width = help_width()
    commands = [(name, about) for name, (_, about) in COMMANDS.items()]
    parts = [
        ABOUT,
        "usage: nanokv COMMAND [flags]",
        examples_text(EXAMPLES).strip(),
        "commands:\n" + "\n".join(layout.definitions(commands, width)),
        "nanokv COMMAND --help lists a command's flags. nanokv --version prints the version.",
    ]
    wrapped = [layout.wrapped(part, width) for part in parts]
    return "\n\n".join([*wrapped, exit_codes_text()]) + "\n"


def version() -> str:
    """The text of `nanokv --version`, one line."""
    from nanokv import __version__

    return f"nanokv {__version__}\n"


def unknown_command(name: str) -> NanoKVError:
    """The error for a first word that is not a command."""
    if name.startswith("-") and name not in ELSEWHERE:
        return NanoKVError(
            f"{name} before a command", f"flags follow the command: nanokv chat {name}"
        )
    hint = f"commands: {', '.join(COMMANDS)}"
    if close := nearest(name, COMMANDS):
        hint = f"did you mean nanokv {close}?"
    return NanoKVError(f"no command {name!r}", ELSEWHERE.get(name) or hint)
