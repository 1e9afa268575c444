"""Typed errors. Each message names the cause and the numbers; `hint` is one line with the fix.

All of them are also ValueErrors, so code that does not import nanokv can still catch them.
The command line prints `nanokv: error: message` and `hint: hint`, and exits with code 2.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from weights_loader.strict import bounded


class NanoKVError(ValueError):
    """Something the caller can fix: a bad value, a full cache, a broken file."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(bounded(message))  # it may quote untrusted values of any length
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # below the message in a traceback


class ConfigError(NanoKVError):
    """A field of config.json is malformed, or has a value that is not implemented here."""


class UnimplementedError(ConfigError):
    """config.json describes a model that nanokv does not run; its sizes may be right."""


class CacheError(NanoKVError):
    """A cache was used in a way that would silently give a wrong answer."""


class CapacityError(CacheError):
    """The cache is full. Raised before anything is written."""


class UnsupportedError(CacheError):
    """This kind of cache does not support the requested operation."""


class HandoverError(CacheError):
    """Keys and values from another process did not arrive, or arrived changed."""


class DeviceMemoryError(NanoKVError, MemoryError):
    """GPU memory is full. The cache is unchanged: the call can be retried in smaller parts."""


class ContextError(NanoKVError):
    """Prompt and answer do not fit in the context window."""


class GenerationError(NanoKVError):
    """A sampling or generation argument is out of range."""


class TokenizerError(NanoKVError):
    """The tokenizer cannot handle a text, an id or a file of the checkpoint."""


class TokenIdsError(GenerationError, TokenizerError, IndexError):
    """The value is not token ids, or one id is outside the vocabulary."""


class TemplateError(NanoKVError):
    """The chat template is broken or hostile, or rejects these messages."""


class TemplateStopped(TemplateError):
    """The chat template exceeded its limit of time, memory or output."""


class SessionError(NanoKVError):
    """A saved conversation cannot be read, written or continued."""


class UnknownArgument(NanoKVError, TypeError):
    """A function of nanokv was called with an argument that it does not take."""


class UnknownName(NanoKVError, AttributeError):
    """The attribute exists in another library, not here. The hint names nanokv's equivalent."""


class ParallelError(NanoKVError):
    """Ranks cannot work together: sizes do not divide, their files differ, or a rank is gone."""


class CourseError(NanoKVError):
    """A notebook, an exercise or a submission of the course is missing or malformed."""


# Characters kept of another library's message. One message quoted a whole file: 2.9 MB.
LONGEST_REASON = 300


@contextmanager
def foreign(what: str, error: type[NanoKVError] = NanoKVError) -> Iterator[None]:
    """Turn any exception of another library, including a panic of its Rust code, into `error`.

    `what` begins the message. NanoKVError, MemoryError and Ctrl-C pass through.
    """
    try:
        yield
    except (NanoKVError, MemoryError):
        raise
    except BaseException as reason:
        # pyo3's class for Rust panics. It is not an Exception and cannot be imported.
        panic = type(reason).__name__ == "PanicException"
        if not panic and not isinstance(reason, Exception):
            raise  # Ctrl-C, SystemExit
        text = str(reason) or type(reason).__name__
        if len(text) > LONGEST_REASON:
            text = text[: LONGEST_REASON - 3] + "..."
        raise error(f"{what}: {text}") from reason
