"""Typed errors. Each message names the cause and the numbers; `hint` is the one line that fixes it.

All of them are also ValueErrors, so a caller who knows nothing of nanokv can still catch them.
The command line prints `nanokv: error: message` and `hint: hint`, and leaves with exit code 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from weights_loader.strict import bounded


class NanoKVError(ValueError):
    """Something the caller can mend: a bad value, a full cache, a broken file."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(bounded(message))  # values of strangers are quoted in it
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # below the message in a traceback


class ConfigError(NanoKVError):
    """config.json says something that is malformed or that this code does not implement."""


class CacheError(NanoKVError):
    """A cache was used in a way that would silently give a wrong answer."""


class CapacityError(CacheError):
    """The cache is full; raised before anything is written."""


class UnsupportedError(CacheError):
    """This kind of cache cannot do what was asked of it."""


class HandoverError(CacheError):
    """Keys and values of another process did not arrive, or are not what was sent."""


class DeviceMemoryError(NanoKVError, MemoryError):
    """The memory of the GPU is full. The cache holds what it held before; with less at a time the same call works."""


class ContextError(NanoKVError):
    """Prompt and answer do not fit into the context window."""


class GenerationError(NanoKVError):
    """A sampling or generation argument is out of its range."""


class TokenizerError(NanoKVError):
    """Text or ids that the tokenizer cannot handle."""


class TokenIdsError(GenerationError, TokenizerError, IndexError):
    """Something else stands where token ids belong, or an id that the vocabulary does not have."""


class TemplateError(NanoKVError):
    """The chat template is broken, hostile, or refuses these messages."""


class TemplateStopped(TemplateError):
    """The chat template took more time, memory or output than it may."""


class SessionError(NanoKVError):
    """A saved conversation cannot be read, written or continued."""


class UnknownArgument(NanoKVError, TypeError):
    """A function of ours was called with an argument that it does not have."""


class UnknownName(NanoKVError, AttributeError):
    """Another library has an attribute of this name; the hint says how it is done here."""


class ParallelError(NanoKVError):
    """The ranks cannot work together: sizes that do not divide, other files, or one that is gone."""


class CourseError(NanoKVError):
    """A notebook, an exercise or a submission of the course is not what it should be."""


# Characters of a foreign message; one was 2.9 MB long, because it quoted the file.
LONGEST_REASON = 300


@contextmanager
def foreign(what: str, error: type[NanoKVError] = NanoKVError) -> Iterator[None]:
    """Around a call into another library: whatever it raises, a panic of its Rust code included, becomes `error`."""
    try:
        yield
    except (NanoKVError, MemoryError):
        raise
    except BaseException as reason:
        # Of pyo3: no Exception, and it cannot be imported.
        panic = type(reason).__name__ == "PanicException"
        if not panic and not isinstance(reason, Exception):
            raise  # Ctrl-C, SystemExit
        text = str(reason) or type(reason).__name__
        text = text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
        raise error(f"{what}: {text}") from reason
