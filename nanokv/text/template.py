"""A checkpoint's chat template: messages in, prompt text out.

The text is byte for byte that of transformers' apply_chat_template (5.23:
utils/chat_template_utils.py). The template is untrusted code, so it runs in a separate process, in
a sandbox and within limits (render_process.py). Any failure in it is a TemplateError.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanokv.errors import TemplateError
from nanokv.text import render_process

Messages = Sequence[Mapping[str, Any]]  # checked here, so a caller may pass anything
Tools = Sequence[Mapping[str, Any]] | None
# Templates silently drop a message with an unknown role.
ROLES = ("system", "user", "assistant", "tool")
NULL = object()  # a content that is null in the template; None is left out, as in transformers
# Names for the same field. Templates read the first.
REASONING = ("reasoning_content", "thinking", "reasoning")


class LeftOut(TemplateError):
    """The rendered prompt lacks the tools or the tool_calls. `what` is "tools" or "tool_calls"."""

    def __init__(self, what: str, message: str, hint: str = ""):
        super().__init__(message, hint)
        self.what = what


class ChatTemplate:
    """One compiled template. `variables` (bos_token, eos_token …) are visible in every render."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str] | None = None,
        seconds: float = render_process.SECONDS,
    ):
        self.source = source
        self.variables = dict(variables or {})
        self.seconds = seconds
        render_process.answer_to(source, seconds=seconds)

    def render(
        self,
        messages: Messages,
        tools: Tools = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Prompt text of a conversation.

        messages: dicts with a role of ROLES and a content (text, None or NULL). An assistant
        message may have reasoning_content, and tool_calls (then content may be absent). tools: JSON
        schemas. Other keywords become variables of the template. All values are JSON values; a
        tuple becomes a list.

        Raises TemplateError if a message is malformed, or if the template fails or exceeds a limit.
        """
        messages = checked(messages)
        try:
            variables = self.variables | plain(template_kwargs)
            variables |= {
                "messages": [_with_reasoning(message) for message in map(plain, messages)],
                "tools": _checked_tools(tools),
                "documents": plain(template_kwargs.get("documents")),
                "add_generation_prompt": bool(add_generation_prompt),
            }
            values = json.dumps(variables)
        # A value that contains itself, a key that JSON cannot have, 10**9999.
        except (RecursionError, TypeError, ValueError) as error:
            raise TemplateError(
                f"messages, tools and options must be JSON values: {error}"
            ) from error
        return render_process.answer_to(self.source, values, self.seconds)

    def render_all(
        self,
        messages: Messages,
        tools: Tools = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """`render`, but LeftOut if the prompt does not depend on the tools or earlier tool_calls.

        A template silently ignores any value that it does not use.
        """
        text = self.render(messages, tools, add_generation_prompt, **template_kwargs)

        def same_without(messages: Messages, tools: Tools) -> bool:
            try:
                return text == self.render(
                    messages, tools, add_generation_prompt, **template_kwargs
                )
            except TemplateError:  # so the template does use the value
                return False

        if tools and same_without(messages, None):
            raise LeftOut(
                "tools",
                "the chat template of this model has no place for tools",
                "a model that was trained to call tools, or a template that shows them",
            )
        calls = any(
            message["role"] == "assistant" and message.get("tool_calls") for message in messages
        )
        if calls and same_without(without_calls(messages), tools):
            raise LeftOut("tool_calls", "the chat template of this model leaves tool_calls out")
        return text


def without_calls(messages: Messages) -> list[dict[str, Any]]:
    """The same messages without their tool_calls."""
    found = []
    for message in messages:
        message = {"content": None, **message}
        message.pop("tool_calls", None)
        found.append(message)
    return found


def checked(messages: Any) -> list[dict[str, Any]]:
    """Messages without fields that are None, which transformers drops too.

    TemplateError names the first malformed message.
    """
    if isinstance(messages, str | Mapping):
        content = "text" if isinstance(messages, str) else "…"
        raise TemplateError(
            f"a chat prompt needs a list of messages, got {str(messages)[:60]!r}",
            f'tokenizer.render([{{"role": "user", "content": {content}}}])',
        )
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TemplateError("there are no messages: a chat prompt needs a list of at least one")
    for number, message in enumerate(messages, 1):
        _check_message(number, message)
    return [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]


def _check_message(number: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise TemplateError(
            f"message {number} is a {type(message).__name__}, not a dict with role and content"
        )
    role = message.get("role")
    if role not in ROLES:
        raise TemplateError(
            f"message {number} has the role {role!r}, not one of {', '.join(ROLES)}"
        )
    if "content" not in message and not (role == "assistant" and "tool_calls" in message):
        raise TemplateError(
            f"message {number} ({role}) has no content", 'content: "" is an empty one'
        )
    content = message.get("content")
    if content not in (None, NULL) and not isinstance(content, str):
        raise TemplateError(
            f"message {number} ({role}) has content of type {type(content).__name__}, not text"
        )
    if not isinstance(message.get("tool_calls") or [], (list, tuple)):
        raise TemplateError(f"message {number} ({role}): tool_calls is not a list")


def _checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise TemplateError("tools must be a list of JSON schemas (dicts)")
    return plain(list(tools))


def plain(value: Any) -> Any:
    """The value rebuilt from plain JSON types, so that the template gets no object with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if value is NULL:
        return None
    if isinstance(value, str):
        return str.__str__(value)  # of the class: a subclass may define other methods
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(map(plain, value))
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
