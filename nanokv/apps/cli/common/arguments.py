"""The argument parser, with one-line errors that suggest the nearest name, and its value types.

Values are checked here, before torch is imported, so that a typo is reported at once. options.py
declares the flags that commands share.
"""

import argparse
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from nanokv.apps.cli.common import layout
from nanokv.apps.cli.common.terminal import write_out
from nanokv.cache.options import read_kind
from nanokv.decoding.ranges import RANGES, chosen_seed
from nanokv.errors import CacheError, NanoKVError

EXIT_CODES = (
    "0 done",
    "1 our bug",
    "2 flag, model, file, network, memory",
    "130 Ctrl-C",
    "141 reader closed the pipe",
    "143 SIGTERM",
)
ALIASES = {  # flags of llama.cpp, mlx-lm and the OpenAI interface → ours
    "--temp": "--temperature",
    "--ctx-size": "--context",
    "--n-predict": "--max-new-tokens",
    "--max-tokens": "--max-new-tokens",
}
SYNONYMS = {  # flags of other programs that are not accepted, without dashes → the flag to suggest
    "n-ctx": "context",
    "num-ctx": "context",
    "max-model-len": "context",
    "num-predict": "max-new-tokens",
    "max-length": "max-new-tokens",
    "max-completion-tokens": "max-new-tokens",
    "verbose": "debug",
    "silent": "quiet",
    "c": "context",
    "b": "step-tokens",
    "ub": "step-tokens",
    "f": "file",
    "V": "version",
    "v": "debug",
    "hf": "model",
    "hf-repo": "model",
    "sys": "system",
    "p-system": "system",
    "np": "running",
    "parallel": "running",
    "ngl": "device",
    "n-gpu-layers": "device",
    "gpu-layers": "device",
    "dev": "device",
    "device-map": "device",
    "ctk": "cache",
    "ctv": "cache",
    "cache-type-k": "cache",
    "cache-type-v": "cache",
    "kv-cache-dtype": "cache",
    "repeat-penalty": "repetition-penalty",
    "load-in-8bit": "quantize",
    "load-in-4bit": "quantize",
    "quantization": "quantize",
    "torch-dtype": "dtype",
    "served-model-name": "alias",
    "max-num-seqs": "running",
    "max-num-batched-tokens": "step-tokens",
    "gpu-memory-utilization": "pages",
    "tensor-parallel-size": "tensor-parallel",
    "tp": "tensor-parallel",
    "cnv": "chat",
    "conversation": "chat",
}
SAID = {  # flags of other programs that have no equivalent → the hint
    "stream": "nanokv chat and generate stream an answer by default",
    "no-stream": "--json writes the answer when it is complete",
    "no-cnv": "nanokv generate PROMPT --raw continues a text, without a chat template",
    "no-conversation": "nanokv generate PROMPT --raw continues a text, without a chat template",
    "i": "nanokv chat talks with the model",
    "interactive": "nanokv chat talks with the model",
    "trust-remote-code": "no code of a checkpoint is run",
}


# --- the parser -----------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with one-line errors and `did you mean`."""

    # May flags come between the words of one positional? Before Python 3.12, argparse needs
    # parse_known_intermixed_args for that.
    intermixed = False

    def __init__(self, **options: Any):
        if sys.version_info >= (3, 14):  # it colours the help by default, and ignores our --color
            options["color"] = False
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self.examples: tuple[str, ...] = ()
        self.shape = ""  # the line of usage

    def format_help(self) -> str:
        # Set here, not in __init__: argparse would make a Formatter for each flag that is added.
        self.formatter_class = Formatter
        indent = len("usage: ")
        self.usage = layout.paragraph(self.shape, help_width() - indent, rest=" " * indent)
        return f"{examples_text(self.examples)}{super().format_help()}\n{exit_codes_text()}\n"

    def _print_message(self, message: str, file: Any = None) -> None:
        write_out(message)  # argparse's method ignores a full disk

    def error(self, message: str) -> NoReturn:
        found = re.fullmatch(r"argument (?P<flag>[^:]+): (?P<rest>.*)", message, re.DOTALL)
        if found:
            message = f"{found['flag']}: {found['rest']}"
        head, colon, missing = message.partition("the following arguments are required: ")
        if colon:  # parse_known_intermixed_args also names the optional positionals
            optional = {action.metavar for action in self._actions if action.nargs in ("*", "?")}
            names = [name for name in missing.split(", ") if name not in optional]
            message = head + colon + ", ".join(names)
        raise NanoKVError(message, f"{self.prog} --help")

    def flags(self) -> list[str]:
        """Every long flag of this command."""
        return [
            flag
            for action in self._actions
            for flag in action.option_strings
            if flag.startswith("--")
        ]

    def accept_aliases(self) -> None:
        """Accept other programs' names for our flags. Help and errors show our names only."""
        for alias, flag in ALIASES.items():
            if flag in self._option_string_actions:
                self._option_string_actions.setdefault(alias, self._option_string_actions[flag])

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Like parse_args, but the error for an unknown flag suggests the nearest one."""
        words = [_shape(action) for action in self._actions if not action.option_strings]
        # Before parsing: parse_known_intermixed_args hides the positionals.
        self.shape = " ".join([self.prog, "[flags]", *words])
        for word in itertools.takewhile("--".__ne__, argv):
            if self.is_foreign(word):
                raise self.unknown_flag(word)
        if self.intermixed:
            args, extra = self.parse_known_intermixed_args(argv)
        else:
            args, extra = self.parse_known_args(argv)
        if not extra:
            return args
        for word in extra:
            if word.startswith("-") and word != "-":
                raise self.unknown_flag(word)
        hint = f"{self.prog} --help"
        if "prompt" in args:
            hint = 'put the text in quotes: "What is a KV cache?"'
        raise NanoKVError(f"unexpected argument {extra[0]!r}", hint)

    def is_foreign(self, word: str) -> bool:
        """Is it another program's flag, like -ngl, which argparse would read as -n with gl?"""
        return bool(re.fullmatch("-[a-z][a-z-]+", word)) and word[1:] in SYNONYMS | SAID

    def unknown_flag(self, word: str) -> NanoKVError:
        """The error for an unknown flag, with a hint."""
        name = word.split("=", 1)[0]
        hint = SAID.get(name.lstrip("-").replace("_", "-").lower())
        if hint is None:
            close = nearest_flag(name, self.flags())
            hint = f"did you mean {close}?" if close else f"{self.prog} --help"
        return NanoKVError(f"no flag {name}", hint)


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Flags in one column, with texts beside them, or below in a narrow terminal."""

    def __init__(self, prog: str):
        width = help_width()
        position = 30 if width >= 70 else 8
        super().__init__(prog, max_help_position=position, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return layout.paragraph(" ".join(text.split()), width).split("\n")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Each line is a paragraph. A line that begins with blanks is a row: name, text column."""
        lines = []
        for line in text.splitlines():
            first = ""
            row = re.fullmatch(r"( +\S+ +)(.*)", line)
            if row:
                first, line = row.groups()
            lines.append(layout.paragraph(line, width, indent + first, indent + " " * len(first)))
        return "\n".join(lines)


def help_width() -> int:
    """Columns of the help: the terminal's, at most 100 because longer lines are hard to read."""
    return min(100, layout.columns(sys.stdout))


def examples_text(lines: Iterable[str]) -> str:
    """The block of examples at the beginning of every help, or ""."""
    if not lines:
        return ""
    examples = [layout.shell(line, help_width()) for line in lines]
    return "\n".join(["examples:", *examples, "", ""])


def exit_codes_text() -> str:
    """The exit codes at the end of every help."""
    return "exit codes:\n" + layout.joined(EXIT_CODES, help_width(), "  ")


def _shape(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    shapes: dict[object, str] = {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}
    return shapes.get(action.nargs, name)


def nearest_flag(word: str, flags: Iterable[str]) -> str | None:
    """The flag that was probably meant, or None.

    Names are compared without dashes, which would make any two short flags similar.
    """
    names = {flag.lstrip("-"): flag for flag in flags}
    typed = word.lstrip("-").replace("_", "-")
    name = typed.lower()
    meant = SYNONYMS.get(typed) or SYNONYMS.get(name) or ""  # -V is not -v
    close = nearest(name, names) or ""
    return names.get(meant) or names.get(close)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The only name that begins with `word`, else the most similar one; None if there is none."""
    import difflib

    word = word.lower()
    names = list(names)
    begun = [name for name in names if name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return next(iter(close), None)


def environment(name: str) -> str | None:
    """A variable's value; empty counts as not set."""
    return os.environ.get(name) or None


# --- checked values -------------------------------------------------------------------------------

Number = TypeVar("Number", bound=float)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number from low to high."""
    return _number(int, "a whole number", low, high, above=False)


def real(low: float, high: float | None = None, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number from low to high (above: strictly more than low)."""
    return _number(float, "a number", low, high, above)


def _number(
    kind: Callable[[str], Number], noun: str, low: float, high: float | None, above: bool
) -> Callable[[str], Number]:
    span = _span(noun, low, high, above)

    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {span}") from None
        enough = value > low if above else value >= low
        not_too_much = value < 1e18 if high is None else value <= high
        if not (enough and not_too_much):  # also nan, for which every comparison is false
            raise argparse.ArgumentTypeError(f"{text} is not {span}")
        return value

    return convert


def _span(noun: str, low: float, high: float | None, above: bool) -> str:
    """`a number above 0`, `a whole number of at least 1`, `a whole number from 1 to 4,096`."""
    if high is not None:
        first = "above" if above else "from"
        return f"{noun} {first} {low:,} to {high:,}"
    if above:
        return f"{noun} above {low:,}"
    return f"{noun} of at least {low:,}"


SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "seed",
)


def setting(name: str) -> Callable[[str], float | None]:
    """An argparse type: the value of one of SETTINGS, in the library's range. Seed -1 is None."""
    wanted = RANGES[name]

    def convert(text: str) -> float | None:
        try:
            value = wanted.kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted.words}") from None
        if not wanted.holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {wanted.words}")
        if name == "seed":
            return chosen_seed(value)
        return value

    return convert


def parse_setting(name: str, text: str) -> float | None:
    """The value of a setting that was typed as text (`/set top_p 0.9`).

    Raises NanoKVError with the range, or with the nearest name.
    """
    key = name.strip().lstrip("-").replace("-", "_")
    if key not in SETTINGS:
        hint = f"one of {', '.join(SETTINGS)}"
        if close := nearest(key, SETTINGS):
            hint = f"did you mean {close}?"
        raise NanoKVError(f"no setting {name!r}", hint)
    try:
        return setting(key)(text.strip())
    except argparse.ArgumentTypeError as error:
        raise NanoKVError(f"{key}: {error}") from None


def cache_name(text: str) -> tuple[str, dict]:
    """`NAME[:option=value…]` → (name, options). check_options checks later that they exist."""
    try:
        return read_kind(text)
    except CacheError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
