"""A checkpoint's own chat template: messages in, prompt text out, byte for byte what transformers' apply_chat_template
gives (5.23: utils/chat_template_utils.py). The template is untrusted code, so it runs in sandbox.py: no attribute
walks, no writes, bounded work and time; anything that goes wrong in it is a TemplateError.
"""

import dataclasses
import json
import threading
from collections.abc import Mapping
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols

from nanokv.errors import TemplateError
from nanokv.text.sandbox import SECONDS, WORK, BoundedEnvironment, Budget, Refused

ROLES = ("system", "user", "assistant", "tool")  # a role that the template does not know would vanish silently
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first


class ChatTemplate:
    """One compiled template. `variables` (bos_token, eos_token …) are visible to it in every render."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None, work=WORK, seconds=SECONDS):
        self.source, self.variables, self.work, self.seconds = source, dict(variables or {}), work, seconds
        self._environment = _environment()
        self._lock = threading.Lock()  # the budget belongs to one render at a time
        self._template = self._bounded(self._environment.compile_bounded, source, work=work)

    def render(self, messages, tools=None, add_generation_prompt=True, **template_kwargs) -> str:
        """Prompt text of a conversation. Raises TemplateError: bad messages, or a template that fails or asks too much.

        messages: dicts with a role of ROLES and a content, a text or None; an assistant may carry reasoning_content
        and tool_calls (then content may be absent). tools: JSON schemas. Other keywords reach the template.
        """
        messages = checked(messages)
        try:
            messages = [_with_reasoning(message) for message in map(plain, messages)]
            variables = self.variables | plain(template_kwargs) | {
                "messages": messages, "tools": _checked_tools(tools),
                "documents": plain(template_kwargs.get("documents")),
                "add_generation_prompt": bool(add_generation_prompt),
            }  # fmt: skip
            size = len(json.dumps(variables, ensure_ascii=False))
        except (RecursionError, TypeError, ValueError) as error:  # holds itself, a key that JSON cannot have, 10**9999
            raise TemplateError(f"messages, tools and options must be JSON values: {error}") from error
        with self._lock:
            return self._bounded(self._template.render, variables, work=self.work + 40 * size)

    def _bounded(self, function, argument, work):
        self._environment.budget = Budget(work, self.seconds)
        try:
            return function(argument)
        except Refused as error:
            raise TemplateError(f"the chat template was stopped: {error}", "it is broken or hostile") from error
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise TemplateError(f"the chat template is not valid jinja2, {where}") from error
        except (jinja2.exceptions.SecurityError, OverflowError) as error:
            raise TemplateError(f"the chat template was stopped: {error}", "it is broken or hostile") from error
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses this conversation: {error}") from error
        except RecursionError as error:
            raise TemplateError("the chat template was stopped: it nests or recurses too deeply",
                                "it is broken or hostile") from error  # fmt: skip
        except (Exception, MemoryError) as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error


def checked(messages) -> list[dict]:
    """Messages without their None fields (as transformers drops them); TemplateError names the first bad one."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError("there are no messages: a chat prompt needs a list of at least one")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise TemplateError(f"message {number} is a {type(message).__name__}, not a dict with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise TemplateError(f"message {number} has the role {role!r}, not one of {', '.join(ROLES)}")
        if "content" not in message and not (role == "assistant" and "tool_calls" in message):
            raise TemplateError(f"message {number} ({role}) has no content", 'content: "" is an empty one')
        if content is not None and not isinstance(content, str):
            raise TemplateError(f"message {number} ({role}) has a {type(content).__name__} as content, not text")
        if not isinstance(message.get("tool_calls") or [], (list, tuple)):
            raise TemplateError(f"message {number} ({role}): tool_calls is not a list")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _checked_tools(tools):
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise TemplateError("tools must be a list of JSON schemas (dicts)")
    return plain(list(tools))


def plain(value):
    """Rebuilt from exact JSON types, so that no object with methods of its own reaches the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return {str: str.__str__, int: int.__int__, float: float.__float__}[kind](value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else list(map(plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"<{type(value).__name__}>"


def _with_reasoning(message):
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment():
    environment = BoundedEnvironment(extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson  # jinja2's own escapes < and > for HTML
    environment.filters |= {"round": _round, "sum": _sum}
    environment.guard()
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now,
                            "dict": _TemplateDict(), "namespace": _TemplateNamespace}  # fmt: skip
    return environment


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _round(value, precision=0, method="common"):
    if abs(precision) > 400:  # |round multiplies by 10**precision; a float has 308 digits at most
        raise Refused(f"|round to {precision:,} digits")
    return jinja2.filters.do_round(value, precision, method)


@jinja2.pass_environment
def _sum(environment, iterable, attribute=None, start=0):
    if not isinstance(start, (int, float)):  # adding lists one by one copies the sum every time
        raise Refused("|sum adds numbers only")
    return jinja2.filters.sync_do_sum(environment, iterable, attribute, start)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(form):
    if len(form) > 1000:  # "%Y" gives two characters for one
        raise Refused(f"a date format has {len(form):,} characters, more than 1,000")
    return datetime.now().strftime(form)


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks assistant text for training masks; in a prompt it is transparent."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    def _through(self, caller):
        return caller()


class _TemplateDict:
    """`dict(...)` in a template, without the attributes of the class; few keys, because they may all collide."""

    KEYS = 5_000

    def __call__(self, *args, **kwargs):
        return dict(*map(self._few, args), **kwargs)

    def fromkeys(self, keys, value=None):
        return dict.fromkeys(self._few(keys), value)

    def _few(self, keys):
        keys = keys if isinstance(keys, Mapping) else list(keys)
        if len(keys) > self.KEYS:
            raise Refused(f"a dict of {len(keys):,} keys, more than {self.KEYS:,}")
        return keys


class _TemplateNamespace(jinja2.utils.Namespace):
    """`namespace(...)` in a template; names that begin with an underscore would reach into Python."""

    def __init__(*args, **kwargs):  # no named parameter, so that namespace(self=…) works
        fields = dict(*args[1:], **kwargs)
        for name in fields:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], fields)

    def __setitem__(self, name, value):
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name):
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the name {name!r}")
