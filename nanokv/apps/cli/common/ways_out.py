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
        shown.__notes__ = []  # the hint is printed below
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
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith(
        ("nanokv", "weights_loader")
    ):
        return f"the package {error.name} is not installed", installing.hint([error.name])
    if isinstance(error, ImportError) and not (error.name or "").startswith(
        ("nanokv", "weights_loader")
    ):
        full = (
            "failed to map segment" in str(error) or "cannot allocate memory" in str(error).lower()
        )
        return (
            f"an import failed: {error}",
            "more memory: ulimit -v unlimited" if full else "install it again with pip",
        )
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        place = f"{error.filename}: " if error.filename is not None else ""
        hint = "free some space on that disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{place}{reason}", hint
    return None


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
