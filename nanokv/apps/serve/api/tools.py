"""Which functions a chat may call: the part that chat completions and responses share.

Tools that only OpenAI's own services run, such as web searches, are left out, and the log names
them. Agents offer those beside their functions without being asked.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import WithJsonSchema

from nanokv.apps.serve.api.errors import ApiError
from nanokv.apps.serve.api.fields import Fields
from nanokv.apps.serve.api.messages import Tools
from weights_loader.strict import quote

logger = logging.getLogger(__name__)


class OtherTool(Fields):
    """A tool that is no function, as `web_search` and `custom`."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "function"}})]


def kind_of_tool(tool: Any) -> str:
    """The discriminator's tag of a tool."""
    if isinstance(tool, dict) and tool.get("type") != "function":
        return "<other>"
    return "<function>"


class Wish(NamedTuple):
    """A `tool_choice`: a mode, or the name of one function that must be called."""

    mode: str = "auto"  # none, auto or required
    function: str | None = None
    allowed: tuple[str, ...] | None = None  # the functions that may be called; None: all


def sent_functions(
    tools: Sequence[Any] | None, given: list[dict] | None, function: Callable[[dict], dict]
) -> list[dict]:
    """The functions as the client sent them, without null fields. Other tools are left out.

    tools: the checked tools; given: the same as the client sent them; function: the part of a given
    tool that describes the function.
    """
    found = []
    left_out = []
    for tool, sent in zip(tools or [], given or [], strict=True):
        if isinstance(tool, OtherTool):
            left_out.append(tool.type)
        else:
            found.append(without_null(function(sent)))
    note("tools", left_out)
    return found


def without_null(fields: dict) -> dict:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def names_of(functions: list[dict]) -> list[str]:
    """The names of the functions; ApiError if two are the same."""
    names = [one["name"] for one in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ApiError(400, f"tools has {min(twice)} twice", "tools")
    return names


def check_chosen(name: str | None, names: list[str]) -> None:
    """ApiError unless `tool_choice` names one of the functions."""
    if name not in names:
        words = f"tool_choice names {quote(str(name))}, which is not one of the tools"
        raise ApiError(400, words, "tool_choice")


def tools_of(functions: list[dict], wish: Wish, parallel: bool) -> Tools:
    """The functions and the wish, checked against each other; else ApiError."""
    names = names_of(functions)
    for name in (wish.function, *(wish.allowed or ())):
        if name is not None:
            check_chosen(name, names)
    if wish.function is not None:
        return Tools(tuple(functions), wish.function, True, parallel)
    allowed = None
    if wish.allowed is not None:
        allowed = frozenset(wish.allowed)
    nothing = not names or (allowed is not None and not allowed)
    if nothing and wish.mode == "required":
        raise ApiError(400, "tool_choice is required, and no tool is a function", "tool_choice")
    if nothing:
        return Tools(tuple(functions), "none", False, parallel)
    return Tools(tuple(functions), wish.mode, wish.mode == "required", parallel, allowed)


def note(what: str, left_out: list[str]) -> None:
    """Log the kinds of items or tools that were left out of the prompt."""
    if left_out:
        kinds = ", ".join(quote(kind) for kind in sorted(set(left_out))[:5])
        logger.info("left out: %d %s of type %s", len(left_out), what, kinds)
