"""Which functions a chat may call: the part that chat completions and responses share.

Tools that only OpenAI's own services run, such as web searches, are left out, and the log names
them. Agents offer those beside their functions without being asked.
"""

import logging
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


def tools_of(functions: list[dict], wish: Wish, parallel: bool) -> Tools:
    """The functions and the wish, checked against each other; else ApiError."""
    names = [one["name"] for one in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ApiError(400, f"tools has {min(twice)} twice", "tools")
    for name in (wish.function, *(wish.allowed or ())):
        if name is not None and name not in names:
            words = f"tool_choice names {quote(name)}, which is not one of the tools"
            raise ApiError(400, words, "tool_choice")
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
