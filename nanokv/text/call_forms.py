"""Find the form of earlier tool calls that a chat template expects.

Most templates need the arguments as an object. Some print them unchanged and need a JSON text. Some
read the content without checking for null.

The form is found by probing, as in llama.cpp (common/jinja/caps.cpp): a conversation with a call is
rendered in each form, and the first form whose prompt shows the arguments is used.
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
# (converts a message without content, converts arguments).
Form = tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[Any], Any]]


def fitted(template: ChatTemplate, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that this template expects.

    Only assistant messages with tool calls or without content change. Their arguments may be an
    object or a JSON text.
    """
    if not any(is_null(message) or calls_of(message) for message in messages):
        return list(messages)
    return written(messages, form_of(template))


@functools.lru_cache(maxsize=8)
def form_of(template: ChatTemplate) -> Form:
    """The first form that shows a call, else the first that renders, else the first of all."""
    forms = list(itertools.product((absent, null, empty), (as_object, as_text)))
    prompts = {form: probed(template, form) for form in forms}
    rendered = [form for form in forms if prompts[form]]
    shown = [form for form in rendered if shows_arguments(prompts[form])]
    best = shown or rendered or forms
    return best[0]


def probed(template: ChatTemplate, form: Form) -> str:
    """The prompt of a conversation with a call; "" if the template rejects it."""
    try:
        return template.render(written(PROBE, form), TOOLS)
    except TemplateError:
        return ""


def shows_arguments(prompt: str) -> bool:
    """Whether the prompt has the arguments, as JSON or in the template's notation.

    JSON that is escaped twice, or a Python dict's repr, does not count.
    """
    return KEY in prompt and f'\\"{KEY}' not in prompt and f"'{KEY}'" not in prompt


# --- the forms -----------------------------------------------------------------------------------


def written(messages: Sequence[dict[str, Any]], form: Form) -> list[dict[str, Any]]:
    """The messages in this form."""
    content, arguments = form
    found = []
    for message in messages:
        if is_null(message):
            message = content(message)
        found.append(with_arguments(message, arguments))
    return found


def is_null(message: Any) -> bool:
    """Whether this is an assistant message without content.

    Values that are not messages are rejected later, by `template.checked`.
    """
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and message.get("content") is None
    )


def calls_of(message: Any) -> list:
    """The tool calls of a message; [] if there are none."""
    if not isinstance(message, dict):
        return []
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def absent(message: dict[str, Any]) -> dict[str, Any]:
    """The content is left out, as transformers does with None."""
    return message | {"content": None}


def null(message: dict[str, Any]) -> dict[str, Any]:
    """The content is null in the template too."""
    return message | {"content": NULL}


def empty(message: dict[str, Any]) -> dict[str, Any]:
    """The content is the empty text."""
    return message | {"content": ""}


def with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """A message whose calls have their arguments in this form."""
    calls = calls_of(message)
    if not calls:
        return message
    return message | {"tool_calls": [with_argument(call, form) for call in calls]}


def with_argument(call: Any, form: Callable[[Any], Any]) -> Any:
    """One call with its arguments in this form. A call of another shape is returned unchanged."""
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": form(function["arguments"])}}


def as_object(arguments: Any) -> Any:
    """The object in a JSON text. A text that holds no object is returned unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = loads(arguments or "{}")
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def as_text(arguments: Any) -> Any:
    """The arguments as JSON text. A text is returned unchanged."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
