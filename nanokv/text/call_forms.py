"""The form in which a chat template takes calls that were made before. Most need the arguments as an object, some print
them as they are and need a text; some read a content that is null without asking.

It is found by trying, as llama.cpp does (common/jinja/caps.cpp): a conversation with a call is rendered in each form,
and the first in which the prompt shows the arguments is taken.
"""

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from nanokv.errors import TemplateError
from nanokv.text.template import NULL, ChatTemplate
from weights_loader.strict import loads

KEY = "probe_argument"
CALL = {
    "id": "probe0001",
    "type": "function",
    "function": {"name": "probe", "arguments": {KEY: "probe"}},
}
PROBE = (
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "probe0001", "name": "probe", "content": "Done."},
    {"role": "assistant", "content": "It is done."},
    {"role": "user", "content": "Go on."},
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "Probes.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
# (of a message without content, of arguments).
Form = tuple[Callable[[dict], dict], Callable[[Any], Any]]


def fitted(template: ChatTemplate, messages: Sequence[dict]) -> list[dict]:
    """The messages as this template takes them: those of the assistant with arguments that are JSON, text or object,
    and with a content that is null. Other messages stay as they are."""
    needed = any(is_null(message) or calls_of(message) for message in messages)
    return written(messages, form_of(template)) if needed else list(messages)


@functools.lru_cache(maxsize=8)
def form_of(template: ChatTemplate) -> Form:
    """The first that shows a call; where none does, the first that renders."""
    forms = list(itertools.product((absent, null, empty), (as_object, as_text)))
    prompts = [probed(template, form) for form in forms]
    shown = [
        form
        for form, prompt in zip(forms, prompts, strict=True)
        if prompt and shows_arguments(prompt)
    ]
    rendered = [form for form, prompt in zip(forms, prompts, strict=True) if prompt]
    return next(iter(shown or rendered or forms))


def probed(template: ChatTemplate, form: Form) -> str:
    """The prompt of a conversation with a call; "" where the template refuses it."""
    try:
        return template.render(written(PROBE, form), TOOLS)
    except TemplateError:
        return ""


def shows_arguments(prompt: str) -> bool:
    """As JSON or in the template's own words; not escaped a second time, and not as Python writes an object."""
    return KEY in prompt and f'\\"{KEY}' not in prompt and f"'{KEY}'" not in prompt


# --- the forms --------------------------------------------------------------------------------------------------------


def written(messages: Sequence[dict], form: Form) -> list[dict]:
    """The messages in this form."""
    content, arguments = form
    return [with_arguments(content(one) if is_null(one) else one, arguments) for one in messages]


def is_null(message: Any) -> bool:
    """A message of the assistant without a text. What is no message is refused by the template."""
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and message.get("content") is None
    )


def calls_of(message: Any) -> list:
    """What the assistant has called."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return calls if isinstance(calls, list) else []


def absent(message: dict) -> dict:
    """A content that is null is left out, as transformers does it."""
    return message | {"content": None}


def null(message: dict) -> dict:
    """It is null in the template too."""
    return message | {"content": NULL}


def empty(message: dict) -> dict:
    """It is a text without a character."""
    return message | {"content": ""}


def with_arguments(message: dict, form: Callable[[Any], Any]) -> dict:
    """A message whose calls have their arguments in this form."""
    calls = calls_of(message)
    return (
        message | {"tool_calls": [with_argument(call, form) for call in calls]}
        if calls
        else message
    )


def with_argument(call: Any, form: Callable[[Any], Any]) -> Any:
    """One call; what has another shape is left to the template."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": form(function["arguments"])}}


def as_object(arguments: Any) -> Any:
    """The object that a JSON text stands for; what is none stays as it is."""
    try:
        found = loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def as_text(arguments: Any) -> Any:
    """JSON text; one that is given is kept letter for letter."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
