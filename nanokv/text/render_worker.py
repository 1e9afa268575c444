"""The worker program that renders chat templates: jinja2's sandbox under limits of the system.

    python -I -S render_worker.py FOLDER …      folders that hold jinja2 and its dependencies

A request is a head of numbers and a JSON list of the template's source and its variables (null:
compile only). The head: bytes of the list, seconds of processor time, bytes of memory, characters
of output. An answer is 8 bytes of length and a JSON list: ["text", …], or ["error", why], or
["stopped", why]. If a render exceeds its seconds, the system ends this process, even inside a call
in C. render_process.py, the other side, then raises an error and starts a new process.

The language is that of transformers' templates (5.23: utils/chat_template_utils.py). Nothing of
nanokv is imported here, so that a start takes 50 ms.
"""

import codecs
import contextlib
import functools
import html  # noqa: F401  jinja2 would import these at first use, when no file can be opened
import json
import os
import pprint  # noqa: F401
import signal
import struct
import sys
import textwrap  # noqa: F401
import unicodedata  # noqa: F401
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":
    sys.path += sys.argv[1:]

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

HEAD = struct.Struct(">QdQQ")
LENGTH = struct.Struct(">Q")
SOURCE = 131_072  # characters of a template; the longest published templates have 20,000
CODECS = (  # used by jinja2 for string literals, or named by a template
    "ascii",
    "cp1252",
    "idna",
    "latin-1",
    "punycode",
    "unicode-escape",
    "utf-8",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
)
# Limits that are set to 0: no open files, processes, written files or core dumps.
CLOSED = ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CORE")


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    requests = os.fdopen(0, "rb")
    answers = os.fdopen(1, "wb")
    for name in CODECS:
        codecs.lookup(name)
    datetime.now().strftime("%c")  # the system reads the time zone
    limit_process()
    while len(head := requests.read(HEAD.size)) == HEAD.size:
        size, *limits = HEAD.unpack(head)
        answer = json.dumps(answered(requests, size, *limits)).encode()
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()
    os._exit(0)


def limit_process() -> None:
    """Close all resources, in case a template escapes the sandbox. Ctrl-C is left to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside a C call
    try:
        import resource
    except ImportError:  # Windows: the parent's clock is the only limit
        return
    for name in CLOSED:
        resource.setrlimit(getattr(resource, name), (0, 0))


def answered(requests: BinaryIO, size: int, seconds: float, memory: int, output: int) -> list[str]:
    """The answer to one request."""
    try:
        limit_render(seconds, memory)
        try:
            source, variables = json.loads(requests.read(size))
            return ["text", rendered(source, variables, output)]
        finally:
            limit_render(0, memory)
    except MemoryError:
        return ["stopped", f"it needed more than {memory // 10**6:,} MB"]
    except RecursionError:
        return ["stopped", "it nests or recurses too deeply"]
    except (Stopped, jinja2.exceptions.SecurityError, OverflowError) as error:
        return ["stopped", str(error)]
    except jinja2.TemplateSyntaxError as error:
        return ["error", f"is not valid jinja2, line {error.lineno}: {error.message}"]
    except jinja2.TemplateError as error:
        return ["error", f"refuses this conversation: {error}"]
    except Exception as error:
        return ["error", f"failed: {type(error).__name__}: {error}"]


def limit_render(seconds: float, memory: int) -> None:
    """Limit the processor time from now on (0: no limit), and the address space in bytes."""
    if not hasattr(signal, "setitimer"):
        return
    import resource

    with contextlib.suppress(OSError, ValueError):  # not on macOS; or a lower limit is set
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def rendered(source: str, variables: dict[str, Any] | None, output: int) -> str:
    """The rendered text, at most `output` characters; "" if variables is None."""
    template = compiled(source)
    if variables is None:
        return ""
    text = template.render(variables)
    if len(text) > output:
        raise Stopped(f"it wrote more than {output:,} characters")
    return text


class Stopped(Exception):
    """The template exceeded a limit."""


# --- the language --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    """The compiled template, cached."""
    if len(source) > SOURCE:
        raise Stopped(f"its source has {len(source):,} characters, more than {SOURCE:,}")
    return ENVIRONMENT.from_string(source)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja2's filter, which escapes < and >."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class TemplateDict:
    """`dict(...)` in a template, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict.fromkeys(*args, **kwargs)


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: marks assistant text for training masks.

    In a prompt the tags have no effect.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    def _through(self, caller):
        return caller()


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace(...)` in a template.

    Names that begin with an underscore raise: they would reach Python's internals.
    """

    def __init__(*args: Any, **kwargs: Any):  # no named parameter, so that namespace(self=…) works
        fields = dict(*args[1:], **kwargs)
        for name in fields:
            check_name(name)
        jinja2.utils.Namespace.__init__(args[0], fields)

    def __setitem__(self, name, value):
        check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
)
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals |= {
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
    "dict": TemplateDict(),
    "namespace": TemplateNamespace,
}

if __name__ == "__main__":
    main()
