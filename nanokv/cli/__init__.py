"""The command line's frame: finds the command, parses its flags, and turns whatever happens into an exit code.

A command is one module with `add_arguments(parser)` and `run(args) -> int`, imported only when it is asked for.
Exit codes: 0 done, 1 our bug, 2 user or environment, 130 Ctrl-C, 141 closed pipe, 143 SIGTERM. Errors are at most two
lines on stderr. Nothing in here imports torch, so `--help` answers at once.
"""

import errno
import importlib
import sys
import warnings
from itertools import pairwise

from nanokv import installing
from nanokv.cli import layout, ranks, terminal
from nanokv.cli.arguments import (
    Parser,
    add_common_arguments,
    environment,
    examples_text,
    exit_codes_text,
    help_width,
    nearest,
)
from nanokv.cli.text import check_argument
from nanokv.errors import NanoKVError

COMMANDS = {  # name → (module, what it does)
    "chat": ("nanokv.cli.chat", "talk with a model and see its cache"),
    "generate": ("nanokv.cli.generate", "answer or continue a prompt, a file or stdin"),
    "batch": ("nanokv.cli.batch", "answer many prompts of a JSONL file together"),
    "serve": ("nanokv.cli.serve", "answer over HTTP, as OpenAI's API does"),
    "models": ("nanokv.cli.models", "list the models that are here, with what to type for each"),
    "memory": ("nanokv.cli.memory", "weights and cache of a model in bytes, from its config alone"),
    "bench": ("nanokv.cli.bench", "prefill and decode speed here, beside the memory bandwidth"),
    "profile": ("nanokv.cli.profile", "where a prefill and a decode step spend their time"),
    "trace": ("nanokv.cli.trace", "record a run and write it as one HTML page"),
    "train": ("nanokv.cli.train", "train the bundled model from nothing"),
    "convert": ("nanokv.cli.convert", "write a GGUF file, or any model, as a Hugging Face folder"),
    "verify": ("nanokv.cli.verify", "compare a checkpoint with transformers, layer by layer"),
    "course": ("nanokv.cli.course", "the notebooks: build, execute, render, grade; the claims of the articles"),
    "env": ("nanokv.cli.env", "show the settings that apply and where they come from"),
}
ABOUT = (
    "nanokv: language models from scratch in PyTorch, with a KV cache that you can see and talk to."
)
EXAMPLES = ("nanokv chat", 'nanokv generate "What is a KV cache?"', "nanokv chat -m Qwen/Qwen3-0.6B")
_PULL = "a model is downloaded when it is first used: nanokv chat -m Qwen/Qwen3-0.6B"
_SERVE = "nanokv serve answers over HTTP, as llama-server and OpenAI's API do"
_DISK = "nanokv models shows where models lie; hf cache rm deletes one"
_VERSION = "nanokv --version, or nanokv env for the versions of all packages"
_LIST = "nanokv models lists what is here and what can be loaded"
ELSEWHERE = {  # commands of other programs → what does it here
    "run": "nanokv chat -m MODEL talks with it; nanokv generate PROMPT answers once", "pull": _PULL, "download": _PULL,
    "list": _LIST, "ls": _LIST, "show": "nanokv memory MODEL, or nanokv models", "complete": "nanokv generate PROMPT",
    "version": _VERSION, "-V": _VERSION, "-v": _VERSION, "rm": _DISK, "server": _SERVE, "api": _SERVE,
    "ps": "nanokv models lists what is here; nothing runs in the background",
    "cli": "nanokv chat, or nanokv generate PROMPT",
    "perplexity": "nanokv bench --quality compares quantized weights and caches with exact ones",
    "quantize": "--quantize int8 or int4 with nanokv chat, generate, batch, serve; writes no file",
    "llama-bench": "nanokv bench", "tokenize": "in Python: nanokv.load(NAME)[1].encode(TEXT)",
}  # fmt: skip
REPORT = "this is a bug in nanokv, please report it"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code. Without argv it is the program: it owns streams and signals too."""
    words = sys.argv[1:] if argv is None else list(argv)
    if argv is None:
        ranks.hide_followers(words)
        terminal.prepare_streams()
        terminal.install_signals()
        warnings.showwarning = lambda message, *where, **more: terminal.warning(message)
    try:
        code = finish(dispatch(words))
    except BaseException as error:  # also KeyboardInterrupt and SystemExit: every way out has its exit code
        terminal.release_interrupt()
        code = finish(report(error, words))
        ranks.let_rank_0_speak()
    terminal.release_interrupt()
    terminal.finish_stderr()
    return code


def dispatch(words: list[str]) -> int:
    """Find the command, build only its parser, run it."""
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
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise unknown_command(name)
    with terminal.loading():
        module = importlib.import_module(COMMANDS[name][0])
    return ranks.run(module, make_parser(name, module).parse(rest), words) or 0


def make_parser(name: str, module) -> Parser:
    """The command's parser: its own flags, the general ones, examples first and exit codes last."""
    about = getattr(module, "DESCRIPTION", COMMANDS[name][1])
    parser = Parser(prog=f"nanokv {name}", description=about)
    parser.examples = getattr(module, "EXAMPLES", ())
    module.add_arguments(parser)
    group = add_common_arguments(parser)
    group.add_argument("--version", action="version", version=version().strip(), help="print the version")
    parser.accept_aliases()
    return parser


def overview() -> str:
    """`nanokv --help`."""
    width = help_width()
    commands = "\n".join(layout.definitions([(name, about) for name, (_, about) in COMMANDS.items()], width))
    end = "nanokv COMMAND --help lists a command's flags. nanokv --version prints the version."
    examples = examples_text(EXAMPLES).strip()
    parts = [ABOUT, "usage: nanokv COMMAND [flags]", examples, f"commands:\n{commands}", end]
    return "\n\n".join([*(layout.wrapped(part, width) for part in parts), exit_codes_text()]) + "\n"


def version() -> str:
    """One line."""
    from nanokv import __version__

    return f"nanokv {__version__}\n"


def unknown_command(name: str) -> NanoKVError:
    """The error for a first word that is no command."""
    if name.startswith("-") and name not in ELSEWHERE:
        return NanoKVError(f"{name} before a command", f"flags follow the command: nanokv chat {name}")
    close = nearest(name, COMMANDS)
    hint = f"did you mean nanokv {close}?" if close else f"commands: {', '.join(COMMANDS)}"
    return NanoKVError(f"no command {name!r}", ELSEWHERE.get(name) or hint)


# --- ways out -----------------------------------------------------------------------------------------------------


def report(error: BaseException, words: list[str]) -> int:
    """Print what the user needs to know (two lines at most, a traceback with --debug) and choose the exit code."""
    debug = "--debug" in words or environment("NANOKV_DEBUG") not in (None, "0")
    colors = [*pairwise(words), *(tuple(word.split("=", 1)) for word in words)]
    when = next((word for word in ("always", "never") if ("--color", word) in colors), "auto")
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    if isinstance(error, BrokenPipeError):
        return 141
    if interrupted(error):
        terminal.write_err("\n" if terminal.is_tty(sys.stderr) else "")
        return 130
    if debug:
        import traceback

        shown = traceback.TracebackException.from_exception(error)
        shown.__notes__ = []  # the hint stands below, once
        terminal.write_err(terminal.sanitize("".join(shown.format())))
    known = describe(error)
    if known is None:
        hint = REPORT if debug else f"{REPORT} with the output of the same command and --debug"
        known = f"{type(error).__name__}: {error}", hint
        show_error(*known, when=when)
        return 1
    show_error(*known, when=when)
    return 2


def interrupted(error) -> bool:
    """Ctrl-C itself, or what an import made of it on its way."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def describe(error: BaseException) -> tuple[str, str] | None:
    """(message, hint) of an error that the user or the machine caused; None if it is our bug."""
    checkpoint_error = getattr(sys.modules.get("weights_loader"), "CheckpointError", ())
    if isinstance(error, NanoKVError) or isinstance(error, checkpoint_error):
        return str(error), getattr(error, "hint", "")
    if isinstance(error, MemoryError) or _is_torch_memory(error):
        return "out of memory", "a smaller --context, --dtype bfloat16, or -m tiny"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(("nanokv", "weights_loader")):
        return f"the package {error.name} is not installed", installing.hint([error.name])
    if isinstance(error, ImportError) and not (error.name or "").startswith(("nanokv", "weights_loader")):
        full = "failed to map segment" in str(error) or "cannot allocate memory" in str(error).lower()
        return f"an import failed: {error}", "more memory: ulimit -v unlimited" if full else "install it again with pip"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        place = f"{error.filename}: " if error.filename is not None else ""
        hint = "free some space on that disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{place}{reason}", hint
    return None


def _is_torch_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def show_error(message: str, hint: str = "", when: str = "auto") -> None:
    """`nanokv: error: …` and `hint: …`, one line each of a bounded length, control characters visible."""
    style = terminal.Style(sys.stderr, when)
    terminal.write_line(f"nanokv: {style.red('error:')} {terminal.message_line(message)}")
    if hint:
        terminal.write_line(f"{style.dim('hint:')} {terminal.message_line(hint)}")


def finish(code: int) -> int:
    """Flush stdout while an error can still be reported; after a failure Python's own flush must find nothing to do."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        terminal.silence_stdout()
        if isinstance(error, BrokenPipeError):
            return code or 141
        if code == 0:
            show_error(f"cannot write to stdout: {getattr(error, 'strerror', None) or error}")
        return code or 2
    if code == 141:
        terminal.silence_stdout()
    return code
