"""Errors of a command: any exception becomes at most two lines on stderr and an exit code."""

import errno
import sys
from itertools import pairwise

from nanokv.apps.cli.common import terminal
from nanokv.apps.cli.common.arguments import environment
from nanokv.errors import NanoKVError
from nanokv.support import installing

REPORT = "this is a bug in nanokv, please report it"


def report(error: BaseException, words: list[str]) -> int:
    """Print the error and its hint, after a traceback if --debug; return the exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code
        return int(bool(error.code))
    if isinstance(error, BrokenPipeError):
        return 141
    if interrupted(error):
        if terminal.is_tty(sys.stderr):
            terminal.write_err("\n")
        return 130
    debug = "--debug" in words or environment("NANOKV_DEBUG") not in (None, "0")
    if debug:
        print_traceback(error)
    known = describe(error)
    if known is not None:
        show_error(*known, when=color_choice(words))
        return 2
    hint = REPORT
    if not debug:
        hint += " with the output of the same command and --debug"
    show_error(f"{type(error).__name__}: {error}", hint, color_choice(words))
    return 1


def color_choice(words: list[str]) -> str:
    """The value of --color among words that may not have been parsed."""
    flags = [*pairwise(words), *(tuple(word.split("=", 1)) for word in words)]
    for choice in ("always", "never"):
        if ("--color", choice) in flags:
            return choice
    return "auto"


def print_traceback(error: BaseException) -> None:
    """The traceback on stderr, control characters made visible."""
    import traceback

    shown = traceback.TracebackException.from_exception(error)
    shown.__notes__ = []  # the hint is printed below it
    terminal.write_err(terminal.sanitize("".join(shown.format())))


def interrupted(error: BaseException | None) -> bool:
    """Is this Ctrl-C, or an exception that an import raised because of it?"""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def describe(error: BaseException) -> tuple[str, str] | None:
    """(message, hint) of an error that the user or the machine caused; None for a bug of ours."""
    full = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    if isinstance(error, full):  # while weights were loaded
        from nanokv.support.device_memory import full_memory

        error = full_memory(error)
    checkpoint_error = getattr(sys.modules.get("weights_loader"), "CheckpointError", ())
    if isinstance(error, NanoKVError) or isinstance(error, checkpoint_error):
        return str(error), getattr(error, "hint", "")
    if isinstance(error, MemoryError) or _is_torch_memory(error):
        return "out of memory", "a smaller --context, --dtype bfloat16, or -m tiny"
    if isinstance(error, ImportError):
        return _of_import(error)
    if isinstance(error, OSError):
        return _of_system(error)
    return None


def _of_import(error: ImportError) -> tuple[str, str] | None:
    """For a package that is missing or broken; None for a module of ours."""
    name = error.name or ""
    if name.startswith(("nanokv", "weights_loader")):
        return None
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed", installing.hint([name])
    text = str(error).lower()
    hint = "install it again with pip"
    if "failed to map segment" in text or "cannot allocate memory" in text:
        hint = "more memory: ulimit -v unlimited"
    return f"an import failed: {error}", hint


def _of_system(error: OSError) -> tuple[str, str]:
    message = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        message = f"{error.filename}: {message}"
    hint = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space on that disk"
    return message, hint


def _is_torch_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "out of memory" in text
    )


def show_error(message: str, hint: str = "", when: str = "auto") -> None:
    """Print `nanokv: error: …` and `hint: …`: one bounded line each, controls made visible."""
    style = terminal.Style(sys.stderr, when)
    terminal.write_line(f"nanokv: {style.red('error:')} {terminal.message_line(message)}")
    if hint:
        terminal.write_line(f"{style.dim('hint:')} {terminal.message_line(hint)}")


def finish(code: int) -> int:
    """Flush stdout while an error can still be reported, and return the final exit code.

    After a failure stdout is silenced, so that Python's flush at exit cannot fail again.
    """
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
